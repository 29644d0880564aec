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
from lrrn.certificates.radius import Certificate
from lrrn.network import LRRN
from lrrn.network.solution import Solution
from lrrn.qp import DEFAULT_TOL, row_norms

_UP = 1 + 1e-12
"""Factor that covers the rounding of the few scalar operations in this module."""


@final
@dataclass(frozen=True, eq=False)
class RootEnergies:
    """Bounds on s = sqrt(2 E) at x, and on its computed value at a perturbed input."""

    lower: Tensor  # (n,) float64: bound on the exact s at x from below
    upper: Tensor  # and from above
    below: Tensor  # (n,) float64: largest amount by which a later computation at x can fall below the exact s
    above: Tensor  # or exceed it
    slope: float  # growth of below and above per unit of perturbation
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
        low = (s - rounding).clamp(min=0.0).square() - (root_mu * errors.here).square() * _UP
        lower = low.clamp(min=0.0).sqrt() / _UP
        upper = (s + rounding) * _UP
        # at x + delta: |z'| is at most |z| plus the displacement of the exact activations plus the errors of both solves
        width = energy.operators[-1].norm() if energy.eliminated and y is None else 0.0
        growth = 1 + (1 + width) * errors.size_slope
        later = per_unit * (size + (1 + width) * (errors.here + errors.later)) + constant
        slope = per_unit * growth + root_mu * errors.slope
        above = (later + root_mu * errors.later) * _UP
        return cls(lower, upper, later * _UP, above, slope * _UP, energy_constant(net), solution.converged & provable)

    def at(self, eps: float, guarantee: str) -> tuple[Tensor, Tensor]:
        """Return bounds on s over all perturbations of norm at most ``eps``; 0 and infinity where nothing is certified."""
        reach = self.lipschitz * eps
        lower, upper = self.lower - reach, self.upper + reach
        if guarantee == "deployed":
            lower, upper = lower - self.below - self.slope * eps, upper + self.above + self.slope * eps
        lower = torch.where(self.converged, lower.clamp(min=0.0) / _UP, 0.0)
        return lower, torch.where(self.converged, upper * _UP, torch.inf)


def energy_constant(net: LRRN) -> float:
    """Return K, the proven Lipschitz constant of sqrt(2 E)."""
    norm = net.energy_snapshot(torch.float64).operators[0].norm()
    return math.sqrt(norm * norm + net.beta[0]) * _UP


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
    x = x.to(torch.float64)
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
    level = math.sqrt(2 * threshold)
    above, below, rate = roots.lower - level * _UP, level / _UP - roots.upper, roots.lipschitz
    if guarantee == "deployed":
        above, below, rate = above - roots.below, below - roots.above, rate + roots.slope
    radius = torch.maximum(above, below).clamp(min=0.0) / (rate * _UP) / _UP
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
    x = x.to(torch.float64)
    y = None if y is None else y.to(torch.float64)
    solution = net.infer(x, y, tol=tol, max_sweeps=max_sweeps)
    lower, upper = RootEnergies.of(net, x, solution, tol, y).at(eps, guarantee)
    return 0.5 * lower.square() / _UP, 0.5 * upper.square() * _UP


def certify_energies(
    net: LRRN, x: Tensor, *, guarantee: str = "deployed", tol: float | None = None, max_sweeps: int = 1000
) -> Certificate:
    """Certify the labels of a classifier that predicts the label of least clamped energy.

    Parameters
    ----------
    net : LRRN
        Label j stands for the output clamped to the j-th unit vector.
    x : Tensor of shape (n, d_0)
    guarantee, tol, max_sweeps
        As in :func:`lrrn.certify`.

    Returns
    -------
    Certificate
        ``margin`` and ``error_bound`` are in units of sqrt(2 E).
    """
    check_guarantee(guarantee)
    if net.sizes[-1] < 2:
        raise ValueError("a certificate compares labels, and this network has one output")
    tol = DEFAULT_TOL[torch.float64] if tol is None else tol
    x = x.to(torch.float64)
    energies, roots = _of_labels(net, x, tol, max_sweeps)
    table = torch.stack(energies, dim=-1)
    best = table.argmin(-1)
    lower, upper, below, above = (
        torch.stack([getattr(root, name) for root in roots], dim=-1) for name in ("lower", "upper", "below", "above")
    )

    def of_best(values: Tensor) -> Tensor:
        return values.gather(1, best[:, None])

    s = (2 * table).sqrt()
    margin = s.scatter(1, best[:, None], math.inf).amin(-1) - of_best(s)[:, 0]
    least, most = (t.scatter(1, best[:, None], math.inf).amin(-1) for t in (lower, upper))
    # the exact margin lies between these two
    error = torch.maximum(margin - (least - of_best(upper)[:, 0]), most - of_best(lower)[:, 0] - margin) * _UP
    slack = lower - of_best(upper)
    rate = 2 * roots[0].lipschitz
    if guarantee == "deployed":
        # sqrt(a^2 + b^2) <= a + b separates the error of the solve from the root
        slack = slack - below - of_best(above)
        rate = rate + 2 * max(root.slope for root in roots)
    slack = slack.scatter(1, best[:, None], math.inf)
    radius = (slack.amin(-1) / (rate * _UP)).clamp(min=0.0) / _UP
    converged = torch.stack([root.converged for root in roots], dim=-1).all(-1)
    radius = torch.where(converged & radius.isfinite(), radius, 0.0)
    return Certificate(best, margin, radius, torch.where(converged, error, math.inf), "energy", guarantee)


def _of_labels(net: LRRN, x: Tensor, tol: float, max_sweeps: int) -> tuple[list[Tensor], list[RootEnergies]]:
    """Return the energies of the output clamped to each label in turn, and bounds on their roots."""
    n_classes = net.sizes[-1]
    energies, roots = [], []
    for label in range(n_classes):
        target = x.new_zeros((len(x), n_classes))
        target[:, label] = 1
        solution = net.infer(x, target, tol=tol, max_sweeps=max_sweeps)
        energies.append(solution.energy)
        roots.append(RootEnergies.of(net, x, solution, tol, target))
    return energies, roots


def energy_margins(net: LRRN, x: Tensor, eps: float, max_sweeps: int = 1000) -> tuple[Tensor, Tensor]:
    """Return bounds on the margin of every label over all perturbations of Euclidean norm at most ``eps``.

    The margin of a label is the smallest other sqrt(2 E) minus its own, of the exact energies clamped to the labels.

    Parameters
    ----------
    net : LRRN
    x : float64 Tensor of shape (n, d_0)
    eps : float
        Size of the perturbation.
    max_sweeps : int, default=1000
        As in :meth:`LRRN.infer`.

    Returns
    -------
    lower, upper : float64 Tensor of shape (n, d_L)
        Infinite where the solve for the label did not converge.
    """
    roots = _of_labels(net, x, DEFAULT_TOL[torch.float64], max_sweeps)[1]
    low, high = (torch.stack(ends, -1) for ends in zip(*(root.at(eps, "exact") for root in roots), strict=True))
    own = torch.eye(len(roots), dtype=torch.bool, device=x.device)
    least, most = (ends[:, None, :].masked_fill(own, math.inf).amin(-1) for ends in (low, high))
    far = low.new_full((), math.inf)
    return torch.nextafter(least - high, -far), torch.nextafter(most - low, far)


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
