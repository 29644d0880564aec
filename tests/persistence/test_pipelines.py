"""A Pipeline of affine steps and an estimator comes back from its file, and what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler
from sklearn.svm import SVC

import lrrn
from lrrn import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.runtime.storage import FileFormatError
from saved_models import QUICK, edited, envelope_of, labels, rewrite, table

STEPS = {
    "standard": [StandardScaler()],
    "without mean": [StandardScaler(with_mean=False)],
    "nothing to do": [StandardScaler(with_mean=False, with_std=False)],
    "range": [MinMaxScaler((-1, 1))],
    "largest": [MaxAbsScaler()],
    "robust": [RobustScaler(quantile_range=(5, 95), unit_variance=True)],
    "components": [StandardScaler(), PCA(3, whiten=True, random_state=np.random.RandomState(0))],
    "skipped": ["passthrough", PCA(svd_solver="full")],
    "several": [RobustScaler(), PCA(0.9), MinMaxScaler()],
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", STEPS)
def test_a_pipeline_comes_back_with_the_same_predictions(name, dtype, path):
    X = table(n=60).astype(dtype)
    model = make_pipeline(*STEPS[name], LRRNClassifier(**QUICK)).fit(X, labels(60))
    lrrn.save(model, path)
    again = lrrn.load(path)
    assert isinstance(again, Pipeline)
    np.testing.assert_array_equal(again[:-1].transform(X), model[:-1].transform(X))
    np.testing.assert_array_equal(again.decision_function(X), model.decision_function(X))
    one, two = (lrrn.certify_pipeline(some, X, "spectral") for some in (model, again))
    np.testing.assert_array_equal(one.feature_radius(), two.feature_radius())
    for (key, step), (other, loaded) in zip([s for s in model.steps if s[1] != "passthrough"], again.steps, strict=True):
        assert key == other and type(step) is type(loaded)


def test_wide_components_come_back_to_the_bit(path):
    X = np.random.default_rng(0).normal(size=(300, 64))
    model = make_pipeline(PCA(40), LRRNRegressor(**QUICK, standardize="features")).fit(X, X[:, 0])
    for order in ("C", "F"):
        model[0].components_ = np.array(model[0].components_, order=order)
        lrrn.save(model, path)
        again = lrrn.load(path)
        assert again[0].components_.flags[f"{order}_CONTIGUOUS"]
        np.testing.assert_array_equal(again.predict(X), model.predict(X))


def test_names_and_kinds_of_output_come_back(path):
    X = pd.DataFrame(table(), columns=["height", "width", "længde", "w"])
    model = make_pipeline(StandardScaler(), LRRNEnergyModel(**QUICK)).set_output(transform="pandas").fit(X)
    lrrn.save(model, path)
    again = lrrn.load(path)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert list(again[0].transform(X).columns) == list(X.columns)
    with pytest.raises(ValueError, match="feature names"):
        again.predict(X[["w", "height", "width", "længde"]])


def test_what_cannot_be_saved_is_named(path):
    X, y = table(), labels()
    for steps, message in (
        ([FunctionTransformer(np.abs), LRRNClassifier(**QUICK)], "step 'functiontransformer' of the Pipeline"),
        ([StandardScaler(), SVC()], "last step 'svc'"),
    ):
        with pytest.raises(ValueError, match=message):
            lrrn.save(make_pipeline(*steps).fit(X, y), path)
    with pytest.raises(ValueError, match="not fitted"):
        lrrn.save(make_pipeline(StandardScaler(), LRRNClassifier()), path)
    fitted = LRRNClassifier(**QUICK).fit(X, y)
    with pytest.raises(ValueError, match="step 'standardscaler' of this Pipeline is not fitted"):
        lrrn.save(make_pipeline(StandardScaler(), fitted), path)
    assert not path.exists()


@pytest.fixture
def saved(path):
    model = make_pipeline(StandardScaler(), PCA(3, whiten=True), LRRNClassifier(**QUICK)).fit(table(), labels())
    lrrn.save(model, path)
    return path


CHANGES = {
    "another class": lambda header: header["steps"][0].update({"class": "FunctionTransformer"}),
    "no class": lambda header: header["steps"][0].update({"class": ["PCA"]}),
    "a private attribute": lambda header: header["steps"][0]["values"]["items"].append(["transform", 1]),
    "clipping": lambda header: header["steps"][0]["parameters"]["items"].append(["clip", True]),
    "a number as a flag": lambda header: header["steps"][0]["parameters"]["items"].append(["with_mean", 3]),
    "another number of features": lambda header: header["steps"][0]["values"]["items"].append(["n_features_in_", 10**12]),
    "a step less": lambda header: header["steps"].pop(1),
    "steps in another order": lambda header: header["steps"].reverse(),
    "names": lambda header: header["steps"][0]["values"]["items"].append(["feature_names_in_", "x"]),
    "output": lambda header: header["steps"][0].update(output="dask"),
    "kind": lambda header: header.update(kind="network"),
    "no steps": lambda header: header.update(steps=None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_header_that_does_not_fit_is_refused(change, saved, tmp_path):
    edited(saved, CHANGES[change], tmp_path / "edited")
    with pytest.raises(FileFormatError, match="does not fit a pipeline"):
        lrrn.load(tmp_path / "edited")


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(4),
        torch.full((4,), 1e-99, dtype=torch.float64),
        torch.zeros(3),
        torch.ones(4, dtype=torch.int64),
        torch.full((4,), np.nan),
    ],
)
def test_arrays_that_do_not_fit_are_refused(value, saved):
    envelope, tensors = envelope_of(saved)
    rewrite(saved, envelope, tensors | {"step.0.scale_": value})
    with pytest.raises(FileFormatError, match="does not fit a pipeline"):
        lrrn.load(saved)
    del tensors["step.1.components_"]
    rewrite(saved, envelope, tensors)
    with pytest.raises(FileFormatError, match="does not fit a pipeline"):
        lrrn.load(saved)


@pytest.mark.parametrize("value", [0.0, [1.0] * 4, *({"array": a, "dtype": "<f8"} for a in ([1.0] * 3, [1.0, 0.0, 1.0, 1.0]))])
def test_an_estimator_scaled_by_feature_needs_a_scale_for_every_feature(value, path):
    lrrn.save(LRRNClassifier(**QUICK, standardize="features").fit(table(), labels()), path)

    def change(header):
        items = header["attributes"]["items"]
        header["attributes"]["items"] = [*(pair for pair in items if pair[0] != "scale_in_"), ["scale_in_", value]]

    edited(path, change, path)
    with pytest.raises(FileFormatError, match="scale_in_"):
        lrrn.load(path)


def test_one_common_scale_is_a_number_in_the_file_as_in_earlier_releases(path):
    lrrn.save(LRRNClassifier(**QUICK, standardize=True).fit(table(), labels()), path)
    header = envelope_of(path)[0]["header"]
    parameters, attributes = (dict(header[group]["items"]) for group in ("parameters", "attributes"))
    assert parameters["standardize"] is True and isinstance(attributes["scale_in_"], float)
