"""What is loaded is what was saved, to the bit."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone

import lrrn
from lrrn import LRRN, Interval, LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.learning import Contrastive, Data, Settings, Trainer
from lrrn.persistence.serialization import NOT_SAVED
from oracles import random_input, random_network
from saved_models import INF, QUICK, classifier, labels, table

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


def test_numbers_of_numpy_come_back_as_those_of_python(path):
    net = LRRN((5, 4, 3), max_sweeps=np.int64(50), tol=np.float32(0.25))
    for again in (net, reloaded(net, path)):
        assert (again.max_sweeps, again.tol) == (50, 0.25) and type(again.max_sweeps) is int and type(again.tol) is float
    net.max_sweeps, net.tol = np.int64(60), np.float32(0.5)  # set later, where nothing checks it
    again = reloaded(net, path)
    assert (again.max_sweeps, again.tol) == (60, 0.5) and type(again.max_sweeps) is int and type(again.tol) is float


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


@pytest.mark.parametrize("standardize", [False, True, "features"])
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


@pytest.mark.parametrize("now", [False, True, "features"])
@pytest.mark.parametrize("then", [False, True, "features"])
def test_scaling_comes_back_though_the_parameter_was_changed_since(then, now, path):
    X, model = table(), classifier(standardize=then).set_params(standardize=now)
    again = reloaded(model, path)
    assert_same_state(model, again)
    assert np.array_equal(again.offset_in_, model.offset_in_) and np.array_equal(again.scale_in_, model.scale_in_)
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))


@pytest.mark.parametrize("objective", ["contrastive", "cross_entropy"])
def test_a_temperature_that_is_not_used_may_be_anything(objective, path):
    model = classifier(objective=objective).set_params(temperature=0)
    again = reloaded(model, path)
    assert again.temperature == 0 and np.array_equal(again.predict(table()), model.predict(table()))


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
@pytest.mark.parametrize("standardize", [False, True, "features"])
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


@pytest.mark.parametrize("standardize", [False, True, "features"])
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


def test_an_array_of_objects_holds_plain_values_only(path):
    """NumPy's object arrays are built from JSON's values: strings, numbers and lists."""
    lrrn.save(classifier(LABELS["object"]), path)
    kinds = {type(value) for value in lrrn.load(path).classes_}
    assert kinds == {str}
