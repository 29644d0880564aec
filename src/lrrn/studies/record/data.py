"""Data sets of the record: their names in tables, and the perturbation sizes of their certified accuracy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrrn.datasets import cifar
from lrrn.studies.common.runs import DATA

NAMES = {**DATA, cifar.NAME: "CIFAR-10"}
"""Data sets and their names in tables."""
_GREY = {f"{eps:g}": eps for eps in (0.1, 0.3, 0.5, 1.0, 1.58)}
_COLOUR = {f"{levels}/255": levels / 255 for levels in (36, 72, 108)}


def sizes_of(data: str) -> dict[str, float]:
    """Return the perturbation sizes of a data set, by their names in tables: those that others publish for it."""
    return dict(_COLOUR if data == cifar.NAME else _GREY)


def compared_at(data: str) -> tuple[str, ...]:
    """Return the sizes at which our networks are compared with the baselines."""
    return tuple(_COLOUR) if data == cifar.NAME else ("0.5", "1", "1.58")


def curve_of(data: str) -> NDArray[Any]:
    """Return the sizes of the points of a curve."""
    return np.arange(0, 61) / (60 if data == cifar.NAME else 20)
