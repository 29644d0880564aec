"""Networks with sorting activations, as exported from 1-Lipschitz libraries; without hidden layers, linear classifiers.

The certificate is about the network of the exported weights, computed in float64. Sorting a group of numbers is 1-Lipschitz.
So the Lipschitz constant of the last layer's input is at most the product of the hidden weights' spectral norms, and that of
y_i - y_j is at most |w_i - w_j| times this product. The norms are not estimates of a power iteration during training: they are
computed from all singular values, of a convolution from those of every frequency, and proven by a verified factorisation. The
rounding error of the scores, at x and at the perturbed input, is subtracted. The certificate does not cover the float32 network
that was trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lrrn.linalg import verified
from lrrn.linalg.convolution_norms import convolution_norm
from lrrn.linalg.operators import Conv2d
from lrrn.runtime.lazy import lazy

_UP = 1 + 1e-12
"""Covers the rounding of norms and products of a few float64 numbers."""
BLOCK_NUMBERS = 2**27
"""Largest number of entries of an array in memory."""


class Geometry(NamedTuple):
    """Where a convolution is applied: channels, height and width of its input, stride, and padding by zeros."""

    in_shape: tuple[int, int, int]
    stride: int
    padding: int


def _group_sort(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).sort(-1).values.flatten(-2)


def _max_min(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], -1)


SORTS: dict[str, Callable[[Tensor], Tensor]] = {
    "group_sort": _group_sort,
    "max_min": _max_min,
    "full_sort": lambda x: x.sort(-1).values,
}
"""Sorting activations by name: adjacent pairs (torchlip's GroupSort2), pairs half a layer apart (orthogonium's MaxMin), all."""


@final
class SortNetwork(nn.Module):
    """Affine layers with a sort after each but the last, in float64.

    Parameters
    ----------
    weights, biases : sequences of Tensor
        Weights of shape (d_{k+1}, d_k) and biases of shape (d_{k+1},); of a convolution (channels, in_channels, kernel, kernel)
        and (channels,).
    sort : {"group_sort", "max_min", "full_sort"}, default="group_sort"
    geometry : sequence of Geometry, optional
        Of the first layers, which are convolutions. They need "max_min", whose pairs are channels half a layer apart.
    """

    kind: ClassVar[str] = "sort network"
    methods: ClassVar[tuple[str, ...]] = ("pairwise",)

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        sort: str = "group_sort",
        geometry: Sequence[Geometry] = (),
    ) -> None:
        super().__init__()
        if sort not in SORTS:
            raise ValueError(f"unknown sort {sort!r}; use one of {', '.join(SORTS)}")
        if geometry and sort != "max_min":
            raise ValueError(f"convolutions are sorted by max_min; got {sort!r}")
        odd = [len(w) for w in weights[:-1] if len(w) % 2 and sort != "full_sort"]
        if odd:
            raise ValueError(f"{sort} pairs units, so layers need even widths; got {odd[0]}")
        self.sort, self.geometry = sort, tuple(geometry)
        _check_chain([tuple(w.shape) for w in weights], self.geometry)
        self.weights, self.biases = (
            nn.ParameterList(nn.Parameter(t.detach().to(torch.float64, copy=True), requires_grad=False) for t in several)
            for several in (weights, biases)
        )

    @property
    def n_parameters(self) -> int:
        """Number of learnt parameters."""
        return sum(t.numel() for t in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores, of shape (n, n_classes)."""
        parts = x.split(self._rows)
        if len(parts) == 1 or not (x.requires_grad and torch.is_grad_enabled()):
            return torch.cat([self._scores(part) for part in parts])
        # gradients keep the inputs of parts only and compute the rest again: attacks take thousands of rows at once
        return torch.cat([checkpoint(self._scores, part, use_reentrant=False, preserve_rng_state=False) for part in parts])

    def _scores(self, x: Tensor) -> Tensor:
        for convolution, b in zip(self._convolutions(), self.biases, strict=False):
            maps = convolution.apply(x).unflatten(1, (len(b), -1))
            x = SORTS[self.sort]((maps + b[:, None]).flatten(1))
        n = len(self.geometry)
        for w, b in zip(self.weights[n:-1], self.biases[n:-1], strict=True):
            x = SORTS[self.sort](nn.functional.linear(x, w, b))
        return nn.functional.linear(x, self.weights[-1], self.biases[-1])

    def _convolutions(self) -> list[Conv2d]:
        # not kept: the weights may have been moved to another device
        return [Conv2d(w, *geometry) for w, geometry in zip(self.weights, self.geometry, strict=False)]

    @property
    def _rows(self) -> int:
        """Samples at once: what the kernels of a layer read, side by side, has to fit into memory."""
        patches = [each.weight[0].numel() * math.prod(each.out_shape[1:]) for each in self._convolutions()]
        units = [math.prod(each.out_shape) for each in self._convolutions()]
        return max(1, BLOCK_NUMBERS // max([1, *patches, *units, *(len(w) for w in self.weights)]))

    def radii(self, x: Tensor, method: str = "pairwise") -> Tensor:
        """Return certified radii: min_j (y_i - y_j - rounding) / (|w_i - w_j| times the norms of the layers before).

        Parameters
        ----------
        x : float64 Tensor of shape (n, d_0)
        method : {"pairwise"}

        Returns
        -------
        float64 Tensor of shape (n,)
            Without hidden layers, the distances to the nearest decision boundary, up to rounding.
        """
        y = self(x)
        best = y.argmax(-1)
        rho = _distances(self.weights[-1])[best] * (math.prod(self.norms[:-1]) * _UP)  # (n, n_classes)
        still, growing = self._rounding()
        # the error of y_i - y_j is at most sqrt(2) times that of y; the error at the perturbed input grows with its norm
        lead = y.gather(1, best[:, None]) - y - 2 * math.sqrt(2) * (still + growing * _norms(x))[:, None]
        radii = lead / (rho + math.sqrt(2) * growing)
        radius = radii.scatter(1, best[:, None], math.inf).amin(-1).clamp(min=0.0) * (1 - 1e-12)
        return torch.where(radius.isfinite(), radius, 0.0)

    @lazy
    def norms(self) -> tuple[float, ...]:
        """Proven upper bounds on the spectral norms of the layers, computed once: the weights never change."""
        n = len(self.geometry)
        first = [convolution_norm(each.weight, *place, nearly_orthogonal=True) for each, place in self._placed()]
        return (*first, *(proven_norm(w) for w in self.weights[n:]))

    def _placed(self) -> list[tuple[Conv2d, Geometry]]:
        return list(zip(self._convolutions(), self.geometry, strict=True))

    def _rounding(self) -> tuple[float, float]:
        """Return a and b such that the computed scores are within a + b |x| of the exact ones, in norm.

        A layer's product has an error of at most gamma times |input| and the norm of the absolute values of W, in any summation
        order, plus the propagated earlier error. That norm is at most |W|_F and, of a convolution, what Schur's test gives.
        """
        size, error = (0.0, 1.0), (0.0, 0.0)  # both affine in |x|
        convolutions = dict(enumerate(self._convolutions()))
        for k, (w, b, norm) in enumerate(zip(self.weights, self.biases, self.norms, strict=True)):
            gamma = 2 * (w[0].numel() + 4) * verified.EPS
            absolute, shift = float(w.norm()), float(b.norm())
            if k in convolutions:
                # the bias of a channel is added at every place
                absolute, shift = convolutions[k].size, shift * math.sqrt(math.prod(convolutions[k].out_shape[1:]))
            fresh = (gamma * (absolute * size[0] + shift), gamma * absolute * size[1])
            error = (norm * error[0] + 2 * fresh[0], norm * error[1] + 2 * fresh[1])
            size = (norm * size[0] + shift + error[0], norm * size[1] + error[1])
        return error

    def header(self) -> dict[str, Any]:
        """Return the metadata that a file stores besides the tensors."""
        return {"sort": self.sort} | ({"geometry": [list(each) for each in self.geometry]} if self.geometry else {})

    @classmethod
    def restored(cls, tensors: dict[str, Tensor], header: dict[str, Any]) -> SortNetwork:
        """Create the network from the contents of a file."""
        n = sum(name.startswith("weights.") for name in tensors)
        weights, biases = ([tensors[f"{name}.{k}"] for k in range(n)] for name in ("weights", "biases"))
        geometry = [Geometry(tuple(shape), stride, padding) for shape, stride, padding in header.get("geometry", ())]
        return cls(weights, biases, header["sort"], geometry)


def _check_chain(shapes: Sequence[tuple[int, ...]], geometry: Sequence[Geometry]) -> None:
    """Raise ValueError unless the layers are convolutions first, as many as have a place, and each reads what is before it."""
    if len(geometry) >= len(shapes) or any(len(s) != (4 if k < len(geometry) else 2) for k, s in enumerate(shapes)):
        raise ValueError(f"{len(geometry)} convolutions should come before at least one matrix; got weights of shapes {shapes}")
    width = math.prod(geometry[0].in_shape) if geometry else shapes[0][1]
    for shape, place in zip(shapes, (*geometry, *[None] * (len(shapes) - len(geometry))), strict=True):
        if place is None:
            reads, units = shape[1], shape[0]
        else:
            channels, *sides = place.in_shape
            places = [(side + 2 * place.padding - k) // place.stride + 1 for side, k in zip(sides, shape[2:], strict=True)]
            reads, units = (math.prod(place.in_shape) if channels == shape[1] else -1), shape[0] * math.prod(places)
        if reads != width:
            raise ValueError(f"a layer of shape {shape} does not fit the {width} numbers before it")
        width = units


def proven_norm(w: Tensor) -> float:
    """Return a proven upper bound on the largest singular value, tight to about nine digits.

    ``verified.spectral_norm`` estimates large norms from a subspace and adds a percent. That is too loose for a product of
    layers trained to norm one, so this function computes all singular values.
    """
    w = w.detach().to(torch.float64)
    thin = w if len(w) <= w.shape[1] else w.mT
    gram, error = verified.squared(thin)
    largest = float(torch.linalg.eigvalsh(gram.diag[0])[-1])
    candidate = largest * (1 + 1e-10) + 2 * verified.margin(gram, largest, error)
    if verified.is_positive_definite(gram.negated(), candidate, error):
        return math.sqrt(candidate) * (1 + 4 * verified.EPS)
    return verified.spectral_norm(w)


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1) * _UP


def _distances(w: Tensor) -> Tensor:
    # the faster formula with inner products suffers from cancellation
    return torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist") * _UP
