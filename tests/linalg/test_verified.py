"""Oracle: matrices whose eigenvalues are known in closed form, and 60-digit arithmetic."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrrn.linalg import verified
from lrrn.linalg.blocks import BlockTridiagonal
from matrices import second_difference


@pytest.mark.parametrize("sizes", [(1,), (7,), (3, 4), (5, 2, 9, 1), (40,) * 20], ids=str)
def test_closed_form_spectrum(sizes):
    h = second_difference(sizes)
    n = sum(sizes)
    low, high = (2 - 2 * math.cos(k * math.pi / (n + 1)) for k in (1, n))
    assert 0.85 * low <= verified.smallest_eigenvalue(h) < low
    assert high < verified.largest_eigenvalue(h) <= 1.05 * high


def test_an_error_in_the_matrix_is_inside_the_bound():
    h = second_difference((6,))
    low = 2 - 2 * math.cos(math.pi / 7)
    assert verified.smallest_eigenvalue(h, error=0.05) <= low - 0.05
    assert verified.largest_eigenvalue(h, error=0.05) >= 4 - low + 0.05
    assert verified.smallest_eigenvalue(h, error=1.0) == 0.0


def test_nothing_is_claimed_of_singular_and_indefinite_matrices():
    ones = torch.ones(4, 4, dtype=torch.float64)
    assert verified.smallest_eigenvalue(BlockTridiagonal((ones,), ())) == 0.0
    assert verified.smallest_eigenvalue(BlockTridiagonal((ones - 2 * torch.eye(4, dtype=torch.float64),), ())) == 0.0
    assert not verified.is_positive_definite(BlockTridiagonal((ones,), ()))
    assert not verified.is_positive_definite(BlockTridiagonal((torch.full((2, 2), torch.nan, dtype=torch.float64),), ()))


@given(exponent=st.integers(-15, 0), n=st.integers(2, 8), seed=st.integers(0, 10_000))
@settings(max_examples=60)
def test_bounds_hold_at_any_conditioning(exponent, n, seed):
    """The stored float64 matrix is taken as exact; its extreme eigenvalues are computed with 60 digits."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(n, n)))
    dense = basis @ np.diag(np.logspace(exponent, 0, n)) @ basis.T
    dense = (dense + dense.T) / 2
    h = BlockTridiagonal((torch.from_numpy(dense),), ())
    with mpmath.workdps(60):
        eigenvalues = mpmath.eigsy(mpmath.matrix(dense.tolist()), eigvals_only=True)
        low, high = min(eigenvalues), max(eigenvalues)
        assert verified.smallest_eigenvalue(h) <= max(low, 0)
        assert verified.largest_eigenvalue(h) >= high


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), seed=st.integers(0, 10_000), scale=st.sampled_from([1e-9, 1.0, 1e9]))
@settings(max_examples=60)
def test_spectral_norm_is_above_the_true_one_and_close(rows, columns, seed, scale):
    w = scale * np.random.default_rng(seed).normal(size=(rows, columns))
    bound = verified.spectral_norm(torch.from_numpy(w))
    with mpmath.workdps(60):
        exact = max(mpmath.svd_r(mpmath.matrix(w.tolist()), compute_uv=False))
        assert exact <= bound <= exact * (1 + 1e-5)


def test_spectral_norm_of_float32_weights_is_that_of_their_exact_values():
    w = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    assert verified.spectral_norm(w) == verified.spectral_norm(w.double())


def test_spectral_norm_of_nothing_is_zero():
    assert verified.spectral_norm(torch.zeros(3, 0)) == 0.0 and verified.spectral_norm(torch.zeros(3, 4)) <= 1e-300


def test_block_cholesky_solves_shared_and_batched_systems():
    h = second_difference((3, 5, 2))
    rhs = torch.randn(4, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dense = h.dense()
    torch.testing.assert_close(h.cholesky().solve(rhs), torch.linalg.solve(dense, rhs.mT).mT)
    free = torch.rand(4, 10, generator=torch.Generator().manual_seed(1)) < 0.6
    batched = h.restricted(free).cholesky()
    assert batched.ok.all()
    answer = batched.solve(torch.where(free, rhs, 0.0))
    for i in range(4):
        f = free[i]
        expected = torch.zeros(10, dtype=torch.float64)
        expected[f] = torch.linalg.solve(dense[f][:, f], rhs[i, f])
        torch.testing.assert_close(answer[i], expected)


def test_block_algebra_against_dense():
    h = second_difference((3, 5, 2))
    dense = h.dense()
    z = torch.randn(4, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    d = torch.rand(10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(h.matmul(z), z @ dense)
    torch.testing.assert_close(h.scaled(d).dense(), d[:, None] * dense * d)
    torch.testing.assert_close(h.plus_diagonal(d).dense(), dense + torch.diag(d))
    torch.testing.assert_close(h.row_sums(), dense.abs().sum(1))
    torch.testing.assert_close(h.diagonal, dense.diagonal())
    assert h.frobenius() == pytest.approx(float(dense.norm()))


def test_a_wrong_estimate_is_not_believed(monkeypatch):
    """Whatever the estimate says, only what a factorisation proves is returned."""
    h = second_difference((6,))
    low = 2 - 2 * math.cos(math.pi / 7)
    monkeypatch.setattr(verified, "estimate_smallest", lambda h: 1.5 * low)
    assert 0.8 * low <= verified.smallest_eigenvalue(h) <= low
    monkeypatch.setattr(verified, "estimate_largest", lambda h: 0.5)
    assert 4 - low <= verified.largest_eigenvalue(h) <= 4.0 * (1 + 1e-12)


def test_clusters_of_eigenvalues_beyond_the_dense_limit():
    """A subspace iteration cannot separate a cluster; the bound must hold all the same."""
    n = verified.DENSE_LIMIT + 88
    spectrum = torch.cat(
        [torch.linspace(1.0, 1.05, 100, dtype=torch.float64), torch.linspace(2.0, 9.0, n - 100, dtype=torch.float64)]
    )
    h = BlockTridiagonal((torch.diag(spectrum),), ())
    assert 0.8 <= verified.smallest_eigenvalue(h) <= 1.0
    assert 9.0 <= verified.largest_eigenvalue(h) <= 9.3
