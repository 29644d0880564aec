"""The kernel of :mod:`lrrn.learning.flat_adam`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adam(
    vector_ptr, gradient_ptr, mean_ptr, square_ptr, decay_ptr, rate_ptr, step_ptr, n,
    mean_keeps, mean_takes, mean_log, square_keeps, square_takes, square_log, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take a step of Adam with decoupled weight decay on a block of the parameters.

    ``decay_ptr`` holds the weight decay of every entry, negative for entries that must not change. For each running mean,
    ``keeps`` is its factor beta, ``takes`` is 1 - beta, and ``log`` is the logarithm of beta.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    decay = tl.load(decay_ptr + at, mask=at < n, other=-1.0)
    learns = decay >= 0
    rate = tl.load(rate_ptr)
    # 1 - beta^step, which float32 would compute to four digits only in the first steps
    step = tl.load(step_ptr).to(tl.float64)
    mean_share = (1 - tl.exp(step * mean_log)).to(tl.float32)
    square_share = (1 - tl.exp(step * square_log)).to(tl.float32)
    slope = tl.load(gradient_ptr + at, mask=learns, other=0.0)
    mean = mean_keeps * tl.load(mean_ptr + at, mask=learns, other=0.0) + mean_takes * slope
    square = square_keeps * tl.load(square_ptr + at, mask=learns, other=0.0) + square_takes * slope * slope
    value = tl.load(vector_ptr + at, mask=learns, other=0.0)
    value -= rate * decay * value
    value -= (rate / mean_share) * mean / (tl.sqrt(square) / tl.sqrt(square_share) + eps)
    tl.store(mean_ptr + at, mean, mask=learns)
    tl.store(square_ptr + at, square, mask=learns)
    tl.store(vector_ptr + at, value, mask=learns)
