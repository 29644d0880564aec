"""Hessians of lifted energies by products with the layers' operators, for layers that are too large for a matrix.

With v_0 = 0 and a_k the discount of layer k, v^T H v is the sum over layers of
a_k (|v_{k+1} - A_k v_k|^2 + beta_k |A_k^T v_{k+1} - v_k|^2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.linalg.operators import Operator
from lrrn.linalg.verified import EPS
from lrrn.runtime.lazy import lazy

POWER_STEPS, FILTERS = 3, (5, 5)
"""Steps of the power iteration that estimates the largest eigenvalue, and degrees of the polynomials after it."""


@final
@dataclass(frozen=True, eq=False)
class OperatorHessian:
    """The Hessian of the first ``n_blocks`` layers, used through its products.

    Parameters
    ----------
    operators : tuple of Operator
        A_0, A_1, ..., at least one per block; one more if a layer above is fixed, whose terms then count too.
    discounts, beta : tuple of float
        a_k and beta_k of the same layers.
    n_blocks : int
        Number of layers of unknowns.
    """

    operators: tuple[Operator, ...]
    discounts: tuple[float, ...]
    beta: tuple[float, ...]
    n_blocks: int

    @lazy
    def sizes(self) -> tuple[int, ...]:
        """Widths of the blocks."""
        return tuple(operator.shape[0] for operator in self.operators[: self.n_blocks])

    @property
    def dim(self) -> int:
        """Number of unknowns."""
        return sum(self.sizes)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.operators[0].weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.operators[0].weight.device

    def split(self, z: Tensor) -> tuple[Tensor, ...]:
        """Return views of the blocks of stacked vectors of shape (n, dim)."""
        return z.split(self.sizes, dim=-1)

    @torch.no_grad()
    def matmul(self, z: Tensor) -> Tensor:
        """Multiply each row of ``z``, of shape (n, dim), by the matrix."""
        blocks = self.split(z)
        parts: list[Tensor] = []
        for k, operator in enumerate(self.operators):
            a, beta = self.discounts[k], self.beta[k]
            if k > 0:
                # on the layer below: a (A^T A v + beta v)
                below = operator.apply(blocks[k - 1])
                parts[-1] = operator.adjoint_added(parts[-1], below, a).add_(blocks[k - 1], alpha=a * beta)
            if k == self.n_blocks:
                break
            # the layer's own block: a (v + beta A A^T v)
            if beta or k > 0:
                down = operator.adjoint(blocks[k])
            own = operator.added(blocks[k], down, beta) if beta else blocks[k].clone()
            if a != 1:
                own.mul_(a)
            if k > 0:
                # and the coupling of both
                parts[-1].sub_(down, alpha=a * (1 + beta))
                own.sub_(below, alpha=a * (1 + beta))
            parts.append(own)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    @lazy
    def diagonal(self) -> Tensor:
        """The main diagonal, of shape (dim,)."""
        parts: list[Tensor] = []
        for k, operator in enumerate(self.operators):
            a, beta = self.discounts[k], self.beta[k]
            rows, columns = operator.squares()
            if k > 0:
                parts[-1] = parts[-1] + a * (columns + beta)
            if k < self.n_blocks:
                parts.append(a * (1 + beta * rows))
        return torch.cat(parts)

    @lazy
    def size(self) -> float:
        """Upper bound on the norm of the matrix of absolute values: the largest row sum of bounds on the blocks' norms."""
        sums = [0.0] * self.n_blocks
        for k, operator in enumerate(self.operators):
            a, beta, s = self.discounts[k], self.beta[k], operator.size
            if k < self.n_blocks:
                sums[k] += a * (1 + beta * s * s)
            if k > 0:
                sums[k - 1] += a * (s * s + beta)
                if k < self.n_blocks:
                    sums[k - 1] += a * (1 + beta) * s
                    sums[k] += a * (1 + beta) * s
        return max(sums) * (1 + 1e-12)

    @property
    def rounding(self) -> float:
        """Bound on the norm of the rounding error of a product, per unit of the norm of the vector.

        A product is a sum of at most five terms of two nested products each, so its relative error is at most that of a sum
        of twice the operator's terms and a few more, of absolute values.
        """
        terms = max(operator.terms for operator in self.operators)
        return 2 * (2 * terms + 24) * torch.finfo(self.dtype).eps * self.size

    def smallest_eigenvalue(self) -> float:
        """Return a proven lower bound on the smallest eigenvalue, from the structure.

        Let e_k^2 = |v_{k+1} - A_k v_k|^2 + beta_k |A_k^T v_{k+1} - v_k|^2. A component of v_{k+1} along a singular vector with
        singular value s is at most s times that of v_k plus the first difference, and at most 1 / s times it plus the second
        over s. So |v_{k+1}| <= |v_k| + e_k / min(1, sqrt(beta_k)) without knowing a norm, and |v_{k+1}| <= |A_k| |v_k| + e_k.
        With |v_1| <= e_0 this bounds |v| by a matrix N times (sqrt(a_k) e_k)_k, and v^T H v by |v|^2 / |N|_F^2 from below.
        """
        row = [0.0] * self.n_blocks
        total = 0.0
        for k in range(self.n_blocks):
            gain, weight = self._growth(k)
            row = [gain * entry for entry in row]
            row[k] = 1 / (weight * math.sqrt(self.discounts[k]))
            total += sum(entry * entry for entry in row)
        return (1 - 64 * EPS * (self.n_blocks + 1)) / total if math.isfinite(total) and total > 0 else 0.0

    def _growth(self, k: int) -> tuple[float, float]:
        """Return g and w with |v_{k+1}| <= g |v_k| + e_k / w."""
        if k == 0:
            return 0.0, 1.0
        beta = self.beta[k]
        if beta == 0:
            return self.operators[k].norm(), 1.0
        return 1.0, min(1.0, math.sqrt(beta))

    def estimate_condition(self) -> float:
        """Estimate an upper bound on the condition number; infinite if the smallest eigenvalue has no positive bound."""
        smallest = self.smallest_eigenvalue()
        return float(self.estimate_largest()) / smallest if smallest > 0 else math.inf

    def estimate_largest(self, scale: Tensor | None = None) -> Tensor:
        """Estimate the largest eigenvalue of D H D, D the diagonal matrix of ``scale``, from below; not a bound.

        A few steps of the power iteration give an estimate t. Chebyshev polynomials on [0, t] then enlarge what belongs to
        larger eigenvalues, and improve it. Nothing synchronises with a device.
        """
        d = 1.0 if scale is None else scale

        def product(v: Tensor) -> Tensor:
            return self.matmul(v * d) * d

        def unit(v: Tensor) -> Tensor:
            return v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)

        v = unit(_start_vectors(2, self.dim, self.device).to(self.dtype))
        for _ in range(POWER_STEPS - 1):
            v = unit(product(v))
        for degree in FILTERS:
            bent = product(v)
            top = torch.linalg.vector_norm(bent, dim=1).max().clamp(min=torch.finfo(v.dtype).tiny)
            last, v = v, 2 * bent / top - v
            for _ in range(degree - 1):
                last, v = v, 4 * product(v) / top - 2 * v - last
            v = unit(v)
        return torch.linalg.vector_norm(product(v), dim=1).max()


def _start_vectors(n: int, dim: int, device: torch.device) -> Tensor:
    """Return vectors of numbers from -1 to 1 that look random, of shape (n, dim); made on the device, as in CUDA graphs."""
    number = torch.arange(1, n * dim + 1, device=device, dtype=torch.float64)
    return ((number * 0.6180339887498949 + number.sqrt()) % 1 * 2 - 1).float().view(n, dim)


Hessian = BlockTridiagonal | OperatorHessian
"""A Hessian by blocks or by products."""


def hessian_of(
    operators: Sequence[Operator], discounts: Sequence[float], beta: Sequence[float], n_blocks: int, closed: bool
) -> OperatorHessian:
    """Return the Hessian of the first blocks; if ``closed``, with the terms of the layer above them."""
    n = n_blocks + 1 if closed else n_blocks
    return OperatorHessian(tuple(operators[:n]), tuple(discounts[:n]), tuple(beta[:n]), n_blocks)
