"""The reference of a model comes back with it, or is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import lrrn
from lrrn import LRRNEnergyModel
from lrrn.persistence.reference import Reference
from lrrn.persistence.serialization import load_reference
from lrrn.reports.evaluation import evaluate, reference_of
from lrrn.runtime.storage import FileFormatError
from saved_models import QUICK, classifier, envelope_of, labels, rewrite, table


def reference(model, n_samples=6, image_shape=(2, 2)) -> Reference:
    X, y = table(), labels()
    result = evaluate("m", model, X, y, (0.1,), image_shape)
    return reference_of(model, X, y, image_shape, "a table", n_samples, result.score, result.radii, result.energies)


@pytest.mark.parametrize(
    "make", [classifier, lambda: LRRNEnergyModel(**QUICK).fit(table())], ids=["classifier", "energy model"]
)
def test_a_reference_comes_back_and_leaves_the_model_alone(make, path):
    model = make()
    given = reference(model)
    lrrn.save(model, path, given)
    found = load_reference(path)
    for name in ("source", "image_shape", "low", "high", "score"):
        assert getattr(found, name) == getattr(given, name), name
    for name in ("samples", "labels", "radii"):
        np.testing.assert_array_equal(getattr(found, name), getattr(given, name))
    assert list(found.energies) == ["samples", "mirrored", "Gaussian"]
    for name, values in given.energies.items():
        np.testing.assert_array_equal(found.energies[name], values)
    again = lrrn.load(path)
    np.testing.assert_array_equal(again.energy(table()), model.energy(table()))
    lrrn.save(again, path)
    assert load_reference(path) is None


def test_a_reference_holds_samples_of_every_class_in_turn_or_none():
    model = classifier()
    found = reference(model, 7)
    np.testing.assert_array_equal(found.labels, [0, 1, 2, 0, 1, 2, 0])
    np.testing.assert_array_equal(found.samples, table()[:7].astype(np.float32))
    assert (found.low, found.high) == (table().min(), table().max())
    right = model.predict(table()) == labels()
    np.testing.assert_array_equal(found.radii, np.where(right, model.certified_radius(table()), 0.0))
    assert len(reference(model, 0).samples) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(labels=np.full(6, 3)), "not numbers of 3 classes"),
        (dict(samples=np.zeros((6, 5), np.float32)), "not of 4 features"),
        (dict(samples=np.full((6, 4), np.nan, np.float32)), "not finite"),
        (dict(image_shape=(3, 2)), "images of shape"),
        (dict(image_shape=(2, 1, 2)), "cannot be shown"),
        (dict(image_shape=(3, 1, 2)), "images of shape"),
        (dict(image_shape=(2, 2, 9)), "cannot be shown"),
        (dict(image_shape=(4,)), "cannot be shown"),
        (dict(image_shape=(-2, -2)), "positive integers"),
        (dict(image_shape=(2.0, 2.0)), "positive integers"),
        (dict(image_shape="22"), "positive integers"),
        (dict(low=1.0, high=1.0), "empty range"),
        (dict(energies={"mirrored": np.ones(3)}), "energies of its reference are missing"),
    ],
)
def test_a_reference_that_does_not_fit_its_model_is_refused(change, message, path):
    model = classifier()
    lrrn.save(model, path)
    unfit = dataclasses.replace(reference(model), **change)
    with pytest.raises(ValueError, match=f"its reference does not fit it .*{message}.* give another reference, or none"):
        lrrn.save(model, path, unfit)
    assert load_reference(path) is None
    envelope, tensors = envelope_of(path)
    more, envelope["header"]["reference"] = unfit.pack()
    rewrite(path, envelope, tensors | more)
    with pytest.raises(FileFormatError, match=message):
        load_reference(path)
    np.testing.assert_array_equal(lrrn.load(path).predict(table()), model.predict(table()))


@pytest.mark.parametrize(("stored", "shape"), [((2, 2), (2, 2)), ((1, 2, 2), (2, 2)), ((1, 4), (1, 4)), ((4, 1), (4, 1))])
def test_the_shape_of_grey_images_is_height_and_width(stored, shape, path):
    """Files of earlier versions hold (height, width)."""
    model = classifier()
    lrrn.save(model, path, dataclasses.replace(reference(model), image_shape=stored))
    assert load_reference(path).image_shape == shape


def test_colour_images_keep_their_channels(path):
    X = np.random.default_rng(0).random((12, 12))
    model = classifier(y=np.arange(12) % 3, X=X)
    energies = {"samples": model.energy(X)}
    lrrn.save(model, path, reference_of(model, X, None, (3, 2, 2), "colours", 4, None, None, energies))
    assert load_reference(path).image_shape == (3, 2, 2)
