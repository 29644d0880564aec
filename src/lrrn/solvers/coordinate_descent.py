"""Coordinate descent on the CPU: the paper's solver, compiled, over blocks of samples on several threads."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import final

import numpy as np
import torch
from torch import Tensor

from lrrn.kernels.constants import GAIN, INSIDE, LANES, SINGLE_ROUNDS, SMALLEST
from lrrn.kernels.cpu.arguments import PackedQP
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import BoxQP
from lrrn.runtime.threads import over_rows
from lrrn.solvers.base import Stepper, needs_matrix, once_per_hessian
from lrrn.solvers.conjugate_gradients import ITERATIONS, SWEEPS, OnFaces

Packed = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""The Hessian as the kernel reads it: the first four fields of :class:`~lrrn.kernels.cpu.arguments.PackedQP`."""
THREAD_WORK = 2**22
"""Smallest number of multiply-adds per sweep for which a second thread saves time."""
SINGLE_FROM = 2**17
"""Smallest number of multiply-adds per sweep for which mixed precision saves time, despite the residuals in between."""
FACES_FROM = 2**22
"""Smallest number of multiply-adds per sweep for which conjugate gradients on faces save time.

That is one layer of 2,048 units, or two of 1,024. One layer of 1,024 units does not gain, nor do many narrow layers, whose
Hessians are sparse.
"""


@final
class CoordinateDescent:
    """Gauss-Seidel sweeps that update the gradient incrementally and stop each sample by its KKT residual.

    Large float64 problems are solved in mixed precision. The first sweeps compute a correction in float32, with twice as many
    numbers per SIMD vector; gradients and residuals between these rounds are float64. Batches of up to eight samples fill only
    one vector of float64 and use no float32 sweeps. Their solutions may therefore differ, within the tolerance, from those in
    a larger batch.
    """

    name = "coordinate_descent"
    patience = 4

    def chunk(self, qp: BoxQP) -> int:
        """Return the number of sweeps that most samples need, or those between two corrections and the correction."""
        return SWEEPS + ITERATIONS if _has_faces(qp) else 32

    def obstacle(self, qp: BoxQP) -> str | None:
        """Return why the problem cannot be solved: it must be on the CPU, in float32 or float64, and have a matrix."""
        if qp.q.device.type != "cpu":
            return f"its kernels run on the CPU and the problem is on {qp.q.device}; use solver='accelerated'"
        if qp.q.dtype not in (torch.float32, torch.float64):
            return f"its kernels take float32 or float64 and the problem is {qp.q.dtype}"
        return needs_matrix(qp)

    def begin(self, qp: BoxQP, corrections: bool = True) -> Stepper:
        """Pack the Hessian into panels; without ``corrections`` every sweep is in the dtype of the problem."""
        packed = pack(qp.matrix)
        pays = corrections and packed[0].size >= SINGLE_FROM and qp.n_samples > LANES // 2 and qp.q.dtype == torch.float64
        descent = _Descent(packed, single(qp.matrix) if pays else None)
        return OnFaces(qp, descent) if corrections and _has_faces(qp) else descent


def _has_faces(qp: BoxQP) -> bool:
    """Whether sweeps alternate with conjugate gradients on faces, in float32: in wide layers whose Hessian fits into it."""
    work = panel_plan(qp.matrix.sizes)[3] if qp.has_matrix else 0
    return work >= FACES_FROM and (qp.q.dtype == torch.float32 or single(qp.matrix) is not None)


@final
class _Descent(Stepper):
    def __init__(self, packed: Packed, single: Packed | None) -> None:
        self._packed, self._single = packed, single
        self._rounds = 0
        self._norms = np.zeros(0)
        self._min_rows = max(LANES, THREAD_WORK // packed[0].size)

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        from lrrn.kernels.cpu.coordinate_descent import descend

        used = torch.zeros(qp.n_samples, dtype=torch.int64)
        # stop slightly below the threshold, so that the residual recomputed by the loop is below it too
        squared = (INSIDE * threshold.numpy()) ** 2
        packed, unit = self._packed, None
        if self._single is not None and self._rounds < SINGLE_ROUNDS:
            packed, unit = self._single, self._norms
            squared = np.maximum(INSIDE * threshold.numpy() / unit, GAIN) ** 2
        self._rounds += 1
        points, gradients, counts, lo, hi = z.numpy(), g.numpy(), used.numpy(), qp.lo.numpy(), qp.hi.numpy()

        def work(start: int, stop: int) -> None:
            rows = slice(start, stop)
            lanes = LANES // 2 if stop - start <= LANES // 2 and packed[0].dtype == np.float64 else LANES
            state = (points[rows], gradients[rows], counts[rows])
            descend(_phase(packed, lo, hi, rows), lanes, squared[rows], sweeps, None if unit is None else unit[rows], *state)

        over_rows(work, qp.n_samples, self._min_rows)
        return used

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        from lrrn.kernels.cpu.coordinate_descent import residuals

        g = torch.empty_like(z)
        norms = np.empty(qp.n_samples, np.float64)
        points, gradients, q, lo, hi = z.numpy(), g.numpy(), qp.q.contiguous().numpy(), qp.lo.numpy(), qp.hi.numpy()

        def work(start: int, stop: int) -> None:
            rows = slice(start, stop)
            residuals(_phase(self._packed, lo, hi, rows), q[rows], points[rows], gradients[rows], norms[rows])

        over_rows(work, qp.n_samples, self._min_rows)
        self._norms = norms
        return g, torch.from_numpy(norms)

    def keep(self, rows: Tensor) -> None:
        self._norms = self._norms[rows.numpy()]


def _phase(packed: Packed, lo: np.ndarray, hi: np.ndarray, rows: slice) -> PackedQP:
    """Return the problems of some rows as the kernel reads them."""
    return PackedQP(*packed, lo[rows], hi[rows]) if len(lo) > 1 else PackedQP(*packed, lo, hi)


@once_per_hessian
def pack(h: BlockTridiagonal) -> Packed:
    """Store the Hessian in panels, with every layer padded to whole panels."""
    from lrrn.kernels.cpu.coordinate_descent import fill_panels, invert_diagonal

    layout, place, n_padded, total = panel_plan(h.sizes)
    blocks = [block.contiguous().numpy() for block in h.diag]
    sub = [block.contiguous().numpy() for block in h.sub]
    panels = np.zeros(total, blocks[0].dtype)
    inverse_diagonal = np.zeros(n_padded, blocks[0].dtype)
    at, unit = 0, 0
    for k, block in enumerate(blocks):
        below = sub[k - 1] if k > 0 else block[:, :0]
        above = sub[k] if k < len(sub) else block[:0]
        at = fill_panels(panels, at, np.ascontiguousarray(below), block, above)
        unit = invert_diagonal(inverse_diagonal, unit, block)
    return panels, layout, inverse_diagonal, place


@once_per_hessian
def single(h: BlockTridiagonal) -> Packed | None:
    """Return the panels of a float64 Hessian in float32, or None if its diagonal is outside the range of float32."""
    panels, layout, inverse_diagonal, place = pack(h)
    inverse = inverse_diagonal[place]
    if not (np.all(inverse > SMALLEST) and np.all(inverse < 1 / SMALLEST)):
        return None
    return panels.astype(np.float32), layout, inverse_diagonal.astype(np.float32), place


@lru_cache(maxsize=64)
def panel_plan(sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Return the panel layout, the padded index of each unit, the padded number of units and the length of ``panels``."""
    from lrrn.kernels.cpu.vector_sweep import PANEL

    widths = [-(-width // PANEL) * PANEL for width in sizes]
    starts = [0, *accumulate(widths)]
    layout, offset = [], 0
    for k, width in enumerate(widths):
        first, last = starts[max(k - 1, 0)], starts[min(k + 2, len(widths))]
        for unit in range(starts[k], starts[k] + width, PANEL):
            layout.append((offset, unit, first, last - first))
            offset += (last - first) * PANEL
    place = np.concatenate([np.arange(start, start + size) for start, size in zip(starts[:-1], sizes, strict=True)])
    return np.array(layout, dtype=np.int64).reshape(-1, 4), place, starts[-1], offset
