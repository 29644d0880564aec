"""Networks with a given spectrum, and hard ones among them."""

from __future__ import annotations

import pytest
import torch

from oracles import random_network


def with_spectrum(sizes, top: float, low: float, gamma: float, **options):
    """A network whose every weight matrix has singular values from ``top`` down to ``low``."""
    net = random_network(sizes, gamma=gamma, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for w in net.W:
            rank = min(w.shape)
            u, _ = torch.linalg.qr(torch.randn(w.shape[0], rank, generator=generator, dtype=torch.float64))
            v, _ = torch.linalg.qr(torch.randn(w.shape[1], rank, generator=generator, dtype=torch.float64))
            w.copy_(u @ torch.diag(torch.logspace(*torch.tensor([top, low]).log10(), rank, dtype=torch.float64)) @ v.mT)
    return net


HARD = [
    pytest.param(((30, 24, 20, 4), 70.0, 70.0, 1 / 8, dict(beta=(1.0, 1.0, 0.0))), id="norm 70, flat"),
    pytest.param(((30, 24, 20, 4), 70.0, 0.01, 1 / 8, dict(beta=(1.0, 1.0, 0.0))), id="norm 70, spread"),
    pytest.param(((30, 24, 20, 4), 70.0, 1.0, 1.0, dict(beta=(1.0, 1.0, 1.0))), id="norm 70, gamma 1, full output"),
    pytest.param(((30, 24, 20, 12, 4), 70.0, 0.01, 1 / 8, dict(beta=0.0, output_constraint="box")), id="beta 0, box output"),
    pytest.param(((30, 24, 20, 12, 4), 70.0, 0.1, 0.01, dict(beta=(0.0, 1.0, 2.0, 0.1))), id="gamma 0.01"),
]
