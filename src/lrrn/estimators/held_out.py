"""Rows that early stopping holds out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def split_off_validation(
    n: int, fraction: float, seed: int, strata: Array | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split row indices into training and validation sets, stratified by class where there are enough of each.

    Where there are not, rows are held out at random, but at least one of every class remains for training.
    """
    from sklearn.model_selection import train_test_split

    fraction, rows = float(fraction), np.arange(n)
    _, group, left = np.unique(np.zeros(n) if strata is None else strata, return_inverse=True, return_counts=True)
    if n == 0 or left.max() < 2:
        each = "" if strata is None else " of one class"
        raise ValueError(
            f"early_stopping holds out some samples, so it needs at least two{each}; got {n} in all. Set early_stopping=False"
        )
    if strata is None or (left.min() >= 2 and min(fraction, 1 - fraction) * n >= len(left)):
        train, held = train_test_split(rows, test_size=fraction, random_state=seed, stratify=strata)
        return train, held
    aside: list[int] = []
    for row in np.random.default_rng(seed).permutation(n):
        if len(aside) < max(1, round(fraction * n)) and left[group[row]] > 1:
            left[group[row]] -= 1
            aside.append(row)
    held = np.sort(aside)
    return np.setdiff1d(rows, held), held
