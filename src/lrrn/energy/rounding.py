"""Bounds on the rounding errors of quantities computed with an energy."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from lrrn.linalg import verified
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.linalg.operator_hessian import Hessian, OperatorHessian
from lrrn.qp import BoxQP, RoundingCoefficients, row_norms
from lrrn.runtime.lazy import lazy

if TYPE_CHECKING:
    from lrrn.energy.lifted import LiftedEnergy


@final
class Rounding:
    """Bounds on rounding, for float64 energies unless stated otherwise.

    The energy owns this object, which holds it by weak reference: a reference cycle would keep Hessians alive until the
    next garbage collection.
    """

    def __init__(self, energy: LiftedEnergy) -> None:
        self._energy: LiftedEnergy = weakref.proxy(energy)

    @lazy
    def inner(self) -> float:
        """Upper bound on gamma_{d+8}: the relative rounding error of an inner product over a layer and a few more products."""
        energy = self._energy
        longest = max(energy.sizes) if energy.layers is None else max(operator.terms for operator in energy.operators)
        return 2 * (longest + 8) * torch.finfo(energy.weights[0].dtype).eps

    def hessian(self, h: BlockTridiagonal) -> float:
        """Bound the norm of the rounding error of a stored Hessian."""
        # the trace bounds every |W_k|_F^2 in H, and therefore the rounding error of each product
        return self.inner * float(h.diagonal.sum())

    def smallest_eigenvalue(self, h: Hessian) -> float:
        """Return a proven lower bound on the smallest eigenvalue of the true Hessian."""
        if isinstance(h, OperatorHessian):
            return h.smallest_eigenvalue()
        return verified.smallest_eigenvalue(h, self.hessian(h)) if h.diag else torch.inf

    @lazy
    def free(self) -> RoundingCoefficients:
        """Bound on the rounding error of the residual of a free phase, computed in float64."""
        return self._residual(self._energy.free_hessian)

    @lazy
    def clamped(self) -> RoundingCoefficients:
        """Bound on the rounding error of the residual of a clamped phase, computed in float64."""
        return self._residual(self._energy.clamped_hessian)

    def _residual(self, h: Hessian) -> RoundingCoefficients:
        if isinstance(h, OperatorHessian):
            # nothing is stored, so that the product's own rounding is all
            return RoundingCoefficients(
                h.rounding,
                8 * torch.finfo(torch.float64).eps,
                self.inner * max(self._reach),
                self.inner * sum(self._linear_sizes),
            )
        if not h.diag:
            return RoundingCoefficients(0.0, 0.0, 0.0, 0.0)
        # |fl(Hz - q) - (Hz - q)| <= gamma_{3d+2} (|H|_F |z| + |q|), plus the rounding of H and of q themselves
        product = 4 * (3 * max(h.sizes) + 2) * torch.finfo(torch.float64).eps
        return RoundingCoefficients(
            product * h.frobenius() + self.hessian(h),
            product,
            self.inner * max(self._reach),
            self.inner * sum(self._linear_sizes),
        )

    @lazy
    def root(self) -> tuple[float, float]:
        """Bound on the rounding error of sqrt(2 E): a coefficient of |x| + |z|, and a constant.

        sqrt(2 E) is the norm of the stacked mismatches, and each of them is computed by an inner product and two sums.
        """
        energy, slope, constant = self._energy, 0.0, 0.0
        for k, a in enumerate(energy.discounts):
            weight = math.sqrt(a) + math.sqrt(a * energy.beta[k])
            slope += weight * (2 + energy.operators[k].size)
            constant += weight * (_norm(energy.b[k]) + _norm(energy.c[k]))
        # the squares of all units of a layer are summed up, whatever the length of a product
        rounding = 8 * (max(energy.sizes) + 8) * torch.finfo(energy.weights[0].dtype).eps
        return rounding * slope, rounding * constant + math.sqrt(verified.UNDERFLOW)  # squares of tiny numbers are zero

    def noise(self, qp: BoxQP, x: Tensor, z: Tensor, y: Tensor | None = None) -> Tensor:
        """Estimate the rounding error of a residual computed in the dtype of the energy, per sample.

        The proven bound assumes that all rounding errors have the same sign, and would reject too many solutions. In practice
        they partly cancel: the error of a sum of many terms is little more than one unit in the last place of the norms
        involved. On random networks the true error stayed below half of this estimate.
        """
        # H z and the products in H, then q and the products in q
        norm = self._free_norm if y is None else self._clamped_norm
        total = 2 * norm * row_norms(z) + row_norms(qp.q) + self._reach[0] * row_norms(x)
        if y is None:
            total += sum(self._linear_sizes[: self._energy.n_free])
        else:
            total += self._reach[-1] * row_norms(y) + sum(self._linear_sizes)
        return 2 * torch.finfo(qp.q.dtype).eps * total

    @lazy
    def _free_norm(self) -> float:
        return _size(self._energy.free_hessian)

    @lazy
    def _clamped_norm(self) -> float:
        return _size(self._energy.clamped_hessian)

    @lazy
    def _reach(self) -> list[float]:
        """Bounds on the gain into q: from the norm of x in the first entry, from that of a clamped output in the last."""
        energy = self._energy
        given = zip(energy.discounts, energy.beta, energy.operators, strict=True)
        return [a * (1 + beta) * operator.size for a, beta, operator in given]

    @lazy
    def _linear_sizes(self) -> list[float]:
        """Norms of the bias terms of q per layer, which bound their rounding errors."""
        energy = self._energy
        return [
            a * (1 + energy.operators[k].size) * (_norm(energy.b[k]) + energy.beta[k] * _norm(energy.c[k]))
            for k, a in enumerate(energy.discounts)
        ]


def _size(h: Hessian) -> float:
    """Estimate the scale of the rounding of a product: the Frobenius norm, or a few times the largest eigenvalue."""
    return 4 * float(h.estimate_largest()) if isinstance(h, OperatorHessian) else h.frobenius()


def _norm(t: Tensor | None) -> float:
    return 0.0 if t is None else float(torch.linalg.vector_norm(t))
