"""A Pipeline of affine steps and a network is certified as a whole, in the units of its input."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_wine
from sklearn.decomposition import PCA, FastICA
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler
from sklearn.svm import SVC

import lrrn
from lrrn.attacks import minimal_perturbation
from lrrn.estimators.affine import AffineChain, AffineMap
from small_estimators import blobs, classifier, curve, energy_model, regressor

X, y = load_wine(return_X_y=True)
STEPS = {
    "standard": lambda: [StandardScaler()],
    "no mean": lambda: [StandardScaler(with_mean=False)],
    "no deviation": lambda: [StandardScaler(with_std=False), MaxAbsScaler()],
    "range": lambda: [MinMaxScaler((-1, 2))],
    "largest": lambda: [MaxAbsScaler()],
    "robust": lambda: [RobustScaler(quantile_range=(10, 90))],
    "robust without centre": lambda: [RobustScaler(with_centering=False)],
    "components": lambda: [StandardScaler(), PCA(5)],
    "whitened": lambda: [StandardScaler(), "passthrough", PCA(6, whiten=True)],
    "all components of raw data": lambda: [PCA(whiten=True)],
    "scaled twice": lambda: [PCA(8), StandardScaler()],
    "nothing": lambda: ["passthrough"],
}


def fitted(name: str, rows=X, **options) -> Pipeline:
    options = {"hidden_sizes": (10,), "epochs": 15, "standardize": "features" if name == "nothing" else False, **options}
    return make_pipeline(*STEPS[name](), classifier(**options)).fit(rows, y)


def matrix_of(pipeline: Pipeline) -> np.ndarray:
    """The matrix of the steps, column by column: by what they do to the unit vectors."""
    n = pipeline[-1].n_features_in_ if len(pipeline) == 1 else X.shape[1]
    base, ends = np.zeros((1, n)), np.eye(n)
    steps = pipeline[:-1]
    return (steps.transform(ends) - steps.transform(base)).T / np.reshape(pipeline[-1].scale_in_, (-1, 1))


def attacked(pipeline: Pipeline, rows: np.ndarray, unit: np.ndarray) -> list[np.ndarray]:
    """Directions of norm 1 after division by ``unit``, in the units of the input: random, along gradients, to the boundary."""
    rng = np.random.default_rng(0)
    net, A = pipeline[-1].network_, torch.as_tensor(matrix_of(pipeline) * unit)
    x = pipeline[-1].scaling.apply(pipeline[:-1].transform(rows), torch.float64, torch.device("cpu"))
    label = net(x).argmax(1)
    steps = [torch.as_tensor(rng.normal(size=rows.shape)) for _ in range(10)]
    for j in range(net.sizes[-1]):
        leaf = x.clone().requires_grad_()
        output = net(leaf)
        (slope,) = torch.autograd.grad((output[:, j] - output.gather(1, label[:, None])[:, 0]).sum(), leaf)
        steps.append(slope @ A)
    nearest = minimal_perturbation(net, x, label).x - x
    steps.append(nearest.nan_to_num() @ torch.linalg.pinv(A).T)
    return [(step / step.norm(dim=1, keepdim=True).clamp(min=1e-12)).numpy() * unit for step in steps]


@pytest.mark.parametrize("name", STEPS)
def test_no_attack_in_the_units_of_the_input_succeeds_inside_a_radius(name):
    pipeline = fitted(name)
    found = lrrn.certify_pipeline(pipeline, X, "spectral")
    np.testing.assert_array_equal(found.prediction, pipeline.predict(X))
    assert found.norm == "euclidean" and (found.radius > 0).mean() > 0.5
    for direction in attacked(pipeline, X, np.ones(X.shape[1])):
        np.testing.assert_array_equal(pipeline.predict(X + 0.9999 * found.radius[:, None] * direction), found.prediction)


@pytest.mark.parametrize("name", ["standard", "components", "nothing"])
def test_no_attack_succeeds_inside_a_radius_of_the_scaled_norm(name):
    pipeline = fitted(name)
    found = lrrn.certify_pipeline(pipeline, X, "spectral", norm="scaled")
    assert found.norm == "scaled" and found.radius.max() < 10
    unit = X.std(axis=0)
    for direction in attacked(pipeline, X, unit):
        np.testing.assert_array_equal(pipeline.predict(X + 0.9999 * found.radius[:, None] * direction), found.prediction)
    # what the scaler does is what the estimator can do itself
    if name == "standard":
        inner = pipeline[-1].certified_radius(pipeline[:-1].transform(X), "spectral")
        np.testing.assert_allclose(found.radius, inner, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(found.feature_radius(), inner[:, None] * unit, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("name", STEPS)
def test_radii_are_those_of_the_network_over_norms_of_the_matrix(name):
    pipeline = fitted(name)
    found, A = lrrn.certify_pipeline(pipeline, X, "spectral"), matrix_of(pipeline)
    inner = pipeline[-1].certified_radius(pipeline[:-1].transform(X), "spectral", norm="scaled")
    assert (found.radius <= inner / np.linalg.norm(A, 2) * (1 + 1e-9)).all()
    np.testing.assert_allclose(found.radius, inner / np.linalg.norm(A, 2), rtol=1e-5, atol=1e-9)
    alone = inner[:, None] / np.linalg.norm(A, axis=0)
    np.testing.assert_allclose(found.feature_radius(), alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["standard", "whitened"])
def test_a_feature_may_move_alone_as_far_as_its_radius(name):
    pipeline = fitted(name)
    found = lrrn.certify_pipeline(pipeline, X, "shared")
    reach = found.feature_radius()
    assert reach.shape == X.shape and (reach >= found.radius[:, None] * (1 - 1e-9)).all()
    for j in range(X.shape[1]):
        for sign in (-1, 1):
            moved = X.copy()
            moved[:, j] += sign * 0.999 * reach[:, j]
            np.testing.assert_array_equal(pipeline.predict(moved), found.prediction)


def test_radii_of_a_linear_pipeline_are_distances_to_its_boundary():
    rows, labels = blobs(k=2)
    pipeline = make_pipeline(PCA(), classifier(hidden_sizes=(), epochs=15, learning_rate=0.002)).fit(rows, labels)
    found = lrrn.certify_pipeline(pipeline, rows)
    w = pipeline[-1].network_.W[0].detach().numpy().astype(np.float64) @ pipeline[0].components_
    lead, slope = np.abs(pipeline.decision_function(rows)), w[1] - w[0]
    np.testing.assert_allclose(found.radius, lead / np.linalg.norm(slope), rtol=1e-3, atol=1e-6)
    # a step of that length across the boundary does change the label
    towards = np.where(found.prediction == pipeline.classes_[1], -1, 1)[:, None] * slope / np.linalg.norm(slope)
    beyond = pipeline.predict(rows + towards * (found.radius * 1.01 + 1e-5)[:, None])
    assert (beyond != found.prediction).all()


@pytest.mark.parametrize("name", ["standard", "whitened"])
def test_the_rounding_of_float32_is_accounted_for(name):
    coarse = X.astype(np.float32)
    pipeline = fitted(name, coarse)
    exact = lrrn.certify_pipeline(pipeline, coarse.astype(np.float64), "spectral")
    found = lrrn.certify_pipeline(pipeline, coarse, "spectral")
    assert (found.radius <= exact.radius).all() and (found.radius < exact.radius).any()


def computed_and_exact(steps: list, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What steps return, and the same in extended precision from the numbers that they stored."""
    wide = rows.astype(np.longdouble)
    for step in steps:
        rows = step.transform(rows)
        if isinstance(step, PCA):
            deviation = np.maximum(np.sqrt(step.explained_variance_.astype(np.longdouble)), 1e-7)
            wide = (wide - step.mean_) @ step.components_.T.astype(np.longdouble) / (deviation if step.whiten else 1)
        elif isinstance(step, MinMaxScaler):
            wide = wide * step.scale_.astype(np.longdouble) + step.min_
        else:
            wide = (wide - step.mean_) / step.scale_.astype(np.longdouble)
    return rows, wide


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_errors_of_steps_are_within_their_bounds(dtype, offset):
    rows = (X + offset).astype(dtype)
    steps = [StandardScaler(), PCA(6, whiten=True), MinMaxScaler()]
    Pipeline([(str(k), step) for k, step in enumerate(steps)]).fit(rows)
    chain, Z = AffineChain(X.shape[1]), rows
    for step in steps:
        Z = chain.through(step, Z)
    computed, exact = computed_and_exact(steps, rows)
    wrong = np.linalg.norm((computed - exact).astype(np.float64), axis=1)
    assert (wrong > 0).any() and (2 * wrong <= chain.error).all()
    assert chain.error.max() < 1e4 * np.finfo(dtype).eps * (1 + offset / 0.1)


def test_the_map_of_a_step_is_what_it_computes():
    rows = np.random.default_rng(0).normal(size=(40, 5)) * [1, 10, 100, 0.1, 3] + 5
    for step in (StandardScaler(), RobustScaler(), MinMaxScaler(), MaxAbsScaler(), PCA(3), PCA(3, whiten=True)):
        affine = AffineMap.of(step.fit(rows))
        zero = step.transform(np.zeros((1, 5)))
        seen = (step.transform(np.eye(5)) - zero).T
        np.testing.assert_allclose(np.diag(affine.matrix) if affine.diagonal else affine.matrix, seen, atol=1e-12)
        assert (np.abs(zero[0]) <= affine.offset * (1 + 1e-9)).all()


def test_predictions_of_a_regressor_stay_in_their_intervals():
    rows, target = curve()
    rows = rows * [1e-3, 1, 100, 5, 0.1]
    pipeline = make_pipeline(StandardScaler(), PCA(4), regressor(epochs=15)).fit(rows, target)
    with pytest.raises(ValueError, match="eps"):
        lrrn.certify_pipeline(pipeline, rows)
    found = lrrn.certify_pipeline(pipeline, rows, eps=[0.1, 0.3], norm="scaled")
    assert found.norm == "scaled" and list(found.intervals) == [0.1, 0.3]
    rng, unit = np.random.default_rng(0), pipeline[0].scale_
    for eps, (lower, upper) in found.intervals.items():
        for _ in range(20):
            step = rng.normal(size=rows.shape)
            moved = pipeline.predict(rows + eps * step / np.linalg.norm(step, axis=1, keepdims=True) * unit)
            assert ((lower <= moved) & (moved <= upper)).all()
    inner = pipeline[-1].predict_interval(pipeline[:-1].transform(rows), 0.3)
    np.testing.assert_allclose(found.intervals[0.3], inner, rtol=1e-6)


def test_decisions_of_an_energy_model_are_certified():
    rows, _ = blobs()
    pipeline = make_pipeline(StandardScaler(), energy_model(epochs=10)).fit(rows)
    found = lrrn.certify_pipeline(pipeline, rows)
    inner = pipeline[-1].certified_radius(pipeline[0].transform(rows))
    np.testing.assert_allclose(found.radius, inner * pipeline[0].scale_.min(), rtol=1e-6, atol=1e-10)
    with pytest.raises(ValueError, match="method applies to a classifier"):
        lrrn.certify_pipeline(pipeline, rows, "shared")


def test_frames_with_names_pass_through():
    frame = pd.DataFrame(X, columns=load_wine().feature_names)
    pipeline = make_pipeline(StandardScaler(), classifier()).set_output(transform="pandas").fit(frame, y)
    found = lrrn.certify_pipeline(pipeline, frame, "spectral")
    plain = make_pipeline(StandardScaler(), classifier()).fit(X, y)
    np.testing.assert_allclose(found.radius, lrrn.certify_pipeline(plain, X, "spectral").radius, rtol=1e-9)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [FunctionTransformer(np.log1p)],
            "step 'functiontransformer' of the Pipeline is a FunctionTransformer, .* use Standard",
        ),
        ([StandardScaler(), FastICA(3)], "step 'fastica' of the Pipeline is a FastICA"),
        ([MinMaxScaler(clip=True)], "MinMaxScaler with clip=True"),
        ([type("Mine", (StandardScaler,), {})()], "step 'mine' of the Pipeline is a Mine"),
    ],
)
def test_a_step_that_is_not_affine_is_named(steps, message):
    with pytest.raises(ValueError, match=message):
        lrrn.certify_pipeline(make_pipeline(*steps, classifier()), X)


def test_what_is_not_such_a_pipeline_is_refused():
    with pytest.raises(TypeError, match="expected a scikit-learn Pipeline; got LRRNClassifier"):
        lrrn.certify_pipeline(classifier(), X)
    with pytest.raises(ValueError, match="last step 'svc' of the Pipeline is a SVC"):
        lrrn.certify_pipeline(make_pipeline(StandardScaler(), SVC()), X)
    with pytest.raises(NotFittedError):
        lrrn.certify_pipeline(make_pipeline(StandardScaler(), classifier()), X)
    pipeline = fitted("standard", epochs=1)
    with pytest.raises(ValueError, match="unknown norm 'l1'"):
        lrrn.certify_pipeline(pipeline, X, norm="l1")
    with pytest.raises(ValueError, match="eps"):
        lrrn.certify_pipeline(pipeline, X, eps=0.1)


def test_parameters_are_chosen_by_certified_accuracy():
    rows, labels = blobs()
    scorer = lrrn.certified_scorer(0.2, "spectral")
    model = classifier(standardize="features").fit(rows, labels)
    assert scorer(model, rows, labels) == model.certified_score(rows, labels, 0.2, "spectral")
    assert scorer(FrozenEstimator(model), rows, labels) == scorer(model, rows, labels)
    euclidean = lrrn.certified_scorer(0.2, "spectral", norm="input")
    assert euclidean(model, rows, labels) == model.certified_score(rows, labels, 0.2, "spectral", norm="input")
    pipeline = make_pipeline(StandardScaler(), classifier()).fit(rows, labels)
    assert scorer(pipeline, rows, labels) == lrrn.certify_pipeline(pipeline, rows, "spectral").certified_accuracy(labels, 0.2)
    assert pickle.loads(pickle.dumps(scorer)) == scorer  # for n_jobs
    search = GridSearchCV(pipeline, {"lrrnclassifier__weight_decay": [0.0, 10.0]}, scoring=scorer, cv=2).fit(rows, labels)
    assert search.best_params_ == {"lrrnclassifier__weight_decay": 0.0}
    assert scorer(search, rows, labels) == scorer(search.best_estimator_, rows, labels)
    assert cross_val_score(model, rows, labels, scoring=scorer, cv=2).shape == (2,)


def test_a_scorer_refuses_what_it_cannot_certify():
    with pytest.raises(ValueError, match="eps must be at least 0"):
        lrrn.certified_scorer(-1.0)
    with pytest.raises(ValueError, match="unknown norm"):
        lrrn.certified_scorer(0.1, norm="l1")
    with pytest.raises(TypeError, match="certified accuracy is that of an LRRNClassifier"):
        lrrn.certified_scorer(0.1)(SVC(), X, y)
