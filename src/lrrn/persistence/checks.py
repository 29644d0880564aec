"""What must hold for a model in a file. Both load and save check it, so that what was written can be read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lrrn.estimators import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.estimators._base import LiftedEstimator
from lrrn.estimators.objectives import OBJECTIVES
from lrrn.estimators.parameters import STANDARDIZE
from lrrn.network.solution import ON_FAILURE
from lrrn.persistence.values import Unfit, brief
from lrrn.solvers import SOLVERS

NOT_SAVED = ("callbacks", "checkpoint", "log", "resume")
"""Parameters that belong to a run or a machine, not to a model."""
ATTRIBUTES = ("chosen_", "classes_", "feature_names_in_", "n_features_in_", "history_", "offset_", "offset_in_", "scale_in_")
ATTRIBUTES_OUT = ("offset_out_", "scale_out_", "_single", "_n_features_out", "_seed")
NOT_DECIDING = ("history_", "feature_names_in_")
"""Attributes that change no result: a record of the fit with its times, and the names by which columns are found."""

REQUIRED = ("n_features_in_", "history_", "offset_in_", "scale_in_", "_seed")
REQUIRED_OF = {
    "classifier": ("classes_",),
    "regressor": ("offset_out_", "scale_out_", "_single"),
    "energy model": ("offset_", "_n_features_out"),
}
COUNT, NUMBERS = "an integer of at least 0", "an array of finite numbers, one for each of {}"

Fits = dict[str, tuple[bool, str]]
"""Whether a parameter or attribute is as it should be, and what it should be, by name."""


def check_names(kind: str, parameters: dict[str, Any], attributes: dict[str, Any]) -> None:
    """Raise KeyError if a file has parameters or attributes that a model must not have, or lacks required ones."""
    unexpected = {*NOT_SAVED} & {*parameters} | {*attributes} - {*ATTRIBUTES, *ATTRIBUTES_OUT}
    missing = {*REQUIRED, *REQUIRED_OF[kind]} - {*attributes}
    if unexpected or missing:
        raise KeyError(", ".join(sorted(unexpected | missing)))


def check_values(estimator: LiftedEstimator) -> None:
    """Raise Unfit for a parameter or attribute that would make a later prediction fail."""
    for name, (fine, expected) in {**_of_every_kind(estimator), **_of_its_kind(estimator)}.items():
        if not fine:
            raise Unfit(f"{name} is {brief(getattr(estimator, name))}, not {expected}", remedy(estimator, name))


def remedy(estimator: LiftedEstimator, name: str) -> str:
    """Return what to do about a wrong parameter or attribute before the estimator is saved."""
    if name in estimator.get_params(deep=False):
        return f"choose another value with set_params({name}=...) and save again"
    if name == "classes_":
        return "fit again with labels that are numbers, booleans or text, such as y.astype(str)"
    return "fit again, on data whose numbers are finite and not so large that they overflow"


def _of_every_kind(estimator: Any) -> Fits:
    width = estimator.network_.sizes[0]
    scale, by_feature = estimator.scale_in_, NUMBERS.format("its features")
    # what the fit made decides how inputs are scaled, and the parameter may have been changed since
    is_scale = (_is_vector(scale, width) and bool((scale > 0).all())) or (_is_number(scale) and scale > 0)
    fits = {
        "n_features_in_": (_is_count(estimator.n_features_in_) and estimator.n_features_in_ == width, f"{width}"),
        "offset_in_": (_is_vector(estimator.offset_in_, width), by_feature),
        "scale_in_": (is_scale, f"a positive number, or {by_feature}, all positive"),
        "_seed": (_is_count(estimator._seed), COUNT),
        "max_sweeps": (_is_count(estimator.max_sweeps), COUNT),
        "on_failure": (estimator.on_failure in (*ON_FAILURE,), f"one of {', '.join(map(repr, ON_FAILURE))}"),
        "standardize": (estimator.standardize in STANDARDIZE, f"one of {', '.join(map(repr, STANDARDIZE))}"),
    }
    if hasattr(estimator, "chosen_") or getattr(estimator, "eps", None) is not None:  # files of earlier releases have none
        chosen = estimator.chosen_
        known = isinstance(chosen, dict) and {*chosen} <= {*estimator.get_params(deep=False)}
        fits["chosen_"] = known, "values of parameters by name"
    if hasattr(estimator, "feature_names_in_"):
        names = estimator.feature_names_in_
        is_array = isinstance(names, np.ndarray) and names.shape == (width,)
        are_names = is_array and all(isinstance(name, str) for name in names)
        fits["feature_names_in_"] = are_names, f"an array of {width} texts"
    return fits


def _of_its_kind(estimator: Any) -> Fits:
    fits, width = {}, estimator.network_.sizes[-1]
    if isinstance(estimator, LRRNClassifier):
        classes, objective = estimator.classes_, estimator._use("objective")
        is_array = isinstance(classes, np.ndarray) and classes.shape == (width,)
        fits["classes_"] = is_array, f"an array of {width} labels, as many as the network has outputs"
        fits["objective"] = objective in OBJECTIVES, f"one of {', '.join(OBJECTIVES)}"
        if objective == "margin":  # others do not use it
            temperature = estimator._use("temperature")
            pair = temperature if isinstance(temperature, tuple) and len(temperature) == 2 else (temperature,)
            fits["temperature"] = all(_is_number(value) and value > 0 for value in pair), "one or two positive numbers"
    if isinstance(estimator, LRRNRegressor):
        single, expected = estimator._single, NUMBERS.format("its targets")
        fits["offset_out_"] = _is_vector(estimator.offset_out_, width), expected
        is_scale = _is_vector(estimator.scale_out_, width) and bool((estimator.scale_out_ > 0).all())
        fits["scale_out_"] = is_scale, f"{expected}, all positive"
        fits["_single"] = isinstance(single, bool) and (not single or width == 1), "True for one target, and otherwise False"
    if isinstance(estimator, LRRNEnergyModel):
        fits["offset_"] = _is_number(estimator.offset_), "a finite number"
        fits["_n_features_out"] = _is_count(estimator._n_features_out) and estimator._n_features_out == width, f"{width}"
    return fits


def check_network(structure: dict[str, Any]) -> None:
    """Raise Unfit if a network has a solver, a tolerance, a number of sweeps or a dtype that a file must not have."""
    solver, tol, max_sweeps, dtype = (structure[name] for name in ("solver", "tol", "max_sweeps", "dtype"))
    fits = {
        "solver": (solver in ("auto", *SOLVERS), f"one of auto, {', '.join(SOLVERS)}"),
        "tol": (tol is None or (_is_number(tol) and tol > 0), "None or a positive number"),
        "max_sweeps": (_is_count(max_sweeps) and max_sweeps > 0, "an integer of at least 1"),
        "dtype": (dtype in ("float32", "float64"), "float32 or float64"),
    }
    for name, (fine, expected) in fits.items():
        if not fine:
            advice = "convert it with .float() or .double()" if name == "dtype" else f"set its attribute {name} and save again"
            raise Unfit(f"{name} of the network is {brief(structure[name])}, not {expected}", advice)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_vector(value: Any, length: int) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.shape == (length,)
        and value.dtype.kind == "f"
        and bool(np.isfinite(value).all())
    )
