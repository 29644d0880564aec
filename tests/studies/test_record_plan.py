"""The record's rows: which there are, what they are called, and which images they may see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lrrn import Conv, LRRNClassifier
from lrrn.studies.record.data import NAMES, compared_at, curve_of, sizes_of
from lrrn.studies.record.orientation import TARGETS
from lrrn.studies.record.recipes import CHANGES, OURS, ROWS, recipe, rows_of
from lrrn.studies.record.rows import Extent, Row, images, plan
from records import TINY


def test_rows_belong_to_their_recipes(monkeypatch):
    row = Row("wide", "mnist")
    assert row.name != replace(row, extent=TINY).name != replace(row, extent=replace(TINY, validation=True)).name
    before = row.name
    monkeypatch.setitem(OURS, "wide", {**OURS["wide"], "margin": 1.0})
    assert row.name != before and row.name.startswith("mnist-wide-") and row.name.endswith("-seed0")
    assert row.title == "lrrn wide (784-2048-10)"
    assert recipe("kmnist_7011", "wide") == recipe("kmnist", "wide")


def test_every_data_set_has_its_own_rows():
    assert rows_of("fashion_mnist") == tuple(kind for kind in ROWS if kind != "orthogonium_conv")
    assert rows_of("mnist") == tuple(kind for kind in rows_of("fashion_mnist") if kind != "deep")
    assert rows_of("kmnist") == rows_of("kmnist_7011") == tuple(kind for kind in rows_of("mnist") if kind != "conv")
    assert rows_of("cifar10") == ("wide", "conv", "logistic", "orthogonium_conv")
    with pytest.raises(ValueError, match="there is no row 'paper_a' on cifar10; use some of wide, conv, logistic"):
        recipe("cifar10", "paper_a")
    with pytest.raises(ValueError, match="there is no row 'conv'"):
        plan("kmnist", ["conv"], 1, 0, Extent())
    for data in NAMES:
        for kind in rows_of(data):
            for quick in (False, True):
                if kind in OURS:
                    LRRNClassifier(**recipe(data, kind, quick))  # every argument exists
    assert all(kind in rows_of(data) for data, targets in TARGETS.items() for kind, _, _ in targets)


def test_convolutions_have_a_name_and_a_place_in_the_identity_of_a_row(monkeypatch):
    row = Row("conv", "cifar10")
    assert row.title == "lrrn conv (3x32x32-512c8s4p2-10)" and Row("wide", "cifar10").title == "lrrn wide (3072-2048-10)"
    assert row.name.startswith("cifar10-conv-") and row.name == Row("conv", "cifar10").name != Row("conv", "mnist").name
    before = row.name
    monkeypatch.setitem(OURS, "conv", {**OURS["conv"], "learning_rate": 1e-3})
    assert row.name != before
    before = row.name
    monkeypatch.setitem(CHANGES, ("cifar10", "conv"), {**CHANGES["cifar10", "conv"], "hidden_sizes": (Conv(512, 8, stride=3),)})
    assert row.name != before
    quick = Row("conv", "mnist", extent=TINY)
    assert quick.recipe["hidden_sizes"] == (Conv(4, 8, stride=4),) and quick.title == "lrrn conv (1x28x28-4c8s4-10)"
    monkeypatch.setitem(OURS, "conv", {**OURS["conv"], "hidden_sizes": (Conv(3, 5, padding=2, pool=2), 7)})
    assert Row("conv", "mnist").title == "lrrn conv (1x28x28-3c5p2a2-7-10)"


def test_sizes_are_those_that_are_published_for_a_data_set():
    assert sizes_of("mnist") == {"0.1": 0.1, "0.3": 0.3, "0.5": 0.5, "1": 1.0, "1.58": 1.58} == sizes_of("kmnist_7011")
    assert sizes_of("cifar10") == {"36/255": 36 / 255, "72/255": 72 / 255, "108/255": 108 / 255}
    for data in NAMES:
        assert {*compared_at(data)} <= {*sizes_of(data)} and curve_of(data)[0] == 0
        assert curve_of(data)[-1] > max(sizes_of(data).values()) and np.diff(curve_of(data)).min() > 0


def test_the_plan_has_seeds_for_what_is_random():
    rows = plan("mnist", None, 3, 0, Extent())
    counts = {kind: sum(row.kind == kind for row in rows) for kind in rows_of("mnist")}
    assert len(rows) == sum(counts.values())
    assert counts == {kind: 1 if kind in ("logistic", "nearest") else 3 for kind in counts}
    assert [(row.kind, row.seed) for row in plan("mnist", ["wide:1", "logistic"], 2, 10, Extent())] == [
        ("wide", 11),
        ("logistic", 10),
    ]
    for wrong in ("narrow", "wide:2", "wide:x"):
        with pytest.raises(ValueError, match=f"there is no row '{wrong}'"):
            plan("mnist", [wrong], 2, 0, Extent())
    with pytest.raises(ValueError, match="there is no record on 'cifar'"):
        plan("cifar", None, 1, 0, Extent())
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        plan("mnist", None, 0, 0, Extent())


def test_validation_does_without_test_images(root, monkeypatch):
    (X, y), (X_test, _) = images("mnist", Extent(), root, False)
    assert len(X) == 72 and len(X_test) == 20
    monkeypatch.setattr("lrrn.studies.record.rows.load_test", lambda *_: pytest.fail("test images were loaded"))
    (kept_X, kept_y), (held_X, held_y) = images("mnist", Extent(validation=True), root, False)
    assert np.array_equal(np.concatenate([kept_X, held_X]), X) and len(held_X) == 12
    assert np.array_equal(np.concatenate([kept_y, held_y]), y)
