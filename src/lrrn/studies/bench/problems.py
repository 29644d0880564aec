"""Benchmark problems: free phases of networks, as box QPs with one Hessian and many right-hand sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from lrrn import datasets
from lrrn.estimators import LRRNClassifier
from lrrn.network import LRRN
from lrrn.persistence.serialization import load
from lrrn.qp import BoxQP
from lrrn.solvers import solve
from lrrn.studies.bench.clock import Settings


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """A batch of QPs with its float64 reference solution.

    Parameters
    ----------
    name : str
        Name in tables.
    qp : BoxQP
        The problems, in the dtype of the benchmark.
    reference : float64 Tensor of shape (n, dim)
        Solution with a relative residual of 1e-12.
    spectrum : tuple of float
        Smallest and largest eigenvalue of H.
    """

    name: str
    qp: BoxQP
    reference: Tensor
    spectrum: tuple[float, float]

    @property
    def condition(self) -> float:
        """Condition number of H."""
        return self.spectrum[1] / self.spectrum[0]

    def error(self, z: Tensor) -> float:
        """Largest deviation of any unit of any sample from the reference, the error measure for all contenders."""
        worst = float((z.to(torch.float64) - self.reference).abs().max())
        return worst if worst == worst else float("inf")

    def first(self, n: int) -> Problem:
        """Return the problem of the first ``n`` samples."""
        return Problem(self.name, self.qp.take(torch.arange(n)), self.reference[:n], self.spectrum)


def random_network(sizes: Sequence[int], seed: int, dtype: torch.dtype, gamma: float = 1 / 8, scale: float = 1.0) -> LRRN:
    """Return a Glorot-initialised network with small random biases, its hidden weights multiplied by ``scale``."""
    generator = torch.Generator().manual_seed(seed)
    net = LRRN(sizes, gamma=gamma, generator=generator, dtype=dtype)
    with torch.no_grad():
        for bias in (*net.b, *net.c):
            bias.copy_(0.1 * torch.randn(bias.shape, generator=generator, dtype=torch.float64))
        for weight in list(net.W)[:-1]:
            weight.mul_(scale)
    return net


def images(n: int, width: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return rows like flattened grey images: entries in [0, 1], four fifths of them zero, as in MNIST."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, width, generator=generator, dtype=torch.float64)
    return (x * (torch.rand(n, width, generator=generator) < 0.2)).to(dtype)


def name_of(net: LRRN) -> str:
    """Return the layer widths in the form 784-64-64-10."""
    return "-".join(map(str, net.sizes))


def free_phase(net: LRRN, x: Tensor, name: str, dtype: torch.dtype = torch.float64) -> Problem:
    """Return the free phase of a network on some inputs."""
    exact = net.energy_snapshot(torch.float64).free(x.double())
    reference = solve(exact, tol=1e-12, max_sweeps=100_000).z
    eigenvalues = torch.linalg.eigvalsh(exact.matrix.dense())
    spectrum = float(eigenvalues[0]), float(eigenvalues[-1])
    return Problem(name, net.energy_snapshot(dtype).free(x.to(dtype)), reference, spectrum)


def random_phase(sizes: Sequence[int], n: int, seed: int = 0, scale: float = 1.0) -> Problem:
    """Return the free phase of a random network on ``n`` random images."""
    net = random_network(sizes, seed, torch.float64, scale=scale)
    return free_phase(net, images(n, sizes[0], seed + 1, torch.float64), name_of(net) + ("" if scale == 1 else ", ill"))


def trained(settings: Settings, n: int) -> tuple[LRRN, Tensor, str]:
    """Return a trained network, ``n`` real inputs (repeated if necessary) and a description of their source."""
    if settings.model is not None:
        model = load(settings.model)
        if not isinstance(model, LRRNClassifier):
            raise ValueError(f"{settings.model} holds a {type(model).__name__}; the benchmark takes a classifier")
        data = "mnist" if model.n_features_in_ == 784 else "digits"
        X, _ = datasets.load(data, "test", settings.root)
        name = f"{settings.model.name} on {data}"
    else:
        X, y = datasets.load("digits", "train")
        epochs = 2 if settings.quick else 30
        model, name = LRRNClassifier(epochs=epochs, random_state=settings.seed).fit(X, y), "trained on digits"
    x = model.scaling.apply(np.resize(X, (n, X.shape[1])), torch.float64, torch.device("cpu"))
    return model.network_, x, f"{name_of(model.network_)}, {name}"
