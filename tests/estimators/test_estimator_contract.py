"""What all estimators share: pipelines, data frames, seeds, energies, and what they refuse."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

import lrrn
from lrrn import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.runtime import memory
from oracles import PlainNetwork, by_quadprog, full_qp
from small_estimators import blobs, classifier, energy_model, regressor, weights

# --- scikit-learn ---------------------------------------------------------------------------------------------------------


def test_a_grid_search_over_a_pipeline_in_two_processes():
    X, y = blobs()
    pipeline = make_pipeline(MinMaxScaler(), classifier())
    search = GridSearchCV(pipeline, {"lrrnclassifier__learning_rate": [1e-6, 0.02]}, cv=3, n_jobs=2).fit(X, y)
    assert search.best_params_ == {"lrrnclassifier__learning_rate": 0.02}
    alone = classifier().fit(MinMaxScaler().fit_transform(X), y)
    assert torch.equal(weights(search.best_estimator_[-1]), weights(alone))


def test_pipelines_pass_transformed_data_on():
    X, y = blobs()
    pipeline = make_pipeline(MinMaxScaler(), energy_model(), classifier()).fit(X, y)
    scaled = MinMaxScaler().fit_transform(X)
    codes = energy_model().fit(scaled).transform(scaled)
    np.testing.assert_array_equal(pipeline.predict(X), classifier().fit(codes, y).predict(codes))


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_clones_have_the_parameters_and_nothing_learned(make):
    X, y = blobs()
    model = make(standardize=True, beta=0.5, constraint=(0, 2)).fit(X, y)
    copy = clone(model)
    assert copy.get_params() == model.get_params() and not hasattr(copy, "network_")
    assert torch.equal(weights(copy.fit(X, y)), weights(model))


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_data_frames(make):
    X, y = blobs()
    frame = pd.DataFrame(X, columns=list("abcdef"))
    model = make().fit(frame, pd.Series(y))
    assert model.feature_names_in_.tolist() == list("abcdef")
    assert torch.equal(weights(model), weights(make().fit(X, y)))
    methods = {"LRRNClassifier": ["predict", "decision_function", "certified_radius"], "LRRNRegressor": ["predict"]}
    for method in [*methods.get(type(model).__name__, ["transform", "score_samples"]), "energy"]:
        with pytest.raises(ValueError, match="feature names should match"):
            getattr(model, method)(frame.rename(columns={"a": "z"}))


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_read_only_data(make):
    """As joblib hands them to its workers, and pandas its users."""
    X, y = blobs()
    X.setflags(write=False)
    torch.set_warn_always(True)
    try:
        model = make().fit(X, y)
        model.predict(X)
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_the_same_random_state_gives_the_same_bits_and_another_does_not(make):
    X, y = blobs()
    model = make().fit(X, y)
    assert torch.equal(weights(model), weights(make().fit(X, y)))
    assert torch.equal(weights(model), weights(clone(model).fit(X, y).fit(X, y)))
    assert not torch.equal(weights(model), weights(make(random_state=1).fit(X, y)))


def test_long_inputs_are_taken_in_chunks(monkeypatch):
    X, y = blobs()
    model = classifier(standardize=True).fit(X, y)
    scores, radii, label, energy = model.decision_function(X), model.certified_radius(X), model.predict(X), model.energy(X)
    monkeypatch.setitem(memory.NUMBERS, "cpu", 60)
    np.testing.assert_allclose(model.decision_function(X), scores, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.certified_radius(X), radii, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(model.energy(X), energy, rtol=1e-6)
    np.testing.assert_array_equal(model.predict(X), label)


# --- energies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
@pytest.mark.parametrize("standardize", [False, True])
def test_energies_are_minima(make, standardize):
    X, y = blobs()
    X = 2 * X + 1 if standardize else X
    model = make(standardize=standardize).fit(X, y)
    seen = (X - X.mean(axis=0)) / math.sqrt(X.var(axis=0).mean()) if standardize else X
    np.testing.assert_allclose(model.energy(X), model.network_.infer(torch.as_tensor(seen)).energy.numpy(), rtol=1e-9)
    problems = [full_qp(PlainNetwork.of(model.network_), x) for x in seen[:3]]
    np.testing.assert_allclose(model.energy(X)[:3], [qp.value(by_quadprog(qp)) for qp in problems], rtol=1e-6)


# --- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_bad_parameters(make):
    X, y = blobs()
    cases = [
        (dict(device="tpu"), "unknown device 'tpu'; use 'auto', 'cpu' or 'cuda'"),
        (dict(dtype="float16"), "unknown dtype 'float16'; use one of float32, float64"),
        (dict(hidden_sizes=(4, 0)), r"hidden_sizes must be positive integers or lrrn.Conv\(channels, kernel\); got \(4, 0\)"),
        (dict(hidden_sizes=(4.0,)), r"hidden_sizes must be positive integers or lrrn.Conv\(channels, kernel\); got \(4.0,\)"),
        (dict(hidden_sizes=0), r"hidden_sizes must be positive integers or lrrn.Conv\(channels, kernel\); got 0"),
        (dict(hidden_sizes=4.0), r"hidden_sizes must be positive integers or lrrn.Conv\(channels, kernel\); got 4.0"),
        (dict(hidden_sizes="64"), r"hidden_sizes must be positive integers or lrrn.Conv\(channels, kernel\); got '64'"),
        (dict(validation_fraction=0.0), "validation_fraction must lie between 0 and 1; got 0.0"),
        (dict(validation_fraction=1.0), "validation_fraction must lie between 0 and 1; got 1.0"),
        (dict(decoupled_weight_decay=0.1), "decoupled_weight_decay belongs to optimizer='adamw'; got optimizer='adam'"),
        (dict(epochs=0), "epochs must be a positive integer; got 0"),
        (dict(epochs=1.5), "epochs must be a positive integer; got 1.5"),
        (dict(max_sweeps=1e3), "max_sweeps must be a positive integer; got 1000.0"),
        (dict(shifts=1.5), "shifts must be an integer of at least 0; got 1.5"),
        (dict(max_seconds=0), "max_seconds must be positive or None; got 0"),
        (dict(max_seconds=float("nan")), "max_seconds must be positive or None; got nan"),
        (dict(n_iter_no_change=0), "n_iter_no_change must be a positive integer; got 0"),
        (dict(n_iter_no_change=2.5), "n_iter_no_change must be a positive integer; got 2.5"),
        (dict(n_iter_no_change=None), "n_iter_no_change must be a positive integer; got None"),
        (dict(epochs=True), "epochs must be a positive integer; got True"),
        (dict(tol=0), "tol must be a positive number, or None for the default; got 0"),
        (dict(gamma=-1), "gamma must be a positive number; got -1"),
        (dict(image_shape=(1, 2, 2)), r"image_shape=\(1, 2, 2\) has 4 pixels, and X has 6 features"),
        (dict(init="zeros"), "unknown init 'zeros'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            make(**options).fit(X, y)


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_a_fit_leaves_the_global_generator_of_torch_alone(make):
    X, y = blobs()
    before = torch.get_rng_state()
    model = make().fit(X, y)
    if make is classifier:
        model.partial_fit(X, y)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_one_number_is_the_width_of_one_hidden_layer(make):
    X, y = blobs()
    model = make(hidden_sizes=4).fit(X, y)
    assert model.get_params()["hidden_sizes"] == 4
    assert torch.equal(weights(model), weights(make(hidden_sizes=(4,)).fit(X, y)))


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_sparse_input_is_refused_with_what_to_do(make):
    X, y = blobs()
    with pytest.raises(TypeError, match=r"Sparse data was passed.*dense data is required.*toarray"):
        make().fit(scipy.sparse.csr_matrix(X), y)
    with pytest.raises(TypeError, match=r"Sparse data was passed.*dense data is required.*toarray"):
        make().fit(X, y).predict(scipy.sparse.csr_array(X))


def test_bad_parameters_of_one_estimator():
    X, y = blobs()
    with pytest.raises(ValueError, match="unknown objective 'hinge'; use one of contrastive, margin"):
        classifier(objective="hinge").fit(X, y)
    with pytest.raises(ValueError, match="unknown objective 'hinge'"):
        classifier(objective="hinge").partial_fit(X, y, classes=[0, 1, 2])
    with pytest.raises(ValueError, match="unknown objective 'margin'; use one of squared_error, contrastive"):
        regressor(objective="margin").fit(X, y)
    with pytest.raises(ValueError, match="at least two classes; got 1 class"):
        classifier().fit(X, np.zeros(90))
    with pytest.raises(ValueError, match="unknown method 'exact'"):
        classifier().fit(X, y).certified_radius(X, method="exact")
    for contamination in (0.0, 0.6, "auto", None):
        with pytest.raises(ValueError, match=rf"contamination must be a number in \(0, 0.5\]; got {contamination!r}"):
            energy_model(contamination=contamination).fit(X)
    with pytest.raises(ValueError, match="hidden_sizes must name at least one layer"):
        energy_model(hidden_sizes=()).fit(X)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device 'cuda' was asked for and no CUDA device is available"):
            classifier(device="cuda").fit(X, y)


@pytest.mark.parametrize("estimator", [LRRNClassifier, LRRNRegressor, LRRNEnergyModel])
def test_predictions_can_refuse_what_did_not_converge(estimator, monkeypatch):
    X, y = load_digits(return_X_y=True)
    X, y = X[:200] / 16, y[:200]
    with pytest.raises(ValueError, match="on_failure must be one of"):
        estimator(on_failure="shrug").fit(X, y)
    model = estimator(hidden_sizes=(16,), epochs=2, early_stopping=True, random_state=0, on_failure="raise").fit(X, y)
    assert len(model.predict(X)) == len(X)
    infer = model.network_.infer
    monkeypatch.setattr(
        model.network_, "infer", lambda x, y=None, **options: infer(x, y, **{**options, "tol": 1e-12, "max_sweeps": 1})
    )
    for ask in (model.predict, model.energy):
        with pytest.raises(lrrn.ConvergenceError, match="did not converge"):
            ask(X)
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        model.set_params(on_failure="warn").predict(X)


# --- memory ---------------------------------------------------------------------------------------------------------------


def test_results_of_a_chunk_are_not_kept_while_others_are_computed(monkeypatch):
    """Otherwise memory would grow with the number of chunks, by more than the results."""
    X, y = blobs()
    model = classifier().fit(X, y)
    monkeypatch.setitem(memory.NUMBERS, "cpu", 7 * sum(model.network_.sizes))
    results, alive = [], []

    def work(x):
        alive.append(sum(result() is not None for result in results))
        columns = {"first": x[:, 0] + 1, "all": 2 * x}
        results.extend(weakref.ref(column) for column in columns.values())
        return columns

    found = model._columns(X, work)
    assert len(alive) == -(-len(X) // 7) and max(alive) <= 1  # the last column of the chunk before
    np.testing.assert_array_equal(found["first"], X[:, 0] + 1)
    np.testing.assert_array_equal(found["all"], 2 * X)
