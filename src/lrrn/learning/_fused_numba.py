"""One training step of an energy objective as a single compiled call: arrays in, arrays out.

The same mathematics as :mod:`lrrn.energy` and :mod:`lrrn.derivatives`, whose results the tests hold it to; at small batches the
cost of a step is that of calling a hundred small operations, and here there is one call. Parameters and derivatives are flat
vectors: all W, then all b, then all c. Loops are written out because whole-array expressions take seconds each to compile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lrrn.compiled import kernel
from lrrn.learning._gemm import gemm
from lrrn.solvers._cd_numba import descend, fill_panels, invert_diagonal, residuals

LANES = 16
ACCEPTED = 3.0
"""A sample whose residual stays above the tolerance by less than this factor is left at that: rounding may not allow more."""


@kernel
def _pack(
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
    """Write the first ``blocks`` blocks of H as panels; if ``closed``, one more layer presses on the last of them."""
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
                    for j in range(d):
                        block[i, j] = ab[0] * gram[i, j]
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
                for j in range(d):
                    above[i, j] = -both[k + 1] * flat[start + i * d + j]
        for j in range(d):
            block[j, j] += own
        at = fill_panels(panels, at, below, block, above)
        unit = invert_diagonal(inverse_diagonal, unit, block)
        below = above


@kernel
def _linear(
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
            for j in range(d):
                q[i, start + j] = term[0, j]
        if k == 0:
            gemm(n, d, d_in, both[0], x, 0, d_in, False, flat, w_at[0], d_in, True, one, q, 0, dim)
        start += d


@kernel
def _clamp(
    flat: Any, w_at: Any, b_at: Any, sizes: Any, a: Any, both: Any, last: int, eliminated: bool, y: Any, q: Any, out: Any
) -> None:
    """Write q of the clamped phase: that of the free phase over the hidden blocks, plus the pull of the target."""
    d, width, n, hidden = sizes[last], sizes[last + 1], out.shape[0], out.shape[1]
    one = flat.dtype.type(1)
    for i in range(n):
        for j in range(hidden):
            out[i, j] = q[i, j]
    pull = np.empty((n, width), flat.dtype)
    for i in range(n):
        for j in range(width):
            pull[i, j] = both[last] * y[i, j]
            if eliminated and b_at[last] >= 0:
                # the bias of an eliminated output is not in q yet
                pull[i, j] -= a[last] * flat[b_at[last] + j]
    gemm(n, d, width, one, pull, 0, width, False, flat, w_at[last], d, False, one, out, hidden - d, hidden)


@kernel
def _solve(
    panels: Any,
    plan: Any,
    inverse_diagonal: Any,
    lo: Any,
    hi: Any,
    q: Any,
    tol: float,
    max_sweeps: int,
    cold: bool,
    z: Any,
    sweeps: Any,
    sign: Any,
    losses: Any,
) -> bool:
    """Solve one phase from ``z`` on and add ``sign`` times its value to the losses; return whether every sample converged."""
    n, dim = z.shape
    layout, place = plan[0], plan[1]
    g = np.empty_like(z)
    norms, threshold, used = np.empty(n, np.float64), np.empty(n, np.float64), np.zeros(n, np.int64)
    low, high = np.empty((1, dim), z.dtype), np.empty((1, dim), z.dtype)
    for j in range(dim):
        low[0, j] = lo[0, j]
        high[0, j] = hi[0, j]
    for i in range(n):
        square = 0.0
        for j in range(dim):
            square += np.float64(q[i, j]) * np.float64(q[i, j])
            g[i, j] = -q[i, j]
        # a little inside, so that the recomputed residual agrees
        threshold[i] = (0.9 * tol) ** 2 * max(1.0, square)
    if not cold:
        residuals(panels, layout, inverse_diagonal, place, LANES, low, high, q, z, g, norms)
    descend(panels, layout, inverse_diagonal, place, LANES, low, high, threshold, max_sweeps, norms[:0], z, g, used)
    residuals(panels, layout, inverse_diagonal, place, LANES, low, high, q, z, g, norms)
    done = True
    for i in range(n):
        sweeps[0] += used[i]
        done = done and (0.9 * norms[i] / ACCEPTED) ** 2 <= threshold[i]
        value = 0.0
        for j in range(dim):
            value += np.float64(z[i, j]) * (np.float64(g[i, j]) - np.float64(q[i, j]))
        losses[i] += sign * 0.5 * value
    return done


@kernel
def _mismatch(
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
def _add_layer(
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
    """Add ``sign`` times the derivatives of one layer's energy to ``out``: mismatches of some activations times some others.

    The two are the same for a phase of its own. ``biased`` says whether the mismatches have the biases in them, ``d_biases``
    whether their sums are derivatives of the biases.
    """
    n = weight.shape[0]
    one = flat.dtype.type(1)
    rows = np.empty(n * max(d, d_in), flat.dtype)
    b_in, c_in = (b_at, c_at) if biased else (np.int64(-1), np.int64(-1))
    for direction in range(2 if ab != 0 else 1):
        backwards = direction == 1
        _mismatch(
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
def _add_first_difference(
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
    weight: Any,
    sign: Any,
    a: Any,
    out: Any,
) -> None:
    """Add ``sign`` times the difference of the first layer's derivatives between two phases, whose input is the same.

    Only z_1 differs, so neither W_0 x nor, with many samples, anything as wide as the input is formed per sample.
    """
    n = weight.shape[0]
    one = flat.dtype.type(1)
    few = 2 * n < d
    # u^T u - v^T v as (u - v)^T u + v^T (u - v): the phases differ by little, and sums of what they share would cancel
    # rows: minus both times the weighted difference, ab times it, ab times the weighted v, and the difference itself
    rows = np.empty((4 * n, d), flat.dtype)
    total = np.zeros((1, d), flat.dtype)
    ups, downs = up.reshape(-1), down.reshape(-1)
    for i in range(n):
        scale = sign * weight[i]
        for j in range(d):
            second = downs[i * down_stride + j]
            difference = ups[i * up_stride + j] - second
            rows[i, j] = -both * (scale * difference)
            rows[n + i, j] = ab * (scale * difference)
            rows[2 * n + i, j] = ab * (scale * second)
            rows[3 * n + i, j] = difference
            total[0, j] += scale * difference
    if b_at >= 0:
        for j in range(d):
            out[b_at + j] -= a * total[0, j]
    if ab == 0:
        gemm(d, d_in, n, one, rows, 0, d, True, x, 0, d_in, False, one, out, w_at, d_in)
        return
    if c_at >= 0:
        gemm(1, d_in, d, -ab, total, 0, d, False, flat, w_at, d_in, False, one, out, c_at, d_in)
    if few:
        # z_1^T (z_1 W_0 - c) by way of the reconstructions, in one product with the rest
        columns = np.empty((3 * n, d_in), flat.dtype)
        for i in range(n):
            for j in range(d_in):
                columns[i, j] = x[i, j]
                columns[n + i, j] = -flat[c_at + j] if c_at >= 0 else 0
                columns[2 * n + i, j] = 0
        gemm(n, d_in, d, one, up, 0, up_stride, False, flat, w_at, d_in, False, one, columns, n * d_in, d_in)
        gemm(n, d_in, d, one, rows, 3 * n * d, d, False, flat, w_at, d_in, False, one, columns, 2 * n * d_in, d_in)
        gemm(d, d_in, 3 * n, one, rows, 0, d, True, columns, 0, d_in, False, one, out, w_at, d_in)
        return
    moments = np.zeros((d, d), flat.dtype)
    gemm(d, d, n, one, rows, n * d, d, True, up, 0, up_stride, False, one, moments, 0, d)
    gemm(d, d, n, one, rows, 2 * n * d, d, True, rows, 3 * n * d, d, False, one, moments, 0, d)
    gemm(d, d_in, n, one, rows, 0, d, True, x, 0, d_in, False, one, out, w_at, d_in)
    gemm(d, d_in, d, one, moments, 0, d, False, flat, w_at, d_in, False, one, out, w_at, d_in)
    if c_at >= 0:
        gemm(d, d_in, 1, -ab, total, 0, d, True, flat, c_at, d_in, False, one, out, w_at, d_in)


@kernel
def _add_later_differences(
    flat: Any,
    w_at: Any,
    b_at: Any,
    c_at: Any,
    sizes: Any,
    a: Any,
    ab: Any,
    eliminated: bool,
    y: Any,
    down: Any,
    up: Any,
    weight: Any,
    sign: Any,
    out: Any,
) -> None:
    """Add ``sign`` times the difference of the later layers' derivatives between the clamped phase and the free one.

    With mismatches R: R(u) u - R(v) v = R(u - v) u + R(v) (u - v), in which nothing large cancels.
    """
    n, n_layers = weight.shape[0], w_at.shape[0]
    last, hidden, stride, zero = n_layers - 1, up.shape[1], down.shape[1], np.int64(0)
    moved = np.empty((n, hidden), flat.dtype)
    moved_last = np.empty((n, sizes[n_layers]), flat.dtype)
    for i in range(n):
        for j in range(hidden):
            moved[i, j] = up[i, j] - down[i, j]
        for j in range(sizes[n_layers]):
            moved_last[i, j] = y[i, j] if eliminated else y[i, j] - down[i, hidden + j]
    at = sizes[1]
    for k in range(1, n_layers):
        d, d_in = sizes[k + 1], sizes[k]
        below = at - d_in
        above, above_at, above_stride = (up, at, hidden) if k < last else (y, zero, d)
        change, change_at, change_stride = (moved, at, hidden) if k < last else (moved_last, zero, d)
        if k == last and eliminated:
            # the free phase has no mismatch here
            _add_layer(
                flat, w_at[k], b_at[k], c_at[k], d, d_in, a[k], ab[k],
                up, below, hidden, above, above_at, above_stride,
                up, below, hidden, above, above_at, above_stride, True, True, weight, sign, out,
            )  # fmt: skip
        else:
            _add_layer(
                flat, w_at[k], b_at[k], c_at[k], d, d_in, a[k], ab[k],
                moved, below, hidden, change, change_at, change_stride,
                up, below, hidden, above, above_at, above_stride, False, True, weight, sign, out,
            )  # fmt: skip
            _add_layer(
                flat, w_at[k], b_at[k], c_at[k], d, d_in, a[k], ab[k],
                down, below, stride, down, at, stride,
                moved, below, hidden, change, change_at, change_stride, True, False, weight, sign, out,
            )  # fmt: skip
        at += d


@kernel
def _add_constant(
    flat: Any,
    w_at: int,
    b_at: int,
    c_at: int,
    d: int,
    d_in: int,
    a: Any,
    ab: Any,
    below: Any,
    above: Any,
    sign: Any,
    losses: Any,
) -> None:
    """Add ``sign`` times one layer's energy between two given layers to the losses."""
    n = losses.shape[0]
    rows, origin = np.empty(n * max(d, d_in), flat.dtype), np.int64(0)
    for direction in range(2 if ab != 0 else 1):
        backwards = direction == 1
        width, factor = (d_in, ab) if backwards else (d, a)
        _mismatch(flat, w_at, b_at, c_at, d, d_in, backwards, below, origin, d_in, above, origin, d, n, rows)
        for i in range(n):
            total = 0.0
            for j in range(width):
                value = np.float64(rows[i * width + j])
                total += value * value
            losses[i] += sign * 0.5 * factor * total


@kernel
def energy_step(
    flat: Any,  # (p,): the parameters
    w_at: Any,  # (L,) int64: where each W_k begins
    b_at: Any,  # (L,) int64: where each b_k begins, -1 if there is none
    c_at: Any,
    sizes: Any,  # (L + 1,) int64
    a: Any,  # (L,): discounts a_k, in the dtype of flat, as is everything that is neither an index nor a tolerance
    ab: Any,  # (L,): a_k beta_k
    both: Any,  # (L,): a_k (1 + beta_k)
    eliminated: bool,  # whether the output is not an unknown of the free phase
    plan_free: Any,  # layout, place, padded units and total length of the free phase's panels
    plan_clamped: Any,
    lo: Any,  # (1, d_1 + ... + d_L)
    hi: Any,
    gram: Any,  # (d_1, d_1): W_0 W_0^T; not read if beta_0 is 0
    x: Any,  # (n, d_0)
    y: Any,  # (n, d_L); not read if sign_clamped is 0
    weight: Any,  # (n,): the factor on each sample's loss
    sign_free: Any,  # factor on the free energy, 0 to leave that phase out
    sign_clamped: Any,
    tol: float,
    max_sweeps: int,
    cold: bool,  # whether z_free holds zeros
    z_free: Any,  # (n, free units): where to start; out: the solution
    z_clamped: Any,  # (n, hidden units), likewise, but it starts from the free phase if that was solved
    sweeps: Any,  # (1,) int64, added to
    losses: Any,  # (n,), out: sign_clamped E(zhat) + sign_free E(z*)
    out: Any,  # (p,): derivatives of the sum of weight * losses; zero on entry
) -> bool:
    """Return whether every solve converged; if not, only ``z_free``, ``z_clamped`` and ``sweeps`` mean anything."""
    n, n_layers = x.shape[0], w_at.shape[0]
    last = n_layers - 1
    n_free = last if eliminated else n_layers
    hidden = z_clamped.shape[1]
    free, clamped = sign_free != 0, sign_clamped != 0
    q = np.empty(z_free.shape, flat.dtype)
    _linear(flat, w_at, b_at, c_at, sizes, a, ab, both, n_free, x, q)
    for i in range(n):
        losses[i] = 0
    for phase in range(2):
        at_free = phase == 0
        if not (free if at_free else clamped):
            continue
        plan = plan_free if at_free else plan_clamped
        panels, inverse = np.zeros(plan[3], flat.dtype), np.zeros(plan[2], flat.dtype)
        _pack(flat, w_at, sizes, a, ab, both, gram, n_free if at_free else last, not at_free, panels, inverse)
        linear, z, sign = q, z_free, sign_free
        if not at_free:
            linear, z, sign = np.empty((n, hidden), flat.dtype), z_clamped, sign_clamped
            _clamp(flat, w_at, b_at, sizes, a, both, last, eliminated, y, q, linear)
            if free:
                for i in range(n):
                    for j in range(hidden):
                        z[i, j] = z_free[i, j]
        start = cold and (at_free or not free)
        if not _solve(panels, plan, inverse, lo, hi, linear, tol, max_sweeps, start, z, sweeps, sign, losses):
            return False
    # what the two energies are at zero activations, which their QPs leave out
    common = sign_free + sign_clamped
    for k in range(n_layers):
        d, d_in = sizes[k + 1], sizes[k]
        below = x if k == 0 else np.zeros((n, d_in), flat.dtype)
        zero = np.zeros((n, d), flat.dtype)
        if k < last and common != 0:
            _add_constant(flat, w_at[k], b_at[k], c_at[k], d, d_in, a[k], ab[k], below, zero, common, losses)
        if k == last and clamped:
            _add_constant(flat, w_at[k], b_at[k], c_at[k], d, d_in, a[k], ab[k], below, y, sign_clamped, losses)
        if k == last and free and not eliminated:
            _add_constant(flat, w_at[k], b_at[k], c_at[k], d, d_in, a[k], ab[k], below, zero, sign_free, losses)
    # derivatives at fixed activations
    balanced = free and clamped and common == 0
    if balanced:
        _add_first_difference(
            flat, w_at[0], b_at[0], c_at[0], sizes[1], sizes[0], ab[0], both[0],
            x, z_clamped, hidden, z_free, z_free.shape[1], weight, sign_clamped, a[0], out,
        )  # fmt: skip
        _add_later_differences(
            flat, w_at, b_at, c_at, sizes, a, ab, eliminated, y, z_free, z_clamped, weight, sign_clamped, out
        )  # fmt: skip
        return True
    for phase in range(2):
        at_free = phase == 0
        if not (free if at_free else clamped):
            continue
        z, sign = (z_free, sign_free) if at_free else (z_clamped, sign_clamped)
        stride, at = z.shape[1], 0
        for k in range(n_free if at_free else n_layers):
            d, d_in = sizes[k + 1], sizes[k]
            below, below_at, below_stride = (x, np.int64(0), d_in) if k == 0 else (z, at - d_in, stride)
            above, above_at, above_stride = (z, at, stride) if at_free or k < last else (y, np.int64(0), d)
            at += d
            _add_layer(
                flat, w_at[k], b_at[k], c_at[k], d, d_in, a[k], ab[k],
                below, below_at, below_stride, above, above_at, above_stride,
                below, below_at, below_stride, above, above_at, above_stride, True, True, weight, sign, out,
            )  # fmt: skip
    return True
