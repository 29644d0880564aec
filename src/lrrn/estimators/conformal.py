"""Conformal prediction: sets of labels and intervals of targets whose coverage holds for perturbed inputs too.

Split conformal prediction takes a quantile of the scores of calibration samples. The score here is a function of the exact
minimiser, so that scores are exchangeable whatever the solver does. Calibration uses bounds on the score from one side, and
prediction from the other, over all inputs that a perturbed one may have come from. docs/theory/radii.md has the proof.
"""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, column_or_1d
from torch import Tensor

from lrrn.certificates.class_energies import energy_margins
from lrrn.certificates.margins import margin_bounds, ruled_out
from lrrn.estimators._base import Array
from lrrn.estimators.classifier import LRRNClassifier
from lrrn.estimators.pipeline import reaching, unwrapped
from lrrn.estimators.regressor import LRRNRegressor
from lrrn.estimators.scaling import NORMS
from lrrn.learning.settings import checked_number


@final
class ConformalClassifier(BaseEstimator):  # type: ignore[misc]
    """Sets of labels that contain the true label with a chosen probability, for inputs perturbed by up to ``eps`` too.

    If calibration samples and a new sample are exchangeable (for example independent draws from one distribution) and the input
    of the new one is then perturbed in any way by at most ``eps``, the set at the perturbed input contains the true label with
    probability at least 1 - ``alpha``. The probability is over the calibration samples and the new sample. The errors of the
    solver and of rounding are accounted for.

    Parameters
    ----------
    estimator : LRRNClassifier or Pipeline
        Fitted, on other samples than those of :meth:`fit`. A Pipeline is one that :func:`lrrn.certify_pipeline` takes. A
        FrozenEstimator of it is taken too, of which ``clone`` keeps the fit, and so is a fitted GridSearchCV.
    alpha : float, default=0.1
        Probability that the set may miss the true label, between 0 and 1.

    Attributes
    ----------
    classes_ : array of shape (n_classes,)
        Labels, in the order of the columns of :meth:`predict_set`.
    threshold_ : float
        A label is in the set unless its margin (its score minus the largest other score) is proven to be smaller than this.
        Minus infinity if there are too few calibration samples, fewer than 1 / ``alpha`` - 1: every set then has all labels.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.model_selection import train_test_split
    >>> from lrrn import ConformalClassifier, LRRNClassifier
    >>> X, X_cal, y, y_cal = train_test_split(*load_iris(return_X_y=True), stratify=load_iris().target, random_state=0)
    >>> clf = LRRNClassifier(standardize="features", random_state=0).fit(X, y)
    >>> conformal = ConformalClassifier(clf, alpha=0.1).fit(X_cal, y_cal)
    >>> conformal.predict_set(X_cal, eps=0.1).shape
    (38, 3)
    """

    classes_: Array
    threshold_: float

    def __init__(self, estimator: Any, alpha: float = 0.1) -> None:
        self.estimator = estimator
        self.alpha = alpha

    def fit(self, X: ArrayLike, y: ArrayLike) -> ConformalClassifier:
        """Calibrate; the estimator stays as it is.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
            Calibration samples, not perturbed.
        y : array of shape (n_samples,)
            Their labels, all of them among those that the estimator knows.

        Returns
        -------
        ConformalClassifier
            The estimator itself.
        """
        last = _fitted(self.estimator, LRRNClassifier)
        _check_alpha(self.alpha)
        labels = column_or_1d(np.asarray(y))
        check_consistent_length(X, labels)
        unknown = np.setdiff1d(labels, last.classes_)
        if len(unknown):
            raise ValueError(
                f"y has labels that the estimator was not trained on, and which no set contains: {unknown.tolist()}"
            )
        model, Z, reach, norm = reaching(self.estimator, X, 0.0, None)
        lower = model._over_chunks(Z, lambda x: _margins(model, x, model.scaling.reach(reach, x, norm))[0])
        margins = lower[np.arange(len(labels)), np.searchsorted(last.classes_, labels)]
        self.classes_ = last.classes_
        self.threshold_ = -float(_quantile(-margins, self.alpha, "every set contains all labels"))
        return self

    def predict_set(self, X: ArrayLike, eps: float = 0.0, norm: str | None = None) -> Array:
        """Return a set of labels for every sample; it may be empty, which says that no label fits.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
            Samples, possibly perturbed.
        eps : float, default=0.0
            The most that the samples were perturbed by.
        norm : {None, "input", "scaled"}, default=None
            Norm of ``eps``, as in :meth:`LRRNClassifier.certificate` or :func:`lrrn.certify_pipeline`.

        Returns
        -------
        bool array of shape (n_samples, n_classes)
            Whether each label of ``classes_`` is in the set. All labels where the solve did not converge.
        """
        check_is_fitted(self, "threshold_")
        _check(eps, norm)
        model, Z, reach, norm = reaching(self.estimator, X, float(eps), norm)

        def work(x: Tensor) -> Tensor:
            far = model.scaling.reach(reach, x, norm)
            if model.objective == "class_energy":
                return _margins(model, x, far)[1] >= self.threshold_
            return ~ruled_out(model.network_, x, model._infer(x), far, self.threshold_)

        return model._over_chunks(Z, work)


@final
class ConformalRegressor(BaseEstimator):  # type: ignore[misc]
    """Intervals that contain the true target with a chosen probability, for inputs perturbed by up to ``eps`` too.

    The statement is that of :class:`ConformalClassifier`, with the interval in place of the set; with several targets it holds
    for each of them. The interval is the certified one of the prediction, widened by a quantile of the absolute errors of the
    calibration samples.

    Parameters
    ----------
    estimator : LRRNRegressor or Pipeline
        Fitted, on other samples than those of :meth:`fit`. A Pipeline is one that :func:`lrrn.certify_pipeline` takes. A
        FrozenEstimator of it is taken too, of which ``clone`` keeps the fit, and so is a fitted GridSearchCV.
    alpha : float, default=0.1
        Probability that the interval may miss the true target, between 0 and 1.

    Attributes
    ----------
    width_ : array of shape (n_targets,)
        What is added to the certified interval at each of its ends. Infinite if there are too few calibration samples, fewer
        than 1 / ``alpha`` - 1.

    Examples
    --------
    >>> import numpy as np
    >>> from lrrn import ConformalRegressor, LRRNRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (300, 1))
    >>> y = np.abs(X[:, 0]) + 0.1 * rng.normal(size=300)
    >>> regressor = LRRNRegressor(random_state=0).fit(X[:200], y[:200])
    >>> lower, upper = ConformalRegressor(regressor, alpha=0.1).fit(X[200:], y[200:]).predict_interval(X, eps=0.01)
    >>> bool(np.mean((lower <= y) & (y <= upper)) > 0.85)
    True
    """

    width_: Array

    def __init__(self, estimator: Any, alpha: float = 0.1) -> None:
        self.estimator = estimator
        self.alpha = alpha

    def fit(self, X: ArrayLike, y: ArrayLike) -> ConformalRegressor:
        """Calibrate; the estimator stays as it is.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
            Calibration samples, not perturbed.
        y : array of shape (n_samples,) or (n_samples, n_targets)

        Returns
        -------
        ConformalRegressor
            The estimator itself.
        """
        _fitted(self.estimator, LRRNRegressor)
        _check_alpha(self.alpha)
        targets = check_array(y, ensure_2d=False, dtype=np.float64)
        check_consistent_length(X, targets)
        lower, upper = self._certified(X, 0.0, None)
        if targets.shape != lower.shape:
            raise ValueError(f"y is of shape {targets.shape}, and the predictions of the estimator are of shape {lower.shape}")
        # rounded up, so that no error is larger than this
        errors = np.nextafter(np.maximum(upper - targets, targets - lower), np.inf).reshape(len(targets), -1)
        self.width_ = _quantile(errors, self.alpha, "every interval is infinite")
        return self

    def predict_interval(self, X: ArrayLike, eps: float = 0.0, norm: str | None = None) -> tuple[Array, Array]:
        """Return an interval for every sample.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
            Samples, possibly perturbed.
        eps : float, default=0.0
            The most that the samples were perturbed by.
        norm : {None, "input", "scaled"}, default=None
            Norm of ``eps``, as in :meth:`LRRNRegressor.certificate` or :func:`lrrn.certify_pipeline`.

        Returns
        -------
        lower, upper : array of shape (n_samples,) or (n_samples, n_targets)
            Infinite where the solve did not converge.
        """
        check_is_fitted(self, "width_")
        _check(eps, norm)
        lower, upper = self._certified(X, float(eps), norm)
        width = self.width_ if lower.ndim > 1 else self.width_[0]
        return np.nextafter(lower - width, -np.inf), np.nextafter(upper + width, np.inf)

    def _certified(self, X: ArrayLike, eps: float, norm: str | None) -> tuple[Array, Array]:
        model, Z, reach, norm = reaching(self.estimator, X, eps, norm)
        found: tuple[Array, Array] = model.certificate(Z, reach, norm).intervals[reach]
        return found


def _fitted(estimator: Any, kind: type) -> Any:
    """Return the network's estimator of a fitted estimator or Pipeline; raise if it is not of the kind asked for."""
    inner = unwrapped(estimator)
    last = inner.steps[-1][1] if isinstance(inner, Pipeline) else inner
    if not isinstance(last, kind):
        raise TypeError(f"estimator must be an {kind.__name__}, or a Pipeline that ends in one; got {estimator!r}")
    check_is_fitted(
        last, "network_", msg="This %(name)s is not fitted yet. Fit it first, on other samples than the calibration's."
    )
    return last


def _check(eps: float, norm: str | None) -> None:
    checked_number("eps", eps, "be a finite size of at least 0", lambda size: 0 <= size < math.inf)
    if norm is not None and norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}; use 'input' for the Euclidean norm of X, or 'scaled'")


def _margins(model: LRRNClassifier, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return bounds on the margins of all labels, over perturbations of the network's input."""
    if model.objective == "class_energy":
        return energy_margins(model.network_, x, eps, model.max_sweeps)
    return margin_bounds(model.network_, x, model._infer(x), eps)


def _check_alpha(alpha: float) -> None:
    checked_number("alpha", alpha, "lie between 0 and 1", lambda share: 0 < share < 1)


def _quantile(scores: Array, alpha: float, otherwise: str) -> Array:
    """Return what a new score, exchangeable with these, does not exceed with probability 1 - alpha: the k-th smallest.

    Of n scores, k = ceil((n + 1) (1 - alpha)). If k is larger than n, that is infinity, with a warning.
    """
    # of the number as written: the binary number next to 0.3 is smaller, and would make k = 8 of n = 9
    miss = Fraction(repr(float(alpha)))
    n, k = len(scores), math.ceil((len(scores) + 1) * (1 - miss))
    if k <= n:
        found: Array = np.sort(scores, axis=0)[k - 1]
        return found
    needed = math.ceil(1 / miss) - 1
    warnings.warn(f"alpha={alpha:g} needs {needed} calibration samples; with {n}, {otherwise}", stacklevel=3)
    return np.full(scores.shape[1:], np.inf)
