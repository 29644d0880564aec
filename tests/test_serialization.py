"""Files: what is loaded is what was saved, to the bit; what is damaged is refused; nothing in a file is executed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import struct

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.base import clone

import lrrn
from lrrn import LRRN, Interval, LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.learning import Contrastive, Data, Settings, Trainer
from lrrn.persistence.reference import Reference
from lrrn.persistence.serialization import NOT_SAVED, load_reference
from lrrn.reports.evaluation import evaluate, reference_of
from lrrn.runtime import storage
from lrrn.runtime.storage import FileFormatError
from oracles import random_input, random_network

INF = math.inf
NETWORKS = {
    "defaults": dict(sizes=(5, 4, 3)),
    "one layer": dict(sizes=(5, 3), beta=(0.7,)),
    "free": dict(sizes=(5, 4, 3), constraint="free"),
    "box": dict(sizes=(5, 4, 3), constraint="box", output_constraint="box"),
    "nonneg output": dict(sizes=(5, 4, 3), output_constraint="nonneg"),
    "own ends": dict(sizes=(5, 4, 3), constraint=(0.1, 1 / 3), output_constraint=(-INF, 0.7)),
    "one constraint a layer": dict(sizes=(5, 4, 6, 3), constraint=[(-INF, 2.5), Interval(-0.25, INF)]),
    "betas and gamma": dict(sizes=(5, 4, 6, 3), beta=(0.1, 2.0, 1 / 3), gamma=0.3),
    "no biases": dict(sizes=(5, 4, 3), bias=False, reconstruction_bias=False),
    "b only": dict(sizes=(5, 4, 3), reconstruction_bias=False),
    "c only": dict(sizes=(5, 4, 3), bias=False),
    "solver settings": dict(sizes=(5, 4, 3), solver="newton", tol=3e-5, max_sweeps=77),
}
QUICK = dict(hidden_sizes=(6, 5), epochs=2, device="cpu", random_state=3)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.lrrn"


def table(n: int = 40, d: int = 4) -> np.ndarray:
    return np.random.default_rng(0).normal(loc=3.0, scale=2.0, size=(n, d))


def labels(n: int = 40) -> np.ndarray:
    return np.arange(n) % 3


def classifier(y=None, X=None, **options) -> LRRNClassifier:
    X, y = table() if X is None else X, labels() if y is None else y
    return LRRNClassifier(**{**QUICK, "objective": "cross_entropy", **options}).fit(X, y)


def reloaded(model, path):
    lrrn.save(model, path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    return lrrn.load(path)


def assert_same_state(a, b):
    """The same class, parameters (with their types), attributes of the fit, and network."""
    assert type(a) is type(b)
    ours, theirs = a.get_params(), b.get_params()
    for name in ours:
        if name not in NOT_SAVED:
            assert ours[name] == theirs[name] and type(ours[name]) is type(theirs[name]), name
    assert a.history_ == b.history_ and a.loss_curve_ == b.loss_curve_ and a.n_iter_ == b.n_iter_
    assert a.n_features_in_ == b.n_features_in_
    for name, value in a.network_.state_dict().items():
        assert torch.equal(value, b.network_.state_dict()[name]) and value.dtype == b.network_.state_dict()[name].dtype


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


# --- networks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_comes_back_to_the_bit(name, dtype, path):
    net = random_network(**{"gamma": 0.125, **NETWORKS[name]}, dtype=dtype)
    again = reloaded(net, path)
    assert type(again) is LRRN
    for attribute in ("sizes", "beta", "gamma", "intervals", "solver", "tol", "max_sweeps"):
        assert getattr(again, attribute) == getattr(net, attribute), attribute
    assert list(again.state_dict()) == list(net.state_dict())
    x = random_input(7, 5, dtype=dtype)
    ours, theirs = net.infer(x), again.infer(x)
    assert torch.equal(ours.output, theirs.output) and torch.equal(ours.energy, theirs.energy)
    assert torch.equal(net(x), again(x)) and again(x).dtype == dtype


def test_paths_may_be_strings_and_files_are_replaced(path):
    lrrn.save(random_network((5, 4, 3), seed=1), str(path))
    net = random_network((5, 2), seed=2)
    lrrn.save(net, str(path))
    again = lrrn.load(str(path))
    assert again.sizes == (5, 2) and torch.equal(again.W[0], net.W[0])


def test_a_loaded_network_can_be_trained_and_saved_again(path, tmp_path):
    again = reloaded(random_network((5, 4, 3), dtype=torch.float32), path)
    x, label = random_input(12, 5, dtype=torch.float32), torch.arange(12) % 3
    before = again.W[0].detach().clone()
    data = Data(x, torch.nn.functional.one_hot(label, 3).float(), label)
    Trainer(again, Contrastive(), Settings(epochs=1, learning_rate=0.01)).fit(data)
    assert all(p.requires_grad for p in again.parameters()) and not torch.equal(again.W[0], before)
    lrrn.save(again, path)
    assert torch.equal(lrrn.load(path).W[0], again.W[0])


def test_a_network_in_half_precision_is_saved_or_refused_at_once(path):
    """Not saved first and called damaged later."""
    net = LRRN((5, 4, 3), dtype=torch.bfloat16)
    try:
        lrrn.save(net, path)
    except (TypeError, ValueError):
        assert not path.exists()
        return
    assert torch.equal(lrrn.load(path).W[0], net.W[0])


# --- estimators -----------------------------------------------------------------------------------------------------------

LABELS = {
    "int": labels() + 5,
    "small int": labels().astype(np.int8) - 1,
    "float": labels().astype(float),
    "bool": labels() > 0,
    "string": np.array(["cat", "Hund", "føl"])[labels()],
    "object": np.array(["cat", "Hund", "føl"], dtype=object)[labels()],
}


@pytest.mark.parametrize("kind", LABELS)
def test_a_classifier_comes_back_with_its_labels(kind, path):
    X, model = table(), classifier(LABELS[kind])
    again = reloaded(model, path)
    assert_same_state(model, again)
    assert again.classes_.dtype == model.classes_.dtype and np.array_equal(again.classes_, model.classes_)
    assert np.array_equal(again.predict(X), model.predict(X)) and again.predict(X).dtype == model.predict(X).dtype
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("objective", ["contrastive", "margin"])
def test_a_classifier_comes_back_with_its_certificates(objective, standardize, path):
    X, model = table(), classifier(objective=objective, standardize=standardize)
    again = reloaded(model, path)
    assert_same_state(model, again)
    assert np.array_equal(again.decision_function(X), model.decision_function(X))
    assert np.array_equal(again.energy(X), model.energy(X))
    assert np.array_equal(again.certified_radius(X), model.certified_radius(X))
    assert again.certified_score(X, labels(), 0.01) == model.certified_score(X, labels(), 0.01)
    assert float(again.lipschitz_) == float(model.lipschitz_)


def test_feature_names_come_back_and_are_checked(path):
    X = pd.DataFrame(table(), columns=["height", "width", "længde", "w"])
    model = classifier(X=X)
    again = reloaded(model, path)
    assert list(again.feature_names_in_) == list(X.columns) and again.feature_names_in_.dtype == object
    assert np.array_equal(again.predict(X), model.predict(X))
    with pytest.raises(ValueError, match="feature names"):
        again.predict(X[["w", "height", "width", "længde"]])


UNUSUAL = {
    "interval": dict(constraint=Interval(-0.5, INF)),
    "pair": dict(constraint=(0.0, INF)),
    "a list": dict(constraint=["box", (-INF, 1.0)], hidden_sizes=[6, 5]),
    "class weights": dict(class_weight={0: 0.5, 1: 1.0, 2: 2.0}),
    "balanced": dict(class_weight="balanced"),
    "betas": dict(beta=(0.5, 1 / 3, 0.0), gamma=0.2, dtype="float64"),
    "numpy numbers": dict(learning_rate=np.float64(0.01), epochs=2, max_weight_norm=2.0),
    "two stages": dict(pretrain_epochs=1, optimizer="adamw", decoupled_weight_decay=0.01, schedule=None),
    "early stopping": dict(early_stopping=True, validation_fraction=0.3, n_iter_no_change=1),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_parameters_come_back_as_they_were_given(name, path):
    X, model = table(), classifier(**UNUSUAL[name])
    again = reloaded(model, path)
    if name == "numpy numbers":
        model.learning_rate = float(model.learning_rate)
    assert_same_state(model, again)
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))


def test_parameters_of_the_run_stay_behind(path, tmp_path):
    places = tmp_path / "run"
    places.mkdir()
    options = dict(checkpoint=places / "run.ckpt", log=places / "run.jsonl", callbacks=(lambda *_: None,), resume=True)
    model = classifier(**options, random_state=np.random.RandomState(0))
    lrrn.save(model, path)
    assert b"run.ckpt" not in path.read_bytes() and b"run.jsonl" not in path.read_bytes()
    again = lrrn.load(path)
    fresh = LRRNClassifier()
    for name in (*NOT_SAVED, "random_state"):
        assert getattr(again, name) == getattr(fresh, name), name
    assert np.array_equal(again.predict(table()), model.predict(table()))


@pytest.mark.parametrize("n_targets", [None, 1, 3])
@pytest.mark.parametrize("standardize", [False, True])
def test_a_regressor_comes_back(n_targets, standardize, path):
    X = table()
    y = X[:, 0] ** 2 if n_targets is None else 10 + X[:, :n_targets] * 5
    model = LRRNRegressor(**QUICK, standardize=standardize).fit(X, y)
    again = reloaded(model, path)
    assert_same_state(model, again)
    assert again.predict(X).shape == y.shape and np.array_equal(again.predict(X), model.predict(X))
    for ours, theirs in zip(model.predict_interval(X, 0.1), again.predict_interval(X, 0.1), strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(again.energy(X), model.energy(X)) and again.score(X, y) == model.score(X, y)


@pytest.mark.parametrize("standardize", [False, True])
def test_an_energy_model_comes_back(standardize, path):
    X = table()
    model = LRRNEnergyModel(**QUICK, standardize=standardize, contamination=0.2).fit(X)
    again = reloaded(model, path)
    assert_same_state(model, again)
    assert again.offset_ == model.offset_
    for method in ("energy", "score_samples", "decision_function", "predict", "transform"):
        assert np.array_equal(getattr(again, method)(X), getattr(model, method)(X)), method
    codes = model.transform(X)
    assert np.array_equal(again.inverse_transform(codes), model.inverse_transform(codes))
    assert list(again.get_feature_names_out()) == list(model.get_feature_names_out())


def test_partial_fit_goes_on_where_the_saved_one_would(path):
    """After a fit there is no state of the optimiser to carry, so both take the same steps."""
    X, model = table(), classifier(objective="contrastive", optimizer="adam")
    again = reloaded(model, path)
    for estimator in (model, again):
        estimator.partial_fit(X[:20], labels()[:20])
        estimator.partial_fit(X[20:], labels()[20:])
    assert [r["epoch"] for r in again.history_] == [1, 2, 3, 4] and again.loss_curve_ == model.loss_curve_
    for ours, theirs in zip(model.network_.parameters(), again.network_.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_loaded_estimator_can_be_cloned_and_fitted_to_the_same_bits(path):
    X, model = table(), classifier(beta=(0.5, 1.0, 0.0), constraint=(-0.5, INF))
    fresh = clone(reloaded(model, path))
    assert not hasattr(fresh, "network_") and fresh.get_params() == model.get_params()
    assert np.array_equal(fresh.fit(X, labels()).predict_proba(X), model.predict_proba(X))


def test_a_loaded_estimator_can_be_saved_again_to_the_same_bytes(path, tmp_path):
    again = reloaded(classifier(LABELS["string"]), path)
    second = tmp_path / "second"
    lrrn.save(again, second)
    assert second.read_bytes() == path.read_bytes()


# --- files that are not what they should be -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: random_network((5, 4, 3)), classifier], ids=["network", "classifier"])
def test_a_file_cut_off_anywhere_is_refused(make, path):
    lrrn.save(make(), path)
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]  # where the tensors begin
    edges = {0, 1, 7, 8, 9, start - 1, start, start + 1, len(content) - 1}
    for length in sorted(edges | set(range(0, len(content), max(1, len(content) // 50)))):
        path.write_bytes(content[:length])
        with pytest.raises(FileFormatError, match=r"model\.lrrn is damaged"):
            lrrn.load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(FileFormatError):
        lrrn.load(path)


def test_bytes_that_are_no_file_of_ours_are_refused(path):
    rng = np.random.default_rng(0)
    samples = [b"", b"\0" * 100, b"\xff" * 100, b"{}", b"PK\x03\x04" + b"\0" * 50, (2).to_bytes(8, "little") + b"{}"]
    samples += [rng.integers(0, 256, int(n), dtype=np.uint8).tobytes() for n in rng.integers(1, 2000, 40)]
    for content in samples:
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match=r"model\.lrrn is"):
            lrrn.load(path)


def test_a_flipped_byte_never_gives_another_kind_of_error(path):
    lrrn.save(random_network((3, 2)), path)
    content = path.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for at in range(header):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            lrrn.load(path)  # a digit of a number may change and still be a number
        except FileFormatError:
            pass


def test_foreign_safetensors_files_are_refused(path):
    for metadata in (None, {"format": "pt"}):
        save_file({"W.0": torch.zeros(3, 2)}, path, metadata=metadata)
        with pytest.raises(FileFormatError, match="not one that lrrn wrote"):
            lrrn.load(path)


def test_a_newer_format_asks_for_an_update(path):
    lrrn.save(random_network((5, 4, 3)), path)
    envelope, tensors = envelope_of(path)
    rewrite(path, {**envelope, "version": storage.VERSION + 1}, tensors)
    with pytest.raises(FileFormatError, match=rf"version {storage.VERSION + 1} .* up to {storage.VERSION}: update lrrn"):
        lrrn.load(path)


def test_a_checkpoint_is_not_a_model(tmp_path):
    path = tmp_path / "run.ckpt"
    x = random_input(6, 5, dtype=torch.float32)
    net = random_network((5, 4, 3), dtype=torch.float32)
    Trainer(net, Contrastive(), Settings(epochs=1, learning_rate=0.01), checkpoint=path).fit(Data(x, x[:, :3]))
    with pytest.raises(FileFormatError, match=r"run\.ckpt holds a checkpoint, not a network or classifier"):
        lrrn.load(path)


ENVELOPES = [
    "",
    "null",
    "[]",
    "{}",
    '"x"',
    '{"version": "1"}',
    '{"version": 1}',
    '{"version": 1, "kind": "network"}',
    '{"version": 1, "kind": ["network"], "header": {}}',
    '{"version": 1, "kind": "network", "header": null}',
    '{"version": 1, "kind": "classifier", "header": {}}',
    '{"version": 1, "kind": "pickle", "header": {}}',
]


@pytest.mark.parametrize("text", ENVELOPES)
def test_envelopes_that_make_no_sense_are_refused(text, path):
    rewrite(path, text, {"W.0": torch.zeros(3, 2)})
    with pytest.raises(FileFormatError, match=r"model\.lrrn"):
        lrrn.load(path)


def test_an_endless_header_is_refused(path):
    for text in ("[" * 100_000, '{"version": ' + "1" * 5000 + "}"):
        rewrite(path, text, {"W.0": torch.zeros(3, 2)})
        with pytest.raises(FileFormatError, match="damaged"):
            lrrn.load(path)


def test_a_header_that_does_not_fit_the_tensors_is_refused(path, tmp_path):
    lrrn.save(random_network((5, 4, 3), dtype=torch.float64), path)
    for change in (
        {"sizes": [5, 4, 4]},
        {"sizes": [5, 3]},
        {"sizes": [5, 4, 3, 3]},
        {"sizes": []},
        {"sizes": [5, -4, 3]},
        {"bias": False},
        {"reconstruction_bias": False},
        {"beta": [1.0]},
        {"gamma": -1.0},
        {"intervals": [["0.0", "inf"]]},
        {"intervals": [["1.0", "0.0"], ["-inf", "inf"]]},
        {"dtype": "float8"},
    ):
        edited(path, lambda header, change=change: header.update(change), tmp_path / "edited")
        with pytest.raises(FileFormatError, match="does not fit a network"):
            lrrn.load(tmp_path / "edited")
    envelope, tensors = envelope_of(path)
    first = {name: t for name, t in tensors.items() if name != "W.0"}
    for wrong in (first, {**tensors, "W.9": torch.zeros(1)}, {**tensors, "W.0": torch.zeros(4, 6)}, {"x": torch.zeros(1)}):
        rewrite(tmp_path / "edited", envelope, wrong)
        with pytest.raises(FileFormatError, match="does not fit a network"):
            lrrn.load(tmp_path / "edited")


def test_a_header_of_another_precision_is_refused(path):
    """Weights must not be rounded in silence."""
    lrrn.save(random_network((5, 4, 3), dtype=torch.float64), path)
    edited(path, lambda header: header.update(dtype="float32"), path)
    with pytest.raises(FileFormatError, match="does not fit a network"):
        lrrn.load(path)


STRANGE = [None, True, -1, 0, 10**400, INF, "x", [], {}, [None], {"array": 1}, {"tuple": 3}, {"items": 3}, {"of": "interval"}]


def refused_or_loaded(path):
    """Load a file that was tampered with: any error other than FileFormatError fails the test."""
    try:
        return lrrn.load(path)
    except FileFormatError:
        return None


def test_no_header_of_a_network_gives_another_kind_of_error(path, tmp_path):
    lrrn.save(random_network((3, 2, 2)), path)
    for key in envelope_of(path)[0]["header"]:
        edited(path, lambda header, key=key: header.pop(key), tmp_path / "edited")
        with pytest.raises(FileFormatError, match="does not fit a network"):
            lrrn.load(tmp_path / "edited")
        for value in STRANGE:
            edited(path, lambda header, key=key, value=value: header.update({key: value}), tmp_path / "edited")
            refused_or_loaded(tmp_path / "edited")


def test_no_header_of_an_estimator_gives_another_kind_of_error(path, tmp_path):
    lrrn.save(classifier(), path)
    header = envelope_of(path)[0]["header"]
    for key in header:
        edited(path, lambda header, key=key: header.pop(key), tmp_path / "edited")
        with pytest.raises(FileFormatError, match="does not fit a classifier"):
            lrrn.load(tmp_path / "edited")
    for key in header:
        for value in STRANGE:
            edited(path, lambda header, key=key, value=value: header.update({key: value}), tmp_path / "edited")
            refused_or_loaded(tmp_path / "edited")
    for group in ("parameters", "attributes"):
        for name, _ in header[group]["items"]:
            for value in STRANGE:
                edited(path, lambda header, g=group, n=name, v=value: set_item(header, g, n, v), tmp_path / "edited")
                refused_or_loaded(tmp_path / "edited")


def test_an_estimator_without_all_its_attributes_is_refused(path, tmp_path):
    lrrn.save(classifier(), path)
    names = {name for name, _ in envelope_of(path)[0]["header"]["attributes"]["items"]}
    assert names == {"classes_", "n_features_in_", "history_", "offset_in_", "scale_in_", "_seed"}
    for name in names:

        def leave_out(header, name=name):
            header["attributes"]["items"] = [pair for pair in header["attributes"]["items"] if pair[0] != name]

        edited(path, leave_out, tmp_path / "edited")
        with pytest.raises(FileFormatError, match="does not fit a classifier"):
            lrrn.load(tmp_path / "edited")


def test_an_estimator_with_another_number_of_classes_is_refused(path):
    lrrn.save(classifier(), path)
    two = {"array": [0, 1], "dtype": "<i8"}
    edited(path, lambda header: set_item(header, "attributes", "classes_", two), path)
    with pytest.raises(FileFormatError, match="does not fit a classifier"):
        lrrn.load(path)


def reference(model, n_samples=6, image_shape=(2, 2)) -> Reference:
    X, y = table(), labels()
    result = evaluate("m", model, X, y, (0.1,), image_shape)
    return reference_of(model, X, y, image_shape, "a table", n_samples, result.score, result.radii, result.energies)


@pytest.mark.parametrize(
    "make", [classifier, lambda: LRRNEnergyModel(**QUICK).fit(table())], ids=["classifier", "energy model"]
)
def test_a_reference_comes_back_and_leaves_the_model_alone(make, path):
    model = make()
    given = reference(model)
    lrrn.save(model, path, given)
    found = load_reference(path)
    for name in ("source", "image_shape", "low", "high", "score"):
        assert getattr(found, name) == getattr(given, name), name
    for name in ("samples", "labels", "radii"):
        np.testing.assert_array_equal(getattr(found, name), getattr(given, name))
    assert list(found.energies) == ["samples", "mirrored", "Gaussian"]
    for name, values in given.energies.items():
        np.testing.assert_array_equal(found.energies[name], values)
    again = lrrn.load(path)
    np.testing.assert_array_equal(again.energy(table()), model.energy(table()))
    lrrn.save(again, path)
    assert load_reference(path) is None


def test_a_reference_holds_samples_of_every_class_in_turn_or_none():
    model = classifier()
    found = reference(model, 7)
    np.testing.assert_array_equal(found.labels, [0, 1, 2, 0, 1, 2, 0])
    np.testing.assert_array_equal(found.samples, table()[:7].astype(np.float32))
    assert (found.low, found.high) == (table().min(), table().max())
    right = model.predict(table()) == labels()
    np.testing.assert_array_equal(found.radii, np.where(right, model.certified_radius(table()), 0.0))
    assert len(reference(model, 0).samples) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(labels=np.full(6, 3)), "not numbers of 3 classes"),
        (dict(samples=np.zeros((6, 5), np.float32)), "not of 4 features"),
        (dict(samples=np.full((6, 4), np.nan, np.float32)), "not finite"),
        (dict(image_shape=(3, 2)), "images of shape"),
        (dict(low=1.0, high=1.0), "empty range"),
        (dict(energies={"mirrored": np.ones(3)}), "energies of its reference are missing"),
    ],
)
def test_a_reference_that_does_not_fit_its_model_is_refused(change, message, path):
    model = classifier()
    lrrn.save(model, path, dataclasses.replace(reference(model), **change))
    with pytest.raises(FileFormatError, match=message):
        load_reference(path)
    np.testing.assert_array_equal(lrrn.load(path).predict(table()), model.predict(table()))


def test_a_missing_file_is_named(tmp_path):
    for place in (tmp_path / "nothing", tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(FileNotFoundError, match=f"no file {place}"):
            lrrn.load(place)


# --- saving that fails ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_saved_is_refused_and_nothing_is_written(path):
    for model, error, message in (
        (LRRNClassifier(), ValueError, "this LRRNClassifier is not fitted yet; call fit first"),
        (LRRNRegressor(), ValueError, "this LRRNRegressor is not fitted yet"),
        (LRRNEnergyModel(), ValueError, "this LRRNEnergyModel is not fitted yet"),
        (torch.nn.Linear(2, 2), TypeError, "got Linear"),
        ({"W": 1}, TypeError, "can save a network or one of lrrn's estimators; got dict"),
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


# --- nothing is executed --------------------------------------------------------------------------------------------------


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, target) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_pickle_is_refused_and_not_run(path, tmp_path):
    target = tmp_path / "sprung"
    content = pickle.dumps(Trap(target))
    prefixed = struct.pack("<Q", len(content)) + content  # where a safetensors file has its header
    for data in (content, prefixed):
        path.write_bytes(data)
        with pytest.raises(FileFormatError, match="damaged or not a file that lrrn wrote"):
            lrrn.load(path)
    torch.save({"W.0": torch.zeros(2, 2), "trap": Trap(target)}, path)
    with pytest.raises(FileFormatError, match="damaged or not a file that lrrn wrote"):
        lrrn.load(path)
    assert not target.exists()
    pickle.loads(content)
    assert target.exists()  # the trap works


@pytest.mark.parametrize(
    "name", ["predict", "network_", "__class__", "__dict__", "_optimizer_state", "callbacks", "loss_curve_"]
)
def test_no_other_attribute_can_be_set(name, path):
    lrrn.save(classifier(), path)
    edited(path, lambda header: set_item(header, "attributes", name, 1), path)
    with pytest.raises(FileFormatError, match=rf"does not fit a classifier \('{name}'\)"):
        lrrn.load(path)


@pytest.mark.parametrize("name", ["self", "network_", "predict", "no_such_parameter"])
def test_no_unknown_parameter_can_be_set(name, path):
    lrrn.save(classifier(), path)
    edited(path, lambda header: set_item(header, "parameters", name, 1), path)
    with pytest.raises(FileFormatError, match=rf"does not fit a classifier .*'{name}'"):
        lrrn.load(path)


@pytest.mark.parametrize("name", NOT_SAVED)
def test_a_file_cannot_name_files_to_write_or_resume_from(name, path):
    """The next fit would write to the checkpoint or the log that a stranger's file names."""
    lrrn.save(classifier(), path)
    value = {"callbacks": {"tuple": []}, "resume": True}.get(name, "/somewhere/else")
    edited(path, lambda header: set_item(header, "parameters", name, value), path)
    with pytest.raises(FileFormatError, match=rf"does not fit a classifier .*'{name}'"):
        lrrn.load(path)


def test_an_array_of_objects_holds_plain_values_only(path):
    """NumPy's object arrays are built from JSON's values: strings, numbers and lists."""
    lrrn.save(classifier(LABELS["object"]), path)
    kinds = {type(value) for value in lrrn.load(path).classes_}
    assert kinds == {str}
