"""What ``standardize`` divides by, and the norms of radii and intervals that follow from it."""

from __future__ import annotations

import math
import re
import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler

from lrrn.estimators._base import LiftedEstimator
from lrrn.estimators.scaling import fitted
from small_estimators import as_seen, blobs, classifier, curve, energy_model, moves, regressor

SCALES = np.array([1e-3, 1.0, 30.0, 1e4, 0.2, 5.0])


def stretched() -> tuple[np.ndarray, np.ndarray]:
    X, y = blobs()
    return X * SCALES + 10 * SCALES, y


def climbing(model: LiftedEstimator, X: np.ndarray, reach: np.ndarray) -> list[np.ndarray]:
    """Perturbed rows at distance ``reach`` in the scaled norm: random ones, and some along gradients of the outputs."""
    rng = np.random.default_rng(0)
    x = as_seen(model, X)
    steps = [torch.as_tensor(rng.normal(size=X.shape)) for _ in range(10)]
    for j in range(model.network_.sizes[-1]):
        leaf = x.clone().requires_grad_()
        output = model.network_(leaf)
        (slope,) = torch.autograd.grad((output[:, j] - output.amax(1)).sum() + output[:, j].sum(), leaf)
        steps += [slope, -slope]
    unit = [(step / step.norm(dim=1, keepdim=True).clamp(min=1e-12)).numpy() for step in steps]
    return [X + reach[:, None] * step * model.scale_in_ for step in unit]


def test_every_feature_is_divided_by_its_standard_deviation():
    X, y = stretched()
    model = classifier(standardize="features").fit(X, y)
    known = StandardScaler().fit(X)
    np.testing.assert_allclose(model.scale_in_, known.scale_, rtol=1e-12)
    np.testing.assert_allclose(as_seen(model, X), known.transform(X), rtol=1e-9, atol=1e-12)


def test_a_constant_feature_is_divided_by_one():
    X, y = stretched()
    X[:, 2], X[:, 3] = 0.1, 1e9  # the computed variance of a constant is not always 0
    model = classifier(standardize="features").fit(X, y)
    assert model.scale_in_[2] == 1.0 and model.scale_in_[3] == 1.0
    assert np.isfinite(model.certified_radius(X)).all()


def test_common_is_another_word_for_true_and_gives_the_same_bits():
    X, y = stretched()
    one, two = classifier(standardize=True).fit(X, y), classifier(standardize="common").fit(X, y)
    assert one.scale_in_ == two.scale_in_ == math.sqrt(X.var(axis=0).mean()) and isinstance(one.scale_in_, float)
    np.testing.assert_array_equal(one.certified_radius(X), two.certified_radius(X))
    # what checkpoints recognise their data by
    seen = one.scaling.apply(X, torch.float64, torch.device("cpu")).numpy()
    np.testing.assert_array_equal(seen, (X - X.mean(axis=0)) / one.scale_in_)


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_another_scaling_is_refused(make):
    X, y = blobs()
    with pytest.raises(ValueError, match="'common' or 'features'; got 'each'"):
        make(standardize="each").fit(X, y)


def test_per_feature_scaling_does_not_depend_on_units():
    X, y = blobs()
    one = classifier(standardize="features", dtype="float64").fit(X, y)
    two = classifier(standardize="features", dtype="float64").fit(X * 2.0 ** np.arange(6), y)
    np.testing.assert_allclose(one.certified_radius(X), two.certified_radius(X * 2.0 ** np.arange(6)), rtol=1e-6)
    assert float(one.lipschitz_) == pytest.approx(float(two.lipschitz_), rel=1e-6)


def test_tables_with_features_of_very_different_scales_are_learned():
    X, y = load_wine(return_X_y=True)
    options = dict(hidden_sizes=(16,), epochs=30)
    scores = [classifier(standardize=how, **options).fit(X[::2], y[::2]).score(X[1::2], y[1::2]) for how in (True, "features")]
    assert scores[1] > 0.93 and scores[1] > scores[0] + 0.1


@pytest.mark.parametrize(("standardize", "default"), [(False, "euclidean"), (True, "euclidean"), ("features", "scaled")])
def test_a_certificate_names_its_norm(standardize, default):
    X, y = blobs()
    model = classifier(standardize=standardize).fit(X, y)
    assert model.certificate(X).norm == default
    assert model.certificate(X, norm="input").norm == "euclidean" and model.certificate(X, norm="scaled").norm == "scaled"
    np.testing.assert_array_equal(model.certified_radius(X), model.certificate(X, norm=default).radius)
    np.testing.assert_allclose(
        model.certified_radius(X, norm="input"),
        model.certified_radius(X, norm="scaled") * np.min(model.scale_in_),
        rtol=1e-12,
    )
    for call in (model.certificate, model.certified_radius):
        with pytest.raises(ValueError, match="unknown norm 'l1'; use 'input'"):
            call(X, norm="l1")
    with pytest.raises(ValueError, match="unknown norm 'l1'"):
        model.energy_interval(X, 0.1, norm="l1")


@pytest.mark.parametrize("objective", ["contrastive", "class_energy"])
def test_no_perturbation_inside_either_norm_changes_the_label(objective):
    X, y = stretched()
    model = classifier(objective=objective, standardize="features", epochs=15).fit(X, y)
    found = model.certificate(X)
    assert (found.radius > 0).mean() > 0.5
    for moved in climbing(model, X, 0.999 * found.radius):
        np.testing.assert_array_equal(model.predict(moved), found.prediction)
    radius = model.certified_radius(X, norm="input")
    for delta in moves(model, X, 0.999 * radius, lambda output, j: output[:, j] - output.amax(1)):
        np.testing.assert_array_equal(model.predict(X + delta), found.prediction)


@pytest.mark.parametrize("standardize", [False, True, "features"])
def test_a_feature_may_move_alone_as_far_as_its_radius(standardize):
    X, y = blobs() if not standardize else stretched()
    model = classifier(standardize=standardize, epochs=15).fit(X, y)
    for norm in (None, "input"):
        found = model.certificate(X, norm=norm)
        reach = found.feature_radius()
        assert reach.shape == X.shape
        np.testing.assert_allclose(reach, model.certified_radius(X, norm="scaled")[:, None] * (model.scale_in_ * np.ones(6)))
        for j in range(X.shape[1]):
            for sign in (-1, 1):
                moved = X.copy()
                moved[:, j] += sign * 0.999 * reach[:, j]
                np.testing.assert_array_equal(model.predict(moved), found.prediction)


def test_radii_of_a_linear_classifier_in_both_norms_are_distances_to_its_boundary():
    X, y = blobs(k=2)
    X = X * SCALES
    model = classifier(hidden_sizes=(), standardize="features", epochs=15, learning_rate=0.002).fit(X, y)
    w = model.network_.W[0].detach().numpy().astype(np.float64)
    slope = (w[1] - w[0]) / model.scale_in_  # of the lead, as a function of X
    lead = np.abs(model.decision_function(X))
    found = model.certificate(X)
    np.testing.assert_allclose(found.radius, lead / np.linalg.norm(slope * model.scale_in_), rtol=1e-3, atol=1e-6)
    # a feature alone: at most |slope * scale| is used of the whole gradient
    assert (found.feature_radius() <= lead[:, None] / np.abs(slope) * (1 + 1e-6)).all()
    exact = lead / np.linalg.norm(slope)
    assert (model.certified_radius(X, norm="input") <= exact * (1 + 1e-6)).all()


@pytest.mark.parametrize("norm", [None, "input"])
def test_predictions_and_energies_stay_in_their_intervals(norm):
    X, y = curve()
    X = X * SCALES[:5]
    model = regressor(standardize="features", epochs=20).fit(X, y)
    eps = 0.2 if norm is None else 0.2 * model.scale_in_.min()
    found = model.certificate(X, eps, norm=norm)
    assert found.norm == ("scaled" if norm is None else "euclidean")
    lower, upper = model.predict_interval(X, eps, norm=norm)
    np.testing.assert_array_equal(lower, found.intervals[eps][0])
    energy = model.energy_interval(X, eps, norm=norm)
    reach = np.full(len(X), eps)
    if norm is None:
        moved = climbing(model, X, reach)
    else:
        moved = [X + delta for delta in moves(model, X, reach, lambda output, j: output[:, j])]
    for there in moved:
        assert ((lower <= model.predict(there)) & (model.predict(there) <= upper)).all()
        assert ((energy[0] <= model.energy(there)) & (model.energy(there) <= energy[1])).all()
    wide = model.predict_interval(X, eps * (1 if norm is None else 1 / model.scale_in_.min()), norm="scaled")
    np.testing.assert_allclose(wide[1] - wide[0], upper - lower, rtol=1e-9)


def test_decisions_of_an_energy_model_hold_in_the_scaled_norm():
    X, _ = stretched()
    model = energy_model(standardize="features", epochs=10).fit(X)
    found = model.certificate(X)
    assert found.norm == "scaled" and (found.radius > 0).any()
    for moved in climbing(model, X, 0.999 * found.radius):
        np.testing.assert_array_equal(model.predict(moved), found.prediction)
    np.testing.assert_allclose(model.certified_radius(X, norm="input"), found.radius * model.scale_in_.min(), rtol=1e-12)


def test_scores_move_no_faster_than_the_bound_in_the_scaled_norm():
    X, y = stretched()
    model = classifier(standardize="features", epochs=10).fit(X, y)
    pairs = np.random.default_rng(0).integers(len(X), size=(500, 2))
    a, b = X[pairs[:, 0]], X[pairs[:, 1]]
    far = np.linalg.norm((a - b) / model.scale_in_, axis=1)
    moved = np.linalg.norm(model.decision_function(a) - model.decision_function(b), axis=1)
    assert (moved <= float(model.lipschitz_) * far * (1 + 1e-6) + 1e-6).all()


def test_predict_proba_says_which_objectives_have_it():
    X, y = blobs()
    model = classifier().fit(X, y)
    assert not hasattr(model, "predict_proba")
    with pytest.raises(AttributeError, match="objective 'margin' or 'cross_entropy'; this one has 'contrastive'"):
        model.predict_proba(X)
    assert classifier(objective="cross_entropy").fit(X, y).predict_proba(X).shape == (90, 3)
    assert "softmax" in type(model).predict_proba.__doc__


@pytest.mark.parametrize("make, data", [(classifier, blobs), (regressor, curve)])
@pytest.mark.parametrize(("fitted", "later"), [("features", False), (False, "features"), (True, "features")])
def test_what_was_fitted_decides_about_scaling(make, data, fitted, later):
    """As other parameters of a fit, ``standardize`` may change without a change of the fitted model."""
    X, y = data()
    X = X * np.geomspace(1, 5, X.shape[1])
    model = make(standardize=fitted).fit(X, y)
    predicted, energy, bound = model.predict(X), model.energy(X), float(model.lipschitz_)
    ends = model.certified_radius(X) if make is classifier else model.predict_interval(X, 0.1)
    model.set_params(standardize=later)
    np.testing.assert_array_equal(model.predict(X), predicted)
    np.testing.assert_array_equal(model.energy(X), energy)
    np.testing.assert_array_equal(model.certified_radius(X) if make is classifier else model.predict_interval(X, 0.1), ends)
    assert float(model.lipschitz_) == bound


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (20.0, "are large, with a root mean square of .*: set standardize=True, or scale X"),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 100.0], "are large, .*: set standardize='features'"),
        ([0.01, 0.01, 0.01, 0.01, 0.01, 1.0], "differ in scale.*: set standardize='features'"),
        (1.0, None),
        ([0.0, 1.0, 1.0, 1.0, 1.0, 1.0], None),
    ],
)
@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_a_fit_warns_of_features_on_which_networks_train_badly(make, factors, message):
    X, y = blobs()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        make(epochs=1).fit(X * factors, y)
        make(epochs=1, standardize="features").fit(X * factors, y)
    found = [(str(one.message), one.filename) for one in seen if "the features" in str(one.message)]
    assert len(found) == (message is not None)
    assert all(re.search(message, text) and file == __file__ for text, file in found)


@pytest.mark.parametrize("make", [classifier, regressor])
def test_a_fit_that_tries_models_warns_of_features_once(make):
    X, y = blobs()
    factors = np.array([0.01, 0.01, 0.01, 0.01, 0.01, 1.0])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        make(epochs=1, hidden_sizes=None, eps=0.1).fit(X * factors, y)
        make(epochs=1, hidden_sizes=None, eps=0.1, standardize=True).fit(X * factors, y)
    found = [one.filename for one in seen if "the features" in str(one.message)]
    assert found == [__file__]


def test_features_that_are_constant_up_to_rounding_are_no_reason_to_warn():
    X, y = blobs()
    X = np.hstack([X[:, :2], np.full((90, 4), 0.1)])
    assert X.std(axis=0)[-1] > 0  # rounding
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classifier(epochs=1).fit(X, y)


# --- sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [classifier, energy_model])
@pytest.mark.parametrize("standardize", [True, "features"])
@pytest.mark.parametrize("power", [-800, -400, 400, 800])
def test_a_power_of_two_scales_radii_and_changes_nothing_else(make, standardize, power):
    """Division by it is exact, so the network sees the same bits; squares of these values are beyond float64."""
    X, y = blobs()
    one, two = (make(standardize=standardize, epochs=2).fit(data, y) for data in (X, np.ldexp(X, power)))
    np.testing.assert_array_equal(two.scale_in_, np.ldexp(one.scale_in_, power))
    assert torch.equal(torch.cat([w.flatten() for w in one.network_.W]), torch.cat([w.flatten() for w in two.network_.W]))
    for norm, factor in (("input", power), ("scaled", 0)):
        radius = two.certificate(np.ldexp(X, power), norm=norm).radius
        np.testing.assert_array_equal(radius, np.ldexp(one.certificate(X, norm=norm).radius, factor))
        assert np.isfinite(radius).all() and (radius > 0).any()


@pytest.mark.parametrize("power", [-800, -400, 400, 800])
def test_a_power_of_two_scales_predictions_and_changes_nothing_else(power):
    X, y = curve()
    one, two = (regressor(epochs=2, standardize=True).fit(X, target) for target in (y, np.ldexp(y, power)))
    np.testing.assert_array_equal(two.predict(X), np.ldexp(one.predict(X), power))
    for mine, theirs in zip(two.predict_interval(X, 0.1), one.predict_interval(X, 0.1), strict=True):
        np.testing.assert_array_equal(mine, np.ldexp(theirs, power))


@pytest.mark.parametrize("power", [-700, 700])
def test_one_feature_of_another_size_has_its_own_scale(power):
    """Its square is beyond float64, and beside it those of all others vanish."""
    X, _ = blobs()
    offset, scale = fitted(X * 2.0 ** np.array([0, 0, 0, 0, 0, power]), "features")
    np.testing.assert_allclose(scale / 2.0 ** np.array([0, 0, 0, 0, 0, power]), X.std(axis=0), rtol=1e-12)
    np.testing.assert_allclose(offset / 2.0 ** np.array([0, 0, 0, 0, 0, power]), X.mean(axis=0), rtol=1e-9)
    _, common = fitted(X * 2.0 ** np.array([0, 0, 0, 0, 0, power]), True)
    expected = X.std(axis=0)[5] * 2.0**700 if power > 0 else math.sqrt(np.square(X.std(axis=0)[:5]).sum())
    assert common == pytest.approx(expected / math.sqrt(6), rel=1e-12)
    constant = np.hstack([X[:, :5], np.full((90, 1), 2.0**700)])
    assert fitted(constant, True)[1] == pytest.approx(math.sqrt(np.square(X.std(axis=0)[:5]).sum() / 6), rel=1e-12)


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
@pytest.mark.parametrize("standardize", [True, "features"])
def test_data_that_floating_point_does_not_hold_are_refused(make, standardize):
    X, y = blobs()
    for factor in (1e290, 1e-270, 1e-310):
        with pytest.raises(ValueError, match=r"X has absolute values up to .* multiply X by a number that brings them near 1"):
            make(standardize=standardize).fit(X * factor, y)
    apart = X * np.array([1e-140, 1, 1, 1, 1, 1e140])
    with pytest.raises(ValueError, match=r"features of X have standard deviations from .* too far apart for float64"):
        make(standardize="features").fit(apart, y)


def test_targets_that_floating_point_does_not_hold_are_refused():
    X, y = curve()
    for factor in (1e290, 1e-270):
        with pytest.raises(ValueError, match=r"y has absolute values up to .* multiply y by a number that brings them near 1"):
            regressor().fit(X, y * factor)
