"""Symmetric block-tridiagonal matrices: the structure of every Hessian in this package.

Time and memory depend on the sizes of the blocks, not on the square of the total number of units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final, overload

import torch
from torch import Tensor

from lrrn.linalg.products import RightFactor
from lrrn.runtime.lazy import lazy
from lrrn.runtime.precision import in_full_precision

PANEL = 256
"""Number of rows of a factor per step of the residual computation."""


@in_full_precision
def gram(w: Tensor) -> Tensor:
    """Return W W^T of shape (..., d, d), bitwise symmetric, unlike a plain matrix product on some processors."""
    return symmetrised(w @ w.mT) if w.shape[-1] > 1 else w * w.mT


def shifted_gram(w: Tensor, shift: float, scale: float) -> Tensor:
    """Return shift I + scale W W^T, bitwise symmetric."""
    block = gram(w).mul_(scale) if scale else w.new_zeros((w.shape[0], w.shape[0]))
    block.diagonal().add_(shift)
    return block


def symmetrised(block: Tensor) -> Tensor:
    """Return the mean of a block and its transpose: floating-point addition commutes, so the result is exactly symmetric."""
    return torch.add(block, block.mT).mul_(0.5)


def _norm(block: Tensor) -> float:
    """Return the Frobenius norm, in one pass."""
    return float(torch.linalg.vector_norm(block))


def _square(block: Tensor) -> float:
    """Return the squared Frobenius norm; infinite if it overflows, where a power would raise."""
    norm = _norm(block)
    return norm * norm


@final
class Factor(NamedTuple):
    """A matrix as shift * I + scale * W W^T."""

    shift: float
    scale: float
    w: Tensor  # (dim, k)

    @property
    def saves_time(self) -> bool:
        """Whether products go through W: on the CPU, in a layer twice as wide as its input.

        They round differently: not in float64, in which residuals have proven bounds on their rounding.
        """
        dim, k = self.w.shape
        return self.scale > 0 and dim >= 2 * k and self.w.dtype == torch.float32 and self.w.device.type == "cpu"


@final
class Deferred(Sequence[Tensor]):
    """The one block of a matrix that is given by a factor, computed when it is first used."""

    def __init__(self, factor: Factor) -> None:
        self._factor = factor

    @lazy
    def _blocks(self) -> tuple[Tensor]:
        return (shifted_gram(self._factor.w, self._factor.shift, self._factor.scale),)

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...

    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        return self._blocks[index]


@final
@dataclass(frozen=True, eq=False)
class BlockTridiagonal:
    """A symmetric matrix given by its diagonal and sub-diagonal blocks.

    Parameters
    ----------
    diag : sequence of Tensor of shape (..., d_k, d_k)
        Diagonal blocks, each symmetric. Leading dimensions, if any, are a batch of matrices.
    sub : tuple of Tensor of shape (..., d_{k+1}, d_k)
        Blocks below the diagonal, one fewer than ``diag``.
    factor : Factor, optional
        The same matrix, if it is a I + b W W^T with a and b at least 0.
    """

    diag: Sequence[Tensor]
    sub: tuple[Tensor, ...]
    factor: Factor | None = None

    @property
    def _sample(self) -> Tensor:
        """A tensor of the same type, on the same device."""
        return self.diag[0] if self.factor is None else self.factor.w

    @lazy
    def sizes(self) -> tuple[int, ...]:
        """Widths of the blocks."""
        if self.factor is not None:
            return (len(self.factor.w),)
        return tuple(block.shape[-1] for block in self.diag)

    @property
    def dim(self) -> int:
        """Number of rows."""
        return sum(self.sizes)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries."""
        return self._sample.dtype

    @property
    def device(self) -> torch.device:
        """Device of the blocks."""
        return self._sample.device

    @property
    def diagonal(self) -> Tensor:
        """The main diagonal, of shape (..., dim)."""
        return torch.cat([block.diagonal(dim1=-2, dim2=-1) for block in self.diag], dim=-1)

    @lazy
    def through(self) -> tuple[RightFactor, RightFactor] | None:
        """Products of rows with W and with W^T of the factor; None if products do not go through W."""
        if self.factor is None or not self.factor.saves_time:
            return None
        return RightFactor(self.factor.w), RightFactor(self.factor.w.mT)

    def to(self, dtype: torch.dtype) -> BlockTridiagonal:
        """Return the matrix in another float type."""
        return BlockTridiagonal(tuple(b.to(dtype) for b in self.diag), tuple(b.to(dtype) for b in self.sub))

    def split(self, z: Tensor) -> tuple[Tensor, ...]:
        """Return views of the blocks of stacked vectors of shape (n, dim)."""
        return z.split(self.sizes, dim=-1)

    @in_full_precision
    def matmul(self, z: Tensor) -> Tensor:
        """Multiply each row of ``z``, of shape (n, dim), by the matrix."""
        if self.factor is not None and self.through is not None:
            by_w, by_transpose = self.through
            return by_transpose(by_w(z)).mul_(self.factor.scale).add_(z, alpha=self.factor.shift)
        if len(self.diag) == 1:
            return z @ self.diag[0]
        blocks = self.split(z)
        out = torch.empty_like(z)
        for k, (target, block) in enumerate(zip(self.split(out), self.diag, strict=True)):
            product = blocks[k] @ block
            if k > 0:
                product.addmm_(blocks[k - 1], self.sub[k - 1].mT)
            if k < len(self.sub):
                product.addmm_(blocks[k + 1], self.sub[k])
            target.copy_(product)
        return out

    def scaled(self, d: Tensor) -> BlockTridiagonal:
        """Return diag(d) H diag(d) for ``d`` of shape (..., dim), batched where ``d`` is."""
        parts = self.split(d)
        diag = [parts[k][..., :, None] * block * parts[k][..., None, :] for k, block in enumerate(self.diag)]
        sub = [parts[k + 1][..., :, None] * block * parts[k][..., None, :] for k, block in enumerate(self.sub)]
        return BlockTridiagonal(tuple(diag), tuple(sub))

    def plus_diagonal(self, d: Tensor) -> BlockTridiagonal:
        """Return H + diag(d) for ``d`` of shape (..., dim), batched where ``d`` is."""
        parts = self.split(d)
        diag = []
        for block, part in zip(self.diag, parts, strict=True):
            diag.append(torch.broadcast_tensors(block, part[..., None])[0].clone())
            diag[-1].diagonal(dim1=-2, dim2=-1).add_(part)
        return BlockTridiagonal(tuple(diag), self.sub)

    def restricted(self, free: Tensor) -> BlockTridiagonal:
        """Replace the rows and columns of units that are not ``free`` by those of the identity, one matrix per sample.

        Parameters
        ----------
        free : bool Tensor of shape (n, dim)
        """
        mask = free.to(self.dtype)
        return self.scaled(mask).plus_diagonal(1 - mask)

    def negated(self) -> BlockTridiagonal:
        """Return -H."""
        return BlockTridiagonal(tuple(-block for block in self.diag), tuple(-block for block in self.sub))

    def is_finite(self) -> bool:
        """Whether no entry is infinite or NaN."""
        return all(bool(block.isfinite().all()) for block in (*self.diag, *self.sub))

    def frobenius(self) -> float:
        """Frobenius norm of an unbatched matrix."""
        plain = math.hypot(*map(_norm, self.diag), *(math.sqrt(2) * _norm(block) for block in self.sub))
        if 1e-100 < plain < math.inf:
            return plain
        # divide by the largest entry, so that squares do not overflow
        size = max(float(block.abs().max()) for block in (*self.diag, *self.sub)) or 1.0
        squares = sum(float((block / size).square().sum()) for block in self.diag)
        squares += 2 * sum(float((block / size).square().sum()) for block in self.sub)
        return size * math.sqrt(squares)

    def row_sums(self) -> Tensor:
        """Return the sums of absolute entries in each row, of shape (dim,): Gershgorin's bound on the spectrum."""
        sums = [block.abs().sum(-1) for block in self.diag]
        for k, block in enumerate(self.sub):
            sums[k] = sums[k] + block.abs().sum(-2)
            sums[k + 1] = sums[k + 1] + block.abs().sum(-1)
        return torch.cat(sums, dim=-1)

    def dense(self) -> Tensor:
        """Return the dense matrix, of shape (..., dim, dim), for small sizes and for tests."""
        out = self.diag[0].new_zeros((*self.diag[0].shape[:-2], self.dim, self.dim))
        ends = torch.tensor((0, *self.sizes)).cumsum(0).tolist()
        for k, block in enumerate(self.diag):
            out[..., ends[k] : ends[k + 1], ends[k] : ends[k + 1]] = block
        for k, block in enumerate(self.sub):
            out[..., ends[k + 1] : ends[k + 2], ends[k] : ends[k + 1]] = block
            out[..., ends[k] : ends[k + 1], ends[k + 1] : ends[k + 2]] = block.mT
        return out

    @in_full_precision
    def cholesky(self) -> BlockCholesky:
        """Factor H = F F^T block by block; ``BlockCholesky.ok`` flags the matrices of the batch for which it succeeded."""
        lower: list[Tensor] = []
        below: list[Tensor] = []
        ok = torch.ones(self.diag[0].shape[:-2], dtype=torch.bool, device=self.device)
        pivot = self.diag[0]
        for k in range(len(self.diag)):
            factor, info = torch.linalg.cholesky_ex(pivot)
            ok = ok & (info == 0) & factor.isfinite().all(-1).all(-1)
            lower.append(factor)
            if k < len(self.sub):
                # M_k = H[k+1,k] F_k^-T, so that H[k+1,k+1] - M_k M_k^T is the next Schur complement
                coupling = torch.linalg.solve_triangular(factor, self.sub[k].mT, upper=False).mT
                below.append(coupling)
                pivot = self.diag[k + 1] - coupling @ coupling.mT
        return BlockCholesky(tuple(lower), tuple(below), ok)


@final
@dataclass(frozen=True, eq=False)
class BlockCholesky:
    """The factor of a block-tridiagonal matrix: lower-triangular blocks and the blocks below them.

    Parameters
    ----------
    lower, below : tuple of Tensor
        Blocks F_k of shape (..., d_k, d_k) and M_k of shape (..., d_{k+1}, d_k).
    ok : bool Tensor
        Whether the factorisation ran to completion, per matrix of the batch.
    """

    lower: tuple[Tensor, ...]
    below: tuple[Tensor, ...]
    ok: Tensor

    @in_full_precision
    def defect(self, h: BlockTridiagonal) -> float:
        """Return a proven bound on the norm of H - F F^T for an unbatched factor; NaN if there is none.

        The bound holds however the factor was computed. It is the norm of the computed difference plus a bound on its rounding
        error, which is that of an inner product over a row of F and of one sum.
        """
        squares, size = 0.0, 0.0
        for k, factor in enumerate(self.lower):
            size += _square(factor)
            # lower triangle only, panel by panel: the difference is symmetric, and rows of the factor end at the diagonal
            for start in range(0, len(factor), PANEL):
                for first in range(0, start + 1, PANEL):
                    rows, columns = slice(start, start + PANEL), slice(first, first + PANEL)
                    left = torch.addmm(
                        h.diag[k][rows, columns], factor[rows, : first + PANEL], factor[columns, : first + PANEL].mT, alpha=-1
                    )
                    if k > 0:
                        left.addmm_(self.below[k - 1][rows], self.below[k - 1][columns].mT, alpha=-1)
                    squares += (1 if start == first else 2) * _square(left)
        for k, below in enumerate(self.below):
            squares += 2 * _square(h.sub[k] - below @ self.lower[k].mT)
            size += _square(below)
        # | |F| |F|^T |_F <= |F|_F^2 = size, so the error of inner products of length m is at most gamma_m size in norm. EPS is
        # twice the unit roundoff in gamma. Underflow costs less than the smallest normal number per product
        length = max(a + b for a, b in zip(h.sizes, (0, *h.sizes), strict=False))
        info = torch.finfo(h.dtype)
        rounding = info.eps * ((length + 4) * size + h.frobenius()) + h.dim * length * info.smallest_normal
        return math.sqrt(squares) * (1 + 1e-10) + rounding

    @in_full_precision
    def solve(self, rhs: Tensor) -> Tensor:
        """Solve H z = rhs for rows of ``rhs``, of shape (n, dim): one matrix for all rows, or one per row if batched."""
        batched = self.lower[0].dim() > 2
        sizes = [block.shape[-1] for block in self.lower]
        # columns: (n, d, 1) for one factor per sample, (d, n) for a shared factor
        parts = [part.unsqueeze(-1) if batched else part.mT for part in rhs.split(sizes, dim=-1)]
        for k, factor in enumerate(self.lower):
            if k > 0:
                parts[k] = parts[k] - self.below[k - 1] @ parts[k - 1]
            parts[k] = torch.linalg.solve_triangular(factor, parts[k], upper=False)
        for k in reversed(range(len(parts))):
            if k < len(self.below):
                parts[k] = parts[k] - self.below[k].mT @ parts[k + 1]
            parts[k] = torch.linalg.solve_triangular(self.lower[k].mT, parts[k], upper=True)
        return torch.cat([part.squeeze(-1) if batched else part.mT for part in parts], dim=-1)
