"""The estimators in use: pipelines, weights, certificates in the units of the data, resuming, and what they refuse."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import softmax
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import recall_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

import lrrn
from lrrn import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.estimators import _base
from lrrn.learning import checkpoint
from oracles import PlainNetwork, by_quadprog, full_qp

SMALL = dict(hidden_sizes=(8, 6), epochs=6, batch_size=16, device="cpu", random_state=0)


def classifier(**options) -> LRRNClassifier:
    return LRRNClassifier(**{**SMALL, "learning_rate": 0.02, **options})


def regressor(**options) -> LRRNRegressor:
    return LRRNRegressor(**{**SMALL, "learning_rate": 0.02, **options})


def energy_model(**options) -> LRRNEnergyModel:
    return LRRNEnergyModel(**{**SMALL, "learning_rate": 0.02, **options})


def blobs(n: int = 90, k: int = 3, noise: float = 0.5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % k
    return rng.normal(size=(k, 6))[y] + noise * rng.normal(size=(n, 6)), y


def curve(n: int = 80, n_targets: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = 3 * rng.normal(size=(n, 5)) + 7
    y = 10 * np.abs(X @ rng.normal(size=(5, n_targets))) - 4
    return X, y[:, 0] if n_targets == 1 else y


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in getattr(model, "network_", model).parameters()])


def as_seen(model, X: np.ndarray) -> torch.Tensor:
    """What the network sees: features centred, and divided by the root of their mean variance."""
    if model.standardize:
        X = (X - model.offset_in_) / model.scale_in_
    return torch.as_tensor(X)


def moves(model, X: np.ndarray, reach: np.ndarray, lead) -> list[np.ndarray]:
    """Perturbations of norm ``reach``: random ones, and some that climb each of the functions ``lead`` makes of the output."""
    rng = np.random.default_rng(0)
    found = [rng.normal(size=X.shape) for _ in range(10)]
    found = [d / np.linalg.norm(d, axis=1, keepdims=True) * reach[:, None] for d in found]
    for j in range(model.network_.sizes[-1]):
        for sign in (1.0, -1.0):
            delta = np.zeros_like(X)
            for _ in range(3):
                x = as_seen(model, X + delta).requires_grad_()
                (slope,) = torch.autograd.grad(sign * lead(model.network_(x), j).sum(), x)
                delta = slope.numpy() / slope.norm(dim=1, keepdim=True).clamp(min=1e-12).numpy() * reach[:, None]
                found.append(delta)
    return found


def rival_moves(model, X: np.ndarray, reach: np.ndarray) -> list[np.ndarray]:
    label = model.network_(as_seen(model, X)).argmax(-1)[:, None]
    return moves(model, X, reach, lambda y, j: y[:, j] - y.gather(1, label)[:, 0])


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


def test_transform_can_return_data_frames():
    X, _ = blobs()
    frame = pd.DataFrame(X, columns=list("abcdef"), index=range(100, 190))
    model = energy_model(hidden_sizes=(5, 3)).fit(frame)
    plain = model.transform(frame)
    names = ["lrrnenergymodel0", "lrrnenergymodel1", "lrrnenergymodel2"]
    assert model.get_feature_names_out().tolist() == names
    table = model.set_output(transform="pandas").transform(frame)
    assert table.columns.tolist() == names and table.index.tolist() == list(range(100, 190))
    np.testing.assert_array_equal(table.to_numpy(), plain)


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


def test_data_frames_of_activations_can_be_inverted():
    X, _ = blobs()
    model = energy_model(standardize=True).fit(X)
    plain = model.transform(X)
    table = model.set_output(transform="pandas").transform(X)
    torch.set_warn_always(True)
    try:
        np.testing.assert_array_equal(model.inverse_transform(table), model.inverse_transform(plain))
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
    monkeypatch.setattr(_base, "CHUNK_UNITS", 60)
    np.testing.assert_allclose(model.decision_function(X), scores, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.certified_radius(X), radii, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(model.energy(X), energy, rtol=1e-6)
    np.testing.assert_array_equal(model.predict(X), label)


# --- classifier -----------------------------------------------------------------------------------------------------------


def test_two_classes_with_names():
    X, y = blobs(k=2)
    names = np.array(["spam", "ham"])[y]
    model = classifier().fit(X, names)
    assert model.classes_.tolist() == ["ham", "spam"]
    lead = model.decision_function(X)
    assert lead.shape == (90,) and (lead > 0).any() and (lead < 0).any()
    np.testing.assert_array_equal(model.predict(X), np.where(lead > 0, "spam", "ham"))
    assert model.score(X, names) > 0.9


@pytest.mark.parametrize("objective", ["contrastive", "margin", "cross_entropy", "squared_error", "semi_supervised"])
def test_the_largest_score_is_the_prediction(objective):
    X, y = blobs()
    model = classifier(objective=objective, epochs=15).fit(X, 10 * y)
    scores = model.decision_function(X)
    assert scores.shape == (90, 3) and model.classes_.tolist() == [0, 10, 20]
    np.testing.assert_array_equal(model.predict(X), 10 * scores.argmax(1))
    np.testing.assert_array_equal(scores, model.network_.infer(torch.as_tensor(X)).output.numpy())
    assert model.score(X, 10 * y) > 0.7


@pytest.mark.parametrize("n_classes", [2, 3])
def test_class_energies(n_classes):
    X, y = blobs(k=n_classes)
    model = classifier(objective="class_energy", epochs=20).fit(X, y)
    x = torch.as_tensor(X)
    energies = [model.network_.infer(x, torch.eye(n_classes, dtype=x.dtype)[[k] * len(x)]).energy for k in range(n_classes)]
    energies = torch.stack(energies, 1).numpy()
    assert len(set(energies.argmin(1))) > 1
    np.testing.assert_array_equal(model.predict(X), energies.argmin(1))
    expected = energies[:, 0] - energies[:, 1] if n_classes == 2 else -energies
    np.testing.assert_allclose(model.decision_function(X), expected)
    radius = model.certified_radius(X)
    assert (radius > 0).any()
    for seed in range(10):
        step = np.random.default_rng(seed).standard_normal(X.shape)
        moved = X + 0.999 * radius[:, None] * step / np.linalg.norm(step, axis=1, keepdims=True)
        np.testing.assert_array_equal(model.predict(moved), model.predict(X))
    with pytest.raises(ValueError, match="'class_energy' has one method, 'energy'; got 'paper'"):
        model.certified_radius(X, "paper")


@pytest.mark.parametrize(("objective", "temperature"), [("margin", 0.2), ("cross_entropy", 1.0)])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_probabilities(objective, temperature, n_classes):
    X, y = blobs(k=n_classes)
    model = classifier(objective=objective, temperature=0.2).fit(X, y)
    probabilities = model.predict_proba(X)
    scores = model.network_.infer(torch.as_tensor(X)).output.numpy()
    np.testing.assert_allclose(probabilities, softmax(scores / temperature, axis=1), rtol=1e-12)
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-12)
    np.testing.assert_array_equal(probabilities.argmax(1), model.predict(X))


@pytest.mark.parametrize("objective", ["contrastive", "squared_error", "class_energy", "semi_supervised"])
def test_no_probabilities_from_objectives_that_have_none(objective):
    model = classifier(objective=objective)
    assert not hasattr(model, "predict_proba")
    with pytest.raises(AttributeError, match="predict_proba"):
        _ = model.predict_proba


# --- weights --------------------------------------------------------------------------------------------------------------


def some_without_weight(n: int) -> np.ndarray:
    return np.random.default_rng(1).permutation(n) % 4.0


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("make", [classifier, regressor])
def test_what_samples_of_weight_zero_hold_does_not_matter(make, standardize):
    X, y = blobs()
    weight = some_without_weight(90)
    other, labels = X.copy(), y.copy()
    other[weight == 0] += 5
    labels[weight == 0] = (labels[weight == 0] + 1) % 3
    one = make(standardize=standardize).fit(X, y, sample_weight=weight)
    two = make(standardize=standardize).fit(other, labels, sample_weight=weight)
    assert torch.equal(weights(one), weights(two))
    np.testing.assert_array_equal(one.predict(X), two.predict(X))


@pytest.mark.parametrize("objective", ["contrastive", "cross_entropy"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_samples_of_weight_zero_are_as_if_absent(objective, optimizer):
    X, y = blobs()
    weight = some_without_weight(90)
    kept = weight > 0
    one = classifier(objective=objective, optimizer=optimizer).fit(X, y, sample_weight=weight)
    two = classifier(objective=objective, optimizer=optimizer).fit(X[kept], y[kept], sample_weight=weight[kept])
    torch.testing.assert_close(weights(one), weights(two), rtol=1e-5, atol=1e-7)


def test_targets_of_weight_zero_are_as_if_absent():
    X, y = curve()
    weight = some_without_weight(80)
    kept = weight > 0
    one = regressor(optimizer="sgd").fit(X, y, sample_weight=weight)
    two = regressor(optimizer="sgd").fit(X[kept], y[kept], sample_weight=weight[kept])
    np.testing.assert_allclose(one.predict(X), two.predict(X), rtol=1e-4)


def test_only_proportions_of_weights_count_and_classes_multiply_them():
    X, y = blobs()
    weight = 1.0 + np.arange(90) % 2
    by_class = np.array([1.0, 2.0, 4.0])[y]
    expected = weights(classifier().fit(X, y, sample_weight=weight * by_class))
    assert torch.equal(weights(classifier().fit(X, y, sample_weight=8 * weight * by_class)), expected)
    assert torch.equal(weights(classifier(class_weight={0: 1, 1: 2, 2: 4}).fit(X, y, sample_weight=weight)), expected)
    assert torch.equal(weights(classifier().fit(X, y, sample_weight=np.ones(90))), weights(classifier().fit(X, y)))
    assert not torch.equal(weights(classifier().fit(X, y)), expected)


def test_heavy_samples_decide_between_contradicting_ones():
    X, y = blobs()
    twice, labels = np.vstack([X, X]), np.concatenate([y, (y + 1) % 3])
    values = np.concatenate([np.full(90, 1.0), np.full(90, 3.0)])
    for heavy in (0, 1):
        weight = np.where(np.repeat([0, 1], 90) == heavy, 50.0, 1.0)
        decided = classifier(hidden_sizes=(16,), epochs=30).fit(twice, labels, sample_weight=weight)
        assert decided.score(X, labels[90 * heavy :][:90]) > 0.8
        model = regressor(epochs=20).fit(twice, values, sample_weight=weight)
        # the weighted mean of the two values, which is what least squares fits
        np.testing.assert_allclose(model.predict(X).mean(), (1 + 3 * 50) / 51 if heavy else (50 + 3) / 51, atol=0.15)


def test_balanced_weights_raise_the_recall_of_a_rare_class():
    rng = np.random.default_rng(0)
    y = (np.arange(300) % 15 == 0).astype(int)
    X = rng.normal(size=(300, 4)) + y[:, None]
    plain = classifier(epochs=15).fit(X, y).predict(X)
    balanced = classifier(epochs=15, class_weight="balanced").fit(X, y).predict(X)
    assert recall_score(y, balanced) > recall_score(y, plain) + 0.2


@pytest.mark.parametrize("make", [classifier, regressor])
def test_weights_that_are_refused(make):
    X, y = blobs()
    with pytest.raises(ValueError, match="zero"):
        make().fit(X, y, sample_weight=np.zeros(90))
    with pytest.raises(ValueError, match=r"[Nn]egative values"):
        make().fit(X, y, sample_weight=np.full(90, -1.0))


# --- passes over parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["contrastive", "cross_entropy"])
def test_passes_continue_the_optimiser(objective):
    """With one batch a pass, the order does not matter: passes are the epochs of a fit at a constant rate."""
    X, y = blobs()
    options = dict(objective=objective, batch_size=90, dtype="float64", schedule=None)
    model = classifier(**options)
    for _ in range(5):
        model.partial_fit(X, y, classes=[0, 1, 2])
    whole = classifier(**options, epochs=5).fit(X, y)
    torch.testing.assert_close(weights(model), weights(whole), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(model.loss_curve_, whole.loss_curve_, rtol=1e-5)
    assert model.n_iter_ == 5 and [record["epoch"] for record in model.history_] == [1, 2, 3, 4, 5]


def test_passes_over_parts_lower_the_loss():
    X, y = blobs()
    names = np.array(["a", "b", "c"])[y]
    model = classifier()
    model.partial_fit(X[names != "c"], names[names != "c"], classes=["c", "b", "a"])
    assert model.classes_.tolist() == ["a", "b", "c"]
    first = model.partial_fit(X, names).loss_curve_[-1]
    for part in range(12):
        model.partial_fit(X[part % 2 :: 2], names[part % 2 :: 2])
    assert model.partial_fit(X, names).loss_curve_[-1] < 0.7 * first
    assert model.score(X, names) > 0.8


def test_passes_that_are_refused():
    X, y = blobs()
    with pytest.raises(ValueError, match="classes must be given in the first call"):
        classifier().partial_fit(X, y)
    with pytest.raises(ValueError, match=r"not among classes: \[2\]"):
        classifier().partial_fit(X, y, classes=[0, 1])
    model = classifier().partial_fit(X, y, classes=[0, 1, 2])
    before = weights(model).clone()
    with pytest.raises(ValueError, match=r"not among classes: \[3\]"):
        model.partial_fit(X, y + 1)
    assert torch.equal(weights(model), before) and model.classes_.tolist() == [0, 1, 2]


# --- unlabelled samples ---------------------------------------------------------------------------------------------------


def test_minus_one_is_no_class_of_a_semi_supervised_classifier():
    X, y = blobs()
    partly = np.where(np.arange(90) < 30, y, -1)
    model = classifier(objective="semi_supervised", epochs=15).fit(X, partly)
    assert model.classes_.tolist() == [0, 1, 2] and model.network_.sizes[-1] == 3
    assert set(model.predict(X)) <= {0, 1, 2} and model.score(X, y) > 0.6
    moved = X.copy()
    moved[partly == -1] += 0.5
    assert not torch.equal(weights(model), weights(clone(model).fit(moved, partly)))
    with pytest.raises(ValueError, match="at least two classes; got 0"):
        clone(model).fit(X, np.full(90, -1))


def test_minus_one_is_a_class_like_others_elsewhere():
    X, y = blobs()
    for objective in ("contrastive", "cross_entropy", "class_energy"):
        model = classifier(objective=objective).fit(X, y - 1)
        assert model.classes_.tolist() == [-1, 0, 1]
        assert torch.equal(weights(model), weights(clone(model).fit(X, y)))


def test_a_semi_supervised_classifier_needs_numbers():
    X, y = blobs()
    with pytest.raises(ValueError, match=r"marks unlabelled samples by y = -1 and so needs numeric labels.*LabelEncoder"):
        classifier(objective="semi_supervised").fit(X, np.array(["a", "b", "c"])[y])


def test_minus_one_among_the_classes_of_a_pass_is_no_class():
    X, y = blobs()
    partly = np.where(np.arange(90) < 30, y, -1)
    model = classifier(objective="semi_supervised").partial_fit(X, partly, classes=np.unique(partly))
    assert model.classes_.tolist() == [0, 1, 2]


# --- certified radii ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["contrastive", "margin"])
@pytest.mark.parametrize(("standardize", "scale", "offset"), [(False, 1.0, 0.0), (True, 30.0, 1000.0), (True, 1e-3, 1.0)])
def test_no_perturbation_inside_the_radius_changes_the_label(objective, standardize, scale, offset):
    X, y = blobs()
    X = scale * X + offset
    model = classifier(objective=objective, standardize=standardize, epochs=15).fit(X, y)
    radius, label = model.certified_radius(X), model.predict(X)
    assert (radius > 0).mean() > 0.9 and model.score(X, y) > 0.7
    certain = radius > 0
    for delta in rival_moves(model, X, 0.999 * radius):
        assert (model.predict(X + delta) == label)[certain].all()


@pytest.mark.parametrize("standardize", [False, True])
def test_radii_of_a_linear_classifier_are_distances_to_its_boundary(standardize):
    X, y = blobs()
    X = 20 * X + 3
    model = classifier(hidden_sizes=(), standardize=standardize, epochs=15, learning_rate=0.002).fit(X, y)
    scale = math.sqrt(X.var(axis=0).mean()) if standardize else 1.0
    w = model.network_.W[0].detach().double().numpy() / scale
    scores, label = model.decision_function(X), model.predict(X)
    with np.errstate(invalid="ignore"):
        distances = (scores.max(1, keepdims=True) - scores) / np.linalg.norm(w[label][:, None] - w, axis=2)
    radius = model.certified_radius(X)
    np.testing.assert_allclose(radius, np.nanmin(distances, axis=1), rtol=1e-6)
    assert all((model.predict(X + delta) == label).all() for delta in rival_moves(model, X, 0.999 * radius))
    crossed = [model.predict(X + delta) != label for delta in rival_moves(model, X, 1.001 * radius)]
    assert np.any(crossed, axis=0).all()


@pytest.mark.parametrize(("factor", "rtol"), [(8.0, 1e-14), (1000.0, 1e-6)])
def test_standardised_radii_scale_with_the_data(factor, rtol):
    """A factor that is a power of two does not even change the rounding."""
    X, y = blobs()
    X = X + 2
    one, two = (classifier(standardize=True, dtype="float64").fit(s * X, y) for s in (1.0, factor))
    np.testing.assert_array_equal(one.predict(X), two.predict(factor * X))
    np.testing.assert_allclose(two.certified_radius(factor * X), factor * one.certified_radius(X), rtol=rtol)
    assert float(two.lipschitz_) == pytest.approx(float(one.lipschitz_) / factor, rel=rtol)
    plain = classifier(standardize=False).fit(X, y)
    assert plain.lipschitz_ == plain.network_.lipschitz()


@pytest.mark.parametrize("standardize", [False, True])
def test_scores_move_no_faster_than_the_lipschitz_bound(standardize):
    X, y = blobs()
    X = 7 * X
    model = classifier(standardize=standardize, epochs=10).fit(X, y)
    fastest = 0.0
    for delta in rival_moves(model, X, np.full(90, 0.1)):
        moved = np.linalg.norm(model.decision_function(X + delta) - model.decision_function(X), axis=1)
        fastest = max(fastest, float(moved.max()) / 0.1)
    assert 0.05 * model.lipschitz_ < fastest < model.lipschitz_ * (1 + 1e-3)


def test_certified_score():
    X, y = blobs()
    model = classifier(standardize=True, epochs=15).fit(X, y)
    names = np.array(["a", "b", "c"])
    named = classifier(standardize=True, epochs=15).fit(X, names[y])
    radius, right = model.certified_radius(X), model.predict(X) == y
    assert model.certified_score(X, y, 0) == pytest.approx(model.score(X, y))
    shares = []
    for eps in (0.0, *np.quantile(radius, [0.1, 0.5, 0.9]), radius.max()):
        by_hand = sum(bool(r) and bool(size > eps or eps == 0) for r, size in zip(right, radius, strict=True)) / 90
        shares.append(model.certified_score(X, y, eps))
        assert shares[-1] == pytest.approx(by_hand) and named.certified_score(X, names[y].tolist(), eps) == shares[-1]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[2] > shares[-1] == 0
    eps = float(np.median(radius))
    assert model.certified_score(X, y, eps, method="paper") <= model.certified_score(X, y, eps)
    with pytest.raises(ValueError, match="eps must be at least 0; got -1"):
        model.certified_score(X, y, -1)


@pytest.mark.parametrize("standardize", [False, True])
def test_certified_scores_by_local_radii_are_those_of_the_whole_radii(standardize):
    some, labels = blobs()
    model = classifier(standardize=standardize, epochs=15).fit(some, labels)
    radius, right = model.certified_radius(some, "local"), model.predict(some) == labels
    eps = float(np.quantile(model.certified_radius(some, "multiplier"), 0.6))
    clear = np.abs(radius / eps - 1) > 0.02  # beyond doubt, whatever the last per cent of optimising brings
    decided = model.certified_radius(some, "local", target_radius=eps)
    assert np.array_equal((decided > eps)[clear], (radius > eps)[clear]) and clear.sum() > 60
    assert model.certified_score(some, labels, eps, "local") == (right & (decided > eps)).mean()
    with pytest.raises(ValueError, match="target_radius must be a radius above 0"):
        model.certified_radius(some, "local", target_radius=-1.0)


# --- early stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_early_stopping_returns_to_the_best_epoch(make):
    X, y = blobs(noise=0.8)
    states = []
    options = dict(early_stopping=True, validation_fraction=0.3, n_iter_no_change=3, epochs=300, schedule=None)
    if make is energy_model:
        options["learning_rate"] = 0.2  # or it gets better and better
    model = make(**options, callbacks=(lambda trainer, record: states.append(weights(trainer.net)),)).fit(X, y)
    scores = [record["validation_score"] for record in model.history_]
    best = int(np.argmax(scores))
    assert model.n_iter_ == len(scores) == len(states) == best + 1 + 3 < 300
    assert torch.equal(weights(model), states[best]) and not torch.equal(weights(model), states[-1])


def test_the_validation_score_is_about_samples_that_are_held_back():
    """Inputs at right angles have nothing in common: labels of those not seen can only be guessed."""
    rng = np.random.default_rng(0)
    X, y = np.eye(60), rng.integers(0, 2, 60)
    options = dict(hidden_sizes=(), learning_rate=0.1, validation_fraction=0.5, n_iter_no_change=30, epochs=30, schedule=None)
    model = classifier(**options, early_stopping=True).fit(X, y)
    assert classifier(**options).fit(X, y).score(X, y) == 1.0
    assert max(record["validation_score"] for record in model.history_) < 0.85


def test_early_stopping_with_few_labels_has_scores_to_go_by():
    X, y = blobs()
    partly = np.where(np.arange(90) < 6, y, -1)
    model = classifier(objective="semi_supervised", early_stopping=True, n_iter_no_change=3, epochs=8).fit(X, partly)
    assert np.isfinite([record["validation_score"] for record in model.history_]).all()


def test_early_stopping_with_fewer_held_back_than_classes():
    X, y = blobs(n=18)
    assert classifier(early_stopping=True).fit(X, y).n_iter_ > 0


# --- stopping and resuming ------------------------------------------------------------------------------------------------


class InterruptAt:
    """A callback that presses Ctrl-C after an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, trainer, record) -> None:
        if record["epoch"] == self.epoch:
            raise KeyboardInterrupt


def data_for(make):
    return blobs() if make is not regressor else curve()


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
@pytest.mark.parametrize("epoch", [1, 3])
def test_an_interrupted_fit_resumes_to_the_same_bits(make, epoch, tmp_path):
    X, y = data_for(make)
    whole = make(standardize=True).fit(X, y)
    options = dict(standardize=True, checkpoint=tmp_path / "run.ckpt", resume=True)
    with pytest.raises(KeyboardInterrupt):
        make(**options, callbacks=(InterruptAt(epoch),)).fit(X, y)
    epochs = []
    resumed = make(**options, callbacks=(lambda trainer, record: epochs.append(record["epoch"]),)).fit(X, y)
    assert torch.equal(weights(resumed), weights(whole)) and resumed.loss_curve_ == whole.loss_curve_
    # the checkpoint of an epoch is written after its callbacks
    assert epochs == list(range(epoch, 7))
    again = make(**options, callbacks=(InterruptAt(1),)).fit(X, y)
    assert torch.equal(weights(again), weights(whole)) and again.n_iter_ == 6


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_pretrained_fit_resumes_to_the_same_bits(epoch, tmp_path):
    X, y = blobs()
    whole = classifier(pretrain_epochs=3).fit(X, y)
    options = dict(pretrain_epochs=3, checkpoint=tmp_path / "run.ckpt", resume=True)
    with pytest.raises(KeyboardInterrupt):
        classifier(**options, callbacks=(InterruptAt(epoch),)).fit(X, y)
    resumed = classifier(**options).fit(X, y)
    assert torch.equal(weights(resumed), weights(whole)) and resumed.loss_curve_ == whole.loss_curve_


@pytest.mark.parametrize("early_stopping", [False, True])
def test_a_fit_stopped_after_any_checkpoint_resumes_to_the_same_bits(early_stopping, tmp_path, monkeypatch):
    """Three epochs of pretraining and three of training, interrupted after each of their checkpoints, in turn."""
    X, y = blobs()
    options = dict(pretrain_epochs=3, epochs=3, early_stopping=early_stopping)
    whole = classifier(**options).fit(X, y)
    path, write, stages = tmp_path / "run.ckpt", checkpoint.save, []

    def write_and_stop(place, settings, position, *rest):
        write(place, settings, position, *rest)
        stages.append(position.stage)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", write_and_stop)
        for _ in range(6):
            with pytest.raises(KeyboardInterrupt):
                classifier(**options, checkpoint=path, resume=True).fit(X, y)
    assert stages == ["pretrain"] * 3 + ["train"] * 3
    resumed = classifier(**options, checkpoint=path, resume=True).fit(X, y)
    assert torch.equal(weights(resumed), weights(whole)) and resumed.loss_curve_ == whole.loss_curve_


def test_pretraining_has_its_own_stage():
    X, y = blobs()
    model = classifier(pretrain_epochs=2, pretrain_learning_rate=0.01).fit(X, y)
    assert [record["stage"] for record in model.history_] == ["pretrain"] * 2 + ["train"] * 6
    assert model.n_iter_ == len(model.loss_curve_) == 6
    assert model.history_[1]["loss"] < model.history_[0]["loss"] and model.history_[0]["learning_rate"] <= 0.01
    plain = classifier().fit(X, y)
    assert {record["stage"] for record in plain.history_} == {"train"} and not torch.equal(weights(plain), weights(model))


def test_a_resumed_fit_remembers_its_pretraining(tmp_path):
    X, y = blobs()
    options = dict(pretrain_epochs=2, checkpoint=tmp_path / "run.ckpt", resume=True)
    with pytest.raises(KeyboardInterrupt):
        classifier(**options, callbacks=(InterruptAt(3),)).fit(X, y)
    stages = [record["stage"] for record in classifier(**options).fit(X, y).history_]
    assert stages == ["pretrain"] * 2 + ["train"] * 6


def logged_and_seen(path, **options):
    seen = []
    callbacks = (lambda trainer, record: seen.append(record),)
    model = classifier(log=path, callbacks=callbacks, **options).fit(*blobs())
    return model.history_, [json.loads(line) for line in path.read_text().splitlines()], seen


def test_the_log_and_the_callbacks_see_every_epoch(tmp_path):
    history, logged, seen = logged_and_seen(tmp_path / "log.jsonl")
    assert logged == history == seen and len(history) == 6


def test_the_log_keeps_the_pretraining(tmp_path):
    history, logged, _ = logged_and_seen(tmp_path / "log.jsonl", pretrain_epochs=2)
    assert len(history) == 8 and logged == history


def test_callbacks_see_the_pretraining(tmp_path):
    history, _, seen = logged_and_seen(tmp_path / "log.jsonl", pretrain_epochs=2)
    assert len(history) == 8 and seen == history


def test_resuming_a_fit_that_early_stopping_ended_changes_nothing(tmp_path):
    X, y = blobs(noise=0.8)
    options = dict(early_stopping=True, validation_fraction=0.3, n_iter_no_change=2, epochs=300, schedule=None)
    model = classifier(**options, checkpoint=tmp_path / "run.ckpt").fit(X, y)
    again = classifier(**options, checkpoint=tmp_path / "run.ckpt", resume=True).fit(X, y)
    assert again.n_iter_ == model.n_iter_ < 300 and torch.equal(weights(again), weights(model))


def test_checkpoints_that_are_refused(tmp_path):
    X, y = blobs()
    for make in (classifier, regressor, energy_model):
        with pytest.raises(ValueError, match="resume=True needs checkpoint"):
            make(resume=True).fit(X, y)
    path = tmp_path / "run.ckpt"
    classifier(checkpoint=path).fit(X, y)
    with pytest.raises(ValueError, match=r"belongs to another run .*seed"):
        classifier(checkpoint=path, resume=True, random_state=1).fit(X, y)
    assert torch.equal(
        weights(classifier(checkpoint=path, random_state=1).fit(X, y)), weights(classifier(random_state=1).fit(X, y))
    )


def test_a_callback_ends_training():
    X, y = blobs()
    assert classifier(callbacks=(lambda trainer, record: record["epoch"] == 2,)).fit(X, y).n_iter_ == 2


# --- regressor ------------------------------------------------------------------------------------------------------------


def test_predictions_have_the_shape_and_the_units_of_the_targets():
    X, y = curve(n_targets=3)
    options = dict(standardize=True, epochs=40)
    for targets in (y, y[:, :1], y[:, 0], 1000 * y - 5000):
        model = regressor(**options).fit(X, targets)
        assert model.predict(X).shape == targets.shape and model.score(X, targets) > 0.8
        assert all(end.shape == targets.shape for end in model.predict_interval(X, 0.1))
    single, column = (regressor(**options).fit(X, targets).predict(X) for targets in (y[:, 0], y[:, :1]))
    np.testing.assert_array_equal(single, column[:, 0])
    assert regressor(objective="contrastive", **options).fit(X, y).score(X, y) > 0.5


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("n_targets", [1, 3])
def test_predictions_stay_in_their_intervals(standardize, n_targets):
    X, y = curve(n_targets=n_targets)
    model = regressor(standardize=standardize, epochs=20, learning_rate=0.02 if standardize else 0.005).fit(X, y)
    width = 0.0
    for eps in (0.0, 0.1, 2.0):
        lower, upper = model.predict_interval(X, eps)
        assert (lower <= model.predict(X)).all() and (model.predict(X) <= upper).all()
        for delta in moves(model, X, np.full(len(X), eps), lambda output, j: output[:, j]):
            predicted = model.predict(X + delta)
            assert (lower <= predicted).all() and (predicted <= upper).all()
        assert (upper - lower > width).all() and np.isfinite(upper - lower).all()
        width = upper - lower


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("n_targets", [1, 3])
def test_intervals_of_a_linear_regressor_by_hand(standardize, n_targets):
    X, y = curve(n_targets=n_targets)
    model = regressor(hidden_sizes=(), standardize=standardize, learning_rate=0.01).fit(X, y)
    scale = math.sqrt(X.var(axis=0).mean()) if standardize else 1.0
    slope = np.linalg.norm(model.network_.W[0].detach().double().numpy(), axis=1) / scale * y.std(axis=0)
    slope = slope[0] if n_targets == 1 else slope
    for eps in (0.0, 0.5):
        lower, upper = model.predict_interval(X, eps)
        np.testing.assert_allclose(lower, model.predict(X) - eps * slope, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(upper, model.predict(X) + eps * slope, rtol=1e-9, atol=1e-9)


def test_a_negative_perturbation_is_refused():
    X, y = curve()
    with pytest.raises(ValueError, match=r"eps must be at least 0; got -0\.5"):
        regressor(learning_rate=0.001).fit(X, y).predict_interval(X, -0.5)


@pytest.mark.parametrize("eps", [-0.5, -1e-18])
def test_a_negative_perturbation_of_standardised_data_is_refused(eps):
    X, y = curve()
    with pytest.raises(ValueError, match=f"eps must be at least 0; got {eps}"):
        regressor(standardize=True).fit(X, y).predict_interval(X, eps)


# --- energy model ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("contamination", [0.05, 0.1, 0.5])
def test_outliers(contamination):
    X, _ = blobs(n=120)
    model = energy_model(contamination=contamination, epochs=15).fit(X)
    np.testing.assert_array_equal(model.score_samples(X), -model.energy(X))
    np.testing.assert_array_equal(model.decision_function(X), model.score_samples(X) - model.offset_)
    label = model.predict(X)
    assert set(label) == {-1, 1}
    np.testing.assert_array_equal(label == -1, model.decision_function(X) < 0)
    # the quantile of n scores lies between the order statistics around contamination (n - 1)
    assert (label == -1).sum() == math.ceil(contamination * 119)
    np.testing.assert_array_equal(clone(model).fit_predict(X), label)
    far = 20 * np.random.default_rng(1).normal(size=(30, 6))
    assert (model.predict(far) == -1).all() and (model.energy(far) > model.energy(X).max()).all()


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("hidden_sizes", [(2,), (4, 2)])
def test_activations_reconstruct_data_of_low_rank(hidden_sizes, standardize):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2)) @ rng.normal(size=(2, 6))
    X = 30 * X + 100 * rng.normal(size=6) if standardize else X
    model = energy_model(hidden_sizes=hidden_sizes, constraint="free", standardize=standardize, epochs=60).fit(X)
    codes = model.transform(X)
    back = model.inverse_transform(codes)
    assert codes.shape == (200, 2) and back.shape == X.shape
    assert np.linalg.norm(back - X) < 0.01 * np.linalg.norm(X - X.mean(axis=0))


def test_reconstruction_by_hand():
    X, _ = blobs()
    model = energy_model(constraint=(0, 0.5), standardize=True).fit(X)
    net = PlainNetwork.of(model.network_)
    codes = model.transform(X)
    assert codes.shape == (90, 6) and (codes >= 0).all() and (codes <= 0.5).all()
    hidden = np.clip(codes @ net.weights[1] - net.c[1], 0, 0.5)
    expected = (hidden @ net.weights[0] - net.c[0]) * math.sqrt(X.var(axis=0).mean()) + X.mean(axis=0)
    np.testing.assert_allclose(model.inverse_transform(codes), expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="Z must have 6 columns, as many as transform returns; got 5"):
        model.inverse_transform(codes[:, :5])


# --- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_bad_parameters(make):
    X, y = blobs()
    cases = [
        (dict(device="tpu"), "unknown device 'tpu'; use 'auto', 'cpu' or 'cuda'"),
        (dict(dtype="float16"), "unknown dtype 'float16'; use one of float32, float64"),
        (dict(hidden_sizes=(4, 0)), r"hidden_sizes must be positive integers; got \(4, 0\)"),
        (dict(hidden_sizes=(4.0,)), r"hidden_sizes must be positive integers; got \(4.0,\)"),
        (dict(validation_fraction=0.0), "validation_fraction must lie between 0 and 1; got 0.0"),
        (dict(validation_fraction=1.0), "validation_fraction must lie between 0 and 1; got 1.0"),
        (dict(decoupled_weight_decay=0.1), "decoupled_weight_decay belongs to optimizer='adamw'; got optimizer='adam'"),
        (dict(epochs=0), "epochs must be positive; got 0"),
        (dict(init="zeros"), "unknown init 'zeros'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            make(**options).fit(X, y)


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
    for contamination in (0.0, 0.6):
        with pytest.raises(ValueError, match=rf"contamination must lie in \(0, 0.5\]; got {contamination}"):
            energy_model(contamination=contamination).fit(X)
    with pytest.raises(ValueError, match="hidden_sizes must name at least one layer"):
        energy_model(hidden_sizes=()).fit(X)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device 'cuda' was asked for and no CUDA device is available"):
            classifier(device="cuda").fit(X, y)


def test_later_calls_of_partial_fit_must_agree_on_the_classes():
    X, y = blobs()
    names = np.array(["a", "b", "c"])[y]
    model = classifier().partial_fit(X, names, classes=["a", "b", "c"]).partial_fit(X, names, classes=["c", "b", "a"])
    with pytest.raises(ValueError, match="differ from those of the first call"):
        model.partial_fit(X, names, classes=["a", "b"])


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
