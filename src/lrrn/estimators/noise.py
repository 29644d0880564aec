"""How noisy labels are, and the weight decay for it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SAMPLE = 2000
"""The most rows among which nearest neighbours are searched."""
STRENGTH = 900.0
"""Decoupled weight decay for labels of which the features say nothing, times the number of rows."""
FEWEST = 200
"""Number of rows below which the decay does not increase further."""
LEAST = 0.01
"""Decay below which none is used."""
BLOCK = 256
"""Rows whose distances from all others are in memory at a time."""


def sample(rows: Array) -> Array:
    """Return at most ``SAMPLE`` of these rows, the same ones in every run."""
    if len(rows) <= SAMPLE:
        return rows
    return np.sort(np.random.default_rng(0).permutation(rows)[:SAMPLE])


def label_noise(x: Array, label: Array) -> float:
    """Return the error of the nearest neighbour's label over that of the most frequent label, at most 1.

    With many rows, the error of the nearest neighbour is between the least possible one and twice that (Cover and Hart, 1967).
    So the ratio is near zero if the features determine the label, and near one if they say nothing about it.

    Parameters
    ----------
    x : array of shape (rows, features)
    label : array of shape (rows,)
        Numbers of classes.
    """
    rest = len(label) - int(np.bincount(label).max())
    if rest == 0:
        return 0.0
    square, wrong = np.square(x).sum(axis=1), 0
    for start in range(0, len(x), BLOCK):
        block = np.arange(start, min(start + BLOCK, len(x)))
        distance = square - 2 * x[block] @ x.T  # squared, less the square of the row itself
        distance[np.arange(len(block)), block] = np.inf
        wrong += int((label[distance.argmin(axis=1)] != label[block]).sum())
    return min(wrong / rest, 1.0)


def decay(noise: float, rows: int) -> float:
    """Return the decoupled weight decay for labels this noisy.

    Every step decays the weights, and an epoch has the more steps the more rows there are. A decay proportional to 1 / rows
    therefore has the same effect per epoch.
    """
    found = STRENGTH * noise**2 / max(rows, FEWEST)
    return found if found >= LEAST else 0.0
