"""The kernel of :mod:`lrrn.learning.clock`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tick(order_ptr, rates_ptr, now_ptr, rows_ptr, rate_ptr, moment_ptr, batch, BLOCK: tl.constexpr):
    """Write the rows, the learning rate and the index of the current step, and advance to the next step.

    ``now_ptr`` holds two step counters, of the epoch and of the whole training. There is one program with one warp, so that no
    thread reads them after they have changed.
    """
    at = tl.load(now_ptr)
    moment = tl.load(now_ptr + 1)
    for start in range(0, batch, BLOCK):
        places = start + tl.arange(0, BLOCK)
        rows = tl.load(order_ptr + at * batch + places, mask=places < batch, other=0)
        tl.store(rows_ptr + places, rows, mask=places < batch)
    tl.store(rate_ptr, tl.load(rates_ptr + at))
    tl.store(moment_ptr, moment)
    tl.store(now_ptr, at + 1)
    tl.store(now_ptr + 1, moment + 1)
