"""Open a model: load it from a file, or train a small one. Everything stays in memory; no file is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lrrn import datasets
from lrrn.estimators import LRRNClassifier, LRRNEnergyModel
from lrrn.estimators._base import LiftedEstimator
from lrrn.explore.gallery import Gallery
from lrrn.explore.session import Explorable, Session
from lrrn.network import LRRN
from lrrn.persistence.reference import ImageShape, Reference
from lrrn.persistence.serialization import load, load_reference
from lrrn.reports.evaluation import KEPT_SAMPLES, energies_of, reference_of
from lrrn.reports.images import image_shape_of, mirrored, own_images

Array = NDArray[Any]
EPOCHS = 30
SMALLEST_SIDE = 5
"""Smallest side of features taken as a square image: four columns of a table are not a 2 x 2 image."""
MOST_SAMPLES = 2000
"""Number of samples of a named data set in a reference. More samples would delay the page."""
FEW, MORE = 12, 30
"""Number of energies to compare with where a solve takes a fraction of a second: at first, and once the page is shown."""


@final
@dataclass(frozen=True)
class Opened:
    """A session, and a function that computes a better reference for it later."""

    session: Session
    refine: Callable[[], Reference] | None = None


def open_file(path: Path, device: str, image_shape: ImageShape | None, data: Gallery | None) -> Opened:
    """Open a saved classifier or energy model.

    The shape of images is by default the model's own, that in the file, or else that of a square. ``data`` are images to choose
    from and to compare with, instead of the reference in the file.
    """
    model = load(path, device=device)
    checked = _explorable(path, model)
    reference = load_reference(path)
    n = checked.n_features_in_
    if image_shape is not None and math.prod(image_shape) != n:
        named = "x".join(map(str, image_shape))
        raise ValueError(f"images of {named} have {math.prod(image_shape)} pixels and {path} takes {n} features")
    own = own_images(checked)
    if own is not None and own[0] not in (1, 3):
        raise ValueError(f"{path} takes images of {own[0]} channels; the explorer draws grey or colour images, of 1 or 3")
    stored = None if reference is None else reference.image_shape
    shape = image_shape_of(checked, image_shape) or stored or _square(path, n)
    if data is not None:
        if data.X.shape[1] != n:
            raise ValueError(f"{data.name} has {data.X.shape[1]} features and {path} was trained on {n}")
        if data.published is not None and isinstance(checked, LRRNClassifier):
            return _published(checked, data, shape)
        opened = _compared(checked, data.X, data.y, shape, data.name, KEPT_SAMPLES)
        opened.session.gallery = data
        return opened
    return Opened(Session(checked, shape, reference))


def train_digits(seed: int, device: str, progress: Callable[[int, int], None]) -> Opened:
    """Train a small classifier on scikit-learn's digits, in memory and within seconds.

    The loss is the contrastive loss plus a small multiple of the free energy. This term costs almost no accuracy. It trains
    the energy to detect out-of-distribution inputs and the layers to reconstruct; the contrastive loss alone does neither.
    ``progress`` is called with the number of finished epochs and the total number of epochs.
    """
    X, y = datasets.load("digits", "train")

    def tell(trainer: Any, record: dict[str, Any]) -> None:
        progress(int(record["epoch"]), EPOCHS)

    progress(0, EPOCHS)
    model = LRRNClassifier(
        objective="semi_supervised",
        free_energy_weight=0.003,
        epochs=EPOCHS,
        random_state=seed,
        device=device,
        callbacks=(tell,),
    ).fit(X, y)
    X_test, y_test = datasets.load("digits", "test")
    return _compared(model, X_test, y_test, (8, 8), "digits, held out", 4 * KEPT_SAMPLES, in_distribution=X)


def _compared(
    model: Explorable,
    X: Array,
    y: Array | None,
    shape: ImageShape,
    source: str,
    keep: int,
    in_distribution: Array | None = None,
) -> Opened:
    """Compute a reference of samples with radii of a fast method; tighter radii are computed later."""
    energies = energies_of(model, X, shape, in_distribution)
    if not isinstance(model, LRRNClassifier) or y is None:
        return Opened(Session(model, shape, reference_of(model, X, y, shape, source, keep, None, None, energies)))
    classifier, right = model, np.asarray(model.predict(X) == y)

    def reference(method: str) -> Reference:
        radii = np.where(right, classifier.certified_radius(X, method), 0.0)
        return reference_of(classifier, X, y, shape, source, keep, float(np.mean(right)), radii, energies)

    if model.objective == "class_energy":
        return Opened(Session(model, shape, reference("auto")))
    return Opened(Session(model, shape, reference("spectral")), lambda: reference("auto"))


def _published(model: LRRNClassifier, data: Gallery, shape: ImageShape) -> Opened:
    """Take accuracy and radii from what was published on all images, and compute energies of the first ones."""
    known = data.published
    assert known is not None
    radii, source = np.where(known.right, known.radius, 0.0).astype(np.float64), f"{data.name}, test images"
    slow = Session(model, shape, None).slow

    def reference(n: int) -> Reference:
        X = data.X[:n]
        if slow:
            energies = {"samples": model.energy(X), "mirrored": model.energy(mirrored(X, shape))}
        else:
            energies = energies_of(model, X, shape)
        return reference_of(model, data.X, data.y, shape, source, KEPT_SAMPLES, known.certified(0), radii, energies)

    session = Session(model, shape, reference(FEW if slow else MOST_SAMPLES), data)
    return Opened(session, (lambda: reference(MORE)) if slow else None)


def _explorable(path: Path, model: LRRN | LiftedEstimator) -> Explorable:
    if isinstance(model, LRRNClassifier | LRRNEnergyModel):
        return model
    if isinstance(model, LRRN):
        raise ValueError(f"{path} holds a bare network; save a fitted classifier or energy model to explore it")
    raise ValueError(
        f"{path} holds a {type(model).__name__}, which predicts numbers from tables; the explorer shows classifiers and energy "
        "models of images. See predict_interval, or lrrn evaluate, to evaluate it"
    )


def _square(path: Path, n_features: int) -> ImageShape:
    side = math.isqrt(n_features)
    if side * side != n_features or side < SMALLEST_SIDE:
        raise ValueError(
            f"{path} takes {n_features} features, which make no square image; the explorer draws images. "
            "If they are pixels, say how many rows and columns with --image HEIGHTxWIDTH, or 3xHEIGHTxWIDTH in colour"
        )
    return side, side
