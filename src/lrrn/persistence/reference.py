"""Reference data in a model file: held-out samples, and the model's accuracy, certified radii and energies on them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lrrn.persistence.values import plain

Array = NDArray[Any]
PREFIX = "reference."
"""Prefix of the names of a reference's tensors, which separates them from those of the network."""
UNKNOWN = -1

ImageShape = tuple[int, ...]
"""Height and width of grey images; 3, height and width of colour images, whose features go channel by channel."""


def picture_shape(shape: Sequence[int]) -> ImageShape:
    """Return the shape of images that can be shown, (height, width) or (3, height, width); one channel is left out.

    Raise ValueError for anything else: images are shown in grey or in red, green and blue.
    """
    sides = tuple(shape)
    if not all(isinstance(side, numbers.Integral) and not isinstance(side, bool) and side > 0 for side in sides):
        raise ValueError(f"the shape of an image is positive integers; got {sides}")
    if len(sides) == 3 and sides[0] == 1:
        sides = sides[1:]
    if len(sides) != 2 and not (len(sides) == 3 and sides[0] == 3):
        raise ValueError(
            f"images of shape {sides} cannot be shown: it should be (height, width), or (channels, height, width) with 1 or 3 "
            "channels"
        )
    return tuple(int(side) for side in sides)


@final
@dataclass(frozen=True, eq=False)
class Reference:
    """Held-out samples and a fitted model's results on them. New inputs are compared with these.

    Attributes
    ----------
    source : str
        Origin of the samples.
    image_shape : tuple of int, or None
        Height and width, if samples are grey images; 3, height and width, if they are colour images.
    low, high : float
        Smallest and largest feature.
    score : float or None
        Accuracy of a classifier.
    radii : float64 array of shape (n,) or None
        Certified radii of a classifier's labels, in the units of the samples; 0 where the label is wrong.
    energies : dict of str to float64 arrays
        Energies of the held-out samples, under the key "samples", and of out-of-distribution inputs, by name.
    samples : float32 array of shape (m, n_features)
        Some of the samples; empty if they must not be published.
    labels : int64 array of shape (m,)
        Their class indices, -1 where unknown.
    """

    source: str
    image_shape: ImageShape | None
    low: float
    high: float
    score: float | None
    radii: Array | None
    energies: Mapping[str, Array]
    samples: Array
    labels: Array

    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the JSON header to write to a file."""
        arrays = {"samples": self.samples, "labels": self.labels}
        if self.radii is not None:
            arrays["radii"] = self.radii
        arrays |= {f"energies.{k}": values for k, values in enumerate(self.energies.values())}
        header = {
            "source": self.source,
            "image_shape": None if self.image_shape is None else plain(list(self.image_shape)),
            "range": plain([self.low, self.high]),
            "score": plain(self.score),
            "energies": list(self.energies),
        }
        return {PREFIX + name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}, header

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], header: dict[str, Any], n_features: int, n_classes: int) -> Reference:
        """Undo :meth:`pack` for a model with these numbers of features and classes.

        Raise ValueError or KeyError if the contents do not match the model.
        """
        arrays = {name.removeprefix(PREFIX): tensor.numpy() for name, tensor in tensors.items() if name.startswith(PREFIX)}
        low, high = (float(end) for end in header["range"])
        shape = header["image_shape"]
        shape = None if shape is None else picture_shape(shape)
        samples, labels, radii = arrays["samples"], arrays["labels"], arrays.get("radii")
        energies = {str(name): arrays[f"energies.{k}"] for k, name in enumerate(header["energies"])}
        if samples.ndim != 2 or samples.shape[1] != n_features or labels.shape != (len(samples),):
            raise ValueError(
                f"samples of shape {samples.shape} with labels of shape {labels.shape}, not of {n_features} features"
            )
        if labels.dtype != np.int64 or (len(labels) and not UNKNOWN <= labels.min() <= labels.max() < n_classes):
            raise ValueError(f"labels of its samples are not numbers of {n_classes} classes")
        if shape is not None and math.prod(shape) != n_features:
            raise ValueError(f"images of shape {shape} for {n_features} features")
        numbers = [samples, *energies.values(), *([] if radii is None else [radii])]
        if not low < high or any(array.dtype.kind != "f" or not np.isfinite(array).all() for array in numbers):
            raise ValueError("numbers of its reference are not finite, or of an empty range")
        if "samples" not in energies or any(values.ndim != 1 or len(values) == 0 for values in energies.values()):
            raise ValueError("energies of its reference are missing")
        score = header["score"]
        return cls(
            str(header["source"]), shape, low, high, None if score is None else float(score), radii, energies, samples, labels
        )
