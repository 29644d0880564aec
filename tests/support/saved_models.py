"""A table, its labels, a small classifier of them to be saved, and changes of its file."""

from __future__ import annotations

import json
import math

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lrrn import LRRNClassifier

INF = math.inf
QUICK = dict(hidden_sizes=(6, 5), epochs=2, device="cpu", random_state=3)


def table(n: int = 40, d: int = 4) -> np.ndarray:
    return np.random.default_rng(0).normal(loc=3.0, scale=2.0, size=(n, d))


def labels(n: int = 40) -> np.ndarray:
    return np.arange(n) % 3


def classifier(y=None, X=None, **options) -> LRRNClassifier:
    X, y = table() if X is None else X, labels() if y is None else y
    return LRRNClassifier(**{**QUICK, "objective": "cross_entropy", **options}).fit(X, y)


def envelope_of(path) -> tuple[dict, dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["lrrn"]), {name: file.get_tensor(name) for name in file.keys()}


def rewrite(path, envelope, tensors) -> None:
    text = envelope if isinstance(envelope, str) else json.dumps(envelope)
    save_file(tensors, path, metadata={"lrrn": text})


def edited(path, change, target) -> None:
    """Write the file again with ``change`` made to its header."""
    envelope, tensors = envelope_of(path)
    change(envelope["header"])
    rewrite(target, envelope, tensors)


def set_item(header, group: str, name: str, value) -> None:
    """Set one of an estimator's parameters or attributes, which a header lists as [name, value]."""
    items = [pair for pair in header[group]["items"] if pair[0] != name]
    header[group]["items"] = [*items, [name, value]]
