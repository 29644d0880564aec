"""Save and load networks, fitted estimators and Pipelines: safetensors with a JSON header, never pickle."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch
from sklearn.pipeline import Pipeline
from torch import Tensor

from lrrn.energy.constraints import Interval
from lrrn.estimators import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.estimators._base import STANDARDIZE, LiftedEstimator
from lrrn.estimators.affine import split
from lrrn.estimators.objectives import OBJECTIVES
from lrrn.network import LRRN, Conv
from lrrn.network.layers import Architecture, checked_architecture, layer_shapes
from lrrn.network.solution import ON_FAILURE
from lrrn.persistence import pipelines
from lrrn.persistence.reference import PREFIX, Reference
from lrrn.persistence.shipped import located
from lrrn.persistence.values import plain, restored
from lrrn.runtime import storage
from lrrn.runtime.devices import to_dtype
from lrrn.solvers import SOLVERS

ESTIMATORS: dict[str, type[LiftedEstimator]] = {
    "classifier": LRRNClassifier,
    "regressor": LRRNRegressor,
    "energy model": LRRNEnergyModel,
}
NOT_SAVED = ("callbacks", "checkpoint", "log", "resume")
"""Parameters that belong to a run or a machine, not to a model."""
ATTRIBUTES = ("chosen_", "classes_", "feature_names_in_", "n_features_in_", "history_", "offset_", "offset_in_", "scale_in_")
ATTRIBUTES_OUT = ("offset_out_", "scale_out_", "_single", "_n_features_out", "_seed")

REQUIRED = ("n_features_in_", "history_", "offset_in_", "scale_in_", "_seed")
REQUIRED_OF = {
    "classifier": ("classes_",),
    "regressor": ("offset_out_", "scale_out_", "_single"),
    "energy model": ("offset_", "_n_features_out"),
}


def save(model: LRRN | LiftedEstimator | Pipeline, path: str | os.PathLike[str], reference: Reference | None = None) -> None:
    """Write a network, a fitted estimator or a fitted Pipeline to a file.

    Parameters
    ----------
    model : LRRN, LRRNClassifier, LRRNRegressor, LRRNEnergyModel or Pipeline
        A Pipeline has the steps that :func:`lrrn.certify_pipeline` takes.
    path : path-like
        The file is replaced atomically. The state of the optimiser between calls of ``partial_fit`` is not saved.
    reference : Reference, optional
        Results of an estimator on held-out samples, for :func:`load_reference` and the explorer.
    """
    storage.check_writable(path)
    if isinstance(model, LRRN):
        storage.write(path, "network", dict(model.state_dict()), _structure(model))
        return
    if isinstance(model, Pipeline):
        steps, last = split(model)
        kind, tensors, header = _packed(last, reference)
        more, header["steps"] = pipelines.pack(steps)
        header |= {"kind": kind, "name": model.steps[-1][0]}
        storage.write(path, "pipeline", tensors | more, header)
        return
    storage.write(path, *_packed(model, reference))


def _packed(model: LiftedEstimator, reference: Reference | None) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Return the kind, the tensors and the header of a fitted estimator."""
    kind = next((kind for kind, cls in ESTIMATORS.items() if isinstance(model, cls)), None)
    if kind is None:
        raise TypeError(f"can save a network, one of lrrn's estimators or a Pipeline with one; got {type(model).__name__}")
    if not hasattr(model, "network_"):
        raise ValueError(f"this {type(model).__name__} is not fitted yet; call fit first")
    parameters = {name: value for name, value in model.get_params(deep=False).items() if name not in NOT_SAVED}
    if not isinstance(parameters["random_state"], int | np.integer | None):
        parameters["random_state"] = None
    attributes = {name: getattr(model, name) for name in (*ATTRIBUTES, *ATTRIBUTES_OUT) if hasattr(model, name)}
    header = {"parameters": plain(parameters), "attributes": plain(attributes), "network": _structure(model.network_)}
    tensors = dict(model.network_.state_dict())
    if reference is not None:
        more, header["reference"] = reference.pack()
        tensors |= more
    return kind, tensors, header


def load(path: str | os.PathLike[str], device: str = "cpu") -> LRRN | LiftedEstimator | Pipeline:
    """Load a network, an estimator or a Pipeline from a file of :func:`save`. No code from the file is executed.

    Parameters
    ----------
    path : path-like
        A file, or the name of a shipped model (``lrrn models`` lists them), such as "mnist-paper-a". A file that exists wins.
    device : str, default="cpu"
        Device of the parameters.

    Returns
    -------
    LRRN, LRRNClassifier, LRRNRegressor, LRRNEnergyModel or Pipeline

    Raises
    ------
    FileNotFoundError
        There is no such file, and no shipped model of that name.
    FileFormatError
        The file is truncated, damaged, of another format, a checkpoint, or from a newer release; or a shipped file does not
        have the published digest.
    OSError
        The file cannot be read.
    """
    path = located(path)
    kind, tensors, header = storage.read(path, "network", *ESTIMATORS, "pipeline")
    try:
        if kind == "network":
            return _network(header, tensors, device)
        if kind == "pipeline":
            own = {name: tensor for name, tensor in tensors.items() if not name.startswith(pipelines.PREFIX)}
            last = _estimator(header["kind"], own, header, device)
            steps = pipelines.unpack(tensors, header["steps"], last.n_features_in_)
            return Pipeline([*steps, (header["name"], last)])
        return _estimator(kind, tensors, header, device)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise storage.FileFormatError(
            f"{path} is damaged: its header does not fit a {kind} ({error}); restore it from a copy, or train it again"
        ) from error


def _estimator(kind: str, tensors: dict[str, Tensor], header: dict[str, Any], device: str) -> LiftedEstimator:
    parameters, attributes = restored(header["parameters"]), restored(header["attributes"])
    _check_names(kind, parameters, attributes)
    estimator = ESTIMATORS[kind](**parameters)
    for name, value in attributes.items():
        setattr(estimator, name, value)
    estimator._set_history(estimator.history_)
    estimator._optimizer_state = None
    estimator.network_ = _network(header["network"], tensors, device)
    _check_values(estimator)
    return estimator


def load_reference(path: str | os.PathLike[str]) -> Reference | None:
    """Load the reference data from an estimator's file; None if it has none.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    Reference or None
    """
    path = located(path)
    _, tensors, header = storage.read(path, *ESTIMATORS)
    if "reference" not in header:
        return None
    try:
        layers = layer_shapes(_architecture(header["network"]))
        return Reference.unpack(tensors, header["reference"], layers[0].columns, layers[-1].rows)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise storage.FileFormatError(f"{path} is damaged: its reference does not fit its model ({error})") from error


def _check_names(kind: str, parameters: dict[str, Any], attributes: dict[str, Any]) -> None:
    """Raise KeyError if a file has parameters or attributes that a model must not have, or lacks required ones."""
    strange = {*NOT_SAVED} & {*parameters} | {*attributes} - {*ATTRIBUTES, *ATTRIBUTES_OUT}
    missing = {*REQUIRED, *REQUIRED_OF[kind]} - {*attributes}
    if strange or missing:
        raise KeyError(", ".join(sorted(strange | missing)))


def _check_values(estimator: Any) -> None:
    """Raise ValueError for a parameter or attribute that would make a later prediction fail."""
    sizes = estimator.network_.sizes
    fits = {
        "n_features_in_": _is_count(estimator.n_features_in_) and estimator.n_features_in_ == sizes[0],
        "offset_in_": _is_vector(estimator.offset_in_, sizes[0]),
        "scale_in_": _is_scale(estimator.scale_in_, sizes[0], estimator.standardize == "features"),
        "_seed": _is_count(estimator._seed),
        "max_sweeps": _is_count(estimator.max_sweeps),
        "on_failure": estimator.on_failure in ON_FAILURE,
        "standardize": estimator.standardize in STANDARDIZE,
    }
    if hasattr(estimator, "chosen_") or getattr(estimator, "eps", None) is not None:  # files of earlier releases have none
        chosen = estimator.chosen_
        fits["chosen_"] = isinstance(chosen, dict) and {*chosen} <= {*estimator.get_params(deep=False)}
    if hasattr(estimator, "feature_names_in_"):
        names = estimator.feature_names_in_
        is_array = isinstance(names, np.ndarray) and names.shape == sizes[:1]
        fits["feature_names_in_"] = is_array and all(isinstance(name, str) for name in names)
    if isinstance(estimator, LRRNClassifier):
        classes = estimator.classes_
        fits["classes_"] = isinstance(classes, np.ndarray) and classes.shape == sizes[-1:]
        fits["objective"] = estimator._use("objective") in OBJECTIVES
        temperature = estimator._use("temperature")
        pair = temperature if isinstance(temperature, tuple) and len(temperature) == 2 else (temperature,)
        fits["temperature"] = all(_is_number(value) and value > 0 for value in pair)
    if isinstance(estimator, LRRNRegressor):
        fits["offset_out_"] = _is_vector(estimator.offset_out_, sizes[-1])
        fits["scale_out_"] = _is_vector(estimator.scale_out_, sizes[-1])
        fits["_single"] = isinstance(estimator._single, bool) and (not estimator._single or sizes[-1] == 1)
    if isinstance(estimator, LRRNEnergyModel):
        fits["offset_"] = _is_number(estimator.offset_)
        fits["_n_features_out"] = _is_count(estimator._n_features_out) and estimator._n_features_out == sizes[-1]
    wrong = [name for name, fine in fits.items() if not fine]
    if wrong:
        raise ValueError(f"{wrong[0]} is {getattr(estimator, wrong[0])!r}")


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


def _is_scale(value: Any, length: int, by_feature: bool) -> bool:
    return _is_vector(value, length) and bool((value > 0).all()) if by_feature else _is_number(value) and value > 0


def _structure(net: LRRN) -> dict[str, Any]:
    to_dtype(str(net.W[0].dtype).removeprefix("torch."))  # raises for a dtype that load cannot read
    return {
        "sizes": [plain(size) if isinstance(size, Conv) else size for size in net.architecture],
        "beta": list(net.beta),
        "gamma": net.gamma,
        "intervals": [[repr(i.lo), repr(i.hi)] for i in net.intervals],
        "bias": net.b[0] is not None,
        "reconstruction_bias": net.c[0] is not None,
        "dtype": str(net.W[0].dtype).removeprefix("torch."),
        "solver": net.solver,
        "tol": net.tol,
        "max_sweeps": net.max_sweeps,
    }


def _architecture(structure: dict[str, Any]) -> Architecture:
    """Return the sizes of a network as :class:`LRRN` takes them."""
    sizes = structure["sizes"]
    if not isinstance(sizes, list):
        raise ValueError(f"sizes is {sizes!r}")
    return checked_architecture([restored(size) if isinstance(size, dict) else size for size in sizes])


def _network(structure: dict[str, Any], tensors: dict[str, Tensor], device: str) -> LRRN:
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    architecture = _architecture(structure)
    for k, layer in enumerate(layer_shapes(architecture)):
        if tensors[f"W.{k}"].shape != layer.weight_shape:  # check before allocating memory for the sizes in the header
            raise ValueError(f"W.{k} is of shape {tuple(tensors[f'W.{k}'].shape)}, not {layer.weight_shape}")
    if structure["solver"] not in ("auto", *SOLVERS):
        raise ValueError(f"unknown solver {structure['solver']!r}")
    if not (_is_count(structure["max_sweeps"]) and structure["max_sweeps"] > 0):
        raise ValueError(f"max_sweeps is {structure['max_sweeps']!r}")
    if structure["tol"] is not None and not (_is_number(structure["tol"]) and structure["tol"] > 0):
        raise ValueError(f"tol is {structure['tol']!r}")
    intervals = [Interval(float(lo), float(hi)) for lo, hi in structure["intervals"]]
    net = LRRN(
        architecture,
        beta=structure["beta"],
        gamma=structure["gamma"],
        constraint=intervals[:-1],
        output_constraint=intervals[-1],
        bias=structure["bias"],
        reconstruction_bias=structure["reconstruction_bias"],
        generator=torch.Generator().manual_seed(0),
        device=device,
        dtype=to_dtype(structure["dtype"]),
        solver=structure["solver"],
        tol=structure["tol"],
        max_sweeps=structure["max_sweeps"],
    )
    if any(t.dtype != net.W[0].dtype for t in tensors.values()):
        raise ValueError(f"its tensors are not all {structure['dtype']}")
    net.load_state_dict(tensors)
    return net
