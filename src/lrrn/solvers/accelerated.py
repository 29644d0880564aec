"""Projected gradient with momentum, for wide layers and for any torch device.

Coordinates are scaled by diag(H)^-1/2, so the step is 1 / (L H_jj) with L a bound on the largest eigenvalue of the scaled
Hessian. Momentum restarts sample by sample when it points uphill (O'Donoghue and Candes, 2015). Problems whose units are all
fixed or free, such as the adjoint, are linear equations; conjugate gradients solve them with a fraction of the products. On a
CUDA device the method is mixed precision: products in half precision, iterative refinement, and another scaling of the
variables; see :mod:`lrrn.solvers.half_precision` and, for convolutions, :mod:`lrrn.solvers.half_operators`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from lrrn.kernels.constants import INSIDE
from lrrn.linalg import verified
from lrrn.linalg.operator_hessian import Hessian, OperatorHessian
from lrrn.qp import BoxQP, kkt_residual, row_norms
from lrrn.runtime.threads import blas_threads, over_rows
from lrrn.solvers.base import Stepper, once_per_hessian, recompute
from lrrn.solvers.half_operators import ABOVE_ESTIMATE, OperatorSteps, fits_operators
from lrrn.solvers.half_precision import (
    LONGEST,
    Equations,
    Rows,
    Tiles,
    fits_in_rows,
    fits_on_chip,
    largest_by_squaring,
    layer_or_own,
)

MIN_ROWS, OPERATOR_ROWS = 16, 4
"""Smallest number of samples per thread, of matrices and of other operators."""


@final
class Accelerated:
    """Accelerated projected gradient, with one matrix product per iteration over the whole batch."""

    name = "accelerated"
    patience = 5

    def chunk(self, qp: BoxQP) -> int:
        """Return 24, or twice that where a residual check costs as much as many steps, or where steps check it themselves.

        A check without a matrix costs one step of them.
        """
        if fits_on_chip(qp):
            return 24
        if not qp.has_matrix:
            return 12
        return LONGEST if fits_in_rows(qp) or (qp.linear and qp.q.device.type == "cpu") else 24

    def obstacle(self, qp: BoxQP) -> str | None:
        """Return None: any device, any float type of at least 32 bits."""
        return None

    def begin(self, qp: BoxQP) -> Stepper:
        """Bound the spectrum of the Hessian and choose the method."""
        if fits_on_chip(qp):
            return Tiles(qp)
        if fits_in_rows(qp):
            return Equations(qp) if qp.linear else Rows(qp)
        if fits_operators(qp):
            return OperatorSteps(qp)
        return _Conjugate(qp) if qp.linear else _Momentum(qp)


@once_per_hessian
def diagonal_and_step(h: Hessian) -> tuple[Tensor, Tensor]:
    """Return diag(H) and the step of each unit, 1 / (L H_jj)."""
    if isinstance(h, OperatorHessian):
        # an estimate from below; steps that are too long by a few per cent still converge, and the loop judges the residual
        return h.diagonal, h.diagonal.reciprocal() / (h.estimate_largest(h.diagonal.rsqrt()) * ABOVE_ESTIMATE)
    if h.device.type == "cpu":
        double = h.to(torch.float64)
        largest: Any = verified.largest_for_steps(double.scaled(double.diagonal.rsqrt()))
    else:
        largest = largest_by_squaring(h.scaled(h.diagonal.rsqrt()).dense(), 4)
    # the float32 products of the iteration have a relative error of about 1e-6
    return h.diagonal, h.diagonal.reciprocal() / (largest * (1 + 1e-4))


@final
class _Momentum(Stepper):
    def __init__(self, qp: BoxQP) -> None:
        self._diagonal, self._step = diagonal_and_step(qp.hessian)
        self._ahead: Tensor | None = None
        self._t = torch.ones((qp.n_samples, 1), dtype=qp.q.dtype, device=qp.q.device)

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        ahead = z.clone() if self._ahead is None else self._ahead
        self._ahead = (self._compiled if z.device.type == "cpu" else self._on_device)(qp, z, ahead, sweeps)
        return torch.full((qp.n_samples,), sweeps, dtype=torch.int64, device=z.device)

    def _compiled(self, qp: BoxQP, z: Tensor, ahead: Tensor, sweeps: int) -> Tensor:
        """Compute the products with multithreaded BLAS, and the rest of a step in one compiled pass without synchronisation."""
        from lrrn.kernels.cpu.momentum import momentum_step

        lo, hi = (bound.expand(qp.n_samples, -1) for bound in (qp.lo, qp.hi))
        by_row = (qp.q, lo, hi), (z, ahead, self._t[:, 0])
        step, diagonal = self._step.numpy(), self._diagonal.numpy()

        def work(rows: slice) -> None:
            given, state = ([tensor[rows].numpy() for tensor in group] for group in by_row)
            for _ in range(sweeps):
                momentum_step(qp.hessian.matmul(ahead[rows]).numpy(), *given, step, diagonal, *state)

        # products of a matrix have BLAS threads of their own; those of operators are spread over samples
        if qp.has_matrix:
            work(slice(None))
        else:
            _in_parts(work, z, OPERATOR_ROWS)
        return ahead

    def _on_device(self, qp: BoxQP, z: Tensor, ahead: Tensor, sweeps: int) -> Tensor:
        here, t = z, self._t
        for _ in range(sweeps):
            new = qp.project(torch.addcmul(ahead, qp.gradient(ahead), self._step, value=-1))
            move = new - here
            uphill = ((ahead - new) * move * self._diagonal).sum(-1, keepdim=True) > 0
            t_new = torch.where(uphill, 1.0, 0.5 * (1 + (1 + 4 * t * t).sqrt()))
            weight = torch.where(uphill, 0.0, (t - 1) / t_new)
            ahead, here, t = torch.addcmul(new, weight, move), new, t_new
        z.copy_(here)
        self._t = t
        return ahead

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        return recompute(qp, z)

    def keep(self, rows: Tensor) -> None:
        self._t = self._t[rows]
        if self._ahead is not None:
            self._ahead = self._ahead[rows]


@final
class _Conjugate(Stepper):
    """Conjugate gradients on a correction, in the dtype of the problem, preconditioned by the mean diagonal of each layer.

    Directions are kept from call to call and continue from the recomputed residual. On the CPU a sample stops when it has
    converged. A correction that is not finite is discarded.
    """

    def __init__(self, qp: BoxQP) -> None:
        self._weight = torch.cat([layer_or_own(part) for part in qp.hessian.split(qp.hessian.diagonal)]).reciprocal()
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
            moved = self._iterate(qp, *part, sweeps, None if squared is None else squared[rows])
            unit = size[rows].to(z.dtype)
            ahead = direction[rows].mul_(unit)
            finite = (moved.mul_(unit).isfinite() & ahead.isfinite()).all(-1, keepdim=True)
            z[rows] += torch.where(finite, moved, 0)
            direction[rows] = torch.where(finite, ahead, 0)

        _in_parts(work, z)
        self._direction = direction
        return used

    def _iterate(
        self, qp: BoxQP, left: Tensor, direction: Tensor, free: Tensor, used: Tensor, sweeps: int, squared: Tensor | None
    ) -> Tensor:
        """Return the correction; update the remaining residual -g, the direction and the iteration counts in place."""
        moved = torch.zeros_like(left)
        before = (left * left * self._weight).sum(-1, keepdim=True)
        done = torch.zeros_like(before, dtype=torch.bool)
        for k in range(sweeps):
            product = qp.hessian.matmul(direction).mul_(free)
            curvature = (direction * product).sum(-1, keepdim=True)
            # exact line search, so that the energy decreases even if conjugacy is lost to rounding
            step = (left * direction).sum(-1, keepdim=True).div_(torch.where(curvature > 0, curvature, 1))
            step.masked_fill_(done, 0)
            moved.addcmul_(direction, step)
            left.addcmul_(product, step, value=-1)
            now = (left * left * self._weight).sum(-1, keepdim=True)
            direction.mul_(now / torch.where(before > 0, before, 1)).addcmul_(left, self._weight)
            before = now
            if squared is not None:
                # non-finite samples cannot recover: stop them
                reached = ~((left * left).sum(-1, keepdim=True) > squared)
                used.masked_fill_((reached & ~done)[:, 0], k + 1)
                done |= reached
                if bool(done.all()):
                    break
        return moved

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        g = torch.empty_like(z)

        def work(rows: slice) -> None:
            torch.sub(qp.hessian.matmul(z[rows]), qp.q[rows], out=g[rows])

        _in_parts(work, z)
        return g, row_norms(kkt_residual(z, g, qp.lo, qp.hi))

    def keep(self, rows: Tensor) -> None:
        if self._direction is not None:
            self._direction = self._direction[rows]


def _in_parts(work: Callable[[slice], None], z: Tensor, min_rows: int = MIN_ROWS) -> None:
    """Process all rows at once or, on the CPU, a part of them on each thread."""
    if z.device.type != "cpu":
        work(slice(None))
        return

    def part(start: int, stop: int) -> None:
        with torch.no_grad(), blas_threads(1):
            work(slice(start, stop))

    over_rows(part, len(z), min_rows)
