"""Conjugate gradients on the dual of one layer, except their matrix products, in one pass over each sample.

A sample's row stays in the cache for the whole line search. Torch would write a dozen temporary arrays of the size of a batch.
"""

from __future__ import annotations

import math
from typing import Any

from lrrn.kernels.cpu.compiled import summing

TRIALS = 4
"""Largest number of trial steps of a line search."""
EXACT = 0.02
"""Share of the derivative that may remain at the end of a line search."""


@summing
def turn(now: Any, steepest: Any, slope: Any, size: Any, direction: Any) -> None:
    """Set the next direction of every sample, given its gradient ``now`` and the preconditioned one, both of shape (n, k).

    ``slope`` and ``size``, of shape (n, 1), are those of the last gradient, and become those of this one. ``size`` is 0 where
    there is none.
    """
    for i in range(now.shape[0]):
        new, old = now[i, 0] * 0, now[i, 0] * 0
        for j in range(now.shape[1]):
            new += now[i, j] * steepest[i, j]
            old += slope[i, j] * steepest[i, j]
        keep = new * 0
        if size[i, 0] > 0 and new > old:
            keep = (new - old) / size[i, 0]
        along = new * 0
        for j in range(now.shape[1]):
            direction[i, j] = keep * direction[i, j] - steepest[i, j]
            along += direction[i, j] * now[i, j]
            slope[i, j] = now[i, j]
        size[i, 0] = new
        if not along < 0:  # uphill
            for j in range(now.shape[1]):
                direction[i, j] = -steepest[i, j]


@summing
def search(
    along: Any, lo: Any, hi: Any, ratio: Any, linear: bool, slope: Any, direction: Any, y: Any, pull: Any, z: Any
) -> None:
    """Minimise the dual along the direction of every sample; move ``y``, ``pull`` and ``z``.

    ``along`` is W times the direction, of shape (n, dim), and ``ratio`` is b / a. The derivative along the direction is
    increasing and piecewise linear; in linear equations it is linear. Newton steps that leave the interval in which it changes
    its sign are replaced by those of the secant.
    """
    zero = pull.dtype.type(0)
    for i in range(along.shape[0]):
        row = i if lo.shape[0] > 1 else 0
        begin, flat, level = zero, zero, zero
        for j in range(direction.shape[1]):
            begin += slope[i, j] * direction[i, j]
            flat += direction[i, j] * direction[i, j]
            level += y[i, j] * direction[i, j]
        bent = zero
        for j in range(along.shape[1]):
            inside = (pull[i, j] > lo[row, j]) and (pull[i, j] < hi[row, j])
            bent += along[i, j] * along[i, j] if inside else zero
        curvature = flat + ratio * bent
        step = -begin / curvature if curvature > 0 else zero
        low, low_slope, high, high_slope = zero, begin, zero, zero
        for _ in range(0 if linear else TRIALS):
            end, bent = zero, zero
            for j in range(along.shape[1]):
                there = pull[i, j] - ratio * step * along[i, j]
                point = lo[row, j] if there < lo[row, j] else there
                point = hi[row, j] if point > hi[row, j] else point
                end += along[i, j] * point
                bent += along[i, j] * along[i, j] if point == there else zero
            end = level + step * flat - end
            if not math.fabs(end) > -EXACT * begin:
                break
            if end > 0:
                high, high_slope = step, end
            else:
                low, low_slope = step, end
            step -= end / (flat + ratio * bent)
            if not (step > low and (high == 0 or step < high)):
                step = low - low_slope * (high - low) / (high_slope - low_slope)
        for j in range(direction.shape[1]):
            y[i, j] += step * direction[i, j]
        for j in range(along.shape[1]):
            there = pull[i, j] - ratio * step * along[i, j]
            pull[i, j] = there
            point = lo[row, j] if there < lo[row, j] else there  # NaN stays NaN
            z[i, j] = hi[row, j] if point > hi[row, j] else point
