"""Networks of every kind that compiled passes take."""

import torch

from lrrn import LRRN

NETWORKS = {
    "paper": dict(sizes=(12, 9, 7, 3)),
    "two layers": dict(sizes=(12, 9, 3)),
    "deep, betas apart": dict(sizes=(12, 5, 6, 7, 3), beta=(0.5, 1.0, 2.0, 0.0), gamma=0.3),
    "output an unknown": dict(sizes=(12, 9, 7, 3), beta=(1.0, 0.7, 0.4), output_constraint="box"),
    "feed-forward": dict(sizes=(12, 9, 7, 3), beta=0.0),
    "first layer without reconstruction": dict(sizes=(12, 9, 3), beta=(0.0, 0.6)),
    "no biases": dict(sizes=(12, 9, 7, 3), bias=False, reconstruction_bias=False),
    "b only": dict(sizes=(12, 9, 7, 3), reconstruction_bias=False),
    "c only": dict(sizes=(12, 9, 7, 3), bias=False),
    "zero not feasible": dict(sizes=(12, 9, 7, 3), constraint=(0.2, 1.5)),
}


def network(name, dtype=torch.float64):
    net = LRRN(**NETWORKS[name], generator=torch.Generator().manual_seed(3), dtype=dtype)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=dtype))
    return net
