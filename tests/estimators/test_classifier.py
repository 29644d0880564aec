"""The classifier: labels, probabilities, unlabelled samples, and radii in the units of the data."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import softmax
from sklearn.base import clone
from sklearn.metrics import recall_score

from small_estimators import as_seen, blobs, classifier, moves, weights


def rival_moves(model, X: np.ndarray, reach: np.ndarray) -> list[np.ndarray]:
    label = model.network_(as_seen(model, X)).argmax(-1)[:, None]
    return moves(model, X, reach, lambda y, j: y[:, j] - y.gather(1, label)[:, 0])


# --- labels and scores ----------------------------------------------------------------------------------------------------


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
    model = classifier(objective=objective, temperature=temperature if objective == "margin" else None).fit(X, y)
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


def test_balanced_weights_raise_the_recall_of_a_rare_class():
    rng = np.random.default_rng(0)
    y = (np.arange(300) % 15 == 0).astype(int)
    X = rng.normal(size=(300, 4)) + y[:, None]
    plain = classifier(epochs=15).fit(X, y).predict(X)
    balanced = classifier(epochs=15, class_weight="balanced").fit(X, y).predict(X)
    assert recall_score(y, balanced) > recall_score(y, plain) + 0.2


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


@pytest.mark.parametrize(("factor", "method", "rtol"), [(8.0, "auto", 1e-14), (1000.0, "spectral", 1e-6)])
def test_standardised_radii_scale_with_the_data(factor, method, rtol):
    """A factor that is a power of two does not even change the rounding, which a search for multipliers would amplify."""
    X, y = blobs()
    X = X + 2
    one, two = (classifier(standardize=True, dtype="float64").fit(s * X, y) for s in (1.0, factor))
    np.testing.assert_array_equal(one.predict(X), two.predict(factor * X))
    found, expected = two.certified_radius(factor * X, method), factor * one.certified_radius(X, method)
    np.testing.assert_allclose(found, expected, rtol=rtol)
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


# --- what is refused ------------------------------------------------------------------------------------------------------


def test_later_calls_of_partial_fit_must_agree_on_the_classes():
    X, y = blobs()
    names = np.array(["a", "b", "c"])[y]
    model = classifier().partial_fit(X, names, classes=["a", "b", "c"]).partial_fit(X, names, classes=["c", "b", "a"])
    with pytest.raises(ValueError, match="differ from those of the first call"):
        model.partial_fit(X, names, classes=["a", "b"])


@pytest.fixture(scope="module")
def of_words():
    """A classifier of three words, its samples and their labels."""
    X, y = blobs()
    labels = np.array(["oak", "ash", "elm"])[y]
    return classifier().fit(X, labels), X, labels


def test_a_column_of_labels_counts_as_labels(of_words):
    model, X, y = of_words
    expected = model.certified_score(X, y, 0.1)
    assert model.certified_score(X, y[:, None], 0.1) == expected
    assert model.certified_score(X, pd.DataFrame({"tree": y}), 0.1) == expected
    assert model.certificate(X).certified_accuracy(y[:, None], 0.1) == expected


def test_labels_of_another_number_or_type_are_no_accuracy(of_words):
    model, X, y = of_words
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.certified_score(X, y[:1], 0.1)
    found = model.certificate(X)
    with pytest.raises(ValueError, match="a label for each of the 90 samples; got 1"):
        found.certified_accuracy(y[:1], 0.1)
    for wrong in (np.arange(90) % 3, np.arange(90.0)):
        with pytest.raises(ValueError, match="predictions are of another type, such as "):
            found.certified_accuracy(wrong, 0.1)
    assert 0 < found.certified_accuracy(y.astype(object), 0.0) == model.score(X, y)


def test_the_score_of_two_classes_moves_no_faster_than_the_bound():
    """It is a difference of outputs, which may move faster than the outputs."""
    X, y = blobs(k=2)
    model = classifier(epochs=10, standardize=True).fit(X, y)
    fastest = 0.0
    for delta in rival_moves(model, X, np.full(90, 0.1)):
        fastest = max(fastest, float(np.abs(model.decision_function(X + delta) - model.decision_function(X)).max()) / 0.1)
    assert 0.5 * model.lipschitz_ < fastest < model.lipschitz_ * (1 + 1e-3)
    margin = np.abs(model.decision_function(X)) / float(model.lipschitz_)
    assert (margin >= model.certified_radius(X, "multiplier") - 1e-9).all()
    assert model.lipschitz_.method in ("spectral", "multiplier")


def test_class_energies_have_no_lipschitz_constant():
    model = classifier(objective="class_energy").fit(*blobs())
    with pytest.raises(AttributeError, match="energies, the scores of objective 'class_energy', are quadratic"):
        model.lipschitz_  # noqa: B018


@pytest.mark.parametrize("given", [{"margin": 0.2}, {"temperature": 0.0}, {"adversarial_eps": 0.5}])
@pytest.mark.parametrize("objective", [None, "cross_entropy"])
def test_parameters_of_the_margin_objective_need_it(given, objective):
    (name,) = given
    with pytest.raises(ValueError, match=f"{name}=.* needs objective 'margin'; got '{objective or 'contrastive'}'"):
        classifier(objective=objective, **given).fit(*blobs())


def test_logarithms_of_probabilities():
    X, y = blobs()
    model = classifier(objective="cross_entropy").fit(X, y)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), model.predict_proba(X), rtol=1e-12)
    assert not hasattr(classifier().fit(X, y), "predict_log_proba")
