"""One training step of an energy objective as a single compiled call.

Solves and derivatives use the functions of :mod:`lrrn.kernels.cpu.energy`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lrrn.kernels.constants import ACCEPTED
from lrrn.kernels.cpu.compiled import kernel
from lrrn.kernels.cpu.energy import (
    add_first_difference,
    add_later_differences,
    add_layer,
    begin,
    clear,
    linear,
    mismatch,
    pack,
    press,
    solve,
    value,
)
from lrrn.kernels.cpu.gemm import gemm

RUNNING = 1000.0
"""Tolerance, in units in the last place, below which residuals are recomputed."""


@kernel
def _clamp(
    flat: Any, w_at: Any, b_at: Any, sizes: Any, a: Any, both: Any, last: int, eliminated: bool, y: Any, q: Any, out: Any
) -> None:
    """Write q of the clamped phase: that of the free phase over the hidden blocks, plus the term of the target."""
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
                # q does not include the bias of an eliminated output yet
                pull[i, j] -= a[last] * flat[b_at[last] + j]
    gemm(n, d, width, one, pull, 0, width, False, flat, w_at[last], d, False, one, out, hidden - d, hidden)


@kernel
def _solve_phase(
    panels: Any,
    plan: Any,
    inverse_diagonal: Any,
    lo: Any,
    hi: Any,
    q: Any,
    tol: float,
    max_sweeps: int,
    z: Any,
    g: Any,
    sweeps: Any,
    sign: Any,
    losses: Any,
) -> bool:
    """Solve one phase, starting at ``z``, and add ``sign`` times its value to the losses; return whether all converged."""
    n = z.shape[0]
    norms, scale, used = np.empty(n, np.float64), np.empty(n, np.float64), np.zeros(n, np.int64)
    # the error of a gradient after a few sweeps of updates is a few units in the last place
    exact = tol < RUNNING * np.finfo(z.dtype).eps
    solve(panels, plan, inverse_diagonal, lo, hi, q, tol, max_sweeps, exact, z, g, norms, scale, used)
    done = True
    for i in range(n):
        sweeps[0] += used[i]
        done = done and norms[i] <= ACCEPTED * tol * scale[i]
        losses[i] += sign * value(q, z, g, i)
    return done


@kernel
def _clamp_gradient(flat: Any, w_at: Any, b_at: Any, sizes: Any, a: Any, last: int, y: Any, z: Any, g: Any) -> None:
    """Convert the gradient of the free phase to that of the clamped phase: add the term of the clamped, eliminated output."""
    d, width, n, dim = sizes[last], sizes[last + 1], z.shape[0], z.shape[1]
    one = flat.dtype.type(1)
    error = np.empty((n, width), flat.dtype)
    for i in range(n):
        for j in range(width):
            error[i, j] = -a[last] * y[i, j]
            if b_at[last] >= 0:
                error[i, j] += a[last] * flat[b_at[last] + j]
    gemm(n, width, d, a[last], z, dim - d, dim, False, flat, w_at[last], d, True, one, error, 0, width)
    gemm(n, d, width, one, error, 0, width, False, flat, w_at[last], d, False, one, g, dim - d, dim)


@kernel
def _add_differences(
    flat: Any,
    w_at: Any,
    b_at: Any,
    c_at: Any,
    sizes: Any,
    a: Any,
    ab: Any,
    both: Any,
    eliminated: bool,
    x: Any,
    y: Any,
    down: Any,
    up: Any,
    weight: Any,
    sign: Any,
    out: Any,
) -> None:
    """Add ``sign`` times the difference of derivatives between the clamped phase, ``up``, and the free one, ``down``."""
    n, n_layers = weight.shape[0], w_at.shape[0]
    last, hidden, stride, zero = n_layers - 1, up.shape[1], down.shape[1], np.int64(0)
    moved = np.empty((n, hidden), flat.dtype)
    for i in range(n):
        for j in range(hidden):
            moved[i, j] = up[i, j] - down[i, j]
    add_first_difference(
        flat, w_at[0], b_at[0], c_at[0], sizes[1], sizes[0], ab[0], both[0],
        x, up, hidden, down, stride, moved, hidden, weight, sign, a[0], out,
    )  # fmt: skip
    add_later_differences(flat, w_at, b_at, c_at, sizes, a, ab, last, down, up, moved, weight, sign, out)
    d, d_in = sizes[last + 1], sizes[last]
    below = hidden - d_in
    if eliminated:
        # the free phase has no mismatch here
        add_layer(
            flat, w_at[last], b_at[last], c_at[last], d, d_in, a[last], ab[last],
            up, below, hidden, y, zero, d, up, below, hidden, y, zero, d, True, True, weight, sign, out,
        )  # fmt: skip
        return
    moved_last = np.empty((n, d), flat.dtype)
    for i in range(n):
        for j in range(d):
            moved_last[i, j] = y[i, j] - down[i, hidden + j]
    add_layer(
        flat, w_at[last], b_at[last], c_at[last], d, d_in, a[last], ab[last],
        moved, below, hidden, moved_last, zero, d, up, below, hidden, y, zero, d, False, True, weight, sign, out,
    )  # fmt: skip
    add_layer(
        flat, w_at[last], b_at[last], c_at[last], d, d_in, a[last], ab[last],
        down, below, stride, down, hidden, stride, moved, below, hidden, moved_last, zero, d, True, False, weight, sign, out,
    )  # fmt: skip


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
        mismatch(flat, w_at, b_at, c_at, d, d_in, backwards, below, origin, d_in, above, origin, d, n, rows)
        for i in range(n):
            total = 0.0
            for j in range(width):
                part = np.float64(rows[i * width + j])
                total += part * part
            losses[i] += sign * 0.5 * factor * total


@kernel
def _gather(data: Any, rows: Any) -> Any:
    """Return some rows of an array."""
    out = np.empty((rows.shape[0], data.shape[1]), data.dtype)
    for i in range(rows.shape[0]):
        # separate vectors, which the compiler can copy efficiently
        source, target = data[rows[i]], out[i]
        for j in range(source.shape[0]):
            target[j] = source[j]
    return out


@kernel
def add_up(parts: Any, out: Any) -> None:
    """Add vectors, of shape (parts, p), to ``out``."""
    for i in range(parts.shape[0]):
        part = parts[i]
        for j in range(out.shape[0]):
            out[j] += part[j]


@kernel
def prepare(
    flat: Any,  # (p,): the parameters
    w_at: Any,  # (L,) int64: where each W_k begins
    sizes: Any,  # (L + 1,) int64
    a: Any,  # (L,): discounts a_k, in the dtype of flat, as is everything that is neither an index nor a tolerance
    ab: Any,  # (L,): a_k beta_k
    both: Any,  # (L,): a_k (1 + beta_k)
    eliminated: bool,  # whether the output is not an unknown of the free phase
    plan_clamped: Any,  # layout, place, padded units and total length of the panels
    gram: Any,  # (d_1, d_1): W_0 W_0^T; not read if beta_0 is 0
    free: bool,  # whether there is a free phase
    clamped: bool,
    panels_free: Any,  # zero where there is no unit; out: H of the free phase
    inverse_free: Any,
    panels_clamped: Any,  # likewise
    inverse_clamped: Any,
) -> None:
    """Write the Hessians of the phases, which all samples share."""
    last = w_at.shape[0] - 1
    if free:
        pack(flat, w_at, sizes, a, ab, both, gram, last if eliminated else last + 1, False, panels_free, inverse_free)
    if clamped and free and eliminated:
        for i in range(panels_free.shape[0]):
            panels_clamped[i] = panels_free[i]
        for i in range(inverse_free.shape[0]):
            inverse_clamped[i] = inverse_free[i]
        press(flat, w_at, sizes, a, ab, last, plan_clamped, panels_clamped, inverse_clamped)
    elif clamped:
        pack(flat, w_at, sizes, a, ab, both, gram, last, True, panels_clamped, inverse_clamped)


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
    lo_free: Any,  # (1, free units)
    hi_free: Any,
    lo_hidden: Any,  # (1, hidden units)
    hi_hidden: Any,
    panels_free: Any,  # H of the free phase, as prepare writes it
    inverse_free: Any,
    panels_clamped: Any,
    inverse_clamped: Any,
    inputs: Any,  # (samples, d_0)
    targets: Any,  # (samples, d_L); not read if sign_clamped is 0
    rows: Any,  # (n,) int64: the samples to use
    weight: Any,  # (n,): the factor on each sample's loss
    sign_free: Any,  # factor on the free energy, 0 to omit that phase
    sign_clamped: Any,
    tol: float,
    max_sweeps: int,
    cold: bool,  # whether z_free holds zeros
    z_free: Any,  # (n, free units): warm start; out: the solution
    z_clamped: Any,  # (n, hidden units), likewise, but it starts from the free phase if that was solved
    sweeps: Any,  # (1,) int64, added to
    losses: Any,  # (n,), out: sign_clamped E(zhat) + sign_free E(z*)
    out: Any,  # (p,), out: derivatives of the sum of weight * losses
) -> bool:
    """Return whether every solve converged; if not, only ``z_free``, ``z_clamped`` and ``sweeps`` are valid."""
    n, n_layers = rows.shape[0], w_at.shape[0]
    last = n_layers - 1
    n_free = last if eliminated else n_layers
    hidden = z_clamped.shape[1]
    free, clamped = sign_free != 0, sign_clamped != 0
    x = _gather(inputs, rows)
    y = _gather(targets, rows if clamped else rows[:0])
    q = np.empty(z_free.shape, flat.dtype)
    linear(flat, w_at, b_at, c_at, sizes, a, ab, both, n_free, x, q)
    for i in range(n):
        losses[i] = 0
    g, norms = np.empty(z_free.shape, flat.dtype), np.empty(n, np.float64)
    if free:
        begin(panels_free, plan_free, inverse_free, lo_free, hi_free, q, cold, z_free, g, norms)
        done = _solve_phase(
            panels_free, plan_free, inverse_free, lo_free, hi_free, q, tol, max_sweeps, z_free, g, sweeps, sign_free, losses
        )  # fmt: skip
        if not done:
            return False
    if clamped:
        pull = np.empty((n, hidden), flat.dtype)
        _clamp(flat, w_at, b_at, sizes, a, both, last, eliminated, y, q, pull)
        if free:
            for i in range(n):
                for j in range(hidden):
                    z_clamped[i, j] = z_free[i, j]
        if free and eliminated:
            _clamp_gradient(flat, w_at, b_at, sizes, a, last, y, z_clamped, g)
        else:
            g = np.empty((n, hidden), flat.dtype)
            begin(
                panels_clamped, plan_clamped, inverse_clamped, lo_hidden, hi_hidden, pull, cold and not free, z_clamped, g,
                norms,
            )  # fmt: skip
        done = _solve_phase(
            panels_clamped, plan_clamped, inverse_clamped, lo_hidden, hi_hidden, pull, tol, max_sweeps, z_clamped, g, sweeps,
            sign_clamped, losses,
        )  # fmt: skip
        if not done:
            return False
    # energies at zero activations: the constants that the QPs omit
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
    clear(out, w_at[0], sizes[0] * sizes[1] if balanced else 0)
    if balanced:
        _add_differences(
            flat, w_at, b_at, c_at, sizes, a, ab, both, eliminated, x, y, z_free, z_clamped, weight, sign_clamped, out
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
            add_layer(
                flat, w_at[k], b_at[k], c_at[k], d, d_in, a[k], ab[k],
                below, below_at, below_stride, above, above_at, above_stride,
                below, below_at, below_stride, above, above_at, above_stride, True, True, weight, sign, out,
            )  # fmt: skip
    return True
