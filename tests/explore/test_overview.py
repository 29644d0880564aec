"""The overview shows the network's filters and what is known of held-out samples."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from lrrn.explore.overview import compared, describe
from sessions import ROUNDED, digits


def test_the_overview_shows_filters_samples_curve_and_histograms(plain):
    overview = json.loads(json.dumps(describe(plain, "a model")))
    assert overview["sizes"] == [64, 16, 12, 10] and overview["classes"] == list("0123456789") and overview["shape"] == [8, 8]
    w = [p.detach().double().numpy() for p in plain.model.network_.W]
    for shown, product in zip(overview["filters"], (w[0], w[1] @ w[0], w[2] @ w[1] @ w[0]), strict=True):
        expected = 100 * product / np.abs(product).max(axis=1, keepdims=True)
        np.testing.assert_allclose(shown["images"], expected, atol=0.51)
    X, y = digits()
    assert [sample["label"] for sample in overview["samples"]] == [*range(10), *range(10)]
    first = overview["samples"][4]
    np.testing.assert_allclose(first["pixels"], X[np.flatnonzero(y == 4)[0]], atol=ROUNDED)
    curve, radii = overview["reference"]["curve"], plain.reference.radii
    assert curve["shares"][0] == 0.9  # the accuracy
    for norm, share in list(zip(curve["norms"], curve["shares"], strict=True))[1::20]:
        assert share == pytest.approx(np.mean(radii > norm), abs=0.01)
    assert curve["median"] == np.median(radii)
    for shares in overview["reference"]["energies"]["shares"].values():
        assert sum(shares) == pytest.approx(1, abs=1e-3)


def test_a_histogram_counts_what_lies_beyond_its_end(plain):
    far = dataclasses.replace(plain.reference, energies={"samples": np.ones(100), "odd": np.array([*np.full(99, 0.5), 1e6])})
    shares = compared(far)["energies"]["shares"]["odd"]
    assert sum(shares) == pytest.approx(1) and shares[-1] == pytest.approx(0.01)
