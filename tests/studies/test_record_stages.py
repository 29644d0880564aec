"""Stages of a row of the record: carried out once, continued where they stopped, held against each other."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from cifar_files import publish_cifar, write_cifar
from lrrn import Conv, load
from lrrn.persistence.published import publish, write_radii
from lrrn.persistence.shipped import Shipped, digest
from lrrn.persistence.values import plain
from lrrn.runtime import memory
from lrrn.runtime.storage import FileFormatError
from lrrn.studies.record import branches, recipes, record_report, stages
from lrrn.studies.record import record as record_module
from lrrn.studies.record.contenders import Lifted, Plain
from lrrn.studies.record.data import sizes_of
from lrrn.studies.record.record import Options, record
from lrrn.studies.record.rows import Row
from lrrn.studies.record.scores import BEST, disagreements, figures
from lrrn.studies.record.stages import ATTACK, execute, finished, kept
from records import LITTLE, TINY
from shipped_folder import flip_bit


@pytest.mark.parametrize("kind", ["paper_a", "conv", "prototypes", "nearest"])
def test_a_row_is_carried_out_once_and_its_figures_agree(kind, root, tmp_path, monkeypatch):
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
    for size, eps in sizes_of("mnist").items():
        assert result["radii"][BEST]["certified"][size] == (right & (tightest > eps)).mean()
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
    # on another machine: both are named
    monkeypatch.setattr(stages, "device_name", lambda device: "another")
    execute(row, tmp_path, root, "cpu", False, replace(more, images=7))
    assert kept(tmp_path, ATTACK)[1]["device"].endswith(", another")


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


@pytest.fixture
def colours(tmp_path, monkeypatch):
    """Small files in place of CIFAR-10."""
    publish_cifar(monkeypatch, write_cifar(tmp_path / "data"))
    return tmp_path / "data"


def test_a_convolutional_row_on_colour_images_is_carried_out_and_reported(colours, tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "QUICK", TINY)
    kinds = [row for row in ("conv", "wide", "logistic", "orthogonium_conv") if Row(row, "cifar10").obstacle() is None]
    for kind in kinds:
        row = Row(kind, "cifar10", extent=TINY)
        folder = tmp_path / "work" / "record-quick" / row.name
        execute(row, folder, colours, "cpu", False, LITTLE)
        result = figures(folder)
        assert finished(row, folder, LITTLE) and disagreements(result) == []
        assert list(result["radii"][BEST]["certified"]) == list(result["attacks"]["attacked"]) == list(sizes_of("cifar10"))
        radius, right = kept(folder, "radii-pairwise")[0], kept(folder, stages.RIGHT)[0]
        expected = (right & (radius > 36 / 255)).mean()
        assert result["radii"]["pairwise"]["certified"]["36/255"] == expected
        if kind == "conv":
            assert result["recipe"]["hidden_sizes"] == [{"conv": [4, 8, 4, 0, 1]}] and result["recipe"]["flips"] is True
            assert result["by sample"] == ["shared", "local"]
    options = Options(quick=True, report_only=True, root=colours, download=False)
    done = record("cifar10", tmp_path / "work", tmp_path / "out", options)
    assert [line[0].split(" (")[0] for line in done.table[1]] == [
        *("lrrn wide", "lrrn conv", "logistic regression"),
        *(["orthogonium ConvNet"] if "orthogonium_conv" in kinds else []),
    ]
    # and again, from the report alone
    again = record("cifar10", tmp_path / "other", tmp_path / "out", options)
    assert again.table == done.table and "lrrn conv (3x32x32-4c8s4-10)" in (tmp_path / "out" / "report.md").read_text()


def test_large_convolutions_do_without_what_needs_a_matrix(colours, tmp_path, monkeypatch):
    small = {**recipes._SMALL["conv"], "hidden_sizes": (Conv(86, 8, stride=4),), "epochs": 1}  # 4,214 units
    monkeypatch.setitem(recipes._SMALL, "conv", small)
    row, effort = Row("conv", "cifar10", extent=replace(TINY, samples=30, tests=4)), replace(LITTLE, images=1)
    monkeypatch.setitem(memory.NUMBERS, "cpu", 3 * (3072 + 4214 + 10))
    execute(row, tmp_path / "row", colours, "cpu", False, effort)
    assert finished(row, tmp_path / "row", effort)
    result = figures(tmp_path / "row")
    assert result["methods"] == ["paper", "pairwise", "spectral"] and result["by sample"] == ["shared"]
    assert set(result["radii"]) == {"paper", "pairwise", "spectral", "shared", BEST} and disagreements(result) == []
    shared, before = (kept(tmp_path / "row", f"radii-{method}")[0] for method in ("shared", "spectral"))
    assert len(shared) == 4 and (shared >= before).all()
    contender = Lifted(load(tmp_path / "row" / "model.safetensors"), 1.0)
    assert contender.rows_at_once == 3


def test_images_of_other_libraries_have_the_shape_of_the_data_set(colours, tmp_path, monkeypatch):
    seen = []

    def autoattack(model, predict, X, y, labels, distances, eps, image, clip, **effort):
        scores = model(torch.from_numpy(X).view(-1, *image))
        assert scores.shape == (len(X), 10)
        seen.append((round(255 * eps), image, clip))

    monkeypatch.setattr(stages, "autoattack", autoattack)
    monkeypatch.setattr(stages, "find_spec", lambda name: name)
    row, effort = Row("conv", "cifar10", extent=TINY), replace(LITTLE, autoattack=2, stages=("train", "autoattack"))
    execute(row, tmp_path / "row", colours, "cpu", False, effort)
    assert seen == [(size, (3, 32, 32), clip) for clip in (True, False) for size in (36, 72, 108)]
    assert len(kept(tmp_path / "row", stages.UNCLIPPED)[0]) == 2


def test_multiplier_bounds_are_a_stage_of_their_own(root, tmp_path):
    row, certify = Row("paper_a", "mnist", extent=TINY), replace(LITTLE, stages=("train", "certify"))
    execute(row, tmp_path, root, "cpu", False, certify)
    assert finished(row, tmp_path, certify) and set(figures(tmp_path)["radii"]) == {"paper", "pairwise", "spectral", BEST}
    more = replace(LITTLE, stages=("multiplier",))
    assert not finished(row, tmp_path, more)
    execute(row, tmp_path, root, "cpu", False, more)
    assert finished(row, tmp_path, more) and "multiplier" in figures(tmp_path)["radii"]


def test_branches_raise_radii_that_are_near_a_size(root, tmp_path, monkeypatch):
    row, first = Row("paper_a", "mnist", extent=TINY), ("train", "certify", "shared", ATTACK)
    execute(row, tmp_path, root, "cpu", False, replace(LITTLE, stages=first, images=20))
    (radius, _), (right, _) = kept(tmp_path, "radii-shared"), kept(tmp_path, stages.RIGHT)
    # a size that one image misses by 3 %, and one that none is near
    size = float(radius[right & (radius > 0)][0]) * 1.03
    monkeypatch.setattr(stages, "sizes_of", lambda data: {"0.5": size, "1": 1e3})
    monkeypatch.setattr(stages, "compared_at", lambda data: ("0.5", "1"))
    asked = []

    def radii(self, X, method, target_radius=np.inf, branches=None):
        if method == "branched":
            asked.append((len(X), target_radius / size, branches))
        return radii.true(self, X, method, target_radius, branches)

    radii.true = Lifted.radii
    monkeypatch.setattr(Lifted, "radii", radii)
    monkeypatch.setitem(stages.CHUNKS, "branched", 8)
    effort = replace(LITTLE, stages=("branched",), branches=64)
    assert not finished(row, tmp_path, effort)
    execute(row, tmp_path, root, "cpu", False, effort)
    assert finished(row, tmp_path, effort)
    branched, about = kept(tmp_path, "radii-branched")
    tried = right & (radius <= size) & (radius * 1.06 > size)
    assert len(branched) == 20 and (branched >= radius).all() and np.array_equal(branched[~tried], radius[~tried])
    assert tried.any() and sum(n for n, _, _ in asked) == tried.sum()
    assert all(factor == pytest.approx(1 + 1e-9, abs=1e-12) and n == 64 for _, factor, n in asked)
    assert about["seconds"] > 0 and about["branches"] == "64" and about["device"]
    result = figures(tmp_path)
    assert result["radii"]["branched"]["images"] == 20 and "branched" in result["seconds of certifying"]
    best = np.maximum(branched, np.max([kept(tmp_path, f"radii-{method}")[0] for method in ("paper", "spectral")], axis=0))
    assert result["radii"][BEST]["certified"]["0.5"] == (right & (best > 0.5)).mean()
    assert result["attacks"]["attacks inside a radius"]["branched"] == 0 and disagreements(result) == []
    (section,) = [s for s in record_report.sections("mnist", [row], {row: result}, {}) if s.title.startswith("By certificate")]
    assert "at most 64 branches" in " ".join(section.text) and "branched" in [line[1] for line in section.tables[0][2]]
    # a wrong radius of this method would be noticed, too
    first_right = int(np.flatnonzero(right & np.isfinite(kept(tmp_path, ATTACK)[0]))[0])
    branched[first_right] = kept(tmp_path, ATTACK)[0][first_right] * (1 + 1e-6)
    stages._keep(tmp_path, "radii-branched", branched, about)
    assert "1 attacks inside a radius (branched)" in disagreements(figures(tmp_path))


def test_only_right_images_that_are_near_a_size_are_tried():
    asked = []

    class Sure:
        def radii(self, X, method, target_radius, branches):
            asked.append((X[:, 0].tolist(), method, target_radius, branches))
            # the second image of each call is not raised
            return np.where(np.arange(len(X)) == 1, 0.0, target_radius)

    # certified, near, near, wrong, too far, near by another method only, certified by another method
    shared = np.array([1.1, 0.99, 0.95, 0.99, 0.9, 0.8, 0.97])
    best = np.array([1.1, 0.99, 0.95, 0.99, 0.9, 0.96, 1.01])
    right = np.array([True, True, True, False, True, True, True])
    found = branches.raised(Sure(), np.arange(7.0)[:, None], right, shared, best, [1.0, 2.0], 7)
    assert asked == [([1.0, 2.0, 5.0], "branched", 1 + 1e-9, 7)]
    assert found.tolist() == [1.1, 1 + 1e-9, 0.95, 0.99, 0.9, 1 + 1e-9, 0.97]
    assert shared[1] == 0.99


def test_branches_need_something_to_start_from(root, tmp_path):
    row = Row("paper_a", "mnist", extent=TINY)
    with pytest.raises(ValueError, match="starts from the results of certify and shared; run these stages too"):
        execute(row, tmp_path, root, "cpu", False, replace(LITTLE, stages=("train", "branched")))
    with pytest.raises(ValueError, match="branches must be at least 1; got 0"):
        replace(LITTLE, branches=0)
    assert "branched" in stages.STAGES and "branched" not in LITTLE.stages
    # baselines have no such certificate
    logistic, effort = Row("logistic", "mnist", extent=TINY), replace(LITTLE, stages=("train", "branched"))
    execute(logistic, tmp_path / "logistic", root, "cpu", False, effort)
    assert finished(logistic, tmp_path / "logistic", effort)


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
    assert attacks["AutoAttack"]["images"] == attacks["AutoAttack, not clipped"]["images"] == 3
    ((_, columns, (cells,)),) = record_report._autoattacks("mnist", {"logistic": [row]}, {row: figures(tmp_path)})
    assert cells[1] == "3" and len(cells) == len(columns) == 6 and all(len(cell.split(" / ")) == 3 for cell in cells[3:])
    for eps in sizes_of("mnist"):
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


def test_shipped_weights_are_measured_instead_of_trained(root, tmp_path, monkeypatch):
    models, output = tmp_path / "models", tmp_path / "report"
    monkeypatch.setenv("LRRN_MODELS", str(models))
    options = Options(["paper_a:0"], seeds=1, stages=("train", "certify"), jobs=1, root=root, download=False)
    record("mnist", tmp_path / "first", output, options)
    row = Row("paper_a", "mnist")
    trained, adopted = (tmp_path / name / "record" / row.name for name in ("first", "second"))
    models.mkdir()
    (models / "small.safetensors").write_bytes((trained / "model.safetensors").read_bytes())
    sums = (digest(models / "small.safetensors"), "small.npz", "0" * 64)
    entry = Shipped("small", "small.safetensors", *sums, "mnist", "paper_a", 0, "shared", "deployed", 1.0, {}, models)
    (models / "index.json").write_text(json.dumps([entry.as_json()]))
    shipped = replace(options, shipped=True)
    # the facts of the training come from the report, and without one there are none
    with pytest.raises(ValueError, match="the report has no such row; train it without --shipped"):
        record("mnist", tmp_path / "second", tmp_path / "none", shipped)
    result = record("mnist", tmp_path / "second", output, replace(shipped, rows=["paper_a:0", "nearest"]))
    assert result.failed == {} and not (adopted / "log.jsonl").exists()
    assert (adopted / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    before, after = figures(trained), figures(adopted)
    for name in (*stages.FACTS, "accuracy", "radii"):
        assert json.dumps(before[name], default=plain) == json.dumps(after[name], default=plain)
    assert figures(tmp_path / "second" / "record" / Row("nearest", "mnist").name) is not None
    flip_bit(models / "small.safetensors", -1)
    with pytest.raises(FileFormatError, match="SHA-256"):
        record("mnist", tmp_path / "third", output, shipped)


def test_attacks_that_were_published_with_weights_count_until_a_row_is_attacked_here(tmp_path, monkeypatch):
    models, folder, row = tmp_path / "models", tmp_path / "row", Row("paper_a", "mnist")
    monkeypatch.setenv("LRRN_MODELS", str(models))
    models.mkdir()
    (models / "small.safetensors").write_bytes(b"weights")
    # the second label is wrong, and the last image was not attacked
    right, attack = np.array([True, False, True, True]), np.array([0.4, np.nan, 0.6, np.nan])
    write_radii(models / "small.npz", publish(right, np.ones(4), np.zeros(4), attack))
    sums = (digest(models / "small.safetensors"), "small.npz", digest(models / "small.npz"))
    entry = Shipped("small", "small.safetensors", *sums, "mnist", "paper_a", 0, "shared", "deployed", 1.0, {}, models)
    (models / "index.json").write_text(json.dumps([entry.as_json()]))
    theirs = {"images": 2, "attacked": dict.fromkeys(sizes_of("mnist"), 0.5)}
    by_attack = {"by our attacks": theirs["attacked"], "AutoAttack": theirs, "AutoAttack, not clipped": theirs, "seconds": {}}
    before = dict.fromkeys(stages.FACTS, 0) | {"row": row.name, "tests": 4, "methods": ["paper"], "recipe": {}}
    flip_bit(models / "small.npz", -1)
    with pytest.raises(FileFormatError, match="SHA-256"):
        stages.adopt(row, folder, before | {"attacks": {"images": 3} | by_attack})
    assert not stages.is_trained(folder)
    flip_bit(models / "small.npz", -1)
    stages.adopt(row, folder, before | {"attacks": {"images": 3} | by_attack})
    facts = {"seconds": 1.0, "device": "here"}
    stages._keep(folder, stages.RIGHT, right, facts)
    stages._keep(folder, "radii-paper", np.array([0.3, 0.9, 0.55, 2.0]), facts)
    attacks = figures(folder)["attacks"]
    assert attacks["images"] == 3 and {name: attacks[name] for name in by_attack} == by_attack
    assert attacks["attacked"] == {"0.1": 2 / 3, "0.3": 2 / 3, "0.5": 1 / 3, "1": 0.0, "1.58": 0.0}
    assert attacks["certified on AutoAttack's"]["images"] == 2 and disagreements(figures(folder)) == []
    # radii of a new method are compared with them
    stages._keep(folder, "radii-shared", np.array([0.3, 0.9, 0.61, 2.0]), facts)
    assert "1 attacks inside a radius (shared)" in disagreements(figures(folder))
    # a new AutoAttack takes the place of the published one
    stages._keep(folder, stages.AUTOATTACK, np.array([0.2]), facts)
    attacks = figures(folder)["attacks"]
    assert attacks["images"] == 3 and attacks["attacked"]["0.3"] == 1 / 3 and attacks["seconds"] == {"AutoAttack": 1.0}
    assert attacks["AutoAttack"] == {"images": 1, "attacked": {"0.1": 1.0, "0.3": 0.0, "0.5": 0.0, "1": 0.0, "1.58": 0.0}}
    assert attacks["AutoAttack, not clipped"] == theirs
    (folder / "autoattack.npz").unlink()
    stages._keep(folder, ATTACK, np.array([0.7, 0.0]), facts)
    attacks = figures(folder)["attacks"]
    assert attacks["images"] == 2 and attacks["AutoAttack"] is None and attacks["by our attacks"]["0.5"] == 0.5
