"""Reference implementation: cyclic coordinate descent as in the paper, in plain NumPy and float64."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from lrrn.qp import BoxQP
from lrrn.solvers.base import Stepper, needs_matrix, recompute


@final
class Reference:
    """For each sample and each unit in turn: minimise over that unit alone, then update the gradient."""

    name = "reference"
    patience = 8

    def chunk(self, qp: BoxQP) -> int:
        """Return a small number: sweeps are slow."""
        return 8

    def obstacle(self, qp: BoxQP) -> str | None:
        """Return why the problem cannot be solved: any device and dtype, but it must have a matrix."""
        return needs_matrix(qp)

    def begin(self, qp: BoxQP) -> _ReferenceStepper:
        """Convert the Hessian to a dense matrix."""
        return _ReferenceStepper(qp.matrix.dense().detach().cpu().numpy().astype(np.float64))


@final
class _ReferenceStepper(Stepper):
    def __init__(self, h: np.ndarray) -> None:
        self._h = h

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        q, lo, hi = (t.detach().cpu().numpy().astype(np.float64) for t in (qp.q, qp.lo, qp.hi))
        lo, hi = np.broadcast_to(lo, q.shape), np.broadcast_to(hi, q.shape)
        for i in range(qp.n_samples):
            point = z[i].detach().cpu().numpy().astype(np.float64)
            gradient = self._h @ point - q[i]
            for _ in range(sweeps):
                for j in range(qp.dim):
                    new = min(max(point[j] - gradient[j] / self._h[j, j], lo[i, j]), hi[i, j])
                    step = new - point[j]
                    if step != 0:
                        point[j] = new
                        gradient += self._h[:, j] * step
            z[i] = torch.from_numpy(point).to(z)
        # rounding to the dtype of the batch must not leave the box
        z.copy_(qp.project(z))
        return torch.full((qp.n_samples,), sweeps, dtype=torch.int64, device=z.device)

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        return recompute(qp, z)

    def keep(self, rows: Tensor) -> None:
        pass
