"""Encoding of labels and weights of samples for the objectives of a classifier."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight

from lrrn.estimators._base import Array

UNLABELLED = -1


def encode(y: Array, classes: ArrayLike | None, semi_supervised: bool) -> tuple[Array, Array]:
    """Return the sorted classes and the class indices, -1 for unlabelled samples.

    Parameters
    ----------
    y : array of shape (n_samples,)
    classes : array of shape (n_classes,), optional
        All possible labels; those in ``y`` if not given.
    semi_supervised : bool
        Whether -1 in ``y`` means unlabelled.
    """
    check_classification_targets(y)
    if semi_supervised and not np.issubdtype(np.asarray(y).dtype, np.number):
        raise ValueError(
            f"objective 'semi_supervised' marks unlabelled samples by y = -1 and so needs numeric labels; got {y.dtype}. "
            "Encode them first, for example with sklearn.preprocessing.LabelEncoder"
        )
    known = y != UNLABELLED if semi_supervised else np.ones(len(y), dtype=bool)
    distinct = known_classes(y if classes is None else classes, semi_supervised)
    if len(distinct) < 2:
        raise ValueError(f"a classifier needs samples of at least two classes; got {len(distinct)} class")
    unknown = np.setdiff1d(y[known], distinct)
    if len(unknown):
        raise ValueError(f"y has labels that are not among classes: {unknown.tolist()}")
    label = np.full(len(y), UNLABELLED, dtype=np.int64)
    label[known] = np.searchsorted(distinct, y[known])
    return distinct, label


def known_classes(labels: ArrayLike, semi_supervised: bool) -> Array:
    """Return the sorted distinct labels, without the value that means unlabelled."""
    distinct = np.unique(np.asarray(labels))
    return distinct[distinct != UNLABELLED] if semi_supervised else distinct


def sample_weights(sample_weight: ArrayLike | None, class_weight: Any, X: Array, y: Array, label: Array) -> Array | None:
    """Combine sample and class weights, scaled to a mean of one over the samples in use; None if there are no weights."""
    if sample_weight is None and class_weight is None:
        return None
    weight: Array = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    if class_weight is not None:
        known = label != UNLABELLED
        with np.errstate(over="ignore"):  # an infinite product is refused below
            weight[known] *= compute_sample_weight(class_weight, y[known])
    return of_mean_one(weight, "sample_weight" if class_weight is None else "sample_weight or class_weight")


def of_mean_one(weight: Array, name: str) -> Array:
    """Scale weights of samples to a mean of one over those above zero; raise ValueError, which has this name, if that fails."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        total = weight.sum()
        factor = np.count_nonzero(weight) / total
    if not total > 0:
        raise ValueError(f"{name} makes the weight of every sample zero: give some a weight above 0")
    if not (np.isfinite(total) and np.isfinite(factor)):
        raise ValueError(
            f"{name} makes weights of samples up to {weight.max():.3g}, whose sum is too large or too small for float64: "
            "divide all weights by the largest one"
        )
    scaled: Array = weight * factor
    return scaled


def counted(X: Array, weight: Array | None) -> Array:
    """Return the samples whose weight is not zero."""
    return X if weight is None else X[weight > 0]
