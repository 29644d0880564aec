"""Accelerated steps on a CUDA device for Hessians without a matrix: convolutions in half precision, with iterative refinement.

As in :mod:`lrrn.solvers.half_precision`, each call computes a correction to z in units of the residual, from the gradient in
full precision, and gains up to three digits. A step is the products of every layer, on tensor cores, and one pass over the
unknowns. Nothing synchronises with the device.
"""

from __future__ import annotations

from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from lrrn.linalg.half_products import HalfHessian
from lrrn.linalg.operator_hessian import OperatorHessian
from lrrn.qp import BoxQP
from lrrn.runtime.devices import has_kernels
from lrrn.solvers.base import once_per_hessian
from lrrn.solvers.half_precision import FARTHEST, bounds_and_strides, layer_or_own

ABOVE_ESTIMATE = 1.1
"""Factor from the estimated to the assumed largest eigenvalue of a Hessian without a matrix."""
SMALLEST = 1e-30
"""Smallest size of a residual that corrections are measured in; a float32 number, as its inverse."""
WIDTH = 1024
"""Units per program of a pass over a layer."""
CHANNELS, PIXELS = 32, 64
"""Tile of a pass that moves channels last."""


def fits_operators(qp: BoxQP) -> bool:
    """Whether the kernels support a problem: its Hessian has no matrix, and it is on a device with Triton."""
    return qp.dim > 0 and has_kernels(qp.q) and isinstance(qp.hessian, OperatorHessian)


@once_per_hessian
def prepared(h: OperatorHessian) -> tuple[HalfHessian, list[Tensor], Tensor, Tensor]:
    """Return products in half precision, the step of every unit by layer, the scale of products, and the best momentum."""
    metric = torch.cat([layer_or_own(part) for part in h.split(h.diagonal)])
    largest = (h.estimate_largest(metric.rsqrt()) * ABOVE_ESTIMATE).float()
    scale = largest * metric.max().float()
    half = HalfHessian(h, scale)
    # layers scaled by their diagonal; the bound on the smallest eigenvalue rests on the structure alone
    smallest = h.smallest_eigenvalue() if all(beta > 0 for beta in h.beta[1 : h.n_blocks]) else 0.0
    root = (smallest / scale).clamp(0, 1).sqrt()
    steps = [
        (1 / (part.float() * largest)).view(channels, pixels).mT.reshape(-1)
        for part, (channels, pixels) in zip(h.split(metric), half.channels_and_pixels, strict=True)
    ]
    return half, steps, scale, (1 - root) / (1 + root)


@final
class OperatorSteps:
    """Projected gradients with momentum, or conjugate gradients for linear equations; both are kept from call to call.

    Attributes
    ----------
    warm_share : float
        Share of the sweeps that a solve needs if it starts near the solution.
    """

    warm_share = 0.6

    def __init__(self, qp: BoxQP) -> None:
        assert isinstance(qp.hessian, OperatorHessian)
        self._half, self._steps, self._scale, self._most = prepared(qp.hessian)
        self._residual: Tensor | None = None
        # in units of the problem: extrapolated minus current point, or the direction; and the state of the momentum
        self._lead: list[Tensor] | None = None
        self._t = torch.ones(qp.n_samples, dtype=torch.float32, device=qp.q.device)

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        """Compute a correction and add it."""
        n, residual = len(z), self.check(qp, z)[1] if self._residual is None else self._residual
        size = residual.clamp(SMALLEST, 1 / SMALLEST)
        # of linear equations, the gradient is all that is left to do
        push = torch.float32 if qp.linear else torch.float16
        layers = [_Layer(n, units, push, z.device) for units in self._half.channels_and_pixels]
        (lo, hi), strides = bounds_and_strides(qp)
        kernels, offset, g = _kernels(), 0, g.contiguous()
        places = []
        for layer in layers:
            places.append((qp.dim, offset, *layer.units, *strides))
            kernels.enter[layer.tiles](z, g, lo, hi, size, *layer.box, *places[-1], CHANNELS=CHANNELS, PIXELS=PIXELS)
            offset += layer.width
        if qp.linear:
            sweeps = -(-sweeps // 3)  # conjugate gradients need a third of the steps
            self._solve_equations(layers, size.float()[:, None], sweeps)
        else:
            self._relax(layers, size.float()[:, None], sweeps)
        for layer, place in zip(layers, places, strict=True):
            moved = (layer.here, layer.down, layer.up)
            kernels.leave[layer.tiles](z, lo, hi, size, *moved, *place, CHANNELS=CHANNELS, PIXELS=PIXELS)
        self._residual = None
        return torch.full((n,), sweeps, dtype=torch.int64, device=z.device)

    def _relax(self, layers: list[_Layer], size: Tensor, sweeps: int) -> None:
        n, parts = len(size), sum(layer.parts for layer in layers)
        sums = size.new_zeros((sweeps + 1, n, parts))
        t = size.new_empty((sweeps + 1, n))
        t[0] = self._t
        for layer, lead in zip(layers, self._lead or [], strict=False):
            layer.ahead.copy_((lead / size).clamp_(-FARTHEST, FARTHEST))
        for k in range(sweeps):
            first = 0
            for i, (layer, product) in enumerate(zip(layers, self._products(layers), strict=True)):
                state = (self._steps[i], self._scale, self._most, t, sums)
                counts = (n, layer.width, self._half.identity[i], k, first, parts, FARTHEST)
                shape = {"PARTS": 1 << (parts - 1).bit_length(), "WIDTH": WIDTH}
                _kernels().relax[n, layer.parts](product, *layer.point, *layer.box, *state, *counts, **shape)
                first += layer.parts
        self._t = t[sweeps]
        self._lead = [(layer.ahead - layer.here) * size for layer in layers]

    def _solve_equations(self, layers: list[_Layer], size: Tensor, sweeps: int) -> None:
        """Conjugate gradients, preconditioned by the layers' scales; directions are kept from call to call."""
        n, parts, kernels = len(size), sum(layer.parts for layer in layers), _kernels()
        shape = {"PARTS": 1 << (parts - 1).bit_length(), "WIDTH": WIDTH}
        curved, along, before, now = (size.new_zeros((n, parts)) for _ in range(4))
        firsts, directions, lefts, frees = [0], [], [], []
        for i, layer in enumerate(layers):
            firsts.append(firsts[-1] + layer.parts)
            frees.append(layer.up > layer.down)
            lefts.append(torch.where(frees[i], -layer.push, 0))
            weighted = lefts[i] * self._steps[i]
            before[:, firsts[i]] = (lefts[i] * weighted).sum(-1)
            directions.append(weighted * self._scale if self._lead is None else self._lead[i] / size)
            layer.ahead.copy_(directions[i].clamp(-FARTHEST, FARTHEST))
        for _ in range(sweeps):
            products = self._products(layers)
            given = [(product, *pair) for product, *pair in zip(products, directions, lefts, strict=True)]
            for i, layer in enumerate(layers):
                counts = (layer.width, self._half.identity[i], firsts[i], parts)
                kernels.curve[n, layer.parts](*given[i], self._scale, curved, along, *counts, WIDTH=WIDTH)
            for i, layer in enumerate(layers):
                counts = (layer.width, self._half.identity[i], firsts[i], parts)
                state = (layer.here, frees[i], self._steps[i], self._scale, curved, along, now)
                kernels.descend[n, layer.parts](*given[i], *state, *counts, **shape)
            for i, layer in enumerate(layers):
                state = (directions[i], layer.ahead, lefts[i], self._steps[i], self._scale, before, now)
                kernels.turn[n, layer.parts](*state, layer.width, parts, FARTHEST, **shape)
            before, now = now, before
        self._lead = [direction * size for direction in directions]

    def _products(self, layers: list[_Layer]) -> list[Tensor]:
        images = [layer.ahead.view(-1, *shape) for layer, shape in zip(layers, self._half.shapes, strict=True)]
        return [product.contiguous() for product in self._half.products(images)]

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the same as :func:`lrrn.solvers.base.recompute`, with the products and one kernel."""
        g, parts = qp.hessian.matmul(z), -(-qp.dim // WIDTH)
        sums = torch.empty((len(z), parts), dtype=torch.float64, device=z.device)
        (lo, hi), strides = bounds_and_strides(qp)
        _kernels().judge[len(z), parts](z, qp.q.contiguous(), lo, hi, g, sums, qp.dim, *strides, parts, WIDTH=WIDTH)
        self._residual = sums.sum(-1).sqrt()
        return g, self._residual

    def keep(self, rows: Tensor) -> None:
        """Drop the state of other samples."""
        self._t = self._t[rows]
        if self._residual is not None:
            self._residual = self._residual[rows]
        if self._lead is not None:
            self._lead = [lead[rows] for lead in self._lead]


@final
class _Layer:
    """Arrays of one layer of unknowns, with channels last, in units of the residual."""

    def __init__(self, n: int, units: tuple[int, int], push: torch.dtype, device: torch.device) -> None:
        channels, pixels = self.units = units
        width = self.width = channels * pixels
        self.parts = -(-width // WIDTH)
        self.tiles = (n, -(-channels // CHANNELS), -(-pixels // PIXELS))
        dtypes = (push, torch.float16, torch.float16)
        self.push, self.down, self.up = (torch.empty((n, width), dtype=dtype, device=device) for dtype in dtypes)
        self.here = torch.zeros((n, width), device=device)
        self.ahead = torch.zeros((n, width), dtype=torch.float16, device=device)

    @property
    def point(self) -> tuple[Tensor, Tensor]:
        """The extrapolated and the current point."""
        return self.ahead, self.here

    @property
    def box(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient at the start, and the distances to the bounds."""
        return self.push, self.down, self.up


@cache
def _kernels() -> Any:
    """Import the kernels on first use: Triton is slow to import, and may be absent."""
    from lrrn.kernels.cuda import operators

    return operators
