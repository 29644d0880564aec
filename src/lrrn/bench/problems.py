"""What is solved: free phases of networks, as box QPs with one Hessian and many right-hand sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lrrn.network import LRRN
from lrrn.qp import BoxQP
from lrrn.solvers import solve


@final
@dataclass(frozen=True)
class Problem:
    """A batch of QPs with its float64 reference solution.

    Parameters
    ----------
    name : str
        For tables.
    qp : BoxQP
        The problems, in the dtype of the benchmark.
    reference : float64 Tensor of shape (n, dim)
        Solution by Newton's method to a relative residual of 1e-12.
    """

    name: str
    qp: BoxQP
    reference: Tensor

    def error(self, z: Tensor) -> float:
        """Largest deviation of any unit of any sample from the reference: the neutral score of every contender."""
        return float((z.to(torch.float64) - self.reference).abs().max())


def random_network(sizes: Sequence[int], seed: int, dtype: torch.dtype, beta: float | Sequence[float] = 1.0) -> LRRN:
    """Return a Glorot-initialised network with small random biases."""
    generator = torch.Generator().manual_seed(seed)
    net = LRRN(sizes, beta=beta, generator=generator, dtype=dtype)
    with torch.no_grad():
        for bias in (*net.b, *net.c):
            bias.copy_(0.1 * torch.randn(bias.shape, generator=generator, dtype=torch.float64))
    return net


def images(n: int, width: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return rows like flattened grey images: in [0, 1], four fifths of them zero, as in MNIST."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, width, generator=generator, dtype=torch.float64)
    return (x * (torch.rand(n, width, generator=generator) < 0.2)).to(dtype)


def free_phase(sizes: Sequence[int], n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Problem:
    """Return the free phase of a random network on ``n`` random images."""
    net = random_network(sizes, seed, torch.float64)
    x = images(n, sizes[0], seed + 1, torch.float64)
    exact = net.energy_snapshot(torch.float64).free(x)
    reference = solve(exact, tol=1e-12).z
    qp = net.energy_snapshot(dtype).free(x.to(dtype))
    return Problem("-".join(map(str, sizes)), qp, reference)
