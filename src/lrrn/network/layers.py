"""Architectures: widths, image shapes and convolutions, and the parameters of layers as the energy takes them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from lrrn.linalg.layer_shape import LayerShape

UNFOLDED_UNITS, UNFOLDED_ENTRIES = 512, 2**20
"""Largest numbers of units and of entries of a matrix for which a convolution is computed as a matrix: calls of torch
would cost more than the arithmetic that they save."""

ImageShape = tuple[int, int, int]
Size = int | ImageShape


@final
@dataclass(frozen=True)
class Conv:
    """A hidden layer whose weights are a 2-D convolution with zero padding.

    Parameters
    ----------
    channels : int
        Number of kernels.
    kernel : int
        Height and width of a kernel.
    stride : int, default=1
    padding : int, default=0
        Rows and columns of zeros on every side; smaller than the kernel.
    pool : int, default=1
        Average pooling in front of the next layer, over windows of this side that do not overlap; 1 is none. It is part of the
        next layer's weights, scaled to norm one, so that it costs no certified radius.

    Examples
    --------
    >>> import lrrn
    >>> lrrn.LRRN(sizes=((3, 32, 32), lrrn.Conv(16, kernel=8, stride=4), 10)).sizes
    (3072, 784, 10)
    """

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0
    pool: int = 1

    def __post_init__(self) -> None:
        for name, least in (("channels", 1), ("kernel", 1), ("stride", 1), ("padding", 0), ("pool", 1)):
            given = getattr(self, name)
            if not isinstance(given, numbers.Integral) or isinstance(given, bool) or given < least:
                raise ValueError(f"{name} of a convolution must be an integer of at least {least}; got {given!r}")
            object.__setattr__(self, name, int(given))
        if self.padding >= self.kernel:
            raise ValueError(
                f"padding of a convolution must be smaller than its kernel, or units would see no pixel; got padding "
                f"{self.padding} and kernel {self.kernel}"
            )


Architecture = tuple[int | ImageShape | Conv, ...]


def checked_architecture(sizes: Sequence[int | Sequence[int] | Conv]) -> Architecture:
    """Return the input shape, the layers and the output as integers, tuples and convolutions; raise if they are invalid."""
    given = tuple(sizes)
    if len(given) < 2:
        raise ValueError(f"sizes needs at least an input and an output width, all positive integers; got {given}")
    first, *rest = given
    if isinstance(first, Sequence) and not isinstance(first, str):
        start: Size = checked_image_shape(first)
    else:
        start = _width(first, given)
    return (start, *(size if isinstance(size, Conv) else _width(size, given) for size in rest))


def checked_image_shape(shape: Sequence[int]) -> ImageShape:
    """Return (channels, height, width); raise ValueError if they are invalid."""
    fine = len(shape) == 3 and all(isinstance(d, numbers.Integral) and not isinstance(d, bool) and d > 0 for d in shape)
    if not fine:
        raise ValueError(f"the shape of an image is (channels, height, width), all positive integers; got {tuple(shape)}")
    channels, height, width = (int(d) for d in shape)
    return channels, height, width


def _width(size: object, given: tuple[object, ...]) -> int:
    if not isinstance(size, numbers.Integral) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"sizes needs at least an input and an output width, all positive integers; got {given}. A convolution is "
            "lrrn.Conv(channels, kernel), and the shape of images stands first: (channels, height, width)"
        )
    return int(size)


def layer_shapes(architecture: Architecture) -> tuple[LayerShape, ...]:
    """Return how the weights of every layer act; raise ValueError where a convolution does not fit its input."""
    first, *rest = architecture
    shape: tuple[int, ...] = first if isinstance(first, tuple) else (first,)  # type: ignore[assignment]
    pool, layers = 1, []
    for number, size in enumerate(rest):
        if isinstance(size, Conv):
            layer = _convolution(size, shape, pool, number)
            pool = size.pool
            _check_pool(pool, layer.out_shape, number, number + 1 == len(rest))
        else:
            columns = math.prod(_pooled(shape, pool))
            layer, pool = LayerShape(shape if pool > 1 else (columns,), (size,), (size, columns), pool=pool), 1  # type: ignore[arg-type]
        layers.append(layer)
        shape = layer.out_shape
    return tuple(layers)


def _pooled(shape: tuple[int, ...], pool: int) -> tuple[int, ...]:
    return (shape[0], *(side // pool for side in shape[1:]))


def _convolution(conv: Conv, shape: tuple[int, ...], pool: int, number: int) -> LayerShape:
    if len(shape) != 3:
        raise ValueError(
            f"layer {number} is a convolution and its input is a vector of {shape[0]} numbers, not images: put convolutions "
            "before dense layers, and give the shape of the images, (channels, height, width)"
        )
    channels, *sides = _pooled(shape, pool)
    out = [(side + 2 * conv.padding - conv.kernel) // conv.stride + 1 for side in sides]
    if any(side + 2 * conv.padding < conv.kernel for side in sides):
        raise ValueError(
            f"layer {number}: a kernel of {conv.kernel} x {conv.kernel} is larger than its images of {sides[0]} x {sides[1]} "
            f"with padding {conv.padding}; take a smaller kernel, more padding or less pooling"
        )
    weight = (conv.channels, channels, conv.kernel, conv.kernel)
    return LayerShape(shape, (conv.channels, *out), weight, conv.stride, conv.padding, pool)


def _check_pool(pool: int, shape: tuple[int, ...], number: int, last: bool) -> None:
    if pool > 1 and last:
        raise ValueError(f"layer {number}: pooling acts in front of the next layer, and there is none; use pool=1")
    if pool > min(shape[1:]):
        raise ValueError(f"layer {number}: windows of {pool} x {pool} do not fit into maps of {shape[1]} x {shape[2]}")


def unfolds(layers: Sequence[LayerShape]) -> bool:
    """Whether the operators are small enough to be computed as matrices, and these are exactly what the parameters say.

    Pooling divides weights by the side of a window. Where that rounds, the matrix is that of another network.
    """
    return sum(layer.rows for layer in layers) <= UNFOLDED_UNITS and all(
        layer.rows * layer.columns <= UNFOLDED_ENTRIES and layer.pool & (layer.pool - 1) == 0 for layer in layers
    )


def per_unit(layer: LayerShape, b: Tensor | None, c: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the biases of a layer with one entry per unit, repeated over the pixels of a channel."""
    if not layer.convolves:
        return b, c
    return _repeated(b, layer.rows), _repeated(c, layer.columns)


def _repeated(bias: Tensor | None, units: int) -> Tensor | None:
    return None if bias is None else bias[:, None].expand(-1, units // len(bias)).reshape(-1)
