"""A table, its labels, and a small classifier of them to be saved."""

from __future__ import annotations

import math

import numpy as np

from lrrn import LRRNClassifier

INF = math.inf
QUICK = dict(hidden_sizes=(6, 5), epochs=2, device="cpu", random_state=3)


def table(n: int = 40, d: int = 4) -> np.ndarray:
    return np.random.default_rng(0).normal(loc=3.0, scale=2.0, size=(n, d))


def labels(n: int = 40) -> np.ndarray:
    return np.arange(n) % 3


def classifier(y=None, X=None, **options) -> LRRNClassifier:
    X, y = table() if X is None else X, labels() if y is None else y
    return LRRNClassifier(**{**QUICK, "objective": "cross_entropy", **options}).fit(X, y)
