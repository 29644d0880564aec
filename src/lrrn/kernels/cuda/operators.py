"""Passes over the unknowns of a solve whose products are convolutions: one layer at a time, images with channels last.

A call of the solver computes a correction in units of the residual: unknowns, gradient and distances to the bounds are divided
by ``size``, one number per sample. Programs handle a stretch of one sample's units.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(60000.0)
"""Distances to bounds in half precision are at most this; one that is as large is no bound for a correction."""


@triton.jit
def summed(sums_ptr, parts, PARTS: tl.constexpr):
    """Return the sum of the parts of one sample."""
    all_parts = tl.arange(0, PARTS)
    return tl.sum(tl.load(sums_ptr + all_parts, mask=all_parts < parts, other=0.0))


@triton.jit
def stretch(units, WIDTH: tl.constexpr):
    """Return the sample of a program, its part of the units, their numbers, where they are in memory, and which exist."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    j = part * WIDTH + tl.arange(0, WIDTH)
    return row, part, j, row * units + j, j < units


@triton.jit
def judge(
    z_ptr, q_ptr, lo_ptr, hi_ptr, g_ptr, sums_ptr, dim, lo_stride, hi_stride, parts,
    IS_PRODUCT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write parts of the squared KKT residual, in float64; if ``g`` is the product H z, subtract q from it first."""
    row, part, j, place, inside = stretch(dim, WIDTH)
    z = tl.load(z_ptr + place, mask=inside, other=0.0)
    g = tl.load(g_ptr + place, mask=inside, other=0.0)
    lo = tl.load(lo_ptr + row * lo_stride + j, mask=inside, other=0.0)
    hi = tl.load(hi_ptr + row * hi_stride + j, mask=inside, other=0.0)
    if IS_PRODUCT:
        g -= tl.load(q_ptr + place, mask=inside, other=0.0)
        tl.store(g_ptr + place, g, mask=inside)
    open_ = tl.where(((z <= lo) & (g > 0)) | ((z >= hi) & (g < 0)), 0.0, g).to(tl.float64)
    tl.store(sums_ptr + row * parts + part, tl.sum(tl.where(inside, open_ * open_, 0.0)))


@triton.jit
def tile(offset, channels, pixels, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    """Return the sample of a program, where its units of a layer are in z and, with channels last, here, and which exist."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    p = tl.program_id(2) * PIXELS + tl.arange(0, PIXELS)[None, :]
    return row, offset + c * pixels + p, row * channels * pixels + p * channels + c, (c < channels) & (p < pixels)


@triton.jit
def enter(
    z_ptr, g_ptr, lo_ptr, hi_ptr, size_ptr, push_ptr, down_ptr, up_ptr, here_ptr, ahead_ptr, lead_ptr,
    dim, offset, channels, pixels, lo_stride, hi_stride, farthest,
    LEADS: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Write the scaled gradient and distances to the bounds of a layer, with channels last, and the point to begin from.

    ``lead`` is the extrapolated minus the current point of the last call, in units of the problem; zero without ``LEADS``.
    """
    row, source, place, inside = tile(offset, channels, pixels, CHANNELS, PIXELS)
    z = tl.load(z_ptr + row * dim + source, mask=inside, other=0.0)
    g = tl.load(g_ptr + row * dim + source, mask=inside, other=0.0)
    lo = tl.load(lo_ptr + row * lo_stride + source, mask=inside, other=0.0)
    hi = tl.load(hi_ptr + row * hi_stride + source, mask=inside, other=0.0)
    size = tl.load(size_ptr + row).to(z.dtype)
    # a gradient that is large compared to the residual belongs to a unit on a bound, and is stopped by it
    push = tl.minimum(tl.maximum(g / size, -LARGEST), LARGEST)
    tl.store(push_ptr + place, push.to(push_ptr.dtype.element_ty), mask=inside)
    tl.store(down_ptr + place, tl.maximum((lo - z) / size, -LARGEST).to(tl.float16), mask=inside)
    tl.store(up_ptr + place, tl.minimum((hi - z) / size, LARGEST).to(tl.float16), mask=inside)
    tl.store(here_ptr + place, tl.zeros_like(z).to(here_ptr.dtype.element_ty), mask=inside)
    ahead = tl.zeros_like(z).to(tl.float32)
    if LEADS:
        lead = tl.load(lead_ptr + place, mask=inside, other=0.0) / size.to(tl.float32)
        ahead = tl.minimum(tl.maximum(lead, -farthest), farthest)
    tl.store(ahead_ptr + place, ahead.to(tl.float16), mask=inside)


@triton.jit
def leave(
    z_ptr, lo_ptr, hi_ptr, size_ptr, here_ptr, down_ptr, up_ptr, ahead_ptr, lead_ptr,
    dim, offset, channels, pixels, lo_stride, hi_stride,
    IS_DIRECTION: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Add the correction of a layer; units that reach a bound equal it bit by bit.

    For the next call, write the extrapolated minus the current point in units of the problem, or the direction that ``ahead``
    is.
    """
    row, source, place, inside = tile(offset, channels, pixels, CHANNELS, PIXELS)
    z = tl.load(z_ptr + row * dim + source, mask=inside, other=0.0)
    lo = tl.load(lo_ptr + row * lo_stride + source, mask=inside, other=0.0)
    hi = tl.load(hi_ptr + row * hi_stride + source, mask=inside, other=0.0)
    size = tl.load(size_ptr + row).to(z.dtype)
    here = tl.load(here_ptr + place, mask=inside, other=0.0).to(tl.float32)
    down = tl.load(down_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    new = tl.minimum(tl.maximum(z + here.to(z.dtype) * size, lo), hi)
    new = tl.where((here <= down) & (down > -LARGEST), lo, tl.where((here >= up) & (up < LARGEST), hi, new))
    tl.store(z_ptr + row * dim + source, new, mask=inside)
    lead = tl.load(ahead_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if not IS_DIRECTION:
        lead -= here
    tl.store(lead_ptr + place, lead * size.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["k", "first"])
def relax(
    product_ptr, ahead_ptr, here_ptr, push_ptr, down_ptr, up_ptr, step_ptr, scale_ptr, most_ptr, t_ptr, sums_ptr,
    n, units, identity, k, first, parts, farthest, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Take step k of the accelerated projected gradient on a layer.

    ``ahead`` holds the extrapolated point in half precision, at which the product was computed. ``t_ptr`` and ``sums_ptr`` have
    one row of n entries, and of n times ``parts``, per step: the state of the momentum, and parts of the sum whose sign says
    that the last step went uphill. Momentum then restarts, one step late. The parts of this layer begin at ``first``.
    """
    row, part, j, place, inside = stretch(units, WIDTH)
    # the state of this sample, the same in all programs
    t = tl.load(t_ptr + k * n + row)
    t = tl.where(summed(sums_ptr + (k * n + row) * parts, parts, PARTS) > 0, 1.0, t)
    t_new = 0.5 * (1.0 + tl.sqrt(1.0 + 4.0 * t * t))
    weight = tl.minimum((t - 1.0) / t_new, tl.load(most_ptr))
    if (part == 0) & (first == 0):
        tl.store(t_ptr + (k + 1) * n + row, t_new)
    product = tl.load(product_ptr + place, mask=inside, other=0.0).to(tl.float32)
    ahead = tl.load(ahead_ptr + place, mask=inside, other=0.0).to(tl.float32)
    here = tl.load(here_ptr + place, mask=inside, other=0.0).to(tl.float32)
    push = tl.load(push_ptr + place, mask=inside, other=0.0).to(tl.float32)
    down = tl.load(down_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(step_ptr + j, mask=inside, other=1.0)
    slope = push + identity * ahead + tl.load(scale_ptr) * product
    new = tl.minimum(tl.maximum(ahead - step * slope, down), up)
    move = new - here
    uphill = tl.sum((ahead - new) * move / step)
    tl.store(sums_ptr + ((k + 1) * n + row) * parts + first + part, uphill)
    tl.store(here_ptr + place, new.to(here_ptr.dtype.element_ty), mask=inside)
    following = tl.minimum(tl.maximum(new + weight * move, -farthest), farthest)
    tl.store(ahead_ptr + place, following.to(tl.float16), mask=inside)


@triton.jit(do_not_specialize=["first"])
def aim(
    push_ptr, down_ptr, up_ptr, step_ptr, scale_ptr, lead_ptr, size_ptr, left_ptr, free_ptr, direction_ptr, sums_ptr,
    units, first, parts, farthest, LEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Begin conjugate gradients on a layer: the remaining residual, the free units, the direction, and parts of their size."""
    row, part, j, place, inside = stretch(units, WIDTH)
    down = tl.load(down_ptr + place, mask=inside, other=0.0).to(tl.float32)
    free = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32) > down
    left = tl.where(free, -tl.load(push_ptr + place, mask=inside, other=0.0), 0.0)
    step = tl.load(step_ptr + j, mask=inside, other=0.0)
    if LEADS:
        direction = tl.load(lead_ptr + place, mask=inside, other=0.0) / tl.load(size_ptr + row)
    else:
        direction = left * step * tl.load(scale_ptr)
    tl.store(left_ptr + place, left, mask=inside)
    tl.store(free_ptr + place, free.to(tl.int8), mask=inside)
    tl.store(direction_ptr + place, tl.minimum(tl.maximum(direction, -farthest), farthest).to(tl.float16), mask=inside)
    tl.store(sums_ptr + row * parts + first + part, tl.sum(left * left * step))


@triton.jit(do_not_specialize=["first"])
def curve(
    product_ptr, direction_ptr, left_ptr, scale_ptr, curved_ptr, along_ptr, units, identity, first, parts, WIDTH: tl.constexpr
):
    """Write parts of d^T H d and d^T r of a layer, for a direction d of conjugate gradients and the remaining residual r."""
    row, part, _, place, inside = stretch(units, WIDTH)
    product = tl.load(product_ptr + place, mask=inside, other=0.0).to(tl.float32)
    direction = tl.load(direction_ptr + place, mask=inside, other=0.0).to(tl.float32)
    left = tl.load(left_ptr + place, mask=inside, other=0.0)
    bent = identity * direction + tl.load(scale_ptr) * product
    tl.store(curved_ptr + row * parts + first + part, tl.sum(direction * bent))
    tl.store(along_ptr + row * parts + first + part, tl.sum(direction * left))


@triton.jit(do_not_specialize=["first"])
def descend(
    product_ptr, direction_ptr, left_ptr, here_ptr, free_ptr, step_ptr, scale_ptr, curved_ptr, along_ptr, size_ptr,
    units, identity, first, parts, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Move along the direction to the minimum, with an exact line search; write parts of the new size of the residual."""
    row, part, j, place, inside = stretch(units, WIDTH)
    curved = summed(curved_ptr + row * parts, parts, PARTS)
    step = summed(along_ptr + row * parts, parts, PARTS) / tl.where(curved > 0, curved, 1.0)
    product = tl.load(product_ptr + place, mask=inside, other=0.0).to(tl.float32)
    direction = tl.load(direction_ptr + place, mask=inside, other=0.0).to(tl.float32)
    left = tl.load(left_ptr + place, mask=inside, other=0.0)
    here = tl.load(here_ptr + place, mask=inside, other=0.0)
    free = tl.load(free_ptr + place, mask=inside, other=0)
    bent = identity * direction + tl.load(scale_ptr) * product
    left = tl.where(free != 0, left - step * bent, 0.0)
    weight = tl.load(step_ptr + j, mask=inside, other=0.0)
    tl.store(here_ptr + place, here + step * direction, mask=inside)
    tl.store(left_ptr + place, left, mask=inside)
    tl.store(size_ptr + row * parts + first + part, tl.sum(left * left * weight))


@triton.jit
def turn(
    direction_ptr, left_ptr, step_ptr, scale_ptr, before_ptr, now_ptr,
    units, parts, farthest, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Choose the next direction of a layer."""
    row, _, j, place, inside = stretch(units, WIDTH)
    before = summed(before_ptr + row * parts, parts, PARTS)
    keep = summed(now_ptr + row * parts, parts, PARTS) / tl.where(before > 0, before, 1.0)
    direction = tl.load(direction_ptr + place, mask=inside, other=0.0).to(tl.float32)
    left = tl.load(left_ptr + place, mask=inside, other=0.0)
    weight = tl.load(step_ptr + j, mask=inside, other=0.0) * tl.load(scale_ptr)
    direction = keep * direction + weight * left
    tl.store(direction_ptr + place, tl.minimum(tl.maximum(direction, -farthest), farthest).to(tl.float16), mask=inside)
