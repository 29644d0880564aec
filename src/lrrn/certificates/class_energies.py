"""Certificates of labels of least clamped energy, and bounds on the margins of these labels.

Let D(x) = E_j(x) - E_i(x) be the difference of the energies clamped to two labels. The terms that are quadratic in x cancel:
for given activations D is affine in x. So the gradient of D has three bounds, from which a lower bound on D in a ball follows
(docs/theory/energies.md): it is |g| at x, it grows by at most kappa per unit of perturbation, and it is nowhere above rho_ij.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from lrrn import bounds
from lrrn.certificates.energies import UP, RootEnergies
from lrrn.certificates.errors import check_guarantee
from lrrn.certificates.inputs import as_vectors, check_network
from lrrn.certificates.radius import Certificate
from lrrn.energy import LiftedEnergy
from lrrn.linalg import verified
from lrrn.network import LRRN
from lrrn.network.solution import Solution
from lrrn.qp import DEFAULT_TOL, row_norms
from lrrn.runtime.lazy import once_per_owner

NUMBERS = 2**26
"""Largest number of entries of the gradients of all energies; larger batches are certified in parts."""
_LEAST = 1e-100
"""Positive lower limit of a curvature; with it, nothing is divided by zero."""

Polynomial = tuple[Tensor, ...]
"""Nonnegative coefficients of 1, |delta| and so on."""


@final
@dataclass(frozen=True, eq=False)
class ClampedEnergies:
    """Energies clamped to each label in turn, with bounds."""

    energy: Tensor  # (n, labels): as computed
    roots: RootEnergies  # tensors of shape (n, labels)
    gradient: list[Tensor]  # for each label (n, d_0): a_0 (1 + beta_0) W_0^T z_1
    gradient_error: Tensor  # (n, labels): bound on the norm of its rounding error

    @classmethod
    def of(cls, net: LRRN, x: Tensor, tol: float, max_sweeps: int) -> ClampedEnergies:
        """Solve the clamped phase of every label; ``x`` is in float64."""
        energies, roots, gradients, errors = [], [], [], []
        for solution, root in _solved(net, x, tol, max_sweeps):
            energies.append(solution.energy)
            roots.append(root)
            gradient, error = _gradient(net.energy_snapshot(torch.float64), solution)
            gradients.append(gradient)
            errors.append(error)
        return cls(torch.stack(energies, -1), _side_by_side(roots), gradients, torch.stack(errors, -1))

    def slopes(self, best: Tensor) -> Tensor:
        """Return bounds on the norms of the gradients of E_j - E_best at x, of shape (n, labels)."""
        own = torch.zeros_like(self.gradient[0])
        for label, gradient in enumerate(self.gradient):
            own = torch.where((best == label)[:, None], gradient, own)
        lengths = torch.stack([row_norms(gradient - own) for gradient in self.gradient], -1)
        rounding = 2 * (own.shape[1] + 8) * verified.EPS
        return (lengths * (1 + rounding) + self.gradient_error + self.gradient_error.gather(1, best[:, None])) * UP


def _solved(net: LRRN, x: Tensor, tol: float, max_sweeps: int) -> Iterator[tuple[Solution, RootEnergies]]:
    """Solve with the output clamped to each label in turn."""
    for label in range(net.sizes[-1]):
        target = x.new_zeros((len(x), net.sizes[-1]))
        target[:, label] = 1
        solution = net.infer(x, target, tol=tol, max_sweeps=max_sweeps)
        yield solution, RootEnergies.of(net, x, solution, tol, target)


def _gradient(energy: LiftedEnergy, solution: Solution) -> tuple[Tensor, Tensor]:
    """Return a_0 (1 + beta_0) W_0^T z_1, minus the part of the energy's gradient in x that depends on z, and its error."""
    scale, first = energy.discounts[0] * (1 + energy.beta[0]), solution.activations[0]
    error = 2 * scale * energy.rounding.inner * energy.operators[0].size
    return energy.operators[0].adjoint(first) * scale, error * row_norms(first) * UP


def _side_by_side(roots: list[RootEnergies]) -> RootEnergies:
    """Return the bounds of several labels in columns."""
    return _with(roots[0], lambda name: torch.stack([getattr(root, name) for root in roots], dim=-1))


def _with(roots: RootEnergies, tensor: Callable[[str], Tensor]) -> RootEnergies:
    """Return bounds with other tensors, given by name. The slopes, which are constants of the network, stay."""
    lower, upper, here, solve, rounding = (tensor(name) for name in ("lower", "upper", "here", "solve", "rounding"))
    converged = tensor("converged")
    return replace(roots, lower=lower, upper=upper, here=here, solve=solve, rounding=rounding, converged=converged)


@once_per_owner
def difference_constants(energy: LiftedEnergy) -> Tensor:
    """Return proven Lipschitz constants of the differences of two clamped energies, of shape (labels, labels).

    The derivative of a clamped energy in its target depends on x through z_{L-1} only, which is Lipschitz in x.
    """
    operator, labels = energy.operators[-1], energy.sizes[-1]
    rows = operator.adjoint(torch.eye(labels, dtype=torch.float64, device=energy.weights[0].device)).detach()
    # the mode by inner products suffers from cancellation
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    error = 4 * (energy.rounding.inner + (rows.shape[1] + 8) * verified.EPS) * operator.size + math.sqrt(verified.UNDERFLOW)
    features = float(bounds.spectral(energy.operators[:-1], energy.beta[:-1]))
    return (distances + error) * (energy.discounts[-1] * (1 + energy.beta[-1]) * features * UP)


def curvature(energy: LiftedEnergy) -> float:
    """Return kappa, a proven bound on the growth of the gradient of a difference of two clamped energies."""
    if energy.n_layers == 1:  # without unknowns, differences are affine
        return _LEAST
    beta, norm = energy.beta[0], energy.operators[0].norm()
    square = norm * norm
    return max(energy.discounts[0] * (1 + beta) ** 2 * square / (1 + beta * square) * UP, _LEAST)


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
        ``margin`` and ``error_bound`` are in units of sqrt(2 E). The radius comes from bounds on differences of energies.
    """
    check_network(net)
    check_guarantee(guarantee)
    if net.sizes[-1] < 2:
        raise ValueError("a certificate compares labels, and this network has one output")
    tol = DEFAULT_TOL[torch.float64] if tol is None else tol
    rows = max(1, NUMBERS // (net.sizes[0] * net.sizes[-1]))
    parts = [_certified(net, part, guarantee, tol, max_sweeps) for part in as_vectors(net, x).split(rows)]
    names = ("prediction", "margin", "radius", "error_bound")
    columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return Certificate(**columns, method="energy", guarantee=guarantee, by_products=False)


def _certified(net: LRRN, x: Tensor, guarantee: str, tol: float, max_sweeps: int) -> Certificate:
    """Certify one part of a batch."""
    clamped = ClampedEnergies.of(net, x, tol, max_sweeps)
    best = clamped.energy.argmin(-1)
    radius = _without(_radii(net, clamped, best, guarantee), best).amin(-1)
    converged = clamped.roots.converged.all(-1)
    margin, error = _margin(clamped, best)
    return Certificate(
        best, margin, torch.where(converged, radius, 0.0), torch.where(converged, error, math.inf), "energy", guarantee
    )


def _margin(clamped: ClampedEnergies, best: Tensor) -> tuple[Tensor, Tensor]:
    """Return the margin of the label in units of sqrt(2 E), and a bound on its error."""
    s, roots, own = (2 * clamped.energy).sqrt(), clamped.roots, best[:, None]
    margin = _without(s, best).amin(-1) - s.gather(1, own)[:, 0]
    # the exact margin lies between these two
    least = _without(roots.lower, best).amin(-1) - roots.upper.gather(1, own)[:, 0]
    most = _without(roots.upper, best).amin(-1) - roots.lower.gather(1, own)[:, 0]
    return margin, torch.maximum(margin - least, most - margin) * UP


def _without(values: Tensor, best: Tensor) -> Tensor:
    """Return the values of the rivals; infinite for the label itself."""
    return values.scatter(1, best[:, None], math.inf)


def _radii(net: LRRN, clamped: ClampedEnergies, best: Tensor, guarantee: str) -> Tensor:
    """Return the radii within which the label has less energy than each rival, of shape (n, labels)."""
    energy, rival = net.energy_snapshot(torch.float64), clamped.roots
    own = _with(rival, lambda name: getattr(rival, name).gather(1, best[:, None]))
    # the roots approach each other at twice the Lipschitz constant of one of them
    gap, rate = rival.lower - own.upper, 2 * rival.lipschitz
    if guarantee == "deployed":
        # sqrt(a^2 + b^2) <= a + b separates the error of the solve from the root
        gap, rate = gap - rival.below - own.above, rate + 2 * rival.slope
    by_roots = gap / (rate * UP) / UP
    steepest, growth = difference_constants(energy)[best], curvature(energy)
    # less what the squares in four energies lose by underflow
    lead = 0.5 * (rival.lower.square() / UP - own.upper.square() * UP) - 4 * verified.UNDERFLOW
    zero = torch.zeros_like(lead)
    errors = _later_errors(own, rival) if guarantee == "deployed" else (zero, zero, zero)
    slope = (clamped.slopes(best) + math.sqrt(growth) * rival.here) * UP
    by_differences = _first_zero(lead, slope, growth, steepest, errors)
    return torch.maximum(*(torch.nan_to_num(r, nan=0.0, posinf=0.0).clamp(min=0.0) for r in (by_roots, by_differences)))


def _later_errors(own: RootEnergies, rival: RootEnergies) -> Polynomial:
    """Bound the errors of a difference of energies computed at x + delta, as a polynomial in |delta|.

    With s the exact root, tau the rounding of a root and r the residual, a computed energy is at least s^2 / 2 - tau s, and at
    most s^2 / 2 + |r|^2 / (2 mu) + tau (s + |r| / sqrt(mu) + tau).
    """
    fast = own.lipschitz
    rounding, solve = (own.rounding, own.rounding_slope), (own.solve, own.solve_slope)
    size = own.upper + own.solve + own.rounding, fast + own.solve_slope + own.rounding_slope
    parts = (
        _product((rival.rounding, rival.rounding_slope), (rival.upper, fast)),
        _product(rounding, size),
        _product(solve, solve),
    )
    return tuple((a + b + c) * UP for a, b, c in zip(*parts, strict=True))


def _product(p: tuple[Tensor, float], q: tuple[Tensor, float]) -> Polynomial:
    """Multiply two polynomials of degree one."""
    return p[0] * q[0], p[0] * q[1] + p[1] * q[0], torch.full_like(p[0], p[1] * q[1])


def _first_zero(lead: Tensor, slope: Tensor, growth: float, steepest: Tensor, errors: Polynomial) -> Tensor:
    """Return the distance up to which a lead stays positive, with errors subtracted.

    The lead falls at the rate ``slope`` at first, which grows by ``growth`` per unit of distance up to ``steepest``.
    """
    constant, linear, square = errors
    near = _positive_root(lead - constant, slope + linear, growth / 2 + square)
    left = (steepest - slope).clamp(min=0.0)
    turn = left / growth
    far = _positive_root(lead + turn * (left - growth / 2 * turn) - constant, steepest + linear, square)
    return torch.where(far > turn, far, near)


def _positive_root(c: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Return r >= 0, rounded down, such that c - b t - a t^2 is positive for 0 <= t < r; ``a`` and ``b`` are not negative."""
    c = c.clamp(min=0.0)
    # not the root of b^2 + 4 a c: if the square underflows, the result is twice too large
    return 2 * c / (b + torch.hypot(b, 2 * a.sqrt() * c.sqrt())) / UP


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
    roots = [root for _, root in _solved(net, x, DEFAULT_TOL[torch.float64], max_sweeps)]
    low, high = _side_by_side(roots).at(eps, "exact")
    own = torch.eye(net.sizes[-1], dtype=torch.bool, device=x.device)
    least, most = (ends[:, None, :].masked_fill(own, math.inf).amin(-1) for ends in (low, high))
    far = low.new_full((), math.inf)
    return torch.nextafter(least - high, -far), torch.nextafter(most - low, far)
