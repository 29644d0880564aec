"""One solve a question: labels, margins, radii and energies come from the same one, and reports are made of it."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits
from typer.testing import CliRunner

import lrrn
from lrrn import LRRN, LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.cli import app

SMALL = dict(hidden_sizes=(12,), epochs=2, random_state=0)


@pytest.fixture
def solved(monkeypatch):
    """Count the samples whose free phase is inferred, by the bytes of the input."""
    counts: dict[bytes, int] = {}
    real = LRRN.infer

    def counted(self, x, y=None, *rest, **options):
        if y is None:
            for row in x.double().numpy():
                counts[row.tobytes()] = counts.get(row.tobytes(), 0) + 1
        return real(self, x, y, *rest, **options)

    monkeypatch.setattr(LRRN, "infer", counted)
    return counts


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    return X[:60] / 16, y[:60]


@pytest.mark.parametrize("objective", ["contrastive", "class_energy"])
def test_a_certificate_agrees_with_every_single_question(digits, objective):
    X, y = digits
    model = LRRNClassifier(objective=objective, **SMALL).fit(X, y)
    found = model.certificate(X)
    assert np.array_equal(found.prediction, model.predict(X))
    np.testing.assert_array_equal(found.radius, model.certified_radius(X))
    np.testing.assert_allclose(found.energy, model.energy(X), rtol=1e-12)
    if objective == "contrastive":
        scores = np.sort(model.decision_function(X), axis=1)
        np.testing.assert_allclose(found.margin, scores[:, -1] - scores[:, -2], atol=1e-12)
    assert found.converged.all() and found.certified_accuracy(y, 0.0) == model.score(X, y)
    assert found.certified_accuracy(y, 0.05) == model.certified_score(X, y, 0.05)


def test_a_certificate_of_a_regressor_and_of_an_energy_model():
    X, y = load_diabetes(return_X_y=True)
    model = LRRNRegressor(standardize=True, **SMALL).fit(X[:80], y[:80])
    found = model.certificate(X[:9], (0.0, 0.01))
    np.testing.assert_array_equal(found.prediction, model.predict(X[:9]))
    for size in (0.0, 0.01):
        for ends, expected in zip(found.intervals[size], model.predict_interval(X[:9], size), strict=True):
            np.testing.assert_array_equal(ends, expected)
    np.testing.assert_allclose(found.energy, model.energy(X[:9]), rtol=1e-12)
    detector = LRRNEnergyModel(standardize=True, contamination=0.2, **SMALL).fit(X[:80])
    decided = detector.certificate(X[:30])
    assert np.array_equal(decided.prediction, detector.predict(X[:30])) and len(set(decided.prediction)) == 2
    np.testing.assert_allclose(decided.margin, np.abs(detector.decision_function(X[:30])))
    np.testing.assert_array_equal(decided.radius, detector.certified_radius(X[:30]))


def test_each_question_solves_every_sample_once(digits, solved):
    X, y = digits
    model = LRRNClassifier(**SMALL).fit(X, y)
    for ask in (
        model.predict,
        model.certificate,
        model.certified_radius,
        model.energy,
        lambda X: model.certified_score(X, y, 0.1),
    ):
        solved.clear()
        ask(X)
        assert len(solved) == len(np.unique(X, axis=0)) and sum(solved.values()) == len(X)


@pytest.mark.parametrize("command", ["certify", "evaluate"])
def test_commands_solve_every_sample_once(digits, solved, tmp_path, command):
    X, y = digits
    lrrn.save(LRRNClassifier(**SMALL).fit(X, y), tmp_path / "model.safetensors")
    np.savez(tmp_path / "data.npz", X=X, y=y)
    solved.clear()
    run = CliRunner().invoke(app, [command, str(tmp_path / "model.safetensors"), str(tmp_path / "data.npz")])
    assert run.exit_code == 0, run.output
    rows = [np.ascontiguousarray(row).tobytes() for row in X]
    assert [solved[row] for row in rows] == [1] * len(rows)
