"""The energy model: outliers, activations, and what they reconstruct."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone

from oracles import PlainNetwork
from small_estimators import blobs, energy_model

# --- data frames ----------------------------------------------------------------------------------------------------------


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


# --- outliers and activations ---------------------------------------------------------------------------------------------


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
