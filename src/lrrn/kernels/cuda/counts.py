"""The kernel of :class:`lrrn.learning.cuda_graph.DeviceCounts`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count(residual_ptr, scale_ptr, spent_ptr, status_ptr, table_ptr, n, limit, BLOCK: tl.constexpr):
    """Add to the table: samples, sweeps, samples that missed the tolerance, and those with a relative residual above a limit.

    There is one program, so that the sums need no atomics.
    """
    spent = tl.zeros((BLOCK,), dtype=tl.int64)
    missed = tl.zeros((BLOCK,), dtype=tl.int64)
    short = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        spent += tl.load(spent_ptr + at, mask=inside, other=0)
        missed += tl.where(tl.load(status_ptr + at, mask=inside, other=0) != 0, 1, 0).to(tl.int64)
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
        # not above, so that NaN counts
        fine = residual <= limit * tl.load(scale_ptr + at, mask=inside, other=1.0)
        short += tl.where(fine, 0, 1).to(tl.int64)
    tl.store(table_ptr, tl.load(table_ptr) + n)
    tl.store(table_ptr + 1, tl.load(table_ptr + 1) + tl.sum(spent))
    tl.store(table_ptr + 2, tl.load(table_ptr + 2) + tl.sum(missed))
    tl.store(table_ptr + 3, tl.load(table_ptr + 3) + tl.sum(short))
