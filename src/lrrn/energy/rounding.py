"""How far what is computed with an energy can be from its true value."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from lrrn.linalg import verified
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import BoxQP, RoundingCoefficients, row_norms
from lrrn.runtime.lazy import lazy

if TYPE_CHECKING:
    from lrrn.energy.lifted import LiftedEnergy


@final
class Rounding:
    """Bounds on rounding, for float64 energies unless stated otherwise.

    Parameters
    ----------
    energy : LiftedEnergy
        It owns this object, which refers back weakly: a cycle would keep Hessians until the next garbage collection.
    """

    def __init__(self, energy: LiftedEnergy) -> None:
        self._energy: LiftedEnergy = weakref.proxy(energy)

    @lazy
    def inner(self) -> float:
        """gamma_{d+8}, generously: the relative rounding of an inner product over a layer and a few products more."""
        return 2 * (max(self._energy.sizes) + 8) * torch.finfo(self._energy.weights[0].dtype).eps

    def hessian(self, h: BlockTridiagonal) -> float:
        """Bound the norm of the rounding of a Hessian."""
        # the trace dominates every |W_k|_F^2 that entered, hence the rounding of each product
        return self.inner * float(h.diagonal.sum())

    def smallest_eigenvalue(self, h: BlockTridiagonal) -> float:
        """Return a proven lower bound on the smallest eigenvalue of the true Hessian."""
        return verified.smallest_eigenvalue(h, self.hessian(h)) if h.diag else torch.inf

    @lazy
    def free(self) -> RoundingCoefficients:
        """How far a free phase's residual, as computed in float64, can be from the true one."""
        return self._residual(self._energy.free_hessian)

    @lazy
    def clamped(self) -> RoundingCoefficients:
        """How far a clamped phase's residual, as computed in float64, can be from the true one."""
        return self._residual(self._energy.clamped_hessian)

    def _residual(self, h: BlockTridiagonal) -> RoundingCoefficients:
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
        """How far sqrt(2 E), as computed, can be from its true value: per unit of |x| + |z|, and a constant.

        sqrt(2 E) is the norm of the stacked mismatches, and each of them is an inner product and two sums away from its data.
        """
        energy, slope, constant = self._energy, 0.0, 0.0
        for k, a in enumerate(energy.discounts):
            weight = math.sqrt(a) + math.sqrt(a * energy.beta[k])
            slope += weight * (2 + _norm(energy.weights[k]))
            constant += weight * (_norm(energy.b[k]) + _norm(energy.c[k]))
        rounding = 4 * self.inner
        return rounding * slope, rounding * constant

    def noise(self, qp: BoxQP, x: Tensor, z: Tensor, y: Tensor | None = None) -> Tensor:
        """Estimate how far a residual computed in the energy's own float type is from the true one, per sample.

        The proven bound counts every rounding as if all went the same way and lets too few answers pass. They do not, and sums
        of many terms err by little more than the last place of the norms that enter; on random networks the true figure stayed
        below half of this one.
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
        return self._energy.free_hessian.frobenius()

    @lazy
    def _clamped_norm(self) -> float:
        return self._energy.clamped_hessian.frobenius()

    @lazy
    def _reach(self) -> list[float]:
        """How much of the size of x, by the first entry, or of a clamped output, by the last one, enters q at most."""
        energy = self._energy
        return [a * (1 + beta) * _norm(w) for a, beta, w in zip(energy.discounts, energy.beta, energy.weights, strict=True)]

    @lazy
    def _linear_sizes(self) -> list[float]:
        """Norms of every layer's bias terms of q, which bound their rounding."""
        energy = self._energy
        return [
            a * (1 + _norm(energy.weights[k])) * (_norm(energy.b[k]) + energy.beta[k] * _norm(energy.c[k]))
            for k, a in enumerate(energy.discounts)
        ]


def _norm(t: Tensor | None) -> float:
    return 0.0 if t is None else float(torch.linalg.vector_norm(t))
