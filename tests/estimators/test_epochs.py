"""Epochs: passes over parts of the data, and stopping early at the best one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris

import lrrn
from lrrn import LRRNClassifier
from lrrn.estimators.held_out import split_off_validation
from small_estimators import blobs, classifier, energy_model, regressor, weights

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


@pytest.mark.parametrize("before", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("after", ["sgd", "adam", "adamw"])
def test_another_optimiser_begins_anew(before, after, tmp_path):
    """A model from a file has no state of an optimiser, so a pass continues from it as one with a new optimiser does."""
    X, y = blobs()
    model = classifier(optimizer=before)
    for _ in range(3):
        model.partial_fit(X, y, classes=[0, 1, 2])
    lrrn.save(model, tmp_path / "model")
    fresh = lrrn.load(tmp_path / "model").set_params(optimizer=after).partial_fit(X, y)
    model.set_params(optimizer=after).partial_fit(X, y)
    # of the three, only sgd has no state to continue with
    assert torch.equal(weights(model), weights(fresh)) == (before != after or after == "sgd")


def test_passes_take_a_changed_weight_decay():
    """A step of AdamW subtracts rate * decay * weight, whatever else it does."""
    X, y = blobs()
    options = dict(optimizer="adamw", batch_size=90, dtype="float64", learning_rate=0.001)
    model = classifier(**options, decoupled_weight_decay=0.0).partial_fit(X, y, classes=[0, 1, 2])
    other = copy.deepcopy(model)
    start = [w.detach().clone() for w in model.network_.W]
    model.partial_fit(X, y)
    other.set_params(decoupled_weight_decay=0.5).partial_fit(X, y)
    for w, decayed, first in zip(model.network_.W, other.network_.W, start, strict=True):
        torch.testing.assert_close(w - decayed, 0.001 * 0.5 * first, rtol=1e-6, atol=1e-12)


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
    latest = int(np.flatnonzero(np.array(scores) == scores[best])[-1])
    assert torch.equal(weights(model), states[latest])
    assert make is classifier or not torch.equal(weights(model), states[-1])


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


def test_held_back_samples_are_stratified():
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    train, held = split_off_validation(100, 0.2, 0, labels)
    assert np.bincount(labels[held]).tolist() == [12, 6, 2] and not set(train) & set(held) and len(train) + len(held) == 100


@pytest.mark.parametrize("counts", [[40, 1, 1], [5, 4, 2, 1], [2, 2, 2, 2], [2, 1]])
@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.9])
def test_classes_of_few_members_keep_one_for_training(counts, fraction):
    labels = np.repeat(np.arange(len(counts)), counts)
    for seed in range(20):
        train, held = split_off_validation(len(labels), fraction, seed, labels)
        assert len(held) >= 1 and sorted([*train, *held]) == list(range(len(labels)))
        assert set(labels[train]) == set(labels)


@pytest.mark.parametrize(("make", "message"), [(classifier, "two of one class; got 3"), (regressor, "two; got 1")])
def test_too_few_samples_to_hold_some_out(make, message):
    X, y = blobs(n=3)
    n = 3 if make is classifier else 1
    with pytest.raises(ValueError, match=f"early_stopping holds out some samples.*at least {message} in all"):
        make(early_stopping=True).fit(np.vstack([X[:n], X[:n]]) if n == 1 else X, np.r_[y[:n], y[:n]] if n == 1 else y,
                                      *([] if n == 3 else [[1.0, 0.0]]))  # fmt: skip


@pytest.mark.parametrize("make", [classifier, regressor])
def test_samples_of_weight_zero_are_not_scored(make):
    """Those of weight zero have another rule: a score that counted them would stay low."""
    X, y = blobs()
    options = dict(early_stopping=True, validation_fraction=0.5, n_iter_no_change=30, epochs=30, schedule=None)
    wrong = make(**options).fit(np.vstack([X, X]), np.r_[y, (y + 1) % 3], np.repeat([1.0, 0.0], 90))
    right = make(**options).fit(X, y)
    best = [max(record["validation_score"] for record in model.history_) for model in (wrong, right)]
    assert best[0] > best[1] - 0.15


def test_early_stopping_loses_little_on_small_tables():
    """A held-out part of ten samples has few different accuracies: the first epoch that reaches the best is hardly trained."""
    X, y = load_iris(return_X_y=True)
    X = (X - X.mean(0)) / X.std(0)
    whole, early = (LRRNClassifier(early_stopping=early, random_state=0).fit(X[::2], y[::2]) for early in (False, True))
    assert early.n_iter_ < whole.n_iter_
    assert early.score(X[1::2], y[1::2]) > whole.score(X[1::2], y[1::2]) - 0.03
