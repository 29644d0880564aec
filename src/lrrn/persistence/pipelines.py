"""Affine steps of a Pipeline in a model file: arrays as tensors, all else in the header."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrrn.estimators.affine import AFFINE, AffineMap
from lrrn.persistence.values import json_values, restored

PREFIX = "step."
"""Prefix of the names of a step's tensors, which separates them from those of the network."""
ARRAYS = {
    "StandardScaler": ("mean_", "var_", "scale_"),
    "MinMaxScaler": ("min_", "scale_", "data_min_", "data_max_", "data_range_"),
    "MaxAbsScaler": ("scale_", "max_abs_"),
    "RobustScaler": ("center_", "scale_"),
    "PCA": ("components_", "mean_", "explained_variance_", "explained_variance_ratio_", "singular_values_"),
}
"""Fitted arrays of each kind of step; those of scikit-learn that are None stay so."""
VALUES = ("n_features_in_", "feature_names_in_", "n_samples_seen_", "n_samples_", "n_components_", "noise_variance_")
FLAGS = ("copy", "with_mean", "with_std", "with_centering", "with_scaling", "whiten", "clip")
OUTPUTS = ("default", "pandas", "polars")
LARGEST = 1e60
"""Largest factor or offset of a step. Larger ones in a file are damage, and predictions would overflow."""


def pack(steps: Sequence[tuple[str, Any]]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the tensors and the header of the fitted affine steps of a Pipeline."""
    tensors: dict[str, Tensor] = {}
    headers = []
    for k, (name, step) in enumerate(steps):
        kind = type(step).__name__
        if not hasattr(step, "n_features_in_"):
            raise ValueError(f"step {name!r} of this Pipeline is not fitted yet; call fit first")
        arrays = {key: getattr(step, key) for key in ARRAYS[kind] if getattr(step, key, None) is not None}
        tensors |= {f"{PREFIX}{k}.{key}": torch.from_numpy(np.array(value, order="C")) for key, value in arrays.items()}
        parameters = step.get_params(deep=False)
        if not isinstance(parameters.get("random_state"), int | np.integer | None):
            parameters["random_state"] = None
        headers.append(
            {
                "name": name,
                "class": kind,
                "parameters": json_values(parameters, partial(_other_value, name), f"{name}."),
                "values": json_values(
                    {key: getattr(step, key) for key in VALUES if hasattr(step, key)}, _fit_again, f"{name}."
                ),
                # BLAS rounds a product with the transpose differently
                "columns": [key for key, value in arrays.items() if value.ndim == 2 and value.strides[0] < value.strides[1]],
                "output": getattr(step, "_sklearn_output_config", {}).get("transform", "default"),
            }
        )
    return tensors, headers


def _other_value(step: str, parameter: str) -> str:
    return f"choose another value with set_params({step}__{parameter}=...) and save again"


def _fit_again(_: str) -> str:
    return "fit the Pipeline again"


def unpack(tensors: Mapping[str, Tensor], headers: Sequence[dict[str, Any]], n_out: int) -> list[tuple[str, Any]]:
    """Undo :func:`pack` for steps that return ``n_out`` features.

    Raise ValueError, KeyError or TypeError if the contents are not those of such steps.
    """
    steps = []
    for k, header in reversed(list(enumerate(headers))):
        start = f"{PREFIX}{k}."
        arrays = {name.removeprefix(start): tensor.numpy() for name, tensor in tensors.items() if name.startswith(start)}
        step = _step(header, arrays)
        if header["class"] == "PCA" and len(step.components_) != n_out:
            raise ValueError(f"step {k} returns {len(step.components_)} features, not {n_out}")
        n_out = step.components_.shape[1] if header["class"] == "PCA" else n_out
        if step.n_features_in_ != n_out:
            raise ValueError(f"step {k} takes {step.n_features_in_!r} features, not {n_out}")
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # about names of features
            step.transform(np.ones((1, n_out)))  # raises if shapes do not fit
            affine = AffineMap.of(step)
            if not (affine.size < LARGEST and affine.offset.max() < LARGEST):
                raise ValueError(f"step {k} multiplies by or adds numbers of more than {LARGEST:g}")
        steps.append((str(header["name"]), step))
    return steps[::-1]


def _step(header: dict[str, Any], arrays: dict[str, Any]) -> Any:
    """Make one step; raise if its header or its arrays are not those of such a step."""
    kind, parameters, values = header["class"], restored(header["parameters"]), restored(header["values"])
    step = AFFINE[kind](**parameters)
    unexpected = {*arrays} - {*ARRAYS[kind]} | {*values} - {*VALUES}
    if unexpected:
        raise KeyError(", ".join(sorted(unexpected)))
    if any(not isinstance(parameters[flag], bool) for flag in FLAGS if flag in parameters) or parameters.get("clip"):
        raise ValueError(f"parameters of a {kind} are {parameters}")
    if any(array.dtype.kind != "f" or not np.isfinite(array).all() for array in arrays.values()):
        raise ValueError(f"arrays of a {kind} are not finite numbers")
    for key, array in arrays.items():
        setattr(step, key, np.asfortranarray(array) if key in header["columns"] else array)
    for key in {*ARRAYS[kind]} - {*arrays}:
        setattr(step, key, None)
    for key, value in values.items():
        setattr(step, key, value)
    names = getattr(step, "feature_names_in_", None)
    if names is not None and not (isinstance(names, np.ndarray) and names.shape == (step.n_features_in_,)):
        raise ValueError(f"names of the features of a {kind} are {names!r}")
    if header["output"] not in OUTPUTS:
        raise ValueError(f"output of a {kind} is {header['output']!r}")
    return step if header["output"] == "default" else step.set_output(transform=header["output"])
