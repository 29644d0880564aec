"""What an evaluation compares: labels as a vector or a column, and Lipschitz constants in the units of the prediction."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import r2_score

from lrrn.datasets.rows import DataError
from lrrn.reports import audit
from lrrn.reports.evaluation import as_page, as_table, evaluate
from small_estimators import blobs, classifier, curve, regressor


def test_a_column_of_labels_scores_like_a_vector():
    X, y = blobs()
    model = classifier().fit(X, y)
    expected = np.mean(model.predict(X) == y)
    one, two = (evaluate("m", model, X, labels) for labels in (y, y[:, None]))
    assert one.score == two.score == expected and one.certified == two.certified
    with pytest.raises(ValueError, match=r"targets have shape \(90, 2\), and a classifier needs one label for each of 90"):
        evaluate("m", model, X, np.stack([y, y], 1))
    with pytest.raises(ValueError, match=r"labels must have shape \(n_samples,\), one for each sample; got \(90, 1\)"):
        audit.certify("m", model, X, y[:, None])


@pytest.mark.parametrize("standardize", [False, "features"])
def test_the_lipschitz_constant_of_a_regressor_is_in_the_units_of_its_target(standardize):
    """Oracle: a linear model moves by the norm of its coefficients, in the units of the target, and by no more."""
    X, y = curve()
    model = regressor(hidden_sizes=(), standardize=standardize).fit(X, 1000 * y)
    slopes = np.linalg.lstsq(np.column_stack([X, np.ones(len(X))]), model.predict(X), rcond=None)[0][:-1]
    found = evaluate("m", model, X, 1000 * y, [0.1])
    assert found.lipschitz == pytest.approx(np.linalg.norm(slopes * model.scale_in_), rel=1e-4)
    assert found.half_width[0.1] == pytest.approx(0.1 * found.lipschitz, rel=1e-4)


def test_class_energies_have_no_lipschitz_constant():
    X, y = blobs()
    found = evaluate("m", classifier(objective="class_energy", epochs=1).fit(X, y), X, y)
    assert found.lipschitz is None and found.as_json()["lipschitz"] is None
    assert ["Lipschitz constant, at most", "-"] in as_table([found])[1] and "Lipschitz" in as_page("t", [found])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            lambda y: np.stack([y, y], 1),
            r"X: targets have shape \(80, 2\), and the regressor predicts 1 for each of 80",
        ),
        (lambda y: y.astype(str), r"X: the targets are such as '.*', and a regressor needs numbers"),
        (lambda y: y.astype(str).astype(object), "and a regressor needs numbers; choose another target, or train a classifier"),
    ],
)
def test_targets_that_a_regressor_cannot_predict_are_refused_before_any_work(targets, message, monkeypatch):
    X, y = curve()
    model = regressor(epochs=1).fit(X, y)
    monkeypatch.setattr(type(model), "certificate", lambda *_: pytest.fail("rows were certified"))
    with pytest.raises(DataError, match=message):
        evaluate("m", model, X, targets(y))


def test_two_targets_are_compared_with_two_predictions_and_one_may_be_a_column_or_objects():
    X, y = curve(n_targets=2)
    both = regressor(epochs=1).fit(X, y)
    assert evaluate("m", both, X, y).score == pytest.approx(r2_score(y, both.predict(X)))
    with pytest.raises(DataError, match=r"targets have shape \(80,\), and the regressor predicts 2 for each of 80 samples"):
        evaluate("m", both, X, y[:, 0])
    one = regressor(epochs=1).fit(X, y[:, 0])
    expected = pytest.approx(r2_score(y[:, 0], one.predict(X)))
    for column in (y[:, 0], y[:, :1], y[:, 0].astype(object)):
        assert evaluate("m", one, X, column).score == expected


def test_targets_that_are_no_labels_at_all_are_warned_of():
    X, y = blobs()
    model = classifier(epochs=1).fit(X, y)
    with pytest.warns(UserWarning, match=r"no target of the data is one of the model's labels: .* such as 0\.5 and the model"):
        assert evaluate("m", model, X, y + 0.5).score == 0
    evaluate("m", model, X, np.where(y == 0, y, y + 0.5))  # some are: warnings are errors here
