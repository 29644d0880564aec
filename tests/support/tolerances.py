"""All slack of the test suite, derived where it can be."""

from __future__ import annotations

import numpy as np
import torch

UNIT = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def rounding(size: float, n_operations: int, dtype: torch.dtype = torch.float64) -> float:
    """Rounding of a sum of ``n_operations`` terms whose absolute values add up to ``size``."""
    return 4 * n_operations * UNIT[dtype] * max(size, 1e-300)


def two_solves(r1, r2, mu: float):
    """Two points with KKT residuals r1 and r2 are at most (r1 + r2) / mu apart, mu being the smallest eigenvalue of H."""
    return (np.asarray(r1) + np.asarray(r2)) / mu


def oracle_noise(h: np.ndarray, z: np.ndarray) -> float:
    """How far an oracle that solves with H in float64 may be from the exact solution: condition number times rounding."""
    eigenvalues = np.linalg.eigvalsh(h)
    return 16 * len(h) * UNIT[torch.float64] * eigenvalues[-1] / eigenvalues[0] * (1 + float(np.abs(z).max(initial=0)))
