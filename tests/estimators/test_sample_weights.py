"""Weights of samples and classes: proportions count, and zero is absence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from small_estimators import blobs, classifier, regressor, some_without_weight, weights


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


@pytest.mark.parametrize("make", [classifier, regressor])
def test_weights_that_are_refused(make):
    X, y = blobs()
    with pytest.raises(ValueError, match="zero"):
        make().fit(X, y, sample_weight=np.zeros(90))
    with pytest.raises(ValueError, match=r"[Nn]egative values"):
        make().fit(X, y, sample_weight=np.full(90, -1.0))


def test_weights_whose_products_or_sums_are_no_numbers_are_refused():
    X, y = blobs()
    for weight, class_weight in [(1e308, {0: 10.0}), (1e308, None), (1e-322, None)]:
        with pytest.raises(ValueError, match=r"sum is too large or too small for float64: divide all weights by the largest"):
            classifier(class_weight=class_weight).fit(X, y, sample_weight=np.full(90, weight))
    with pytest.raises(ValueError, match="divide all weights by the largest"):
        regressor().fit(X, y, sample_weight=np.full(90, 1e308))
    with pytest.raises(ValueError, match="class_weight of label 2 must be finite and at least 0"):
        classifier(class_weight={2: -1}).partial_fit(X, y, classes=[0, 1, 2])
    dropped = classifier(class_weight={0: 1.0, 1: 1.0, 2: 0.0}).fit(X, y)  # which zero does, knowingly
    assert not np.any(dropped.predict(X) == 2)
