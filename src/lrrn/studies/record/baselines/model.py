"""Type of a trained baseline, and its file format."""

from __future__ import annotations

import os

from lrrn.runtime import storage
from lrrn.studies.record.baselines.prototypes import NearestPrototypes
from lrrn.studies.record.baselines.sorting import SortNetwork

Baseline = NearestPrototypes | SortNetwork
"""A module from float64 inputs to scores, with ``methods`` of certified radii."""
KINDS: tuple[type[Baseline], ...] = (NearestPrototypes, SortNetwork)
FILE = "baseline"


def save(model: Baseline, path: str | os.PathLike[str]) -> None:
    """Write a baseline to a file."""
    storage.write(path, FILE, dict(model.state_dict()), {"kind": model.kind, **model.header()})


def load(path: str | os.PathLike[str], device: str = "cpu") -> Baseline:
    """Read what :func:`save` wrote."""
    _, tensors, header = storage.read(path, FILE)
    for kind in KINDS:
        if header.get("kind") == kind.kind:
            return kind.restored(tensors, header).to(device)
    raise storage.FileFormatError(f"{path} holds a {header.get('kind')!r}; known are {', '.join(k.kind for k in KINDS)}")
