"""A published record stands or falls: files by their digests, radii by fresh proofs and attacks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import lrrn
from lrrn import datasets
from lrrn.persistence.published import read_radii
from lrrn.persistence.shipped import shipped_models
from lrrn.reports import verification
from lrrn.reports.verification import verify
from lrrn.runtime.storage import FileFormatError
from repository import ROOT
from shipped_folder import flip_bit, republished, ship

N = 40


@pytest.fixture(scope="module")
def entry(tmp_path_factory):
    return ship(tmp_path_factory.mktemp("shipped"))


@pytest.fixture(scope="module")
def data():
    return datasets.load("digits", "test")


def changed(entry, folder, **arrays):
    return republished(entry, replace(read_radii(entry.radii_path), **arrays), folder)


def test_a_record_stands(entry, data):
    result = verify(entry, *data, N)
    assert result.stands and result.integrity == () and result.mathematics == ()
    assert result.n_images == N and result.accuracy > 0.8
    assert result.least_share > 0.9999 and 1 <= result.nearest_attack < 2
    assert "the record stands: files as published; 40 images" in result.sentence()
    assert result.as_json()["stands"] is True


def test_of_a_large_network_the_first_images_are_attacked_only(entry, data, tmp_path, monkeypatch):
    for name, value in (("SMALL", 0), ("WORK", 0), ("LEAST", 3)):
        monkeypatch.setattr(verification, name, value)
    result = verify(entry, *data, 6)
    assert result.stands and (result.n_images, result.n_attacked) == (6, 3)
    assert "nearest attack on 3 of them at" in result.sentence()
    assert verify(entry, *data, 2).n_attacked == 2
    # radii of images that are not attacked are held against fresh proofs still
    radius = read_radii(entry.radii_path).radius.copy()
    radius[5] *= 1.01
    assert not verify(changed(entry, tmp_path, radius=radius), *data, 6).stands


def test_radii_raised_by_a_percent_are_refused_by_the_mathematics(entry, data, tmp_path):
    other = changed(entry, tmp_path, radius=(read_radii(entry.radii_path).radius * 1.01).astype(np.float32))
    for ignored in (True, False):
        result = verify(other, *data, N, ignore_digests=ignored)
        assert not result.stands and result.integrity == (None if ignored else ())
        assert any(f"below 0.999 of the published ones: {N} images, 0, 1, 2, ..." in fault for fault in result.mathematics)
    # a published radius may be smaller than a fresh one
    modest = changed(entry, tmp_path, radius=(read_radii(entry.radii_path).radius * 0.9).astype(np.float32))
    result = verify(modest, *data, N)
    assert result.stands and result.least_share == pytest.approx(1 / 0.9, rel=1e-3)
    radius = read_radii(entry.radii_path).radius[:N]
    assert result.differences == pytest.approx((0.1 * radius.min(), 0.1 * radius.max()), rel=1e-3)


def test_a_radius_beyond_an_attack_is_refused(entry, data, tmp_path):
    radius = read_radii(entry.radii_path).radius.copy()
    radius[5] *= 3
    faults = verify(changed(entry, tmp_path, radius=radius), *data, N).mathematics
    assert any("attacks succeed inside a published radius: 1 images, 5" in fault for fault in faults)


def test_published_attacks_inside_a_radius_are_refused_wherever_they_are(entry, data, tmp_path):
    published = read_radii(entry.radii_path)
    attack = published.attack.copy()
    attack[-1] = published.radius[-1] / 2
    faults = verify(changed(entry, tmp_path, attack=attack), *data, N).mathematics
    assert faults == (f"published attacks are inside a published radius: 1 images, {len(attack) - 1}",)


@pytest.mark.parametrize(("name", "text"), [("predicted", "labels predicted here"), ("true", "labels of the data set")])
def test_other_labels_are_refused(entry, data, tmp_path, name, text):
    labels = getattr(read_radii(entry.radii_path), name).copy()
    labels[7] = (labels[7] + 1) % 10
    faults = verify(changed(entry, tmp_path, **{name: labels}), *data, N).mathematics
    assert [fault for fault in faults if fault.startswith(text)] == [f"{text} differ: 1 images, 7"]


def test_an_index_that_states_more_than_the_radii_give_is_refused(entry, data):
    for change in (
        {"accuracy": entry.accuracy + 0.01},
        {"certified": {**entry.certified, "0.5": entry.certified["0.5"] + 0.01}},
        {"accuracy": 0.99, "certified": {"0": entry.accuracy, **entry.certified}},
        {"accuracy": float("nan")},
    ):
        faults = verify(replace(entry, **change), *data, 5).mathematics
        assert len(faults) == 1 and "the index states" in faults[0]


def test_radii_of_other_images_are_refused(entry, data):
    X, y = data
    assert any("images are published, not" in fault for fault in verify(entry, X[:-1], y[:-1], 5).mathematics)


@pytest.mark.parametrize("which", ["weights_path", "radii_path"])
def test_a_flipped_bit_breaks_the_integrity(entry, data, tmp_path, which):
    other = changed(entry, tmp_path)
    path = getattr(other, which)
    flip_bit(path, -1 if which == "weights_path" else len(path.read_bytes()) // 2)
    result = verify(other, *data, 5)
    expected = other.sha256 if which == "weights_path" else other.radii_sha256
    assert not result.stands and result.integrity is not None and len(result.integrity) == 1
    assert f"{expected} was published" in result.integrity[0] and "the record does not stand" in result.sentence()


def test_without_digests_a_file_that_cannot_be_read_is_an_error(entry, data, tmp_path):
    other = changed(entry, tmp_path)
    other.radii_path.write_bytes(b"nothing")
    with pytest.raises(FileFormatError, match="published radii"):
        verify(other, *data, 5, ignore_digests=True)


@pytest.mark.data
@pytest.mark.parametrize("name", shipped_models(ROOT / "models"))
def test_the_shipped_models_stand_on_a_few_images(name):
    model = shipped_models(ROOT / "models")[name]
    try:
        X, y = datasets.load(model.data, "test")
    except datasets.DataError:
        pytest.skip(f"the images of {model.data} are not at hand")
    if model.weights_path.stat().st_size < 10**6:
        result = verify(model, X, y, 10)
        assert result.stands and result.n_images == 10, result.sentence()
        return
    # attacks on wide networks take minutes, proofs do not. The smallest radii lose most to the error of a solve
    published, fitted = read_radii(model.radii_path), lrrn.load(model.weights_path)
    smallest = np.argsort(np.where(published.radius > 0, published.radius, np.inf))[:10]
    rows = np.union1d(np.arange(10), smallest)
    certificate = fitted.certificate(X[rows], model.method)
    assert np.array_equal(np.searchsorted(fitted.classes_, certificate.prediction), published.predicted[rows])
    assert (np.asarray(certificate.radius) >= verification.SHARE * published.radius[rows]).all()
