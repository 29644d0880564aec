"""Stages of a row of the record: carried out once, continued where they stopped, held against each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lrrn.studies.record import stages
from lrrn.studies.record.contenders import EPS, Plain
from lrrn.studies.record.rows import Row
from lrrn.studies.record.scores import BEST, disagreements, figures
from lrrn.studies.record.stages import ATTACK, execute, finished, kept
from records import LITTLE, TINY


@pytest.mark.parametrize("kind", ["paper_a", "prototypes", "nearest"])
def test_a_row_is_carried_out_once_and_its_figures_agree(kind, root, tmp_path):
    row = Row(kind, "mnist", extent=TINY)
    assert not finished(row, tmp_path, LITTLE) and figures(tmp_path) is None
    execute(row, tmp_path, root, "cpu", False, LITTLE)
    assert finished(row, tmp_path, LITTLE)
    result = figures(tmp_path)
    assert result["images"] == 20 and result["samples"] == 60 and result["parameters"] > 0
    assert set(result["radii"]) == {*result["methods"], BEST, *(["local", "shared"] if row.is_ours else [])}
    right = kept(tmp_path, stages.RIGHT)[0]
    assert result["accuracy"] == right.mean()
    tightest = np.max([kept(tmp_path, f"radii-{method}")[0] for method in result["methods"]], axis=0)
    if row.is_ours:
        tightest[:4] = np.maximum(tightest[:4], kept(tmp_path, "radii-local")[0])
        shared, before = (kept(tmp_path, f"radii-{method}")[0] for method in ("shared", result["methods"][-1]))
        assert len(shared) == 20 and (shared >= before).all() and (shared > before).any()
        tightest = np.maximum(tightest, shared)
    for eps in EPS:
        assert result["radii"][BEST]["certified"][f"{eps:g}"] == (right & (tightest > eps)).mean()
    attacks = result["attacks"]
    assert attacks["images"] == 4 and attacks["attacks inside a radius"][BEST] == 0 and disagreements(result) == []
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    execute(row, tmp_path, root, "cpu", False, LITTLE)
    assert times == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    # more images than before: what is there stays, and the rest is added
    more = replace(LITTLE, images=6, stages=(ATTACK,))
    before = kept(tmp_path, ATTACK)[0]
    execute(row, tmp_path, root, "cpu", False, more)
    assert len(kept(tmp_path, ATTACK)[0]) == 6 and np.array_equal(kept(tmp_path, ATTACK)[0][:4], before)


def test_an_interrupted_stage_continues_where_it_was(root, tmp_path, monkeypatch):
    row = Row("logistic", "mnist", extent=TINY)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    execute(row, whole, root, "cpu", False, LITTLE)
    monkeypatch.setitem(stages.CHUNKS, "certify", 7)
    monkeypatch.setattr(stages, "SAVE_SECONDS", -1.0)
    seen = []

    def radii(self, X, method):
        seen.append(len(X))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return radii.true(self, X, method)

    radii.true = Plain.radii
    monkeypatch.setattr(Plain, "radii", radii)
    with pytest.raises(KeyboardInterrupt):
        execute(row, parts, root, "cpu", False, LITTLE)
    assert len(kept(parts, "radii-pairwise")[0]) == 14 and figures(parts) is None
    execute(row, parts, root, "cpu", False, LITTLE)
    assert seen == [7, 7, 6, 6]
    for name in ("radii-pairwise", stages.RIGHT, ATTACK):
        # products of other sizes may round otherwise
        np.testing.assert_allclose(kept(parts, name)[0], kept(whole, name)[0], rtol=1e-9)


def test_after_the_deadline_nothing_is_begun(root, tmp_path):
    row = Row("logistic", "mnist", extent=TINY)
    execute(row, tmp_path, root, "cpu", False, replace(LITTLE, deadline=0.0))
    assert not stages.is_trained(tmp_path)
    execute(row, tmp_path, root, "cpu", False, replace(LITTLE, stages=("train",)))
    execute(row, tmp_path, root, "cpu", False, replace(LITTLE, deadline=0.0))
    assert stages.is_trained(tmp_path) and len(kept(tmp_path, stages.RIGHT)[0]) == 0


def test_autoattack_is_held_against_the_radii_too(root, tmp_path):
    pytest.importorskip("torchattacks", reason="torchattacks is in the benchmark environment only")
    row, effort = Row("logistic", "mnist", extent=TINY), replace(LITTLE, autoattack=3, steps=10, queries=20)
    execute(row, tmp_path, root, "cpu", False, effort)
    distances, right = kept(tmp_path, "autoattack")[0], kept(tmp_path, stages.RIGHT)[0][:3]
    assert (distances[~right] == 0).all() and (distances[right] >= kept(tmp_path, "radii-pairwise")[0][:3][right]).all()
    attacks = figures(tmp_path)["attacks"]
    assert attacks["AutoAttack"]["images"] == 3
    for eps in map("{:g}".format, EPS):
        assert attacks["attacked"][eps] <= attacks["by our attacks"][eps]


def test_a_contradiction_would_be_noticed(root, tmp_path):
    execute(Row("logistic", "mnist", extent=TINY), tmp_path, root, "cpu", False, LITTLE)
    right, distances = kept(tmp_path, stages.RIGHT)[0], kept(tmp_path, ATTACK)[0]
    first = int(np.flatnonzero(right[:4])[0])
    values, facts = kept(tmp_path, "radii-pairwise")
    values[first] = distances[first] * (1 + 1e-6)
    stages._keep(tmp_path, "radii-pairwise", values, facts)
    assert disagreements(figures(tmp_path))[:1] == ["1 attacks inside a radius (pairwise)"]
    distances[first] = 0.2
    stages._keep(tmp_path, ATTACK, distances, facts)
    assert "attacked below certified accuracy (best at 0.5)" in disagreements(figures(tmp_path))
