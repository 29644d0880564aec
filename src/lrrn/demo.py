"""A first job: train a lifted network on handwritten digits through its implicit gradient."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from lrrn.network import LRRN
from lrrn.solvers import SOLVERS
from lrrn.threads import blas_threads


@final
@dataclass(frozen=True)
class DemoResult:
    """What the demo measured.

    Attributes
    ----------
    train_accuracy, test_accuracy : float
        Shares of digits classified correctly.
    lipschitz : float
        The paper's bound on the Lipschitz constant of the prediction.
    largest_residual, largest_error_bound : float
        Over the test digits: relative KKT residual, and proven distance from the exact activations.
    train_seconds : float
        Time for all epochs.
    solver_seconds : dict of str to float
        Time to infer all test digits, by solver.
    """

    train_accuracy: float
    test_accuracy: float
    lipschitz: float
    largest_residual: float
    largest_error_bound: float
    train_seconds: float
    solver_seconds: dict[str, float]


def run(seed: int = 0, device: str = "cpu", epochs: int = 20) -> DemoResult:
    """Train on scikit-learn's digits and report.

    Parameters
    ----------
    seed : int, default=0
        Seeds the split, the initial weights and the order of the batches.
    device : str, default="cpu"
        Where to train.
    epochs : int, default=20
        Passes over the training digits.

    Returns
    -------
    DemoResult
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    features, labels = load_digits(return_X_y=True)
    split = train_test_split(features / 16, labels, test_size=0.25, stratify=labels, random_state=seed)
    x, x_test = (torch.as_tensor(a, dtype=torch.float32, device=device) for a in split[:2])
    y, y_test = (torch.as_tensor(a, device=device) for a in split[2:])
    generator = torch.Generator().manual_seed(seed)
    net = LRRN((64, 64, 64, 10), generator=generator, device=device)
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    with blas_threads(1):
        start = time.perf_counter()
        for _ in range(epochs):
            for batch in torch.randperm(len(x), generator=generator).to(device).split(64):
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
                optimiser.step()
        train_seconds = time.perf_counter() - start
        solver_seconds = {}
        for name in SOLVERS:
            if name == "reference":
                continue
            qp = net.energy_snapshot(torch.float32).free(x_test)
            if SOLVERS[name].obstacle(qp) is None:
                net.infer(x_test, solver=name)
                start = time.perf_counter()
                net.infer(x_test, solver=name)
                solver_seconds[name] = time.perf_counter() - start
        trained, solution = net.infer(x), net.infer(x_test)
        return DemoResult(
            train_accuracy=float((trained.output.argmax(-1) == y).double().mean()),
            test_accuracy=float((solution.output.argmax(-1) == y_test).double().mean()),
            lipschitz=net.lipschitz("paper").value,
            largest_residual=float((solution.residual / net.energy_snapshot(torch.float32).free(x_test).scale).max()),
            largest_error_bound=float(solution.error_bound.max()),
            train_seconds=train_seconds,
            solver_seconds=solver_seconds,
        )
