"""The main job in small: two classifiers and an energy model on scikit-learn's handwritten digits."""

from __future__ import annotations

import time
from typing import Any

from lrrn import datasets
from lrrn.estimators import LRRNClassifier, LRRNEnergyModel
from lrrn.reports.evaluation import Evaluation, evaluate

IMAGE_SHAPE = (8, 8)


def run(seed: int = 0, device: str = "auto", verbose: bool = False) -> list[Evaluation]:
    """Train by the paper's contrastive learning, by the margin loss, and without labels; evaluate on the held-out quarter.

    Parameters
    ----------
    seed : int, default=0
        Of the initial weights and the order of the batches.
    device : {"auto", "cpu", "cuda"}, default="auto"
    verbose : bool, default=False
        Show progress on a terminal.

    Returns
    -------
    list of Evaluation
    """
    X, y = datasets.load("digits", "train")
    X_test, y_test = datasets.load("digits", "test")
    common: dict[str, Any] = {"random_state": seed, "device": device, "verbose": int(verbose)}
    models: dict[str, LRRNClassifier | LRRNEnergyModel] = {
        "contrastive": LRRNClassifier(objective="contrastive", **common),
        "margin": LRRNClassifier(objective="margin", **common),
        "energy model": LRRNEnergyModel(**common),
    }
    results = []
    for name, model in models.items():
        start = time.perf_counter()
        model.fit(X, y)  # the energy model takes no notice of y
        seconds = time.perf_counter() - start
        results.append(evaluate(name, model, X_test, y_test, None, IMAGE_SHAPE, X, seconds, seed))
    return results
