"""Coordinate-descent kernel for the CPU.

Each sample occupies one SIMD lane. Units are visited in panels of ``PANEL`` units of a layer, and each layer is padded to whole
panels. Inside a panel, each unit uses the steps of those before it (plain Gauss-Seidel order). The rest of the gradient is then
updated with the steps of the panel in one pass, which is skipped if no lane moved. A lane whose sample has converged is
refilled with the next sample. Lanes are independent, so the result of a sample does not depend on the rest of the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lrrn.kernels.constants import GAIN, INSIDE, LANES, SINGLE_ROUNDS, SMALLEST
from lrrn.kernels.cpu.arguments import PackedQP
from lrrn.kernels.cpu.arrays import greater, integers, lesser, numbers, zeros
from lrrn.kernels.cpu.compiled import kernel, summing
from lrrn.kernels.cpu.vector_sweep import PANEL, multiply_panel, squared_residuals, sweep_panel

RUNNING = 16.0
"""Tolerance, in units in the last place, below which gradients and residuals are recomputed after the last sweep."""
EPS_SINGLE, EPS_DOUBLE = 2.0**-23, 2.0**-52


@kernel
def fill_panels(panels: Any, at: int, below: Any, block: Any, above: Any) -> int:
    """Write one layer's panels from position ``at`` on; return the position after them.

    ``below`` is H[k, k-1] of shape (d, d_below), ``block`` H[k, k], ``above`` H[k+1, k] of shape (d_above, d). A panel has a
    row for every unit of the three layers, each layer padded to whole panels; ``panels`` is zero where there is no unit.
    """
    width, n_below = block.shape[0], below.shape[1]
    for j0 in range(0, width, PANEL):
        units = lesser(PANEL, width - j0)
        for i in range(units):
            row = below[j0 + i]
            for m in range(n_below):
                panels[at + m * PANEL + i] = row[m]
        at += -(-n_below // PANEL) * PANEL * PANEL
        at = _fill_rows(panels, at, block, j0, units)
        at = _fill_rows(panels, at, above, j0, units)
    return at


@kernel
def _fill_rows(panels: Any, at: int, rows: Any, j0: int, units: int) -> int:
    """Write ``units`` columns of some rows, from column ``j0`` on; return the position after them, padded to whole panels."""
    for m in range(rows.shape[0]):
        row, target = rows[m, j0:], panels[at + m * PANEL :]
        if units == PANEL:
            # a fixed length, so that the compiler uses one vector
            for i in range(PANEL):
                target[i] = row[i]
        else:
            for i in range(units):
                target[i] = row[i]
    return at + -(-rows.shape[0] // PANEL) * PANEL * PANEL


@kernel
def invert_diagonal(inverse_diagonal: Any, unit: int, block: Any) -> int:
    """Write one layer's part from padded unit ``unit`` on; return the padded unit after it."""
    for j in range(block.shape[0]):
        inverse_diagonal[unit + j] = 1 / block[j, j]
    return unit + -(-block.shape[0] // PANEL) * PANEL


@kernel
def _fill_lane(s: int, i: int, phase: PackedQP, z: Any, g: Any, zs: Any, gs: Any, los: Any, his: Any) -> None:
    """Load a sample into a lane; shared bounds have been loaded before."""
    lo, hi, place, lane = phase.lo, phase.hi, phase.place, np.uint64(s)
    values, slopes = z[i], g[i]
    for j in range(place.shape[0]):
        m = np.uint64(place[j])  # not negative: no code for negative indices, which takes as long as the copy
        zs[m, lane] = values[j]
        gs[m, lane] = slopes[j]
    if lo.shape[0] > 1:
        for j in range(place.shape[0]):
            m = place[j]
            los[m, s] = lo[i, j]
            his[m, s] = hi[i, j]


@kernel
def _read_lane(s: int, i: int, phase: PackedQP, z: Any, g: Any, zs: Any, gs: Any) -> None:
    """Write what is in a lane to a sample."""
    place, lane = phase.place, np.uint64(s)
    values, slopes = z[i], g[i]
    for j in range(place.shape[0]):
        m = np.uint64(place[j])
        values[j] = zs[m, lane]
        slopes[j] = gs[m, lane]


@kernel
def _fill_bounds(lanes: int, phase: PackedQP, los: Any, his: Any) -> None:
    """Load bounds that all samples share into every lane."""
    for j in range(phase.place.shape[0]):
        m = phase.place[j]
        for s in range(lanes):
            los[m, s] = phase.lo[0, j]
            his[m, s] = phase.hi[0, j]


@kernel
def _fill_correction(
    s: int, i: int, unit: float, phase: PackedQP, z: Any, g: Any, zs: Any, gs: Any, los: Any, his: Any
) -> None:
    """Load the problem for the correction of ``z``, in multiples of ``unit``, into a lane."""
    lo, hi, place = phase.lo, phase.hi, phase.place
    row = 0 if lo.shape[0] == 1 else i
    scale = 1 / unit
    for j in range(place.shape[0]):
        m = place[j]
        zs[m, s] = 0
        gs[m, s] = g[i, j] * scale
        los[m, s] = (lo[row, j] - z[i, j]) * scale
        his[m, s] = (hi[row, j] - z[i, j]) * scale


@kernel
def _begin(s: int, i: int, unit: Any, phase: PackedQP, z: Any, g: Any, zs: Any, gs: Any, los: Any, his: Any) -> None:
    """Load a sample, or the problem for its correction, into a lane."""
    if unit is None:
        _fill_lane(s, i, phase, z, g, zs, gs, los, his)
    else:
        _fill_correction(s, i, unit[i], phase, z, g, zs, gs, los, his)


@kernel
def _add_correction(s: int, i: int, unit: float, phase: PackedQP, z: Any, zs: Any, los: Any, his: Any) -> None:
    """Add the correction of a lane to ``z``; units at a bound are set to the bound exactly."""
    lo, hi, place = phase.lo, phase.hi, phase.place
    row = 0 if lo.shape[0] == 1 else i
    for j in range(place.shape[0]):
        m = place[j]
        if zs[m, s] == los[m, s]:
            z[i, j] = lo[row, j]
        elif zs[m, s] == his[m, s]:
            z[i, j] = hi[row, j]
        else:
            z[i, j] = lesser(greater(z[i, j] + unit * zs[m, s], lo[row, j]), hi[row, j])


@kernel
def descend(
    phase: PackedQP,
    lanes: int,
    threshold: Any,  # (n,) float64: stop when the squared KKT residual is at most this, in multiples of unit^2 if there is one
    max_sweeps: int,
    unit: Any,  # (n,) float64: scale of the correction of z, computed in the dtype of the panels; None: sweep on z itself
    z: Any,  # (n, dim), in and out
    g: Any,  # (n, dim): H z - q; out: likewise, with the rounding errors of all updates; unchanged if unit is given
    used: Any,  # (n,) int64, out: sweeps spent
) -> None:
    """Sweep until every sample has converged, became non-finite or had ``max_sweeps`` sweeps.

    A correction that does not reduce the residual, or is not finite, is discarded.
    """
    panels, layout, inverse_diagonal, n = phase.panels, phase.layout, phase.inverse_diagonal, z.shape[0]
    padded = inverse_diagonal.shape[0]
    zs = zeros(padded, lanes, panels)
    gs = zeros(padded, lanes, panels)
    los = zeros(padded, lanes, panels)
    his = zeros(padded, lanes, panels)
    if unit is None:  # Numba compiles only the branch that is taken
        if phase.lo.shape[0] == 1:
            _fill_bounds(lanes, phase, los, his)
    residual = numbers(lanes)
    sample = integers(lanes, -1)
    count = integers(lanes, 0)
    following = 0
    for s in range(lesser(lanes, n)):
        sample[s] = following
        _begin(s, following, unit, phase, z, g, zs, gs, los, his)
        following += 1
    busy = following
    while busy > 0:
        for p in range(layout.shape[0]):
            sweep_panel(zs, gs, los, his, inverse_diagonal, panels, layout[p, 0], layout[p, 1], layout[p, 2], layout[p, 3])
        squared_residuals(zs, gs, los, his, residual)
        for s in range(lanes):
            i = sample[s]
            if i < 0:
                continue
            count[s] += 1
            if residual[s] > threshold[i] and residual[s] < np.inf and count[s] < max_sweeps:
                continue
            used[i] = count[s]
            if unit is None:
                _read_lane(s, i, phase, z, g, zs, gs)
            elif residual[s] <= 1:
                _add_correction(s, i, unit[i], phase, z, zs, los, his)
            if following < n:
                sample[s] = following
                count[s] = 0
                _begin(s, following, unit, phase, z, g, zs, gs, los, his)
                following += 1
            else:
                sample[s] = -1
                busy -= 1
                for m in range(padded):
                    gs[m, s] = 0
                    los[m, s] = zs[m, s]
                    his[m, s] = zs[m, s]


@kernel
def residuals(
    phase: PackedQP,
    q: Any,  # (n, dim)
    z: Any,  # (n, dim)
    g: Any,  # (n, dim), out: H z - q
    norms: Any,  # (n,) float64, out: norm of the KKT residual
) -> None:
    """Compute gradients and residuals from scratch."""
    n, dim = z.shape
    layout, padded = phase.layout, phase.inverse_diagonal.shape[0]
    zs = zeros(padded, LANES, phase.panels)
    gs = zeros(padded, LANES, phase.panels)
    los = zeros(padded, LANES, phase.panels)
    his = zeros(padded, LANES, phase.panels)
    squares = numbers(LANES)
    if phase.lo.shape[0] == 1:
        _fill_bounds(LANES, phase, los, his)
    for start in range(0, n, LANES):
        count = lesser(LANES, n - start)
        for s in range(count):
            _fill_lane(s, start + s, phase, z, q, zs, gs, los, his)
        for m in range(padded):
            for s in range(LANES):
                gs[m, s] = -gs[m, s]
        for p in range(layout.shape[0]):
            multiply_panel(zs, gs, phase.panels, layout[p, 0], layout[p, 1], layout[p, 2], layout[p, 3])
        squared_residuals(zs, gs, los, his, squares)
        for s in range(count):
            norms[start + s] = np.sqrt(squares[s])
            for j in range(dim):
                g[start + s, j] = gs[phase.place[j], s]


@summing
def _scale(q: Any, i: int) -> float:
    """Return max(1, |q|) of a row, which tolerances are relative to."""
    total = 0.0
    for j in range(q.shape[1]):
        total += np.float64(q[i, j]) * np.float64(q[i, j])
    return np.sqrt(greater(1.0, total))


@summing
def _residual(phase: PackedQP, z: Any, g: Any, i: int) -> float:
    """Return the norm of the KKT residual of a row."""
    lo, hi = phase.lo, phase.hi
    row = i if lo.shape[0] > 1 else 0
    total = 0.0
    for j in range(z.shape[1]):
        held = (z[i, j] <= lo[row, j]) & (g[i, j] > 0) | (z[i, j] >= hi[row, j]) & (g[i, j] < 0)
        free = np.float64(0) if held else np.float64(g[i, j])
        total += free * free
    return np.sqrt(total)


@kernel
def begin(phase: PackedQP, q: Any, cold: bool, z: Any, g: Any, norms: Any) -> None:
    """Write the gradient H z - q at ``z``, which is zero if ``cold``."""
    if not cold:
        residuals(phase, q, z, g, norms)
        return
    for i in range(q.shape[0]):
        for j in range(q.shape[1]):
            g[i, j] = -q[i, j]


@kernel
def solve(
    phase: PackedQP,
    q: Any,  # (n, dim)
    tol: float,
    max_sweeps: int,
    z: Any,  # (n, dim), feasible; out: the solution
    g: Any,  # (n, dim): H z - q, in and out
    norms: Any,  # (n,) float64, out: norm of the KKT residual
    scale: Any,  # (n,) float64, out: max(1, |q|), what tol is relative to
    used: Any,  # (n,) int64, out: sweeps spent
) -> None:
    """Solve a box-constrained QP, starting at ``z``.

    Updating the gradient in a few sweeps rounds about as much as computing it anew, which is done for small tolerances only.
    """
    n = z.shape[0]
    threshold = numbers(n)
    for i in range(n):
        scale[i] = _scale(q, i)
        # stop slightly below the threshold, so that the recomputed residual is below it too
        aim = INSIDE * tol * scale[i]
        threshold[i] = aim * aim
    descend(phase, LANES, threshold, max_sweeps, None, z, g, used)
    if tol < RUNNING * (EPS_SINGLE if z.itemsize == 4 else EPS_DOUBLE):
        residuals(phase, q, z, g, norms)
        return
    for i in range(n):
        norms[i] = _residual(phase, z, g, i)


@kernel
def narrow(phase: PackedQP, panels: Any, inverse_diagonal: Any) -> bool:
    """Write panels and inverse diagonal in float32; return whether the diagonal is in its range."""
    for i in range(panels.shape[0]):
        panels[i] = phase.panels[i]
    for j in range(inverse_diagonal.shape[0]):
        inverse_diagonal[j] = phase.inverse_diagonal[j]
    for j in range(phase.place.shape[0]):
        inverse = phase.inverse_diagonal[phase.place[j]]
        if not (SMALLEST < inverse and inverse < 1 / SMALLEST):
            return False
    return True


@kernel
def solve_mixed(
    phase: PackedQP,
    single: PackedQP,  # the same in float32; without panels to use no float32
    q: Any,
    tol: float,
    max_sweeps: int,
    z: Any,
    g: Any,
    norms: Any,
    scale: Any,
    used: Any,
) -> None:
    """Solve like :func:`solve`, in mixed precision.

    The first sweeps compute a correction of ``z`` in float32, with twice as many numbers per vector.
    """
    n = z.shape[0]
    threshold, spent = numbers(n), integers(n, 0)
    before = integers(n, 0)
    missing = True
    if single.panels.shape[0] > 0:
        for i in range(n):
            scale[i] = _scale(q, i)
            norms[i] = _residual(phase, z, g, i)
        for _ in range(SINGLE_ROUNDS):
            for i in range(n):
                aim = greater(INSIDE * tol * scale[i] / norms[i], GAIN)
                threshold[i] = aim * aim
            descend(single, LANES, threshold, max_sweeps, norms, z, g, spent)
            residuals(phase, q, z, g, norms)
            missing = False
            for i in range(n):
                before[i] += spent[i]
                missing = missing or not norms[i] <= tol * scale[i]
            if not missing:
                break
    if missing:
        solve(phase, q, tol, max_sweeps, z, g, norms, scale, spent)
    else:
        for i in range(n):
            spent[i] = 0
    for i in range(n):
        used[i] = before[i] + spent[i]
