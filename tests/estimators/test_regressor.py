"""The regressor: shapes and units of its predictions, and intervals that hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from small_estimators import curve, moves, regressor, some_without_weight


def test_targets_of_weight_zero_are_as_if_absent():
    X, y = curve()
    weight = some_without_weight(80)
    kept = weight > 0
    one = regressor(optimizer="sgd").fit(X, y, sample_weight=weight)
    two = regressor(optimizer="sgd").fit(X[kept], y[kept], sample_weight=weight[kept])
    np.testing.assert_allclose(one.predict(X), two.predict(X), rtol=1e-4)


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


def test_predictions_move_no_faster_than_the_lipschitz_bound():
    """In the units of the targets, whose scale differs from one to the other."""
    X, y = curve(n_targets=2)
    y = y * [1.0, 100.0]
    model = regressor(standardize=True, epochs=10).fit(X, y)
    fastest = 0.0
    for delta in moves(model, X, np.full(80, 0.1), lambda output, j: output[:, j]):
        moved = np.linalg.norm(model.predict(X + delta) - model.predict(X), axis=1)
        fastest = max(fastest, float(moved.max()) / 0.1)
    assert 0.05 * model.lipschitz_ < fastest < model.lipschitz_ * (1 + 1e-3)


@pytest.mark.parametrize("eps", [[0.1, 0.2], "0.1", np.array([0.1])])
def test_an_interval_is_of_one_size(eps):
    X, y = curve()
    model = regressor().fit(X, y)
    with pytest.raises(ValueError, match=r"eps must be one number; got .* certificate\(X, eps\) takes several sizes"):
        model.predict_interval(X, eps)
    np.testing.assert_array_equal(model.predict_interval(X, np.array(0.1)), model.predict_interval(X, 0.1))
