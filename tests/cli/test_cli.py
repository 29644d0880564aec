from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from sklearn.datasets import load_diabetes, load_iris
from typer.testing import CliRunner

import lrrn
from lrrn.certificates.radius import METHODS
from lrrn.cli import app
from lrrn.cli import options as options_of_commands
from lrrn.cli.inputs import device_name
from lrrn.cli.output import warning_line
from lrrn.cli.parameters import NOT_OPTIONS, PARAMETERS
from lrrn.estimators.objectives import OBJECTIVES
from lrrn.learning.schedules import SCHEDULES
from lrrn.network.solution import ON_FAILURE
from lrrn.persistence.serialization import load_reference
from lrrn.runtime.devices import choose_device

runner = CliRunner()


def words(output):
    """The text without the box around it."""
    return " ".join(output.replace("│", " ").split())


def run(*arguments):
    done = runner.invoke(app, [str(argument) for argument in arguments], terminal_width=200)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def iris(tmp_path):
    """A table with column names, text labels in the middle."""
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    path = tmp_path / "iris.csv"
    lines = [f"{a},{b},{name},{c},{d}" for (a, b, c, d), name in zip(X, names, strict=True)]
    path.write_text("\n".join(["a,b,kind,c,d", *lines]) + "\n")
    return path


def test_help_names_every_command_and_option():
    commands = ("demo", "train", "predict", "evaluate", "certify", "attack", "export")
    commands += ("models", "verify", "reproduce", "record", "bench", "explore", "info")
    assert set(commands) <= set(runner.invoke(app, ["--help"]).output.split())
    for command in commands:
        output = runner.invoke(app, [command, "--help"], terminal_width=200).output
        assert all(option in output for option in ("--seed", "--device", "--json"))


def test_demo_trains_three_models_and_writes_a_page(tmp_path):
    figures, page = tmp_path / "demo.json", tmp_path / "new" / "page.html"
    output = run("demo", "--seed", 1, "--json", figures, "--page", page)
    models = {model["name"]: model for model in json.loads(figures.read_text())["models"]}
    assert set(models) == {"contrastive", "margin", "energy model"}
    for name in ("contrastive", "margin"):
        model = models[name]
        assert model["score"] > 0.96 and 0 < model["lipschitz"] < 10 and model["median_radius"] > 0.2
        shares = list(model["certified"].values())
        assert len(shares) == 3 and model["score"] >= shares[0] > shares[1] > shares[2] > 0
    assert models["energy model"]["auroc"]["mirrored"] > 0.75
    html = page.read_text()
    assert all(word in html for word in ("contrastive", "Certified accuracy", "First-layer filters", "data:image/png"))
    assert "certified accuracy at 0.25" in output


def test_train_then_evaluate_gives_the_same_figures(tmp_path):
    model, first, second = tmp_path / "m.safetensors", tmp_path / "1.json", tmp_path / "2.json"
    run("train", "digits", "--epochs", 3, "--hidden", "20,10", "-o", model, "--json", first)
    run("evaluate", model, "digits", "--json", second)
    one, two = (json.loads(file.read_text())["models"][0] for file in (first, second))
    assert lrrn.load(model).hidden_sizes == (20, 10)
    kept = load_reference(model)
    assert len(kept.samples) == 60 and kept.image_shape == (8, 8) and kept.score == one["score"] and len(kept.radii) == 450
    for key in ("score", "lipschitz", "median_radius", "certified"):
        assert one[key] == two[key], key


def test_a_csv_file_with_text_labels(tmp_path, iris):
    model, figures = tmp_path / "m.safetensors", tmp_path / "out.json"
    run("train", iris, "--target", "kind", "-o", model, "--json", figures)
    loaded, result = lrrn.load(model), json.loads(figures.read_text())["models"][0]
    assert len(load_reference(model).samples) == 0 and len(load_reference(model).energies["samples"]) == 38  # not given away
    assert loaded.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert loaded.standardize == "features" and result["norm"] == "scaled"
    assert result["n_samples"] == 38 and result["score"] > 0.85 and set(result["certified"]) == {"0.1", "0.25", "0.5"}


def test_an_npz_file_for_a_regressor_and_an_energy_model(tmp_path):
    X, y = load_diabetes(return_X_y=True)
    data, figures = tmp_path / "d.npz", tmp_path / "out.json"
    np.savez(data, X=X, y=y)
    run("train", data, "--model", "regressor", "--epochs", 3, "-o", tmp_path / "r.safetensors", "--json", figures)
    result = json.loads(figures.read_text())["models"][0]
    widths = list(result["half_width"].values())
    assert 0 < widths[0] < widths[1] < widths[2] and result["certified"] == {}
    run("train", data, "--model", "energy", "--epochs", 3, "-o", tmp_path / "e.safetensors", "--json", figures)
    assert json.loads(figures.read_text())["models"][0]["score"] is None
    run("evaluate", tmp_path / "e.safetensors", data)


ESTIMATORS = {"classifier": lrrn.LRRNClassifier, "regressor": lrrn.LRRNRegressor, "energy": lrrn.LRRNEnergyModel}


def test_every_parameter_of_the_estimators_is_an_option_of_train():
    known = {name for estimator in ESTIMATORS.values() for name in estimator().get_params()}
    command = typer.main.get_command(app).commands["train"]
    options = {option for argument in command.params for option in argument.opts}
    missing = {name for name in known if "--" + name.replace("_", "-") not in options}
    assert missing == set(NOT_OPTIONS)
    table = {parameter.name: parameter for group in PARAMETERS.values() for parameter in group}
    for name, parameter in table.items():
        assert {kind for kind, estimator in ESTIMATORS.items() if name in estimator().get_params()} == {*parameter.kinds}, name
    assert {name: {*table[name].choices} for name in ("objective", "init", "dtype", "optimizer", "schedule", "on_failure")} == {
        "objective": {*OBJECTIVES},
        "init": {"glorot", "orthogonal", "uniform"},
        "dtype": {"float32", "float64"},
        "optimizer": {"sgd", "adam", "adamw"},
        "schedule": {name or "none" for name in SCHEDULES},
        "on_failure": {*ON_FAILURE},
    }
    assert {*options_of_commands.METHODS} == {*METHODS, "energy"}
    assert {"--hidden", "--seed"} <= options  # shorter names


def test_parameters_reach_the_estimator(tmp_path):
    model, data = tmp_path / "m.safetensors", tmp_path / "d.npz"
    X, y = lrrn.datasets.load("digits", "test")
    np.savez(data, X=X[:200], y=y[:200])
    given = {
        "hidden_sizes": "6,5", "objective": "margin", "beta": "1,0.5,0", "gamma": "0.25", "constraint": "0,2",
        "init": "uniform", "optimizer": "adamw", "schedule": "none", "decoupled_weight_decay": "0.001", "margin": "0.2,0.4",
        "temperature": "0.2", "adversarial_eps": "0.01", "max_weight_norm": "3",
        "class_weight": ",".join(f"{label}=1.5" for label in range(10)),
        "n_iter_no_change": "3", "validation_fraction": "0.2", "max_sweeps": "500", "tol": "0.001", "on_failure": "raise",
        "dtype": "float64", "shifts": "1", "epochs": "1", "random_state": "7", "standardize": "common", "max_seconds": "600",
    }  # fmt: skip
    options = [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), value)]
    run("train", data, *options, "--early-stopping", "--no-reuse-activations", "--flips", "-o", model)
    found = lrrn.load(model).get_params()
    wanted = {
        "hidden_sizes": (6, 5), "objective": "margin", "beta": (1.0, 0.5, 0.0), "gamma": 0.25, "constraint": (0.0, 2.0),
        "init": "uniform", "optimizer": "adamw", "schedule": None, "decoupled_weight_decay": 0.001, "margin": (0.2, 0.4),
        "temperature": 0.2, "adversarial_eps": 0.01, "max_weight_norm": 3.0, "class_weight": dict.fromkeys(range(10), 1.5),
        "n_iter_no_change": 3, "validation_fraction": 0.2, "max_sweeps": 500, "tol": 0.001, "on_failure": "raise",
        "dtype": "float64", "shifts": 1, "epochs": 1, "random_state": 7, "early_stopping": True, "reuse_activations": False,
        "standardize": "common", "max_seconds": 600.0, "flips": True,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


def test_tables_are_scaled_by_feature_and_images_as_a_whole_if_at_all(tmp_path, iris):
    model, image = tmp_path / "m.safetensors", tmp_path / "images.npz"
    X, y = lrrn.datasets.load("digits", "test")
    np.savez(image, X=X[:100], y=y[:100])
    quick = ("--epochs", 1, "--hidden", "4", "-o", model, "--overwrite")
    for data, options, wanted in (
        (image, (), "features"),
        (image, ("--image", "8x8"), False),
        (image, ("--standardize", "none"), False),
        (iris, ("--target", "kind", "--image", "2x2"), True),
    ):
        output = run("train", data, *options, *quick)
        assert lrrn.load(model).standardize == wanted
        assert ("norm of perturbations" in words(output)) == (wanted == "features")
    done = runner.invoke(app, ["train", str(iris), "--target", "kind", "--standardize", "each", "-o", str(tmp_path / "x")])
    assert done.exit_code == 2 and "features, common or none" in words(done.output)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_parameters_not_given_keep_the_estimators_defaults(tmp_path, kind):
    model = tmp_path / "m.safetensors"
    run("train", "digits", "--model", kind, "--epochs", 1, "-o", model)
    changed = {"epochs": 1, "random_state": 0, "device": "cpu", "verbose": 1}
    found, defaults = lrrn.load(model).get_params(), ESTIMATORS[kind]().get_params()
    different = {name for name, value in defaults.items() if found[name] != value}
    assert different <= set(changed)


def test_devices_are_those_of_the_library(monkeypatch):
    assert device_name("cpu") == "cpu" and device_name("auto") == str(choose_device("auto"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_name(name) for name in ("auto", "cuda", "cuda:1")] == ["cuda", "cuda", "cuda:1"]
    for name in ("cuda:2", "cuda:x", "gpu"):
        with pytest.raises(ValueError, match=f"device {name!r}"):
            choose_device(name)
        with pytest.raises(typer.BadParameter, match=f"device {name!r}"):
            device_name(name)


def test_ctrl_c_leaves_a_checkpoint_and_resume_ends_where_an_undisturbed_run_does(tmp_path):
    command = [sys.executable, "-m", "lrrn", "train", "digits", "--epochs", "12", "--batch-size", "2", "--optimizer", "sgd"]
    command += ["--learning-rate", "0.05"]
    state, model, whole = tmp_path / "run.ckpt", tmp_path / "m.safetensors", tmp_path / "whole.safetensors"
    stopped = subprocess.Popen([*command, "-o", model, "--checkpoint", state], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not state.exists() and stopped.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    stopped.send_signal(signal.SIGINT)
    _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == 130 and "--resume continues from" in errors
    assert not model.exists()
    environment = {**os.environ, "COLUMNS": "200"}
    subprocess.run([*command, "-o", model, "--checkpoint", state, "--resume"], check=True, timeout=120, env=environment)
    subprocess.run([*command, "-o", whole], check=True, timeout=120, env=environment)
    resumed, undisturbed = lrrn.load(model).network_, lrrn.load(whole).network_
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), undisturbed.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--device", "tpu"], "unknown device 'tpu'; use 'auto', 'cpu' or 'cuda'"),
        (["demo", "--json", "/no/such/folder/out.json"], "the folder /no/such/folder does not exist; make it first"),
        (["bench", "--device", "cuda"], "runs on the CPU so far"),
        (["bench", "--repeats", "0"], "--repeats"),
        (["bench", "--suite", "nap"], "unknown suite 'nap'; use solve, depth, grad, train, certify, scaling or all"),
        (["train", "cifar"], "unknown data 'cifar'; use one of digits, mnist"),
        (["train", "digits", "--hidden", "64x64"], "--hidden-sizes should be numbers separated by commas; got '64x64'"),
        (["train", "digits", "--resume"], "--resume needs --checkpoint"),
        (["train", "digits", "--model", "regressor", "--pretrain-epochs", "2"], "--pretrain-epochs does not apply to"),
        (["train", "digits", "--model", "energy", "--objective", "margin"], "--objective does not apply to --model energy"),
        (["train", "digits", "--contamination", "0.2"], "--contamination does not apply to --model classifier"),
        (["train", "digits", "--margin", "1,2,3"], "--margin should be a number, or two separated by a comma; got '1,2,3'"),
        (["train", "digits", "--class-weight", "2,3"], "--class-weight should be balanced, or LABEL=WEIGHT,LABEL=WEIGHT"),
        (["train", "digits", "--eps", "-1"], "--eps needs finite sizes of at least 0; got -1"),
        (["train", "digits", "--eps", "inf"], "--eps needs finite sizes of at least 0; got inf"),
        (["train", "digits", "--eps", "0.1,0.5"], "--eps should be one size above 0 here; got 0.1,0.5"),
        (["train", "digits", "--eps", "0"], "--eps should be one size above 0 here; got 0"),
        (["train", "digits", "--eps", "0.1", "--model", "energy"], "--eps does not apply to --model energy"),
        (["train", "digits", "--eps", "foo"], "--eps should be numbers separated by commas; got 'foo'"),
        (["train", "digits", "--objective", "hinge"], "--objective should be one of contrastive, margin, cross_entropy"),
        (["train", "digits", "--optimizer", "sdg"], "--optimizer should be one of sgd, adam, adamw; got 'sdg'"),
        (["train", "digits", "--schedule", "linear"], "--schedule should be one of cosine, one_cycle, none; got 'linear'"),
        (["train", "digits", "--constraint", "cube"], "--constraint should be free, nonneg, box or LOW,HIGH; got 'cube'"),
        (["train", "digits", "--drop", "a"], "--drop is for tables in files; digits is a named data set"),
        (["train", "digits", "--delimiter", ";"], "--delimiter is for tables in files; digits is a named data set"),
        (["train", "t.csv", "--delimiter", "xy"], "--delimiter: a delimiter is one character"),
        (["train", "digits", "--image", "8"], "--image should be HEIGHTxWIDTH, such as 28x28, or 3xHEIGHTxWIDTH for colour"),
        (["train", "digits", "--image", "2x4x8"], "such as 3x32x32; got '2x4x8'"),
        (
            ["train", "digits", "--image-shape", "1,8,8", "--image", "4x16"],
            "takes images of 1x8x8, channels first, and --image is 4x16",
        ),
        (["evaluate", "m", "digits", "--split", "valid"], "--split should be one of train, test; got 'valid'"),
        (["certify", "m", "digits", "--method", "magic"], "--method should be one of auto, paper, pairwise"),
        (["attack", "m", "digits", "--clip", "1,0"], "--clip should be two numbers, the smaller one first; got '1,0'"),
        (["predict", "m", "digits", "--eps", "1,2"], "--eps should be one size here; got 1,2"),
        (["train", "digits", "--seed", "-1"], "--seed"),
        (["demo", "--seed", str(2**32)], "4294967295"),
        (["train", "digits", "--random-state", str(2**32)], "4294967295"),
        (["models", "--device", "foo"], "unknown device 'foo'; use 'auto', 'cpu' or 'cuda'"),
        (["reproduce", "foo"], "there is no 'foo' to reproduce; use one of table1, table2"),
        (["record", "foo"], "there is no record on 'foo'; use one of mnist"),
        (["train", "digits", "--target", "foo"], "--target is for tables in files; digits is a named data set"),
        (["certify", "m", "t.csv", "--split", "foo"], "--split is for named data sets; t.csv is a file"),
        (["evaluate", "m", "t.csv", "--split", "test"], "--split is for named data sets; t.csv is a file"),
        (["predict", "m", "digits", "--method", "local"], "got --method local without --radius"),
        (["train", "digits", "-o", "-"], "--output should be the name of a file; it cannot go to standard output"),
        (["train", "digits", "--checkpoint", "-"], "--checkpoint should be the name of a file"),
        (["train", "digits", "--log", "-"], "--log should be the name of a file"),
        (["train", "digits", "--image", "7x9"], "--image should be HEIGHTxWIDTH or 3xHEIGHTxWIDTH with 64 values"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, arguments, terminal_width=200)
    assert done.exit_code == 2
    assert message in words(done.output)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class ReadError(Exception):
    """Data would have been read."""


@pytest.fixture
def unreadable(monkeypatch):
    """Named data sets that are not to be read."""

    def load(*_):
        raise ReadError

    monkeypatch.setattr("lrrn.datasets.load", load)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gamma -1", "gamma must be a positive number; got -1.0"),
        ("--gamma nan", "gamma must be a positive number; got nan"),
        ("--learning-rate -1", "learning_rate must be positive; got -1.0"),
        ("--hidden-sizes 0", "hidden_sizes must be positive integers"),
        ("--beta 1,2 --hidden 4,4", "beta needs one finite number >= 0 for each of 3 layers; got (1.0, 2.0)"),
        ("--constraint 1,0", "an interval needs two numbers lo <= hi"),
        ("--tol 0", "tol must be a positive number, or None for the default; got 0.0"),
        ("--validation-fraction 1", "validation_fraction must lie between 0 and 1; got 1.0"),
        ("--decoupled-weight-decay 0.1", "decoupled_weight_decay belongs to optimizer='adamw'"),
        ("--pretrain-epochs 1 --pretrain-learning-rate 0", "learning_rate must be positive; got 0.0"),
        ("--objective margin --temperature 0", "temperature must be a number, or a pair"),
        ("--eps 1 --temperature 0", "temperature must be a number, or a pair"),
        ("--eps 1 --objective contrastive", "eps trains with objective 'margin'; got objective='contrastive'"),
        ("--conv 2,9 --image 8x8", "a kernel of 9 x 9 is larger than its images of 8 x 8"),
        ("--model regressor --objective margin", "unknown objective 'margin'"),
        ("--model regressor --max-output-norm -1", "needs bounds of at least 0; got -1.0"),
        ("--model energy --contamination 0.7", "contamination must be a number in (0, 0.5]; got 0.7"),
        ("--model energy --hidden 4,4 --beta 1,1,0", "beta needs one finite number >= 0 for each of 2 layers"),
    ],
)
def test_values_that_an_estimator_refuses_are_refused_before_data_are_read(options, message, unreadable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, ["train", "mnist", *options.split()], terminal_width=200)
    assert done.exit_code == 2 and message in words(done.output), done.output


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--eps 1 --decoupled-weight-decay 0.1 --temperature 0.2",
        "--model energy --hidden 4,4 --beta 1,1 --contamination 0.5",
        "--model regressor --eps 1 --max-output-norm 2",
        "--eps 1 --beta 1,0",
        "--conv 2,3 --hidden 4 --beta 1,1,0",
        "--objective semi_supervised --pretrain-epochs 2 --tol 1e-9",
    ],
)
def test_values_that_an_estimator_takes_lead_to_the_data(options, unreadable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, ["train", "mnist", *options.split()], terminal_width=200)
    assert isinstance(done.exception, ReadError), done.output


@pytest.mark.parametrize("command", ["train", "evaluate", "certify", "attack"])
def test_help_says_in_which_units_the_sizes_of_perturbations_are(command):
    options = typer.main.get_command(app).commands[command].params
    (text,) = (option.help for option in options if "--eps" in option.opts)
    assert "standard deviations of the features" in text and "units of the data" in text


def test_a_checkpoint_is_not_replaced_by_accident(tmp_path, iris, monkeypatch):
    monkeypatch.chdir(tmp_path)  # messages break long paths
    state, quick = Path("run.ckpt"), ("--target", "kind", "--epochs", 1, "--hidden", 4)
    run("train", iris, *quick, "-o", "1", "--checkpoint", state)
    before = state.read_bytes()
    arguments = ["train", iris, *quick, "-o", "2", "--checkpoint", state, "--seed", 1]
    done = runner.invoke(app, [str(argument) for argument in arguments], terminal_width=200)
    assert done.exit_code == 2 and state.read_bytes() == before and not Path("2").exists()
    message = words(done.output)
    assert "run.ckpt exists already" in message and "--resume continues it, --overwrite replaces it" in message
    run("train", iris, *quick, "-o", "2", "--checkpoint", state, "--resume")
    run(*arguments, "--overwrite")
    assert state.read_bytes() != before


def test_a_linear_model_that_is_chosen_leaves_no_log_and_says_so(tmp_path, iris):
    state, log = tmp_path / "run.ckpt", tmp_path / "run.jsonl"
    options = ("--target", "kind", "--eps", 0.3, "--epochs", 9, "--log", log, "--checkpoint", state)
    output = run("train", iris, *options, "-o", tmp_path / "m")
    assert lrrn.load(tmp_path / "m").hidden_sizes is None and lrrn.load(tmp_path / "m").network_.sizes == (4, 3)
    assert not log.exists() and not state.exists()
    assert words(output).count("a linear model was chosen for --eps, without epochs: no log or checkpoint was written") == 1
    output = run("train", iris, *options, "-o", tmp_path / "n", "--hidden", 4)
    assert log.exists() and state.exists() and "linear model" not in output


def test_problems_with_files_are_told_in_one_line(tmp_path, iris, monkeypatch):
    monkeypatch.delenv("LRRN_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("lrrn.datasets.download.MIRRORS", {"mnist": ()})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(b"no model")
    for arguments, message in (
        (["train", "missing.csv"], "there is no file missing.csv"),
        (["train", "mnist"], "set LRRN_DATA"),
        (["train", str(iris)], "column 'kind' holds 'setosa', which is no number"),
        (["evaluate", "bad.safetensors", "digits"], "bad.safetensors"),
        (["evaluate", "missing.safetensors", "digits"], "no file missing.safetensors"),
    ):
        done = runner.invoke(app, arguments, terminal_width=200)
        assert done.exit_code == 1 and message in done.output and len(done.output.splitlines()) == 1, done.output


def test_a_saved_model_is_not_replaced_by_accident_nor_evaluated_on_other_features(tmp_path, iris):
    model = tmp_path / "m.safetensors"
    run("train", "digits", "--epochs", 1, "--hidden", "12", "-o", model)
    content = model.read_bytes()
    done = runner.invoke(app, ["train", "digits", "-o", str(model)], terminal_width=200)
    assert done.exit_code == 2 and "exists already" in words(done.output) and model.read_bytes() == content
    done = runner.invoke(app, ["evaluate", str(model), str(iris), "--target", "kind"], terminal_width=200)
    assert done.exit_code == 2 and "4 features" in words(done.output)
    run("train", "digits", "--epochs", 1, "--hidden", "12", "-o", model, "--overwrite", "--seed", 1)
    assert model.read_bytes() != content


@pytest.mark.parametrize(("standardize", "norm"), [("common", "euclidean"), ("features", "scaled")])
def test_certify_and_attack_agree_on_a_standardized_model_in_its_norm(tmp_path, iris, standardize, norm):
    model, proven, attacked, page = (tmp_path / name for name in ("m.safetensors", "c.json", "a.json", "a.html"))
    run("train", iris, "--target", "kind", "--epochs", 20, "--hidden", "8", "--standardize", standardize, "-o", model)
    common = (model, iris, "--target", "kind", "--limit", 120, "--eps", "0.1,0.5", "--method", "spectral")
    output = run("certify", *common, "--json", proven, "--page", tmp_path / "c.html")
    one = json.loads(proven.read_text())
    loaded, table = lrrn.load(model), np.genfromtxt(iris, delimiter=",", skip_header=1, usecols=(0, 1, 3, 4))[:120]
    assert (
        "120 samples" in output and one["n_samples"] == 120 and one["method"] == "spectral" and one["guarantee"] == "deployed"
    )
    assert one["norm"] == norm and f"{norm} norm" in output and "norm of the perturbation" in words(output)
    assert one["samples"]["radius"] == loaded.certified_radius(table, "spectral").tolist()
    assert "polyline" in (tmp_path / "c.html").read_text()
    output = run("attack", *common, "--steps", 10, "--restarts", 2, "--json", attacked, "--page", page)
    two = json.loads(attacked.read_text())
    right = np.array(two["samples"]["right"])
    radius, distance = (np.array(two["samples"][key], dtype=float) for key in ("radius", "distance"))
    assert two["samples"]["radius"] == one["samples"]["radius"] and two["refuted"] == []
    assert (distance[right] >= radius[right]).all() and (distance[~right] == 0).all() and "120 samples" in output
    for size in ("0.1", "0.5"):
        assert two["certified"][size] == one["certified"][size] == np.mean(right & (radius > float(size)))
        assert two["attacked"][size] == np.mean(distance > float(size))
        assert two["accuracy"] >= two["attacked"][size] >= two["certified"][size]
        assert two["gap"][size] == pytest.approx(two["attacked"][size] - two["certified"][size])
    # attacks come within a small factor of what is proven, so the units are the same
    assert np.median(distance[right] / radius[right]) < 5
    html = page.read_text()
    assert html.count("<polyline") == 4 and all(name in html for name in ("clean", "under attack", "certified", "gap"))


def test_attack_keeps_images_in_their_range(tmp_path):
    model, figures = tmp_path / "m.safetensors", tmp_path / "out.json"
    run("train", "digits", "--epochs", 2, "--hidden", "12", "-o", model)
    run("attack", model, "digits", "--limit", 20, "--steps", 5, "--restarts", 1, "--clip", "0,1", "--json", figures)
    result = json.loads(figures.read_text())
    assert result["n_samples"] == 20 and result["attacks"]["clip"] == [0.0, 1.0] and result["refuted"] == []


def test_certify_takes_class_energies_and_attack_refuses_them(tmp_path):
    energies, model = tmp_path / "c.safetensors", tmp_path / "e.safetensors"
    run("train", "digits", "--objective", "class_energy", "--epochs", 1, "--hidden", "8", "-o", energies)
    run("train", "digits", "--model", "energy", "--epochs", 1, "--hidden", "8", "-o", model)
    assert "certified" in run("certify", energies, "digits")
    done = runner.invoke(app, ["attack", str(energies), "digits"], terminal_width=200)
    assert done.exit_code == 1 and "'class_energy': it predicts by energies" in words(done.output)
    done = runner.invoke(app, ["attack", str(model), "digits"], terminal_width=200)
    assert done.exit_code == 2 and "holds a LRRNEnergyModel; only a classifier" in words(done.output)


def test_a_refuted_certificate_is_an_error(tmp_path, monkeypatch):
    model = tmp_path / "m.safetensors"
    run("train", "digits", "--epochs", 2, "--hidden", "8", "-o", model)
    real = lrrn.LRRNClassifier.certificate
    monkeypatch.setattr(
        lrrn.LRRNClassifier, "certificate", lambda self, X, *rest: replace(real(self, X, *rest), radius=np.full(len(X), 100.0))
    )
    done = runner.invoke(app, ["attack", str(model), "digits", "--limit", "5", "--steps", "3"], terminal_width=200)
    assert done.exit_code == 1 and "inside the certified radius" in words(done.output)


def test_samples_go_to_a_file_and_a_table_need_not_have_labels(tmp_path):
    X, y = lrrn.datasets.load("digits", "test")
    model, table, labels = tmp_path / "m.safetensors", tmp_path / "X.npy", tmp_path / "y.npy"
    np.save(table, X)
    np.save(labels, y)
    run("train", "digits", "--epochs", 1, "--hidden", "8", "-o", model)
    loaded, figures = lrrn.load(model), tmp_path / "f.json"
    run("certify", model, table, "--target", labels, "--samples", tmp_path / "c.npz", "--json", figures, "--limit", 50)
    result = json.loads(figures.read_text())
    with np.load(tmp_path / "c.npz") as found:
        np.testing.assert_array_equal(found["radius"], loaded.certified_radius(X[:50]))
        assert result["n_samples"] == 50 and result["accuracy"] == found["right"].mean() and "samples" not in result
    run("evaluate", model, table, "--samples", tmp_path / "e.npz", "--json", figures)
    assert json.loads(figures.read_text())["models"][0]["score"] is None
    with np.load(tmp_path / "e.npz") as found:
        assert sorted(found.files) == ["energy", "prediction", "radius"]
        np.testing.assert_array_equal(found["prediction"], loaded.predict(X))
        np.testing.assert_array_equal(found["energy"], loaded.energy(X))
    for arguments, code, message in (
        (["attack", model, table], 2, "has no labels to compare predictions with"),
        (["evaluate", model, table, "--samples", tmp_path / "e.txt"], 2, "written as .npz or .parquet"),
        (["certify", model, table, "--samples", tmp_path / "c.csv"], 2, "written as .npz or .parquet"),
        (["evaluate", model, table, "--samples", "/no/such/folder/e.npz"], 2, "folder /no/such/folder does not exist"),
    ):
        done = runner.invoke(app, [str(argument) for argument in arguments], terminal_width=200)
        assert done.exit_code == code and message in words(done.output), done.output


@pytest.mark.parametrize("command", ["certify", "evaluate", "attack", "train"])
def test_what_is_read_is_not_written_over(tmp_path, command):
    """A result under the name of the data, or two results under one name, even by way of a link."""
    X, y = lrrn.datasets.load("digits", "test")
    data, model, link = tmp_path / "data.npz", tmp_path / "model.safetensors", tmp_path / "link.npz"
    np.savez(data, X=X[:20], y=y[:20])
    lrrn.save(lrrn.LRRNClassifier(hidden_sizes=(4,), epochs=1).fit(X[:100], y[:100]), model)
    link.symlink_to(data)
    before = data.read_bytes(), model.read_bytes()
    first = [str(data), "-o", str(tmp_path / "new")] if command == "train" else [str(model), str(data)]
    twice = ["--json", str(tmp_path / "same"), "--page", str(tmp_path / "same")]
    for given in (["--json", str(data)], ["--page", str(link)], twice, ["--json", first[0]]):
        done = CliRunner().invoke(app, [command, *first, *given], terminal_width=400)
        assert done.exit_code == 2 and "give it another name" in done.output, done.output
    assert (data.read_bytes(), model.read_bytes()) == before and not (tmp_path / "same").exists()
    assert CliRunner().invoke(app, [command, *first, "--json", "/dev/null", "--page", "/dev/null"]).exit_code == 0


@pytest.mark.parametrize("command", [["demo"], ["bench", "--quick"]])
def test_two_results_do_not_go_to_one_place(tmp_path, command):
    same = str(tmp_path / "same")
    done = CliRunner().invoke(app, [*command, "--json", same, "--page", same], terminal_width=400)
    assert done.exit_code == 2 and "give it another name" in done.output and not list(tmp_path.iterdir())


# --- warnings -------------------------------------------------------------------------------------------------------------


def test_warnings_are_lines_that_advise_options(tmp_path):
    X, y = load_iris(return_X_y=True)
    for name, values in (("large", 1000 * X), ("uneven", X * [1000, 1, 1, 1])):
        np.savez(tmp_path / f"{name}.npz", X=values, y=y)
    command = [sys.executable, "-m", "lrrn", "train", "--hidden", "2", "--epochs", "1", "--standardize", "none"]
    for name, advice in (("large", "--standardize common"), ("uneven", "--standardize features")):
        arguments = [*command, tmp_path / f"{name}.npz", "-o", tmp_path / name]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
        (line,) = [line for line in done.stderr.splitlines() if "may train badly" in line]
        assert line.startswith("Warning: the features ") and f": set {advice}, or scale X" in line
        assert ".py" not in done.stderr and "standardize=" not in done.stderr


def test_the_line_of_a_warning_names_options_and_a_caller_in_the_same_process_gets_its_own_format_back():
    usual = warnings.formatwarning
    run("models")
    assert warnings.formatwarning is usual
    text = "max_seconds=2 ended training. Raise max_seconds, or lower epochs so"
    line = "Warning: --max-seconds 2 ended training. Raise --max-seconds, or lower --epochs so\n"
    assert warning_line(UserWarning(text), UserWarning, "a.py", 1) == line
