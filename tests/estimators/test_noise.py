"""What a classifier without ``eps`` chooses: a weight decay for noisy labels, measured by nearest neighbours."""

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors

import lrrn
from lrrn import LRRNClassifier
from lrrn.estimators import noise


def table(rows=300, flipped=0.3, seed=0):
    """Return a table of which some labels are drawn again at random."""
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(rows, 3))
    y = (X[:, 0] > 0).astype(int)
    return X, np.where(generator.random(rows) < flipped, generator.integers(0, 2, rows), y)


@pytest.mark.parametrize("rows", [5, 300, 700])
def test_noise_is_the_error_of_nearest_neighbours_relative_to_a_constant(rows):
    X, y = table(rows)
    nearest = NearestNeighbors(n_neighbors=2, algorithm="kd_tree").fit(X).kneighbors(X, return_distance=False)[:, 1]
    expected = np.mean(y[nearest] != y) / (1 - np.bincount(y).max() / rows)
    assert noise.label_noise(X, y) == pytest.approx(min(expected, 1.0))


def test_noise_of_labels_that_features_determine_or_say_nothing_about():
    X, y = table(400, flipped=0.0)
    assert noise.label_noise(X * [1, 0, 0], y) < 0.05
    assert noise.label_noise(X, np.random.default_rng(1).integers(0, 2, 400)) > 0.85
    assert noise.label_noise(X, np.zeros(400, dtype=int)) == 0.0


def test_the_sample_is_of_the_rows_given_and_the_same_every_time():
    rows = np.arange(0, 9000, 3)
    some = noise.sample(rows)
    assert len(some) == len(set(some)) == noise.SAMPLE and set(some) <= set(rows)
    assert np.array_equal(some, noise.sample(rows)) and np.array_equal(noise.sample(rows[:50]), rows[:50])


def test_the_decay_over_an_epoch_does_not_depend_on_the_number_of_rows():
    assert noise.decay(0.8, 500) * 500 == pytest.approx(noise.decay(0.8, 5000) * 5000)
    assert noise.decay(0.8, 500) == pytest.approx(4 * noise.decay(0.4, 500))
    assert noise.decay(0.8, 10) == noise.decay(0.8, noise.FEWEST)
    assert noise.decay(0.0, 100) == noise.decay(0.5, 10**6) == 0.0


def test_noisy_labels_decay_the_weights(tmp_path):
    X, y = table()
    clf = LRRNClassifier(epochs=3, random_state=0).fit(X, y)
    expected = noise.decay(noise.label_noise(X, y), len(X))
    assert clf.chosen_ == {"optimizer": "adamw", "decoupled_weight_decay": expected} and expected > 0.1
    same = LRRNClassifier(epochs=3, random_state=0, **clf.chosen_).fit(X, y)
    assert same.chosen_ == {} and np.array_equal(same.decision_function(X), clf.decision_function(X))
    lrrn.save(clf, tmp_path / "m.safetensors")
    assert lrrn.load(tmp_path / "m.safetensors").chosen_ == clf.chosen_


def test_clean_labels_do_not():
    X, y = load_digits(return_X_y=True)
    assert LRRNClassifier(epochs=1, random_state=0).fit(X[:500] / 16, y[:500]).chosen_ == {}


def test_given_parameters_are_kept():
    X, y = table()
    assert LRRNClassifier(epochs=1, optimizer="adam").fit(X, y).chosen_ == {}
    assert LRRNClassifier(epochs=1, optimizer="adamw", decoupled_weight_decay=0.0).fit(X, y).chosen_ == {}
    assert {*LRRNClassifier(epochs=1, optimizer="adamw").fit(X, y).chosen_} == {"decoupled_weight_decay"}
    assert LRRNClassifier(epochs=1, objective="cross_entropy").fit(X, y).chosen_ == {}
    assert LRRNClassifier().partial_fit(X, y, classes=[0, 1]).chosen_ == {}


def test_rows_of_weight_zero_do_not_count():
    X, y = table(400)
    weight = (np.arange(400) < 200).astype(float)
    some, none = LRRNClassifier(epochs=1).fit(X, y, weight), LRRNClassifier(epochs=1).fit(X[:200], y[:200])
    assert some.chosen_ == none.chosen_ != {}
