"""Where a loaded model is put."""

from __future__ import annotations

import pytest
import torch
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import lrrn
from lrrn import LRRNClassifier
from lrrn.persistence import serialization
from lrrn.runtime.storage import FileFormatError
from oracles import random_network
from saved_models import QUICK, classifier, labels, table

MODELS = {
    "network": (lambda: random_network((5, 4, 3)), lambda net: net),
    "classifier": (classifier, lambda model: model.network_),
    "pipeline": (
        lambda: make_pipeline(StandardScaler(), LRRNClassifier(**QUICK)).fit(table(), labels()),
        lambda model: model[-1].network_,
    ),
}


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", MODELS)
def test_a_device_is_chosen(name, path, no_cuda):
    make, network_of = MODELS[name]
    lrrn.save(make(), path)
    for device in ("auto", "cpu", torch.device("cpu")):
        parameters = list(network_of(lrrn.load(path, device=device)).parameters())
        assert {p.device for p in parameters} == {torch.device("cpu")} and all(p.requires_grad for p in parameters)


@pytest.mark.parametrize("name", MODELS)
def test_all_parameters_go_to_the_device_that_was_chosen(name, path, monkeypatch):
    """The device "meta", which every machine has, stands for a GPU."""
    make, network_of = MODELS[name]
    lrrn.save(make(), path)
    asked = []
    monkeypatch.setattr(serialization, "choose_device", lambda name: asked.append(name) or torch.device("meta"))
    loaded = network_of(lrrn.load(path, device="cuda:1"))
    assert asked == ["cuda:1"] and {p.device.type for p in loaded.parameters()} == {"meta"}


@pytest.mark.parametrize(("device", "message"), [("gpu", "unknown device 'gpu'"), ("cuda", "no CUDA device is available")])
def test_a_device_that_is_not_here_is_no_damage_of_the_file(device, message, path, no_cuda):
    lrrn.save(random_network((5, 4, 3)), path)
    with pytest.raises(ValueError, match=message) as error:
        lrrn.load(path, device=device)
    assert not isinstance(error.value, FileFormatError)
