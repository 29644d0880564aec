"""Sessions of the explorer with small models of the digits, and of small colour images."""

from __future__ import annotations

import numpy as np

import lrrn
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


def convolutional(**options):
    """A classifier of the digits with two convolutions, pooling between them, and a dense layer."""
    layers = (lrrn.Conv(6, kernel=3, pool=2), lrrn.Conv(5, kernel=2), 8)
    return fitted(**{"hidden_sizes": layers, "image_shape": (1, 8, 8), "epochs": 2, **options})


def colours(n=120, seed=0):
    """Colour images of 8 x 8 pixels: a square of one colour on a dark ground; the label is its strongest channel."""
    rng = np.random.default_rng(seed)
    X, y = 0.1 * rng.random((n, 3, 8, 8)), np.arange(n) % 3
    for image, label in zip(X, y, strict=True):
        top, left = rng.integers(0, 5, 2)
        image[:, top : top + 4, left : left + 4] += 0.2
        image[label, top : top + 4, left : left + 4] += 0.6
    return X.reshape(n, -1), np.array(["red", "green", "blue"])[y]


def in_colour(kind=LRRNClassifier, **options):
    """A model of colour images with two convolutions."""
    X, y = colours()
    layers = (lrrn.Conv(6, kernel=3), lrrn.Conv(4, kernel=3, stride=2))
    common = dict(hidden_sizes=layers, image_shape=(3, 8, 8), epochs=8, random_state=0, device="cpu")
    return kind(**{**common, **options}).fit(X, y)


def session_of(model, scale=1.0, keep=20, data=digits, shape=(8, 8)):
    X, y = data()
    X = scale * X
    radii = None
    if isinstance(model, LRRNClassifier):
        radii = np.where(
            model.predict(X) == y, model.certified_radius(X, *(["spectral"] if model.objective != "class_energy" else [])), 0
        )
    energies = energies_of(model, X, shape)
    return Session(model, shape, reference_of(model, X, y, shape, "digits, held out", keep, 0.9, radii, energies))
