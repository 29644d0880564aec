"""Coordinate-descent kernel for the CPU: arrays in, arrays out.

Samples sit side by side in ``lanes`` so that one vector instruction serves several; units are visited in panels of
``PANEL`` within a layer. Inside a panel each unit sees the steps of those before it (plain Gauss-Seidel order); the rest of
the gradient then gets the panel's steps in one pass. A lane whose sample has converged is refilled with the next sample, and
every lane's arithmetic is its own, so an answer does not depend on the batch around it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit

PANEL = 8


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def fill_panels(panels: Any, at: int, below: Any, block: Any, above: Any) -> int:
    """Write one layer's panels from position ``at`` on; return the position after them.

    ``below`` is H[k, k-1] of shape (d, d_below), ``block`` H[k, k], ``above`` H[k+1, k] of shape (d_above, d).
    """
    width = block.shape[0]
    n_below, n_above = below.shape[1], above.shape[0]
    for j0 in range(0, width, PANEL):
        units = min(PANEL, width - j0)
        for m in range(n_below):
            for i in range(units):
                panels[at + i] = below[j0 + i, m]
            at += PANEL
        for m in range(width):
            for i in range(units):
                panels[at + i] = block[m, j0 + i]
            at += PANEL
        for m in range(n_above):
            for i in range(units):
                panels[at + i] = above[m, j0 + i]
            at += PANEL
    return at


@cache
def kernel(lanes: int) -> Callable[..., None]:
    """Return the compiled kernel for a number of lanes (a multiple of 16, so that the inner loops vectorise)."""

    @njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
    def descend(
        panels: Any,  # (total,): for each panel, rows first..last of the band, PANEL columns
        layout: Any,  # (n_panels, 5) int64: offset in panels, first unit, number of units, first row, last row
        inverse_diagonal: Any,  # (dim,)
        lo: Any,  # (1 or n, dim)
        hi: Any,  # (1 or n, dim)
        threshold: Any,  # (n,) float64: stop when the squared KKT residual is at most this
        max_sweeps: int,
        z: Any,  # (n, dim), in and out
        g: Any,  # (n, dim): H z - q at the start
        used: Any,  # (n,) int64, out: sweeps spent
    ) -> None:
        n, dim = z.shape
        shared = lo.shape[0] == 1
        zs = np.zeros((dim, lanes), z.dtype)
        gs = np.zeros((dim, lanes), z.dtype)
        los = np.zeros((dim, lanes), z.dtype)
        his = np.zeros((dim, lanes), z.dtype)
        steps = np.zeros((PANEL, lanes), z.dtype)
        local = np.zeros((PANEL, lanes), z.dtype)
        residual = np.zeros(lanes, np.float64)
        sample = np.full(lanes, -1, np.int64)
        count = np.zeros(lanes, np.int64)
        following = 0
        busy = 0
        for s in range(lanes):
            if following < n:
                sample[s] = following
                row = 0 if shared else following
                for j in range(dim):
                    zs[j, s] = z[following, j]
                    gs[j, s] = g[following, j]
                    los[j, s] = lo[row, j]
                    his[j, s] = hi[row, j]
                following += 1
                busy += 1
        while busy > 0:
            for p in range(layout.shape[0]):
                offset, j0, width, first, last = layout[p, 0], layout[p, 1], layout[p, 2], layout[p, 3], layout[p, 4]
                for i in range(PANEL):
                    if i < width:
                        for s in range(lanes):
                            local[i, s] = gs[j0 + i, s]
                    else:
                        for s in range(lanes):
                            steps[i, s] = 0
                moved = False
                for i in range(width):
                    j = j0 + i
                    scale = inverse_diagonal[j]
                    largest = z.dtype.type(0)
                    for s in range(lanes):
                        before = zs[j, s]
                        after = min(max(before - local[i, s] * scale, los[j, s]), his[j, s])
                        step = after - before
                        zs[j, s] = after
                        steps[i, s] = step
                        largest = max(largest, abs(step))
                    if largest != 0:
                        moved = True
                        for k in range(i + 1, width):
                            h = panels[offset + (j0 + k - first) * PANEL + i]
                            for s in range(lanes):
                                local[k, s] += h * steps[i, s]
                if not moved:
                    continue
                for m in range(last - first):
                    at = offset + m * PANEL
                    h0, h1, h2, h3 = panels[at], panels[at + 1], panels[at + 2], panels[at + 3]
                    h4, h5, h6, h7 = panels[at + 4], panels[at + 5], panels[at + 6], panels[at + 7]
                    i = first + m
                    for s in range(lanes):
                        gs[i, s] = (
                            gs[i, s]
                            + h0 * steps[0, s]
                            + h1 * steps[1, s]
                            + h2 * steps[2, s]
                            + h3 * steps[3, s]
                            + h4 * steps[4, s]
                            + h5 * steps[5, s]
                            + h6 * steps[6, s]
                            + h7 * steps[7, s]
                        )
            for s in range(lanes):
                residual[s] = 0.0
            for j in range(dim):
                for s in range(lanes):
                    r = gs[j, s]
                    r = min(r, 0) if zs[j, s] <= los[j, s] else r
                    r = max(r, 0) if zs[j, s] >= his[j, s] else r
                    residual[s] += np.float64(r) * np.float64(r)
            for s in range(lanes):
                i = sample[s]
                if i < 0:
                    continue
                count[s] += 1
                if residual[s] > threshold[i] and residual[s] < np.inf and count[s] < max_sweeps:
                    continue
                used[i] = count[s]
                for j in range(dim):
                    z[i, j] = zs[j, s]
                if following < n:
                    sample[s] = following
                    count[s] = 0
                    row = 0 if shared else following
                    for j in range(dim):
                        zs[j, s] = z[following, j]
                        gs[j, s] = g[following, j]
                        los[j, s] = lo[row, j]
                        his[j, s] = hi[row, j]
                    following += 1
                else:
                    sample[s] = -1
                    busy -= 1
                    for j in range(dim):
                        gs[j, s] = 0
                        los[j, s] = zs[j, s]
                        his[j, s] = zs[j, s]

    return descend
