"""Targets of a table, checked from its first row, before any work is done: a regressor needs numbers."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrrn.datasets.rows import DataError, Rows


def check_quantities(rows: Rows, n_targets: int | None = None) -> None:
    """Raise DataError if a table has targets that a regressor cannot predict, or another number of them than it does.

    Parameters
    ----------
    rows : Rows
        With or without targets. Its first row is read.
    n_targets : int, optional
        Number of targets that a fitted regressor predicts; any if not given.
    """
    _, first = next(rows.pieces(0, 1, 1))
    if first is None:
        return
    if not _are_numbers(first):
        example = first.ravel()[:1].tolist()
        raise DataError(
            f"{rows.name}: the targets are such as {example[0] if example else None!r}, and a regressor needs numbers; choose "
            "another target, or train a classifier"
        )
    if n_targets is not None and first.size != n_targets:
        shape = ", ".join(map(str, (rows.n_samples, *first.shape[1:])))
        raise DataError(
            f"{rows.name}: targets have shape ({shape}{',' * (first.ndim == 1)}), and the regressor predicts {n_targets} for "
            f"each of {rows.n_samples} samples; keep the targets that it was trained on, in their order"
        )


def _are_numbers(values: NDArray[Any]) -> bool:
    if values.dtype.kind == "O":
        return all(isinstance(value, Real) for value in values.ravel())
    return np.dtype(values.dtype).kind in "biuf"
