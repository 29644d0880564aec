"""Training of each baseline. Packages of the extra ``bench`` are imported lazily, and only to train."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lrrn.network import Conv
from lrrn.studies.record.baselines.model import Baseline
from lrrn.studies.record.baselines.prototypes import NearestPrototypes
from lrrn.studies.record.baselines.sorting import Geometry, SortNetwork
from lrrn.studies.record.baselines.training import Plan, seeded, train

Array = NDArray[Any]
Learn = Callable[[Array, Array, Mapping[str, Any], int, str, Path | None], Baseline]
"""Maps samples, class indices, a recipe, a seed, a device and a folder for checkpoints to a trained baseline."""


@final
@dataclass(frozen=True)
class Learner:
    """An untrained baseline.

    Attributes
    ----------
    title : str
    learn : callable
    needs : str or None
        Module that training imports.
    package : str
        Package to install for it.
    random : bool
        Whether the result depends on the seed.
    keeps : bool
        Whether to save the trained model. The nearest neighbour classifier is not saved: it consists of its training data.
    """

    title: str
    learn: Learn
    needs: str | None = None
    package: str = ""
    random: bool = True
    keeps: bool = True

    def obstacle(self) -> str | None:
        """Return why it cannot be trained on this machine, or None."""
        if self.needs is None or _installed(self.needs):
            return None
        return f"{self.package} is not installed here; make .venv-bench/.bench installs it"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # raised if the parent package is missing
        return False


def _logistic(X: Array, y: Array, recipe: Mapping[str, Any], seed: int, device: str, folder: Path | None) -> Baseline:
    """Fit multinomial logistic regression: scores are linear, so the pairwise radius is the distance to the boundary."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the recipe limits the number of steps
        model = LogisticRegression(**recipe).fit(X, y)
    return SortNetwork([torch.from_numpy(model.coef_)], [torch.from_numpy(model.intercept_)])


def _nearest(X: Array, y: Array, recipe: Mapping[str, Any], seed: int, device: str, folder: Path | None) -> Baseline:
    return NearestPrototypes(torch.from_numpy(X), torch.from_numpy(y))


def _prototypes(X: Array, y: Array, recipe: Mapping[str, Any], seed: int, device: str, folder: Path | None) -> Baseline:
    """Train prototypes, initialised at random samples, to maximise their radius up to a margin (Voracek and Hein, 2022)."""
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
    """Differentiable bisector certificate of float32 prototypes; only the best candidates of the true class are evaluated."""

    def __init__(self, points: Tensor, labels: Tensor, margin: float, paired: int) -> None:
        super().__init__()
        self.points = nn.Parameter(points)
        self.labels = labels
        self.margin, self.paired = margin, paired

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        """Return the mean hinge loss, margin minus radius; a misclassified sample has a negative radius."""
        own, other = self._decisive(x, label)
        lead = (x - self.points[other]).square().sum(-1) - (x - self.points[own]).square().sum(-1)
        radius = lead / (2 * (self.points[own] - self.points[other]).norm(dim=-1).clamp(min=1e-12))
        return (self.margin - radius).clamp(min=0.0).mean()

    @torch.no_grad()
    def _decisive(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for each sample, the prototype of its class with the largest radius and the other prototype limiting it."""
        points = self.points
        sizes = points.square().sum(-1)
        squares = sizes - 2 * (x @ points.mT)  # squared distances minus |x|^2
        apart = (sizes[:, None] + sizes - 2 * (points @ points.mT)).clamp(min=1e-12).sqrt()
        same = self.labels == label[:, None]
        outside = squares.masked_fill(same, math.inf)
        least, nearest = outside.min(1)
        # upper bound on the radius of each prototype: its bisector with the nearest prototype of another class
        hope = ((least[:, None] - squares) / apart[:, nearest].mT).masked_fill(~same, -math.inf)
        own = hope.topk(min(self.paired, hope.shape[1]), dim=1).indices  # (n, paired)
        lead = outside[:, None] - squares.gather(1, own)[..., None]  # (n, paired, m)
        radius, other = (lead / apart[own]).masked_fill(same[:, None], math.inf).min(-1)
        # if the class has fewer than ``paired`` prototypes, the rest belong to other classes and are ignored
        radius = radius.masked_fill(~same.gather(1, own), -math.inf)
        best = radius.argmax(1, keepdim=True)
        return own.gather(1, best)[:, 0], other.gather(1, best)[:, 0]


def _torchlip(X: Array, y: Array, recipe: Mapping[str, Any], seed: int, device: str, folder: Path | None) -> Baseline:
    """Train an MLP of deel-torchlip: unit spectral norms by Bjorck's iteration, GroupSort2, output weights of norm one each."""
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


def _orthogonium_conv(X: Array, y: Array, recipe: Mapping[str, Any], seed: int, device: str, folder: Path | None) -> Baseline:
    """Train a ConvNet of orthogonium: adaptive orthogonal convolutions with zero padding, MaxMin, and the loss of the MLP."""
    from orthogonium.layers import AdaptiveOrthoConv2d, MaxMin, OrthoLinear
    from orthogonium.losses import LossXent

    options = dict(recipe)
    hidden, loss_options, shape = options.pop("hidden_sizes"), options.pop("loss_options"), options["image_shape"]
    convolutions = [layer for layer in hidden if isinstance(layer, Conv)]
    dense = hidden[len(convolutions) :]
    if (
        not convolutions
        or any(isinstance(layer, Conv) or layer < 1 for layer in dense)
        or any(c.pool > 1 for c in convolutions)
    ):
        raise ValueError(f"hidden_sizes should be convolutions without pooling, then widths; got {hidden}")
    places = _places(convolutions, shape)

    def make() -> nn.Module:
        layers: list[nn.Module] = [nn.Unflatten(1, shape)]
        for conv, place in zip(convolutions, places, strict=False):
            size = {"kernel_size": conv.kernel, "stride": conv.stride, "padding": conv.padding, "padding_mode": "zeros"}
            layers += [AdaptiveOrthoConv2d(place.in_shape[0], conv.channels, **size), MaxMin()]
        sizes = (math.prod(places[-1].in_shape), *dense)
        layers += [nn.Flatten(), *(part for pair in pairwise(sizes) for part in (OrthoLinear(*pair), MaxMin()))]
        return nn.Sequential(*layers, OrthoLinear(sizes[-1], int(y.max()) + 1))

    model = seeded(make, seed).to(device)
    criterion = LossXent(int(y.max()) + 1, **loss_options)
    data = torch.from_numpy(X).to(device), torch.from_numpy(y).to(device)
    train(model, lambda x, label: criterion(model(x), label), *data, Plan(**options), seed, folder)
    return _exported(model, places[:-1])


def _places(convolutions: Sequence[Conv], shape: tuple[int, int, int]) -> list[Geometry]:
    """Return where each convolution is applied, and what is left of the images behind the last."""
    places = []
    for conv in convolutions:
        places.append(Geometry(shape, conv.stride, conv.padding))
        sides = [(side + 2 * conv.padding - conv.kernel) // conv.stride + 1 for side in shape[1:]]
        shape = (conv.channels, sides[0], sides[1])
    return [*places, Geometry(shape, 1, 0)]


def _exported(model: nn.Module, places: Sequence[Geometry]) -> SortNetwork:
    """Orthogonalise once more, on the CPU: on a GPU, the library composes kernels by convolutions in TF32."""
    model = model.to("cpu")
    layers: list[Any] = [part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        return SortNetwork([part.weight for part in layers], [part.bias for part in layers], "max_min", places)


def _chain(X: Array, y: Array, hidden: tuple[int, ...], layer: Any, sort: Any, last: Any) -> nn.Module:
    sizes = (X.shape[1], *hidden)
    layers = [part for below, above in pairwise(sizes) for part in (layer(below, above), sort())]
    return nn.Sequential(*layers, last(sizes[-1], int(y.max()) + 1))


def _fitted(
    model: nn.Module, loss: Any, X: Array, y: Array, plan: Plan, seed: int, device: str, folder: Path | None, sort: str
) -> Baseline:
    """Train, then export the effective weights, which the certificates are about."""
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
    "orthogonium_conv": Learner("orthogonium ConvNet", _orthogonium_conv, "orthogonium", "orthogonium"),
}
"""Learners by the name used in recipes and rows."""
