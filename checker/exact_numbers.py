"""Exact vectors and matrices, as integers over a common power of two, and proofs that a matrix is positive definite."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from operator import mul
from typing import Any

BITS = 96
"""Binary places of the integers in approximate factorisations and minimisers."""


class Refused(Exception):
    """A certificate, or a file, proves nothing; the message says why."""


def read_json(text: bytes | str) -> Any:
    """Read JSON in which no key is repeated."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise Refused("a key is repeated")
        return found

    return json.loads(text, object_pairs_hook=unique)


@dataclass(frozen=True)
class Vector:
    """The numbers entries[i] / 2**shift."""

    entries: list[int]
    shift: int

    def __add__(self, other: Vector) -> Vector:
        shift = max(self.shift, other.shift)
        pairs = zip(self.at(shift), other.at(shift), strict=True)
        return Vector([a + b for a, b in pairs], shift)

    def __sub__(self, other: Vector) -> Vector:
        return self + Vector([-b for b in other.entries], other.shift)

    def __mul__(self, other: Vector) -> Vector:
        """Multiply entry by entry."""
        return Vector([a * b for a, b in zip(self.entries, other.entries, strict=True)], self.shift + other.shift)

    def at(self, shift: int) -> list[int]:
        """Return the integers for another shift, rounded down where it is smaller."""
        more = shift - self.shift
        return [a << more for a in self.entries] if more >= 0 else [a >> -more for a in self.entries]

    def dot(self, other: Vector) -> Fraction:
        """Return the inner product."""
        return Fraction(sum(map(mul, self.entries, other.entries)), 1 << (self.shift + other.shift))

    def scaled(self, factor: Vector) -> Vector:
        """Multiply by the only entry of another vector."""
        (number,) = factor.entries
        return Vector([number * a for a in self.entries], self.shift + factor.shift)


def exact(values: list[Any], length: int, what: str) -> Vector:
    """Return integers and finite floats as exact numbers."""
    if not isinstance(values, list) or len(values) != length:
        raise Refused(f"{what} should be {length} numbers")
    if not all(type(value) is int or (isinstance(value, float) and math.isfinite(value)) for value in values):
        raise Refused(f"{what} holds what is not a finite number")
    ratios = [value.as_integer_ratio() for value in values]
    shift = max((below.bit_length() - 1 for _, below in ratios), default=0)
    return Vector([above << (shift - below.bit_length() + 1) for above, below in ratios], shift)


@dataclass(frozen=True)
class Matrix:
    """The numbers rows[i][j] / 2**shift."""

    rows: list[list[int]]
    shift: int

    def times(self, v: Vector) -> Vector:
        """Return the product with a vector."""
        some = [j for j, entry in enumerate(v.entries) if entry]
        if len(some) * 2 < len(v.entries):  # images are mostly black
            short = [v.entries[j] for j in some]
            return Vector([sum(map(mul, [row[j] for j in some], short)) for row in self.rows], self.shift + v.shift)
        return Vector([sum(map(mul, row, v.entries)) for row in self.rows], self.shift + v.shift)


def gram(rows: list[list[int]]) -> list[list[int]]:
    """Return all inner products of rows."""
    lower = [[sum(map(mul, a, b)) for b in rows[: i + 1]] for i, a in enumerate(rows)]
    return [[lower[max(i, j)][min(i, j)] for j in range(len(rows))] for i in range(len(rows))]


def factor(rows: list[list[int]], shift: int) -> tuple[list[list[int]], list[int]] | None:
    """Return L and e with L diag(e) L^T near a symmetric matrix, in units of 2**-BITS; None if a pivot is not positive."""
    near = [Vector(row, shift).at(BITS) for row in rows]
    lower: list[list[int]] = []  # rows of L, left of the diagonal
    pivots: list[int] = []
    for i, row in enumerate(near):
        scaled: list[int] = []  # L_ij e_j
        for j in range(i):
            scaled.append(row[j] - (sum(map(mul, scaled, lower[j])) >> BITS))
        left = [(value << BITS) // pivots[j] for j, value in enumerate(scaled)]
        pivot = row[i] - (sum(map(mul, scaled, left)) >> BITS)
        if pivot <= 0:
            return None
        lower.append(left)
        pivots.append(pivot)
    return [[*left, 1 << BITS] for left in lower], pivots


def smallest_eigenvalue(s: Matrix) -> Fraction:
    """Return a proven positive lower bound on the eigenvalues of a symmetric matrix, or refuse."""
    for places in range(0, 48, 2):
        shift = max(s.shift, places)
        rows = [Vector(row, s.shift).at(shift) for row in s.rows]
        for i, row in enumerate(rows):
            row[i] -= 1 << (shift - places)
        found = factor(rows, shift)
        if found is None:
            continue
        bound = Fraction(1, 1 << places) - residual(rows, shift, *found)
        if bound > 0:
            return bound
    raise Refused("the multipliers of products do not make the quadratic form positive definite")


def residual(rows: list[list[int]], shift: int, lower: list[list[int]], pivots: list[int]) -> Fraction:
    """Return the largest sum of absolute values in a row of the matrix minus L diag(e) L^T, computed exactly."""
    top = max(shift, 3 * BITS)
    sums = [0] * len(rows)
    for i, left in enumerate(lower):
        weighted = list(map(mul, left, pivots))
        for j in range(i + 1):
            product = sum(map(mul, weighted, lower[j]))
            off = abs((rows[i][j] << (top - shift)) - (product << (top - 3 * BITS)))
            sums[i] += off
            sums[j] += off if j < i else 0
    return Fraction(max(sums), 1 << top)
