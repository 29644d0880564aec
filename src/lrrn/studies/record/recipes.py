"""Recipes of the record: hyper-parameters of each row, ours and the baselines', all chosen on a validation split.

``lrrn record DATASET --validation`` trains on the first five sixths of the training images and measures on the rest; no
figure here was chosen by looking at test images.
"""

from __future__ import annotations

from typing import Any

from lrrn.network import Conv

Recipe = dict[str, Any]

_MARGIN: Recipe = {
    "objective": "margin",
    "optimizer": "adamw",
    "schedule": "one_cycle",
    "weight_decay": 0.0,
    "init": "uniform",
}
_WIDE: Recipe = {
    **_MARGIN,
    "hidden_sizes": (2048,),
    "gamma": 1.0,
    "learning_rate": 4e-3,
    "batch_size": 256,
    "epochs": 30,
    # the tighter tolerance of predictions does not improve certified accuracy on the validation split
    "tol": 1e-3,
}
_PAPER: Recipe = {
    **_MARGIN,
    "hidden_sizes": (64, 64),
    "gamma": 1 / 8,
    "temperature": 0.25,
    "learning_rate": 2e-3,
    "decoupled_weight_decay": 0.3,
    "batch_size": 128,
    "epochs": 40,
}

OURS: dict[str, Recipe] = {
    "wide": {**_WIDE, "margin": 1.2, "temperature": 0.1, "adversarial_eps": 1.3, "decoupled_weight_decay": 0.1},
    "accurate": {**_WIDE, "margin": 1.2, "temperature": 0.15, "decoupled_weight_decay": 0.2, "shifts": 1},
    "deep": {
        **_WIDE,
        "hidden_sizes": (1024, 256),
        "epochs": 20,
        "margin": 0.4,
        "temperature": 0.15,
        "adversarial_eps": 0.5,
        "decoupled_weight_decay": 0.2,
    },
    "conv": {
        **_WIDE,
        "hidden_sizes": (Conv(256, 10, stride=3),),
        "image_shape": (1, 28, 28),
        "margin": 1.2,
        "temperature": 0.1,
        "adversarial_eps": 1.3,
        "learning_rate": 2e-3,
        "decoupled_weight_decay": 0.1,
        "max_condition": 40.0,
    },
    "paper_a": {**_PAPER, "margin": 0.7},
    "paper_b": {**_PAPER, "margin": 2.0},
}
"""Arguments of LRRNClassifier: dense for large perturbations and for small ones, with two hidden layers, convolutional, and
the paper's own network for two radii."""

_LIPSCHITZ: Recipe = {
    "hidden_sizes": (1024, 1024),
    "batch_size": 256,
    "epochs": 50,
    "learning_rate": 2e-3,
    "schedule": "one_cycle",
}

BASELINES: dict[str, Recipe] = {
    # scikit-learn's LogisticRegression
    "logistic": {"C": 1e-3, "max_iter": 500},
    "nearest": {},
    # as published for the radius 1.58 (Voracek and Hein, "Provably adversarially robust nearest prototype classifiers", 2022)
    "prototypes": {
        "per_class": 400,
        "margin": 2.5,
        "paired": 8,
        "epochs": 100,
        "batch_size": 500,
        "learning_rate": 40.0,
        "optimizer": "nesterov",
        "momentum": 0.9,
        "decay": 0.96,
        "shift_share": 0.4,
    },
    # of the library's losses, cross-entropy with a temperature was better than HKR at every perturbation size
    "torchlip": {**_LIPSCHITZ, "loss": "tau_cross_entropy", "loss_options": {"tau": 1.0}},
    # the loss of the library's robust training on CIFAR-10
    "orthogonium": {**_LIPSCHITZ, "last": "orthogonal", "loss_options": {"offset": 2.12132, "temperature": 0.25}},
    "orthogonium_conv": {
        **_LIPSCHITZ,
        "hidden_sizes": (
            Conv(64, 3, padding=1),
            Conv(128, 4, stride=2, padding=1),
            Conv(128, 3, padding=1),
            Conv(256, 4, stride=2, padding=1),
            Conv(256, 3, padding=1),
            Conv(512, 4, stride=2, padding=1),
            512,
        ),
        "image_shape": (3, 32, 32),
        "loss_options": {"offset": 0.70711, "temperature": 0.25},
        # those of our networks
        "epochs": 30,
        "shifts": 3,
        "flips": True,
    },
}
"""Arguments of the learners in lrrn.studies.record.baselines."""

_COLOUR: Recipe = {
    "image_shape": (3, 32, 32),
    "margin": 0.25,
    "temperature": 0.12,
    "adversarial_eps": 0.15,
    "shifts": 3,
    "flips": True,
}
CHANGES: dict[tuple[str, str], Recipe] = {
    ("mnist", "accurate"): {
        "margin": 0.4,
        "temperature": 0.1,
        "adversarial_eps": 0.5,
        "decoupled_weight_decay": 0.1,
        "shifts": 2,
        "epochs": 60,
    },
    ("mnist", "paper_a"): {"margin": 0.6, "temperature": 0.1, "adversarial_eps": 0.8},
    ("mnist", "paper_b"): {"margin": 1.2, "temperature": 0.1, "adversarial_eps": 1.2},
    ("mnist", "logistic"): {"C": 1.58e-4},
    ("mnist", "torchlip"): {"hidden_sizes": (1024, 1024, 1024)},
    ("mnist", "orthogonium"): {"learning_rate": 5e-3, "loss_options": {"offset": 2.82843, "temperature": 0.25}},
    ("fashion_mnist", "wide"): {"hidden_sizes": (1024,), "margin": 2.4, "temperature": 0.25, "adversarial_eps": 0.8},
    ("fashion_mnist", "accurate"): {"hidden_sizes": (1024,), "margin": 0.4, "adversarial_eps": 0.4, "shifts": 0},
    ("fashion_mnist", "logistic"): {"C": 4.64e-5},
    ("fashion_mnist", "torchlip"): {"learning_rate": 2e-3, "loss_options": {"tau": 0.5}},
    ("fashion_mnist", "orthogonium"): {"learning_rate": 2e-3, "loss_options": {"offset": 2.12132, "temperature": 0.5}},
    ("fashion_mnist", "conv"): {
        "hidden_sizes": (Conv(512, 16, stride=4),),
        "margin": 0.4,
        "temperature": 0.15,
        "adversarial_eps": 0.4,
        "flips": True,
    },
    ("cifar10", "logistic"): {"C": 1e-4},
    ("cifar10", "wide"): {**_COLOUR, "learning_rate": 1e-3, "max_condition": 100.0},
    ("cifar10", "conv"): {**_COLOUR, "hidden_sizes": (Conv(512, 8, stride=4, padding=2),)},
}
"""Changes to the recipes for single data sets, by data set and row."""

_SMALL: dict[str, Recipe] = {
    **{name: {"hidden_sizes": (16,), "epochs": 2} for name in ("wide", "accurate")},
    "deep": {"hidden_sizes": (16, 8), "epochs": 2},
    "conv": {"hidden_sizes": (Conv(4, 8, stride=4),), "epochs": 2},
    **{name: {"hidden_sizes": (8, 8), "epochs": 2} for name in ("paper_a", "paper_b")},
    "logistic": {"max_iter": 20},
    "prototypes": {"per_class": 5, "epochs": 2, "batch_size": 100, "learning_rate": 1.0},
    **{name: {"hidden_sizes": (16,), "epochs": 2} for name in ("torchlip", "orthogonium")},
    "orthogonium_conv": {"hidden_sizes": (Conv(8, 6, stride=4, padding=1), Conv(8, 3, stride=2, padding=1), 16), "epochs": 2},
}

ROWS = (*OURS, *BASELINES)
"""All rows of the record, in the order of its tables."""
_LEFT_OUT = {"mnist": ("deep", "orthogonium_conv"), "fashion_mnist": ("orthogonium_conv",)}
_USUALLY_LEFT_OUT = ("deep", "conv", "orthogonium_conv")


def rows_of(data: str) -> tuple[str, ...]:
    """Return the rows of a data set, in the order of its tables."""
    if data == "cifar10":
        return "wide", "conv", "logistic", "orthogonium_conv"
    return tuple(name for name in ROWS if name not in _LEFT_OUT.get(data, _USUALLY_LEFT_OUT))


def recipe(data: str, name: str, quick: bool = False) -> Recipe:
    """Return the hyper-parameters of a row; ``quick`` makes it small enough for a smoke test.

    Parameters
    ----------
    data : str
        Data set.
    name : str
        One of ``rows_of(data)``.
    quick : bool, default=False
    """
    if name not in rows_of(data):
        raise ValueError(f"there is no row {name!r} on {data}; use some of {', '.join(rows_of(data))}")
    common = OURS[name] if name in OURS else BASELINES[name]
    # a prefix of a data set uses the recipe of the whole data set
    changes = CHANGES.get((data.removesuffix("_7011"), name), {})
    return {**common, **changes, **(_SMALL.get(name, {}) if quick else {})}
