"""Branch and bound of the record: images whose radius is below a size by little are certified again, up to that size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrrn.certificates.branching import NEAR
from lrrn.studies.record.contenders import BRANCHED, Contender

Array = NDArray[Any]
ABOVE = 1e-9
"""An image is certified at a size if its radius is larger: targets exceed the sizes by this fraction."""


def near(radius: Array, right: Array, size: float) -> Array:
    """Return which images are right, not certified at a size, and below it by so little that branches are tried."""
    return right & (radius <= size) & (radius * NEAR > size)


def raised(
    contender: Contender, X: Array, right: Array, radius: Array, best: Array, sizes: Iterable[float], branches: int
) -> Array:
    """Return radii with branch and bound towards each size, at least those given.

    Parameters
    ----------
    contender : Contender
    X : array of shape (n, n_features)
    right : bool array of shape (n,)
        Whether the label is correct; others are not tried.
    radius : array of shape (n,)
        Radii by the method without branches, which are returned for images that are not tried or not raised.
    best : array of shape (n,)
        Largest radii by any method so far, which decide what is tried.
    sizes : iterable of float
    branches : int
        Largest number of branches of an image and a pair of classes.
    """
    radius, best = radius.copy(), np.maximum(radius, best)
    for size in sizes:
        rows = np.flatnonzero(near(best, right, size))
        if len(rows):
            found = contender.radii(X[rows], BRANCHED, size * (1 + ABOVE), branches)
            radius[rows] = np.maximum(radius[rows], found)
            best[rows] = np.maximum(best[rows], found)
    return radius
