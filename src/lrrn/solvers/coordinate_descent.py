"""Coordinate descent on the CPU: the paper's solver, compiled, over blocks of samples on several threads."""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from lrrn.blocks import BlockTridiagonal
from lrrn.qp import BoxQP
from lrrn.solvers.base import once_per_hessian
from lrrn.threads import over_rows

MIN_ROWS = 32
"""Samples below which a second thread does not pay."""


@final
class CoordinateDescent:
    """Gauss-Seidel sweeps with the gradient kept up to date; stops sample by sample on the KKT residual."""

    name = "coordinate_descent"
    chunk = 32
    patience = 4

    def obstacle(self, qp: BoxQP) -> str | None:
        """Need the CPU and a float32 or float64 problem."""
        if qp.q.device.type != "cpu":
            return f"its kernels run on the CPU and the problem is on {qp.q.device}; use solver='accelerated'"
        if qp.q.dtype not in (torch.float32, torch.float64):
            return f"its kernels take float32 or float64 and the problem is {qp.q.dtype}"
        return None

    def begin(self, qp: BoxQP) -> _Descent:
        """Pack the Hessian into panels."""
        return _Descent(pack(qp.hessian))


@final
class _Descent:
    def __init__(self, packed: _Packed) -> None:
        self._packed = packed

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        from lrrn.solvers._cd_numba import kernel

        used = torch.zeros(qp.n_samples, dtype=torch.int64)
        # a little inside the threshold, so that the loop's recomputed residual agrees
        squared = (0.9 * threshold.numpy()) ** 2
        points, gradients, counts = z.numpy(), g.numpy(), used.numpy()
        lo, hi = qp.lo.contiguous().numpy(), qp.hi.contiguous().numpy()

        def work(start: int, stop: int) -> None:
            rows = slice(start, stop)
            bound_rows = rows if lo.shape[0] > 1 else slice(0, 1)
            kernel(_lanes(stop - start, z.dtype))(
                *self._packed,
                lo[bound_rows],
                hi[bound_rows],
                squared[rows],
                sweeps,
                points[rows],
                gradients[rows],
                counts[rows],
            )

        over_rows(work, qp.n_samples, MIN_ROWS)
        return used

    def keep(self, rows: Tensor) -> None:
        pass


def _lanes(n_rows: int, dtype: torch.dtype) -> int:
    return 16 if n_rows <= 16 else 32 if n_rows <= 32 or dtype == torch.float64 else 64


class _Packed(NamedTuple):
    """The Hessian as the kernel reads it.

    ``panels`` holds, for each panel of up to ``PANEL`` units of one layer, the rows of that layer and its two neighbours,
    ``PANEL`` columns each, padded with zeros; ``layout`` says where each panel starts, its first unit, how many units it has,
    and its first and last row.
    """

    panels: np.ndarray
    layout: np.ndarray
    inverse_diagonal: np.ndarray


@once_per_hessian
def pack(h: BlockTridiagonal) -> _Packed:
    """Lay the Hessian out in panels."""
    from lrrn.solvers._cd_numba import PANEL, fill_panels

    layout = []
    offset, j0 = 0, 0
    for k, width in enumerate(h.sizes):
        first = j0 - (h.sizes[k - 1] if k > 0 else 0)
        last = j0 + width + (h.sizes[k + 1] if k < len(h.sub) else 0)
        for j in range(0, width, PANEL):
            layout.append((offset, j0 + j, min(PANEL, width - j), first, last))
            offset += (last - first) * PANEL
        j0 += width
    diagonal = h.diagonal
    panels = diagonal.new_zeros(offset).numpy()
    at = 0
    for k, block in enumerate(h.diag):
        below = h.sub[k - 1] if k > 0 else block[:, :0]
        above = h.sub[k] if k < len(h.sub) else block[:0]
        at = fill_panels(panels, at, *(t.contiguous().numpy() for t in (below, block, above)))
    return _Packed(panels, np.array(layout, dtype=np.int64).reshape(-1, 5), diagonal.reciprocal().numpy())
