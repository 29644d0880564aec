"""Coordinate descent on the CPU: the paper's solver, compiled, over blocks of samples on several threads."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from lrrn.blocks import BlockTridiagonal
from lrrn.qp import BoxQP
from lrrn.threads import over_rows

PANEL = 8
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
        return _Descent(qp.hessian)


@final
class _Descent:
    def __init__(self, h: BlockTridiagonal) -> None:
        self._panels, self._layout = pack(h)
        self._inverse_diagonal = h.diagonal.reciprocal().numpy()

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        from lrrn.solvers._cd_numba import kernel

        used = torch.zeros(qp.n_samples, dtype=torch.int64)
        # a little inside the threshold, so that the loop's recomputed residual agrees
        squared = (0.9 * threshold).square().numpy()
        points, gradients, counts = z.numpy(), g.numpy(), used.numpy()
        lo, hi = (np.ascontiguousarray(bound.numpy()) for bound in (qp.lo, qp.hi))

        def work(start: int, stop: int) -> None:
            rows = slice(start, stop)
            bound_rows = rows if lo.shape[0] > 1 else slice(0, 1)
            kernel(_lanes(stop - start, z.dtype))(
                self._panels,
                self._layout,
                self._inverse_diagonal,
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


def pack(h: BlockTridiagonal) -> tuple[np.ndarray, np.ndarray]:
    """Lay the Hessian out as the kernel reads it.

    Returns
    -------
    panels : array of shape (total,)
        For each panel of up to ``PANEL`` units of one layer: the rows of that layer and its two neighbours, ``PANEL`` columns
        each, padded with zeros.
    layout : int64 array of shape (n_panels, 5)
        Offset in ``panels``, first unit, number of units, first row, last row.
    """
    pieces, layout = [], []
    offset, j0 = 0, 0
    for k, width in enumerate(h.sizes):
        band = [h.diag[k]]
        first, last = j0, j0 + width
        if k > 0:
            band.insert(0, h.sub[k - 1].mT)
            first -= h.sizes[k - 1]
        if k < len(h.sub):
            band.append(h.sub[k])
            last += h.sizes[k + 1]
        n_panels = -(-width // PANEL)
        columns = torch.cat(band)  # (last - first, width)
        columns = torch.nn.functional.pad(columns, (0, n_panels * PANEL - width))
        # (rows, panels * PANEL) -> (panels, rows, PANEL)
        pieces.append(columns.reshape(last - first, n_panels, PANEL).transpose(0, 1).reshape(-1))
        for p in range(n_panels):
            layout.append((offset, j0 + p * PANEL, min(PANEL, width - p * PANEL), first, last))
            offset += (last - first) * PANEL
        j0 += width
    return torch.cat(pieces).numpy(), np.array(layout, dtype=np.int64).reshape(-1, 5)
