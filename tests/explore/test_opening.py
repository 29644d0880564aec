"""What is opened: digits trained on the spot, models with what their files hold, or a reason why not."""

from __future__ import annotations

import numpy as np
import pytest

import lrrn
from lrrn import LRRNClassifier, LRRNRegressor
from lrrn.explore import opening
from lrrn.explore.gallery import Gallery
from lrrn.explore.opening import open_file, train_digits
from lrrn.explore.overview import describe
from sessions import digits


def test_digits_are_trained_on_the_spot_and_told_of(monkeypatch):
    monkeypatch.setattr(opening, "EPOCHS", 6)
    told = []
    opened = train_digits(0, "cpu", lambda done, total: told.append((done, total)))
    assert told == [(k, 6) for k in range(7)]
    session = opened.session
    assert session.reference.score > 0.9 and len(session.reference.samples) == 240
    # its energy tells out-of-distribution inputs, which a classifier's does not unless it is trained to
    scrambled = digits()[0][:, np.random.default_rng(0).permutation(64)]
    assert np.mean(session.model.energy(scrambled) > np.quantile(session.reference.energies["samples"], 0.9)) > 0.8
    better = opened.refine()
    assert better.score == session.reference.score and (better.radii >= session.reference.radii * (1 - 1e-9)).all()
    assert better.radii.sum() > session.reference.radii.sum()


def test_models_are_opened_with_what_their_file_holds(tmp_path, plain):
    path = tmp_path / "m.safetensors"
    lrrn.save(plain.model, path)
    bare = open_file(path, "cpu", None, None).session
    assert bare.image_shape == (8, 8) and bare.reference is None and (bare.low, bare.high) == (0.0, 1.0)
    assert "nothing of held-out samples" in describe(bare, "m")["reference"]
    lrrn.save(plain.model, path, plain.reference)
    assert open_file(path, "cpu", None, None).session.reference.source == "digits, held out"
    assert open_file(path, "cpu", (4, 16), None).session.image_shape == (4, 16)
    X, y = digits(50)
    named = open_file(path, "cpu", None, Gallery("some digits", X, y)).session.reference
    assert named.source == "some digits" and len(named.radii) == 50
    unlabelled = open_file(path, "cpu", None, Gallery("some digits", X, None)).session.reference
    assert unlabelled.radii is None and (unlabelled.labels == -1).all()


def test_what_cannot_be_explored_is_refused_with_a_reason(tmp_path):
    path = tmp_path / "m.safetensors"
    X, y = np.random.default_rng(0).random((30, 4)), np.arange(30) % 2
    lrrn.save(LRRNClassifier(hidden_sizes=(3,), epochs=1, random_state=0).fit(X, y), path)
    for shape, data, message in (
        (None, None, "takes 4 features, which make no square image"),
        ((3, 2), None, "images of 3x2 have 6 pixels"),
        ((2, 2), Gallery("t.csv", np.zeros((3, 5))), "t.csv has 5 features"),
    ):
        with pytest.raises(ValueError, match=message):
            open_file(path, "cpu", shape, data)
    assert open_file(path, "cpu", (2, 2), None).session.n_pixels == 4
    lrrn.save(LRRNRegressor(hidden_sizes=(3,), epochs=1, random_state=0).fit(X, y), path)
    with pytest.raises(ValueError, match="holds a LRRNRegressor, which predicts numbers"):
        open_file(path, "cpu", None, None)
    lrrn.save(lrrn.LRRN((25, 2)), path)
    with pytest.raises(ValueError, match="holds a bare network"):
        open_file(path, "cpu", None, None)
