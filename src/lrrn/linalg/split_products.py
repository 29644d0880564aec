"""Products of float32 matrices on the tensor cores of a GPU, to five or six digits.

A number is split into a half-precision number and what that leaves out, again in half precision and times ``LOW``. The products
of the parts are summed in float32. The product of both second parts, below the last place of float32, is left out. Three
products on tensor cores take a fraction of the time of one in float32. Tensor cores add up less exactly: relative residuals of
2,048 units differ by about 1e-6 from those in float32. Entries above 65,504, the largest half-precision number, become
infinite; rows of samples are scaled, and weights that large are beyond float32 solves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrrn.runtime.devices import has_kernels

LOW = 2048.0
"""Factor on the second part, which brings it to the size of the first."""
LEAST, WIDEST = 512, 8192
"""Smallest and largest number of rows and of columns of a matrix that is split."""
MANY = 128
"""Smallest number of samples whose products are computed by parts: fewer take less time in float32."""
BLOCK, TILE = 1024, 32
"""Entries per Triton program, of a matrix that is split, and side of a tile of a matrix that is summed."""


class Halves(NamedTuple):
    """The two parts of a matrix."""

    high: Tensor
    low: Tensor

    @property
    def mT(self) -> Halves:
        """The parts of the transpose."""
        return Halves(self.high.mT, self.low.mT)


def splits(t: Tensor) -> bool:
    """Whether products of a tensor can be computed by parts; before torch 2.8, sums of half-precision products are rounded."""
    return t.dtype == torch.float32 and has_kernels(t) and hasattr(torch.ops.aten.mm, "dtype")


def halves(w: Tensor) -> Halves | None:
    """Return the parts of a matrix, or None if it is too small, or cannot be split."""
    if not (w.dim() == 2 and min(w.shape) >= LEAST and max(w.shape) <= WIDEST and splits(w)):
        return None
    w = w.contiguous()
    parts = Halves(*(torch.empty(w.shape, dtype=torch.float16, device=w.device) for _ in range(2)))
    _kernels().halves[(-(-w.numel() // BLOCK),)](w, *parts, w.numel(), LOW, BLOCK=BLOCK, num_warps=4)
    return parts


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of half-precision matrices in float32."""
    if not a.is_cuda:
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


def shifted_gram(w: Halves, shift: float, scale: float) -> Tensor:
    """Return shift I + scale W W^T, bitwise symmetric."""
    whole, mixed, n = product(w.high, w.high.mT), product(w.high, w.low.mT), len(w.high)
    out = torch.empty_like(whole)
    side = -(-n // TILE)
    _kernels().symmetric_sum[(side, side)](whole, mixed, out, n, LOW, shift, scale, TILE=TILE, num_warps=4)
    return out


def rows_times(rows: Tensor, matrix: Halves, constant: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """Return ``constant + alpha rows matrix``; the constant is one row, or nothing."""
    n, out = len(rows), rows.new_empty((len(rows), matrix.high.shape[1]))
    parts, size = split_rows(rows)
    both, rest = product(parts, matrix.high), product(parts[:n], matrix.low)
    added = out if constant is None else constant.contiguous()
    shape = row_shape(out.shape[1])
    _kernels().join[(n,)](both, rest, size, added, out, n, out.shape[1], LOW, alpha, ADDS=constant is not None, **shape)
    return out


def split_rows(rows: Tensor, unit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the first parts of all rows, then the second parts, and the sizes by which rows, over ``unit``, were divided."""
    n, dim = rows.shape
    parts, size = torch.empty((2 * n, dim), dtype=torch.float16, device=rows.device), rows.new_empty(n)
    arrays = (rows.contiguous(), size if unit is None else unit, parts, size)
    _kernels().split_rows[(n,)](*arrays, n, dim, LOW, SCALED=unit is not None, **row_shape(dim))
    return parts, size


def row_shape(dim: int) -> dict[str, int]:
    """Return the padded width of a row and the matching number of warps."""
    width = 1 << (dim - 1).bit_length()
    return {"WIDTH": width, "num_warps": 4 if width <= 512 else 8 if width <= 2048 else 16}


def _kernels() -> Any:
    """Import the kernels on first use: Triton is slow to import, and may be absent."""
    from lrrn.kernels.cuda import split_products

    return split_products
