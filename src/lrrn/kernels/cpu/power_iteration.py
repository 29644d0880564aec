"""Power iteration for the largest singular value of a small matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from lrrn.kernels.cpu.arrays import greater, vector
from lrrn.kernels.cpu.compiled import kernel
from lrrn.kernels.cpu.gemm import gemm


@kernel
def largest_singular(w: Any, v: Any, iterations: int) -> float:
    """Estimate the largest singular value of a C-contiguous matrix from below; ``v`` is the vector to start from, and out."""
    d, d_in = w.shape
    one, origin = w.dtype.type(1), np.int64(0)
    u = vector(d, v)
    for _ in range(iterations):
        gemm(1, d, d_in, one, v, origin, d_in, False, w, origin, d_in, True, one * 0, u, origin, d)
        gemm(1, d_in, d, one, u, origin, d, False, w, origin, d_in, False, one * 0, v, origin, d_in)
        size = greater(_norm(v), 1e-30)
        for j in range(d_in):
            v[j] = np.float64(v[j]) / size
    gemm(1, d, d_in, one, v, origin, d_in, False, w, origin, d_in, True, one * 0, u, origin, d)
    return _norm(u)


@kernel
def _norm(v: Any) -> float:
    total = 0.0
    for j in range(v.shape[0]):
        total += np.float64(v[j]) * np.float64(v[j])
    return np.sqrt(total)
