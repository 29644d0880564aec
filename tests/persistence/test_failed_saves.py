"""Saving that fails leaves what was there, and nothing else."""

from __future__ import annotations

import os

import pytest
import torch

import lrrn
from lrrn import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.runtime import storage
from oracles import random_network
from saved_models import classifier


def test_what_cannot_be_saved_is_refused_and_nothing_is_written(path):
    for model, error, message in (
        (LRRNClassifier(), ValueError, "this LRRNClassifier is not fitted yet; call fit first"),
        (LRRNRegressor(), ValueError, "this LRRNRegressor is not fitted yet"),
        (LRRNEnergyModel(), ValueError, "this LRRNEnergyModel is not fitted yet"),
        (torch.nn.Linear(2, 2), TypeError, "got Linear"),
        ({"W": 1}, TypeError, "can save a network, one of lrrn's estimators or a Pipeline with one; got dict"),
        (None, TypeError, "got NoneType"),
    ):
        with pytest.raises(error, match=message):
            lrrn.save(model, path)
    assert list(path.parent.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    net, file, folder = random_network((5, 4, 3)), tmp_path / "file", tmp_path / "folder"
    file.write_text("text")
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match=r"cannot write .*model: the folder .*no does not exist"):
        lrrn.save(net, tmp_path / "no" / "model")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        lrrn.save(net, file / "model")
    with pytest.raises(OSError):
        lrrn.save(net, folder)
    # root may write anywhere, so the answer of the system is given here
    monkeypatch.setattr(storage.os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match=r"cannot write .*model: the folder .* is read-only"):
        lrrn.save(net, tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"] and not list(folder.iterdir())


@pytest.mark.parametrize("call", ["fsync", "chmod", "replace"])
def test_after_a_failed_save_the_old_file_is_intact(call, path, monkeypatch):
    lrrn.save(random_network((5, 4, 3), seed=1), path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, call, full)
        with pytest.raises(OSError, match="No space left"):
            lrrn.save(random_network((5, 4, 3), seed=2), path)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_an_interrupted_save_leaves_no_temporary_file(path, monkeypatch):
    def ctrl_c(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.os, "replace", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        lrrn.save(random_network((5, 4, 3)), path)
    assert os.listdir(path.parent) == []


def test_a_parameter_json_cannot_hold_is_refused_before_the_old_file_is_touched(path):
    model = classifier()
    lrrn.save(random_network((5, 4, 3)), path)
    before = path.read_bytes()
    model.class_weight = {0, 1}
    with pytest.raises(TypeError, match="set"):
        lrrn.save(model, path)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]
