"""The minimiser of the free phase and its derivative, in one compiled call each."""

from __future__ import annotations

from typing import Any

import numpy as np

from lrrn.kernels.cpu.compiled import kernel
from lrrn.kernels.cpu.energy import add_first_difference, add_later_differences, begin, clear, linear, narrow, pack, solve_mixed
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
    flat: Any,  # (p,): the parameters
    w_at: Any,  # (L,) int64: where each W_k begins
    b_at: Any,
    c_at: Any,
    sizes: Any,  # (L + 1,) int64
    a: Any,  # (L,)
    ab: Any,
    both: Any,
    layers: int,  # number of layers that are unknowns
    plan: Any,  # panel plan
    lo: Any,  # (1, dim)
    hi: Any,
    gram: Any,  # (d_1, d_1): W_0 W_0^T; not read if beta_0 is 0
    x: Any,  # (n, d_0)
    tol: float,
    limit: float,  # largest accepted relative residual
    max_sweeps: int,
    cold: bool,  # whether z holds zeros
    panels: Any,  # zeros; out: H
    inverse_diagonal: Any,  # likewise
    singles: Any,  # float32, out: the same; empty to use no float32
    inverse_single: Any,
    z: Any,  # (n, dim), feasible; out: the minimiser
    y: Any,  # (n or 0, d_L), out: the prediction, unless empty
    g: Any,  # (n, dim), out
    norms: Any,  # (n,), out
    scale: Any,  # (n,), out
    used: Any,  # (n,), out
) -> bool:
    """Solve the free phase; return whether every residual is small enough. If not, ``z`` is the last iterate."""
    q = np.empty(z.shape, flat.dtype)
    linear(flat, w_at, b_at, c_at, sizes, a, ab, both, layers, x, q)
    pack(flat, w_at, sizes, a, ab, both, gram, layers, False, panels, inverse_diagonal)
    begin(panels, plan, inverse_diagonal, lo, hi, q, cold, z, g, norms)
    if singles.shape[0] > 0 and not narrow(panels, plan[1], inverse_diagonal, singles, inverse_single):
        return False
    solve_mixed(
        panels, plan, inverse_diagonal, singles, inverse_single, lo, hi, q, tol, max_sweeps, z, g, norms, scale, used
    )  # fmt: skip
    if y.shape[0] > 0:
        _read_out(flat, w_at, b_at, sizes, layers, z, y)
    return _within(g, norms, scale, limit)


@kernel
def _read_out(flat: Any, w_at: Any, b_at: Any, sizes: Any, layers: int, z: Any, y: Any) -> None:
    """Write the output of a minimiser: its last block, or W_{L-1} z_{L-1} + b_{L-1} if the output is eliminated."""
    n, dim = z.shape
    last, width = w_at.shape[0] - 1, y.shape[1]
    one = flat.dtype.type(1)
    if layers > last:
        for i in range(n):
            for j in range(width):
                y[i, j] = z[i, dim - width + j]
        return
    d = sizes[last]
    for i in range(n):
        for j in range(width):
            y[i, j] = flat[b_at[last] + j] if b_at[last] >= 0 else 0
    gemm(n, width, d, one, z, dim - d, dim, False, flat, w_at[last], d, True, one, y, 0, width)


@kernel
def _read_back(flat: Any, w_at: Any, b_at: Any, sizes: Any, layers: int, z: Any, d_y: Any, v: Any, out: Any) -> None:
    """Convert derivatives in the output to those in the minimiser; add those in the parameters of an eliminated output."""
    n, dim = z.shape
    last, width = w_at.shape[0] - 1, d_y.shape[1]
    one = flat.dtype.type(1)
    for i in range(n):
        for j in range(dim):
            v[i, j] = 0
    if layers > last:
        for i in range(n):
            for j in range(width):
                v[i, dim - width + j] = d_y[i, j]
        return
    d = sizes[last]
    gemm(n, d, width, one, d_y, 0, width, False, flat, w_at[last], d, False, one, v, dim - d, dim)
    gemm(width, d, n, one, d_y, 0, width, True, z, dim - d, dim, False, one, out, w_at[last], d)
    if b_at[last] >= 0:
        for i in range(n):
            for j in range(width):
                out[b_at[last] + j] += d_y[i, j]


@kernel
def backward(
    flat: Any,
    w_at: Any,
    b_at: Any,
    c_at: Any,
    sizes: Any,
    a: Any,
    ab: Any,
    both: Any,
    layers: int,
    plan: Any,
    lo: Any,
    hi: Any,
    x: Any,
    tol: float,
    limit: float,
    max_sweeps: int,
    panels: Any,
    inverse_diagonal: Any,
    singles: Any,
    inverse_single: Any,
    z: Any,  # (n, dim): the minimiser
    given: Any,  # (n, dim): derivatives of a loss in it; or (n, d_L): in the prediction
    of_output: bool,  # whether ``given`` holds derivatives in the prediction
    g: Any,  # (n, dim), out
    norms: Any,  # (n,), out
    scale: Any,  # (n,), out
    used: Any,  # (n,), out
    w: Any,  # (n, dim), zeros; out: solution of the adjoint
    d_x: Any,  # (n or 0, d_0), out: derivatives in x, unless empty
    out: Any,  # (p,), out: derivatives in the parameters
) -> bool:
    """Solve the adjoint; return whether every residual is small enough. Only then are derivatives written."""
    n, dim = z.shape
    one = flat.dtype.type(1)
    unit, low, high = np.empty_like(z), np.empty_like(z), np.empty_like(z)
    v = given
    clear(out, w_at[0], sizes[0] * sizes[1])
    if of_output:
        v = np.empty_like(z)
        _read_back(flat, w_at, b_at, sizes, layers, z, given, v, out)
    size, weight = np.empty(n, z.dtype), np.ones(n, z.dtype)
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
    begin(panels, plan, inverse_diagonal, low, high, unit, True, w, g, norms)
    solve_mixed(
        panels, plan, inverse_diagonal, singles, inverse_single, low, high, unit, tol, max_sweeps, w, g, norms, scale, used
    )  # fmt: skip
    if not _within(g, norms, scale, limit):
        return False
    for i in range(n):
        for j in range(dim):
            w[i, j] *= size[i]
    # minus the slope of the energy at z along w
    add_first_difference(
        flat, w_at[0], b_at[0], c_at[0], sizes[1], sizes[0], ab[0], both[0],
        x, z, dim, z, dim, w, dim, weight, -one, a[0], out,
    )  # fmt: skip
    add_later_differences(flat, w_at, b_at, c_at, sizes, a, ab, layers, z, z, w, weight, -one, out)
    if d_x.shape[0] > 0:
        gemm(n, sizes[0], sizes[1], both[0], w, 0, dim, False, flat, w_at[0], sizes[0], False, one * 0, d_x, 0, sizes[0])
    return True
