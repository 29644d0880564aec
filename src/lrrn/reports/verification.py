"""Verify a published record: weights and radii against their digests, and radii against fresh proofs and attacks.

There are two judgements. Integrity: the files are those that were published. Mathematics: on this machine, in float64, labels
are the same, fresh radii are not below the published ones, and no attack succeeds inside a published radius.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lrrn.estimators import LRRNClassifier
from lrrn.persistence.published import Published, read_radii
from lrrn.persistence.serialization import load
from lrrn.persistence.shipped import Shipped, check_digest
from lrrn.reports import audit
from lrrn.runtime.storage import FileFormatError

Array = NDArray[Any]
SHARE = 0.999
"""A fresh radius must be at least this share of the published one: rounding differs between machines."""
SIZES = (0.5, 1.0, 1.58)
STEPS, RESTARTS = 20, 1
"""Sizes and settings of the gradient ascents, after an attack that looks for the nearest perturbation."""
SMALL, WORK, LEAST, FEW_STEPS = 512, 2**16, 2, 5
"""Networks of more than the first number of units have the first images attacked only, as many as make the second number of
units together and at least the third, and with fewer steps: solves take long there."""


@final
@dataclass(frozen=True)
class Verification:
    """Verdict on a published record.

    Attributes
    ----------
    name, method : str
        Model, and method of the radii.
    n_images : int
        Number of images certified anew, from the first on.
    integrity, mathematics : tuple of str
        What is wrong; empty if nothing is. ``integrity`` is None if digests were ignored.
    least_share : float
        Least ratio of a fresh radius to the published one.
    differences : (float, float)
        Least and largest difference of a fresh radius and the published one.
    nearest_attack : float
        Least ratio of the distance of a fresh attack to the published radius.
    n_attacked : int
        Number of images attacked anew, from the first on: all of them, except in large networks.
    accuracy : float
        Share of these images with the right label.
    seconds : float
    """

    name: str
    method: str
    n_images: int
    integrity: tuple[str, ...] | None
    mathematics: tuple[str, ...]
    least_share: float
    differences: tuple[float, float]
    nearest_attack: float
    n_attacked: int
    accuracy: float
    seconds: float

    @property
    def stands(self) -> bool:
        """Whether nothing is wrong."""
        return not self.integrity and not self.mathematics

    def sentence(self) -> str:
        """Return the verdict in one line."""
        if not self.stands:
            return f"{self.name}: the record does not stand: {'; '.join((*(self.integrity or ()), *self.mathematics))}"
        files = "digests ignored" if self.integrity is None else "files as published"
        on = "" if self.n_attacked == self.n_images else f" on {self.n_attacked} of them"
        return (
            f"{self.name}: the record stands: {files}; {self.n_images} images, fresh radii at least {self.least_share:.4f} of "
            f"the published ones, nearest attack{on} at {self.nearest_attack:.3f} of a radius; {self.seconds:.0f} s"
        )

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {
            "name": self.name,
            "stands": self.stands,
            "integrity": None if self.integrity is None else list(self.integrity),
            "mathematics": list(self.mathematics),
            "method": self.method,
            "n_images": self.n_images,
            "least_share": self.least_share,
            "differences": list(self.differences),
            "nearest_attack": self.nearest_attack if np.isfinite(self.nearest_attack) else None,
            "n_attacked": self.n_attacked,
            "accuracy": self.accuracy,
            "seconds": self.seconds,
        }


def verify(
    model: Shipped, X: Array, y: Array, n_images: int | None = None, ignore_digests: bool = False, seed: int = 0
) -> Verification:
    """Verify the record of a shipped model on this machine, on the CPU.

    Parameters
    ----------
    model : Shipped
    X : array of shape (n, n_features)
        All test images, in their order.
    y : array of shape (n,)
        Their labels, as class numbers.
    n_images : int, optional
        Number of images to certify and attack, from the first on; all if not given.
    ignore_digests : bool, default=False
        Judge the mathematics alone.
    seed : int, default=0
        Seed of the attacks.

    Returns
    -------
    Verification

    Raises
    ------
    FileFormatError
        A file cannot be read at all.
    """
    start = time.perf_counter()
    integrity = None if ignore_digests else _integrity(model)
    try:
        fitted, published = load(model.weights_path), read_radii(model.radii_path)
    except FileFormatError as error:
        if not integrity:
            raise
        seconds = time.perf_counter() - start
        return Verification(model.name, model.method, 0, integrity, (str(error),), 0.0, (0.0, 0.0), 0.0, 0, 0.0, seconds)
    if not isinstance(fitted, LRRNClassifier):
        raise ValueError(f"{model.weights_path} holds a {type(fitted).__name__}; published radii are those of classifiers")
    n = len(X) if n_images is None else min(n_images, len(X))
    faults = [] if len(published.radius) == len(X) else [f"{len(published.radius)} images are published, not {len(X)}"]
    n = min(n, len(published.radius))
    certificate = fitted.certificate(X[:n], model.method)
    labels, radii = np.searchsorted(fitted.classes_, certificate.prediction), np.asarray(certificate.radius)
    units = sum(fitted.network_.sizes[1:-1])
    some, steps = (n, STEPS) if units <= SMALL else (min(n, max(LEAST, WORK // units)), FEW_STEPS)
    attacked = audit.attack(
        model.name, fitted, X[:some], certificate.prediction[:some], SIZES, "paper", steps=steps, restarts=RESTARTS, seed=seed
    )
    assert attacked.distances is not None
    distances = np.pad(attacked.distances, (0, n - some), constant_values=np.inf)
    faults += _contradictions(model, published, labels, np.asarray(y)[:n], radii, distances)
    claimed = published.radius[:n].astype(np.float64)
    shares, reached = (values[claimed > 0] / claimed[claimed > 0] for values in (radii, distances))
    least, nearest = (float(np.min(values, initial=np.inf)) for values in (shares, reached))
    accuracy = float((labels == np.asarray(y)[:n]).mean())
    apart = float((radii - claimed).min()), float((radii - claimed).max())
    seconds = time.perf_counter() - start
    return Verification(model.name, model.method, n, integrity, tuple(faults), least, apart, nearest, some, accuracy, seconds)


def _integrity(model: Shipped) -> tuple[str, ...]:
    """Return what is wrong with the files."""
    faults = []
    for path, expected in ((model.weights_path, model.sha256), (model.radii_path, model.radii_sha256)):
        try:
            check_digest(path, expected)
        except FileFormatError as error:
            faults.append(str(error))
    return tuple(faults)


def _contradictions(
    model: Shipped, published: Published, labels: Array, true: Array, radii: Array, distances: Array
) -> list[str]:
    """Return where fresh results contradict the published ones, or the published ones themselves or the index."""
    n = len(labels)
    claimed = published.radius.astype(np.float64)
    wrong = {
        "labels predicted here differ": labels != published.predicted[:n],
        "labels of the data set differ": true != published.true[:n],
        f"fresh radii are below {SHARE:g} of the published ones": ~(radii >= SHARE * claimed[:n]),
        "attacks succeed inside a published radius": ~(distances >= claimed[:n]),
        "published attacks are inside a published radius": published.attack < claimed,
    }
    faults = [f"{text}: {_listed(which)}" for text, which in wrong.items() if which.any()]
    for size, share in [("0", model.accuracy), *model.certified.items()]:
        found = published.certified(float(Fraction(size)))
        if not abs(found - share) <= 1e-9:
            faults.append(f"the index states {share:.2%} at size {size} and the published radii give {found:.2%}")
    return faults


def _listed(which: Array) -> str:
    """Name the first images of a selection, and how many there are."""
    rows = np.flatnonzero(which)
    return f"{len(rows)} images, {', '.join(map(str, rows[:3]))}{', ...' if len(rows) > 3 else ''}"
