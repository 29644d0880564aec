"""Values of parameters that are refused whatever the data; every error names the parameter and says what it takes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_random_state

from lrrn.energy.constraints import Interval
from lrrn.learning.settings import checked_number
from lrrn.runtime.devices import choose_device

STANDARDIZE = (False, True, "common", "features")
"""Values of ``standardize``."""
COUNTS = {"epochs": 1, "batch_size": 1, "max_sweeps": 1, "n_iter_no_change": 1, "pretrain_epochs": 0, "shifts": 0}
"""Parameters that are whole numbers, with their smallest values."""
WORDS = {
    "objective": "contrastive",
    "init": "glorot",
    "optimizer": "adam",
    "schedule": "cosine",
    "on_failure": "warn",
    "dtype": "float32",
}
"""Parameters that are words, with a value of each."""

FLAGS = ("early_stopping", "flips", "reuse_activations", "resume")
"""Parameters that are true or false."""


def checked_size(eps: Any) -> float:
    """Return the size of a perturbation; raise ValueError if it is no single number of at least 0."""
    return float(checked_number("eps", eps, "be at least 0", lambda size: size >= 0))


def checked_device(device: Any) -> torch.device:
    """Return the device that a name or a torch.device stands for; raise ValueError if there is none."""
    if isinstance(device, torch.device):
        return choose_device("cpu" if device.type == "cpu" else str(device))
    if not isinstance(device, str):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda', 'cuda:0', ... or a torch.device; got {device!r}")
    return choose_device(device)


def plain_beta(beta: Any) -> float | tuple[float, ...]:
    """Return beta as one number of Python, or a tuple of them; raise ValueError if it is neither."""
    several = not isinstance(beta, str) and np.iterable(beta)
    numbers = tuple(beta) if several else (beta,)
    values = tuple(float(checked_number("beta", b, "be a number, or one for each layer", lambda b: True)) for b in numbers)
    return values if several else values[0]


def check_common(model: Any) -> None:
    """Raise ValueError for a value of a parameter that all estimators have, if it is wrong by itself."""
    check_numbers(model)
    for name, example in WORDS.items():
        value = getattr(model, name, None)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must be a word, such as {example!r}; got {value!r}")
    if np.ndim(model.standardize) or model.standardize not in STANDARDIZE:
        raise ValueError(f"standardize must be False, True, 'common' or 'features'; got {model.standardize!r}")
    if not isinstance(model.constraint, str | Interval | Sequence):
        raise ValueError(f"constraint must be 'free', 'nonneg', 'box' or a pair (lo, hi); got {model.constraint!r}")
    shape = model.image_shape
    if shape is not None and (isinstance(shape, str) or not np.iterable(shape)):
        raise ValueError(f"image_shape must be (channels, height, width), all positive integers, or None; got {shape!r}")
    for name in FLAGS:
        value = getattr(model, name)
        if not isinstance(value, bool | np.bool_) and not (isinstance(value, int) and value in (0, 1)):
            raise ValueError(f"{name} must be True or False; got {value!r}")
    check_random_state(model.random_state)
    checked_device(model.device)
    check_run(model)


def check_numbers(model: Any) -> None:
    """Raise ValueError for a parameter that is not the number it should be."""
    fraction = model.validation_fraction
    checked_number("validation_fraction", fraction, "lie between 0 and 1", lambda share: 0 < share < 1)
    for name, least in COUNTS.items():
        value = getattr(model, name, least)
        if value is None and name in model.DEFAULTS:
            continue
        kind = "a positive integer" if least else "an integer of at least 0"
        checked_number(name, value, f"be {kind}", lambda count, least=least: count >= least, whole=True)  # type: ignore[misc]
    plain_beta(model.beta)
    checked_number("gamma", model.gamma, "be a positive number", lambda gamma: 0 < gamma < math.inf)
    eps = getattr(model, "eps", None)
    if eps is not None:
        expected = "be None or a positive number, the size of perturbations to withstand"
        checked_number("eps", eps, expected, lambda size: 0 < size < math.inf)


def check_run(model: Any) -> None:
    """Raise ValueError for what a run takes beside its settings: files, callbacks, verbosity."""
    for name in ("checkpoint", "log"):
        path = getattr(model, name)
        if path is not None and not isinstance(path, str | os.PathLike):
            raise ValueError(f"{name} must be a path or None; got {path!r}")
    if model.resume and model.checkpoint is None:
        raise ValueError("resume=True needs checkpoint to name the file to continue from")
    callbacks = model.callbacks
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ValueError(f"callbacks must be a tuple of callables, also if there is only one; got {callbacks!r}")
    if not isinstance(model.verbose, bool | np.bool_):
        checked_number("verbose", model.verbose, "be a number, 0 for silence")


def check_class_weight(class_weight: Any) -> None:
    """Raise ValueError unless these are weights of classes, each of them finite and at least 0."""
    if class_weight is None or (isinstance(class_weight, str) and class_weight == "balanced"):
        return
    if not isinstance(class_weight, dict):
        raise ValueError(f"class_weight must be None, 'balanced' or a dict from labels to weights; got {class_weight!r}")
    for label, weight in class_weight.items():
        expected = "be finite and at least 0, where 0 leaves the class out"
        checked_number(f"class_weight of label {label!r}", weight, expected, lambda value: 0 <= value < math.inf)
