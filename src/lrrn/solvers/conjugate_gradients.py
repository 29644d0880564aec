"""Conjugate gradients: for linear equations, and on the faces of a box between sweeps of coordinate descent."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from lrrn.kernels.constants import INSIDE
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.linalg.operator_hessian import Hessian
from lrrn.qp import BoxQP, kkt_residual, row_norms
from lrrn.runtime.threads import blas_threads, over_rows
from lrrn.solvers.base import Stepper, once_per_hessian
from lrrn.solvers.half_precision import layer_or_own

MIN_ROWS = 16
"""Smallest number of samples per thread."""
ITERATIONS, SWEEPS = 7, 5
"""Iterations of conjugate gradients on a face, and sweeps of coordinate descent after them, in turn."""


@final
class Conjugate(Stepper):
    """Conjugate gradients on a correction, in the dtype of the problem, preconditioned by the mean diagonal of each layer.

    Directions are kept from call to call and continue from the recomputed residual. On the CPU a sample stops when it has
    converged. A correction that is not finite is discarded.
    """

    def __init__(self, qp: BoxQP) -> None:
        self._weight = _preconditioner(qp.hessian)
        self._direction: Tensor | None = None

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        free = (qp.hi > qp.lo).to(z.dtype).expand(qp.n_samples, -1)
        left = free * -g
        size = row_norms(left)[:, None].clamp(min=torch.finfo(z.dtype).tiny)
        left.div_(size.to(z.dtype))
        kept = self._direction
        direction = left * self._weight if kept is None else kept.div_(size.to(z.dtype))
        # stop slightly below the threshold, so that the residual recomputed by the loop is below it too
        squared = (INSIDE * threshold[:, None] / size).square() if z.device.type == "cpu" else None
        used = torch.full((qp.n_samples,), sweeps, dtype=torch.int64, device=z.device)

        def work(rows: slice) -> None:
            part = (left[rows], direction[rows], free[rows], used[rows])
            limits = None if squared is None else squared[rows]
            moved = _iterate(qp.hessian, self._weight, *part, sweeps, limits)
            unit = size[rows].to(z.dtype)
            ahead = direction[rows].mul_(unit)
            finite = (moved.mul_(unit).isfinite() & ahead.isfinite()).all(-1, keepdim=True)
            z[rows] += torch.where(finite, moved, 0)
            direction[rows] = torch.where(finite, ahead, 0)

        in_parts(work, z)
        self._direction = direction
        return used

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        g = torch.empty_like(z)

        def work(rows: slice) -> None:
            torch.sub(qp.hessian.matmul(z[rows]), qp.q[rows], out=g[rows])

        in_parts(work, z)
        return g, row_norms(kkt_residual(z, g, qp.lo, qp.hi))

    def keep(self, rows: Tensor) -> None:
        if self._direction is not None:
            self._direction = self._direction[rows]


@final
class OnFaces(Stepper):
    """Sweeps of coordinate descent, and conjugate gradients on the face of the box that they reach, in turn.

    Sweeps find out which units are at a bound. With those fixed, the problem is linear, and conjugate gradients need fewer
    products than sweeps (as in Moré and Toraldo, 1991). Their correction is computed in float32. It is projected onto the box,
    and kept where it lowers the energy. The first call has sweeps only, and all calls end with sweeps.

    Parameters
    ----------
    qp : BoxQP
    descent : Stepper
        The sweeps.
    """

    def __init__(self, qp: BoxQP, descent: Stepper) -> None:
        self._descent, self._reached = descent, False
        self._hessian = _in_single(qp.matrix)
        self._weight = _preconditioner(self._hessian)

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        iterations = min(ITERATIONS, sweeps - 1) if self._reached else 0
        used = self._correct(qp, z, g, iterations, threshold) if iterations else 0
        self._reached = True
        return self._descent.advance(qp, z, g, sweeps - iterations, threshold) + used

    def _correct(self, qp: BoxQP, z: Tensor, g: Tensor, iterations: int, threshold: Tensor) -> Tensor:
        """Move the points on their faces, with their gradients; return the iterations spent."""
        used = torch.full((len(z),), iterations, dtype=torch.int64)
        lo, hi = (bound.expand_as(z) for bound in (qp.lo, qp.hi))
        size = row_norms(kkt_residual(z, g, lo, hi))[:, None].clamp(min=torch.finfo(z.dtype).tiny)
        squared = (INSIDE * threshold[:, None] / size).square().float()
        size = size.to(z.dtype)

        def work(rows: slice) -> None:
            at, slope, low, high, unit = z[rows], g[rows], lo[rows], hi[rows], size[rows]
            blocked = ((at <= low) & (slope > 0)).logical_or_((at >= high) & (slope < 0)).logical_or_(low >= high)
            free = (~blocked).float()
            left = free * (slope / unit).neg_().float()
            moved = _iterate(
                self._hessian, self._weight, left, left * self._weight, free, used[rows], iterations, squared[rows]
            )
            there = torch.clamp(at + moved.to(z.dtype) * unit, low, high)
            step = there - at
            bent = self._hessian.matmul((step / unit).float()).to(z.dtype) * unit
            lower = (step * (slope + 0.5 * bent)).sum(-1, keepdim=True) < 0  # also false where it is not a number
            z[rows] = torch.where(lower, there, at)
            g[rows] += torch.where(lower, bent, 0)

        in_parts(work, z)
        return used

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        return self._descent.check(qp, z)

    def keep(self, rows: Tensor) -> None:
        self._descent.keep(rows)


@once_per_hessian
def _in_single(h: BlockTridiagonal) -> BlockTridiagonal:
    # an object of its own, since a result must not refer to its owner
    factor = h.factor if h.dtype == torch.float32 else None
    return BlockTridiagonal(tuple(block.float() for block in h.diag), tuple(block.float() for block in h.sub), factor)


def _preconditioner(h: Hessian) -> Tensor:
    """Return the reciprocal of the mean diagonal of each layer, or of each unit's own where these differ much."""
    return torch.cat([layer_or_own(part) for part in h.split(h.diagonal)]).reciprocal()


def _iterate(
    h: Hessian, weight: Tensor, left: Tensor, direction: Tensor, free: Tensor, used: Tensor, sweeps: int, squared: Tensor | None
) -> Tensor:
    """Return the correction; update the remaining residual -g, the direction and the iteration counts in place.

    ``weight`` is the preconditioner, ``free`` is 1 for units that may move and 0 for others, and ``squared`` has the squared
    residuals at which samples stop.
    """
    moved = torch.zeros_like(left)
    before = (left * left * weight).sum(-1, keepdim=True)
    done = torch.zeros_like(before, dtype=torch.bool)
    for k in range(sweeps):
        product = h.matmul(direction).mul_(free)
        curvature = (direction * product).sum(-1, keepdim=True)
        # exact line search, so that the energy decreases even if conjugacy is lost to rounding
        step = (left * direction).sum(-1, keepdim=True).div_(torch.where(curvature > 0, curvature, 1))
        step.masked_fill_(done, 0)
        moved.addcmul_(direction, step)
        left.addcmul_(product, step, value=-1)
        now = (left * left * weight).sum(-1, keepdim=True)
        direction.mul_(now / torch.where(before > 0, before, 1)).addcmul_(left, weight)
        before = now
        if squared is not None:
            # non-finite samples cannot recover: stop them
            reached = ~((left * left).sum(-1, keepdim=True) > squared)
            used.masked_fill_((reached & ~done)[:, 0], k + 1)
            done |= reached
            if bool(done.all()):
                break
    return moved


def in_parts(work: Callable[[slice], None], z: Tensor, min_rows: int = MIN_ROWS) -> None:
    """Process all rows at once or, on the CPU, a part of them on each thread."""
    if z.device.type != "cpu":
        work(slice(None))
        return

    def part(start: int, stop: int) -> None:
        with torch.no_grad(), blas_threads(1):
            work(slice(start, stop))

    over_rows(part, len(z), min_rows)
