"""Images: the shape in which a model's inputs are shown, mirrored images, and the filters of a network as images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from lrrn.estimators.affine import AffineMap
from lrrn.network import LRRN
from lrrn.persistence.reference import ImageShape, picture_shape
from lrrn.reports.page import Page
from lrrn.reports.pipelines import PipelineModel

Array = NDArray[Any]
MOST_FIELDS = 256
"""Largest number of receptive fields shown on a page per layer."""
CAPTIONS = {
    "rows": "Rows of the first weight matrix",
    "kernels": "Kernels of the first layer",
    "fields": "Receptive fields of the channels of layer {}",
}
"""What filters are, by kind."""
WITH_MATRICES = ("multiplier", "local")
"""Methods of certificates that need a matrix of the size of all hidden units."""


def image_shape_of(model: Any, given: Sequence[int] | None = None) -> ImageShape | None:
    """Return the shape in which inputs of a model are shown: the one given, or its own; None if there is neither.

    Raise ValueError if the shape given does not fit the features, or is not the model's own.
    """
    own = own_images(model)
    if given is None:
        return None if own is None or own[0] not in (1, 3) else picture_shape(own)
    shape, n = picture_shape(given), model.n_features_in_
    if math.prod(shape) != n:
        raise ValueError(f"images of {' x '.join(map(str, shape))} do not fit {n} features")
    if own is not None and own != (1, *shape)[-3:]:
        raise ValueError(
            f"images of {' x '.join(map(str, shape))} were asked for, and this model takes images of "
            f"{' x '.join(map(str, own))} (channels, height, width); leave the shape out"
        )
    return shape


def own_images(model: Any) -> tuple[int, int, int] | None:
    """Return channels, height and width of the images that a model was built for; None if it takes plain features."""
    net: LRRN = model.network_
    return net.image_shape if _keeps_pixels(model) else None


def _keeps_pixels(model: Any) -> bool:
    """Whether features of a model are inputs of its network, each on its own: not so after, say, a PCA in a Pipeline."""
    return not isinstance(model, PipelineModel) or all(AffineMap.of(step).diagonal for _, step in model.steps)


def mirrored(X: Array, shape: ImageShape) -> Array:
    """Return flattened images with left and right exchanged, channel by channel."""
    return X.reshape(len(X), *shape)[..., ::-1].reshape(X.shape)


@final
@dataclass(frozen=True, eq=False)
class Filters:
    """Filters of the units of a layer, or of the channels of a convolution.

    Attributes
    ----------
    kind : {"rows", "kernels", "fields"}
        Rows of the product of a layer's weights and all weights below; kernels of the first layer; or receptive fields: such
        rows of the unit in the middle of every channel, cropped to the pixels that they depend on.
    n : int
        Number of units, or of channels.
    images : array of shape (m, height, width) or (m, 3, height, width)
        Filters of the first m of them.
    """

    kind: str
    n: int
    images: Array


@torch.no_grad()
def filters_of(net: LRRN, shape: ImageShape, layer: int, most: int | None = None) -> Filters:
    """Return at most ``most`` filters of a layer: the linear responses of its units to the image, ignoring constraints.

    Only products with the operators of the layers are taken, so that no matrix of the size of a convolution is built.
    """
    geometry = net.layers[layer]
    n = geometry.out_shape[0]
    shown = n if most is None else min(n, most)
    if layer == 0:
        kernels = net.W[0].detach()[:shown].cpu().numpy()
        if geometry.convolves:
            return Filters("kernels", n, kernels[:, 0] if len(shape) == 2 else kernels)
        return Filters("rows", n, kernels.reshape(-1, *shape))
    energy = net.energy_snapshot(torch.float64)
    response = energy.weights[0].new_zeros((shown, geometry.rows))
    _, *sides = geometry.out_shape
    middle = sides[0] // 2 * sides[1] + sides[1] // 2 if sides else 0
    units = torch.arange(shown, device=response.device)
    response[units, units * math.prod(sides) + middle] = 1.0
    for operator in reversed(energy.operators[: layer + 1]):
        response = operator.adjoint(response)
    images = response.cpu().numpy().reshape(-1, *shape)
    return Filters("fields", n, _cropped(images)) if geometry.convolves else Filters("rows", n, images)


def _cropped(images: Array) -> Array:
    """Return the smallest common window outside of which all images are zero; all of it if there is none."""
    used = (images != 0).reshape(-1, *images.shape[-2:]).any(axis=0)
    rows, columns = np.flatnonzero(used.any(axis=1)), np.flatnonzero(used.any(axis=0))
    if len(rows) == 0:
        return images
    return images[..., rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def show_filters(page: Page, models: Mapping[str, Any], image_shape: Sequence[int] | None) -> None:
    """Add the filters of first layers, and of all convolutions, to a page, for models by name whose inputs are images."""
    shapes = {name: image_shape_of(model, image_shape) if _keeps_pixels(model) else None for name, model in models.items()}
    if any(shape is not None for shape in shapes.values()):
        page.heading("First-layer filters" if all(model.network_.is_dense for model in models.values()) else "Filters")
    for name, model in models.items():
        shape = shapes[name]
        for number, layer in enumerate(model.network_.layers):
            if shape is not None and (number == 0 or layer.convolves):
                found = filters_of(model.network_, shape, number, MOST_FIELDS if number else None)
                zoom = 4 if found.kind == "rows" else max(4, 32 // found.images.shape[-1])
                page.images(f"{CAPTIONS[found.kind].format(number + 1)}: {name}", found.images, zoom=zoom)


def obstacle_of(net: LRRN, method: str) -> str | None:
    """Return why certificates by a method are out of reach for a large network with convolutions; None if they are not."""
    energy = net.energy_snapshot(torch.float64)
    if method not in WITH_MATRICES or energy.has_matrices:
        return None
    return (
        f"method {method!r} needs a matrix of the size of all hidden units, and this network with convolutions has "
        f"{sum(energy.free_sizes):,}; use 'auto' or 'spectral', which need none"
    )
