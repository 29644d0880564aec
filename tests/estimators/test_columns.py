"""Tables of numbers, categories and missing values: numbers are certified while categories are held fixed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import ColumnTransformer, make_column_selector
from sklearn.decomposition import PCA
from sklearn.impute import KNNImputer, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    KBinsDiscretizer,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    RobustScaler,
    StandardScaler,
)

import lrrn
from lrrn import ConformalClassifier, certify_pipeline
from lrrn.estimators.affine import AffineChain
from lrrn.estimators.columns import through_columns
from small_estimators import classifier, regressor

NUMBERS, FIXED = ["age", "income", "height"], ["city", "size"]


def table(n: int = 150, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "city": rng.choice(["Aarhus", "Odense", "Esbjerg"], n),
            "age": rng.normal(50, 15, n),
            "income": rng.lognormal(10, 0.5, n),
            "size": rng.choice(["S", "M", "L"], n),
            "height": rng.normal(1.7, 0.1, n),
            "noise": rng.normal(size=n),
        }
    )
    label = (frame["income"] > 22_000).astype(int) + (frame["city"] == "Odense") * (frame["age"] > 45)
    return frame, np.asarray(label)


def columns(**options) -> ColumnTransformer:
    parts = [
        ("scaled", StandardScaler(), ["income", "age"]),
        ("tall", make_pipeline(SimpleImputer(), MinMaxScaler()), ["height"]),
        ("city", OneHotEncoder(sparse_output=False), ["city"]),
        ("size", make_pipeline(SimpleImputer(strategy="most_frequent"), OrdinalEncoder()), ["size"]),
    ]
    return ColumnTransformer(parts, **options)


def fitted(*steps, frame=None, label=None, **options):
    frame, label = table() if frame is None else (frame, label)
    model = classifier(epochs=15, hidden_sizes=(10,), **options)
    return make_pipeline(*(steps or (columns(),)), model).fit(frame, label)


TRANSFORMERS = {
    "drop": lambda: [columns()],
    "passthrough": lambda: [columns(remainder="passthrough")],
    "then components": lambda: [columns(remainder=RobustScaler()), PCA(5)],
    "then scaled": lambda: [columns(), StandardScaler()],
    "pandas": lambda: [columns().set_output(transform="pandas")],
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_no_perturbation_of_the_numbers_inside_a_radius_changes_the_label(name):
    frame, label = table()
    model = fitted(*TRANSFORMERS[name](), frame=frame, label=label)
    rng = np.random.default_rng(1)
    for norm in ("input", "scaled"):
        found = certify_pipeline(model, frame, "spectral", norm=norm)
        np.testing.assert_array_equal(found.prediction, model.predict(frame))
        assert (found.radius > 0).mean() > 0.5
        unit = np.ones(3) if norm == "input" else units(model)
        steps = [rng.normal(size=(len(frame), 3)) for _ in range(10)]
        steps += [np.broadcast_to(sign * row, (len(frame), 3)) for row in np.eye(3) for sign in (-1, 1)]
        for step in steps:
            moved = frame.copy()
            step = step / np.linalg.norm(step, axis=1, keepdims=True) * unit
            moved[NUMBERS] += 0.9999 * found.radius[:, None] * step
            np.testing.assert_array_equal(model.predict(moved), found.prediction)


def units(model) -> np.ndarray:
    """What age, income and height are divided by."""
    parts = model[0].named_transformers_
    return np.array([parts["scaled"].scale_[1], parts["scaled"].scale_[0], 1 / parts["tall"][-1].scale_[0]])


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_radii_are_those_of_the_network_over_norms_of_the_matrix(name):
    frame, label = table()
    model = fitted(*TRANSFORMERS[name](), frame=frame, label=label)
    found = certify_pipeline(model, frame, "spectral")
    inner = model[-1].certified_radius(model[:-1].transform(frame), "spectral")
    # the matrix, column by column: by what the steps do to a row in which one number is larger by 1
    row = frame.iloc[:1]
    base, moving = np.asarray(model[:-1].transform(row)), [*NUMBERS, "noise"]
    more = [np.asarray(model[:-1].transform(row.assign(**{name: row[name] + 1.0}))) - base for name in moving]
    A = np.concatenate(more).T
    np.testing.assert_allclose(found.radius, inner / np.linalg.norm(A, 2), rtol=1e-4, atol=1e-9)
    alone = found.feature_radius()
    assert alone.shape == frame.shape
    for name, length in zip(moving, np.linalg.norm(A, axis=0), strict=True):
        one = alone[:, list(frame.columns).index(name)]
        if length > 0:
            np.testing.assert_allclose(one, inner / length, rtol=1e-3, atol=1e-7)
        else:  # dropped: it may move as it likes
            assert (one[found.radius > 0] > 1e3).all() and np.isfinite(one).all()
    for name in FIXED:
        assert (alone[:, list(frame.columns).index(name)] == 0).all()


def test_a_category_may_change_the_label_where_numbers_may_not():
    frame, _ = table()
    model = fitted()
    found = certify_pipeline(model, frame, "spectral")
    moved = model.predict(frame.assign(city="Odense", age=70.0))
    assert (moved != found.prediction)[found.radius > 0].any()
    # a number that is encoded too is held fixed
    both = ColumnTransformer([("a", StandardScaler(), NUMBERS), ("b", OneHotEncoder(handle_unknown="ignore"), ["age"])])
    both.set_params(sparse_threshold=0)
    alone = certify_pipeline(fitted(both), frame, "spectral").feature_radius()
    assert (alone[:, 1] == 0).all() and (alone[:, 2] > 0).any()


def test_missing_values_stay_missing_and_the_other_numbers_are_certified():
    frame, label = table()
    frame.loc[::3, "height"] = np.nan
    frame.loc[::4, "size"] = None
    model = fitted(frame=frame, label=label)
    found = certify_pipeline(model, frame, "spectral", norm="scaled")
    full = frame.assign(height=frame["height"].fillna(model[0].named_transformers_["tall"][0].statistics_[0]))
    np.testing.assert_allclose(found.radius, certify_pipeline(model, full, "spectral", norm="scaled").radius, rtol=1e-6)
    rng, unit = np.random.default_rng(1), units(model)
    for _ in range(20):
        step = rng.normal(size=(len(frame), 3))
        moved = frame.copy()
        moved[NUMBERS] += 0.9999 * found.radius[:, None] * step / np.linalg.norm(step, axis=1, keepdims=True) * unit
        np.testing.assert_array_equal(model.predict(moved), found.prediction)


def test_an_imputer_may_stand_before_or_after_a_scaler():
    frame, label = table()
    X = frame[NUMBERS].to_numpy(copy=True)
    X[::5, 0] = np.nan
    after, before = (fitted(*steps, frame=X, label=label) for steps in ORDERS)
    for model in (after, before):
        found = certify_pipeline(model, X, "spectral")
        np.testing.assert_array_equal(found.prediction, model.predict(X))
        inner = model[-1].certified_radius(model[:-1].transform(X), "spectral")
        scale = next(step for _, step in model.steps if isinstance(step, StandardScaler)).scale_
        np.testing.assert_allclose(found.radius, inner * scale.min(), rtol=1e-4, atol=1e-9)
    with pytest.raises(ValueError, match="NaN"):
        certify_pipeline(fitted(StandardScaler(), frame=X[1:5], label=label[1:5] * 0 + [0, 1, 0, 1]), X)


ORDERS = ([StandardScaler(), SimpleImputer()], [SimpleImputer(strategy="median"), StandardScaler()])


def test_arrays_selectors_and_reordered_frames():
    frame, label = table()
    by_type = ColumnTransformer(
        [
            ("n", StandardScaler(), make_column_selector(dtype_include=float)),
            ("c", OneHotEncoder(), make_column_selector(dtype_exclude=float)),
        ]
    )
    model = fitted(by_type.set_params(sparse_threshold=0), frame=frame, label=label)
    found = certify_pipeline(model, frame, "spectral")
    turned = certify_pipeline(model, frame[list(frame.columns)[::-1]], "spectral")
    np.testing.assert_array_equal(found.radius, turned.radius)
    np.testing.assert_array_equal(found.feature_radius(), turned.feature_radius())
    with pytest.raises(ValueError, match=r"X has no columns \['age'\]"):
        certify_pipeline(model, frame.drop(columns="age"))
    X = frame.to_numpy()  # of objects
    parts = [("n", StandardScaler(), slice(1, 3)), ("c", OneHotEncoder(), [0, 3]), ("p", "passthrough", [-1])]
    model = fitted(ColumnTransformer(parts, sparse_threshold=0), frame=X, label=label)
    found = certify_pipeline(model, X, "spectral")
    assert (found.radius > 0).any() and (found.feature_scale > 0).tolist() == [False, True, True, False, True, True]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_errors_of_columns_are_within_their_bounds(dtype):
    """Against extended precision; columns in float32 are rounded as such although the encoder's are in float64."""
    frame, _ = table()
    frame = frame.astype(dict.fromkeys(NUMBERS, dtype))
    transformer = columns().fit(frame)
    chain = AffineChain(frame.shape[1])
    computed = through_columns(chain, transformer, frame)
    scaler, tall = transformer.named_transformers_["scaled"], transformer.named_transformers_["tall"][-1]
    exact = np.array(computed, dtype=np.longdouble)
    exact[:, :2] = (frame[["income", "age"]].to_numpy(np.longdouble) - scaler.mean_) / scaler.scale_.astype(np.longdouble)
    exact[:, 2:3] = frame[["height"]].to_numpy(np.longdouble) * tall.scale_ + tall.min_
    wrong = np.linalg.norm((computed - exact).astype(np.float64), axis=1)
    assert computed.dtype == np.float64 and (wrong > 0).any() and (2 * wrong <= chain.error).all()
    assert chain.error.max() < 1e4 * np.finfo(dtype).eps
    # every group counts
    first, second = AffineChain(2), AffineChain(1)
    first.through(scaler, frame[["income", "age"]])
    second.through(tall, frame[["height"]].to_numpy())
    assert (chain.error > first.error).all() and (chain.error > second.error).all()


def test_regressors_and_prediction_sets_take_such_pipelines():
    frame, label = table()
    target = frame["income"].to_numpy() / 1e4
    model = make_pipeline(columns(), regressor(epochs=10)).fit(frame, target)
    lower, upper = certify_pipeline(model, frame, eps=0.2, norm="scaled").intervals[0.2]
    moved = model.predict(frame.assign(age=frame["age"] + 0.1999 * units(model)[0]))
    assert ((lower <= moved) & (moved <= upper)).all()
    new, truth = table(100, seed=1)
    sets = ConformalClassifier(fitted(), alpha=0.2).fit(new, truth).predict_set(frame, 0.1, norm="scaled")
    assert sets.shape == (150, 3) and sets[np.arange(150), label].mean() > 0.7


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([("log", FunctionTransformer(np.log1p), NUMBERS)], "step 'columntransformer: log' of the Pipeline is a FunctionTr"),
        (
            [("bins", make_pipeline(SimpleImputer(), KBinsDiscretizer()), NUMBERS)],
            "step 'columntransformer: bins: kbinsdiscretizer' of the Pipeline",
        ),
        ([("near", KNNImputer(), NUMBERS)], "is a KNNImputer, which is not known to be affine"),
        ([("zeros", SimpleImputer(missing_values=0), NUMBERS)], "SimpleImputer of 0, which numbers may move to; use NaN"),
        ([("told", SimpleImputer(add_indicator=True), NUMBERS)], "with add_indicator=True"),
        ([("clip", MinMaxScaler(clip=True), NUMBERS)], "MinMaxScaler with clip=True"),
    ],
)
def test_what_is_not_supported_is_named(parts, message):
    frame, _ = table()
    with pytest.raises(ValueError, match=message):
        certify_pipeline(make_pipeline(ColumnTransformer(parts), classifier()), frame)


def test_what_cannot_be_certified_is_refused(tmp_path):
    frame, label = table()
    late = make_pipeline(StandardScaler(), ColumnTransformer([("s", StandardScaler(), [0])]), classifier())
    with pytest.raises(ValueError, match="ColumnTransformer that is not the first step"):
        certify_pipeline(late.fit(frame[NUMBERS], label), frame[NUMBERS])
    with pytest.raises(ValueError, match="ColumnTransformer that has weights"):
        certify_pipeline(fitted(columns(transformer_weights={"city": 2.0})), frame)
    only = ColumnTransformer([("c", OneHotEncoder(sparse_output=False), FIXED)])
    with pytest.raises(ValueError, match="every column is a category"):
        certify_pipeline(fitted(only), frame)
    empty = fitted(SimpleImputer(keep_empty_features=True), frame=frame[NUMBERS].assign(age=0.0), label=label)
    empty[0].statistics_[0] = np.nan
    with pytest.raises(ValueError, match="fitted on an empty column"):
        certify_pipeline(empty, frame[NUMBERS])
    with pytest.raises(ValueError, match="step 'columntransformer' of the Pipeline is a ColumnTransformer"):
        lrrn.save(fitted(), tmp_path / "model")
