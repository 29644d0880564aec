"""The proven error of an unrolled network: of stopping early, of rounded matrices, and of evaluation in floating point."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from lrrn.export.splitting import Splitting, norm_bound, product_error
from lrrn.linalg.verified import EPS, spectral_norm

_UP = 1 + 1e-12
"""Factor that covers the rounding of a few float64 operations on bounds."""


class Stored(NamedTuple):
    """The tensors of an unrolled network, in the dtype it computes in."""

    matrix: Tensor  # (dim, dim): M
    input: Tensor  # (dim, d_0): A
    bias: Tensor  # (dim,): a
    lo: Tensor  # (dim,)
    hi: Tensor  # (dim,)
    start: Tensor  # (dim,): s before the first iteration
    output: Tensor  # (d_L, width): from the last block of P(s) to the output
    output_bias: Tensor  # (d_L,)


class ReadOut(NamedTuple):
    """The affine map to the output in float64, and bounds on the errors of its entries relative to the absolute values."""

    weight: Tensor  # (d_L, width)
    bias: Tensor  # (d_L,)
    bias_size: Tensor  # (d_L,): sums of the absolute values of what the bias is computed from


@final
@dataclass(frozen=True)
class Box:
    """The inputs for which a bound holds: lower <= x <= upper."""

    lower: Tensor
    upper: Tensor

    @property
    def centre(self) -> Tensor:
        """A point in the middle."""
        return (self.lower + self.upper) / 2

    @property
    def half_width(self) -> Tensor:
        """Upper bounds on the distance from the centre, per feature."""
        return torch.maximum(self.upper - self.centre, self.centre - self.lower) * (1 + 4 * EPS)

    @property
    def size(self) -> Tensor:
        """Largest absolute values, per feature."""
        return torch.maximum(self.lower.abs(), self.upper.abs())


class Rounding(NamedTuple):
    """The standard model of a floating-point type."""

    unit: float
    tiny: float
    largest: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Rounding:
        """Return the unit of rounding, the smallest normal number, and the largest number that bounds may have."""
        info = torch.finfo(dtype)
        return cls(info.eps / 2, info.smallest_normal, 1e-6 * info.max)

    def inner(self, n: int) -> float:
        """Return gamma_n: the error of a sum of n products in any order, relative to the sum of absolute values."""
        if n * self.unit >= 0.5:
            return math.inf
        return n * self.unit / (1 - n * self.unit) * _UP


@final
@dataclass(frozen=True)
class IterationError:
    """Bounds on |s - s*| for all inputs of a box, where s* is the exact fixed point.

    ``start`` holds before the first iteration. An iteration turns a bound e into ``rate`` e + ``noise``.
    """

    start: float
    rate: float
    noise: float
    size: float  # bound on |P(s*)|
    bounds: float  # bound on the error of P by the rounding of the box of s

    @property
    def limit(self) -> float:
        """The bound after infinitely many iterations."""
        return self.noise / (1 - self.rate) * _UP if self.rate < 1 else math.inf

    def after(self, iterations: int) -> float:
        """Return the bound after some iterations."""
        return (self.start * self.rate**iterations + self.limit) * _UP

    @classmethod
    @torch.no_grad()
    def of(cls, exact: Splitting, stored: Stored, box: Box) -> IterationError:
        """Prove the bounds; all are infinite if the stored matrix cannot be proven to contract."""
        wide = Stored(*(t.double() for t in stored))
        n, d_0 = exact.input.shape
        rounding = Rounding.of(stored.matrix.dtype)
        contraction, spread_out = spectral_norm(wide.matrix), spectral_norm(wide.matrix.abs())
        matrix_error = norm_bound(wide.matrix - exact.matrix) * (1 + EPS) + exact.matrix_error
        exact_contraction = (contraction + matrix_error) * _UP
        if exact_contraction >= 1:
            return cls(math.inf, math.inf, math.inf, math.inf, math.inf)
        bounds = norm_bound(torch.maximum(_moved(wide.lo, exact.lo), _moved(wide.hi, exact.hi)))

        # |s_0 - s*(x)| <= |s_0 - T_x(s_0)| / (1 - |M|), at the centre of the box and then over the box
        inside = wide.start.clamp(wide.lo, wide.hi)
        reflected = inside + (inside - wide.start)
        pull = exact.input @ box.centre + exact.bias
        step = wide.start - exact.matrix @ reflected - pull
        reach = box.half_width
        computed = product_error(exact.matrix, reflected[:, None]) + product_error(exact.input, box.centre[:, None])
        computed += 8 * EPS * (norm_bound(wide.start) + norm_bound(reflected) + norm_bound(inside) + norm_bound(pull))
        pull_error = _sum(exact.input_error * box.centre.abs()) + exact.bias_error + computed
        sides = max(int((reach > 0).sum()), 1)
        spread = min(norm_bound(exact.input.abs() @ reach), spectral_norm(exact.input * reach) * math.sqrt(sides))
        spread = spread * (1 + 2 * (d_0 + 8) * EPS) + _sum(exact.input_error * reach)
        first = norm_bound(step) + matrix_error * norm_bound(reflected) + 2 * bounds + pull_error + spread
        start = first / (1 - exact_contraction) * _UP

        # sizes of what an iteration adds up: |R(s*)|, |P(s*) - s*|, |A x + a|
        mirrored = norm_bound(reflected) + 2 * bounds + start
        outside = norm_bound(inside - wide.start) + bounds + start
        pulled = norm_bound(pull) + pull_error + spread
        terms = wide.input.abs() @ box.size + wide.bias.abs()
        stored_pull = (wide.input - exact.input).abs() @ box.size + (wide.bias - exact.bias).abs()
        underflow = math.sqrt(n) * 4 * (n + d_0 + 8) * rounding.tiny
        lost = norm_bound(stored_pull) + _sum(exact.input_error * box.size) + exact.bias_error
        lost += rounding.inner(d_0 + 1) * norm_bound(terms) + underflow
        lost *= 1 + 2 * (d_0 + 8) * EPS

        # s' = fl(M r + p) with r = fl(R(s)): r is off by reflection, p by lost, and the sum has n + 1 terms
        inner, reflection = rounding.inner(n + 1), 3 * rounding.unit * (mirrored + outside) + 2 * bounds
        rate = (contraction + inner * spread_out) * (1 + 6 * rounding.unit) * _UP
        noise = contraction * reflection + matrix_error * mirrored + lost
        noise += inner * (spread_out * (mirrored + reflection) + pulled + lost) + underflow
        if not spread_out * (mirrored + outside) + norm_bound(terms) < rounding.largest:  # may overflow
            return cls(math.inf, math.inf, math.inf, math.inf, math.inf)
        return cls(start, rate, noise * _UP, norm_bound(inside) + bounds + start, bounds)


def _sum(t: Tensor) -> float:
    """Return an upper bound on the sum of nonnegative float64 numbers."""
    return float(t.sum()) * (1 + 2 * (t.numel() + 8) * EPS)


def _moved(stored: Tensor, exact: Tensor) -> Tensor:
    """Return how far bounds were moved by rounding; infinite ones were not."""
    return torch.where(exact.isinf() & (stored == exact), 0.0, (stored - exact).abs() + EPS * exact.abs())


def output_error(read_out: ReadOut, stored: Stored, error: float, size: Tensor | float, bounds: float) -> Tensor:
    """Return bounds on the errors of the outputs, of shape (d_L,).

    Parameters
    ----------
    read_out : ReadOut
        The exact map.
    stored : Stored
        The map that is evaluated.
    error : float
        Bound on the error of what it is applied to, in norm.
    size : float or Tensor of shape (width,)
        Bound on the norm of its exact argument, or on the absolute value of each of its entries.
    bounds : float
        Bound on the error of the projection.
    """
    weight, bias = stored.output.double(), stored.output_bias.double()
    rounding = Rounding.of(stored.output.dtype)

    def applied(rows: Tensor) -> Tensor:
        if isinstance(size, Tensor):
            return rows.abs() @ size
        return torch.linalg.vector_norm(rows, dim=-1) * size

    moved = torch.linalg.vector_norm(weight, dim=-1) * (error + bounds)
    off = applied((weight - read_out.weight).abs() + 8 * EPS * read_out.weight.abs())
    off = off + (bias - read_out.bias).abs() + 8 * EPS * read_out.bias_size
    terms = applied(weight) + moved + bias.abs()
    underflow = 4 * (weight.shape[1] + 8) * rounding.tiny
    total = moved + off + rounding.inner(weight.shape[1] + 1) * terms + underflow
    return torch.where(terms < rounding.largest, total * (1 + 4 * (weight.shape[1] + 8) * EPS), math.inf)
