"""Proven bounds on eigenvalues and norms, by verified Cholesky factorisation.

An estimate supplies a candidate, and a floating-point factorisation proves it. If A - c I = F F^T + R, then A has no eigenvalue
below c - |R|, whatever algorithm computed F. R is computed as well, and its rounding error is bounded. The proof therefore
relies on sums and products only, on any processor and device. All computations are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lrrn.linalg.blocks import BlockTridiagonal, gram

EPS = torch.finfo(torch.float64).eps
UNDERFLOW = 1e-300
"""Upper bound on the underflow error of a sum of squares of any length that fits into memory."""
DENSE_LIMIT = 512
"""Largest size for which estimates use a full eigenvalue decomposition; above it, they use subspace iteration."""


def margin(h: BlockTridiagonal, shift: float, error: float) -> float:
    """Return a shift c for which a factorisation of (h + shift I) - c I should prove that h + shift I is positive definite.

    The residual of a factorisation is about (n + 1) EPS / 2 times the trace at most (Rump, "Verification of positive
    definiteness", 2006); c is eight times that. ``error`` bounds the spectral norm of (exact matrix - stored matrix).
    """
    return _allowance(h, shift) + error


def _allowance(h: BlockTridiagonal, shift: float) -> float:
    """Return the largest residual norm of a factorisation that a proof allows."""
    trace = float(h.diagonal.abs().sum()) + abs(shift) * h.dim
    return 4 * (h.dim + 8) * EPS * trace


def is_positive_definite(h: BlockTridiagonal, shift: float = 0.0, error: float = 0.0) -> bool:
    """Whether every matrix within ``error`` of h + shift I is proven positive definite; False means "not proven"."""
    shifted = _shifted(h, shift, error)
    factor = shifted.cholesky()
    # in addition to the residual, the shift was rounded twice; a comparison with NaN is False
    rounding = 8 * EPS * (abs(shift) + error + float(shifted.diagonal.abs().max()))
    return bool(factor.ok) and factor.defect(shifted) + rounding < _allowance(h, shift)


def _shifted(h: BlockTridiagonal, shift: float, error: float) -> BlockTridiagonal:
    """Return (h + shift I) - c I, c the margin."""
    return h.plus_diagonal(torch.full((h.dim,), shift - margin(h, shift, error), dtype=h.dtype, device=h.device))


def smallest_eigenvalue(h: BlockTridiagonal, error: float = 0.0) -> float:
    """Return a proven lower bound on the smallest eigenvalue of a positive definite float64 matrix.

    Parameters
    ----------
    h : BlockTridiagonal
        The matrix as stored.
    error : float, default=0.0
        Bound on the spectral norm of (exact matrix - stored matrix); the result holds for the exact matrix.

    Returns
    -------
    float
        The bound; 0.0 if no positive bound could be proven, and then nothing can be certified.
    """
    estimate = estimate_smallest(h)
    candidate = estimate * (1 - 1e-6) - 2 * margin(h, estimate, error)
    while candidate > EPS * estimate > 0:
        if is_positive_definite(h, -candidate, error):
            return candidate
        candidate = 0.9 * candidate - margin(h, candidate, error)
    return 0.0


def largest_eigenvalue(h: BlockTridiagonal, error: float = 0.0) -> float:
    """Return a proven upper bound on the largest eigenvalue of a symmetric float64 matrix, known up to ``error``."""
    return _largest(h, error, is_positive_definite)


def largest_for_steps(h: BlockTridiagonal) -> float:
    """Return an upper bound on the largest eigenvalue for choosing step sizes; it is not proven.

    It only requires a factorisation to run to completion, which takes a third of the time of a proof.
    """
    return _largest(h, 0.0, lambda h, shift, error: bool(_shifted(h, shift, error).cholesky().ok))


def _largest(h: BlockTridiagonal, error: float, exceeds: Callable[[BlockTridiagonal, float, float], bool]) -> float:
    ceiling = float(h.row_sums().max()) * (1 + 8 * h.dim * EPS) + error
    if math.isnan(ceiling):  # entries overflowed, with both signs
        return math.inf
    estimate = estimate_largest(h)
    candidate = estimate * (1 + 1e-6) + 2 * margin(h, estimate, error)
    negated = h.negated()
    while candidate < ceiling:
        if exceeds(negated, candidate, error):
            return candidate
        candidate *= 1.02
    return ceiling


def spectral_norm(w: Tensor) -> float:
    """Return a proven upper bound on the largest singular value of a matrix; conversion to float64 is exact."""
    w = w.detach().to(torch.float64)
    if w.numel() == 0:
        return 0.0
    product, error = squared(w if w.shape[0] <= w.shape[1] else w.mT)
    return math.sqrt(largest_eigenvalue(product, error)) * (1 + 4 * EPS)


def squared(w: Tensor) -> tuple[BlockTridiagonal, float]:
    """Return W W^T of a float64 matrix as computed, and a proven bound on the norm of its rounding error."""
    # the rounding error is at most gamma_d |W|_F^2 in norm, plus the underflow of squares
    error = 2 * (w.shape[1] + 4) * EPS * float(w.square().sum())
    return BlockTridiagonal((gram(w),), ()), error + (UNDERFLOW if bool(w.any()) else 0.0)


def estimate_smallest(h: BlockTridiagonal) -> float:
    """Estimate the smallest eigenvalue of a positive definite matrix; not a bound. 0 if an entry overflowed."""
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
    """Estimate the largest eigenvalue; not a bound. Infinite if an entry overflowed."""
    if not h.is_finite():
        return math.inf
    if h.dim <= DENSE_LIMIT:
        return float(torch.linalg.eigvalsh(h.dense())[-1])
    basis = _start_basis(h)
    for _ in range(20):
        basis, _ = torch.linalg.qr(h.matmul(basis.mT.contiguous()).mT)
    return 1.01 * float(torch.linalg.eigvalsh(basis.mT @ h.matmul(basis.mT.contiguous()).mT)[-1])


def estimate_condition(h: BlockTridiagonal) -> float:
    """Estimate the condition number of a positive definite matrix; infinite if it is not, or if an entry overflowed."""
    if h.dim <= DENSE_LIMIT and h.is_finite():
        values = torch.linalg.eigvalsh(h.dense())
        smallest, largest = float(values[0]), float(values[-1])
    else:
        smallest, largest = estimate_smallest(h), estimate_largest(h)
    return largest / smallest if smallest > 0 else math.inf


def _start_basis(h: BlockTridiagonal) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(h.dim, 8, generator=generator, dtype=h.dtype).to(h.device)
