"""Certificates of a whole scikit-learn Pipeline, in the units of its input, and certified accuracy as a scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike
from sklearn.compose import ColumnTransformer
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_array, check_is_fitted

from lrrn.estimators._base import LiftedEstimator
from lrrn.estimators.affine import AffineChain
from lrrn.estimators.certificate import RegressionCertificate, SampleCertificate
from lrrn.estimators.certified_labels import CertifiedLabels
from lrrn.estimators.columns import split_table, through_columns
from lrrn.estimators.energy_model import LRRNEnergyModel
from lrrn.estimators.parameters import checked_size
from lrrn.estimators.regressor import LRRNRegressor
from lrrn.estimators.scaling import NORMS
from lrrn.linalg.verified import EPS


def certify_pipeline(
    pipeline: Pipeline,
    X: ArrayLike,
    method: str = "auto",
    *,
    eps: float | Sequence[float] | None = None,
    norm: str = "input",
) -> SampleCertificate | RegressionCertificate:
    """Certify what a Pipeline of affine steps and one of our estimators predicts, in the units of the Pipeline's input.

    The statement is about the numbers that ``pipeline.predict`` computes: the rounding errors of the steps are bounded and
    accounted for. They depend on the type of ``X``, which a perturbed input must have too: with float32 they are larger.
    Perturbations move numbers. Columns that an encoder takes for categories are held fixed, and a missing value stays missing.

    Parameters
    ----------
    pipeline : Pipeline
        Fitted. Its steps are StandardScaler, RobustScaler, MinMaxScaler or MaxAbsScaler (without clip), PCA, SimpleImputer (of
        NaN) or "passthrough", and an estimator of this library is the last. The first step may be a ColumnTransformer of
        Pipelines of these for columns of numbers, and of OneHotEncoder or OrdinalEncoder for categories. It may be inside of
        a FrozenEstimator or of a fitted search of hyper-parameters.
    X : array or data frame of shape (n_samples, n_features)
        What ``pipeline.predict`` takes.
    method : str, default="auto"
        For a classifier: method of the radii, as in :func:`lrrn.certify`.
    eps : float or sequence of float, optional
        For a regressor, which needs them: sizes of perturbations.
    norm : {"input", "scaled"}, default="input"
        Norm of radii and sizes: "input" is the Euclidean norm in the units of X. "scaled" is the Euclidean norm after every
        feature is divided by what the scalers at the beginning of the Pipeline divide it by (its standard deviation, with
        StandardScaler). Columns that are held fixed do not count.

    Returns
    -------
    SampleCertificate or RegressionCertificate
        ``SampleCertificate.feature_radius`` says how far each feature of X may move alone: 0 for those that are held fixed.
    """
    steps, last = split_table(unwrapped(pipeline))
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}; use 'input' for the Euclidean norm of X, or 'scaled'")
    if isinstance(last, LRRNRegressor) != (eps is not None):
        raise ValueError("eps, the sizes of perturbations, must be given for a regressor, and for a regressor only")
    if method != "auto" and not isinstance(last, CertifiedLabels):
        raise ValueError(f"method applies to a classifier; got {method!r} for a {type(last).__name__}")
    Z, chain = _passed(steps, last, X)
    rate, by_feature = chain.rates(NORMS[norm])
    if isinstance(last, LRRNRegressor):
        sizes = [checked_size(size) for size in np.ravel(np.asarray(eps))]
        reach = [(rate * size + float(np.max(chain.error))) * (1 + 4 * EPS) for size in sizes]
        inner = last.certificate(Z, reach, norm="scaled")
        intervals = {size: inner.intervals[far] for size, far in zip(sizes, reach, strict=True)}
        return replace(inner, intervals=intervals, norm=NORMS[norm])
    if isinstance(last, CertifiedLabels):
        found = last.certificate(Z, method, norm="scaled")
    else:
        assert isinstance(last, LRRNEnergyModel)
        found = last.certificate(Z, norm="scaled")
    radius = np.maximum(found.radius - chain.error, 0.0) / rate * (1 - 8 * EPS)
    return replace(found, radius=radius, norm=NORMS[norm], feature_scale=rate / by_feature * (1 - 8 * EPS))


def unwrapped(model: Any) -> Any:
    """Return what predicts inside of a FrozenEstimator or of a fitted search of hyper-parameters."""
    while True:
        if isinstance(model, FrozenEstimator):
            model = model.estimator
        elif hasattr(model, "best_estimator_"):
            model = model.best_estimator_
        else:
            return model


def _passed(steps: list[tuple[str, Any]], last: LiftedEstimator, X: ArrayLike) -> tuple[Any, AffineChain]:
    """Return what the steps of a Pipeline make of X, and the map from X to the network's input."""
    check_is_fitted(last, "network_")
    Z: Any = X
    if not (steps and isinstance(steps[0][1], ColumnTransformer)):
        check_array(X, ensure_all_finite="allow-nan")
    first = steps[0][1] if steps else last
    check_is_fitted(first)
    chain = AffineChain(first.n_features_in_)
    for _, step in steps:
        Z = through_columns(chain, step, Z) if isinstance(step, ColumnTransformer) else chain.through(step, Z)
    chain.end(last.scale_in_)
    return Z, chain


def reaching(model: Any, X: ArrayLike, eps: float, norm: str | None) -> tuple[Any, Any, float, str | None]:
    """Replace a Pipeline by its estimator: return the estimator, its input, and the size and norm of perturbations there.

    A perturbation of X of norm at most ``eps`` moves the input of the estimator, rounding errors included, by no more than that
    size. An estimator is returned with what was given.
    """
    model = unwrapped(model)
    if not isinstance(model, Pipeline):
        return model, X, eps, norm
    steps, last = split_table(model)
    Z, chain = _passed(steps, last, X)
    rate, _ = chain.rates(NORMS[norm or "input"])
    return last, Z, (rate * eps + float(np.max(chain.error))) * (1 + 4 * EPS), "scaled"


@final
@dataclass(frozen=True)
class CertifiedScorer:
    """Scorer of :func:`certified_scorer`."""

    eps: float
    method: str
    norm: str | None

    def __call__(self, estimator: Any, X: ArrayLike, y: ArrayLike) -> float:
        """Return the certified accuracy of a fitted classifier, or of a Pipeline that ends in one."""
        estimator = unwrapped(estimator)
        last = estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator
        if not isinstance(last, CertifiedLabels):
            raise TypeError(f"certified accuracy is that of an LRRNClassifier, or of a Pipeline with one; got {estimator!r}")
        if not isinstance(estimator, Pipeline):
            return float(estimator.certified_score(X, y, self.eps, self.method, self.norm))
        found = certify_pipeline(estimator, X, self.method, norm=self.norm or "input")
        assert isinstance(found, SampleCertificate)
        return found.certified_accuracy(y, self.eps)


def certified_scorer(eps: float, method: str = "auto", norm: str | None = None) -> CertifiedScorer:
    """Return a scorer for scikit-learn's model selection: certified accuracy at a perturbation size.

    Parameters
    ----------
    eps : float
        Size of the perturbation.
    method : str, default="auto"
        Method of the radii, as in :func:`lrrn.certify`.
    norm : {None, "input", "scaled"}, default=None
        Norm of ``eps``. None is the default of the classifier, or the Euclidean norm in the units of X for a Pipeline.

    Returns
    -------
    callable
        For ``scoring=`` of ``GridSearchCV``, ``cross_val_score`` and the like. It takes an LRRNClassifier, or a Pipeline that
        :func:`certify_pipeline` takes.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.model_selection import cross_val_score
    >>> from lrrn import LRRNClassifier, certified_scorer
    >>> X, y = load_iris(return_X_y=True)
    >>> model = LRRNClassifier(standardize="features", random_state=0)
    >>> bool(cross_val_score(model, X, y, scoring=certified_scorer(0.1), cv=3).mean() > 0.8)
    True
    """
    eps = checked_size(eps)
    if norm is not None and norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}; use 'input' for the Euclidean norm of X, or 'scaled'")
    return CertifiedScorer(eps, method, norm)
