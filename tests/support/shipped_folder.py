"""A folder of shipped models with one small classifier of digits, published as the record's models are."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import lrrn
from lrrn import datasets
from lrrn.persistence.published import Published, publish, write_radii
from lrrn.persistence.shipped import Shipped, digest, shipped_models

NAME = "digits-small"


@cache
def _trained() -> tuple[lrrn.LRRNClassifier, Any]:
    X, y = datasets.load("digits", "train")
    model = lrrn.LRRNClassifier(hidden_sizes=(12,), epochs=8, random_state=0, device="cpu").fit(X, y)
    return model, model.certificate(datasets.load("digits", "test")[0], "shared")


def ship(folder: Path) -> Shipped:
    """Train a classifier once; publish and index it."""
    (model, found), y = _trained(), datasets.load("digits", "test")[1]
    lrrn.save(model, folder / "small.safetensors")
    results = publish(found.prediction, y, found.radius, np.full(len(y), np.nan))
    write_radii(folder / "small.radii.npz", results)
    shares = {"0.1": results.certified(0.1), "0.5": results.certified(0.5)}
    files = ("small.safetensors", digest(folder / "small.safetensors"), "small.radii.npz", digest(folder / "small.radii.npz"))
    entry = Shipped(NAME, *files, "digits", "small", 0, "shared", "deployed", results.certified(0), shares, folder)
    (folder / "index.json").write_text(json.dumps([entry.as_json()]))
    return shipped_models(folder)[NAME]


def republished(entry: Shipped, results: Published, folder: Path) -> Shipped:
    """The same model with other radii in another folder, and an index that states the digest and shares of the new ones."""
    for name in (entry.file, entry.radii):
        (folder / name).write_bytes((entry.folder / name).read_bytes())
    write_radii(folder / entry.radii, results)
    shares = {size: results.certified(float(size)) for size in entry.certified}
    changed = {"radii_sha256": digest(folder / entry.radii), "accuracy": results.certified(0), "certified": shares}
    return replace(entry, folder=folder, **changed)


def own_folder(tmp_path, monkeypatch):
    """Ship a model in a folder of its own, which names refer to, and return its entry."""
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("LRRN_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    return ship(tmp_path / "models")


def flip_bit(path: Path, place: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
