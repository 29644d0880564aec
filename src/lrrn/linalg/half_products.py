"""Products with the Hessian of a network with convolutions in half precision, for solvers on a GPU.

The layers of unknowns are stored apart, images with their channels last, as tensor cores want them. A convolution of stride s
is one of stride 1 after every block of s x s pixels has become channels of one pixel, which is an isometry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor
from torch.nn import functional

from lrrn.linalg.operator_hessian import OperatorHessian
from lrrn.linalg.operators import Conv2d, Dense, Operator, Pooled


class HalfOperator(Protocol):
    """An operator in half precision, on images of shape (n, height, width, channels) or on vectors."""

    def apply(self, x: Tensor) -> Tensor:
        """Return A x."""
        ...

    def adjoint(self, y: Tensor) -> Tensor:
        """Return A^T y."""
        ...

    def there_and_back(self, y: Tensor) -> Tensor:
        """Return A A^T y."""
        ...


@final
class _HalfConv:
    """A convolution, with its stride turned into channels."""

    def __init__(self, operator: Conv2d, factor: Tensor) -> None:
        channels, inputs, kernel, _ = operator.weight.shape
        stride = self._stride = operator.stride
        reach = -(-kernel // stride)
        padded = functional.pad(operator.weight.detach() * factor, [0, reach * stride - kernel] * 2)
        blocks = padded.view(channels, inputs, reach, stride, reach, stride).permute(0, 3, 5, 1, 2, 4)
        weight = blocks.reshape(channels, stride * stride * inputs, reach, reach)
        self._weight = weight.to(torch.float16, memory_format=torch.channels_last)
        self._padding, (_, *sides) = operator.padding, operator.in_shape
        # of the input in blocks, and how many rows and columns there are beyond the last one of the image
        self._blocks = [along + reach - 1 for along in operator.out_shape[1:]]
        self._beyond = [blocks * stride - self._padding - side for blocks, side in zip(self._blocks, sides, strict=True)]

    def _lowered(self, x: Tensor) -> Tensor:
        """Return images with every block of pixels as the channels of one, in torch's order of dimensions."""
        (down, right), before, stride = self._beyond, self._padding, self._stride
        padded = functional.pad(x, (0, 0, before, right, before, down)) if before or down or right else x
        n, (height, width), channels = len(x), self._blocks, x.shape[3]
        blocks = padded.reshape(n, height, stride, width, stride, channels).transpose(2, 3)
        return blocks.reshape(n, height, width, -1).permute(0, 3, 1, 2)

    def _raised(self, lowered: Tensor) -> Tensor:
        """Return the images whose blocks of pixels are given."""
        (down, right), before, stride = self._beyond, self._padding, self._stride
        n, (height, width) = len(lowered), self._blocks
        blocks = lowered.permute(0, 2, 3, 1).reshape(n, height, width, stride, stride, -1).transpose(2, 3)
        images = blocks.reshape(n, height * stride, width * stride, -1)
        return functional.pad(images, (0, 0, -before, -right, -before, -down)) if before or down or right else images

    def _transposed(self, y: Tensor) -> Tensor:
        return functional.conv_transpose2d(y.permute(0, 3, 1, 2), self._weight)

    def _convolved(self, lowered: Tensor) -> Tensor:
        return functional.conv2d(lowered, self._weight).permute(0, 2, 3, 1)

    def apply(self, x: Tensor) -> Tensor:
        return self._convolved(self._lowered(x))

    def adjoint(self, y: Tensor) -> Tensor:
        return self._raised(self._transposed(y))

    def there_and_back(self, y: Tensor) -> Tensor:
        lowered = self._transposed(y)
        # what is in the padding is not part of the image
        return self._convolved(self._lowered(self._raised(lowered)) if self._padding else lowered)


@final
@dataclass(frozen=True)
class _HalfDense:
    """A matrix; its columns stand in the order of the images below, if there are any."""

    weight: Tensor
    below: tuple[int, ...]

    def apply(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.mT

    def adjoint(self, y: Tensor) -> Tensor:
        return (y @ self.weight).view(len(y), *self.below)

    def there_and_back(self, y: Tensor) -> Tensor:
        return (y @ self.weight) @ self.weight.mT


@final
@dataclass(frozen=True)
class _HalfPooled:
    """An operator after average pooling."""

    inner: HalfOperator
    pool: int
    sides: tuple[int, int]

    def apply(self, x: Tensor) -> Tensor:
        height, width = (side // self.pool for side in self.sides)
        kept = x[:, : height * self.pool, : width * self.pool]
        windows = kept.reshape(len(x), height, self.pool, width, self.pool, -1)
        return self.inner.apply((windows.sum((2, 4), dtype=torch.float32) / self.pool).to(x.dtype))

    def adjoint(self, y: Tensor) -> Tensor:
        small = self.inner.adjoint(y) / self.pool
        n, height, width, channels = small.shape
        large = small[:, :, None, :, None].expand(-1, -1, self.pool, -1, self.pool, -1)
        down, right = self.sides[0] - height * self.pool, self.sides[1] - width * self.pool
        return functional.pad(large.reshape(n, height * self.pool, width * self.pool, channels), (0, 0, 0, right, 0, down))

    def there_and_back(self, y: Tensor) -> Tensor:
        return self.inner.there_and_back(y)  # the pooling P has P P^T = I


def image_of(operator: Operator) -> tuple[int, int, int] | None:
    """Return channels, height and width of an operator's output, if it is an image."""
    inner = operator.inner if isinstance(operator, Pooled) else operator
    return inner.out_shape if isinstance(inner, Conv2d) else None


def _last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[1:], shape[0])


def _halved(operator: Operator, below: tuple[int, ...], factor: Tensor) -> HalfOperator:
    if isinstance(operator, Pooled):
        channels, *sides = operator.in_shape
        pooled = (channels, *(side // operator.pool for side in sides))
        return _HalfPooled(_halved(operator.inner, pooled, factor), operator.pool, (sides[0], sides[1]))
    if isinstance(operator, Conv2d):
        return _HalfConv(operator, factor)
    assert isinstance(operator, Dense)
    weight = operator.weight.detach() * factor
    if len(below) == 3:
        weight = weight.view(-1, *below).permute(0, 2, 3, 1).flatten(1)
    return _HalfDense(weight.half(), _last(below))


@final
class HalfHessian:
    """Products with (H - D) / s in half precision, D the multiple of the identity in every layer's block, s a scale.

    Parameters
    ----------
    hessian : OperatorHessian
    scale : Tensor of shape ()
        s, about the largest eigenvalue, so that products stay in the range of half precision.

    Attributes
    ----------
    shapes : list of tuple of int
        Shapes of the layers of unknowns: (height, width, channels) or (units,).
    identity : list of float
        D, by layer.
    """

    def __init__(self, hessian: OperatorHessian, scale: Tensor) -> None:
        self._root = scale.rsqrt()
        self._discounts, self._beta, n = hessian.discounts, hessian.beta, hessian.n_blocks
        self._half_root = self._root.half()
        self._operators: list[HalfOperator] = []
        self.shapes: list[tuple[int, ...]] = []
        below: tuple[int, ...] = (hessian.operators[0].shape[1],)
        for operator in hessian.operators:
            self._operators.append(_halved(operator, below, self._root))
            below = image_of(operator) or (operator.shape[0],)
            self.shapes.append(_last(below))
        self.shapes = self.shapes[:n]
        pressed = [a * beta for a, beta in zip(self._discounts[1:], self._beta[1:], strict=True)] + [0.0]
        self.identity = [a + more for a, more in zip(self._discounts[:n], pressed, strict=False)]

    @property
    def channels_and_pixels(self) -> list[tuple[int, int]]:
        """Channels and pixels of every layer of unknowns; vectors have one pixel."""
        return [(shape[-1], math.prod(shape[:-1])) for shape in self.shapes]

    def products(self, v: list[Tensor]) -> list[Tensor]:
        """Return the product, layer by layer; layers have shapes (n, *shape)."""
        found: list[Tensor] = []
        for k, operator in enumerate(self._operators):
            a, beta = self._discounts[k], self._beta[k]
            if k > 0:
                forth = operator.apply(v[k - 1])
                found[-1] = found[-1] + operator.adjoint(forth) * a
            if k == len(v):
                break
            if k > 0:
                cross = self._half_root * (a * (1 + beta))
                found[-1] = found[-1] - operator.adjoint(v[k]) * cross
                own = forth * -cross
                own = own + operator.there_and_back(v[k]) * (a * beta) if beta else own
            else:
                own = operator.there_and_back(v[k]) if beta else torch.zeros_like(v[k])
                own = own if a * beta in (0.0, 1.0) else own * (a * beta)
            found.append(own)
        return found
