"""Images as input of the estimators: shapes, hidden layers that are convolutions, and whether they fit together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lrrn.network import Conv
from lrrn.network.layers import checked_image_shape, layer_shapes

Shape = tuple[int, int, int]


def as_table(X: Any, image_shape: Shape | None) -> Any:
    """Return images, of shape (n, channels, height, width), as rows of a table; other input stays as it is."""
    shape: tuple[int, ...] = tuple(getattr(X, "shape", ()))
    if len(shape) != 4:
        return X
    if image_shape is None:
        raise ValueError(
            f"X has shape {shape}; for images, give the estimator image_shape={shape[1:]}, or flatten them by "
            "X.reshape(len(X), -1)"
        )
    if shape[1:] != tuple(image_shape):
        raise ValueError(f"X has images of shape {shape[1:]}, and image_shape is {tuple(image_shape)}")
    return np.asarray(X).reshape(shape[0], -1)


def checked_widths(given: Any) -> tuple[int | Conv, ...]:
    """Return hidden layers as a tuple of widths and convolutions; raise ValueError if they are invalid."""
    widths = tuple(given) if np.iterable(given) else (given,)
    if not all(isinstance(width, Conv) or (isinstance(width, int | np.integer) and width > 0) for width in widths):
        raise ValueError(f"hidden_sizes must be positive integers or lrrn.Conv(channels, kernel); got {given!r}")
    return widths


def check_images(widths: tuple[int | Conv, ...], image_shape: Shape | None, n_features: int) -> None:
    """Raise ValueError if convolutions, images and features do not fit together."""
    if image_shape is None:
        if any(isinstance(width, Conv) for width in widths):
            raise ValueError("convolutions in hidden_sizes need image_shape=(channels, height, width)")
        return
    shape = checked_image_shape(image_shape)
    if math.prod(shape) != n_features:
        raise ValueError(f"image_shape={shape} has {math.prod(shape)} pixels, and X has {n_features} features")
    layer_shapes((shape, *widths, 1))
