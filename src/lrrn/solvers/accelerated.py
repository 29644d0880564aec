"""Projected gradient with momentum, for wide layers and for any torch device.

Coordinates are scaled by diag(H)^-1/2, so the step is 1 / (L H_jj) with L a bound on the largest eigenvalue of the scaled
Hessian. Momentum restarts sample by sample when it points uphill (O'Donoghue and Candes, 2015). Problems whose units are all
fixed or free, such as the adjoint, are linear equations; conjugate gradients solve them with a fraction of the products. Large
batches of one wide layer on the CPU are solved on its dual, by :mod:`lrrn.solvers.dual`. On a CUDA device the method is mixed
precision: products in half precision, iterative refinement, and another scaling of the variables; see
:mod:`lrrn.solvers.half_precision` and, for convolutions, :mod:`lrrn.solvers.half_operators`.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from lrrn.linalg import verified
from lrrn.linalg.operator_hessian import Hessian, OperatorHessian
from lrrn.qp import BoxQP
from lrrn.solvers.base import Stepper, once_per_hessian, recompute
from lrrn.solvers.conjugate_gradients import Conjugate, in_parts
from lrrn.solvers.dual import BETWEEN_CHECKS, Dual, fits_dual
from lrrn.solvers.half_operators import ABOVE_ESTIMATE, OperatorSteps, fits_operators
from lrrn.solvers.half_precision import (
    LONGEST,
    Equations,
    Rows,
    Tiles,
    fits_in_rows,
    fits_on_chip,
    largest_by_squaring,
)

OPERATOR_ROWS = 4
"""Smallest number of samples per thread, of operators that are not a matrix."""


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
        if fits_dual(qp):
            return BETWEEN_CHECKS
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
        if fits_dual(qp):
            return Dual(qp)
        return Conjugate(qp) if qp.linear else _Momentum(qp)


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
            in_parts(work, z, OPERATOR_ROWS)
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
