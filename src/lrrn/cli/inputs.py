"""What commands read: devices, numbers, shapes, data and saved models, checked before any work begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from lrrn.cli.options import Kind

if TYPE_CHECKING:
    from lrrn.datasets.rows import Rows
    from lrrn.estimators import LRRNClassifier
    from lrrn.reports.evaluation import Model

T = TypeVar("T")


def device_name(name: str) -> str:
    """Return the name of a device that exists here; "auto" is replaced by what it stands for."""
    from lrrn.runtime.devices import choose_device

    try:
        return str(choose_device(name))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def numbers(text: str, kind: Callable[[str], T], option: str) -> tuple[T, ...]:
    """Return the numbers of a text that separates them by commas."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} should be numbers separated by commas; got {text!r}") from None


def perturbation_sizes(eps: str | None) -> tuple[float, ...] | None:
    """Return the sizes that --eps names."""
    sizes = None if eps is None else numbers(eps, float, "--eps")
    if sizes is not None and not all(size >= 0 for size in sizes):
        raise typer.BadParameter(f"--eps needs sizes of at least 0; got {eps}")
    return sizes


def height_and_width(image: str) -> tuple[int, int]:
    """Return the shape that --image names."""
    height, _, width = image.partition("x")
    digits = height.isdecimal() and width.isdecimal() and len(image) < 20
    if not (digits and int(height) * int(width) > 0):
        raise typer.BadParameter(f"--image should be HEIGHTxWIDTH, such as 28x28; got {image!r}")
    return int(height), int(width)


def image_shape(data: str, image: str | None, n_features: int) -> tuple[int, int] | None:
    """Return the shape of samples that are images: the one given, or a square for a named data set."""
    from lrrn import datasets

    if image is None:
        side = round(n_features**0.5)
        return (side, side) if data in datasets.NAMES else None
    shape = height_and_width(image)
    if shape[0] * shape[1] != n_features:
        raise typer.BadParameter(f"--image should be HEIGHTxWIDTH with {n_features} pixels in all; got {image!r}")
    return shape


def open_data(data: str, split: str, root: Path | None, target: str | None) -> Rows:
    """Open a named data set or a file."""
    from lrrn import datasets
    from lrrn.datasets.rows import ArrayRows

    if data in datasets.NAMES:
        return ArrayRows(*datasets.load(data, split, root), data)
    if Path(data).suffix not in datasets.TABLES:
        kinds = f"{', '.join(datasets.TABLES[:-1])} or {datasets.TABLES[-1]}"
        raise typer.BadParameter(f"unknown data {data!r}; use one of {', '.join(datasets.NAMES)}, or a {kinds} file")
    return datasets.open_table(data, target)


def train_and_test(
    data: str, root: Path | None, target: str | None, share: float, seed: int, kind: Kind
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return what to train on and what to hold out: the test split of a named data set, a random share of a file."""
    import numpy as np
    from sklearn.model_selection import train_test_split

    from lrrn import datasets

    if data in datasets.NAMES:
        return datasets.load(data, "train", root), datasets.load(data, "test", root)
    X, y = open_data(data, "train", root, target).everything()
    if y is None and kind is not Kind.energy:
        raise datasets.DataError(f"{data} has no targets, which a {kind} needs; --model energy learns without")
    strata = None
    if kind is Kind.classifier and y is not None and np.unique(y, return_counts=True)[1].min() > 1:
        strata = y
    train, held = train_test_split(np.arange(len(X)), test_size=share, stratify=strata, random_state=seed)
    return (X[train], None if y is None else y[train]), (X[held], None if y is None else y[held])


def load_fitted(path: Path, data: str, split: str, root: Path | None, target: str | None, device: str) -> tuple[Model, Rows]:
    """Load a fitted estimator and open data that fit it."""
    from lrrn.network import LRRN
    from lrrn.persistence.serialization import load

    fitted = load(path, device=device_name(device))
    if isinstance(fitted, LRRN):
        raise typer.BadParameter(f"{path} holds a bare network; save a fitted estimator to evaluate it")
    if not hasattr(fitted, "network_"):
        raise typer.BadParameter(f"{path} holds a Pipeline; use lrrn.certify_pipeline in Python, or save its last step alone")
    rows = open_data(data, split, root, target)
    if rows.n_features != fitted.n_features_in_:
        raise typer.BadParameter(f"{data} has {rows.n_features} features and {path} was trained on {fitted.n_features_in_}")
    return fitted, rows


def load_classifier(
    path: Path, data: str, split: str, root: Path | None, target: str | None, device: str, limit: int | None
) -> tuple[LRRNClassifier, Rows]:
    """Load a classifier and open the first labelled samples of some data."""
    from lrrn.estimators import LRRNClassifier

    fitted, rows = load_fitted(path, data, split, root, target, device)
    if not isinstance(fitted, LRRNClassifier):
        raise typer.BadParameter(f"{path} holds a {type(fitted).__name__}; only a classifier has labels to certify or attack")
    if not rows.has_targets:
        raise typer.BadParameter(f"{data} has no labels to compare predictions with")
    return fitted, rows.first(limit)
