"""Save and load networks, fitted estimators and Pipelines: safetensors with a JSON header, never pickle."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.pipeline import Pipeline
from torch import Tensor

from lrrn.energy.constraints import Interval
from lrrn.estimators import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.estimators._base import LiftedEstimator
from lrrn.estimators.affine import split
from lrrn.network import LRRN, Conv
from lrrn.network.layers import Architecture, checked_architecture, layer_shapes
from lrrn.persistence import pipelines
from lrrn.persistence.checks import (
    ATTRIBUTES,
    ATTRIBUTES_OUT,
    NOT_DECIDING,
    NOT_SAVED,
    check_names,
    check_network,
    check_values,
    remedy,
)
from lrrn.persistence.reference import PREFIX, Reference
from lrrn.persistence.shipped import located
from lrrn.persistence.values import MISFIT, Unfit, json_values, plain, restored
from lrrn.runtime import storage
from lrrn.runtime.devices import choose_device, to_dtype

ESTIMATORS: dict[str, type[LiftedEstimator]] = {
    "classifier": LRRNClassifier,
    "regressor": LRRNRegressor,
    "energy model": LRRNEnergyModel,
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

    Raises
    ------
    TypeError
        This cannot be saved.
    ValueError
        It is not fitted, or holds what :func:`load` would refuse; the message says what, and what to do.
    OSError
        The file cannot be written. Whatever is raised, an existing file is unchanged.
    """
    storage.check_writable(path)
    try:
        kind, tensors, header = _contents(model, reference)
        _check_loadable(kind, tensors, header)
    except Unfit as error:
        raise ValueError(
            f"this {type(model).__name__} is not saved, since load would refuse its file: {error}; {error.remedy}"
        ) from error
    storage.write(path, kind, tensors, header)


def _contents(model: Any, reference: Reference | None) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Return the kind, the tensors and the header of a file."""
    if isinstance(model, LRRN):
        structure = _structure(model)
        check_network(structure)
        return "network", dict(model.state_dict()), structure
    if not isinstance(model, Pipeline):
        return _packed(model, reference)
    steps, last = split(model)
    kind, tensors, header = _packed(last, reference)
    more, header["steps"] = pipelines.pack(steps)
    return "pipeline", tensors | more, header | {"kind": kind, "name": model.steps[-1][0]}


def _check_loadable(kind: str, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Raise Unfit if these are not the contents of a model; they are read as :func:`load` reads them."""
    try:
        read = json.loads(json.dumps(header))
        _model(kind, tensors, read)
    except Unfit:
        raise
    except MISFIT as error:
        raise Unfit(f"it does not fit a {kind} ({error})", "undo what was changed in it since it was made") from error
    if "reference" not in read:
        return
    try:
        _reference(tensors, read)
    except MISFIT as error:
        raise Unfit(f"its reference does not fit it ({error})", "give another reference, or none") from error


def _packed(model: LiftedEstimator, reference: Reference | None) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Return the kind, the tensors and the header of a fitted estimator."""
    kind, tensors, parts = _parts(model)
    advice = partial(remedy, model)
    header = {
        "parameters": json_values(parts["parameters"], advice),
        "attributes": json_values(parts["attributes"], advice),
        "network": parts["network"],
    }
    check_network(header["network"])
    if reference is not None:
        more, header["reference"] = reference.pack()
        tensors |= more
    return kind, tensors, header


def _parts(model: LiftedEstimator) -> tuple[str, dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the kind of a fitted estimator, its tensors, and its parameters, attributes and structure by name."""
    kind = next((kind for kind, cls in ESTIMATORS.items() if isinstance(model, cls)), None)
    if kind is None:
        raise TypeError(f"can save a network, one of lrrn's estimators or a Pipeline with one; got {type(model).__name__}")
    if not hasattr(model, "network_"):
        raise ValueError(f"this {type(model).__name__} is not fitted yet; call fit first")
    parameters = {name: value for name, value in model.get_params(deep=False).items() if name not in NOT_SAVED}
    if not isinstance(parameters["random_state"], int | np.integer | None):
        parameters["random_state"] = None
    parameters["device"] = str(parameters["device"])
    attributes = {name: getattr(model, name) for name in (*ATTRIBUTES, *ATTRIBUTES_OUT) if hasattr(model, name)}
    parts = {"parameters": parameters, "attributes": attributes, "network": _structure(model.network_)}
    return kind, dict(model.network_.state_dict()), parts


def deciding(model: LiftedEstimator | Pipeline) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the values that decide what a fitted model computes: all that :func:`save` writes but the history.

    Values need not be such that they can be saved.
    """
    if isinstance(model, Pipeline):
        steps, last = split(model)
        tensors, values = deciding(last)
        more, packed = pipelines.pack(steps)
        return tensors | more, {**values, "steps": packed}
    _, tensors, parts = _parts(model)
    attributes = {name: value for name, value in parts["attributes"].items() if name not in NOT_DECIDING}
    return tensors, {"class": type(model).__name__, **parts, "attributes": attributes}


def load(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> LRRN | LiftedEstimator | Pipeline:
    """Load a network, an estimator or a Pipeline from a file of :func:`save`. No code from the file is executed.

    Parameters
    ----------
    path : path-like
        A file, or the name of a shipped model (``lrrn models`` lists them), such as "mnist-paper-a". A file that exists wins.
    device : str, default="cpu"
        Device of the parameters: "cpu", "cuda", "cuda:0", ..., or "auto" for CUDA if there is any.

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
    ValueError
        There is no such device.
    OSError
        The file cannot be read, or is a folder.
    """
    place = choose_device(str(device))
    path = located(path)
    kind, tensors, header = storage.read(path, "network", *ESTIMATORS, "pipeline")
    try:
        model = _model(kind, tensors, header)
    except MISFIT as error:
        raise storage.FileFormatError(
            f"{path} is damaged: its header does not fit a {kind} ({error}); restore it from a copy, or train it again"
        ) from error
    last = model.steps[-1][1] if isinstance(model, Pipeline) else model
    # here, since a device without enough memory is no fault of the file
    (last if isinstance(last, LRRN) else last.network_).to(place)
    return model


def _model(kind: str, tensors: dict[str, Tensor], header: dict[str, Any]) -> LRRN | LiftedEstimator | Pipeline:
    """Return the model of a file, on the CPU; raise one of MISFIT if there is none with these contents."""
    if kind == "network":
        return _network(header, tensors)
    if kind != "pipeline":
        return _estimator(kind, tensors, header)
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(pipelines.PREFIX)}
    last = _estimator(header["kind"], own, header)
    steps = pipelines.unpack(tensors, header["steps"], last.n_features_in_)
    return Pipeline([*steps, (header["name"], last)])


def _estimator(kind: str, tensors: dict[str, Tensor], header: dict[str, Any]) -> LiftedEstimator:
    parameters, attributes = restored(header["parameters"]), restored(header["attributes"])
    check_names(kind, parameters, attributes)
    estimator = ESTIMATORS[kind](**parameters)
    for name, value in attributes.items():
        setattr(estimator, name, value)
    estimator._set_history(estimator.history_)
    estimator._optimizer_state = None
    estimator.network_ = _network(header["network"], tensors)
    check_values(estimator)
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
        return _reference(tensors, header)
    except MISFIT as error:
        raise storage.FileFormatError(f"{path} is damaged: its reference does not fit its model ({error})") from error


def _reference(tensors: dict[str, Tensor], header: dict[str, Any]) -> Reference:
    layers = layer_shapes(_architecture(header["network"]))
    return Reference.unpack(tensors, header["reference"], layers[0].columns, layers[-1].rows)


def _structure(net: LRRN) -> dict[str, Any]:
    return {
        "sizes": [plain(size) if isinstance(size, Conv) else size for size in net.architecture],
        "beta": list(net.beta),
        "gamma": net.gamma,
        "intervals": [[repr(i.lo), repr(i.hi)] for i in net.intervals],
        "bias": net.b[0] is not None,
        "reconstruction_bias": net.c[0] is not None,
        "dtype": str(net.W[0].dtype).removeprefix("torch."),
        "solver": plain(net.solver),
        "tol": plain(net.tol),
        "max_sweeps": plain(net.max_sweeps),
    }


def _architecture(structure: dict[str, Any]) -> Architecture:
    """Return the sizes of a network as :class:`LRRN` takes them."""
    sizes = structure["sizes"]
    if not isinstance(sizes, list):
        raise ValueError(f"sizes is {sizes!r}")
    return checked_architecture([restored(size) if isinstance(size, dict) else size for size in sizes])


def _network(structure: dict[str, Any], tensors: dict[str, Tensor]) -> LRRN:
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    architecture = _architecture(structure)
    for k, layer in enumerate(layer_shapes(architecture)):
        if f"W.{k}" not in tensors:
            raise ValueError(f"it has no weights W.{k}")
        if tensors[f"W.{k}"].shape != layer.weight_shape:  # check before allocating memory for the sizes in the header
            raise ValueError(f"W.{k} is of shape {tuple(tensors[f'W.{k}'].shape)}, not {layer.weight_shape}")
    check_network(structure)
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
        dtype=to_dtype(structure["dtype"]),
        solver=structure["solver"],
        tol=structure["tol"],
        max_sweeps=structure["max_sweeps"],
    )
    if any(t.dtype != net.W[0].dtype for t in tensors.values()):
        raise ValueError(f"its tensors are not all {structure['dtype']}")
    net.load_state_dict(tensors)
    return net
