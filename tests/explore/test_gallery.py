"""Test images by number: what was published about them beside a fresh proof and a fresh attack."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

import lrrn
from lrrn import Conv, datasets
from lrrn.cli import tour
from lrrn.explore import session as sessions_module
from lrrn.explore.gallery import Gallery
from lrrn.explore.opening import FEW, MORE, open_file
from lrrn.explore.overview import describe
from lrrn.explore.session import Session
from lrrn.persistence.published import publish, read_radii
from sessions import ROUNDED, convolutional, digits
from shipped_folder import NAME, own_folder


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    return own_folder(tmp_path, monkeypatch)


@pytest.fixture
def large(monkeypatch):
    """A convolution of 720 units, which counts as large."""
    model = convolutional(hidden_sizes=(Conv(20, 3),), epochs=1)
    monkeypatch.setattr("lrrn.energy.lifted.UNFOLDED_UNITS", 700)
    return model


# --- shipped models ---------------------------------------------------------------------------------------------------


def test_a_shipped_model_opens_by_name_with_its_test_images(shipped):
    X, y = datasets.load("digits", "test")
    known = read_radii(shipped.radii_path)
    gallery = tour._published_images(NAME, None)
    session = open_file(tour.Path(NAME), "cpu", None, gallery).session
    assert session.reference.score == shipped.accuracy and session.reference.source == "digits, test images"
    np.testing.assert_array_equal(session.reference.radii, np.where(known.right, known.radius, 0.0))
    overview = describe(session, NAME)
    assert overview["gallery"] == {"name": "digits", "images": len(X), "published": True} and not overview["slow"]
    assert len(overview["samples"]) == 60
    for sample in overview["samples"]:
        image = X[sample["number"]]
        np.testing.assert_allclose(sample["pixels"], image, atol=1e-6)
        assert sample["label"] == y[sample["number"]]
        assert sample["published"]["radius"] == float(known.radius[sample["number"]])
    for index in (0, 17, len(X) - 1):
        found = session.image(index)
        np.testing.assert_allclose(found["pixels"], X[index], atol=1e-6)
        assert (found["number"], found["label"]) == (index, y[index])
        assert found["published"] == {
            "prediction": int(known.predicted[index]),
            "radius": float(known.radius[index]),
            "attack": None,
        }
        # what the page computes from these pixels is what was published, up to their rounding
        pixels = np.array(found["pixels"])
        assert session.analyse(pixels)["prediction"] == known.predicted[index]
        assert session.tighten(pixels)["radius"] >= 0.999 * known.radius[index]
        assert session.attack(pixels, False)["distance"] >= known.radius[index]


def test_published_attacks_are_told_and_those_that_failed_are_not():
    known = publish(np.zeros(3), np.zeros(3), np.full(3, 0.25), np.array([0.5, np.inf, np.nan]))
    gallery = Gallery("some", np.eye(3), np.arange(3), known)
    assert [gallery.facts(k)["published"]["attack"] for k in range(3)] == [0.5, None, None]
    with pytest.raises(ValueError, match="some has 2 images here, and 3 were published"):
        Gallery("some", np.eye(2), None, known)
    assert gallery.places(np.array([[0, 1, 0], [5, 5, 5]])) == [1, None]
    assert Gallery("some", np.eye(3)).facts(2) == {"number": 2, "published": None}


def test_without_the_images_a_shipped_model_opens_and_says_what_is_missing(shipped, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(tour, "console", Console(file=screen, width=200))

    def missing(*_, download=True):
        assert not download
        raise datasets.DataError("there are no digits; put them somewhere")

    monkeypatch.setattr(datasets, "load", missing)
    assert tour._published_images(NAME, None) is None
    assert (
        screen.getvalue() == "No test images are shown, and none are downloaded here: there are no digits; put them somewhere\n"
    )
    assert open_file(tour.Path(NAME), "cpu", None, None).session.reference is None


def test_images_of_any_data_are_offered_by_number(tmp_path, plain):
    X, y = digits(60)
    session = Session(plain.model, (8, 8), plain.reference, Gallery("mine", X, np.where(y == 3, 99, y)))
    found = session.image(5)
    assert found["published"] is None and found["label"] == (None if y[5] == 3 else y[5])
    for index in (-1, 60):
        with pytest.raises(ValueError, match=f"mine has images from 0 to 59; got {index}"):
            session.image(index)
    with pytest.raises(ValueError, match="no images to choose from"):
        plain.image(0)


# --- large convolutions -----------------------------------------------------------------------------------------------


def test_in_a_large_convolution_proof_and_attack_wait_for_a_request_and_agree(large):
    X, _ = digits(4)
    session = Session(large, (8, 8), None)
    assert session.slow and not Session(convolutional(epochs=1, hidden_sizes=(Conv(2, 3),)), (8, 8), None).slow
    assert session.analyse(X[0])["gaps"] is None
    with pytest.raises(ValueError, match="take seconds in a network of this size"):
        session.clamp(X[0], 1)
    proven, found = session.prove(X[0])["radius"], session.attack(X[0], False)
    assert proven == large.certified_radius(X[:1], "shared")[0] > 0
    assert proven <= found["distance"] and found["along"]
    norms, images = np.array(found["norms"]), np.array(found["images"])
    assert len(norms) == sessions_module.BRIEF_NORMS and norms[5] == pytest.approx(found["distance"], abs=1e-6)
    np.testing.assert_allclose(np.linalg.norm(images - X[0], axis=1), norms, atol=10 * ROUNDED)
    assert found["predictions"][0] == found["label"] != found["predictions"][5]
    assert large.predict(images[5:6])[0] == large.classes_[found["predictions"][5]]
    kept = np.array(session.attack(X[0], True)["images"])
    assert kept.min() >= -ROUNDED and kept.max() <= 1 + ROUNDED


def test_only_large_convolutions_are_proven_on_request(plain):
    with pytest.raises(ValueError, match="proven without a request"):
        plain.prove(digits()[0][0])


def test_a_large_shipped_convolution_opens_with_few_energies_and_more_later(tmp_path, large, shipped):
    lrrn.save(large, tmp_path / "large.safetensors")
    X, y = datasets.load("digits", "test")
    known = read_radii(shipped.radii_path)
    opened = open_file(tmp_path / "large.safetensors", "cpu", None, Gallery("digits", X, y, known))
    assert len(opened.session.reference.energies["samples"]) == FEW and len(opened.session.reference.radii) == len(X)
    assert opened.session.analyse(X[0])["energy"]["verdict"] is None  # quantiles of so few mean nothing
    opened.session.reference = opened.refine()
    energies = opened.session.reference.energies
    np.testing.assert_allclose(energies["samples"], large.energy(X[:MORE]), rtol=1e-9)
    turned = X[:MORE].reshape(-1, 8, 8)[..., ::-1].reshape(MORE, -1)
    np.testing.assert_allclose(energies["mirrored"], large.energy(turned), rtol=1e-9)
    assert opened.session.analyse(X[0])["energy"]["verdict"] is not None
