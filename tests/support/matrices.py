"""Matrices whose eigenvalues are known."""

from __future__ import annotations

import numpy as np
import torch

from lrrn.linalg.blocks import BlockTridiagonal


def second_difference(sizes) -> BlockTridiagonal:
    """2 on the diagonal, -1 beside it: eigenvalues 2 - 2 cos(k pi / (n + 1))."""
    n = sum(sizes)
    dense = 2 * torch.eye(n, dtype=torch.float64)
    dense -= torch.diag(torch.ones(n - 1, dtype=torch.float64), 1) + torch.diag(torch.ones(n - 1, dtype=torch.float64), -1)
    ends = np.cumsum([0, *sizes])
    diag = [dense[ends[k] : ends[k + 1], ends[k] : ends[k + 1]] for k in range(len(sizes))]
    sub = [dense[ends[k + 1] : ends[k + 2], ends[k] : ends[k + 1]] for k in range(len(sizes) - 1)]
    return BlockTridiagonal(tuple(diag), tuple(sub))
