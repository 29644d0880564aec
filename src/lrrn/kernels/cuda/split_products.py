"""The kernels of :mod:`lrrn.linalg.split_products`."""

from __future__ import annotations

import triton
import triton.language as tl

from lrrn.kernels.cuda.in_rows import size_of, this_row


@triton.jit
def halves(w_ptr, high_ptr, low_ptr, n, low, BLOCK: tl.constexpr):
    """Write a block of numbers in half precision, and what that leaves out, times ``low``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + at, mask=at < n, other=0.0)
    high = w.to(tl.float16)
    tl.store(high_ptr + at, high, mask=at < n)
    tl.store(low_ptr + at, ((w - high.to(tl.float32)) * low).to(tl.float16), mask=at < n)


@triton.jit
def symmetric_sum(whole_ptr, mixed_ptr, out_ptr, n, low, shift, scale, TILE: tl.constexpr):
    """Write a square tile of shift I + scale G: G is the mean of P and P^T, plus Q + Q^T over ``low``."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    inside = (i < n) & (j < n)
    here, there = i * n + j, j * n + i
    whole = 0.5 * (tl.load(whole_ptr + here, mask=inside, other=0.0) + tl.load(whole_ptr + there, mask=inside, other=0.0))
    mixed = tl.load(mixed_ptr + here, mask=inside, other=0.0) + tl.load(mixed_ptr + there, mask=inside, other=0.0)
    tl.store(out_ptr + here, tl.where(i == j, shift, 0.0) + scale * (whole + mixed / low), mask=inside)


@triton.jit(do_not_specialize=["n", "dim"])
def split_rows(z_ptr, unit_ptr, parts_ptr, size_ptr, n, dim, low, SCALED: tl.constexpr, WIDTH: tl.constexpr):
    """Write one sample, of size one, in half precision, and n rows further what that leaves out, times ``low``."""
    row, units, inside, place = this_row(dim, WIDTH)
    y = tl.load(z_ptr + place, mask=inside, other=0.0)
    if SCALED:
        y = y / tl.load(unit_ptr + units, mask=inside, other=1.0)
    size = size_of(y)
    y = y / size
    high = y.to(tl.float16)
    tl.store(parts_ptr + place, high, mask=inside)
    tl.store(parts_ptr + n.to(tl.int64) * dim + place, ((y - high.to(tl.float32)) * low).to(tl.float16), mask=inside)
    tl.store(size_ptr + row, size)


@triton.jit(do_not_specialize=["n", "dim"])
def join(both_ptr, rest_ptr, size_ptr, added_ptr, out_ptr, n, dim, low, alpha, ADDS: tl.constexpr, WIDTH: tl.constexpr):
    """Add up the products of one sample, of both its parts and of its first part, and undo its scale."""
    row, units, inside, place = this_row(dim, WIDTH)
    rest = tl.load(both_ptr + n.to(tl.int64) * dim + place, mask=inside, other=0.0)
    rest += tl.load(rest_ptr + place, mask=inside, other=0.0)
    out = (tl.load(both_ptr + place, mask=inside, other=0.0) + rest / low) * (tl.load(size_ptr + row) * alpha)
    if ADDS:
        out += tl.load(added_ptr + units, mask=inside, other=0.0)
    tl.store(out_ptr + place, out, mask=inside)
