"""Prediction sets and intervals contain the truth as often as promised, also where inputs were perturbed."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import binom
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lrrn import ConformalClassifier, ConformalRegressor
from lrrn.attacks import strongest_perturbation
from small_estimators import as_seen, blobs, classifier, curve, regressor

NOISE = 1.0


def draws(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Independent draws of three overlapping classes."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    return np.random.default_rng(0).normal(size=(3, 6))[y] + NOISE * rng.normal(size=(n, 6)), y


@pytest.fixture(scope="module")
def model():
    return classifier(epochs=15).fit(*draws(300, 1))


def calibrated(model, alpha=0.1, n=199, seed=2) -> ConformalClassifier:
    return ConformalClassifier(model, alpha=alpha).fit(*draws(n, seed))


def within_binomial(hits: int, n: int, share: float) -> bool:
    """Whether a count is one that a binomial variable takes but once in a million."""
    return binom.ppf(5e-7, n, share) <= hits <= binom.ppf(1 - 5e-7, n, share)


def test_coverage_is_what_was_asked_for(model):
    """Of 19 calibration samples the 18th score covers with probability 18/20, and no more without ties."""
    X, y = draws(400 * 20, 3)
    X, y = X.reshape(400, 20, 6), y.reshape(400, 20)
    hits = 0
    for rows, labels in zip(X, y, strict=True):
        conformal = ConformalClassifier(model, alpha=0.1).fit(rows[:19], labels[:19])
        hits += bool(conformal.predict_set(rows[19:])[0, labels[19]])
    assert within_binomial(hits, 400, 0.9)


def test_the_threshold_is_the_kth_margin(model):
    X, y = draws(9, 4)
    scores = model.decision_function(X)
    own = scores[np.arange(9), y]
    margins = own - np.where(np.eye(3, dtype=bool)[y], -np.inf, scores).max(1)
    for alpha, k in ((0.1, 9), (0.15, 9), (0.25, 8), (0.3, 7), (0.5, 5), (0.95, 1)):  # ceil(10 (1 - alpha))
        found = ConformalClassifier(model, alpha=alpha).fit(X, y).threshold_
        assert found == pytest.approx(np.sort(margins)[::-1][k - 1], abs=1e-4)
        assert found <= np.sort(margins)[::-1][k - 1]


@pytest.mark.parametrize("options", [{}, {"standardize": "features"}, {"standardize": True}, {"objective": "class_energy"}])
@pytest.mark.parametrize("eps", [0.1, 0.4])
def test_sets_at_attacked_inputs_contain_the_label_as_often(options, eps):
    X, y = draws(400, 6)
    model = classifier(epochs=15, **options).fit(*draws(300, 1))
    conformal = calibrated(model)
    moved = attacked(model, X, y, eps)
    assert np.all(np.linalg.norm((moved - X) / model.scaling.feature_scale(None), axis=1) <= eps * (1 + 1e-9))
    kept = conformal.predict_set(moved, eps)[np.arange(400), y]
    # every label that is in the set of the clean input is in that of the perturbed one
    clean = conformal.predict_set(X)[np.arange(400), y]
    assert (kept | ~clean).all() and clean.mean() > 0.85
    # without the allowance for perturbations they are not
    if eps == 0.4:
        assert conformal.predict_set(moved)[np.arange(400), y].mean() < clean.mean() - 0.02


def attacked(model, X: np.ndarray, y: np.ndarray, eps: float) -> np.ndarray:
    """Inputs within eps, in the model's default norm, at which the score of the label is as low as an attack gets it."""
    x, reach = as_seen(model, X), eps / model._unit() * (1 - 1e-9)
    if model.objective == "class_energy":
        step = reach * torch.nn.functional.normalize(uphill(model.network_, x, torch.as_tensor(y)), dim=1)
    else:
        step = strongest_perturbation(model.network_, x, torch.as_tensor(y), reach) - x
    return X + step.numpy() * np.broadcast_to(model.scale_in_, X.shape[1])


def uphill(net, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The gradient of the label's energy minus the smallest other one."""
    leaf, energies = x.clone().requires_grad_(), []
    for target in torch.eye(net.sizes[-1], dtype=x.dtype):
        fixed = [z.detach() for z in net.infer(x, target.expand(len(x), -1)).activations]
        energies.append(net.energy(leaf, fixed))
    table, own = torch.stack(energies, 1), torch.nn.functional.one_hot(label, net.sizes[-1]).bool()
    (slope,) = torch.autograd.grad((table[own] - table.masked_fill(own, math.inf).amin(1)).sum(), leaf)
    return slope


def test_sets_grow_with_eps_and_shrink_with_alpha(model):
    X, _ = draws(200, 7)
    by_eps = [calibrated(model).predict_set(X, eps) for eps in (0.0, 0.05, 0.2, 1.0, 50.0)]
    for small, large in pairwise(by_eps):
        assert (large | ~small).all()
    assert by_eps[0].sum() < by_eps[2].sum() and by_eps[-1].all()
    by_alpha = [calibrated(model, alpha).predict_set(X, 0.1) for alpha in (0.01, 0.1, 0.3, 0.8)]
    for large, small in pairwise(by_alpha):
        assert (large | ~small).all()
    assert by_alpha[0].sum() > by_alpha[-1].sum()


def test_too_few_samples_give_all_labels_and_infinite_intervals(model):
    X, y = draws(8, 8)
    with pytest.warns(UserWarning, match=r"alpha=0.1 needs 9 calibration samples; with 8, every set contains all labels"):
        conformal = ConformalClassifier(model).fit(X, y)
    assert conformal.threshold_ == -math.inf and conformal.predict_set(X, 0.1).all()
    rows, target = curve()
    fitted = regressor().fit(rows, target)
    with pytest.warns(UserWarning, match=r"alpha=0.05 needs 19 calibration samples; with 18, every interval is infinite"):
        lower, upper = ConformalRegressor(fitted, alpha=0.05).fit(rows[:18], target[:18]).predict_interval(rows)
    assert (lower == -math.inf).all() and (upper == math.inf).all()
    ConformalRegressor(fitted, alpha=0.05).fit(rows[:19], target[:19])


def test_a_pipeline_is_calibrated_and_perturbed_in_the_units_of_its_input():
    X, y = draws(300, 1)
    unit = np.array([1.0, 10.0, 100.0, 0.1, 1.0, 5.0])
    pipeline = make_pipeline(StandardScaler(), classifier(epochs=15)).fit(X * unit, y)
    plain = classifier(epochs=15).fit(StandardScaler().fit_transform(X * unit), y)
    rows, labels = draws(199, 2)
    conformal = ConformalClassifier(pipeline).fit(rows * unit, labels)
    inner = ConformalClassifier(plain).fit(pipeline[0].transform(rows * unit), labels)
    assert conformal.threshold_ == pytest.approx(inner.threshold_, abs=1e-9)
    new = draws(100, 9)[0] * unit
    scaled = conformal.predict_set(new, 0.3, norm="scaled")
    np.testing.assert_array_equal(scaled, inner.predict_set(pipeline[0].transform(new), 0.3))
    euclidean = conformal.predict_set(new, 0.3 * pipeline[0].scale_.min())
    np.testing.assert_array_equal(euclidean, scaled)


def test_intervals_contain_targets_as_often_as_promised_also_where_inputs_moved():
    rng = np.random.default_rng(0)

    def sample(n):
        X = rng.normal(size=(n, 3))
        return X, np.abs(X[:, 0]) + 0.3 * rng.normal(size=n)

    fitted = regressor(epochs=15).fit(*sample(300))
    X, y = sample(400 * 20)
    hits = 0
    for rows, target in zip(X.reshape(400, 20, 3), y.reshape(400, 20), strict=True):
        lower, upper = ConformalRegressor(fitted).fit(rows[:19], target[:19]).predict_interval(rows[19:])
        hits += bool(lower[0] <= target[19] <= upper[0])
    assert within_binomial(hits, 400, 0.9)
    conformal, (new, truth) = ConformalRegressor(fitted).fit(*sample(199)), sample(500)
    lower, upper = conformal.predict_interval(new)
    clean = (lower <= truth) & (truth <= upper)
    for eps in (0.05, 0.3):
        leaf = torch.as_tensor(new).requires_grad_()
        (slope,) = torch.autograd.grad(fitted.network_(leaf).sum(), leaf)
        steepest = slope.numpy() / np.linalg.norm(slope.numpy(), axis=1, keepdims=True)
        for sign in (-1, 1):
            lower, upper = conformal.predict_interval(new + sign * eps * (1 - 1e-9) * steepest, eps)
            assert (((lower <= truth) & (truth <= upper)) | ~clean).all()
    narrow, wide = conformal.predict_interval(new), conformal.predict_interval(new, 0.3)
    assert (wide[0] < narrow[0]).all() and (narrow[1] < wide[1]).all()


def test_the_width_is_the_kth_error_and_one_per_target():
    X, y = curve(n_targets=2)
    fitted = regressor().fit(X[:40], y[:40])
    conformal = ConformalRegressor(fitted, alpha=0.3).fit(X[40:59], y[40:59])
    errors = np.sort(np.abs(fitted.predict(X[40:59]) - y[40:59]), axis=0)
    np.testing.assert_allclose(conformal.width_, errors[13], rtol=2e-3)  # ceil(20 * 0.7) = 14
    assert (conformal.width_ >= errors[13]).all()
    lower, upper = conformal.predict_interval(X)
    assert lower.shape == y.shape
    np.testing.assert_allclose((upper - lower) / 2, np.broadcast_to(errors[13], y.shape), rtol=2e-3)


def test_samples_that_do_not_converge_have_all_labels(model):
    conformal = calibrated(model)
    X, _ = draws(20, 10)
    model = clone(model).set_params(max_sweeps=1)
    model.__dict__ |= {name: value for name, value in vars(conformal.estimator).items() if name.endswith("_")}
    model.standardize, conformal.estimator = False, model
    with pytest.warns(ConvergenceWarning):
        sets = conformal.predict_set(X)
    with pytest.warns(ConvergenceWarning):
        failed = ~model.certificate(X, "spectral").converged
    assert failed.any() and sets[failed].all()


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 2, float("nan")])
def test_alpha_is_a_probability(model, alpha):
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1"):
        ConformalClassifier(model, alpha=alpha).fit(*draws(20, 2))
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1"):
        ConformalRegressor(regressor().fit(*curve()), alpha=alpha).fit(*curve())


def test_bad_input_is_refused(model):
    X, y = draws(50, 2)
    with pytest.raises(TypeError, match="must be an LRRNClassifier, or a Pipeline that ends in one"):
        ConformalClassifier(regressor()).fit(X, y)
    with pytest.raises(TypeError, match="must be an LRRNRegressor"):
        ConformalRegressor(model).fit(X, y)
    with pytest.raises(NotFittedError, match="other samples than the calibration's"):
        ConformalClassifier(classifier()).fit(X, y)
    with pytest.raises(ValueError, match=r"was not trained on.*\[7\]"):
        ConformalClassifier(model).fit(X, np.where(y == 2, 7, y))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        ConformalClassifier(model).fit(X, y[:-1])
    with pytest.raises(NotFittedError):
        ConformalClassifier(model).predict_set(X)
    conformal = ConformalClassifier(model).fit(X, y)
    for eps in (-0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match="eps must be a finite size of at least 0"):
            conformal.predict_set(X, eps)
    with pytest.raises(ValueError, match="unknown norm 'l1'"):
        conformal.predict_set(X, 0.1, norm="l1")
    rows, target = curve()
    fitted = regressor().fit(rows, target)
    with pytest.raises(ValueError, match="NaN"):
        ConformalRegressor(fitted).fit(rows, np.where(target > 0, np.nan, target))
    with pytest.raises(ValueError, match=r"y is of shape \(80, 2\)"):
        ConformalRegressor(fitted).fit(rows, np.stack([target, target], 1))


def test_labels_may_be_text():
    X, y = blobs()
    names = np.array(["b", "c", "a"])[y]
    conformal = ConformalClassifier(classifier().fit(X[:60], names[:60]), alpha=0.2).fit(X[60:], names[60:])
    assert list(conformal.classes_) == ["a", "b", "c"] and conformal.predict_set(X).dtype == bool


def test_a_frozen_or_searched_estimator_counts_as_what_it_holds(model):
    X, y = draws(99, 2)
    expected = ConformalClassifier(model).fit(X, y).threshold_
    assert clone(ConformalClassifier(FrozenEstimator(model))).fit(X, y).threshold_ == expected
    search = GridSearchCV(model, {"hidden_sizes": [(4,)]}, cv=2).fit(*draws(60, 1))
    found, inner = (ConformalClassifier(one).fit(X, y) for one in (search, search.best_estimator_))
    assert found.threshold_ == inner.threshold_
    np.testing.assert_array_equal(found.predict_set(X, eps=0.1), inner.predict_set(X, eps=0.1))
