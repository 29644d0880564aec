"""The kernel of :mod:`lrrn.solvers.accelerated` on a GPU: a tile of samples stays on chip from its start to its answer.

Arrays in, arrays out. Units are scaled so that the Hessian A has a unit diagonal; its width is padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sweep(
    q_ptr,
    z_ptr,
    lo_ptr,
    hi_ptr,
    unit_ptr,
    high_ptr,
    low_ptr,
    move_ptr,
    rates_ptr,
    n,
    dim,
    lo_stride,
    hi_stride,
    rounds,
    steps,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Improve z by rounds of accelerated projected gradient steps on its correction, in half precision.

    A round computes the gradient A z - q from halves (A and z are each the sum of two, and three of the four products count),
    scales the correction to the size of a projected step, and takes ``steps`` steps e <- clip(y M + c), M = I - A / L, with a
    constant momentum. ``unit_ptr`` holds diag(H)^-1/2, ``high_ptr`` and ``low_ptr`` the halves of A, ``move_ptr`` M, and
    ``rates_ptr`` 1 / L and the momentum. A sample whose correction is not finite keeps what it had.
    """
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    units = tl.arange(0, WIDTH)
    inside = (rows[:, None] < n) & (units[None, :] < dim)
    place = rows[:, None].to(tl.int64) * dim + units[None, :]
    unit = tl.load(unit_ptr + units, mask=units < dim, other=1.0)[None, :]
    q = tl.load(q_ptr + place, mask=inside, other=0.0) * unit
    z = tl.load(z_ptr + place, mask=inside, other=0.0) / unit
    lo = tl.load(lo_ptr + rows[:, None].to(tl.int64) * lo_stride + units[None, :], mask=inside, other=0.0) / unit
    hi = tl.load(hi_ptr + rows[:, None].to(tl.int64) * hi_stride + units[None, :], mask=inside, other=0.0) / unit
    square = units[:, None] * WIDTH + units[None, :]
    inverse = tl.load(rates_ptr)
    momentum = tl.load(rates_ptr + 1)
    for _ in range(rounds):
        largest = tl.max(tl.abs(z), axis=1)
        shrink = tl.where(largest > 0, largest, 1.0)[:, None]
        scaled = z / shrink
        z_high = scaled.to(tl.float16)
        z_low = (scaled - z_high.to(tl.float32)).to(tl.float16)
        high = tl.load(high_ptr + square)
        product = tl.dot(z_high, high) + tl.dot(z_low, high) + tl.dot(z_high, tl.load(low_ptr + square))
        g = product * shrink - q
        step = tl.minimum(tl.maximum(z - g * inverse, lo), hi) - z
        size = tl.max(tl.abs(step), axis=1)
        size = tl.where(size > 0, size, 1.0)[:, None]
        c = -g * inverse / size
        down = (lo - z) / size
        up = (hi - z) / size
        e = tl.zeros((TILE, WIDTH), dtype=tl.float32)
        y = e
        move = tl.load(move_ptr + square)
        for _ in range(steps):
            new = tl.minimum(tl.maximum(tl.dot(y.to(tl.float16), move) + c, down), up)
            y = new + momentum * (new - e)
            e = new
        after = tl.minimum(tl.maximum(z + size * e, lo), hi)
        fine = tl.max(tl.where(tl.abs(after) < 3e38, 0, 1), axis=1) == 0
        z = tl.where(fine[:, None], after, z)
    # what is on a bound must be so to the last bit
    floor = tl.load(lo_ptr + rows[:, None].to(tl.int64) * lo_stride + units[None, :], mask=inside, other=0.0)
    ceiling = tl.load(hi_ptr + rows[:, None].to(tl.int64) * hi_stride + units[None, :], mask=inside, other=0.0)
    out = tl.minimum(tl.maximum(z * unit, floor), ceiling)
    out = tl.where(z <= lo, floor, tl.where(z >= hi, ceiling, out))
    tl.store(z_ptr + place, out, mask=inside)
