"""How each baseline learns. Packages of the extra ``bench`` are imported when they are needed, and only to train."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lrrn.studies.record.baselines.model import Baseline
from lrrn.studies.record.baselines.prototypes import NearestPrototypes
from lrrn.studies.record.baselines.sorting import SortNetwork
from lrrn.studies.record.baselines.training import Plan, seeded, train

Array = NDArray[Any]
Learn = Callable[[Array, Array, Mapping[str, Any], int, str, Path | None], Baseline]
"""From samples, class numbers, a recipe, a seed, a device and a folder for checkpoints to what was learnt."""


@final
@dataclass(frozen=True)
class Learner:
    """A baseline before it has learnt.

    Attributes
    ----------
    title : str
    learn : callable
    needs : str or None
        Module that training imports.
    package : str
        What to install for it.
    random : bool
        Whether a seed makes a difference.
    keeps : bool
        Whether what was learnt is worth a file; the nearest neighbour is its training data.
    """

    title: str
    learn: Learn
    needs: str | None = None
    package: str = ""
    random: bool = True
    keeps: bool = True

    def obstacle(self) -> str | None:
        """Say why it cannot be trained here, if so."""
        if self.needs is None or _installed(self.needs):
            return None
        return f"{self.package} is not installed here; make .venv-bench/.bench installs it"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def _logistic(X: Array, y: Array, recipe: Mapping[str, Any], seed: int, device: str, folder: Path | None) -> Baseline:
    """Fit multinomial logistic regression: scores are linear, so the pairwise radius is the distance to a boundary."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the recipe says how many steps are enough
        model = LogisticRegression(**recipe).fit(X, y)
    return SortNetwork([torch.from_numpy(model.coef_)], [torch.from_numpy(model.intercept_)])


def _nearest(X: Array, y: Array, recipe: Mapping[str, Any], seed: int, device: str, folder: Path | None) -> Baseline:
    return NearestPrototypes(torch.from_numpy(X), torch.from_numpy(y))


def _prototypes(X: Array, y: Array, recipe: Mapping[str, Any], seed: int, device: str, folder: Path | None) -> Baseline:
    """Train prototypes that maximise their own certificate up to a margin (Voracek and Hein, 2022), from random samples."""
    options = dict(recipe)
    per_class, margin, paired = options.pop("per_class"), options.pop("margin"), options.pop("paired")
    rng = np.random.default_rng(seed)
    classes = range(int(y.max()) + 1)
    rows = np.concatenate(
        [rng.choice(np.flatnonzero(y == k), min(per_class, int((y == k).sum())), replace=False) for k in classes]
    )
    model = _Prototypes(torch.from_numpy(X[rows]).to(device), torch.from_numpy(y[rows]).to(device), margin, paired)
    x, label = torch.from_numpy(X).to(device), torch.from_numpy(y).to(device)
    train(model, model.loss, x, label, Plan(**options), seed, folder)
    return NearestPrototypes(model.points, model.labels)


@final
class _Prototypes(nn.Module):
    """The bisector certificate of float32 prototypes, differentiable; of the right class only the likeliest are looked at."""

    def __init__(self, points: Tensor, labels: Tensor, margin: float, paired: int) -> None:
        super().__init__()
        self.points = nn.Parameter(points)
        self.labels = labels
        self.margin, self.paired = margin, paired

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        """Return how much is missing to the margin, on average; a wrong label counts as a negative radius."""
        own, other = self._decisive(x, label)
        lead = (x - self.points[other]).square().sum(-1) - (x - self.points[own]).square().sum(-1)
        radius = lead / (2 * (self.points[own] - self.points[other]).norm(dim=-1).clamp(min=1e-12))
        return (self.margin - radius).clamp(min=0.0).mean()

    @torch.no_grad()
    def _decisive(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for each sample, the prototype of its class that certifies most and the one of another that limits it."""
        points = self.points
        sizes = points.square().sum(-1)
        squares = sizes - 2 * (x @ points.mT)  # up to |x|^2
        apart = (sizes[:, None] + sizes - 2 * (points @ points.mT)).clamp(min=1e-12).sqrt()
        same = self.labels == label[:, None]
        outside = squares.masked_fill(same, math.inf)
        least, nearest = outside.min(1)
        # a bound from above on what each prototype can certify: its bisector with the nearest of the others
        hope = ((least[:, None] - squares) / apart[:, nearest].mT).masked_fill(~same, -math.inf)
        own = hope.topk(min(self.paired, hope.shape[1]), dim=1).indices  # (n, paired)
        lead = outside[:, None] - squares.gather(1, own)[..., None]  # (n, paired, m)
        radius, other = (lead / apart[own]).masked_fill(same[:, None], math.inf).min(-1)
        # fewer of a class than are paired: the rest are others, and do not count
        radius = radius.masked_fill(~same.gather(1, own), -math.inf)
        best = radius.argmax(1, keepdim=True)
        return own.gather(1, best)[:, 0], other.gather(1, best)[:, 0]


def _torchlip(X: Array, y: Array, recipe: Mapping[str, Any], seed: int, device: str, folder: Path | None) -> Baseline:
    """Train an MLP of deel-torchlip: spectral norms one by Bjorck's iteration, GroupSort2, outputs of norm one each."""
    from deel import torchlip

    options = dict(recipe)
    hidden, kind, loss_options = options.pop("hidden_sizes"), options.pop("loss"), options.pop("loss_options")

    def make() -> nn.Module:
        return _chain(X, y, hidden, torchlip.SpectralLinear, torchlip.GroupSort2, torchlip.FrobeniusLinear)

    criterion = {"hkr": torchlip.HKRMulticlassLoss, "tau_cross_entropy": torchlip.TauCrossEntropyLoss}[kind](**loss_options)
    model = seeded(make, seed).to(device)
    n_classes = int(y.max()) + 1

    def loss(x: Tensor, label: Tensor) -> Tensor:
        target = nn.functional.one_hot(label, n_classes).to(x.dtype) if kind == "hkr" else label
        return criterion(model(x), target)

    return _fitted(model, loss, X, y, Plan(**options), seed, device, folder, "group_sort")


def _orthogonium(X: Array, y: Array, recipe: Mapping[str, Any], seed: int, device: str, folder: Path | None) -> Baseline:
    """Train an MLP of orthogonium: orthogonal layers, MaxMin, cross-entropy with an offset and a temperature."""
    from orthogonium.layers import MaxMin, OrthoLinear, UnitNormLinear
    from orthogonium.losses import LossXent

    options = dict(recipe)
    hidden, last, loss_options = options.pop("hidden_sizes"), options.pop("last"), options.pop("loss_options")
    output = {"orthogonal": OrthoLinear, "unit_norm": UnitNormLinear}[last]
    model = seeded(lambda: _chain(X, y, hidden, OrthoLinear, MaxMin, output), seed).to(device)
    criterion = LossXent(int(y.max()) + 1, **loss_options)

    def loss(x: Tensor, label: Tensor) -> Tensor:
        return criterion(model(x), label)

    return _fitted(model, loss, X, y, Plan(**options), seed, device, folder, "max_min")


def _chain(X: Array, y: Array, hidden: tuple[int, ...], layer: Any, sort: Any, last: Any) -> nn.Module:
    sizes = (X.shape[1], *hidden)
    layers = [part for below, above in pairwise(sizes) for part in (layer(below, above), sort())]
    return nn.Sequential(*layers, last(sizes[-1], int(y.max()) + 1))


def _fitted(
    model: nn.Module, loss: Any, X: Array, y: Array, plan: Plan, seed: int, device: str, folder: Path | None, sort: str
) -> Baseline:
    """Train, then export the weights as they are used: what certificates speak of."""
    train(model, loss, torch.from_numpy(X).to(device), torch.from_numpy(y).to(device), plan, seed, folder)
    linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
    with torch.no_grad():
        return SortNetwork([part.weight for part in linear], [part.bias for part in linear], sort)


LEARNERS: dict[str, Learner] = {
    "logistic": Learner("logistic regression", _logistic, random=False),
    "nearest": Learner("1-nearest neighbour", _nearest, random=False, keeps=False),
    "prototypes": Learner("nearest prototypes, certified training", _prototypes),
    "torchlip": Learner("deel-torchlip MLP", _torchlip, "deel.torchlip", "deel-torchlip"),
    "orthogonium": Learner("orthogonium MLP", _orthogonium, "orthogonium", "orthogonium"),
}
"""By the name that recipes and rows have."""
