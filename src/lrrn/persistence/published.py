"""Published radii: labels, proven radii and nearest attacks of every test image of a shipped model, in a compact file.

Radii are rounded down and distances of attacks up, so that a published figure never claims more than was found.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lrrn.runtime import storage

Array = NDArray[Any]


@final
@dataclass(frozen=True, eq=False)
class Published:
    """Results of a model on all images of a test set.

    Attributes
    ----------
    predicted, true : uint8 array of shape (n,)
        Labels, as class numbers.
    radius : float32 array of shape (n,)
        Proven radii, rounded down: the predicted label does not change for any smaller perturbation.
    attack : float32 array of shape (n,)
        Norms of the nearest perturbations found that change the label, rounded up; ``inf`` where no attack succeeded and
        ``nan`` where none was tried.
    """

    predicted: Array
    true: Array
    radius: Array
    attack: Array

    def __post_init__(self) -> None:
        kinds = {"predicted": np.uint8, "true": np.uint8, "radius": np.float32, "attack": np.float32}
        for name, kind in kinds.items():
            values = getattr(self, name)
            if values.dtype != kind or values.shape != (len(self.radius),):
                raise ValueError(f"{name} is of shape {values.shape} and type {values.dtype}")
        if not (self.radius >= 0).all():
            raise ValueError("a radius is negative or not a number")

    @property
    def right(self) -> Array:
        """Whether labels are correct."""
        return self.predicted == self.true

    def certified(self, eps: float) -> float:
        """Return the certified accuracy at a size of the perturbation; at 0 the accuracy."""
        return float((self.right if eps == 0 else self.right & (self.radius > np.float64(eps))).mean())


def rounded_down(values: Array) -> Array:
    """Return float64 values as float32, none of them larger."""
    near = values.astype(np.float32)
    return np.where(near.astype(np.float64) > values, np.nextafter(near, np.float32(-np.inf)), near)


def rounded_up(values: Array) -> Array:
    """Return float64 values as float32, none of them smaller."""
    return -rounded_down(-values)


def publish(predicted: Array, true: Array, radius: Array, attack: Array) -> Published:
    """Return results in the types of a published file, rounded to the safe side."""
    labels, truth = (np.asarray(each).astype(np.uint8) for each in (predicted, true))
    return Published(labels, truth, rounded_down(np.asarray(radius, np.float64)), rounded_up(np.asarray(attack, np.float64)))


def write_radii(path: str | os.PathLike[str], results: Published) -> None:
    """Write a compressed ``.npz`` file; equal results give equal bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **vars(results))
    storage.write_bytes(path, buffer.getvalue())


def read_radii(path: str | os.PathLike[str]) -> Published:
    """Read a file of :func:`write_radii`; raises FileFormatError if it is damaged."""
    storage.check_readable(path)
    try:
        with np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as file:
            return Published(*(file[name] for name in ("predicted", "true", "radius", "attack")))
    except Exception as error:  # zipfile and zlib have errors of their own
        raise storage.FileFormatError(f"{path} is damaged or not a file of published radii ({error})") from error
