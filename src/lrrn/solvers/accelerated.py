"""Projected gradient with momentum, for wide layers and for any torch device.

Coordinates are scaled by diag(H)^-1/2, so the step is 1 / (L H_jj) with L a bound on the largest eigenvalue of the scaled
Hessian. Momentum restarts sample by sample when it points uphill (O'Donoghue and Candes, 2015). On a CUDA device the products
are in half precision, with refinement and units of their own: see :mod:`lrrn.solvers._half_precision`.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from lrrn import verified
from lrrn.blocks import BlockTridiagonal
from lrrn.qp import BoxQP
from lrrn.solvers._half_precision import LONGEST, Equations, Rows, Tiles, fits_in_rows, fits_on_chip, largest_by_squaring
from lrrn.solvers.base import Stepper, once_per_hessian, recompute


@final
class Accelerated:
    """One matrix product an iteration over the whole batch."""

    name = "accelerated"
    patience = 5

    def chunk(self, qp: BoxQP) -> int:
        """Return twice as many where a look at the residual, a product in full precision, costs as much as many steps."""
        return 24 if fits_on_chip(qp) or not fits_in_rows(qp) else LONGEST

    def obstacle(self, qp: BoxQP) -> str | None:
        """Return None: any device, any float type of at least 32 bits."""
        return None

    def begin(self, qp: BoxQP) -> Stepper:
        """Bound the spectrum."""
        if fits_on_chip(qp):
            return Tiles(qp)
        if fits_in_rows(qp):
            return Equations(qp) if qp.linear else Rows(qp)
        return _Momentum(qp)


@once_per_hessian
def diagonal_and_step(h: BlockTridiagonal) -> tuple[Tensor, Tensor]:
    """Return diag(H) and the step of each unit, 1 / (L H_jj)."""
    if h.device.type == "cpu":
        double = h.to(torch.float64)
        largest: Any = verified.largest_eigenvalue(double.scaled(double.diagonal.rsqrt()))
    else:
        largest = largest_by_squaring(h.scaled(h.diagonal.rsqrt()).dense(), 4)
    # the float32 products of the iteration deviate from exact ones by a relative 1e-6 or so
    return h.diagonal, h.diagonal.reciprocal() / (largest * (1 + 1e-4))


@final
class _Momentum:
    def __init__(self, qp: BoxQP) -> None:
        self._diagonal, self._step = diagonal_and_step(qp.hessian)
        self._ahead: Tensor | None = None
        self._t = torch.ones((qp.n_samples, 1), dtype=qp.q.dtype, device=qp.q.device)

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        ahead = z.clone() if self._ahead is None else self._ahead
        here, t = z, self._t
        for _ in range(sweeps):
            new = qp.project(torch.addcmul(ahead, qp.gradient(ahead), self._step, value=-1))
            move = new - here
            uphill = ((ahead - new) * move * self._diagonal).sum(-1, keepdim=True) > 0
            t_new = torch.where(uphill, 1.0, 0.5 * (1 + (1 + 4 * t * t).sqrt()))
            weight = torch.where(uphill, 0.0, (t - 1) / t_new)
            ahead, here, t = torch.addcmul(new, weight, move), new, t_new
        z.copy_(here)
        self._ahead, self._t = ahead, t
        return torch.full((qp.n_samples,), sweeps, dtype=torch.int64, device=z.device)

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        return recompute(qp, z)

    def keep(self, rows: Tensor) -> None:
        self._t = self._t[rows]
        if self._ahead is not None:
            self._ahead = self._ahead[rows]
