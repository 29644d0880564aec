"""Images that the page offers by number: any data, or the test images of a shipped model with what was published."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lrrn.persistence.published import Published

Array = NDArray[Any]


@final
@dataclass(frozen=True, eq=False)
class Gallery:
    """Images with labels, in the units of the model's features.

    Attributes
    ----------
    name : str
        Data set or file.
    X : array of shape (n, n_features)
    y : array of shape (n,) or None
        Labels, if there are any.
    published : Published or None
        Published results on the same images, in the same order.
    """

    name: str
    X: Array
    y: Array | None = None
    published: Published | None = None

    def __post_init__(self) -> None:
        if self.published is not None and len(self.published.radius) != len(self.X):
            raise ValueError(f"{self.name} has {len(self.X)} images here, and {len(self.published.radius)} were published")

    def described(self) -> dict[str, Any]:
        """Return its name, the number of images, and whether there are published results."""
        return {"name": self.name, "images": len(self.X), "published": self.published is not None}

    def facts(self, index: int) -> dict[str, Any]:
        """Return what was published about an image: predicted class, radius, and the nearest attack if one was found."""
        if self.published is None:
            return {"number": index, "published": None}
        attack = float(self.published.attack[index])
        found = {
            "prediction": int(self.published.predicted[index]),
            "radius": float(self.published.radius[index]),
            "attack": attack if math.isfinite(attack) else None,
        }
        return {"number": index, "published": found}

    def places(self, samples: Array) -> list[int | None]:
        """Return the numbers of some of the images, given as float32; None where an image is not one of them."""
        known: dict[bytes, int] = {}
        for index, image in enumerate(self.X.astype(np.float32, copy=False)):
            known.setdefault(image.tobytes(), index)
        return [known.get(image.tobytes()) for image in samples.astype(np.float32, copy=False)]
