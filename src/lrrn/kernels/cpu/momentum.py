"""A step of projected gradient with momentum, except its matrix product, in one pass over each sample.

A dozen torch operations on OpenMP threads would synchronise the threads a dozen times. If other processes are busy, that takes
longer than the arithmetic.
"""

from __future__ import annotations

import math
from typing import Any

from lrrn.kernels.cpu.compiled import summing


@summing
def momentum_step(product: Any, q: Any, lo: Any, hi: Any, step: Any, diagonal: Any, here: Any, ahead: Any, t: Any) -> None:
    """Advance ``here`` and ``ahead``, of shape (n, dim), and ``t``, of shape (n,), by one step, given H ahead as ``product``.

    Momentum restarts where it points uphill.
    """
    one = q.dtype.type(1)
    for i in range(q.shape[0]):
        along = one * 0
        for j in range(q.shape[1]):
            new = ahead[i, j] - step[j] * (product[i, j] - q[i, j])
            # NaN stays NaN
            new = lo[i, j] if new < lo[i, j] else new
            new = hi[i, j] if new > hi[i, j] else new
            along += (ahead[i, j] - new) * (new - here[i, j]) * diagonal[j]
            product[i, j] = new
        following, weight = one, one * 0
        if not along > 0:
            following = (one + math.sqrt(one + 4 * t[i] * t[i])) / 2
            weight = (t[i] - one) / following
        t[i] = following
        for j in range(q.shape[1]):
            new = product[i, j]
            ahead[i, j] = new + weight * (new - here[i, j])
            here[i, j] = new
