"""The kernel of :mod:`lrrn.energy.adjoint`."""

from __future__ import annotations

import triton
import triton.language as tl

from lrrn.kernels.cuda.in_rows import size_of, this_row


@triton.jit(do_not_specialize=["dim"])
def open_units(z_ptr, v_ptr, lo_ptr, hi_ptr, unit_ptr, down_ptr, up_ptr, size_ptr, dim, WIDTH: tl.constexpr):
    """Write the direction of one sample's v and its length, and bounds: infinite where z is between its own, zero elsewhere."""
    row, units, inside, place = this_row(dim, WIDTH)
    z = tl.load(z_ptr + place, mask=inside, other=0.0)
    v = tl.load(v_ptr + place, mask=inside, other=0.0)
    held = (z <= tl.load(lo_ptr + units, mask=inside, other=0.0)) | (z >= tl.load(hi_ptr + units, mask=inside, other=0.0))
    reach = tl.where(held, 0.0, float("inf"))
    # squares of small numbers underflow, those of large ones overflow
    most = size_of(v)
    scaled = (v / most).to(tl.float64)
    size = (most * tl.sqrt(tl.sum(scaled * scaled))).to(v.dtype)
    tl.store(unit_ptr + place, v / tl.where(size > 0, size, 1.0), mask=inside)
    tl.store(down_ptr + place, -reach, mask=inside)
    tl.store(up_ptr + place, reach, mask=inside)
    tl.store(size_ptr + row, size)
