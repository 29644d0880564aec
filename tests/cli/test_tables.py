"""Tables on the command line: features go by their names, labels are needed where something is compared with them."""

from __future__ import annotations

import copy
import csv
import io
import json

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_diabetes, load_iris
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from typer.testing import CliRunner

import lrrn
from lrrn.cli import app
from lrrn.reports.pipelines import PipelineModel, identity_of

FEATURES = ["sepal length", "sepal width", "petal length", "petal width"]
SMALL = dict(hidden_sizes=(6,), epochs=20, standardize=True, random_state=0)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], terminal_width=300)


def run(*arguments):
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return done


def words(done):
    return " ".join(done.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def iris():
    """Petals and sepals, with labels as text."""
    X, y = load_iris(return_X_y=True)
    return pd.DataFrame(X, columns=FEATURES).assign(kind=np.array(["setosa", "versicolor", "virginica"])[y])


@pytest.fixture(scope="module")
def models(tmp_path_factory, iris):
    """A saved model of every kind, fitted on a data frame; and a classifier that knows no names."""
    folder, X = tmp_path_factory.mktemp("models"), iris[FEATURES]
    found = {
        "classifier": lrrn.LRRNClassifier(**SMALL).fit(X, iris["kind"]),
        "regressor": lrrn.LRRNRegressor(**SMALL).fit(X[FEATURES[:3]], X[FEATURES[3]]),
        "pair": lrrn.LRRNRegressor(**{**SMALL, "standardize": "features"}).fit(X[FEATURES[:2]], X[FEATURES[2:]]),
        "energy": lrrn.LRRNEnergyModel(**SMALL).fit(X),
        "nameless": lrrn.LRRNClassifier(**SMALL).fit(X.to_numpy(), iris["kind"]),
    }
    for name, model in found.items():
        lrrn.save(model, folder / name)
    return {name: (folder / name, model) for name, model in found.items()}


@pytest.fixture
def write(tmp_path):
    """Write a data frame as the suffix of the name says; return the file."""

    def written(frame, name="t.csv", **options):
        path = tmp_path / name
        frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False, **options)
        return path

    return written


def figures(command, model, data, *options):
    return json.loads(run(command, model, data, *options, "--json", "-").stdout)


# --- names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_reordered_columns_are_put_in_order_by_name(write, tmp_path, iris, name):
    model = tmp_path / "m.safetensors"
    options = ("--target", "kind", "--epochs", 20, "--hidden", 6, "-o", model)
    done = run("train", write(iris, name), *options)
    assert lrrn.load(model).feature_names_in_.tolist() == FEATURES and "valid feature names" not in done.output
    reordered = write(iris[["petal width", "kind", *FEATURES[:3]]], f"reordered-{name}")
    one, two = (figures("evaluate", model, data)["models"][0] for data in (tmp_path / name, reordered))
    assert one == two and one["score"] > 0.5
    done = run("evaluate", model, reordered)
    assert "valid feature names" not in done.output


def test_missing_and_extra_columns_are_an_error(write, models, iris):
    model, _ = models["classifier"]
    for frame, options, message in (
        (iris.drop(columns="petal width"), (), "lacks the column 'petal width', which the model was trained on"),
        (iris.assign(id=0), (), "has the columns 'kind', 'id', which the model was not trained on; name the target (--target)"),
        (iris.assign(id=0), ("--target", "kind"), "has the column 'id', which the model was not trained on; leave"),
        (iris.rename(columns=str.upper), (), "lacks the columns 'sepal length', 'sepal width'"),
    ):
        for command in ("evaluate", "certify", "predict", "attack"):
            done = invoke(command, model, write(frame), *options)
            assert done.exit_code == 1 and message in words(done), done.output
    assert figures("certify", model, write(iris.assign(id=0)), "--drop", "id", "--target", "kind")["accuracy"] > 0.5


def test_a_model_without_names_goes_by_the_number_of_columns(write, models, iris):
    model, fitted = models["nameless"]
    labelled = figures("certify", model, write(iris))
    assert labelled["accuracy"] == np.mean(fitted.predict(iris[FEATURES].to_numpy()) == iris["kind"])
    assert "accuracy" not in figures("certify", model, write(iris[FEATURES]))
    assert "accuracy" not in figures("certify", model, write(iris[FEATURES], header=False))
    done = invoke("certify", model, write(iris[FEATURES[:3]]))
    assert done.exit_code == 2 and "has 2 features" in words(done)


def test_training_takes_other_delimiters_and_drops_columns(write, tmp_path, iris):
    model, frame = tmp_path / "m.safetensors", iris.assign(id=[f"plant {j}" for j in range(150)], note="fine")
    common = ("--target", "kind", "--drop", "id", "--drop", "note", "--epochs", 1, "--hidden", 4, "-o", model, "--overwrite")
    for name, separator, given in (
        ("t.csv", ";", ()),
        ("t.tsv", "\t", ()),
        ("t.csv", "|", ("--delimiter", "|")),
        ("t.csv", "\t", ("--delimiter", "tab")),
    ):
        run("train", write(frame, name, sep=separator), *common, *given)
        assert lrrn.load(model).feature_names_in_.tolist() == FEATURES
    done = invoke("train", write(frame), "--target", "kind", "-o", tmp_path / "n")
    assert done.exit_code == 1 and "column 'id' holds 'plant 0', which is no number; encode it first" in words(done)


# --- targets of a classifier ---------------------------------------------------------------------------------------------


@pytest.fixture
def archives(tmp_path, iris):
    """The same table with labels as a vector, as a column, and as two columns."""
    X, y = iris[FEATURES].to_numpy(), iris["kind"].to_numpy(dtype=str)
    for name, targets in (("vector", y), ("column", y[:, None]), ("pair", np.stack([y, y], 1))):
        np.savez(tmp_path / f"{name}.npz", X=X, y=targets)
    return {name: tmp_path / f"{name}.npz" for name in ("vector", "column", "pair")}


def test_a_column_of_labels_is_compared_like_a_vector(models, pipelines, archives, tmp_path, iris):
    model, fitted = models["nameless"]
    share = np.mean(fitted.predict(iris[FEATURES].to_numpy()) == iris["kind"])
    for name in ("vector", "column"):
        assert figures("evaluate", model, archives[name])["models"][0]["score"] == share
        assert figures("certify", model, archives[name])["accuracy"] == share
        assert figures("attack", model, archives[name], "--steps", 1, "--restarts", 1)["accuracy"] == share
        assert figures("certify", pipelines["classifier"][0], archives[name])["accuracy"] > 0.5
        run("train", archives[name], "--hidden", 4, "--epochs", 3, "-o", tmp_path / name)
    weights = [lrrn.load(tmp_path / name).network_.W[0].tolist() for name in ("vector", "column")]
    assert weights[0] == weights[1]


def test_several_targets_are_no_labels(models, archives, tmp_path):
    model = models["nameless"][0]
    for arguments in (
        ("evaluate", model, archives["pair"]),
        ("certify", model, archives["pair"]),
        ("attack", model, archives["pair"]),
        ("train", archives["pair"], "-o", tmp_path / "m"),
    ):
        done = invoke(*arguments)
        assert done.exit_code == 1 and "targets have shape (150, 2), and a classifier needs one label" in words(done)
    assert not (tmp_path / "m").exists()
    assert len(lines(run("predict", model, archives["pair"]).stdout)) == 150  # compares nothing


@pytest.mark.parametrize("kind", ["classifier", "regressor", "energy"])
def test_one_row_is_too_few_to_train_on(write, tmp_path, iris, kind):
    frame = iris[FEATURES] if kind == "regressor" else iris
    done = invoke("train", write(frame[:1]), "--target", frame.columns[-1], "--model", kind, "-o", tmp_path / "m")
    assert done.exit_code == 1 and "t.csv has one row; training needs at least two, since some are held out" in words(done)


@pytest.mark.filterwarnings("ignore:no target of the data is one of the model's labels")  # the two may be of the third class
def test_a_few_rows_of_several_classes_are_enough(write, tmp_path, iris):
    few = iris.iloc[[0, 50, 100, 1, 51, 101]]  # two are held out, of three classes
    (result,) = figures("train", write(few), "--epochs", 1, "--hidden", 4, "-o", tmp_path / "m")["models"]
    assert result["n_samples"] == 2


def test_a_quantity_is_no_class(write, tmp_path):
    X, y = (values[:60] for values in load_diabetes(return_X_y=True))
    table = pd.DataFrame(X, columns=list("abcdefghij"))
    done = invoke("train", write(table.assign(y=y + 0.5)), "-o", tmp_path / "m")
    assert done.exit_code == 1 and not (tmp_path / "m").exists()
    assert "the target holds numbers such as 151.5, which are no classes; use --model regressor" in words(done)
    done = invoke("train", write(table.assign(y=(y + 0.5) * 1e20)), "-o", tmp_path / "m")
    assert done.exit_code == 1 and "which are no classes; use --model regressor" in words(done)
    quick = ("--epochs", 1, "--hidden", 2, "-o", tmp_path / "m", "--overwrite")
    told = "if it is a quantity, use --model regressor"
    done = run("train", write(table.assign(y=y)), *quick)
    assert told in done.stderr and f"has {len(set(y))} distinct numbers in 60 rows" in done.stderr
    for target in (y % 7, [f"patient {value}" for value in y]):  # few numbers; names
        assert told not in run("train", write(table.assign(y=target)), *quick).stderr


# --- without labels -------------------------------------------------------------------------------------------------------


def test_certify_needs_no_labels(write, models, iris, tmp_path):
    model, fitted = models["classifier"]
    data, page, samples = write(iris[FEATURES[::-1]]), tmp_path / "p.html", tmp_path / "s.npz"
    done = run("certify", model, data, "--eps", "0.1,0.5", "--page", page)
    assert "certified share" in done.output and "accuracy" not in done.output and "keeps its label" in page.read_text()
    found, radius = figures("certify", model, data, "--eps", "0.1,0.5"), fitted.certified_radius(iris[FEATURES])
    np.testing.assert_allclose(found["samples"]["radius"], radius, rtol=1e-9)
    assert found["certified_share"] == {"0.1": np.mean(radius > 0.1), "0.5": np.mean(radius > 0.5)}
    assert "certified" not in found and found["median_radius"] == pytest.approx(np.median(radius))
    run("certify", model, data, "--samples", samples)
    with np.load(samples) as written:
        assert sorted(written.files) == ["prediction", "radius"]
        assert written["prediction"].tolist() == fitted.predict(iris[FEATURES]).tolist()


def test_certify_an_energy_model(write, models, iris):
    model, fitted = models["energy"]
    for frame in (iris[FEATURES], iris):  # labels say nothing about outliers
        found = figures("certify", model, write(frame), "--eps", "0.05")
        radius = fitted.certified_radius(iris[FEATURES])
        assert found["method"] == "energy" and found["certified_share"] == {"0.05": np.mean(radius > 0.05)}
    done = invoke("certify", model, write(iris), "--method", "paper")
    assert done.exit_code == 2 and "an energy model has one method, 'energy'; got 'paper'" in words(done)


@pytest.mark.parametrize("kind", ["regressor", "pair"])
def test_certify_a_regressor(write, models, iris, tmp_path, kind):
    model, fitted = models[kind]
    X = iris[list(fitted.feature_names_in_)]
    data, page, samples = write(X), tmp_path / "p.html", tmp_path / "s.npz"
    done = run("certify", model, data, "--eps", "0.1,0.5", "--page", page, "--samples", samples)
    assert "mean half-width" in done.output and "Certified intervals" in page.read_text()
    assert ("scaled norm" in words(done)) == (kind == "pair")
    found = figures("certify", model, data, "--eps", "0.1,0.5")
    for size in (0.1, 0.5):
        lower, upper = fitted.predict_interval(X, size)
        assert found["half_width"][f"{size:g}"] == pytest.approx(np.mean(upper - lower) / 2)
        np.testing.assert_allclose(found["samples"]["lower"][f"{size:g}"], lower)
        np.testing.assert_allclose(found["samples"]["upper"][f"{size:g}"], upper)
    with np.load(samples) as written:
        np.testing.assert_allclose(written["lower 0.5"], lower)
    done = invoke("certify", model, data, "--method", "paper")
    assert done.exit_code == 2 and "--method is for classifiers" in words(done)


# --- predictions ----------------------------------------------------------------------------------------------------------


def lines(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_predict_labels_and_radii(write, models, iris, tmp_path):
    model, fitted = models["classifier"]
    labels, radius = fitted.predict(iris[FEATURES]), fitted.certified_radius(iris[FEATURES])
    for frame in (iris[FEATURES[::-1]], iris):
        assert [line["prediction"] for line in lines(run("predict", model, write(frame)).stdout)] == labels.tolist()
    found = lines(run("predict", model, write(iris), "--radius", "--limit", 20).stdout)
    assert list(found[0]) == ["prediction", "radius"] and len(found) == 20
    np.testing.assert_allclose([float(line["radius"]) for line in found], radius[:20], rtol=1e-9)
    output, more = tmp_path / "out.csv", tmp_path / "out.json"
    done = run("predict", model, write(iris), "-o", output, "--json", more)
    assert [line["prediction"] for line in lines(output.read_text())] == labels.tolist() and "150 predictions" in done.output
    assert json.loads(more.read_text())["prediction"] == labels.tolist()
    assert figures("predict", model, write(iris), "--radius")["radius"][:2] == pytest.approx(radius[:2])


def test_predict_values_and_intervals(write, models, iris):
    for kind in ("regressor", "pair"):
        model, fitted = models[kind]
        X = iris[list(fitted.feature_names_in_)]
        values, (lower, upper) = fitted.predict(X), fitted.predict_interval(X, 0.1)
        found = pd.read_csv(io.StringIO(run("predict", model, write(X), "--eps", 0.1).stdout)).to_numpy()
        np.testing.assert_allclose(found, np.column_stack([values, lower, upper]))
    done = invoke("predict", model, write(X), "--radius")
    assert done.exit_code == 1 and "a regressor has intervals, not radii; give a size of perturbations (--eps)" in words(done)


def test_predict_outliers(write, models, iris):
    model, fitted = models["energy"]
    found = pd.read_csv(io.StringIO(run("predict", model, write(iris), "--radius").stdout))
    assert found["prediction"].tolist() == fitted.predict(iris[FEATURES]).tolist()
    np.testing.assert_allclose(found["radius"], fitted.certified_radius(iris[FEATURES]), rtol=1e-9)
    done = invoke("predict", model, write(iris), "--eps", "0.1")
    assert done.exit_code == 1 and "(--eps) is for a regressor's intervals; labels have a radius (--radius)" in words(done)


def test_a_method_is_for_the_radii_of_a_classifier_and_checked_before_data_are_read(write, models, iris, monkeypatch):
    regressor, energy, data = models["regressor"][0], models["energy"][0], write(iris)
    run("predict", energy, data, "--radius", "--method", "energy")
    monkeypatch.setattr("lrrn.datasets.open_table", lambda *_, **__: pytest.fail("data were read"))
    for command in (("predict", "--radius"), ("certify",)):
        done = invoke(command[0], regressor, data, *command[1:], "--method", "local")
        assert done.exit_code == 2 and f"--method is for classifiers; {regressor} holds a regressor" in words(done)
        done = invoke(command[0], energy, data, *command[1:], "--method", "local")
        assert done.exit_code == 2 and "an energy model has one method, 'energy'; got 'local'" in words(done)


def test_targets_that_a_regressor_cannot_predict_are_refused_before_any_row_is_certified(write, models, iris, tmp_path):
    X, y = iris[FEATURES[:3]].to_numpy(), iris[FEATURES[3]].to_numpy()
    np.savez(tmp_path / "two.npz", X=X, y=np.stack([y, y], 1))
    model, text = models["regressor"][0], write(iris[[*FEATURES[:3], "kind"]])
    for data, message in (
        (tmp_path / "two.npz", "two.npz: targets have shape (150, 2), and the regressor predicts 1 for each of 150 samples"),
        (text, "t.csv: the targets are such as 'setosa', and a regressor needs numbers"),
    ):
        done = invoke("evaluate", model, data, "--samples", tmp_path / "samples.npz")
        assert done.exit_code == 1 and message in words(done)
        assert not (tmp_path / "samples.npz").exists() and not (tmp_path / "samples.npz.parts").exists()
    assert figures("certify", model, text)["n_samples"] == 150  # compares nothing
    done = invoke("train", text, "--model", "regressor", "-o", tmp_path / "m")
    assert done.exit_code == 1 and "the targets are such as 'setosa', and a regressor needs numbers" in words(done)


# --- standard output ------------------------------------------------------------------------------------------------------


def test_json_goes_to_standard_output_and_the_table_out_of_its_way(write, models, iris, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, data = models["classifier"][0], write(iris)
    for command in ("evaluate", "certify"):
        done = run(command, model, data, "--json", "-")
        assert "title" in json.loads(done.stdout) and "┏" in done.stderr and not (tmp_path / "-").exists()
        done = run(command, model, data)  # and comes back
        assert "┏" in done.stdout and "┏" not in done.stderr
    assert "prediction" in json.loads(run("predict", model, data, "--json", "-").stdout)


# --- pipelines ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory, iris):
    """Saved Pipelines of every kind of estimator: two that scale the features first, and one that does not."""
    folder, X, plain = tmp_path_factory.mktemp("pipelines"), iris[FEATURES], {**SMALL, "standardize": False}
    found = {
        "classifier": make_pipeline(StandardScaler(), PCA(3), lrrn.LRRNClassifier(**plain)).fit(X, iris["kind"]),
        "regressor": make_pipeline(MinMaxScaler(), lrrn.LRRNRegressor(**plain)).fit(X[FEATURES[:3]], X[FEATURES[3]]),
        "energy": make_pipeline(PCA(), lrrn.LRRNEnergyModel(**plain)).fit(X),
    }
    for name, model in found.items():
        lrrn.save(model, folder / name)
    return {name: (folder / name, model) for name, model in found.items()}


def test_a_saved_pipeline_predicts_and_certifies_in_units_of_its_input(write, pipelines, iris):
    model, fitted = pipelines["classifier"]
    expected = lrrn.certify_pipeline(fitted, iris[FEATURES], "spectral", norm="scaled")
    done = run("predict", model, write(iris[[*FEATURES[::-1], "kind"]]), "--radius", "--method", "spectral")
    found = pd.read_csv(io.StringIO(done.stdout))
    assert found["prediction"].tolist() == fitted.predict(iris[FEATURES]).tolist()
    np.testing.assert_allclose(found["radius"], expected.radius, rtol=1e-9)
    audit = figures("certify", model, write(iris), "--method", "spectral", "--eps", "0.1,0.3")
    assert audit["norm"] == "scaled" and "valid feature names" not in done.output
    assert audit["certified"]["0.3"] == expected.certified_accuracy(iris["kind"], 0.3)
    model, fitted = pipelines["energy"]
    audit = figures("certify", model, write(iris))
    assert audit["norm"] == "euclidean"
    np.testing.assert_allclose(audit["samples"]["radius"], lrrn.certify_pipeline(fitted, iris[FEATURES]).radius, rtol=1e-9)
    model, fitted = pipelines["regressor"]
    X = iris[FEATURES[:3]]
    lower, upper = lrrn.certify_pipeline(fitted, X, eps=0.1, norm="scaled").intervals[0.1]
    found = pd.read_csv(io.StringIO(run("predict", model, write(X), "--eps", 0.1).stdout)).to_numpy()
    np.testing.assert_allclose(found, np.stack([fitted.predict(X), lower, upper], 1), rtol=1e-9)
    audit = figures("certify", model, write(X), "--eps", "0.1")
    assert audit["half_width"]["0.1"] == pytest.approx(np.mean(upper - lower) / 2)


def test_a_saved_pipeline_is_evaluated(write, pipelines, iris, tmp_path):
    model, fitted = pipelines["classifier"]
    (result,) = figures("evaluate", model, write(iris), "--page", tmp_path / "page.html")["models"]
    assert result["score"] == fitted.score(iris[FEATURES], iris["kind"]) and result["norm"] == "scaled"
    assert list(result["certified"]) == ["0.1", "0.25", "0.5"] and set(result["auroc"]) == {"Gaussian"}
    # outputs move at most that much per standard deviation
    rng = np.random.default_rng(0)
    X, step = iris[FEATURES].to_numpy(), rng.normal(size=(150, 4))
    moved = fitted.decision_function(pd.DataFrame(X + step * fitted[0].scale_, columns=FEATURES))
    slope = np.linalg.norm(moved - fitted.decision_function(iris[FEATURES]), axis=1) / np.linalg.norm(step, axis=1)
    assert 0.2 * result["lipschitz"] < slope.max() <= result["lipschitz"]
    (result,) = figures("evaluate", pipelines["energy"][0], write(iris))["models"]
    assert result["norm"] == "euclidean" and 0 < result["auroc"]["Gaussian"] < 1
    regression = pipelines["regressor"][0], write(iris[FEATURES]), "--target", FEATURES[3]
    (result,) = figures("evaluate", *regression)["models"]
    assert result["score"] > 0.5 and list(result["half_width"]) == ["0.1", "0.25", "0.5"]


def test_parts_of_one_pipeline_are_not_taken_for_those_of_another(pipelines):
    one = pipelines["classifier"][1]
    other = copy.deepcopy(one)
    other[0].scale_ = 2 * other[0].scale_
    assert identity_of(PipelineModel(one)) == identity_of(PipelineModel(copy.deepcopy(one)))
    assert identity_of(PipelineModel(one)) != identity_of(PipelineModel(other))


def test_only_a_classifier_is_attacked(write, pipelines, iris):
    done = invoke("attack", pipelines["classifier"][0], write(iris))
    assert done.exit_code == 2 and "holds a Pipeline; only a classifier has labels to attack" in words(done)
