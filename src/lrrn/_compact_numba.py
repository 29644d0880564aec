"""The minimiser of the free phase and its derivative, in one compiled call each: arrays in, arrays out."""

from __future__ import annotations

from typing import Any

import numpy as np

from lrrn._energy_numba import add_first_difference, add_later_differences, begin, linear, pack, solve
from lrrn._gemm import gemm
from lrrn.compiled import kernel


@kernel
def _within(g: Any, norms: Any, scale: Any, limit: float) -> bool:
    """Whether every residual is at most ``limit`` times its scale and every gradient finite: overflows may hide at bounds."""
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
    layers: int,  # how many are unknowns
    plan: Any,  # of the panels
    lo: Any,  # (1, dim)
    hi: Any,
    gram: Any,  # (d_1, d_1): W_0 W_0^T; not read if beta_0 is 0
    x: Any,  # (n, d_0)
    tol: float,
    limit: float,  # relative residual that will do
    max_sweeps: int,
    cold: bool,  # whether z holds zeros
    panels: Any,  # zeros; out: H
    inverse_diagonal: Any,  # likewise
    z: Any,  # (n, dim), feasible; out: the minimiser
    g: Any,  # (n, dim), out
    norms: Any,  # (n,), out
    scale: Any,  # (n,), out
    used: Any,  # (n,), out
) -> bool:
    """Return whether every sample's residual is small enough; if not, ``z`` is how far it came."""
    q = np.empty(z.shape, flat.dtype)
    linear(flat, w_at, b_at, c_at, sizes, a, ab, both, layers, x, q)
    pack(flat, w_at, sizes, a, ab, both, gram, layers, False, panels, inverse_diagonal)
    begin(panels, plan, inverse_diagonal, lo, hi, q, cold, z, g, norms)
    solve(panels, plan, inverse_diagonal, lo, hi, q, tol, max_sweeps, True, z, g, norms, scale, used)
    return _within(g, norms, scale, limit)


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
    z: Any,  # (n, dim): the minimiser
    v: Any,  # (n, dim): derivatives of a loss in it
    g: Any,  # (n, dim), out
    norms: Any,  # (n,), out
    scale: Any,  # (n,), out
    used: Any,  # (n,), out
    w: Any,  # (n, dim), zeros; out: solution of the adjoint
    d_x: Any,  # (n or 0, d_0), out: derivatives in x, if there is room for them
    out: Any,  # (p,), zeros; out: derivatives in the parameters
) -> bool:
    """Solve the adjoint and return whether every sample's residual is small enough; only then are there derivatives."""
    n, dim = z.shape
    one = flat.dtype.type(1)
    unit, low, high = np.empty_like(z), np.empty_like(z), np.empty_like(z)
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
    solve(panels, plan, inverse_diagonal, low, high, unit, tol, max_sweeps, True, w, g, norms, scale, used)
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
