#!/usr/bin/env python3
"""Check written certificates in exact arithmetic, with Python's standard library alone.

    python checker/check_certificate.py PROOF.json WEIGHTS.safetensors

This program shares no code with the package lrrn. It reads the weights and the certificates, computes with integers and
fractions only, and says for each certificate whether it proves its claim. It exits with 0 if all are accepted, else with 1.

The network. The input x enters layers of hidden units z = (z_1, ..., z_K), stacked, which are the minimiser over z >= 0 of

    E(z; x) = 1/2 sum_k a_k (|z_{k+1} - W_k z_k - b_k|^2 + beta_k |W_k^T z_{k+1} - z_k - c_k|^2),   z_0 = x,  a_k = gamma^k,

with k from 0 to K - 1. The outputs are y = W_K z_K + b_K and the label is the index of the largest. Up to a constant the energy
is 1/2 z^T H z - q(x)^T z, with q(x) = q(0) + B x and B x in the first layer only. The stored floats are taken as exact
numbers, so H, q(0), B and all that follows are exact.

The claim. "For every u of Euclidean norm below r, the label at x + u is i", about the exact minimiser: no solver and no
rounding is involved. It holds if, for every other output j, every u with y_j >= y_i at x + u has |u|^2 >= r^2.

The proof for one j. Let z be the minimiser at x + u and g = H z - q(x) - B u the gradient there. For every unit

    z >= 0,    g >= 0,    z g = 0,    and    m + c^T z <= 0    where output j is not below output i,

with m the difference of two entries of b_K and c that of two rows of W_K. Take numbers sigma >= 0, mu >= 0, nu >= 0 and any
lam, the multipliers of the certificate. Then each such u satisfies

    |u|^2 >= |u|^2 + sigma (m + c^T z) + lam^T (z g) - mu^T z - nu^T g,

since what is added is not positive. With g inserted, the right side is a quadratic function of z and u. Its minimum over all z
and u, whether they belong together or not, is a lower bound D on |u|^2. Write Lam = diag(lam) and G = B B^T. Minimising over u,
at u = B^T (Lam z - nu) / 2, leaves

    z^T S z + b^T z + constant,    S = (Lam H + H Lam) / 2 - Lam G Lam / 4,
    b = sigma c - Lam q(x) - mu - H nu + Lam G nu / 2,
    constant = sigma m + nu^T q(x) - nu^T G nu / 4.

S depends on lam alone, which many certificates share. If every eigenvalue of S is at least kappa > 0, then for any vector t,
with d = 2 S t + b, and any displacement s from it, (t + s)^T S (t + s) + b^T (t + s) >= t^T S t + b^T t + d^T s + kappa |s|^2.
The least value of that over s gives

    D >= constant + t^T S t + b^T t - |d|^2 / (4 kappa).

The checker takes t near the minimiser, which makes d tiny, and evaluates this bound exactly. It accepts r if r^2 is at most the
bound, for every j. The bound also proves the label at x itself, where u = 0.

The eigenvalues of S. The checker factors S - kappa I = L diag(e) L^T approximately, in integers that are rounded, then computes
the difference of both sides exactly. If e > 0 and no row of the difference sums to more than f in absolute value, then S
has no eigenvalue below kappa - f. This is done once for every lam.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import struct
import sys
import time
from dataclasses import dataclass
from fractions import Fraction
from operator import mul
from pathlib import Path
from typing import Any

from exact_numbers import BITS, Matrix, Refused, Vector, exact, factor, gram, read_json, smallest_eigenvalue

RAISED = Fraction(1001, 1000)
"""Every certificate is also tried with this multiple of the radius that the checker finds, which must be refused."""


# --- the network -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """The quadratic programme of a network: H, G = B B^T on all units, q(0), B on the first layer; and its read-out."""

    hessian: Matrix
    gram: Matrix
    constant: Vector
    by_input: Matrix
    read_out: Matrix
    output_bias: Vector
    n_inputs: int

    @property
    def n_units(self) -> int:
        """Number of hidden units."""
        return len(self.hessian.rows)


def read_weights(content: bytes) -> tuple[dict[str, Any], dict[str, tuple[list[int], list[float]]]]:
    """Return the structure of a network and its tensors, as shapes and flat lists, from the bytes of a safetensors file."""
    try:
        (length,) = struct.unpack("<Q", content[:8])
        header, start = read_json(content[8 : 8 + length]), 8 + length
        envelope = read_json(header.pop("__metadata__")["lrrn"])
        structure = plain_network(envelope["kind"], envelope["header"])
        tensors = {}
        for name, entry in header.items():
            code, size = {"F32": ("f", 4), "F64": ("d", 8)}[entry["dtype"]]
            begin, end = entry["data_offsets"]
            count = (end - begin) // size
            if count != math.prod(entry["shape"]) or start + end > len(content):
                raise ValueError(f"{name} does not fit its shape")
            tensors[name] = entry["shape"], list(struct.unpack_from(f"<{count}{code}", content, start + begin))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, struct.error) as error:
        raise Refused(f"the weights cannot be read: {error!r}") from error
    return structure, tensors


def plain_network(kind: str, header: dict[str, Any]) -> dict[str, Any]:
    """Return the structure of a network, or of a classifier that is nothing but the network's largest output."""
    if kind == "network":
        return header
    if kind != "classifier":
        raise Refused(f"only networks and classifiers are covered, not files of kind {kind!r}")
    parameters, attributes = (dict(header[name]["items"]) for name in ("parameters", "attributes"))
    if parameters.get("objective") == "class_energy":
        raise Refused("its label is that of least energy, not of the largest output")
    if attributes["scale_in_"] != 1 or any(attributes["offset_in_"]["array"]):
        raise Refused("it standardizes its inputs")
    return header["network"]


def build(structure: dict[str, Any], tensors: dict[str, tuple[list[int], list[float]]]) -> Network:
    """Return the quadratic programme of a network with dense layers, hidden units at least zero and a linear read-out."""
    sizes, beta = structure["sizes"], structure["beta"]
    last = len(sizes) - 2
    if last < 1 or not all(type(size) is int for size in sizes) or sizes[-1] < 2:
        raise Refused(f"only networks of dense layers with hidden units and several outputs are covered; the sizes are {sizes}")
    ends = [tuple(map(float, interval)) for interval in structure["intervals"]]
    if ends[:-1] != [(0.0, math.inf)] * last or ends[-1] != (-math.inf, math.inf) or beta[-1] != 0:
        raise Refused("only hidden units that are at least zero and a free read-out without reconstruction are covered")
    if not (structure["gamma"] > 0 and all(weight >= 0 for weight in beta)):  # else there may be no minimiser
        raise Refused("gamma must be above zero and beta must not be negative")
    numbers: list[float] = []
    places: dict[str, tuple[int, int]] = {}
    for k in range(last + 1):
        for name, count in ((f"W.{k}", sizes[k + 1] * sizes[k]), (f"b.{k}", sizes[k + 1]), (f"c.{k}", sizes[k])):
            values = tensors[name][1] if name in tensors else [0.0] * count
            if name.startswith("W") and tensors.get(name, ((),))[0] != [sizes[k + 1], sizes[k]]:
                raise Refused(f"{name} is not of the shape in the header")
            if len(values) != count:
                raise Refused(f"{name} does not have {count} numbers")
            places[name] = len(numbers), len(numbers) + count
            numbers += values
    common = exact(numbers, len(numbers), "the weights")
    part = {name: common.entries[begin:end] for name, (begin, end) in places.items()}
    weights = [[part[f"W.{k}"][i : i + sizes[k]] for i in range(0, len(part[f"W.{k}"]), sizes[k])] for k in range(last + 1)]
    biases = [(part[f"b.{k}"], part[f"c.{k}"]) for k in range(last + 1)]
    return assemble(weights, biases, common.shift, [Fraction(x) for x in beta], Fraction(structure["gamma"]))


def assemble(
    weights: list[list[list[int]]],
    biases: list[tuple[list[int], list[int]]],
    s: int,
    beta: list[Fraction],
    gamma: Fraction,
) -> Network:
    """Return H, G, q(0) and B, from weights and biases in units of 2**-s; see the formulae at the top."""
    n_layers = len(weights) - 1
    powers = [gamma**k for k in range(n_layers)]
    ta, tb = (max(x.denominator.bit_length() - 1 for x in numbers) for numbers in (powers, beta))
    a, by = [int(x * 2**ta) for x in powers], [int(x * 2**tb) for x in beta]
    sizes = [len(rows) for rows in weights[:-1]]
    begin = [sum(sizes[:k]) for k in range(n_layers)]
    n = sum(sizes)
    h, q = [[0] * n for _ in range(n)], [0] * n
    for k in range(n_layers):  # the term of layer k concerns units z_{k+1}, from o on, and z_k, from e on
        o, rows, (b, c) = begin[k], weights[k], biases[k]
        columns = [list(column) for column in zip(*rows, strict=True)]
        inner = gram(rows)
        for i, row in enumerate(rows):
            for j in range(len(rows)):
                h[o + i][o + j] += a[k] * by[k] * inner[i][j]
            h[o + i][o + i] += a[k] << (2 * s + tb)
            q[o + i] += a[k] * ((b[i] << (s + tb)) + by[k] * sum(map(mul, row, c)))
        if k == 0:
            continue
        e, inner = begin[k - 1], gram(columns)
        for j, column in enumerate(columns):
            for i in range(len(columns)):
                h[e + j][e + i] += (a[k] << tb) * inner[j][i]
            h[e + j][e + j] += a[k] * by[k] << (2 * s)
            q[e + j] -= a[k] * ((sum(map(mul, column, b)) << tb) + (by[k] * c[j] << s))
            for i, entry in enumerate(column):
                cross = a[k] * ((1 << tb) + by[k]) * entry << s
                h[o + i][e + j] -= cross
                h[e + j][o + i] -= cross
    gain = a[0] * ((1 << tb) + by[0])
    outer = [[0] * n for _ in range(n)]
    for i, products in enumerate(gram(weights[0])):
        outer[i][: sizes[0]] = [gain * gain * product for product in products]
    wide = [[0] * (n - sizes[-1]) + row for row in weights[-1]]
    return Network(
        Matrix(h, 2 * s + ta + tb),
        Matrix(outer, 2 * (s + ta + tb)),
        Vector(q, 2 * s + ta + tb),
        Matrix([[gain * x for x in row] for row in weights[0]], s + ta + tb),
        Matrix(wide, s),
        Vector(biases[-1][0], s),
        len(weights[0][0]),
    )


# --- the quadratic form -------------------------------------------------------------------------------------------------


class Form:
    """The matrix S of some multipliers of products, with a proven bound on its eigenvalues and approximate solutions."""

    def __init__(self, net: Network, values: list[Any]) -> None:
        self.lam = exact(values, net.n_units, "the multipliers of products")
        lam, t = self.lam.entries, self.lam.shift
        h, outer = net.hessian, net.gram
        shift = max(h.shift + t + 1, outer.shift + 2 * t + 2)
        first, second = shift - h.shift - t - 1, shift - outer.shift - 2 * t - 2
        n = net.n_units
        rows = [
            [((lam[i] + lam[j]) * h.rows[i][j] << first) - (lam[i] * lam[j] * outer.rows[i][j] << second) for j in range(n)]
            for i in range(n)
        ]
        self.matrix = Matrix(rows, shift)
        self.kappa = smallest_eigenvalue(self.matrix)
        found = factor(rows, shift)
        if found is None:
            raise Refused("the quadratic form cannot be factored")
        self.lower, self.pivots = found
        self.upper = [[self.lower[i][j] for i in range(j, n)] for j in range(n)]

    def solve(self, b: Vector) -> Vector:
        """Return a vector near S^-1 b."""
        y: list[int] = []
        for left, value in zip(self.lower, b.at(BITS), strict=True):
            y.append(value - (sum(map(mul, left, y)) >> BITS))
        x = [(value << BITS) // pivot for value, pivot in zip(y, self.pivots, strict=True)]
        for j in range(len(x) - 1, -1, -1):
            x[j] -= sum(map(mul, self.upper[j][1:], x[j + 1 :])) >> BITS
        return Vector(x, BITS)


# --- certificates ------------------------------------------------------------------------------------------------------


def nonnegative(v: Vector, what: str) -> Vector:
    """Refuse a vector with a negative entry."""
    if min(v.entries, default=0) < 0:
        raise Refused(f"{what} must not be negative")
    return v


class Sample:
    """A certificate's input, and what the multipliers make of it."""

    def __init__(self, net: Network, x: list[Any]) -> None:
        self.net = net
        moved = net.by_input.times(exact(x, net.n_inputs, "the input"))
        self.q = net.constant + Vector(moved.entries + [0] * (net.n_units - len(moved.entries)), moved.shift)

    def without_lead(self, form: Form, given: dict[str, Any]) -> tuple[Vector, Fraction]:
        """Return b and the constant for sigma = 0, from the multipliers mu and nu."""
        net, lam, q = self.net, form.lam, self.q
        mu = nonnegative(exact(given["floor"], net.n_units, "floor"), "floor")
        nu = nonnegative(exact(given["sign"], net.n_units, "sign"), "sign")
        outer = net.gram.times(nu)
        half = lam * outer
        b = Vector(half.entries, half.shift + 1) - lam * q - mu - net.hessian.times(nu)
        return b, nu.dot(q) - nu.dot(outer) / 4

    def bound(self, form: Form, pair: tuple[int, int], sigma: Any, rest: tuple[Vector, Fraction]) -> Fraction:
        """Return D: every perturbation after which the rival is not below the label has at least this squared norm."""
        net, (label, rival), (b, constant) = self.net, pair, rest
        by = nonnegative(exact([sigma], 1, "sigma"), "sigma")
        rows, bias = net.read_out.rows, net.output_bias
        c = Vector([left - right for left, right in zip(rows[label], rows[rival], strict=True)], net.read_out.shift)
        b, constant = b + c.scaled(by), constant + by.dot(Vector([bias.entries[label] - bias.entries[rival]], bias.shift))
        minus = form.solve(b)
        t = Vector([-entry for entry in minus.entries], minus.shift + 1)
        applied = form.matrix.times(t)
        slope = Vector(applied.entries, applied.shift - 1) + b
        return constant + applied.dot(t) + b.dot(t) - slope.dot(slope) / (4 * form.kappa)


class Checker:
    """Checks certificates of one network; forms are proven when they are first needed."""

    def __init__(self, net: Network, forms: list[Any]) -> None:
        self.net, self.forms = net, forms
        self.known: dict[int, Form | Refused] = {}

    def form(self, index: Any) -> Form:
        """Return a proven form, or refuse."""
        if type(index) is not int or not 0 <= index < len(self.forms):
            raise Refused(f"there are no multipliers of products number {index}")
        if index not in self.known:
            try:
                self.known[index] = Form(self.net, self.forms[index])
            except Refused as reason:
                self.known[index] = reason
        known = self.known[index]
        if isinstance(known, Refused):
            raise known
        return known

    def square(self, certificate: dict[str, Any]) -> Fraction:
        """Return the square of the radius that a certificate proves; zero or less if it proves none."""
        try:
            n_outputs, label = len(self.net.read_out.rows), certificate["label"]
            if type(label) is not int or not 0 <= label < n_outputs:
                raise Refused(f"there is no output {label}")
            rivals = certificate["rivals"]
            missing = {str(j) for j in range(n_outputs) if j != label} ^ {*rivals}
            if missing:
                raise Refused(f"every other output needs multipliers, and no further ones: {', '.join(sorted(missing))}")
            sample = Sample(self.net, certificate["input"])
            shared: dict[int, tuple[Vector, Fraction]] = {}
            squares = []
            for j, given in rivals.items():
                form = self.form(given.get("form", 0))
                if "floor" in given or "sign" in given:
                    rest = sample.without_lead(form, given)
                else:  # the multipliers that several rivals of this certificate share
                    number = given.get("form", 0)
                    rest = shared[number] = shared.get(number) or sample.without_lead(form, certificate)
                squares.append(sample.bound(form, (label, int(j)), given["sigma"], rest))
            return min(squares)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise Refused(f"the certificate is not complete: {error!r}") from error


def accepts(square: Fraction, radius: Fraction) -> bool:
    """Whether a radius above zero is proven by the square of a proven one."""
    return 0 < radius and radius * radius <= square


def root_below(square: Fraction) -> Fraction:
    """Return the square root of a positive number, rounded down to 2**-BITS."""
    return Fraction(math.isqrt((square.numerator << (2 * BITS)) // square.denominator), 1 << BITS)


def judge(checker: Checker, certificate: Any) -> tuple[str | None, float, bool]:
    """Return why a certificate is refused or None, the proven radius, and whether 1.001 times that radius is refused."""
    try:
        square = checker.square(certificate)
        claimed = Fraction(exact([certificate.get("radius")], 1, "the radius").dot(Vector([1], 0)))
        float(claimed)
    except (Refused, OverflowError) as reason:
        return str(reason), 0.0, True
    proven = root_below(square) if square > 0 else Fraction(0)
    refused = not accepts(square, proven * RAISED) or proven == 0
    if not accepts(square, claimed):
        return f"the claimed radius is {float(claimed):.6g} and the proven one {float(proven):.6g}", float(proven), refused
    return None, float(proven), refused


def main() -> int:
    """Check a file; print what is refused, and a summary."""
    parser = argparse.ArgumentParser(description="Check written certificates in exact arithmetic.")
    parser.add_argument("proof", type=Path, help="file of lrrn certify --export-proof")
    parser.add_argument("weights", type=Path, help="safetensors file of the network")
    parser.add_argument("--ignore-digest", action="store_true", help="check the mathematics with whatever weights are given")
    options = parser.parse_args()
    start = time.perf_counter()
    try:
        content, proof = options.weights.read_bytes(), read_json(options.proof.read_bytes())
        digest, stated = hashlib.sha256(content).hexdigest(), proof["weights"]["sha256"]
        if digest != stated and not options.ignore_digest:
            raise Refused(f"the certificates are for weights with SHA-256 {stated}; {options.weights} has {digest}")
        checker, certificates = Checker(build(*read_weights(content)), proof["forms"]), proof["certificates"]
        if not isinstance(certificates, list):
            raise Refused("the certificates are not a list")
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, Refused) as error:
        print(f"refused: {error}")
        return 1
    accepted = raised = 0
    for number, certificate in enumerate(certificates):
        reason, _, refused = judge(checker, certificate)
        accepted, raised = accepted + (reason is None), raised + refused
        if reason is not None:
            print(f"certificate {number} is refused: {reason}")
    total = len(certificates)
    print(f"{accepted} of {total} certificates accepted; {raised} of {total} refused at 1.001 times the radius found here")
    print(f"{time.perf_counter() - start:.1f} s")
    return 0 if accepted == raised == total > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
