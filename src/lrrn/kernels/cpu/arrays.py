"""New arrays in kernels. Numba compiles several functions for each way to call ``np.zeros`` or ``np.full``."""

from __future__ import annotations

from typing import Any

import numpy as np

from lrrn.kernels.cpu.compiled import kernel


@kernel
def empty(rows: int, columns: int, like: Any) -> Any:
    """Return an array of shape (rows, columns) with the dtype of another array."""
    return np.empty((rows, columns), like.dtype)


@kernel
def zeros(rows: int, columns: int, like: Any) -> Any:
    """Return zeros of shape (rows, columns) with the dtype of another array."""
    out = empty(rows, columns, like)
    for i in range(rows):
        row = out[i]
        for j in range(columns):
            row[j] = 0
    return out


@kernel
def vector(length: int, like: Any) -> Any:
    """Return a vector with the dtype of another array."""
    return np.empty(length, like.dtype)


@kernel
def numbers(length: int) -> Any:
    """Return float64 numbers, which are zero."""
    out = np.empty(length, np.float64)
    for i in range(length):
        out[i] = 0
    return out


@kernel
def integers(length: int, value: int) -> Any:
    """Return int64 numbers, all of which are ``value``."""
    out = np.empty(length, np.int64)
    for i in range(length):
        out[i] = value
    return out
