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
from lrrn.solvers.base import Stepper, once_per_hessian
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
class OperatorSteps(Stepper):
    """Projected gradients with momentum, or conjugate gradients for linear equations; both are kept from call to call."""

    warm_share = 0.6

    def __init__(self, qp: BoxQP) -> None:
        assert isinstance(qp.hessian, OperatorHessian)
        self._half, self._steps, self._scale, self._most = prepared(qp.hessian)
        self._residual: Tensor | None = None
        # in units of the problem: extrapolated minus current point, or the direction; and the state of the momentum
        self._leads: list[Tensor] | None = None
        self._t = torch.ones(qp.n_samples, dtype=torch.float32, device=qp.q.device)

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        """Compute a correction and add it."""
        n, g = len(z), g.contiguous()
        residual = self._judged(qp, z, g, False) if self._residual is None else self._residual
        size = residual.clamp(SMALLEST, 1 / SMALLEST)
        # of linear equations, the gradient is all that is left to do
        precision = torch.float32 if qp.linear else torch.float16
        layers = [_Layer(n, units, precision, z.device) for units in self._half.channels_and_pixels]
        (lo, hi), strides = bounds_and_strides(qp)
        kernels, offset, tile = _kernels(), 0, {"CHANNELS": CHANNELS, "PIXELS": PIXELS}
        places, leads = [], self._leads or [torch.empty(layer.here.shape, device=z.device) for layer in layers]
        for layer, lead in zip(layers, leads, strict=True):
            places.append((qp.dim, offset, *layer.units, *strides))
            begun = self._leads is not None and not qp.linear
            given, point = (z, g, lo, hi, size, *layer.box), (layer.here, layer.ahead, lead)
            kernels.enter[layer.tiles](*given, *point, *places[-1], FARTHEST, LEADS=begun, **tile)
            offset += layer.width
        if qp.linear:
            sweeps = -(-sweeps // 3)  # conjugate gradients need a third of the steps
            self._solve_equations(layers, leads, size.float(), sweeps)
        else:
            self._relax(layers, n, sweeps)
        for layer, lead, place in zip(layers, leads, places, strict=True):
            moved = (layer.here, layer.down, layer.up, layer.ahead, lead)
            kernels.leave[layer.tiles](z, lo, hi, size, *moved, *place, IS_DIRECTION=qp.linear, **tile)
        self._residual, self._leads = None, leads
        return torch.full((n,), sweeps, dtype=torch.int64, device=z.device)

    def _relax(self, layers: list[_Layer], n: int, sweeps: int) -> None:
        """Take steps with momentum."""
        parts = sum(layer.parts for layer in layers)
        sums = self._t.new_zeros((sweeps + 1, n, parts))
        t = self._t.new_empty((sweeps + 1, n))
        t[0] = self._t
        for k in range(sweeps):
            first = 0
            for i, (layer, product) in enumerate(zip(layers, self._products(layers), strict=True)):
                state = (self._steps[i], self._scale, self._most, t, sums)
                counts = (n, layer.width, self._half.identity[i], k, first, parts, FARTHEST)
                shape = {"PARTS": 1 << (parts - 1).bit_length(), "WIDTH": WIDTH}
                _kernels().relax[n, layer.parts](product, *layer.point, *layer.box, *state, *counts, **shape)
                first += layer.parts
        self._t = t[sweeps]

    def _solve_equations(self, layers: list[_Layer], leads: list[Tensor], size: Tensor, sweeps: int) -> None:
        """Conjugate gradients, preconditioned by the layers' scales; ``ahead`` is the direction, kept from call to call.

        Directions are numbers in half precision, so that products belong to the very directions that are followed.
        """
        n, parts, kernels = len(size), sum(layer.parts for layer in layers), _kernels()
        shape = {"PARTS": 1 << (parts - 1).bit_length(), "WIDTH": WIDTH}
        curved, along, before, now = (size.new_empty((n, parts)) for _ in range(4))
        firsts, lefts, frees = [0], [], []
        for i, layer in enumerate(layers):
            lefts.append(torch.empty_like(leads[i]))
            frees.append(torch.empty(layer.here.shape, dtype=torch.int8, device=size.device))
            start = (*layer.box, self._steps[i], self._scale, leads[i], size)
            begun = (lefts[i], frees[i], layer.ahead, before)
            scope = (layer.width, firsts[i], parts, FARTHEST)
            kernels.aim[n, layer.parts](*start, *begun, *scope, LEADS=self._leads is not None, WIDTH=WIDTH)
            firsts.append(firsts[-1] + layer.parts)
        for _ in range(sweeps):
            products = self._products(layers)
            given = [(product, layer.ahead, left) for product, layer, left in zip(products, layers, lefts, strict=True)]
            for i, layer in enumerate(layers):
                counts = (layer.width, self._half.identity[i], firsts[i], parts)
                kernels.curve[n, layer.parts](*given[i], self._scale, curved, along, *counts, WIDTH=WIDTH)
            for i, layer in enumerate(layers):
                counts = (layer.width, self._half.identity[i], firsts[i], parts)
                state = (layer.here, frees[i], self._steps[i], self._scale, curved, along, now)
                kernels.descend[n, layer.parts](*given[i], *state, *counts, **shape)
            for i, layer in enumerate(layers):
                arrays = (layer.ahead, lefts[i], self._steps[i], self._scale, before, now)
                kernels.turn[n, layer.parts](*arrays, layer.width, parts, FARTHEST, **shape)
            before, now = now, before

    def _products(self, layers: list[_Layer]) -> list[Tensor]:
        images = [layer.ahead.view(-1, *shape) for layer, shape in zip(layers, self._half.shapes, strict=True)]
        return [product.contiguous() for product in self._half.products(images)]

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the same as :func:`lrrn.solvers.base.recompute`, with the products and one kernel."""
        g = qp.hessian.matmul(z)
        self._residual = self._judged(qp, z, g, True)
        return g, self._residual

    def _judged(self, qp: BoxQP, z: Tensor, g: Tensor, is_product: bool) -> Tensor:
        """Return the KKT residual at a gradient, or at a product from which q is yet to be subtracted, in place."""
        parts = -(-qp.dim // WIDTH)
        sums = torch.empty((len(z), parts), dtype=torch.float64, device=z.device)
        (lo, hi), strides = bounds_and_strides(qp)
        given, counts = (z, qp.q.contiguous(), lo, hi, g, sums), (qp.dim, *strides, parts)
        _kernels().judge[len(z), parts](*given, *counts, IS_PRODUCT=is_product, WIDTH=WIDTH)
        return sums.sum(-1).sqrt()

    def keep(self, rows: Tensor) -> None:
        """Drop the state of other samples."""
        self._t = self._t[rows]
        if self._residual is not None:
            self._residual = self._residual[rows]
        if self._leads is not None:
            self._leads = [lead[rows] for lead in self._leads]


@final
class _Layer:
    """Arrays of one layer of unknowns, with channels last, in units of the residual."""

    def __init__(self, n: int, units: tuple[int, int], precision: torch.dtype, device: torch.device) -> None:
        channels, pixels = self.units = units
        width = self.width = channels * pixels
        self.parts = -(-width // WIDTH)
        self.tiles = (n, -(-channels // CHANNELS), -(-pixels // PIXELS))
        self.push, self.here = (torch.empty((n, width), dtype=precision, device=device) for _ in range(2))
        self.down, self.up, self.ahead = (torch.empty((n, width), dtype=torch.float16, device=device) for _ in range(3))

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
