"""A fixed-point iteration for the free phase that contracts: Peaceman-Rachford splitting, in units of our choice.

With z = diag(d) t, the free phase minimises 1/2 t^T H' t - q'^T t over a box, H' = diag(d) H diag(d). Let P be the projection
onto that box and R(s) = 2 P(s) - s the reflection. For any step > 0 the minimiser is P(s) at the fixed point of

    s -> M R(s) + A x + a,    M = 2 (I + step H')^-1 - I,    A x + a = 2 step (I + step H')^-1 q'(x).

R does not increase distances, and |M| < 1. All is computed in float64, with proven bounds on its errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lrrn.energy import LiftedEnergy
from lrrn.energy.lifted import matrix_hessian
from lrrn.linalg import verified
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.linalg.verified import EPS, UNDERFLOW


def norm_bound(t: Tensor) -> float:
    """Return an upper bound on the Euclidean (Frobenius) norm of a float64 tensor, rounding and underflow included."""
    return float(torch.linalg.vector_norm(t)) * (1 + 2 * (t.numel() + 8) * EPS) + math.sqrt(UNDERFLOW)


def product_error(a: Tensor, b: Tensor) -> float:
    """Bound the Frobenius norm of the rounding error of the float64 product a @ b."""
    return 2 * (a.shape[-1] + 4) * EPS * norm_bound(a) * norm_bound(b) + a.shape[0] * b.numel() * math.sqrt(UNDERFLOW)


def _column_norms(t: Tensor) -> Tensor:
    """Return upper bounds on the norms of the columns of a float64 matrix."""
    return torch.linalg.vector_norm(t, dim=0) * (1 + 2 * (len(t) + 8) * EPS) + math.sqrt(UNDERFLOW)


@final
@dataclass(frozen=True)
class InputMap:
    """What happens to an input before it reaches the network: x -> (x - offset) / scale, per feature."""

    offset: Tensor
    scale: Tensor


@final
@dataclass(frozen=True, eq=False)
class Splitting:
    """The iteration, as computed, with bounds on the norms of its errors.

    Attributes
    ----------
    units : Tensor of shape (dim,)
        d, taken as exact.
    step : float
        The step, taken as exact.
    matrix, input, bias : Tensor of shape (dim, dim), (dim, d_0) and (dim,)
        M, A and a.
    matrix_error, bias_error : float
        Bounds on the spectral norms of what is computed minus what is exact.
    input_error : Tensor of shape (d_0,)
        Likewise for every column of A: features may have different sizes.
    lo, hi : Tensor of shape (dim,)
        The box of s, correct to one rounding.
    """

    units: Tensor
    step: float
    matrix: Tensor
    input: Tensor
    bias: Tensor
    matrix_error: float
    input_error: Tensor
    bias_error: float
    lo: Tensor
    hi: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, energy: LiftedEnergy, given: InputMap) -> Splitting:
        """Set up the iteration for a float64 energy."""
        h = matrix_hessian(energy)
        eye = torch.eye(h.dim, dtype=torch.float64)
        d, step = _units_and_step(energy, h)
        scaled = h.scaled(d)
        shifted = eye + step * scaled.dense()
        # the rounding of H, which the units scale as they do H, of its scaling, and of the sum
        error = step * (energy.rounding.hessian(scaled) * (1 + 8 * EPS) + 4 * EPS * scaled.frobenius()) + 4 * EPS * norm_bound(
            shifted
        )
        inverse = torch.linalg.inv(shifted)
        # |(I + step H')^-1| <= 1, so the error of the inverse is at most the norm of its residual, however it was computed
        residual = norm_bound(shifted @ inverse - eye) * (1 + EPS) + product_error(shifted, inverse)
        defect = (residual + error) / (1 - error) * (1 + 8 * EPS) if error < 0.5 else math.inf

        matrix = 2 * inverse - eye
        first, weights = energy.sizes[1], energy.weights[0] * (energy.discounts[0] * (1 + energy.beta[0]))
        gain = (2 * step * d[:first])[:, None] * weights / given.scale
        start = -given.offset / given.scale
        q = energy.free(start[None]).q[0]
        rounding = energy.rounding.free
        size = norm_bound(start)
        q_error = rounding.q * norm_bound(q) + rounding.x * size + rounding.constant + 2 * EPS * norm_bound(weights) * size
        pull = 2 * step * d * q
        pull_error = 2.1 * step * float(d.max()) * q_error + 4 * EPS * norm_bound(pull)
        lo, hi = (bound[0, : h.dim] / d for bound in energy.box)
        return cls(
            d,
            step,
            matrix,
            inverse[:, :first] @ gain,
            inverse @ pull,
            2 * defect + EPS * norm_bound(matrix),
            (defect + 8 * EPS + 2 * (first + 4) * EPS * norm_bound(inverse)) * _column_norms(gain),
            defect * norm_bound(pull) + product_error(inverse, pull[:, None]) + pull_error,
            lo,
            hi,
        )

    def reflected(self, s: Tensor) -> Tensor:
        """Return R(s) for rows of ``s``."""
        inside = s.clamp(self.lo, self.hi)
        return inside + (inside - s)

    def fixed_point(self, x: Tensor) -> Tensor:
        """Approximate the fixed point at one input, of shape (d_0,)."""
        pull = self.input @ x + self.bias
        s = pull
        for _ in range(1000):
            following = self.matrix @ self.reflected(s) + pull
            if torch.allclose(following, s, rtol=1e-9, atol=1e-12):
                break
            s = following
        return s


def _units_and_step(energy: LiftedEnergy, h: BlockTridiagonal) -> tuple[Tensor, float]:
    """Return units in which H is well conditioned, by layers or by units, and the step of the fastest contraction.

    Neither is part of the proof, which holds for any positive numbers.
    """
    layers = [
        torch.full((size,), a**-0.5, dtype=torch.float64) for size, a in zip(energy.free_sizes, energy.discounts, strict=False)
    ]
    best = (math.inf, torch.ones(h.dim, dtype=torch.float64), 1.0)
    for d in (torch.cat(layers), h.diagonal.rsqrt()):
        scaled = h.scaled(d)
        low, high = max(verified.estimate_smallest(scaled), 1e-300), verified.estimate_largest(scaled)
        if high / low < best[0]:
            best = (high / low, d, 1 / math.sqrt(low * high))
    return best[1:]
