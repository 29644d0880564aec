"""Shapes of layers: how a weight tensor acts as a linear operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from torch import Tensor

from lrrn.linalg.operators import Conv2d, Dense, Operator, Pooled


@final
@dataclass(frozen=True)
class LayerShape:
    """How the weights of a layer act: shapes of input, output and weights, and the geometry between them.

    Parameters
    ----------
    in_shape, out_shape : tuple of int
        A width, or channels, height and width.
    weight_shape : tuple of int
        (rows, columns), or (channels, in_channels, kernel, kernel).
    stride, padding : int
        Of a convolution.
    pool : int
        Side of the windows of average pooling in front of the weights; 1 is none.
    """

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    pool: int = 1

    @property
    def is_dense(self) -> bool:
        """Whether the operator is a plain matrix."""
        return len(self.weight_shape) == 2 and self.pool == 1

    @property
    def convolves(self) -> bool:
        """Whether the weights are kernels, with one bias per channel."""
        return len(self.weight_shape) == 4

    @property
    def columns(self) -> int:
        """Number of inputs."""
        return math.prod(self.in_shape)

    @property
    def rows(self) -> int:
        """Number of units."""
        return math.prod(self.out_shape)

    @property
    def n_b(self) -> int:
        """Number of regression biases: one per channel or per unit."""
        return self.out_shape[0]

    @property
    def n_c(self) -> int:
        """Number of reconstruction biases: one per channel of a convolution's input, otherwise one per unit."""
        return self.in_shape[0] if self.convolves else self.columns

    def operator(self, weight: Tensor) -> Operator:
        """Return the operator with these weights."""
        if self.is_dense:
            return Dense(weight)
        if not self.convolves:
            return Pooled(Dense(weight), self.in_shape, self.pool)  # type: ignore[arg-type]
        channels, height, width = self.in_shape
        images = channels, height // self.pool, width // self.pool
        convolution = Conv2d(weight, images, self.stride, self.padding)
        return convolution if self.pool == 1 else Pooled(convolution, (channels, height, width), self.pool)
