"""Kernels of :mod:`lrrn.solvers.half_precision` that keep a tile of samples on chip.

Variables are scaled: A is the scaled Hessian, with a unit diagonal.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _largest(b, times, ratio):
    """Return the largest eigenvalue of a positive semidefinite matrix by its powers, up to a part in 200.

    With P = B^(2^(times - 1)), it is at most |P^2|_F^(1/2^times), which is returned for ``ratio`` 0, and at least
    (|P^2|_F / |P|_F)^(1/2^(times - 1)), which is returned for 1; between them is their weighted geometric mean.
    """
    size = tl.maximum(tl.sqrt(tl.sum(b * b)), 1e-30)
    logarithm = tl.log(size)
    weight = 1.0
    for _ in range(times):
        half = (b / size).to(tl.float16)
        b = tl.dot(half, half)
        weight = weight / 2
        size = tl.maximum(tl.sqrt(tl.sum(b * b)), 1e-30)
        logarithm += weight * tl.log(size)
    return tl.exp(logarithm + ratio * weight * tl.log(size))


@triton.jit
def halve(h, unit_ptr, high_ptr, low_ptr, move_ptr, rates_ptr, dim, up, down, WIDTH: tl.constexpr):
    """Write the arrays of :func:`sweep` for a Hessian; rows and columns from ``dim`` on are replaced by those of the identity.

    ``up`` and ``down`` are the numbers of squarings for the largest and for the smallest eigenvalue. Half precision suffices:
    the error of a squaring is halved by every squaring before it.
    """
    units = tl.arange(0, WIDTH)
    same = units[:, None] == units[None, :]
    outside = same & (units[:, None] >= dim)
    h = tl.where(outside, 1.0, h)
    # the matrix is symmetric: sum over both axes, so that no layout conversion is needed
    across = 1 / tl.sqrt(tl.sum(tl.where(same, h, 0.0), axis=0))
    along = 1 / tl.sqrt(tl.sum(tl.where(same, h, 0.0), axis=1))
    a = h * along[:, None] * across[None, :]
    square = units[:, None] * WIDTH + units[None, :]
    high = a.to(tl.float16)
    tl.store(unit_ptr + units, across.to(tl.float32), mask=units < dim)
    tl.store(high_ptr + square, high)
    tl.store(low_ptr + square, (a - high.to(a.dtype)).to(tl.float16))
    b = a.to(tl.float32)
    largest = _largest(b, up, 0.0) * (1 + 5e-3)
    # a step size needs an upper bound, momentum an estimate: the mean of both bounds saves one or two squarings
    smallest = tl.maximum(largest - _largest(tl.where(same, largest, 0.0) - b, down, 0.5), 0.0) + 1e-4 * largest
    root = tl.sqrt(smallest / largest)
    tl.store(move_ptr + square, (tl.where(same, 1.0, 0.0) - b / largest).to(tl.float16))
    tl.store(rates_ptr, 1 / largest)
    tl.store(rates_ptr + 1, (1 - root) / (1 + root))


@triton.jit
def prepare(h_ptr, unit_ptr, high_ptr, low_ptr, move_ptr, rates_ptr, dim, up, down, WIDTH: tl.constexpr):
    """Convert a Hessian of shape (dim, dim) to the arrays of :func:`sweep`, in one program; see :func:`halve`."""
    units = tl.arange(0, WIDTH)
    inside = (units[:, None] < dim) & (units[None, :] < dim)
    h = tl.load(h_ptr + units[:, None] * dim + units[None, :], mask=inside, other=0.0).to(tl.float64)
    halve(h, unit_ptr, high_ptr, low_ptr, move_ptr, rates_ptr, dim, up, down, WIDTH)


@triton.jit
def slope(z, q, high_ptr, low_ptr, square):
    """Return A z - q for a tile of samples, A and z split into two float16 parts; the smallest product is omitted."""
    largest = tl.max(tl.abs(z), axis=1)
    shrink = tl.where(largest > 0, largest, 1.0)[:, None]
    scaled = z / shrink
    z_high = scaled.to(tl.float16)
    z_low = (scaled - z_high.to(tl.float32)).to(tl.float16)
    high = tl.load(high_ptr + square)
    product = tl.dot(z_high, high) + tl.dot(z_low, high) + tl.dot(z_high, tl.load(low_ptr + square))
    return product * shrink - q


@triton.jit
def refine(
    z, q, lo, hi, high_ptr, low_ptr, move_ptr, rates_ptr, square, rounds, steps, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """Improve a tile of samples by rounds of accelerated projected gradient steps on their corrections.

    A round computes the gradient, scales the correction to the size of a projected step, and takes ``steps`` steps
    e <- clip(y M + c), M = I - A / L, with a constant momentum. A sample whose correction is not finite is not changed.
    """
    inverse = tl.load(rates_ptr)
    momentum = tl.load(rates_ptr + 1)
    # most solves start at zero, where no product is needed
    away = tl.max(tl.max(tl.abs(z), axis=1), axis=0) > 0
    for _ in range(rounds):
        g = -q
        if away:
            g = slope(z, q, high_ptr, low_ptr, square)
        away = True
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
        # units on a bound must equal it bitwise, or their slope counts as a residual; divisions on a device are not exact
        after = tl.minimum(tl.maximum(z + size * e, lo), hi)
        after = tl.where(e <= down, lo, tl.where(e >= up, hi, after))
        fine = tl.max(tl.where(tl.abs(after) < 3e38, 0, 1), axis=1) == 0
        z = tl.where(fine[:, None], after, z)
    return z


@triton.jit
def kkt_norm(z, g, lo, hi, inside):
    """Return the norm of the KKT residual of each sample of a tile."""
    held = ((z <= lo) & (g > 0)) | ((z >= hi) & (g < 0)) | (inside == 0)
    return tl.sqrt(tl.sum(tl.where(held, 0.0, g * g), axis=1))


@triton.jit(do_not_specialize=["rounds", "steps"])  # a variant must not be compiled in a capture
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
    g_ptr,
    residual_ptr,
    spent_ptr,
    n,
    dim,
    lo_stride,
    hi_stride,
    rounds,
    steps,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Improve z by rounds of :func:`refine`, and write the number of steps; a tile of samples stays on chip.

    ``unit_ptr`` holds diag(H)^-1/2, ``high_ptr`` and ``low_ptr`` the float16 parts of A, ``move_ptr`` I - A / L, and
    ``rates_ptr`` 1 / L and the momentum. The width is padded to a power of two. With ``CHECK``, H z - q and the norm of the KKT
    residual are computed at the result, also from float16 parts: the omitted product is below the last place of float32.
    """
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    units = tl.arange(0, WIDTH)
    inside = (rows[:, None] < n) & (units[None, :] < dim)
    place = rows[:, None].to(tl.int64) * dim + units[None, :]
    unit = tl.load(unit_ptr + units, mask=units < dim, other=1.0)[None, :]
    q = tl.load(q_ptr + place, mask=inside, other=0.0) * unit
    z = tl.load(z_ptr + place, mask=inside, other=0.0) / unit
    floor = tl.load(lo_ptr + rows[:, None].to(tl.int64) * lo_stride + units[None, :], mask=inside, other=0.0)
    ceiling = tl.load(hi_ptr + rows[:, None].to(tl.int64) * hi_stride + units[None, :], mask=inside, other=0.0)
    lo = floor / unit
    hi = ceiling / unit
    square = units[:, None] * WIDTH + units[None, :]
    z = refine(z, q, lo, hi, high_ptr, low_ptr, move_ptr, rates_ptr, square, rounds, steps, WIDTH, TILE)
    # units on a bound must equal it bitwise
    out = tl.minimum(tl.maximum(z * unit, floor), ceiling)
    out = tl.where(z <= lo, floor, tl.where(z >= hi, ceiling, out))
    tl.store(z_ptr + place, out, mask=inside)
    tl.store(spent_ptr + rows, tl.zeros((TILE,), tl.int64) + rounds * steps, mask=rows < n)
    if CHECK:
        g = slope(out / unit, q, high_ptr, low_ptr, square) / unit
        tl.store(g_ptr + place, g, mask=inside)
        tl.store(residual_ptr + rows, kkt_norm(out, g, floor, ceiling, inside), mask=rows < n)
