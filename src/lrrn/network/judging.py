"""Convergence check of a solution that accounts for rounding errors."""

from __future__ import annotations

import torch
from torch import Tensor

from lrrn.energy import LiftedEnergy
from lrrn.qp import BoxQP, QPSolution

JUDGED_AT_ONCE = 2**13
"""Chunk size, in samples, for recomputing residuals of a float32 batch in float64."""


def judged(solved: QPSolution, qp: BoxQP, energy: LiftedEnergy, x: Tensor, y: Tensor | None, tol: float) -> QPSolution:
    """Revoke CONVERGED where the margin is below the rounding error; recheck failing float32 samples in float64."""
    if solved.z.numel() == 0:
        return solved
    solved = solved.doubted(tol * qp.scale - energy.rounding.noise(qp, x, solved.z, y))
    exact = energy.exact
    if exact is energy:
        return solved
    for rows in (~solved.converged).nonzero().squeeze(1).split(JUDGED_AT_ONCE):
        y_rows = None if y is None else y[rows].to(torch.float64)
        residual, limit = _exact_residual(exact, qp, x[rows].to(torch.float64), solved.z[rows].to(torch.float64), y_rows, tol)
        solved = solved.replaced(rows, residual, limit)
    return solved


def _exact_residual(
    exact: LiftedEnergy, qp: BoxQP, x: Tensor, z: Tensor, y: Tensor | None, tol: float
) -> tuple[Tensor, Tensor]:
    """Return the residuals of float32 solutions, computed in float64 from the exact weights, and their upper limits."""
    phase = exact.free(x) if y is None else exact.clamped(x, y)
    # use the bounds as rounded to float32: otherwise no solution could lie on a bound
    problem = BoxQP(phase.hessian, phase.q, qp.lo.to(torch.float64), qp.hi.to(torch.float64))
    return problem.residual(z), tol * problem.scale - exact.rounding.noise(problem, x, z, y)
