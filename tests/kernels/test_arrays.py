"""New arrays in compiled code against NumPy's, and the lesser and the greater of two numbers against Python's."""

import numpy as np
import pytest
from numba import njit

from lrrn.kernels.cpu.arrays import empty, greater, integers, lesser, numbers, vector, zeros


@njit
def matrix(rows, columns, like):
    return empty(rows, columns, like)


@njit
def row(length, like):
    return vector(length, like)


@njit
def ends(a, b):
    return lesser(a, b), greater(a, b)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (4, 0), (0, 4)])
def test_new_arrays_are_those_of_numpy(shape, dtype):
    like = np.ones(2, dtype)
    for found, expected in (
        (matrix(*shape, like), np.empty(shape, dtype)),
        (zeros(*shape, like), np.zeros(shape, dtype)),
        (row(shape[0], like), np.empty(shape[0], dtype)),
        (numbers(shape[0]), np.zeros(shape[0])),
        (integers(shape[0], -1), np.full(shape[0], -1)),
    ):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.size == 0 or found.strides == expected.strides
        found[...] = np.arange(found.size).reshape(found.shape)
        assert np.array_equal(found.ravel(), np.arange(found.size))
    assert not zeros(*shape, like).any() and not numbers(3).any() and (integers(3, -1) == -1).all()


@pytest.mark.parametrize("pair", [(1, 2), (2, 1), (3, 3), (1.5, -2.5), (np.float32(1), np.float32(2)), (2, 0.5), (-1, 7)])
def test_lesser_and_greater_are_min_and_max(pair):
    assert ends(*pair) == (min(pair), max(pair))
