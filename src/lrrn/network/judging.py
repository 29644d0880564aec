"""Whether an answer has converged, rounding allowed for."""

from __future__ import annotations

import torch
from torch import Tensor

from lrrn.energy import LiftedEnergy
from lrrn.qp import BoxQP, QPSolution

JUDGED_AT_ONCE = 2**13
"""Rows of a float32 batch whose residuals are computed again in float64 at a time."""


def judged(solved: QPSolution, qp: BoxQP, energy: LiftedEnergy, x: Tensor, y: Tensor | None, tol: float) -> QPSolution:
    """Take back what rounding may only have made to look converged; where float32 cannot tell, float64 decides."""
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
    """Return the residuals of float32 answers in float64, of the weights as they are, and how large they may be."""
    phase = exact.free(x) if y is None else exact.clamped(x, y)
    # the bounds are those that float32 can hold, or no answer could be on one
    problem = BoxQP(phase.hessian, phase.q, qp.lo.to(torch.float64), qp.hi.to(torch.float64))
    return problem.residual(z), tol * problem.scale - exact.rounding.noise(problem, x, z, y)
