"""ColumnTransformer and SimpleImputer in front of affine steps: numbers that move, and categories that are held fixed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder
from sklearn.utils import _safe_indexing

from lrrn.estimators._base import LiftedEstimator
from lrrn.estimators.affine import AffineChain, check_affine, last_step, working

ENCODERS = (OneHotEncoder, OrdinalEncoder)
"""Steps for categories. What goes through one is held fixed."""
SUPPORTED = (
    "use StandardScaler, RobustScaler, MinMaxScaler or MaxAbsScaler (without clip), PCA, SimpleImputer or 'passthrough', as "
    "first step also a ColumnTransformer of these, OneHotEncoder and OrdinalEncoder, and one of lrrn's estimators as last step"
)


def split_table(pipeline: Any) -> tuple[list[tuple[str, Any]], LiftedEstimator]:
    """Return the steps of a Pipeline and its estimator, as :func:`lrrn.estimators.affine.split` does.

    The first step may be a ColumnTransformer, and any step a SimpleImputer.
    """
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"expected a scikit-learn Pipeline; got {type(pipeline).__name__}")
    steps = working(pipeline.steps[:-1])
    for k, (name, step) in enumerate(steps):
        if type(step) is not ColumnTransformer:
            _check(name, step)
            continue
        if k > 0 or step.transformer_weights:
            why = "has weights" if k == 0 else "is not the first step"
            raise ValueError(f"step {name!r} of the Pipeline is a ColumnTransformer that {why}; {SUPPORTED}")
        for inner, one in (*((inner, one) for inner, one, _ in step.transformers), ("remainder", step.remainder)):
            _is_fixed(f"{name}: {inner}", one)
    return steps, last_step(pipeline, SUPPORTED)


def _check(name: str, step: Any) -> None:
    """Raise ValueError if a step is neither affine nor an imputer that is the identity where nothing is missing."""
    if type(step) is not SimpleImputer:
        check_affine(name, step, SUPPORTED)
        return
    missing = step.missing_values
    if not (isinstance(missing, float) and math.isnan(missing)):
        raise ValueError(f"step {name!r} of the Pipeline is a SimpleImputer of {missing!r}, which numbers may move to; use NaN")
    if step.add_indicator:
        raise ValueError(f"step {name!r} of the Pipeline is a SimpleImputer with add_indicator=True; set it to False")
    if any(_is_nan(value) for value in getattr(step, "statistics_", ())):
        raise ValueError(f"step {name!r} of the Pipeline is a SimpleImputer fitted on an empty column; drop the column")


def _is_nan(value: Any) -> bool:
    return isinstance(value, float | np.floating) and math.isnan(value)


def _is_fixed(name: str, transformer: Any) -> bool:
    """Return whether a transformer of a ColumnTransformer takes categories; raise ValueError if it is not supported."""
    steps = _steps(name, transformer)
    fixed = any(type(step) in ENCODERS for _, step in steps)
    for inner, step in steps:
        if not (fixed and type(step) in (*ENCODERS, SimpleImputer)):
            _check(inner, step)
    return fixed


def _steps(name: str, transformer: Any) -> list[tuple[str, Any]]:
    """Return the steps of a transformer, which may be a Pipeline."""
    if isinstance(transformer, Pipeline):
        return [(f"{name}: {inner}", step) for inner, step in working(transformer.steps)]
    return working([(name, transformer)])


def through_columns(chain: AffineChain, transformer: ColumnTransformer, X: ArrayLike) -> Any:
    """Begin a chain with a fitted ColumnTransformer; return what it computes from X."""
    X = _ordered(transformer, X)
    given = {name: one for name, one, _ in transformer.transformers} | {"remainder": transformer.remainder}
    fixed, parts = np.zeros(transformer.n_features_in_, dtype=bool), []
    for name, columns in transformer._transformer_to_input_indices.items():
        one = given[name]
        if len(columns) == 0 or (isinstance(one, str) and one == "drop"):
            continue
        if not isinstance(one, str):
            one = transformer.named_transformers_[name]
        if _is_fixed(name, one):
            fixed[columns] = True
            continue
        part, Z = AffineChain(len(columns)), _safe_indexing(X, columns, axis=1)
        for _, step in _steps(name, one):
            Z = part.through(step, Z)
        parts.append((part, transformer.output_indices_[name], np.asarray(columns)))
    if not any((~fixed[columns]).any() for _, _, columns in parts):
        raise ValueError("every column is a category, which has no small perturbations: there is nothing to certify")
    out = transformer.transform(X)  # after the parts, since a step may work in place
    chain.spread(parts, fixed, out.shape[1])
    return out


def _ordered(transformer: ColumnTransformer, X: Any) -> Any:
    """Return X with the columns of a data frame in the order of the fit."""
    if not hasattr(X, "columns"):
        return np.asarray(X)
    names = getattr(transformer, "feature_names_in_", None)
    if names is None:
        return X
    missing = [name for name in names if name not in X.columns]
    if missing:
        raise ValueError(f"X has no columns {missing}, which the Pipeline was fitted on")
    return X[list(names)]
