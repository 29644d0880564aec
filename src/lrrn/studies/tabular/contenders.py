"""Models of the study of tables, all with their own defaults, and what is measured of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SIZES = (0.25, 0.5)
"""Perturbations, in units of standard deviations."""
CERTIFIED_ROWS = 250
"""The most rows of a fold that are certified."""
INTERVAL_SIZE = 0.5


def classifiers() -> dict[str, Callable[[], Any]]:
    """Return what makes each classifier."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
    from sklearn.neural_network import MLPClassifier
    from sklearn.svm import SVC

    from lrrn import LRRNClassifier

    ours = {"lrrn": None, **{f"lrrn, eps={size}": size for size in SIZES}}
    return {
        **{name: partial(LRRNClassifier, eps=size, random_state=0, device="cpu") for name, size in ours.items()},
        "logistic regression": lambda: LogisticRegression(max_iter=1000),
        "logistic regression, C by CV": lambda: LogisticRegressionCV(Cs=np.logspace(-3, 3, 7), cv=5, max_iter=300),
        "MLP": lambda: MLPClassifier(random_state=0),
        "SVC": lambda: SVC(random_state=0),
        "gradient boosting": lambda: HistGradientBoostingClassifier(random_state=0),
    }


def regressors() -> dict[str, Callable[[], Any]]:
    """Return what makes each regressor."""
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import Ridge
    from sklearn.neural_network import MLPRegressor

    from lrrn import LRRNRegressor

    return {
        "lrrn": lambda: LRRNRegressor(random_state=0, device="cpu"),
        f"lrrn, eps={INTERVAL_SIZE}": lambda: LRRNRegressor(eps=INTERVAL_SIZE, random_state=0, device="cpu"),
        "ridge": lambda: Ridge(alpha=1.0),
        "MLP": lambda: MLPRegressor(random_state=0),
        "gradient boosting": lambda: HistGradientBoostingRegressor(random_state=0),
    }


def linear_radii(model: Any, x: Array) -> tuple[Array, Array]:
    """Return labels of logistic regression, and exact distances from its decision boundary."""
    weight, bias = model.coef_, model.intercept_
    if len(weight) == 1:
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    scores = x @ weight.T + bias
    label = scores.argmax(axis=1)
    gap = np.take_along_axis(scores, label[:, None], axis=1) - scores
    distance = np.linalg.norm(weight[label][:, None] - weight[None], axis=2)
    others = np.arange(len(weight)) != label[:, None]
    ratio = np.divide(gap, distance, out=np.full_like(gap, math.inf), where=others & (distance > 0))
    return model.classes_[label], ratio.min(axis=1)


def scores(name: str, model: Any, x: Array, y: Array) -> dict[str, Any]:
    """Return the accuracy of a fitted classifier, and certified accuracies if it is trained for them or linear."""
    found: dict[str, Any] = {"accuracy": float(np.mean(model.predict(x) == y))}
    x, y = x[:CERTIFIED_ROWS], y[:CERTIFIED_ROWS]
    if name.startswith("logistic"):
        label, radius = linear_radii(model, x)
    elif name.startswith("lrrn, eps"):
        certificate = model.certificate(x, "shared")
        label, radius = certificate.prediction, certificate.radius
        found["hidden units"] = sum(model.network_.sizes[1:-1])
    else:
        return found
    return found | {f"certified at {size}": float(np.mean((label == y) & (radius >= size))) for size in SIZES}


def fit_of(name: str, model: Any, x: Array, y: Array) -> dict[str, Any]:
    """Return the r2 of a fitted regressor, and the mean half-width of its intervals if it has any."""
    found: dict[str, Any] = {"r2": float(model.score(x, y))}
    if name == "ridge":
        found["half-width"] = INTERVAL_SIZE * float(np.linalg.norm(model.coef_))
    elif name.startswith("lrrn"):
        lower, upper = model.predict_interval(x, INTERVAL_SIZE)
        found |= {"half-width": float(np.mean(upper - lower) / 2), "hidden units": sum(model.network_.sizes[1:-1])}
    return found
