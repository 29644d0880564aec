"""Convolutional networks and their dense twins: the same map, with matrices read off from torch's convolutions."""

from __future__ import annotations

import torch
from torch.nn import functional

import lrrn
from lrrn.linalg.layer_shape import LayerShape
from lrrn.network import layers as architectures

GEOMETRIES = [
    # in_shape, channels, kernel, stride, padding, pool
    ((1, 8, 8), 3, 3, 1, 0, 1),
    ((2, 9, 7), 3, 4, 3, 1, 1),
    ((3, 8, 8), 2, 5, 2, 2, 1),
    ((1, 5, 5), 2, 5, 1, 0, 1),
    ((2, 7, 7), 2, 2, 3, 0, 1),
    ((2, 6, 5), 4, 1, 1, 0, 1),
    ((2, 9, 8), 3, 3, 2, 1, 2),
    ((8, 6, 5), 2, 3, 2, 1, 1),
]
"""Odd sizes, strides that do not divide, padding, one or eight channels, kernels as large as the image or a pixel, pooling."""

ARCHITECTURES = {
    "one": (((2, 7, 6), lrrn.Conv(4, 3, 2, 1), 5), {}),
    "pooled": (((1, 8, 8), lrrn.Conv(3, 3, pool=2), 4), {}),
    "two": (((1, 8, 8), lrrn.Conv(3, 3, 1, 1, pool=2), lrrn.Conv(5, 2), 4), {"gamma": 0.5}),
    "then dense": (((1, 8, 8), lrrn.Conv(3, 4, 2, pool=2), 6, 4), {"gamma": 0.5, "beta": (1, 0.5, 1)}),
    "bounded": (((1, 6, 6), lrrn.Conv(3, 3), 4), {"beta": (0.7, 0.3), "constraint": "box", "output_constraint": "box"}),
    "no biases": (((1, 6, 6), lrrn.Conv(3, 3), 4), {"bias": False, "reconstruction_bias": False}),
    "beta 0": (((1, 6, 6), lrrn.Conv(3, 3), lrrn.Conv(2, 2), 3), {"beta": (1, 0, 0)}),
    "energy": (((1, 6, 6), lrrn.Conv(3, 3), lrrn.Conv(2, 2)), {"beta": (1, 1), "output_constraint": "nonneg"}),
}
"""Sizes and other arguments of small networks with convolutions."""


def layer_shape(in_shape, channels, kernel, stride, padding, pool) -> LayerShape:
    """Return the shape of a convolution as ``lrrn.Conv`` would make it, after pooling of its input."""
    sides = [(side // pool + 2 * padding - kernel) // stride + 1 for side in in_shape[1:]]
    return LayerShape(in_shape, (channels, *sides), (channels, in_shape[0], kernel, kernel), stride, padding, pool)


def matrix_of(layer: LayerShape, weight: torch.Tensor) -> torch.Tensor:
    """Return the matrix of a layer by torch's own functions, applied to every unit vector."""
    x = torch.eye(layer.columns, dtype=weight.dtype)
    if layer.pool > 1:
        images = x.reshape(-1, *layer.in_shape)
        x = (functional.avg_pool2d(images, layer.pool) * layer.pool).flatten(1)
    if not layer.convolves:
        return (x @ weight.mT).mT
    channels, height, width = layer.in_shape
    images = x.reshape(-1, channels, height // layer.pool, width // layer.pool)
    return functional.conv2d(images, weight, stride=layer.stride, padding=layer.padding).flatten(1).mT


def network(name: str, monkeypatch, unfolded: bool = False, dtype: torch.dtype = torch.float64, scale: float = 2.0):
    """Return a network with random biases, computed without matrices unless ``unfolded``."""
    sizes, arguments = ARCHITECTURES[name]
    monkeypatch.setattr(architectures, "UNFOLDED_UNITS", 10**6 if unfolded else -1)
    net = lrrn.LRRN(sizes, generator=torch.Generator().manual_seed(1), dtype=dtype, **arguments)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() == 1:
                p.copy_(0.2 * torch.randn(p.shape, generator=generator))
            else:
                p.mul_(scale)
    return net


def dense_twin(net: lrrn.LRRN) -> lrrn.LRRN:
    """Return a dense network that is the same map; its gradients are those of a network whose weights are not shared."""
    twin = lrrn.LRRN(
        net.sizes, net.beta, net.gamma, list(net.intervals[:-1]), net.intervals[-1], net.b[0] is not None,
        net.c[0] is not None, dtype=net.W[0].dtype,
    )  # fmt: skip
    with torch.no_grad():
        for k, layer in enumerate(net.layers):
            twin.W[k].copy_(matrix_of(layer, net.W[k].detach()))
            for mine, theirs in ((twin.b, net.b), (twin.c, net.c)):
                if theirs[k] is not None:
                    mine[k].copy_(theirs[k].repeat_interleave(len(mine[k]) // len(theirs[k])))
    return twin


def images(net: lrrn.LRRN, n: int, seed: int = 0) -> torch.Tensor:
    """Return random images of a network's shape."""
    return torch.rand((n, *net.image_shape), generator=torch.Generator().manual_seed(seed), dtype=net.W[0].dtype)
