"""A small network, samples to train it on, and its weights in one vector."""

from __future__ import annotations

import torch
from torch.nn import functional

from lrrn import LRRN
from lrrn.learning import Data


def blobs(n: int = 60, d: int = 8, k: int = 3, dtype=torch.float32, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % k
    centres = 2 * torch.randn(k, d, generator=generator)
    x = centres[label] + 0.3 * torch.randn(n, d, generator=generator)
    return Data(x.to(dtype), functional.one_hot(label, k).to(dtype), label)


def small_net(seed: int = 0, dtype=torch.float32) -> LRRN:
    return LRRN((8, 7, 6, 3), generator=torch.Generator().manual_seed(seed), dtype=dtype)


def weights(net: LRRN) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])
