"""Epochs: passes over parts of the data, and stopping early at the best one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
