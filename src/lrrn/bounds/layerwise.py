"""Proven layer-wise bounds on the Lipschitz constant of the map x -> z_L*(x), computed from the weights of any operators."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import final

import torch

from lrrn.linalg import verified
from lrrn.linalg.operators import Dense, Operator

_SLACK = 1 + 1e-14
"""Covers the rounding of the few scalar operations after a verified norm."""


@final
class LipschitzBound(float):
    """A proven upper bound on a Lipschitz constant: a float with its factors and the method that gave it.

    Attributes
    ----------
    value : float
        The bound.
    per_layer : tuple of float
        The factors of the product that gives the bound.
    method : str
        How it was derived.
    """

    per_layer: tuple[float, ...]
    method: str

    def __new__(cls, per_layer: Sequence[float], method: str) -> LipschitzBound:
        """Multiply the factors of the layers."""
        product = 1.0
        for factor in per_layer:
            product = max(product * factor * _SLACK, sys.float_info.min)  # a product that underflows is no bound
        bound = super().__new__(cls, product if all(per_layer) else 0.0)
        bound.per_layer, bound.method = tuple(per_layer), method
        return bound

    @property
    def value(self) -> float:
        """The bound as a plain float."""
        return float(self)

    def __reduce__(self) -> tuple[type[LipschitzBound], tuple[tuple[float, ...], str]]:
        """Support copying and pickling."""
        return LipschitzBound, (self.per_layer, self.method)

    def __repr__(self) -> str:
        return f"LipschitzBound({self.value!r}, method={self.method!r})"


def paper(operators: Sequence[Operator], beta: Sequence[float]) -> LipschitzBound:
    """Return the paper's bound: the product of (sqrt(beta) + 1/sqrt(beta)) / 2, or of |W|_2 where beta is 0."""
    return LipschitzBound([w.norm() if b == 0 else _peak(b) for w, b in zip(operators, beta, strict=True)], "paper")


def spectral(operators: Sequence[Operator], beta: Sequence[float]) -> LipschitzBound:
    """Return the bound that also uses the singular values of every layer; never above :func:`paper`.

    The proof of the paper's lemma gives |v| (1 + beta s^2) <= (1 + beta) s |u| with s = |W^T v| / |v|, so the layer's constant
    is the maximum of f(s) = (1 + beta) s / (1 + beta s^2) over the range of s.
    """
    return LipschitzBound(
        [w.norm() if b == 0 else _layer_constant(*singular_range(w), b) for w, b in zip(operators, beta, strict=True)],
        "spectral",
    )


def singular_range(operator: Operator) -> tuple[float, float]:
    """Return proven lower and upper bounds on |W^T v| / |v| over all v.

    The lower bound is 0 for an expanding layer (more rows than columns), where W^T has a null space, and for operators that are
    not matrices.
    """
    highest = operator.norm()
    rows, columns = operator.shape
    if rows > columns or not isinstance(operator, Dense):
        return 0.0, highest
    w = operator.weight.detach().to(torch.float64)
    return math.sqrt(verified.smallest_eigenvalue(*verified.squared(w))) / _SLACK, highest


def _peak(beta: float) -> float:
    return (math.sqrt(beta) + 1 / math.sqrt(beta)) / 2 * _SLACK


def _layer_constant(lowest: float, highest: float, beta: float) -> float:
    """Return the maximum of f over [lowest, highest]; f increases up to 1 / sqrt(beta) and decreases after it."""
    turning = 1 / math.sqrt(beta)
    if lowest < turning < highest:
        return _peak(beta)
    s = highest if highest <= turning else lowest
    if s == 0:
        return 0.0
    # f = 2 peak / (t + 1/t); towards 1 it increases, so that t may be moved into the range of floating point
    t = min(max(math.sqrt(beta) * s, sys.float_info.min), sys.float_info.max)
    return min(_peak(beta), 2 * _peak(beta) / (t + 1 / t) * _SLACK)
