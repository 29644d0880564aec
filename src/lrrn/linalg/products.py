"""Products of float32 rows with a fixed matrix on the CPU, by the faster of the two libraries inside torch.

torch multiplies float32 matrices by MKL, which uses AVX-512 on Intel processors only. oneDNN, its library for convolutions,
uses it on every processor that has it, and takes half the time there.
"""

from __future__ import annotations

from functools import cache
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from lrrn.runtime.machine import cpu_vendor
from lrrn.runtime.precision import in_full_precision


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL, by what is known of the processor."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    return wide and cpu_vendor() not in ("", "GenuineIntel")


@final
class RightFactor:
    """A matrix by which rows are multiplied from the right, in the layout of the library that multiplies.

    Parameters
    ----------
    matrix : Tensor of shape (k, m)
        Must not change afterwards.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix
        suits = matrix.dtype == torch.float32 and matrix.device.type == "cpu" and onednn_is_faster()
        # oneDNN takes the transpose, as the weights of a linear layer
        self._weights = matrix.mT.contiguous().to_mkldnn() if suits else None

    def __reduce__(self) -> tuple[type[RightFactor], tuple[Tensor]]:
        """Support copying and pickling, of which oneDNN's layout has none."""
        return RightFactor, (self._matrix,)

    @in_full_precision
    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return ``rows @ matrix``, of shape (n, m)."""
        if self._weights is None:
            return torch.mm(rows, self._matrix, out=out)
        product = functional.linear(rows.to_mkldnn(), self._weights).to_dense()
        return product if out is None else out.copy_(product)
