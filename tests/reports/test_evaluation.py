"""What an evaluation compares: labels as a vector or a column, and Lipschitz constants in the units of the prediction."""

from __future__ import annotations

import numpy as np
import pytest

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
