"""Sessions of the explorer with small models of the digits."""

from __future__ import annotations

import numpy as np

from lrrn import LRRNClassifier, datasets
from lrrn.explore.session import Session
from lrrn.reports.evaluation import energies_of, reference_of

ROUNDED = 6e-5
"""Numbers are sent with four digits after the point."""


def digits(n=200):
    X, y = datasets.load("digits", "test")
    return X[:n].astype(np.float64), y[:n]


def fitted(**options):
    X, y = datasets.load("digits", "train")
    common = dict(hidden_sizes=(16, 12), epochs=4, random_state=0, device="cpu")
    scale = options.pop("scale", 1.0)
    return LRRNClassifier(**{**common, **options}).fit(scale * X, y)


def session_of(model, scale=1.0, keep=20):
    X, y = digits()
    X = scale * X
    radii = None
    if isinstance(model, LRRNClassifier):
        radii = np.where(
            model.predict(X) == y, model.certified_radius(X, *(["spectral"] if model.objective != "class_energy" else [])), 0
        )
    energies = energies_of(model, X, (8, 8))
    return Session(model, (8, 8), reference_of(model, X, y, (8, 8), "digits, held out", keep, 0.9, radii, energies))
