"""What ``eps`` chooses: against logistic and ridge regression, with exact distances from their boundaries."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_circles, make_moons
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

import lrrn
from lrrn import LRRNClassifier, LRRNRegressor
from lrrn.estimators import robust
from lrrn.learning import SquaredError


@pytest.fixture(scope="module")
def moons():
    X, y = make_moons(400, noise=0.15, random_state=0)
    return StandardScaler().fit_transform(X), y


@pytest.fixture(scope="module")
def of_moons(moons):
    return LRRNClassifier(eps=0.15, random_state=0).fit(*moons)


def straight(n=120, seed=0):
    """Return two Gaussian classes, for which a linear classifier is optimal, at every size of perturbation."""
    generator = np.random.default_rng(seed)
    y = np.arange(n) % 2
    return generator.normal(size=(n, 8)) + 1.2 * np.where(y, 1, -1)[:, None] * np.eye(8)[0], y


def distance(model, X):
    """Return the exact distance from the boundary of binary logistic regression."""
    return np.abs(model.decision_function(X)) / np.linalg.norm(model.coef_)


def test_a_hidden_layer_certifies_more_than_logistic_regression():
    X, y = make_circles(300, noise=0.05, factor=0.3, random_state=0)
    X = StandardScaler().fit_transform(X)
    linear = LogisticRegression().fit(X, y)
    theirs = np.mean((linear.predict(X) == y) & (distance(linear, X) > 0.15))
    clf = LRRNClassifier(eps=0.15, random_state=0).fit(X, y)
    assert clf.chosen_["hidden_sizes"] == (64,) and clf.network_.sizes == (2, 64, 2)
    assert clf.certified_score(X, y, 0.15, method="shared") > theirs + 0.3


def test_chosen_values_are_apart_from_parameters(of_moons):
    assert of_moons.get_params()["objective"] is None and of_moons.chosen_["objective"] == "margin"
    assert of_moons.chosen_["adversarial_eps"] == 0.15
    assert of_moons.n_iter_ == of_moons.chosen_["epochs"]
    assert not hasattr(clone(of_moons), "chosen_") and clone(of_moons).eps == 0.15
    assert of_moons.predict_proba([[0.0, 0.0]]).shape == (1, 2)


def test_a_linear_model_where_it_is_the_better_one(monkeypatch):
    X, y = straight()
    monkeypatch.setattr(robust, "STRENGTHS", (1.0,))
    fits = []

    def hopeless(parameters, train):
        fits.append(parameters)
        return lambda held: np.zeros(len(held))

    chosen, linear = robust.classifier_parameters(X, y, None, 0.2, 0, hopeless)
    assert chosen["hidden_sizes"] == () and len(fits) == 1  # one fold settles it
    model = LogisticRegression(max_iter=300).fit(X, y)
    assert np.allclose(linear.weight[1] - linear.weight[0], model.coef_[0], atol=1e-6)
    certified = (model.predict(X) == y) & (distance(model, X) > 0.2)
    assert np.array_equal(linear.certified(X, y, 0.2), certified) and 0 < certified.sum() < len(X)


@pytest.mark.parametrize("eps", [0.2, 0.8])
def test_the_strength_that_certifies_most(eps):
    X, y = straight(200)
    X, y = np.concatenate([X, X[:50]]), np.concatenate([y, np.zeros(50, int)])  # classes differ in size, so that C matters
    splits = list(robust._splits(len(X), 0, y))
    paths = [list(robust.logistic(X[train], y[train], None, *robust.STRENGTHS)) for train, _ in splits]
    shares = []
    for k, strength in enumerate(robust.STRENGTHS):
        held_out = []
        for (train, held), path in zip(splits, paths, strict=True):
            model = LogisticRegression(C=strength, max_iter=300, tol=1e-8).fit(X[train], y[train])
            assert np.allclose(path[k].weight[1] - path[k].weight[0], model.coef_[0], rtol=0.02, atol=5e-3)
            right = model.predict(X[held]) == y[held]
            held_out += [np.mean(right & (distance(model, X[held]) > size)) for size in np.linspace(0, 2 * eps, 9)]
        shares.append(np.mean(held_out))
    best = robust._shares(X, y, robust.sizes(len(X), eps), splits, paths).argmax()
    assert shares[best] >= max(shares) - 0.002 > min(shares) + 0.02


def test_the_linear_model_is_that_of_the_strength_that_certifies_most():
    X, y = straight(200)
    X, y = np.concatenate([X, X[:50]]), np.concatenate([y, np.zeros(50, int)])
    splits = list(robust._splits(len(X), 0, y))
    paths = [list(robust.logistic(X[train], y[train], None, *robust.STRENGTHS)) for train, _ in splits]
    best = robust._shares(X, y, robust.sizes(len(X), 0.2), splits, paths).argmax()
    poor = lambda parameters, train: lambda held: np.zeros(len(held))  # noqa: E731
    _, linear = robust.classifier_parameters(X, y, None, 0.2, 0, poor)
    *_, expected = robust.logistic(X, y, None, *robust.STRENGTHS[: best + 1])
    assert linear is not None and np.allclose(linear.weight, expected.weight, rtol=1e-6)


@pytest.mark.parametrize("scale, eps, fits", [(1.0, 1e-4, 9), (0.02, 1e-4, 11)])
def test_weak_regularisation_is_tried_only_where_it_may_be_best(scale, eps, fits, monkeypatch):
    X, y = straight(200)
    X, y = np.concatenate([X, X[:50]]), np.concatenate([y, np.zeros(50, int)])  # classes differ in size, so that C matters
    real, made = robust.logistic, []

    def counted(*given):
        made.append(0)
        at = len(made) - 1
        for model in real(*given):
            made[at] += 1
            yield model

    monkeypatch.setattr(robust, "logistic", counted)
    robust.classifier_parameters(scale * X, y, None, eps, 0, lambda parameters, train: lambda held: np.ones(len(held)))
    assert made[: robust.FOLDS] == [fits] * robust.FOLDS


def test_a_network_as_good_as_the_linear_model_is_kept():
    X, y = straight()
    tried = []

    def as_good(parameters, train):
        tried.append(parameters["temperature"])
        model = list(robust.logistic(X[train], y[train], None, *robust.STRENGTHS))
        splits = list(robust._splits(len(X), 0, y))
        paths = [list(robust.logistic(X[rows], y[rows], None, *robust.STRENGTHS)) for rows, _ in splits]
        best = robust._shares(X, y, robust.sizes(len(X), 1.0), splits, paths).argmax()
        return lambda held: model[best].share(X[held], y[held], robust.sizes(len(X), 1.0))

    chosen, linear = robust.classifier_parameters(X, y, None, 1.0, 0, as_good)
    assert linear is None and chosen["hidden_sizes"] == (64,) and chosen["temperature"] >= min(tried)


def test_the_linear_model_as_a_network(monkeypatch):
    X, y = straight()
    monkeypatch.setattr(robust, "STRENGTHS", (1.0,))
    monkeypatch.setattr(robust.Linear, "share", lambda self, x, label, sizes: np.full(len(x), 2.0))  # no network is as good
    clf = LRRNClassifier(eps=0.2, dtype="float64", epochs=1, random_state=0).fit(X, y)
    model = LogisticRegression(max_iter=300).fit(X, y)
    assert clf.network_.sizes == (8, 2) and clf.loss_curve_ == []
    assert np.array_equal(clf.predict(X), model.predict(X))
    assert np.allclose(clf.certified_radius(X), distance(model, X), rtol=1e-6)
    assert np.allclose(clf.predict_proba(X), model.predict_proba(X), atol=1e-9)


def test_several_classes_of_a_linear_model():
    X, y = load_iris(return_X_y=True)
    (linear,) = robust.logistic(X, y, None, 1.0)
    model = LogisticRegression(max_iter=300).fit(X, y)
    assert np.allclose(linear.weight.mean(axis=0), 0)
    scores, weight = model.decision_function(X), model.coef_
    for i in (0, 60, 70, 140):
        gaps = [(scores[i, y[i]] - scores[i, j]) / np.linalg.norm(weight[y[i]] - weight[j]) for j in range(3) if j != y[i]]
        expected = min(gaps)
        assert linear.certified(X[i : i + 1], y[i : i + 1], expected - 1e-4)
        assert not linear.certified(X[i : i + 1], y[i : i + 1], expected + 1e-4)


def test_the_temperature_is_that_of_logistic_regression_within_the_spread_of_the_data():
    X, y = straight()
    (linear,) = robust.logistic(X, y, None, 1.0)
    norm = np.linalg.norm(LogisticRegression(max_iter=300).fit(X, y).coef_) / 2  # of each of the two centred rows
    assert robust.margin_parameters(X, linear, 0.25)["temperature"] == pytest.approx(1 / norm + 0.25, rel=1e-4)
    nothing = robust.Linear(np.zeros((2, 8)), np.zeros(2))
    assert robust.margin_parameters(X, nothing, 0.25)["temperature"] == pytest.approx(np.sqrt(X.var(axis=0).sum()) + 0.25)
    assert robust.margin_parameters(X, nothing, 0.25, 3.0)["temperature"] == pytest.approx(
        3 * np.sqrt(X.var(axis=0).sum()) + 0.25
    )
    assert robust.margin_parameters(np.zeros_like(X), nothing, 0.25)["temperature"] == 1.25


def test_given_parameters_are_kept(moons):
    X, y = moons
    clf = LRRNClassifier(eps=0.1, hidden_sizes=(16,), epochs=2, temperature=0.7, random_state=0).fit(X, y)
    assert clf.network_.sizes == (2, 16, 2) and clf.n_iter_ == 2 and clf._use("temperature") == 0.7
    assert {"hidden_sizes", "epochs", "temperature"}.isdisjoint(clf.chosen_)
    regressor = LRRNRegressor(eps=0.1, hidden_sizes=(16,), epochs=2, max_output_norm=0.1, random_state=0).fit(X, y)
    assert regressor.chosen_ == {"batch_size": 64}
    assert float(regressor.network_.W[-1].detach().norm()) <= 0.1 * (1 + 1e-6)


def test_the_size_is_in_the_units_of_x(moons):
    X, y = moons
    options = {"hidden_sizes": (8,), "epochs": 2, "random_state": 0}
    one = LRRNClassifier(eps=0.1, **options).fit(X, y)
    ten = LRRNClassifier(eps=1.0, standardize=True, **options).fit(10 * X, y)
    assert ten.chosen_["adversarial_eps"] == pytest.approx(0.1, rel=1e-6)
    assert ten.chosen_["temperature"] == pytest.approx(one.chosen_["temperature"], rel=1e-3)
    by_feature = LRRNClassifier(eps=0.1, standardize="features", **options).fit(X * [3, 50], y)
    assert by_feature.chosen_["adversarial_eps"] == 0.1


def test_zero_weights_are_as_good_as_absent_rows(moons):
    X, y = moons
    options = {"eps": 0.1, "hidden_sizes": (8,), "epochs": 1, "random_state": 0}
    weight = (np.arange(len(X)) < 300).astype(float)
    some = LRRNClassifier(**options).fit(X, y, weight)
    assert some.chosen_["temperature"] == pytest.approx(
        LRRNClassifier(**options).fit(X[:300], y[:300]).chosen_["temperature"], 1e-3
    )


@pytest.mark.parametrize("eps", [0, -1, float("nan"), float("inf"), "0.1"])
def test_sizes_that_are_refused(eps, moons):
    for model in (LRRNClassifier(eps=eps), LRRNRegressor(eps=eps)):
        with pytest.raises(ValueError, match="eps must be None or a positive number"):
            model.fit(*moons)


def test_what_does_not_go_with_eps(moons):
    with pytest.raises(ValueError, match="eps trains with objective 'margin'; got objective='contrastive'"):
        LRRNClassifier(eps=0.1, objective="contrastive").fit(*moons)
    with pytest.raises(ValueError, match=r"eps=0\.1 needs objective 'squared_error'; got 'contrastive'"):
        LRRNRegressor(eps=0.1, objective="contrastive").fit(*moons)
    with pytest.raises(ValueError, match="partial_fit sees the data in parts"):
        LRRNClassifier(eps=0.1).partial_fit(*moons, classes=[0, 1])
    with pytest.raises(ValueError, match="needs bounds of at least 0; got -1"):
        LRRNRegressor(max_output_norm=-1).fit(*moons)


def test_rare_classes_need_no_folds():
    X, y = straight(40)
    y[:2] = 2
    clf = LRRNClassifier(eps=0.1, epochs=1, random_state=0).fit(X, y)
    assert clf.network_.sizes == (8, 64, 3)


def regression(linear):
    X = np.random.default_rng(0).normal(size=(300, 4))
    y = X @ [1.0, -0.5, 0.2, 0.0] if linear else np.abs(X[:, 0]) + 0.5 * np.maximum(X[:, 1], 0) - 0.1 * X[:, 2]
    return X, 7 * y + 0.3 * np.random.default_rng(1).normal(size=300)


@pytest.mark.parametrize("linear", [True, False])
def test_intervals_are_at_most_as_wide_as_those_of_ridge_regression(linear):
    X, y = regression(linear)
    regressor, ridge = LRRNRegressor(eps=0.5, random_state=0).fit(X, y), Ridge().fit(X, y)
    lower, upper = regressor.predict_interval(X, 0.5)
    assert np.all((upper - lower) / 2 <= 0.5 * np.linalg.norm(ridge.coef_))
    assert regressor.score(X, y) >= ridge.score(X, y) - 0.01
    if linear:
        assert regressor.chosen_["hidden_sizes"] == () and regressor.network_.sizes == (4, 1)
        assert np.allclose(regressor.predict(X), ridge.predict(X), atol=1e-3)
    else:
        assert regressor.chosen_["hidden_sizes"] == (64,) and regressor.score(X, y) > ridge.score(X, y) + 0.05


def test_several_targets_have_a_bound_each():
    X, y = regression(False)
    Y = np.stack([y, X[:, 0]], axis=1)
    regressor = LRRNRegressor(eps=0.5, hidden_sizes=(16,), epochs=3, random_state=0).fit(X, Y)
    weight = Ridge().fit(X, (Y - Y.mean(0)) / Y.std(0)).coef_
    bound = np.array(regressor.chosen_["max_output_norm"])
    assert np.allclose(bound, 0.999 * np.linalg.norm(weight, axis=1), rtol=1e-6)
    assert np.all(regressor.network_.W[-1].detach().norm(dim=1).numpy() <= bound * (1 + 1e-6))


def test_rows_of_output_weights_are_scaled_down_to_the_bound_only():
    net = lrrn.LRRN((3, 4, 2))
    with torch.no_grad():
        net.W[-1].copy_(torch.tensor([[3.0, 0, 4, 0], [0.3, 0, 0, 0.4]]))
    SquaredError(1.0).project(net)
    assert torch.allclose(net.W[-1], torch.tensor([[0.6, 0, 0.8, 0], [0.3, 0, 0, 0.4]]))
    SquaredError((0.0, 0.25)).project(net)
    assert torch.allclose(net.W[-1], torch.tensor([[0.0, 0, 0, 0], [0.15, 0, 0, 0.2]]))


def test_chosen_values_are_saved(tmp_path, moons, of_moons):
    lrrn.save(of_moons, tmp_path / "m.safetensors")
    loaded = lrrn.load(tmp_path / "m.safetensors")
    assert loaded.chosen_ == of_moons.chosen_ and loaded.get_params() == of_moons.get_params()
    assert np.array_equal(loaded.predict_proba(moons[0]), of_moons.predict_proba(moons[0]))


def test_compiled_steps_keep_the_bound_of_every_target():
    X, y = regression(False)
    Y = np.stack([y, X[:, 0]], axis=1)
    regressor = LRRNRegressor(hidden_sizes=(16,), epochs=2, max_output_norm=(0.1, 5.0), random_state=0).fit(X, Y)
    assert regressor.history_[-1]["backend"] == "compiled prediction"
    norms = regressor.network_.W[-1].detach().norm(dim=1)
    assert norms[0] == pytest.approx(0.1, rel=1e-5) and 0.1 < norms[1] < 5  # one bound is reached, the other is not
    with pytest.raises(ValueError, match="one for each of 2 outputs"):
        LRRNRegressor(epochs=1, max_output_norm=(0.1, 0.2, 0.3)).fit(X, Y)
