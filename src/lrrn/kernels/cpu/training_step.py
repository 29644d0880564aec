"""One training step of an energy objective as a single compiled call."""

from __future__ import annotations

from typing import Any

import numpy as np

from lrrn.kernels.constants import ACCEPTED
from lrrn.kernels.cpu.arguments import Network, PackedQP
from lrrn.kernels.cpu.arrays import empty, greater, integers, numbers, vector, zeros
from lrrn.kernels.cpu.compiled import kernel, summing
from lrrn.kernels.cpu.coordinate_descent import begin, solve
from lrrn.kernels.cpu.differences import add_differences
from lrrn.kernels.cpu.energy import add_layer, clear, linear, mismatch, pack, press
from lrrn.kernels.cpu.gemm import gemm


@kernel
def _clamp(net: Network, eliminated: bool, y: Any, q: Any, out: Any) -> None:
    """Write q of the clamped phase: that of the free phase over the hidden blocks, plus the term of the target."""
    n, hidden, width, last = out.shape[0], out.shape[1], y.shape[1], net.w_at.shape[0] - 1
    d, bias, one = net.sizes[last], net.b_at[last], net.flat.dtype.type(1)
    for i in range(n):
        for j in range(hidden):
            out[i, j] = q[i, j]
    pull = empty(n, width, net.flat)
    for i in range(n):
        for j in range(width):
            pull[i, j] = net.both[last] * y[i, j]
            if eliminated and bias >= 0:
                # q does not include the bias of an eliminated output yet
                pull[i, j] -= net.a[last] * net.flat[bias + j]
    gemm(n, d, width, one, pull, 0, width, False, net.flat, net.w_at[last], d, False, one, out, hidden - d, hidden)


@summing
def _inner(a: Any, b: Any, i: int) -> float:
    """Return the inner product of two rows."""
    total = 0.0
    for j in range(a.shape[1]):
        total += np.float64(a[i, j]) * np.float64(b[i, j])
    return total


@kernel
def _solve_phase(
    phase: PackedQP, q: Any, tol: float, max_sweeps: int, z: Any, g: Any, sweeps: Any, sign: Any, losses: Any
) -> bool:
    """Solve one phase, starting at ``z``, and add ``sign`` times its value to the losses; return whether all converged."""
    n = z.shape[0]
    norms, scale, used = numbers(n), numbers(n), integers(n, 0)
    solve(phase, q, tol, max_sweeps, z, g, norms, scale, used)
    done = True
    for i in range(n):
        sweeps[0] += used[i]
        done = done and norms[i] <= ACCEPTED * tol * scale[i]
        losses[i] += sign * 0.5 * (_inner(z, g, i) - _inner(z, q, i))
    return done


@kernel
def _carry(phase: PackedQP, z: Any, g: Any, pull: Any, left: Any) -> None:
    """Move what the free phase left of its gradient to the linear term of the clamped phase, and to ``left``."""
    lo, hi = phase.lo[0], phase.hi[0]
    for i in range(pull.shape[0]):
        at, slope, term, residual = z[i], g[i], pull[i], left[i]
        for j in range(pull.shape[1]):
            held = (at[j] <= lo[j]) & (slope[j] > 0) | (at[j] >= hi[j]) & (slope[j] < 0)
            residual[j] = 0 if held else slope[j]
            term[j] += residual[j]
            slope[j] -= residual[j]


@kernel
def _clamp_gradient(net: Network, y: Any, z: Any, g: Any) -> None:
    """Convert the gradient of the free phase to that of the clamped phase: add the term of the clamped, eliminated output."""
    n, dim, width, last = z.shape[0], z.shape[1], y.shape[1], net.w_at.shape[0] - 1
    flat, w_at, bias, d, a = net.flat, net.w_at[last], net.b_at[last], net.sizes[last], net.a[last]
    one = flat.dtype.type(1)
    error = empty(n, width, flat)
    for i in range(n):
        for j in range(width):
            error[i, j] = -a * y[i, j]
            if bias >= 0:
                error[i, j] += a * flat[bias + j]
    gemm(n, width, d, a, z, dim - d, dim, False, flat, w_at, d, True, one, error, 0, width)
    gemm(n, d, width, one, error, 0, width, False, flat, w_at, d, False, one, g, dim - d, dim)


@kernel
def _add_contrast(net: Network, eliminated: bool, x: Any, y: Any, down: Any, up: Any, weight: Any, sign: Any, out: Any) -> None:
    """Add ``sign`` times the difference of derivatives between the clamped phase, ``up``, and the free one, ``down``."""
    n, last, hidden, width = weight.shape[0], net.w_at.shape[0] - 1, up.shape[1], y.shape[1]
    d, bias, one = net.sizes[last], net.b_at[last], net.flat.dtype.type(1)
    output = zeros(n, width, net.flat)
    for i in range(n):
        for j in range(width):
            if not eliminated:
                output[i, j] = down[i, hidden + j]
            elif bias >= 0:
                output[i, j] = net.flat[bias + j]
    if eliminated:
        gemm(n, width, d, one, down, hidden - d, hidden, False, net.flat, net.w_at[last], d, True, one, output, 0, width)
    stack = empty(3 * n, hidden + width, net.flat)
    for i in range(n):
        scale = sign * weight[i]
        _put_difference(scale, down[i], up[i], hidden, stack[i], stack[n + i], stack[2 * n + i])
        _put_difference(scale, output[i], y[i], width, stack[i, hidden:], stack[n + i, hidden:], stack[2 * n + i, hidden:])
    add_differences(net, last + 1, x, stack, out)


@kernel
def _put_difference(scale: Any, down: Any, up: Any, width: int, differences: Any, means: Any, again: Any) -> None:
    """Write the weighted difference of two vectors, their mean, and the difference once more."""
    half = type(scale)(0.5)
    for j in range(width):
        difference = scale * (up[j] - down[j])
        differences[j] = difference
        again[j] = difference
        means[j] = half * (up[j] + down[j])


@kernel
def _add_constant(net: Network, k: int, below: Any, above: Any, sign: Any, losses: Any) -> None:
    """Add ``sign`` times one layer's energy between two given layers to the losses."""
    n, d, d_in, origin = losses.shape[0], net.sizes[k + 1], net.sizes[k], np.int64(0)
    rows = vector(n * greater(d, d_in), net.flat)
    for direction in range(2 if net.ab[k] != 0 else 1):
        backwards = direction == 1
        width, factor = (d_in, net.ab[k]) if backwards else (d, net.a[k])
        mismatch(net, k, backwards, below, origin, above, origin, n, rows)
        for i in range(n):
            total = 0.0
            for j in range(width):
                part = np.float64(rows[i * width + j])
                total += part * part
            losses[i] += sign * 0.5 * factor * total


@kernel
def gather(data: Any, rows: Any) -> Any:
    """Return some rows of an array."""
    out = empty(rows.shape[0], data.shape[1], data)
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
    net: Network,
    eliminated: bool,  # whether the output is not an unknown of the free phase
    gram: Any,  # (d_1, d_1): W_0 W_0^T; not read if beta_0 is 0
    free: bool,  # whether there is a free phase
    clamped: bool,
    phase_free: PackedQP,  # out: H
    phase_clamped: PackedQP,
) -> None:
    """Write the Hessians of the phases, which all samples share."""
    last = net.w_at.shape[0] - 1
    if free:
        pack(net, gram, last if eliminated else last + 1, False, phase_free)
    if clamped and free and eliminated:
        for i in range(phase_free.panels.shape[0]):
            phase_clamped.panels[i] = phase_free.panels[i]
        for i in range(phase_free.inverse_diagonal.shape[0]):
            phase_clamped.inverse_diagonal[i] = phase_free.inverse_diagonal[i]
        press(net, last, phase_clamped)
    elif clamped:
        pack(net, gram, last, True, phase_clamped)


@kernel
def energy_step(
    net: Network,
    eliminated: bool,  # whether the output is not an unknown of the free phase
    phase_free: PackedQP,  # as prepare writes them
    phase_clamped: PackedQP,
    inputs: Any,  # (samples, d_0)
    targets: Any,  # (samples, d_L); not read if sign_clamped is 0
    rows: Any,  # (n,) int64: the samples to use
    weight: Any,  # (n,): the factor on each sample's loss
    sign_free: Any,  # factor on the free energy, 0 to omit that phase
    sign_clamped: Any,
    tol_free: float,  # of the free phase
    tol: float,
    max_sweeps: int,
    cold: bool,  # whether z_free holds zeros
    z_free: Any,  # (n, free units): warm start; out: the solution
    z_clamped: Any,  # (n, hidden units), likewise, but it starts from the free phase if that was solved
    sweeps: Any,  # (1,) int64, added to
    losses: Any,  # (n,), out: sign_clamped E(zhat) + sign_free E(z*)
    out: Any,  # (p,), out: derivatives of the sum of weight * losses
) -> bool:
    """Return whether every solve converged; if not, only ``z_free``, ``z_clamped`` and ``sweeps`` are valid.

    A free phase with residual r is the exact solution for the linear term q + r. In the difference of both phases, the clamped
    one is solved for q + r too. Both errors are then nearly the same, H^-1 r, and cancel, so the free phase may stop early.
    """
    n, n_layers, hidden = rows.shape[0], net.w_at.shape[0], z_clamped.shape[1]
    last = n_layers - 1
    n_free = last if eliminated else n_layers
    free, clamped, common = sign_free != 0, sign_clamped != 0, sign_free + sign_clamped
    balanced = free and clamped and common == 0
    x = gather(inputs, rows)
    y = gather(targets, rows if clamped else rows[:0])
    q = empty(n, z_free.shape[1], net.flat)
    linear(net, n_free, x, q)
    for i in range(n):
        losses[i] = 0
    g, norms = empty(n, z_free.shape[1], net.flat), numbers(n)
    if free:
        begin(phase_free, q, cold, z_free, g, norms)
        if not _solve_phase(phase_free, q, tol_free, max_sweeps, z_free, g, sweeps, sign_free, losses):
            return False
    if clamped:
        pull = empty(n, hidden, net.flat)
        _clamp(net, eliminated, y, q, pull)
        if free:
            for i in range(n):
                for j in range(hidden):
                    z_clamped[i, j] = z_free[i, j]
        if balanced:
            left = empty(n, hidden, net.flat)
            _carry(phase_free, z_free, g, pull, left)
        if free and eliminated:
            _clamp_gradient(net, y, z_clamped, g)
        else:
            g = empty(n, hidden, net.flat)
            begin(phase_clamped, pull, cold and not free, z_clamped, g, norms)
        if not _solve_phase(phase_clamped, pull, tol, max_sweeps, z_clamped, g, sweeps, sign_clamped, losses):
            return False
        if balanced:
            for i in range(n):
                losses[i] += sign_clamped * _inner(z_clamped, left, i)
    # energies at zero activations: the constants that the QPs omit
    for k in range(n_layers):
        below = x if k == 0 else zeros(n, net.sizes[k], net.flat)
        zero = zeros(n, net.sizes[k + 1], net.flat)
        if k < last and common != 0:
            _add_constant(net, k, below, zero, common, losses)
        if k == last and clamped:
            _add_constant(net, k, below, y, sign_clamped, losses)
        if k == last and free and not eliminated:
            _add_constant(net, k, below, zero, sign_free, losses)
    # derivatives at fixed activations
    clear(out, net.w_at[0], net.sizes[0] * net.sizes[1] if balanced else 0)
    if balanced:
        _add_contrast(net, eliminated, x, y, z_free, z_clamped, weight, sign_clamped, out)
        return True
    for phase in range(2):
        at_free = phase == 0
        if not (free if at_free else clamped):
            continue
        z, sign = (z_free, sign_free) if at_free else (z_clamped, sign_clamped)
        at = 0
        for k in range(n_free if at_free else n_layers):
            below, below_at = (x, np.int64(0)) if k == 0 else (z, at - net.sizes[k])
            above, above_at = (z, at) if at_free or k < last else (y, np.int64(0))
            at += net.sizes[k + 1]
            add_layer(net, k, below, below_at, above, above_at, weight, sign, out)
    return True
