"""Linear operators: what the weights of a layer do, by products only.

A layer's weights are a matrix, a convolution, or either of them after average pooling. Energies, solvers and bounds use an
operator through its products with vectors, so that no matrix of the size of a convolution's units is ever built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, final

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from lrrn.linalg import verified
from lrrn.linalg.convolution_norms import convolution_norm
from lrrn.runtime.lazy import lazy
from lrrn.runtime.precision import convolves_in_full_precision, in_full_precision

_UP = 1 + 1e-12
"""Factor that covers the rounding of sums and products of float64 numbers of one sign."""


class Operator(Protocol):
    """A linear map A between vectors, given by a weight tensor.

    Rows of arguments and results are samples. Every product is a sum of products of two numbers, in some order: transforms such
    as Winograd's, whose rounding is larger, are not used in float64. On a GPU, convolutions are matrix products with patches.
    """

    @property
    def weight(self) -> Tensor:
        """The parameters."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """Lengths of the output and of the input, as of the matrix."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """Return A x for rows of ``x``, of shape (n, columns); differentiable."""
        ...

    def adjoint(self, y: Tensor) -> Tensor:
        """Return A^T y for rows of ``y``, of shape (n, rows); differentiable."""
        ...

    def added(self, constant: Tensor, x: Tensor, alpha: float = 1.0) -> Tensor:
        """Return ``constant + alpha A x`` for rows of ``x``, or for a single vector; differentiable."""
        ...

    def adjoint_added(self, constant: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        """Return ``constant + alpha A^T y`` for rows of ``y``, or for a single vector; differentiable."""
        ...

    def outer(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the derivative of the sum over samples of y^T A x in the weight."""
        ...

    def squares(self) -> tuple[Tensor, Tensor]:
        """Return the sums of squared entries of every row and of every column, of shapes (rows,) and (columns,)."""
        ...

    def norm(self) -> float:
        """Return a proven upper bound on the spectral norm; computed once, for the weight as it is then."""
        ...

    @property
    def size(self) -> float:
        """Upper bound on the spectral norm of the matrix of absolute values, to which rounding errors are relative."""
        ...

    @property
    def terms(self) -> int:
        """Largest number of products that are summed up to an entry of A x or of A^T y."""
        ...

    def dense(self) -> Tensor:
        """Return the matrix, of shape (rows, columns); differentiable in the weight."""
        ...


@final
@dataclass(frozen=True, eq=False)
class Dense:
    """A matrix, of shape (rows, columns)."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix."""
        return self.weight.shape[0], self.weight.shape[1]

    @in_full_precision
    def apply(self, x: Tensor) -> Tensor:
        """Return A x for rows of ``x``."""
        return x @ self.weight.mT

    @in_full_precision
    def adjoint(self, y: Tensor) -> Tensor:
        """Return A^T y for rows of ``y``."""
        return y @ self.weight

    @in_full_precision
    def added(self, constant: Tensor, x: Tensor, alpha: float = 1.0) -> Tensor:
        """Add in the product's own kernel, which rounds once less."""
        if x.dim() == 1:
            return torch.addmv(constant, self.weight, x, alpha=alpha)
        return torch.addmm(constant, x, self.weight.mT, alpha=alpha)

    @in_full_precision
    def adjoint_added(self, constant: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        """Add in the product's own kernel."""
        if y.dim() == 1:
            return torch.addmv(constant, self.weight.mT, y, alpha=alpha)
        return torch.addmm(constant, y, self.weight, alpha=alpha)

    @in_full_precision
    def outer(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the sum over samples of y x^T."""
        return y.mT @ x

    def squares(self) -> tuple[Tensor, Tensor]:
        """Return the squared norms of rows and of columns."""
        squared = self.weight.detach().square()
        return squared.sum(1), squared.sum(0)

    def norm(self) -> float:
        """Return a proven upper bound on the spectral norm, by a verified factorisation."""
        return self._norm

    @lazy
    def _norm(self) -> float:
        return verified.spectral_norm(self.weight)

    @lazy
    def size(self) -> float:
        """Frobenius norm."""
        return float(torch.linalg.vector_norm(self.weight.detach())) * _UP

    @property
    def terms(self) -> int:
        """Length of a row or column."""
        return max(self.shape)

    def dense(self) -> Tensor:
        """Return the weight."""
        return self.weight


FEW = 8
"""Number of input channels below which patches are faster for transposed convolutions on the CPU: in float32, oneDNN takes
several times as long for images of one or three channels. From eight on, it is as fast or faster."""
KEPT_ENTRIES = 2**20
"""Largest table of places that is kept for later calls."""


def by_patches(x: Tensor) -> bool:
    """Whether convolutions are matrix products with patches: on a GPU, and where torch may convolve in less than float32.

    torch's own convolutions on a GPU are as fast in float32 only, and cuDNN does not say how its algorithms round.
    """
    return x.is_cuda or not convolves_in_full_precision()


@final
@dataclass(frozen=True, eq=False)
class Conv2d:
    """A 2-D convolution with zero padding, as of ``torch.nn.Conv2d`` without bias, on flattened images.

    Parameters
    ----------
    weight : Tensor of shape (channels, in_channels, kernel, kernel)
    in_shape : (in_channels, height, width)
    stride, padding : int
    """

    weight: Tensor
    in_shape: tuple[int, int, int]
    stride: int = 1
    padding: int = 0

    @lazy
    def out_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the output."""
        _, height, width = self.in_shape
        kernel = self.weight.shape[-1]
        return self.weight.shape[0], self._along(height, kernel), self._along(width, kernel)

    def _along(self, length: int, kernel: int) -> int:
        return (length + 2 * self.padding - kernel) // self.stride + 1

    @property
    def shape(self) -> tuple[int, int]:
        """Number of units and of inputs."""
        return math.prod(self.out_shape), math.prod(self.in_shape)

    def _patches(self, x: Tensor) -> Tensor:
        """Return what every kernel position sees, of shape (n, in_channels, kernel, kernel, height, width)."""
        kernel, images = self.weight.shape[-1], x.reshape(len(x), *self.in_shape)
        padded = functional.pad(images, [self.padding] * 4) if self.padding else images
        return padded.unfold(2, kernel, self.stride).unfold(3, kernel, self.stride).permute(0, 1, 4, 5, 2, 3)

    def _rows_of_patches(self, x: Tensor) -> Tensor:
        """Return the patches as matrices, of shape (n, entries of a kernel, positions)."""
        return self._patches(x).reshape(len(x), self.weight[0].numel(), math.prod(self.out_shape[1:]))

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        if by_patches(x):
            maps = weight.flatten(1) @ self._rows_of_patches(x)
        else:
            images = x.reshape(len(x), *self.in_shape)
            maps = functional.conv2d(images, weight, stride=self.stride, padding=self.padding)
        return maps.reshape(len(x), math.prod(self.out_shape))

    def _transpose(self, y: Tensor, weight: Tensor) -> Tensor:
        kernel, maps = weight.shape[-1], y.reshape(len(y), *self.out_shape)
        if by_patches(y) or self.in_shape[0] < FEW:
            patches = weight.flatten(1).mT @ maps.flatten(2)
            images = functional.fold(patches, self.in_shape[1:], kernel, padding=self.padding, stride=self.stride)
        else:
            # rows and columns at the end that no kernel position reaches
            missed = [(length + 2 * self.padding - kernel) % self.stride for length in self.in_shape[1:]]
            images = functional.conv_transpose2d(maps, weight, None, self.stride, self.padding, missed)
        return images.reshape(len(y), math.prod(self.in_shape))

    @in_full_precision
    def apply(self, x: Tensor) -> Tensor:
        """Return the convolution of every row of ``x``."""
        return self._convolve(x, self.weight)

    @in_full_precision
    def adjoint(self, y: Tensor) -> Tensor:
        """Return the transposed convolution of every row of ``y``."""
        return self._transpose(y, self.weight)

    @in_full_precision
    def added(self, constant: Tensor, x: Tensor, alpha: float = 1.0) -> Tensor:
        """Return ``constant + alpha A x``, added in the product's own kernel where that is a matrix product."""
        if x.dim() == 1:
            return self.added(constant, x[None], alpha)[0]
        if not by_patches(x):
            return torch.add(constant, self._convolve(x, self.weight), alpha=alpha)
        maps, kernels = constant.reshape(-1, *self.out_shape).flatten(2), self.weight.flatten(1).expand(len(x), -1, -1)
        return torch.baddbmm(maps, kernels, self._rows_of_patches(x), alpha=alpha).flatten(1)

    def adjoint_added(self, constant: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        """Return ``constant + alpha A^T y``."""
        return torch.add(constant, self.adjoint(y) if y.dim() > 1 else self.adjoint(y[None])[0], alpha=alpha)

    @in_full_precision
    def outer(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the derivative of the sum over samples of y^T A x in the kernels."""
        images, maps = x.reshape(len(x), *self.in_shape), y.reshape(len(y), *self.out_shape)
        if by_patches(x):
            patches = self._patches(x).permute(0, 4, 5, 1, 2, 3).reshape(-1, self.weight[0].numel())
            return (maps.transpose(0, 1).flatten(1) @ patches).reshape(self.weight.shape)
        return conv2d_weight(images, self.weight.shape, maps, stride=self.stride, padding=self.padding)

    @in_full_precision
    def squares(self) -> tuple[Tensor, Tensor]:
        """Convolve ones with the squared kernels."""
        squared = self.weight.detach().square()
        rows, columns = self.shape
        ones = squared.new_ones
        return self._convolve(ones((1, columns)), squared)[0], self._transpose(ones((1, rows)), squared)[0]

    def norm(self) -> float:
        """Return a proven upper bound on the spectral norm."""
        return self._norm

    @lazy
    def _norm(self) -> float:
        return convolution_norm(self.weight, self.in_shape, self.stride, self.padding)

    @lazy
    def size(self) -> float:
        """Schur's test: the geometric mean of the largest row sum and the largest column sum of absolute values."""
        sums = self.weight.detach().to(torch.float64).abs()
        by_row, by_column = float(sums.sum((1, 2, 3)).max()), float(sums.sum((0, 2, 3)).max())
        return math.sqrt(by_row) * math.sqrt(by_column) * _UP

    @property
    def terms(self) -> int:
        """Entries of a kernel, or kernel positions that reach a pixel in all channels."""
        channels, inputs, kernel, _ = self.weight.shape
        reach = -(-kernel // self.stride)
        return max(inputs * kernel * kernel, channels * reach * reach)

    def dense(self) -> Tensor:
        """Gather the entries of the kernels that stand at every place of the matrix."""
        weight = self.weight
        # tensors of a graph that is traced have no values, and must not be kept for later calls
        kept = math.prod(self.shape) <= KEPT_ENTRIES and not torch.compiler.is_compiling()
        places_of = _kept_places if kept else _places
        places = places_of(tuple(weight.shape), self.in_shape, self.out_shape, self.stride, self.padding, weight.device)
        return torch.cat([weight.reshape(-1), weight.new_zeros(1)])[places]


def _places(
    weight: tuple[int, ...],
    below: tuple[int, int, int],
    above: tuple[int, int, int],
    stride: int,
    padding: int,
    device: torch.device,
) -> Tensor:
    """Return where in the flat weight each entry of the matrix is, of shape (rows, columns); one past the end for zeros."""
    (channels, inputs, kernel, _), (_, height, width), (_, rows, columns) = weight, below, above
    last = math.prod(weight)
    number = torch.arange(last).view(weight)
    places = torch.full((channels, rows, columns, inputs, height, width), last)
    for i in range(rows):
        for j in range(columns):
            top, left = i * stride - padding, j * stride - padding
            up, down, start, end = max(top, 0), min(top + kernel, height), max(left, 0), min(left + kernel, width)
            places[:, i, j, :, up:down, start:end] = number[:, :, up - top : down - top, start - left : end - left]
    return places.view(math.prod(above), math.prod(below)).to(device)


# captured graphs read these tables at their addresses, so that those of all networks in training must be kept
_kept_places = lru_cache(maxsize=64)(_places)


@final
@dataclass(frozen=True, eq=False)
class Pooled:
    """An operator after average pooling of its input images, scaled to norm one.

    The windows do not overlap, and entries are 1 / pool, so that the pooling P has P P^T = I. Rows and columns of images that
    fill no window are dropped.
    """

    inner: Operator
    in_shape: tuple[int, int, int]
    pool: int

    @property
    def weight(self) -> Tensor:
        """The parameters of the operator behind the pooling."""
        return self.inner.weight

    @property
    def shape(self) -> tuple[int, int]:
        """Number of units and of inputs."""
        return self.inner.shape[0], math.prod(self.in_shape)

    def _pooled(self, x: Tensor) -> Tensor:
        pooled = functional.avg_pool2d(x.reshape(len(x), *self.in_shape), self.pool) * self.pool
        return pooled.reshape(len(x), self.inner.shape[1])

    def _spread(self, y: Tensor) -> Tensor:
        channels, height, width = self.in_shape
        small = y.reshape(len(y), channels, height // self.pool, width // self.pool) / self.pool
        large = small.repeat_interleave(self.pool, 2).repeat_interleave(self.pool, 3)
        padded = functional.pad(large, (0, width - large.shape[3], 0, height - large.shape[2]))
        return padded.reshape(len(y), self.shape[1])

    def apply(self, x: Tensor) -> Tensor:
        """Pool and apply the operator."""
        return self.inner.apply(self._pooled(x))

    def adjoint(self, y: Tensor) -> Tensor:
        """Apply the adjoint and spread every entry over its window."""
        return self._spread(self.inner.adjoint(y))

    def added(self, constant: Tensor, x: Tensor, alpha: float = 1.0) -> Tensor:
        """Return ``constant + alpha A x``."""
        return torch.add(constant, self.apply(x) if x.dim() > 1 else self.apply(x[None])[0], alpha=alpha)

    def adjoint_added(self, constant: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        """Return ``constant + alpha A^T y``."""
        return torch.add(constant, self.adjoint(y) if y.dim() > 1 else self.adjoint(y[None])[0], alpha=alpha)

    def outer(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the derivative in the weight, at pooled inputs."""
        return self.inner.outer(y, self._pooled(x))

    def squares(self) -> tuple[Tensor, Tensor]:
        """Return the squared norms of rows, which pooling keeps, and of columns, which it divides by the size of a window."""
        rows, columns = self.inner.squares()
        return rows, self._spread(columns[None])[0] / self.pool

    def norm(self) -> float:
        """Return that of the operator: pooling has norm one."""
        return self.inner.norm()

    @property
    def size(self) -> float:
        """That of the operator: entries of the pooling are not negative, and its norm is one."""
        return self.inner.size

    @property
    def terms(self) -> int:
        """Products of the operator, and of pooling."""
        return self.inner.terms + self.pool * self.pool + 2

    def dense(self) -> Tensor:
        """Return the matrix: every row of the operator's, spread."""
        return self._spread(self.inner.dense())
