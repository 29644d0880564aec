"""Rows of the record become shipped models."""

from __future__ import annotations

import json

import numpy as np
import publish_models
import pytest

from lrrn import LRRNClassifier, datasets
from lrrn.persistence.published import read_radii
from lrrn.persistence.serialization import save
from lrrn.persistence.shipped import shipped_models
from lrrn.reports.verification import verify
from lrrn.studies.record.rows import Row
from lrrn.studies.record.stages import _keep


@pytest.fixture
def trained(tmp_path):
    """A folder as lrrn record leaves it, with 30 images attacked."""
    folder = tmp_path / "row"
    folder.mkdir()
    X, y = datasets.load("digits", "train")
    model = LRRNClassifier(hidden_sizes=(8,), epochs=6, random_state=0, device="cpu").fit(X, y)
    save(model, folder / "model.safetensors")
    facts = {"samples": len(X), "recipe": {"epochs": 6}, "parameters": 1, "seconds of training": 1.0}
    facts |= {"device of training": "a machine", "versions": {"torch": "2", "numpy": "2"}}
    (folder / "training.json").write_text(json.dumps(facts))
    X, y = datasets.load("digits", "test")
    distances = np.where(model.predict(X[:30]) == y[:30], 33.0, 0.0)
    _keep(folder, "attack", distances, {"seconds": 1.0})
    _keep(folder, "autoattack", np.where(distances[:10] > 0, 22.0, 0.0), {"seconds": 1.0})
    return folder, model


def test_a_published_row_can_be_verified(trained, tmp_path):
    folder, model = trained
    X, y = datasets.load("digits", "test")
    models = tmp_path / "models"
    for name in ("b", "a", "b"):
        entry = publish_models.publish_row(name, Row("paper_a", "mnist"), folder, models, (X, y), commit="c0ffee")
    assert [*shipped_models(models)] == ["a", "b"] and shipped_models(models)["b"] == entry
    right = model.predict(X) == y
    assert entry.accuracy == right.mean()
    assert entry.certified["0.5"] == (right & (model.certified_radius(X, "shared") > 0.5)).mean()
    radii = read_radii(entry.radii_path)
    assert np.array_equal(np.isnan(radii.attack), ~right | (np.arange(len(X)) >= 30))
    assert np.allclose(radii.attack[:10][right[:10]], 22) and np.allclose(radii.attack[10:30][right[10:30]], 33)
    result = verify(entry, X, y, 20)
    assert result.stands, result.sentence()
    card = (models / "b.md").read_text()
    assert all(text in card for text in (entry.sha256, "c0ffee", f"{entry.accuracy:.2%}", '"epochs": 6'))


def test_radii_of_the_record_are_published_lowered(trained, tmp_path):
    folder, model = trained
    X, y = datasets.load("digits", "test")
    exact = model.certified_radius(X, "shared")
    arguments = ("a", Row("paper_a", "mnist"), folder, tmp_path / "models", (X, y), ("cpu", True), "c0ffee")
    with pytest.raises(SystemExit, match="0 radii of 450"):
        publish_models.publish_row(*arguments)
    _keep(folder, "radii-shared", exact, {"seconds": 1.0, "device": "a device"})
    _keep(folder, "right", model.predict(X) == y, {"seconds": 1.0})
    entry = publish_models.publish_row(*arguments)
    radii = read_radii(entry.radii_path)
    assert np.array_equal(radii.predicted, model.predict(X))
    assert (radii.radius <= exact).all() and np.allclose(radii.radius, np.maximum(0.999 * exact - 1e-3, 0), atol=1e-6)
    assert verify(entry, X, y, 20).stands
    assert "one a device, lowered by 0.1 % and then by 0.001" in (tmp_path / "models" / "a.md").read_text()


def test_nearer_attacks_on_the_same_weights_stay_published(trained, tmp_path):
    folder, model = trained
    test = datasets.load("digits", "test")
    arguments = (Row("paper_a", "mnist"), folder, tmp_path / "models", test)
    publish_models.publish_row("a", *arguments, commit="c0ffee")
    right = model.predict(test[0]) == test[1]
    found = np.where(right[:40], 27.0, 0.0)
    _keep(folder, "attack", found, {"seconds": 1.0})
    _keep(folder, "autoattack", np.full(0, 1.0), {"seconds": 0.0})
    radii = read_radii(publish_models.publish_row("a", *arguments, commit="c0ffee").radii_path)
    # the first ten are those of AutoAttack before, the others of the attack now, which is nearer or new
    assert np.allclose(radii.attack[:10][right[:10]], 22) and np.allclose(radii.attack[10:40][right[10:40]], 27)
    model.network_.W[0].data[0, 0] += 1e-3
    save(model, folder / "model.safetensors")
    radii = read_radii(publish_models.publish_row("a", *arguments, commit="c0ffee").radii_path)
    assert np.nanmin(radii.attack) == 27


def test_files_too_large_for_the_repository_end_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(publish_models, "MOST", 10)
    (tmp_path / "a.safetensors").write_bytes(b"0" * 11)
    with pytest.raises(SystemExit, match=r"a\.safetensors"):
        publish_models.check_sizes(tmp_path)
    monkeypatch.setattr(publish_models, "MOST_TOGETHER", 15)
    (tmp_path / "a.safetensors").write_bytes(b"0" * 8)
    publish_models.check_sizes(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"0" * 8)
    with pytest.raises(SystemExit, match="all files together"):
        publish_models.check_sizes(tmp_path)
