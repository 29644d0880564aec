"""Products of matrices in compiled code against NumPy's."""

import numpy as np
import pytest
from numba import njit

from lrrn.kernels.cpu.gemm import LEAST, SMALL, gemm


@njit
def product(alpha, a, a_transposed, b, b_transposed, beta, c):
    """C = alpha op(A) op(B) + beta C, where rows of A, B and C have a column more in front and one behind."""
    m, n = c.shape[0], c.shape[1] - 2
    k = a.shape[0] if a_transposed else a.shape[1] - 2
    gemm(
        m, n, k, alpha, a, 1, a.shape[1], a_transposed, b, 1, b.shape[1], b_transposed, beta, c, 1, c.shape[1]
    )  # fmt: skip


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("sizes", [(3, 2, 5), (100, 64, 784), (64, 784, 100), (17, 2 * SMALL // (17 * 50) + 1, 50), (0, 4, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_in_blocks_are_those_of_numpy(dtype, sizes, b_transposed, a_transposed):
    """Whole numbers, so that every order of summing gives the same; what is beside the result stays."""
    m, n, k = sizes
    rng = np.random.default_rng(0)

    def matrix(rows, columns):
        return rng.integers(-8, 9, (rows, columns + 2)).astype(dtype)

    a = matrix(k, m) if a_transposed else matrix(m, k)
    b = matrix(n, k) if b_transposed else matrix(k, n)
    c = matrix(m, n)
    inner_a, inner_b = a[:, 1:-1], b[:, 1:-1]
    expected = c.copy()
    expected[:, 1:-1] = 2 * (inner_a.T if a_transposed else inner_a) @ (inner_b.T if b_transposed else inner_b) - c[:, 1:-1]
    product(dtype(2), a, a_transposed, b, b_transposed, dtype(-1), c)
    assert np.array_equal(c, expected)


def test_some_of_these_products_are_cut():
    assert all(m * n * k > SMALL and SMALL // (min(m, n) * k) >= LEAST for m, n, k in [(100, 64, 784), (64, 784, 100)])
