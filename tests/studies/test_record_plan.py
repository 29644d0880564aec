"""The record's rows: which there are, what they are called, and which images they may see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lrrn.studies.record.recipes import BASELINES, OURS, ROWS, recipe
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


def test_the_plan_has_seeds_for_what_is_random():
    rows = plan("mnist", None, 3, 0, Extent())
    counts = {kind: sum(row.kind == kind for row in rows) for kind in ROWS}
    assert counts == {kind: 1 if kind in ("logistic", "nearest") else 3 for kind in (*OURS, *BASELINES)}
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
