"""Checks of what attacks and estimates are given: a network and its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lrrn.network import LRRN
from lrrn.network.checks import check_finite, check_input, vectors


def checked_inputs(net: Any, x: Any, modules: bool = True) -> Tensor:
    """Return the inputs of a network as vectors, of shape (n, d_0).

    Parameters
    ----------
    net : LRRN or nn.Module
    x : Tensor of shape (n, d_0), or images of a network that takes them
    modules : bool, default=True
        Whether modules other than an LRRN will do.

    Raises
    ------
    TypeError
        ``net`` is no network, or ``x`` no tensor, or for an estimate not of floating-point numbers.
    ValueError
        ``x`` has another shape, or a value that is not finite.
    """
    if not isinstance(net, nn.Module if modules else LRRN):
        expected = "an lrrn.LRRN or another torch module" if modules else "an lrrn.LRRN"
        hint = f"; {'attack' if modules else 'give'} its network_" if hasattr(net, "network_") else ""
        raise TypeError(f"net must be {expected}; got {type(net).__name__}{hint}")
    if modules and isinstance(x, Tensor) and not x.dtype.is_floating_point:
        x = x.to(torch.float64)  # attacks take inputs of any dtype
    if isinstance(net, LRRN):
        x = vectors(x, net.image_shape)
        check_input(x, net.sizes[0], net.image_shape)
        return x
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor; got {type(x).__name__}. Use torch.as_tensor(x)")
    if x.dim() != 2:
        raise ValueError(f"x must have shape (n_samples, n_features); got {tuple(x.shape)}")
    check_finite(x, "x")
    return x
