"""Learners of the suite ``train``: functions from data and settings to a function that trains an epoch on n samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lrrn.learning import Contrastive, Data, Margin, Settings, Trainer
from lrrn.learning.objectives import Objective
from lrrn.network import LRRN

Epoch = Callable[[int], None]
Make = Callable[[Data, tuple[int, ...], int, str, int], Epoch]
RATES = {"sgd": 0.1, "adam": 1e-3}


def _ours(objective: Objective, weight_decay: float = 0.0) -> Make:
    def make(data: Data, sizes: tuple[int, ...], batch: int, optimizer: str, seed: int) -> Epoch:
        net = LRRN(sizes, generator=torch.Generator().manual_seed(seed))
        options: dict[str, Any] = {"batch_size": batch, "epochs": 1, "weight_decay": weight_decay, "seed": seed}
        settings = Settings(optimizer=optimizer, learning_rate=RATES[optimizer], **options)

        def run(n: int) -> None:
            Trainer(net, objective, settings).fit(_first(data, n))

        return run

    return make


def _mlp_classifier(data: Data, sizes: tuple[int, ...], batch: int, optimizer: str, seed: int) -> Epoch:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    assert data.label is not None
    X, y = data.x.numpy(), data.label.numpy()
    network = MLPClassifier(sizes[1:-1], solver=optimizer, batch_size=batch, max_iter=1, warm_start=True, random_state=seed)

    def run(n: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # one epoch is intended
            network.fit(X[:n], y[:n])

    return run


def _torch_mlp(data: Data, sizes: tuple[int, ...], batch: int, optimizer: str, seed: int) -> Epoch:
    def hidden(below: int, above: int) -> list[nn.Module]:
        return [nn.Linear(below, above), nn.ReLU()]

    return _loop(data, _chain(sizes, hidden, nn.Linear), batch, optimizer, seed)


def _torchlip(data: Data, sizes: tuple[int, ...], batch: int, optimizer: str, seed: int) -> Epoch:
    from deel import torchlip

    def hidden(below: int, above: int) -> list[nn.Module]:
        return [torchlip.SpectralLinear(below, above), torchlip.GroupSort2()]

    return _loop(data, _chain(sizes, hidden, torchlip.FrobeniusLinear), batch, optimizer, seed)


def _orthogonium(data: Data, sizes: tuple[int, ...], batch: int, optimizer: str, seed: int) -> Epoch:
    from orthogonium.layers import MaxMin, OrthoLinear, UnitNormLinear

    def hidden(below: int, above: int) -> list[nn.Module]:
        return [OrthoLinear(below, above), MaxMin()]

    return _loop(data, _chain(sizes, hidden, UnitNormLinear), batch, optimizer, seed)


def _chain(
    sizes: tuple[int, ...], hidden: Callable[[int, int], list[nn.Module]], last: Callable[[int, int], nn.Module]
) -> nn.Module:
    layers = [layer for below, above in pairwise(sizes[:-1]) for layer in hidden(below, above)]
    return nn.Sequential(*layers, last(sizes[-2], sizes[-1]))


def _loop(data: Data, model: nn.Module, batch: int, optimizer: str, seed: int) -> Epoch:
    """Return the plain training loop of torch with cross entropy."""
    assert data.label is not None
    x, label = data.x, data.label
    generator = torch.Generator().manual_seed(seed)
    steps: torch.optim.Optimizer
    if optimizer == "sgd":
        steps = torch.optim.SGD(model.parameters(), lr=RATES["sgd"])
    else:
        steps = torch.optim.Adam(model.parameters(), lr=RATES["adam"])

    def run(n: int) -> None:
        model.train()
        for rows in torch.randperm(n, generator=generator).split(batch):
            loss: Tensor = nn.functional.cross_entropy(model(x[rows]), label[rows])
            steps.zero_grad()
            loss.backward()
            steps.step()

    return run


def _first(data: Data, n: int) -> Data:
    return Data(*(None if part is None else part[:n] for part in (data.x, data.target, data.label)))  # type: ignore[arg-type]


LEARNERS: tuple[tuple[str, str, tuple[str, ...], Make], ...] = (
    ("lrrn", "sgd", (), _ours(Contrastive(), 1e-4)),
    ("lrrn", "adam", (), _ours(Contrastive(), 1e-4)),
    ("lrrn, margin", "adam", (), _ours(Margin())),
    ("lrrn, margin, adversarial", "adam", (), _ours(Margin(adversarial_eps=0.3))),
    ("MLPClassifier", "sgd", (), _mlp_classifier),
    ("MLPClassifier", "adam", (), _mlp_classifier),
    ("torch MLP", "sgd", (), _torch_mlp),
    ("torch MLP", "adam", (), _torch_mlp),
    ("deel-torchlip", "sgd", ("deel.torchlip",), _torchlip),
    ("deel-torchlip", "adam", ("deel.torchlip",), _torchlip),
    ("orthogonium", "sgd", ("orthogonium",), _orthogonium),
    ("orthogonium", "adam", ("orthogonium",), _orthogonium),
)
"""Name, optimiser, required packages and factory of each learner."""
