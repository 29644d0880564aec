"""Saving that fails leaves what was there, and nothing else."""

from __future__ import annotations

import os
from fractions import Fraction

import numpy as np
import pytest
import torch
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import lrrn
from lrrn import LRRN, LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.persistence.checks import ATTRIBUTES, ATTRIBUTES_OUT, NOT_SAVED
from lrrn.runtime import storage
from oracles import random_network
from saved_models import INF, QUICK, classifier, labels, table


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


# --- what load would refuse -----------------------------------------------------------------------------------------------


def regressor():
    return LRRNRegressor(**QUICK).fit(table(), table()[:, 0])


def energy_model():
    return LRRNEnergyModel(**QUICK).fit(table())


def pipeline():
    return make_pipeline(StandardScaler(), LRRNClassifier(**QUICK)).fit(table(), labels())


def changed(model, inside="", **values):
    """Set attributes of a model, or of what is inside, as users may between a fit and a save."""
    for name, value in values.items():
        setattr(getattr(model, inside) if inside else model, name, value)
    return model


DAYS = np.array(["2020-01-01", "2021-01-01", "2022-01-01"], dtype="datetime64[D]")[labels()]
NET = (4, 3, 2)
UNFIT = {
    "a fraction of a sweep": (
        lambda: classifier().set_params(max_sweeps=1000.0),
        r"max_sweeps is 1000\.0, not an integer .*set_params\(max_sweeps=",
    ),
    "no such scaling": (lambda: classifier().set_params(standardize="both"), r"standardize is 'both', not one of False, True"),
    "no such behaviour": (lambda: classifier().set_params(on_failure=["warn"]), r"on_failure is \['warn'\], not one of 'warn'"),
    "a set": (
        lambda: classifier().set_params(class_weight={0, 1}),
        r"class_weight is \{0, 1\}, of type set, .*class_weight=\.\.\.",
    ),
    "a temperature in use": (
        lambda: classifier().set_params(objective="margin", temperature=0),
        r"temperature is 0, not one or two positive numbers; .*set_params",
    ),
    "days": (lambda: classifier(DAYS), r"classes_ is array\(\['2020-01-01'.* fit again with labels .*astype\(str\)"),
    "nanoseconds": (lambda: classifier(DAYS.astype("datetime64[ns]")), r"classes_ is .* fit again with labels .*astype\(str\)"),
    "targets that overflow": (
        lambda: changed(regressor(), scale_out_=np.array([np.inf])),
        r"scale_out_ is array\(\[inf\]\).* fit again",
    ),
    "a scale that turns targets around": (
        lambda: changed(regressor(), scale_out_=np.array([-1.0])),
        r"scale_out_ is array\(\[-1\.\]\), not .*, all positive; fit again",
    ),
    "energies that overflow": (
        lambda: changed(energy_model(), offset_=np.nan),
        r"offset_ is nan, not a finite number; fit again",
    ),
    "a step": (
        lambda: pipeline().set_params(standardscaler__copy={1}),
        r"standardscaler\.copy is \{1\}, .*set_params\(standardscaler__copy=",
    ),
    "a flag of a step": (lambda: pipeline().set_params(standardscaler__copy=3), "parameters of a StandardScaler"),
    "no such solver": (lambda: changed(LRRN(NET), solver="bla"), "solver of the network is 'bla', not one of auto, reference"),
    "half a sweep": (
        lambda: changed(LRRN(NET), max_sweeps=0.5),
        r"max_sweeps of the network is 0\.5, not an integer of at least 1",
    ),
    "no tolerance": (lambda: changed(LRRN(NET), tol=0), "tol of the network is 0, not None or a positive number"),
    "a network inside": (lambda: changed(classifier(), "network_", solver="bla"), "solver of the network is 'bla'"),
    "half precision": (lambda: LRRN(NET).half(), r"dtype of the network is 'float16'.*\.float\(\)"),
    "two precisions": (lambda: changed(LRRN(NET), W=LRRN(NET).double().W), "its tensors are not all float64"),
    "other weights": (lambda: changed(LRRN(NET), W=LRRN((4, 2, 2)).W), r"W\.0 is of shape \(2, 4\), not \(3, 4\)"),
    "fewer weights": (lambda: changed(LRRN(NET), W=LRRN((4, 3)).W), r"it has no weights W\.1"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_load_would_refuse_is_not_written_over_the_old_file(name, path):
    make, message = UNFIT[name]
    lrrn.save(random_network((5, 4, 3)), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"is not saved, since load would refuse its file: .*{message}"):
        lrrn.save(make(), path)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


STRANGE = [None, True, -1, 0, 0.5, INF, 10**30, "x", b"x", {1}, {}, [], (), [None], np.float32(2), np.arange(2), Fraction(1, 3)]


def assert_saved_models_can_be_loaded(model, names, path):
    """Give every attribute every strange value in turn: what is saved can be loaded, and all else is refused."""
    n_saved = 0
    for name in names:
        for value in STRANGE:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model, name, value)
                try:
                    lrrn.save(model, path)
                except ValueError as error:
                    assert "since load would refuse" in str(error) and not path.exists()
                    continue
            lrrn.load(path)
            path.unlink()
            n_saved += 1
    assert 0 < n_saved < len(names) * len(STRANGE)


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_an_estimator_that_is_saved_can_be_loaded_whatever_was_changed(make, path):
    model = make()
    names = {name for name in (*ATTRIBUTES, *ATTRIBUTES_OUT) if hasattr(model, name)}
    if make is classifier:  # parameters are treated alike
        names |= {*model.get_params()} - {*NOT_SAVED}
    assert_saved_models_can_be_loaded(model, sorted(names), path)


def test_a_network_that_is_saved_can_be_loaded_whatever_was_changed(path):
    net = LRRN(NET)
    assert_saved_models_can_be_loaded(net, ["solver", "tol", "max_sweeps"], path)
