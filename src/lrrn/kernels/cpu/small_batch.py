"""The minimiser of the free phase and its derivative, in one compiled call each."""

from __future__ import annotations

from typing import Any

import numpy as np

from lrrn.kernels.cpu.arguments import Network, PackedQP
from lrrn.kernels.cpu.arrays import empty, vector
from lrrn.kernels.cpu.compiled import kernel
from lrrn.kernels.cpu.coordinate_descent import begin, narrow, solve_mixed
from lrrn.kernels.cpu.differences import add_differences
from lrrn.kernels.cpu.energy import clear, linear, pack
from lrrn.kernels.cpu.gemm import gemm


@kernel
def _within(g: Any, norms: Any, scale: Any, limit: float) -> bool:
    """Whether every residual is at most ``limit`` times its scale and every gradient is finite: bounds may hide an overflow."""
    for i in range(norms.shape[0]):
        if not norms[i] <= limit * scale[i]:
            return False
        for j in range(g.shape[1]):
            if not np.isfinite(g[i, j]):
                return False
    return True


@kernel
def forward(
    net: Network,
    layers: int,  # number of layers that are unknowns
    phase: PackedQP,  # out: H
    single: PackedQP,  # out: the same in float32; without panels to use no float32
    gram: Any,  # (d_1, d_1): W_0 W_0^T; not read if beta_0 is 0
    x: Any,  # (n, d_0)
    tol: float,
    limit: float,  # largest accepted relative residual
    max_sweeps: int,
    packed: bool,  # whether the phases hold H already
    cold: bool,  # whether z holds zeros
    z: Any,  # (n, dim), feasible; out: the minimiser
    y: Any,  # (n or 0, d_L), out: the prediction, unless empty
    g: Any,  # (n, dim), out, as are the following three, of shape (n,)
    norms: Any,
    scale: Any,
    used: Any,
) -> bool:
    """Solve the free phase; return whether every residual is small enough. If not, ``z`` is the last iterate."""
    q = empty(z.shape[0], z.shape[1], net.flat)
    linear(net, layers, x, q)
    if not packed:
        pack(net, gram, layers, False, phase)
        if single.panels.shape[0] > 0 and not narrow(phase, single.panels, single.inverse_diagonal):
            return False
    begin(phase, q, cold, z, g, norms)
    solve_mixed(phase, single, q, tol, max_sweeps, z, g, norms, scale, used)
    if y.shape[0] > 0:
        _read_out(net, layers, z, y)
    return _within(g, norms, scale, limit)


@kernel
def _read_out(net: Network, layers: int, z: Any, y: Any) -> None:
    """Write the output of a minimiser: its last block, or W_{L-1} z_{L-1} + b_{L-1} if the output is eliminated."""
    n, dim = z.shape
    last, width, one = net.w_at.shape[0] - 1, y.shape[1], net.flat.dtype.type(1)
    if layers > last:
        for i in range(n):
            for j in range(width):
                y[i, j] = z[i, dim - width + j]
        return
    d, bias = net.sizes[last], net.b_at[last]
    for i in range(n):
        for j in range(width):
            y[i, j] = net.flat[bias + j] if bias >= 0 else 0
    gemm(n, width, d, one, z, dim - d, dim, False, net.flat, net.w_at[last], d, True, one, y, 0, width)


@kernel
def _read_back(net: Network, layers: int, z: Any, d_y: Any, v: Any, out: Any) -> None:
    """Convert derivatives in the output to those in the minimiser.

    Add those in the parameters of an eliminated output to ``out``, unless it is empty.
    """
    n, dim = z.shape
    last, width, one = net.w_at.shape[0] - 1, d_y.shape[1], net.flat.dtype.type(1)
    for i in range(n):
        for j in range(dim):
            v[i, j] = 0
    if layers > last:
        for i in range(n):
            for j in range(width):
                v[i, dim - width + j] = d_y[i, j]
        return
    d, w_at, bias = net.sizes[last], net.w_at[last], net.b_at[last]
    gemm(n, d, width, one, d_y, 0, width, False, net.flat, w_at, d, False, one, v, dim - d, dim)
    if out.shape[0] == 0:
        return
    gemm(width, d, n, one, d_y, 0, width, True, z, dim - d, dim, False, one, out, w_at, d)
    if bias >= 0:
        for i in range(n):
            for j in range(width):
                out[bias + j] += d_y[i, j]


@kernel
def backward(
    net: Network,
    layers: int,
    phase: PackedQP,  # as forward wrote them
    single: PackedQP,
    x: Any,
    tol: float,
    limit: float,
    max_sweeps: int,
    z: Any,  # (n, dim): the minimiser
    given: Any,  # (n, dim): derivatives of a loss in it; or (n, d_L): in the prediction
    of_output: bool,  # whether ``given`` holds derivatives in the prediction
    g: Any,  # (n, dim), out, as are the following three, of shape (n,)
    norms: Any,
    scale: Any,
    used: Any,
    w: Any,  # (n, dim), zeros; out: solution of the adjoint
    d_x: Any,  # (n or 0, d_0), out: derivatives in x, unless empty
    out: Any,  # (p or 0,), out: derivatives in the parameters, unless empty
) -> bool:
    """Solve the adjoint; return whether every residual is small enough. Only then are derivatives written."""
    n, dim = z.shape
    d_0, d_1, one, lo, hi = net.sizes[0], net.sizes[1], net.flat.dtype.type(1), phase.lo, phase.hi
    unit, low, high = empty(n, dim, net.flat), empty(n, dim, net.flat), empty(n, dim, net.flat)
    v = given
    if out.shape[0] > 0:
        clear(out, net.w_at[0], d_0 * d_1)
    if of_output:
        v = empty(n, dim, net.flat)
        _read_back(net, layers, z, given, v, out)
    size = vector(n, net.flat)
    for i in range(n):
        largest = 0.0
        for j in range(dim):
            largest = max(largest, abs(np.float64(v[i, j])))
            reach = np.inf if lo[0, j] < z[i, j] and z[i, j] < hi[0, j] else 0.0
            low[i, j], high[i, j] = -reach, reach
        square = 0.0
        for j in range(dim):
            part = np.float64(v[i, j]) / largest if largest > 0 else 0.0
            square += part * part
        # the adjoint is linear in v, so it is solved for unit vectors: tol is then relative to the gradient itself
        size[i] = largest * np.sqrt(square)
        if not np.isfinite(size[i]):
            return False
        for j in range(dim):
            unit[i, j] = v[i, j] / size[i] if size[i] > 0 else v[i, j]
    adjoint = PackedQP(phase.panels, phase.layout, phase.inverse_diagonal, phase.place, low, high)
    adjoint_single = PackedQP(single.panels, single.layout, single.inverse_diagonal, single.place, low, high)
    begin(adjoint, unit, True, w, g, norms)
    solve_mixed(adjoint, adjoint_single, unit, tol, max_sweeps, w, g, norms, scale, used)
    if not _within(g, norms, scale, limit):
        return False
    for i in range(n):
        for j in range(dim):
            w[i, j] *= size[i]
    if out.shape[0] > 0:  # minus the slope of the energy at z along w
        stack = empty(3 * n, dim, net.flat)
        for i in range(n):
            for j in range(dim):
                stack[i, j] = -w[i, j]
                stack[n + i, j] = z[i, j]
                stack[2 * n + i, j] = -w[i, j]
        add_differences(net, layers, x, stack, out)
    if d_x.shape[0] > 0:
        gemm(n, d_0, d_1, net.both[0], w, 0, dim, False, net.flat, net.w_at[0], d_0, False, one * 0, d_x, 0, d_0)
    return True
