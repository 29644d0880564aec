"""What every certificate is given: a network and its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from lrrn.network import LRRN
from lrrn.network.checks import vectors


def check_network(net: LRRN) -> None:
    """Raise TypeError for anything but a network, in particular for an estimator."""
    if not isinstance(net, LRRN):
        hint = "; use its method certificate(X)" if hasattr(net, "certificate") else ""
        raise TypeError(f"net must be an lrrn.LRRN; got {type(net).__name__}{hint}")


def as_vectors(net: LRRN, x: Tensor) -> Tensor:
    """Return inputs as float64 vectors, images flattened; raise TypeError if they are no tensor."""
    check_network(net)
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor; got {type(x).__name__}. Use torch.as_tensor(x)")
    return vectors(x, net.image_shape).to(torch.float64)
