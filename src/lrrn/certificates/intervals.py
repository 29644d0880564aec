"""Certified intervals: the proven range of every output under perturbations of norm at most eps."""

from __future__ import annotations

import torch
from torch import Tensor

from lrrn.bounds.outputs import single_constants
from lrrn.certificates.errors import SolveErrors, check_guarantee
from lrrn.certificates.inputs import as_vectors
from lrrn.network import LRRN
from lrrn.network.solution import Solution
from lrrn.qp import DEFAULT_TOL


def output_interval(
    net: LRRN, x: Tensor, eps: float, *, guarantee: str = "deployed", tol: float | None = None, max_sweeps: int = 1000
) -> tuple[Tensor, Tensor]:
    """Return bounds on every output over all perturbations of Euclidean norm at most ``eps``.

    Parameters
    ----------
    net : LRRN
    x : Tensor of shape (n, d_0)
        Inputs of any dtype; solved in float64.
    eps : float
        Size of the perturbation; 0 gives the range due to the error of the solve alone.
    guarantee : {"deployed", "exact"}, default="deployed"
        Whether the range holds for the outputs that this library computes, or for those of the exact minimiser.
    tol, max_sweeps
        As in :meth:`LRRN.infer`.

    Returns
    -------
    lower, upper : float64 Tensor of shape (n, d_L)
        Infinite where the solve did not converge.
    """
    check_guarantee(guarantee)
    check_eps(eps)
    tol = DEFAULT_TOL[torch.float64] if tol is None else tol
    x = as_vectors(net, x)
    return interval_of_solution(net, x, net.infer(x, tol=tol, max_sweeps=max_sweeps), eps, guarantee, tol)


def check_eps(eps: float) -> None:
    """Raise ValueError if eps is negative or NaN."""
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0; got {eps}")


def interval_of_solution(
    net: LRRN, x: Tensor, solution: Solution, eps: float, guarantee: str, tol: float
) -> tuple[Tensor, Tensor]:
    """Compute :func:`output_interval` from a given solution of the free phase."""
    constants, errors = single_constants(net.energy_snapshot(torch.float64)), SolveErrors.of(net, x, solution, tol)
    reach = constants.rho * eps + constants.error * errors.here[:, None] + constants.rounding * errors.size[:, None]
    if guarantee == "deployed":
        size = errors.size + errors.size_slope * eps
        reach = reach + constants.error * (errors.later + errors.slope * eps)[:, None] + constants.rounding * size[:, None]
    # not a number where outputs that do not move meet a perturbation without limit
    reach = torch.where(solution.converged[:, None] & ~reach.isnan(), reach * (1 + 1e-12), torch.inf)
    allowed = net.intervals[-1]
    return (solution.output - reach).clamp(min=allowed.lo), (solution.output + reach).clamp(max=allowed.hi)
