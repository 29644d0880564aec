"""The energy in compiled code for the CPU: its QP, the solution and its derivatives.

The mathematics is that of :mod:`lrrn.energy`, and the tests compare both. For small batches the cost of a step is dominated by
the overhead of a hundred small operations; compiled code avoids it. Parameters and derivatives are flat vectors: all W, all b
and all c, at the offsets ``w_at``, ``b_at`` and ``c_at``, which are -1 if there is no bias. ``a``, ``ab`` and ``both`` hold
a_k, a_k beta_k and a_k (1 + beta_k). Loops are explicit because each whole-array expression takes seconds to compile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lrrn.kernels.constants import GAIN, INSIDE, LANES, SINGLE_ROUNDS, SMALLEST
from lrrn.kernels.cpu.compiled import kernel, summing
from lrrn.kernels.cpu.coordinate_descent import descend, fill_panels, invert_diagonal, residuals
from lrrn.kernels.cpu.gemm import gemm
from lrrn.kernels.cpu.vector_sweep import PANEL


@summing
def squared_norm(rows: Any, i: int) -> float:
    """Sum the squares of a row."""
    total = 0.0
    for j in range(rows.shape[1]):
        total += np.float64(rows[i, j]) * np.float64(rows[i, j])
    return total


@summing
def squared_residual(lo: Any, hi: Any, z: Any, g: Any, i: int) -> float:
    """Return the squared norm of the KKT residual of a row."""
    row = i if lo.shape[0] > 1 else 0
    total = 0.0
    for j in range(z.shape[1]):
        held = (z[i, j] <= lo[row, j]) & (g[i, j] > 0) | (z[i, j] >= hi[row, j]) & (g[i, j] < 0)
        free = np.float64(0) if held else np.float64(g[i, j])
        total += free * free
    return total


@summing
def value(q: Any, z: Any, g: Any, i: int) -> float:
    """Return 1/2 z^T H z - q^T z of a row."""
    total = 0.0
    for j in range(z.shape[1]):
        total += np.float64(z[i, j]) * (np.float64(g[i, j]) - np.float64(q[i, j]))
    return 0.5 * total


@kernel
def pack(
    flat: Any,
    w_at: Any,
    sizes: Any,
    a: Any,
    ab: Any,
    both: Any,
    gram: Any,
    blocks: int,
    closed: bool,
    panels: Any,
    inverse_diagonal: Any,
) -> None:
    """Write the first ``blocks`` blocks of H as panels; if ``closed``, the last one includes the terms of the layer above."""
    at, unit = 0, 0
    below = np.empty((sizes[1], 0), flat.dtype)
    for k in range(blocks):
        d = sizes[k + 1]
        block = np.zeros((d, d), flat.dtype)
        pressed = k + 1 < blocks or closed
        # a_k (I + beta_k W_k W_k^T) + a_{k+1} (W_{k+1}^T W_{k+1} + beta_{k+1} I)
        if ab[k] != 0:
            if k == 0:
                for i in range(d):
                    source, target = gram[i], block[i]
                    for j in range(d):
                        target[j] = ab[0] * source[j]
            else:
                gemm(d, d, sizes[k], ab[k], flat, w_at[k], sizes[k], False, flat, w_at[k], sizes[k], True, a[k], block, 0, d)
        own = a[k]
        above = np.empty((sizes[k + 2] if k + 1 < blocks else 0, d), flat.dtype)
        if pressed:
            own += ab[k + 1]
            width = sizes[k + 2]
            start = w_at[k + 1]
            gemm(d, d, width, a[k + 1], flat, start, d, True, flat, start, d, False, flat.dtype.type(1), block, 0, d)
            for i in range(above.shape[0]):
                source, target = flat[start + i * d :], above[i]
                for j in range(d):
                    target[j] = -both[k + 1] * source[j]
        for j in range(d):
            block[j, j] += own
        at = fill_panels(panels, at, below, block, above)
        unit = invert_diagonal(inverse_diagonal, unit, block)
        below = above


@kernel
def linear(
    flat: Any, w_at: Any, b_at: Any, c_at: Any, sizes: Any, a: Any, ab: Any, both: Any, blocks: int, x: Any, q: Any
) -> None:
    """Write q of the free phase over its first ``blocks`` blocks."""
    n, dim = q.shape
    one = flat.dtype.type(1)
    start = 0
    for k in range(blocks):
        d, d_in = sizes[k + 1], sizes[k]
        term = np.zeros((1, d), flat.dtype)
        if b_at[k] >= 0:
            for j in range(d):
                term[0, j] = a[k] * flat[b_at[k] + j]
        if c_at[k] >= 0 and ab[k] != 0:
            gemm(1, d, d_in, ab[k], flat, c_at[k], d_in, False, flat, w_at[k], d_in, True, one, term, 0, d)
        if k + 1 < blocks:
            width = sizes[k + 2]
            if b_at[k + 1] >= 0:
                gemm(1, d, width, -a[k + 1], flat, b_at[k + 1], width, False, flat, w_at[k + 1], d, False, one, term, 0, d)
            if c_at[k + 1] >= 0:
                for j in range(d):
                    term[0, j] -= ab[k + 1] * flat[c_at[k + 1] + j]
        for i in range(n):
            source, target = term[0], q[i, start:]
            for j in range(d):
                target[j] = source[j]
        if k == 0:
            gemm(n, d, d_in, both[0], x, 0, d_in, False, flat, w_at[0], d_in, True, one, q, 0, dim)
        start += d


@kernel
def press(flat: Any, w_at: Any, sizes: Any, a: Any, ab: Any, k: int, plan: Any, panels: Any, inverse_diagonal: Any) -> None:
    """Add the terms of layer ``k`` to the last block of H, in panels that :func:`pack` wrote without them."""
    layout, place = plan[0], plan[1]
    d, width, dim = sizes[k], sizes[k + 1], place.shape[0]
    start = place[dim - d]
    block = np.zeros((d, d), flat.dtype)
    gemm(d, d, width, a[k], flat, w_at[k], d, True, flat, w_at[k], d, False, flat.dtype.type(0), block, 0, d)
    for p in range(layout.shape[0]):
        first = layout[p, 1] - start
        if first < 0:
            continue
        at = layout[p, 0] + (start - layout[p, 2]) * PANEL
        for i in range(min(PANEL, d - first)):
            j = first + i
            block[j, j] += ab[k]
            for m in range(d):
                panels[at + m * PANEL + i] += block[m, j]
            inverse_diagonal[start + j] = 1 / panels[at + j * PANEL + i]


@kernel
def begin(
    panels: Any, plan: Any, inverse_diagonal: Any, lo: Any, hi: Any, q: Any, cold: bool, z: Any, g: Any, norms: Any
) -> None:
    """Write the gradient H z - q at ``z``, which is zero if ``cold``."""
    if not cold:
        residuals(panels, plan[0], inverse_diagonal, plan[1], LANES, lo, hi, q, z, g, norms)
        return
    for i in range(q.shape[0]):
        for j in range(q.shape[1]):
            g[i, j] = -q[i, j]


@kernel
def solve(
    panels: Any,
    plan: Any,  # layout, place, padded units and total length of the panels
    inverse_diagonal: Any,
    lo: Any,  # (1 or n, dim)
    hi: Any,
    q: Any,  # (n, dim)
    tol: float,
    max_sweeps: int,
    exact: bool,  # whether to recompute gradients and residuals at the end
    z: Any,  # (n, dim), feasible; out: the solution
    g: Any,  # (n, dim): H z - q, in and out
    norms: Any,  # (n,) float64, out: norm of the KKT residual
    scale: Any,  # (n,) float64, out: max(1, |q|), what tol is relative to
    used: Any,  # (n,) int64, out: sweeps spent
) -> None:
    """Solve a box-constrained QP by coordinate descent, starting at ``z``."""
    n = z.shape[0]
    layout, place = plan[0], plan[1]
    threshold = np.empty(n, np.float64)
    for i in range(n):
        scale[i] = np.sqrt(max(1.0, squared_norm(q, i)))
        # stop slightly below the threshold, so that the recomputed residual is below it too
        threshold[i] = (INSIDE * tol * scale[i]) ** 2
    descend(panels, layout, inverse_diagonal, place, LANES, lo, hi, threshold, max_sweeps, norms[:0], z, g, used)
    if exact:
        residuals(panels, layout, inverse_diagonal, place, LANES, lo, hi, q, z, g, norms)
        return
    for i in range(n):
        norms[i] = np.sqrt(squared_residual(lo, hi, z, g, i))


@kernel
def narrow(panels: Any, place: Any, inverse_diagonal: Any, singles: Any, inverse_single: Any) -> bool:
    """Convert the panels to float32; return whether their diagonal is in its range."""
    for i in range(panels.shape[0]):
        singles[i] = panels[i]
    for j in range(inverse_diagonal.shape[0]):
        inverse_single[j] = inverse_diagonal[j]
    for j in range(place.shape[0]):
        inverse = inverse_diagonal[place[j]]
        if not (SMALLEST < inverse and inverse < 1 / SMALLEST):
            return False
    return True


@kernel
def solve_mixed(
    panels: Any,
    plan: Any,
    inverse_diagonal: Any,
    singles: Any,  # the panels in float32, and 1 / their diagonal; empty to use no float32
    inverse_single: Any,
    lo: Any,
    hi: Any,
    q: Any,
    tol: float,
    max_sweeps: int,
    z: Any,
    g: Any,
    norms: Any,
    scale: Any,
    used: Any,
) -> None:
    """Solve like :func:`solve`, in mixed precision; gradients and residuals are recomputed at the end.

    The first sweeps compute a correction of ``z`` in float32, with twice as many numbers per vector.
    """
    n = z.shape[0]
    layout, place = plan[0], plan[1]
    threshold, spent = np.empty(n, np.float64), np.zeros(n, np.int64)
    before = np.zeros(n, np.int64)
    missing = True
    if singles.shape[0] > 0:
        for i in range(n):
            scale[i] = np.sqrt(max(1.0, squared_norm(q, i)))
            norms[i] = np.sqrt(squared_residual(lo, hi, z, g, i))
        for _ in range(SINGLE_ROUNDS):
            for i in range(n):
                threshold[i] = max(INSIDE * tol * scale[i] / norms[i], GAIN) ** 2
            descend(singles, layout, inverse_single, place, LANES, lo, hi, threshold, max_sweeps, norms, z, g, spent)
            residuals(panels, layout, inverse_diagonal, place, LANES, lo, hi, q, z, g, norms)
            missing = False
            for i in range(n):
                before[i] += spent[i]
                missing = missing or not norms[i] <= tol * scale[i]
            if not missing:
                break
    if missing:
        solve(panels, plan, inverse_diagonal, lo, hi, q, tol, max_sweeps, True, z, g, norms, scale, spent)
    else:
        for i in range(n):
            spent[i] = 0
    for i in range(n):
        used[i] = before[i] + spent[i]


@kernel
def mismatch(
    flat: Any,
    w_at: int,
    b_at: int,
    c_at: int,
    d: int,
    d_in: int,
    backwards: bool,
    below: Any,
    below_at: int,
    below_stride: int,
    above: Any,
    above_at: int,
    above_stride: int,
    n: int,
    to: Any,
) -> None:
    """Write z_{k+1} - W_k z_k - b_k or, backwards, W_k^T z_{k+1} - z_k - c_k for ``n`` samples into a vector, row by row."""
    one = flat.dtype.type(1)
    source, width = below.reshape(-1), d_in
    bias, at, stride, sign = c_at, below_at, below_stride, -one
    if not backwards:
        source, width = above.reshape(-1), d
        bias, at, stride, sign = b_at, above_at, above_stride, one
    for i in range(n):
        for j in range(width):
            value = sign * source[at + i * stride + j]
            if bias >= 0:
                value -= flat[bias + j]
            to[i * width + j] = value
    if backwards:
        gemm(n, d_in, d, one, above, above_at, above_stride, False, flat, w_at, d_in, False, one, to, 0, d_in)
    else:
        gemm(n, d, d_in, -one, below, below_at, below_stride, False, flat, w_at, d_in, True, one, to, 0, d)


@kernel
def add_layer(
    flat: Any,
    w_at: int,
    b_at: int,
    c_at: int,
    d: int,
    d_in: int,
    a: Any,
    ab: Any,
    below: Any,
    below_at: int,
    below_stride: int,
    above: Any,
    above_at: int,
    above_stride: int,
    with_below: Any,
    with_below_at: int,
    with_below_stride: int,
    with_above: Any,
    with_above_at: int,
    with_above_stride: int,
    biased: bool,
    d_biases: bool,
    weight: Any,
    sign: Any,
    out: Any,
) -> None:
    """Add ``sign`` times the derivatives of one layer's energy to ``out``: products of mismatches and activations.

    For a single phase both belong to the same activations. ``biased``: whether the mismatches include the biases.
    ``d_biases``: whether their sums are derivatives in the biases.
    """
    n = weight.shape[0]
    one = flat.dtype.type(1)
    rows = np.empty(n * max(d, d_in), flat.dtype)
    b_in, c_in = (b_at, c_at) if biased else (np.int64(-1), np.int64(-1))
    for direction in range(2 if ab != 0 else 1):
        backwards = direction == 1
        mismatch(
            flat, w_at, b_in, c_in, d, d_in, backwards, below, below_at, below_stride, above, above_at, above_stride, n, rows
        )  # fmt: skip
        width, bias = (d_in, c_at) if backwards else (d, b_at)
        for i in range(n):
            factor = -sign * weight[i] * (ab if backwards else a)
            for j in range(width):
                rows[i * width + j] *= factor
                if d_biases and bias >= 0:
                    out[bias + j] += rows[i * width + j]
        if backwards:
            gemm(
                d, d_in, n, -one, with_above, with_above_at, with_above_stride, True, rows, 0, d_in, False, one, out, w_at, d_in
            )  # fmt: skip
        else:
            gemm(
                d, d_in, n, one, rows, 0, d, True, with_below, with_below_at, with_below_stride, False, one, out, w_at, d_in
            )  # fmt: skip


@kernel
def add_first_difference(
    flat: Any,
    w_at: int,
    b_at: int,
    c_at: int,
    d: int,
    d_in: int,
    ab: Any,
    both: Any,
    x: Any,
    up: Any,
    up_stride: int,
    down: Any,
    down_stride: int,
    moved: Any,
    moved_stride: int,
    weight: Any,
    sign: Any,
    a: Any,
    out: Any,
) -> None:
    """Add ``sign`` times the difference of the first layer's derivatives between two phases, whose input is the same.

    The derivatives in W_0 are written, not added, so that this part of ``out`` need not be zero before.

    ``moved`` is the difference of their activations; with the same activations twice it is the derivative along ``moved``. Only
    z_1 differs, so neither W_0 x nor, with many samples, anything as wide as the input is formed per sample.
    """
    n = weight.shape[0]
    one = flat.dtype.type(1)
    few = 2 * n < d
    # u^T u - v^T v as (u - v)^T u + v^T (u - v): the phases differ by little, and the direct difference would cancel
    # rows: minus both times the weighted difference, ab times it, ab times the weighted v, and the difference itself
    rows = np.empty((4 * n, d), flat.dtype)
    total = np.zeros((1, d), flat.dtype)
    moves, downs, sums = moved.reshape(-1), down.reshape(-1), total[0]
    for i in range(n):
        scale = sign * weight[i]
        # separate vectors, here and below, which the compiler can vectorise
        seconds, differences = downs[i * down_stride :], moves[i * moved_stride :]
        with_x, with_up, with_moved, copies = rows[i], rows[n + i], rows[2 * n + i], rows[3 * n + i]
        for j in range(d):
            difference = differences[j]
            with_x[j] = -both * (scale * difference)
            with_up[j] = ab * (scale * difference)
            with_moved[j] = ab * (scale * seconds[j])
            copies[j] = difference
            sums[j] += scale * difference
    if b_at >= 0:
        for j in range(d):
            out[b_at + j] -= a * total[0, j]
    if ab == 0:
        gemm(d, d_in, n, one, rows, 0, d, True, x, 0, d_in, False, one * 0, out, w_at, d_in)
        return
    if c_at >= 0:
        gemm(1, d_in, d, -ab, total, 0, d, False, flat, w_at, d_in, False, one, out, c_at, d_in)
    if few:
        # z_1^T (z_1 W_0 - c) from the reconstructions, in one product with the other terms
        columns = np.empty((3 * n, d_in), flat.dtype)
        for i in range(n):
            source, target = x[i], columns[i]
            for j in range(d_in):
                target[j] = source[j]
        gemm(n, d_in, d, one, up, 0, up_stride, False, flat, w_at, d_in, False, one * 0, columns, n * d_in, d_in)
        if c_at >= 0:
            bias = flat[c_at:]
            for i in range(n):
                target = columns[n + i]
                for j in range(d_in):
                    target[j] -= bias[j]
        gemm(n, d_in, d, one, rows, 3 * n * d, d, False, flat, w_at, d_in, False, one * 0, columns, 2 * n * d_in, d_in)
        gemm(d, d_in, 3 * n, one, rows, 0, d, True, columns, 0, d_in, False, one * 0, out, w_at, d_in)
        return
    moments = np.zeros((d, d), flat.dtype)
    gemm(d, d, n, one, rows, n * d, d, True, up, 0, up_stride, False, one, moments, 0, d)
    gemm(d, d, n, one, rows, 2 * n * d, d, True, rows, 3 * n * d, d, False, one, moments, 0, d)
    gemm(d, d_in, n, one, rows, 0, d, True, x, 0, d_in, False, one * 0, out, w_at, d_in)
    gemm(d, d_in, d, one, moments, 0, d, False, flat, w_at, d_in, False, one, out, w_at, d_in)
    if c_at >= 0:
        gemm(d, d_in, 1, -ab, total, 0, d, True, flat, c_at, d_in, False, one, out, w_at, d_in)


@kernel
def add_later_differences(
    flat: Any,
    w_at: Any,
    b_at: Any,
    c_at: Any,
    sizes: Any,
    a: Any,
    ab: Any,
    layers: int,
    down: Any,
    up: Any,
    moved: Any,
    weight: Any,
    sign: Any,
    out: Any,
) -> None:
    """Add ``sign`` times the difference of derivatives between two phases, of the layers 1, ..., layers - 1.

    ``moved`` is the difference of their activations. With mismatches R: R(u) u - R(v) v = R(u - v) u + R(v) (u - v), which
    avoids cancellation. With the same activations twice it is the derivative along ``moved``.
    """
    at = sizes[1]
    for k in range(1, layers):
        d, d_in = sizes[k + 1], sizes[k]
        below = at - d_in
        add_layer(
            flat, w_at[k], b_at[k], c_at[k], d, d_in, a[k], ab[k],
            moved, below, moved.shape[1], moved, at, moved.shape[1],
            up, below, up.shape[1], up, at, up.shape[1], False, True, weight, sign, out,
        )  # fmt: skip
        add_layer(
            flat, w_at[k], b_at[k], c_at[k], d, d_in, a[k], ab[k],
            down, below, down.shape[1], down, at, down.shape[1],
            moved, below, moved.shape[1], moved, at, moved.shape[1], True, False, weight, sign, out,
        )  # fmt: skip
        at += d


@kernel
def clear(out: Any, first: int, length: int) -> None:
    """Set a vector to zero, except for ``length`` entries from ``first`` on."""
    for j in range(first):
        out[j] = 0
    for j in range(first + length, out.shape[0]):
        out[j] = 0
