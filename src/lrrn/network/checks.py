"""Checks of what a network is given: inputs, targets and warm starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lrrn.energy.constraints import Interval
from lrrn.network.layers import ImageShape
from lrrn.network.solution import Solution
from lrrn.network.transforms import unwrapped
from lrrn.qp import BoxQP


def vectors(x: Tensor, shape: ImageShape | None) -> Tensor:
    """Flatten images of this shape, (..., channels, height, width); other inputs stay as they are."""
    if shape is None or not isinstance(x, Tensor) or x.dim() < 3 or tuple(x.shape[-3:]) != shape:
        return x
    return x.flatten(-3)


def check_input(x: Tensor, width: int, shape: ImageShape | None) -> None:
    """Raise if inputs are not finite floating-point vectors of this width."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor; got {type(x).__name__}. Use torch.as_tensor(x)")
    if not x.dtype.is_floating_point:
        raise TypeError(f"x must be floating point; got {x.dtype}. Use x.to(torch.float32), scaled as in training")
    if x.dim() != 2 or x.shape[1] != width:
        images = "" if shape is None else f" or (n_samples, {', '.join(map(str, shape))})"
        raise ValueError(f"x must have shape (n_samples, {width}){images}; got {tuple(x.shape)}")
    check_finite(x, "x")


def checked_target(y: Tensor, x: Tensor, width: int, allowed: Interval) -> Tensor:
    """Return targets in the dtype and on the device of ``x``; raise if they are not vectors in the output's interval."""
    expected = (x.shape[0], width)
    if not isinstance(y, Tensor) or tuple(y.shape) != expected:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"y must be a tensor of target vectors of shape {expected}, not of labels; got {got}")
    y = y.to(x)
    check_finite(y, "y")
    outside = ((y < allowed.lo) | (y > allowed.hi)).any(-1)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(f"row {row} of y leaves the output's constraint set {allowed}; a clamped phase needs y inside it")
    return y


def stacked(start: Solution | Sequence[Tensor] | None, qp: BoxQP) -> Tensor | None:
    """Return a warm start as stacked activations of shape (n, dim)."""
    if start is None or qp.dim == 0:
        return None
    blocks = list(start.activations if isinstance(start, Solution) else start)[: len(qp.hessian.sizes)]
    expected = [(qp.n_samples, size) for size in qp.hessian.sizes]
    if [tuple(block.shape) for block in blocks] != expected:
        raise ValueError(f"start must hold activations of shapes {expected}; got {[tuple(b.shape) for b in blocks]}")
    return torch.cat([block.to(qp.q) for block in blocks], dim=-1)


def check_finite(t: Tensor, name: str) -> None:
    """Raise ValueError if an entry is infinite or NaN."""
    if torch.compiler.is_compiling():
        return  # the operator in the graph checks its input
    t = unwrapped(t).flatten(end_dim=-2)
    if math.isfinite(float(t.detach().sum())):  # a finite sum implies finite entries, and is faster to check
        return
    finite = t.isfinite()
    if not bool(finite.all()):
        row = int((~finite.all(-1)).nonzero()[0])
        raise ValueError(f"{name} has a non-finite value (NaN or infinity), first in row {row}; clean the data first")


def same(old: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    """Whether parameters have the same values, types and devices."""
    return all(a.device == b.device and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(old, new, strict=True))
