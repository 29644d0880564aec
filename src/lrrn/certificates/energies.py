"""Certified energies: how far the energy of an input can change under perturbations, and how robust its decisions are.

2 E(x) = min_z |A z - T(x)|^2 over a convex set with T affine, so sqrt(2 E(x)) is the distance of T(x) from a convex set. The
distance from a set is 1-Lipschitz in the point. So sqrt(2 E) is Lipschitz with the constant of T,
K = sqrt(a_0 (|W_0|_2^2 + beta_0)), in the free phase and in every clamped phase. Below, s stands for sqrt(2 E).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lrrn.certificates.errors import SolveErrors, check_guarantee
from lrrn.certificates.inputs import as_vectors
from lrrn.network import LRRN
from lrrn.network.solution import Solution
from lrrn.qp import DEFAULT_TOL, row_norms

UP = 1 + 1e-12
"""Factor that covers the rounding of the few scalar operations in this module."""


@final
@dataclass(frozen=True, eq=False)
class RootEnergies:
    """Bounds on s = sqrt(2 E) at x, and on its computed value at a perturbed input."""

    lower: Tensor  # (n,) float64: bound on the exact s at x from below
    upper: Tensor  # and from above
    here: Tensor  # (n,) float64: bound on |r| / sqrt(mu), r the residual of the solve at x
    solve: Tensor  # (n,) float64: the same for any later solve at x that reports convergence
    solve_slope: float  # growth of solve per unit of perturbation
    rounding: Tensor  # (n,) float64: bound on the rounding error of a later s computed at x
    rounding_slope: float  # growth of rounding per unit of perturbation
    lipschitz: float  # Lipschitz constant of the exact s
    converged: Tensor  # (n,) bool

    @classmethod
    def of(cls, net: LRRN, x: Tensor, solution: Solution, tol: float, y: Tensor | None = None) -> RootEnergies:
        """Bound the root energies of a float64 solution of the free or, with ``y``, the clamped phase."""
        energy = net.energy_snapshot(torch.float64)
        errors = SolveErrors.of(net, x, solution, tol, y)
        mu = energy.free_mu if y is None else energy.clamped_mu
        provable = mu > 0 and math.isfinite(errors.slope)
        root_mu = math.sqrt(mu) if 0 < mu < math.inf else 0.0  # mu is infinite without unknowns, where there are no errors
        # s is computed as a norm of residuals; its rounding error is relative to the size of the data and activations
        per_unit, constant = energy.rounding.root
        size = row_norms(x) + row_norms(torch.cat(solution.activations, dim=-1))
        rounding = per_unit * size + constant
        s = (2 * solution.energy.to(torch.float64)).sqrt()
        # 2 E(z*) <= 2 E(z) <= 2 E(z*) + |r|^2 / mu, and |r| / mu is within the error bound
        here = root_mu * errors.here * UP
        low = (s - rounding).clamp(min=0.0).square() - here.square() * UP
        lower = low.clamp(min=0.0).sqrt() / UP
        upper = (s + rounding) * UP
        # at x + delta: |z'| is at most |z| plus the displacement of the exact activations plus the errors of both solves
        width = energy.operators[-1].norm() if energy.eliminated and y is None else 0.0
        growth = 1 + (1 + width) * errors.size_slope
        later = (per_unit * (size + (1 + width) * (errors.here + errors.later)) + constant) * UP
        solve, solve_slope = root_mu * errors.later * UP, root_mu * errors.slope * UP
        converged = solution.converged & provable & s.isfinite()  # an energy beyond float64 bounds nothing from below
        return cls(lower, upper, here, solve, solve_slope, later, per_unit * growth * UP, energy_constant(net), converged)

    @property
    def below(self) -> Tensor:
        """Largest amount by which a later computation at x can fall below the exact s: activations are feasible."""
        return self.rounding

    @property
    def above(self) -> Tensor:
        """Largest amount by which a later computation at x can exceed the exact s."""
        return (self.rounding + self.solve) * UP

    @property
    def slope(self) -> float:
        """Growth of below and above per unit of perturbation."""
        return (self.rounding_slope + self.solve_slope) * UP

    def at(self, eps: float, guarantee: str) -> tuple[Tensor, Tensor]:
        """Return bounds on s over all perturbations of norm at most ``eps``; 0 and infinity where nothing is certified."""
        reach = self.lipschitz * eps
        lower, upper = self.lower - reach, self.upper + reach
        if guarantee == "deployed":
            lower, upper = lower - self.below - self.slope * eps, upper + self.above + self.slope * eps
        lower = torch.where(self.converged, lower.clamp(min=0.0) / UP, 0.0)
        return lower, torch.where(self.converged, upper * UP, torch.inf)


def energy_constant(net: LRRN) -> float:
    """Return K, the proven Lipschitz constant of sqrt(2 E)."""
    norm = net.energy_snapshot(torch.float64).operators[0].norm()
    return math.sqrt(norm * norm + net.beta[0]) * UP


def decision_radius(
    net: LRRN, x: Tensor, threshold: float, *, guarantee: str = "deployed", tol: float | None = None, max_sweeps: int = 1000
) -> Tensor:
    """Return the radius within which the free energy stays on its side of a threshold; 0 where nothing is certified.

    Parameters
    ----------
    net : LRRN
    x : Tensor of shape (n, d_0)
    threshold : float
        An energy.
    guarantee, tol, max_sweeps
        As in :func:`lrrn.certify`.

    Returns
    -------
    float64 Tensor of shape (n,)
    """
    tol = DEFAULT_TOL[torch.float64] if tol is None else tol
    x = as_vectors(net, x)
    check_threshold(threshold)
    return decide_solution(net, x, net.infer(x, tol=tol, max_sweeps=max_sweeps), threshold, guarantee, tol)


def check_threshold(threshold: float) -> None:
    """Raise ValueError if the threshold is NaN."""
    if math.isnan(threshold):
        raise ValueError("threshold must be an energy; got NaN, which no energy is above or below")


def decide_solution(net: LRRN, x: Tensor, solution: Solution, threshold: float, guarantee: str, tol: float) -> Tensor:
    """Compute :func:`decision_radius` from a given solution of the free phase."""
    check_guarantee(guarantee)
    roots = RootEnergies.of(net, x, solution, tol)
    if threshold < 0:  # every energy is above
        return torch.where(roots.converged, torch.inf, 0.0).to(x)
    level = math.sqrt(2) * math.sqrt(threshold)  # twice the threshold may overflow
    above, below, rate = roots.lower - level * UP, level / UP - roots.upper, roots.lipschitz
    if guarantee == "deployed":
        above, below, rate = above - roots.below, below - roots.above, rate + roots.slope
    radius = torch.maximum(above, below).clamp(min=0.0) / (rate * UP) / UP
    return torch.where(roots.converged, radius, 0.0)


def energy_interval(
    net: LRRN,
    x: Tensor,
    eps: float,
    y: Tensor | None = None,
    *,
    guarantee: str = "deployed",
    tol: float | None = None,
    max_sweeps: int = 1000,
) -> tuple[Tensor, Tensor]:
    """Return bounds on the energy over all perturbations of Euclidean norm at most ``eps``.

    Parameters
    ----------
    net : LRRN
    x : Tensor of shape (n, d_0)
        Inputs of any dtype; solved in float64.
    eps : float
        Size of the perturbation.
    y : Tensor of shape (n, d_L), optional
        Targets to clamp the output to; the free energy if not given.
    guarantee : {"deployed", "exact"}, default="deployed"
        Whether the bounds hold for the energies that this library computes, or for the exact ones.
    tol, max_sweeps
        As in :meth:`LRRN.infer`.

    Returns
    -------
    lower, upper : float64 Tensor of shape (n,)
        0 and infinity where the solve did not converge.
    """
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0; got {eps}")
    check_guarantee(guarantee)
    tol = DEFAULT_TOL[torch.float64] if tol is None else tol
    x = as_vectors(net, x)
    y = None if y is None else y.to(torch.float64)
    solution = net.infer(x, y, tol=tol, max_sweeps=max_sweeps)
    lower, upper = RootEnergies.of(net, x, solution, tol, y).at(eps, guarantee)
    return 0.5 * lower.square() / UP, 0.5 * upper.square() * UP


def certified_auroc(in_distribution: Tensor, out_of_distribution: Tensor) -> float:
    """Return a lower bound on the out-of-distribution AUROC of the energy when every input may be perturbed.

    Parameters
    ----------
    in_distribution : Tensor of shape (n,)
        Upper ends of the energy intervals of in-distribution inputs.
    out_of_distribution : Tensor of shape (m,)
        Lower ends of the energy intervals of out-of-distribution inputs.

    Returns
    -------
    float
        The share of pairs in which the out-of-distribution input has the higher energy under all perturbations; ties count
        half.
    """
    for name, energies in (("in_distribution", in_distribution), ("out_of_distribution", out_of_distribution)):
        if energies.numel() == 0 or bool(energies.isnan().any()):
            what = "it is empty" if energies.numel() == 0 else "it has NaN, which is neither above nor below an energy"
            raise ValueError(f"{name} must hold ends of energy intervals; {what}")
    order = in_distribution.sort().values
    under = torch.searchsorted(order, out_of_distribution, right=False).double()
    level = torch.searchsorted(order, out_of_distribution, right=True).double()
    return float(((under + level) / 2).mean() / len(in_distribution))
