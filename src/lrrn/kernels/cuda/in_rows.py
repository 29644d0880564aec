"""Kernels of :mod:`lrrn.solvers.half_precision` with one program per sample, for wider networks.

Variables are scaled: A is the scaled Hessian. Products with it are torch's.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def this_row(dim, WIDTH: tl.constexpr):
    """Return the sample of the program, its units padded to a power of two, the mask of real units, and their offsets."""
    row = tl.program_id(0).to(tl.int64)
    units = tl.arange(0, WIDTH)
    return row, units, units < dim, row * dim + units


@triton.jit
def is_finite(v):
    """Whether no entry of a row is infinite or NaN."""
    return tl.max(tl.where(tl.abs(v) < float("inf"), 0, 1)) == 0


@triton.jit
def size_of(v):
    """Return the largest absolute value of a row, or 1 if it is 0 or not finite, so that a row can be divided by it."""
    most = tl.max(tl.abs(v))
    return tl.where((most > 0) & (most < float("inf")), most, 1.0)


@triton.jit(do_not_specialize=["dim"])
def begin_relax(
    z_ptr, g_ptr, lo_ptr, hi_ptr, unit_ptr, inverse_ptr, lead_ptr, push_ptr, down_ptr, up_ptr, here_ptr, ahead_ptr, size_ptr,
    dim, lo_stride, hi_stride, farthest, LEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Scale the correction of one sample to the size of a projected step, and write the arrays of :func:`relax`.

    ``lead_ptr`` holds the extrapolated point minus the current one, in scaled variables; it is read with ``LEADS`` only.
    """
    row, units, inside, place = this_row(dim, WIDTH)
    unit = tl.load(unit_ptr + units, mask=inside, other=1.0)
    z = tl.load(z_ptr + place, mask=inside, other=0.0)
    slope = tl.load(g_ptr + place, mask=inside, other=0.0) * (unit * tl.load(inverse_ptr))
    down = (tl.load(lo_ptr + row * lo_stride + units, mask=inside, other=0.0) - z) / unit
    up = (tl.load(hi_ptr + row * hi_stride + units, mask=inside, other=0.0) - z) / unit
    size = size_of(tl.minimum(tl.maximum(-slope, down), up))
    ahead = tl.zeros((WIDTH,), dtype=tl.float32)
    if LEADS:
        ahead = (tl.load(lead_ptr + place, mask=inside, other=0.0) / size).to(tl.float32)
    tl.store(push_ptr + place, (-slope / size).to(tl.float32), mask=inside)
    tl.store(down_ptr + place, (down / size).to(tl.float32), mask=inside)
    tl.store(up_ptr + place, (up / size).to(tl.float32), mask=inside)
    tl.store(here_ptr + place, tl.zeros((WIDTH,), dtype=tl.float32), mask=inside)
    tl.store(ahead_ptr + place, tl.minimum(tl.maximum(ahead, -farthest), farthest).to(tl.float16), mask=inside)
    tl.store(size_ptr + row, size)


@triton.jit(do_not_specialize=["dim"])
def end_relax(
    z_ptr, lo_ptr, hi_ptr, unit_ptr, lead_ptr, t_ptr, down_ptr, up_ptr, here_ptr, ahead_ptr, size_ptr,
    dim, lo_stride, hi_stride, HEAVY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the correction of one sample to z, and store its momentum; if it is not finite, keep z and reset the momentum.

    ``ahead_ptr`` holds the extrapolated point, or with ``HEAVY`` the last move.
    """
    row, units, inside, place = this_row(dim, WIDTH)
    z = tl.load(z_ptr + place, mask=inside, other=0.0)
    lo = tl.load(lo_ptr + row * lo_stride + units, mask=inside, other=0.0)
    hi = tl.load(hi_ptr + row * hi_stride + units, mask=inside, other=0.0)
    here = tl.load(here_ptr + place, mask=inside, other=0.0)
    size = tl.load(size_ptr + row)
    moved = z + here * (size * tl.load(unit_ptr + units, mask=inside, other=0.0))
    # units on a bound must equal it bitwise
    moved = tl.minimum(tl.maximum(moved, lo), hi)
    moved = tl.where(here <= tl.load(down_ptr + place, mask=inside, other=-1.0), lo, moved)
    moved = tl.where(here >= tl.load(up_ptr + place, mask=inside, other=1.0), hi, moved)
    fine = is_finite(moved)
    lead = tl.load(ahead_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if not HEAVY:
        lead -= here
        tl.store(t_ptr + row, tl.where(fine, tl.load(t_ptr + row), 1.0))
    tl.store(z_ptr + place, tl.where(fine, moved, z), mask=inside)
    tl.store(lead_ptr + place, tl.where(fine, lead * size, 0.0), mask=inside)


@triton.jit(do_not_specialize=["dim"])
def relax(
    product_ptr, ahead_ptr, here_ptr, t_ptr, push_ptr, down_ptr, up_ptr, most_ptr, dim, farthest,
    CAPPED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Finish a step for one sample, given y A / L for its extrapolated point y: e <- clip(y - y A / L + push), and momentum.

    Momentum restarts where it points uphill. ``t_ptr`` holds its state, one number per sample. ``most_ptr``, read with
    ``CAPPED`` only, holds its maximum.
    """
    row, _, inside, place = this_row(dim, WIDTH)
    ahead = tl.load(ahead_ptr + place, mask=inside, other=0.0).to(tl.float32)
    product = tl.load(product_ptr + place, mask=inside, other=0.0).to(tl.float32)
    push = tl.load(push_ptr + place, mask=inside, other=0.0)
    down = tl.load(down_ptr + place, mask=inside, other=0.0)
    up = tl.load(up_ptr + place, mask=inside, other=0.0)
    here = tl.load(here_ptr + place, mask=inside, other=0.0)
    new = tl.minimum(tl.maximum(ahead - product + push, down), up)
    move = new - here
    uphill = tl.sum((ahead - new) * move) > 0
    t = tl.load(t_ptr + row)
    t_new = tl.where(uphill, 1.0, 0.5 * (1 + tl.sqrt(1 + 4 * t * t)))
    weight = tl.where(uphill, 0.0, (t - 1) / t_new)
    if CAPPED:
        weight = tl.minimum(weight, tl.load(most_ptr))
    next = tl.minimum(tl.maximum(new + weight * move, -farthest), farthest)
    tl.store(here_ptr + place, new, mask=inside)
    tl.store(ahead_ptr + place, next.to(tl.float16), mask=inside)
    tl.store(t_ptr + row, t_new)


@triton.jit(do_not_specialize=["dim"])
def roll(
    product_ptr, half_ptr, here_ptr, move_ptr, push_ptr, down_ptr, up_ptr, rates_ptr, dim, farthest,
    FIRST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Finish a step of the heavy ball for one sample, given e A / L for its point e: e <- clip(e - r (e A / L - push) + k m).

    m is the last move; ``rates_ptr`` holds 1 / L, r and k. The ``FIRST`` step of a correction starts at e = 0 and reads no
    product.
    """
    _, _, inside, place = this_row(dim, WIDTH)
    slope = -tl.load(push_ptr + place, mask=inside, other=0.0)
    here = tl.zeros((WIDTH,), dtype=tl.float32)
    if not FIRST:
        slope += tl.load(product_ptr + place, mask=inside, other=0.0).to(tl.float32)
        here = tl.load(here_ptr + place, mask=inside, other=0.0)
    down = tl.load(down_ptr + place, mask=inside, other=0.0)
    up = tl.load(up_ptr + place, mask=inside, other=0.0)
    move = tl.load(move_ptr + place, mask=inside, other=0.0).to(tl.float32) * tl.load(rates_ptr + 2)
    new = tl.minimum(tl.maximum(here - tl.load(rates_ptr + 1) * slope + move, down), up)
    tl.store(here_ptr + place, new, mask=inside)
    tl.store(move_ptr + place, tl.minimum(tl.maximum(new - here, -farthest), farthest).to(tl.float16), mask=inside)
    tl.store(half_ptr + place, tl.minimum(tl.maximum(new, -farthest), farthest).to(tl.float16), mask=inside)


@triton.jit(do_not_specialize=["dim"])
def begin_conjugate(
    g_ptr, lo_ptr, hi_ptr, unit_ptr, inverse_ptr, kept_ptr, half_ptr, direction_ptr, left_ptr, moved_ptr, mask_ptr, state_ptr,
    size_ptr, dim, lo_stride, hi_stride, KEPT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Scale the remaining residual of one sample to size one, and write the arrays of :func:`conjugate`.

    ``kept_ptr`` holds the direction of the last call; it is read with ``KEPT`` only.
    """
    row, units, inside, place = this_row(dim, WIDTH)
    lo = tl.load(lo_ptr + row * lo_stride + units, mask=inside, other=0.0)
    hi = tl.load(hi_ptr + row * hi_stride + units, mask=inside, other=0.0)
    free = inside & (lo < hi)
    unit = tl.load(unit_ptr + units, mask=inside, other=0.0)
    left = tl.where(free, -tl.load(g_ptr + place, mask=inside, other=0.0) * (unit * tl.load(inverse_ptr)), 0.0)
    size = size_of(left)
    left = (left / size).to(tl.float32)
    direction = left
    if KEPT:
        direction = (tl.load(kept_ptr + place, mask=inside, other=0.0) / size).to(tl.float32)
    shrink = size_of(direction)
    tl.store(left_ptr + place, left, mask=inside)
    tl.store(direction_ptr + place, direction, mask=inside)
    tl.store(half_ptr + place, (direction / shrink).to(tl.float16), mask=inside)
    tl.store(moved_ptr + place, tl.zeros((WIDTH,), dtype=tl.float32), mask=inside)
    tl.store(mask_ptr + place, free.to(tl.int8), mask=inside)
    tl.store(state_ptr + 2 * row, tl.sum(left * left))
    tl.store(state_ptr + 2 * row + 1, shrink)
    tl.store(size_ptr + row, size)


@triton.jit(do_not_specialize=["dim"])
def end_conjugate(
    z_ptr, unit_ptr, kept_ptr, direction_ptr, moved_ptr, size_ptr, dim, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the correction of one sample to z, and store its direction; if it is not finite, keep z and store no direction."""
    row, units, inside, place = this_row(dim, WIDTH)
    z = tl.load(z_ptr + place, mask=inside, other=0.0)
    size = tl.load(size_ptr + row)
    unit = tl.load(unit_ptr + units, mask=inside, other=0.0)
    after = z + tl.load(moved_ptr + place, mask=inside, other=0.0) * (size * unit)
    fine = is_finite(after)
    direction = tl.load(direction_ptr + place, mask=inside, other=0.0) * size
    tl.store(z_ptr + place, tl.where(fine, after, z), mask=inside)
    tl.store(kept_ptr + place, tl.where(fine, direction, 0.0), mask=inside)


@triton.jit(do_not_specialize=["dim"])
def scales(block_ptr, unit_ptr, dim, spread, WIDTH: tl.constexpr):
    """Write the scales of a layer's variables, given its square block of the Hessian: see ``half_and_rate``."""
    units = tl.arange(0, WIDTH)
    inside = units < dim
    diagonal = tl.load(block_ptr + units.to(tl.int64) * (dim + 1), mask=inside, other=1.0)
    largest = tl.max(tl.where(inside, diagonal, 0.0))
    smallest = tl.min(tl.where(inside, diagonal, float("inf")))
    # shares of the mean, whose sum does not overflow
    mean = tl.sum(tl.where(inside, diagonal / dim, 0.0))
    tl.store(unit_ptr + units, 1 / tl.sqrt(tl.where(largest > spread * smallest, diagonal, mean)), mask=inside)


@triton.jit(do_not_specialize=["dim"])
def rates(size_ptr, unit_ptr, rates_ptr, dim, power, times, added, least, slack, HEAVY: tl.constexpr, WIDTH: tl.constexpr):
    """Write 1 / L and, with ``HEAVY``, step and momentum of the heavy ball.

    ``size_ptr`` holds the Frobenius norm of a power of a matrix, whose root times ``times`` bounds its largest eigenvalue. The
    scaled Hessian has at most that plus ``added``, and at least ``least``, both times squared scales.
    """
    units = tl.arange(0, WIDTH)
    unit = tl.load(unit_ptr + units, mask=units < dim, other=0.0).to(tl.float32)
    most = tl.max(unit)
    # a size that underflows is below this
    root = tl.exp(tl.log(tl.maximum(tl.load(size_ptr), 1e-38)) * power).to(tl.float32)
    largest = (added * most * most + root * times) * slack
    tl.store(rates_ptr, 1 / largest)
    if HEAVY:
        # the root of the inverse condition number
        ratio = tl.sqrt(least / largest) * tl.min(tl.where(units < dim, unit, float("inf")))
        tl.store(rates_ptr + 1, 4 / ((1 + ratio) * (1 + ratio)))
        tl.store(rates_ptr + 2, (1 - ratio) * (1 - ratio) / ((1 + ratio) * (1 + ratio)))


@triton.jit
def narrow(h_ptr, unit_ptr, factor_ptr, high_ptr, low_ptr, dim, low, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block of the scaled Hessian times a factor and, with ``SPLIT``, what half precision leaves out, times ``low``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < dim * dim
    unit = tl.load(unit_ptr + at // dim, mask=inside, other=0.0) * tl.load(unit_ptr + at % dim, mask=inside, other=0.0)
    value = tl.load(h_ptr + at, mask=inside, other=0.0) * unit * tl.load(factor_ptr)
    high = value.to(high_ptr.dtype.element_ty)
    tl.store(high_ptr + at, high, mask=inside)
    if SPLIT:
        tl.store(low_ptr + at, ((value - high.to(tl.float32)) * low).to(tl.float16), mask=inside)


@triton.jit(do_not_specialize=["dim", "n"])
def judge(
    z_ptr, q_ptr, lo_ptr, hi_ptr, both_ptr, rest_ptr, unit_ptr, inverse_ptr, size_ptr, g_ptr, residual_ptr,
    n, dim, lo_stride, hi_stride, low, SPLIT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write H z - q of one sample, and the norm of the KKT residual, in float64.

    ``g_ptr`` holds H z. With ``SPLIT``, ``both_ptr`` holds the products of the first part of A / L with both parts of z, and
    ``rest_ptr`` that of its second part with the first part of z; see ``split_rows``.
    """
    row, units, inside, place = this_row(dim, WIDTH)
    z = tl.load(z_ptr + place, mask=inside, other=0.0)
    lo = tl.load(lo_ptr + row * lo_stride + units, mask=inside, other=0.0)
    hi = tl.load(hi_ptr + row * hi_stride + units, mask=inside, other=0.0)
    if SPLIT:
        rest = tl.load(both_ptr + n.to(tl.int64) * dim + place, mask=inside, other=0.0)
        rest += tl.load(rest_ptr + place, mask=inside, other=0.0)
        g = tl.load(both_ptr + place, mask=inside, other=0.0) + rest / low
        g *= tl.load(size_ptr + row) / tl.load(inverse_ptr) / tl.load(unit_ptr + units, mask=inside, other=1.0)
    else:
        g = tl.load(g_ptr + place, mask=inside, other=0.0)
    g -= tl.load(q_ptr + place, mask=inside, other=0.0)
    tl.store(g_ptr + place, g, mask=inside)
    # a NaN slope counts as a residual, even at a bound
    held = ((z <= lo) & (g >= 0)) | ((z >= hi) & (g <= 0))
    left = tl.where(held, 0.0, g).to(tl.float64)
    if z.dtype == tl.float64:
        # squares of float64 overflow from 1e154 on
        size = size_of(left)
        left = left / size
        tl.store(residual_ptr + row, size * tl.sqrt(tl.sum(left * left)))
    else:
        tl.store(residual_ptr + row, tl.sqrt(tl.sum(left * left)))


@triton.jit(do_not_specialize=["dim"])
def settle(g_ptr, residual_ptr, must_ptr, status_ptr, dim, NON_FINITE: tl.constexpr, WIDTH: tl.constexpr):
    """Write the status of one sample: 0 if its residual is small enough, else 1; another where anything is not finite."""
    row, _, inside, place = this_row(dim, WIDTH)
    residual = tl.load(residual_ptr + row)
    fine = is_finite(tl.load(g_ptr + place, mask=inside, other=0.0)) & (residual < float("inf"))
    status = tl.where(residual <= tl.load(must_ptr + row), 0, 1)
    tl.store(status_ptr + row, tl.where(fine, status, NON_FINITE).to(tl.int64))


@triton.jit(do_not_specialize=["dim"])
def conjugate(product_ptr, half_ptr, direction_ptr, left_ptr, moved_ptr, mask_ptr, state_ptr, dim, WIDTH: tl.constexpr):
    """Take a step of conjugate gradients for one sample, given A / L times its direction in half precision.

    ``state_ptr`` holds two numbers per sample: the squared norm of the remaining residual, and the divisor of the direction in
    its half-precision copy.
    """
    row, _, inside, place = this_row(dim, WIDTH)
    free = tl.load(mask_ptr + place, mask=inside, other=0) != 0
    before = tl.load(state_ptr + 2 * row)
    shrink = tl.load(state_ptr + 2 * row + 1)
    image = tl.where(free, tl.load(product_ptr + place, mask=inside, other=0.0).to(tl.float32) * shrink, 0.0)
    direction = tl.load(direction_ptr + place, mask=inside, other=0.0)
    left = tl.load(left_ptr + place, mask=inside, other=0.0)
    moved = tl.load(moved_ptr + place, mask=inside, other=0.0)
    curvature = tl.sum(direction * image)
    # in exact arithmetic this is |left|^2, but not after the residual was recomputed
    along = tl.sum(left * direction)
    step = tl.where(curvature > 0, along / tl.where(curvature > 0, curvature, 1.0), 0.0)
    moved += step * direction
    left -= step * image
    after = tl.sum(left * left)
    direction = left + tl.where(before > 0, after / tl.where(before > 0, before, 1.0), 0.0) * direction
    largest = tl.max(tl.abs(direction))
    shrink = tl.where(largest > 0, largest, 1.0)
    tl.store(moved_ptr + place, moved, mask=inside)
    tl.store(left_ptr + place, left, mask=inside)
    tl.store(direction_ptr + place, direction, mask=inside)
    tl.store(half_ptr + place, (direction / shrink).to(tl.float16), mask=inside)
    tl.store(state_ptr + 2 * row, after)
    tl.store(state_ptr + 2 * row + 1, shrink)
