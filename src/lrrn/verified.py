"""Eigenvalue and norm bounds that are proven, not estimated.

An estimate says where to look; a floating-point Cholesky factorisation then proves it (Rump, "Verification of positive
definiteness", 2006): if the factorisation of A - c I runs to completion with c at least its backward error
gamma_{n+1} / (1 - gamma_{n+1}) tr(A), then A is positive definite. Everything here computes in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrrn.blocks import BlockTridiagonal

EPS = torch.finfo(torch.float64).eps
DENSE_LIMIT = 512
"""Up to this size the estimate is a full eigenvalue decomposition, above it a subspace iteration."""


def cholesky_margin(h: BlockTridiagonal, shift: float, error: float) -> float:
    """Return a shift c for which a Cholesky factorisation of (h + shift I) - c I proves h + shift I positive definite.

    gamma_{n+1} is about (n + 1) EPS / 2; the factor of eight over that covers blocked summation orders and the rounding
    of the shift itself. ``error`` bounds the spectral norm of (matrix meant - matrix stored) and is added.
    """
    trace = float(h.diagonal.abs().sum()) + abs(shift) * h.dim
    return 4 * (h.dim + 8) * EPS * trace + error


def is_positive_definite(h: BlockTridiagonal, shift: float = 0.0, error: float = 0.0) -> bool:
    """Whether every matrix within ``error`` of h + shift I is proven positive definite; False means "not proven"."""
    total = shift - cholesky_margin(h, shift, error)
    if not math.isfinite(total):
        return False
    return bool(h.plus_diagonal(torch.full((h.dim,), total, dtype=h.dtype, device=h.device)).cholesky().ok)


def smallest_eigenvalue(h: BlockTridiagonal, error: float = 0.0) -> float:
    """Return a proven lower bound on the smallest eigenvalue of a positive definite float64 matrix.

    Parameters
    ----------
    h : BlockTridiagonal
        The matrix as stored.
    error : float, default=0.0
        A bound on the spectral norm of (matrix meant - matrix stored); the result holds for the matrix meant.

    Returns
    -------
    float
        The bound; 0.0 where no positive one could be proven, and then nothing can be certified.
    """
    estimate = estimate_smallest(h)
    candidate = estimate * (1 - 1e-6) - 2 * cholesky_margin(h, estimate, error)
    while candidate > EPS * estimate > 0:
        if is_positive_definite(h, -candidate, error):
            return candidate
        candidate = 0.9 * candidate - cholesky_margin(h, candidate, error)
    return 0.0


def largest_eigenvalue(h: BlockTridiagonal, error: float = 0.0) -> float:
    """Return a proven upper bound on the largest eigenvalue of a symmetric float64 matrix, known up to ``error``."""
    ceiling = float(h.row_sums().max()) * (1 + 8 * h.dim * EPS) + error
    estimate = estimate_largest(h)
    candidate = estimate * (1 + 1e-6) + 2 * cholesky_margin(h, estimate, error)
    negated = h.negated()
    while candidate < ceiling:
        if is_positive_definite(negated, candidate, error):
            return candidate
        candidate *= 1.02
    return ceiling


def spectral_norm(w: Tensor) -> float:
    """Return a proven upper bound on the largest singular value of a matrix, as given (any float type is exact here)."""
    w = w.detach().to(torch.float64)
    if w.numel() == 0:
        return 0.0
    thin = w if w.shape[0] <= w.shape[1] else w.mT
    # fl(W W^T) differs from W W^T by at most gamma_d |W|_F^2 in norm
    error = 2 * (thin.shape[1] + 2) * EPS * float(thin.square().sum())
    return math.sqrt(largest_eigenvalue(BlockTridiagonal((thin @ thin.mT,), ()), error)) * (1 + 4 * EPS)


def estimate_smallest(h: BlockTridiagonal) -> float:
    """Estimate the smallest eigenvalue of a positive definite matrix; no bound of any kind. 0 if an entry overflowed."""
    if not h.is_finite():
        return 0.0
    if h.dim <= DENSE_LIMIT:
        return float(torch.linalg.eigvalsh(h.dense())[0])
    factor = h.cholesky()
    if not bool(factor.ok):
        return 0.0
    basis = _start_basis(h)
    for _ in range(12):
        basis, _ = torch.linalg.qr(factor.solve(basis.mT).mT)
    return float(torch.linalg.eigvalsh(basis.mT @ h.matmul(basis.mT.contiguous()).mT)[0])


def estimate_largest(h: BlockTridiagonal) -> float:
    """Estimate the largest eigenvalue; no bound of any kind. Infinite if an entry overflowed."""
    if not h.is_finite():
        return math.inf
    if h.dim <= DENSE_LIMIT:
        return float(torch.linalg.eigvalsh(h.dense())[-1])
    basis = _start_basis(h)
    for _ in range(20):
        basis, _ = torch.linalg.qr(h.matmul(basis.mT.contiguous()).mT)
    return 1.01 * float(torch.linalg.eigvalsh(basis.mT @ h.matmul(basis.mT.contiguous()).mT)[-1])


def _start_basis(h: BlockTridiagonal) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(h.dim, 8, generator=generator, dtype=h.dtype).to(h.device)
