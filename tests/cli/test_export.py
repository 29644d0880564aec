"""Models as ONNX files on the command line; oracle: the library's own predictions."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.datasets import load_iris
from typer.testing import CliRunner

import lrrn
from lrrn.cli import app


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], terminal_width=300)


def words(done):
    return " ".join(done.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, (X, y) = tmp_path_factory.mktemp("models"), load_iris(return_X_y=True)
    common = dict(hidden_sizes=(6,), epochs=20, standardize="features", random_state=0)
    found = {
        "classifier": lrrn.LRRNClassifier(**common).fit(X, y),
        "energy": lrrn.LRRNEnergyModel(**common).fit(X),
    }
    found["network"] = found["classifier"].network_
    for name, model in found.items():
        lrrn.save(model, folder / name)
    return folder, found


def test_a_file_that_another_runtime_reads(models, tmp_path):
    pytest.importorskip("onnx", reason="writing ONNX needs onnx, of the extra test")
    runtime = pytest.importorskip("onnxruntime", reason="running ONNX needs onnxruntime, of the extra test")
    folder, found = models
    X = load_iris(return_X_y=True)[0]
    ends = ("--lower", ",".join(map(str, X.min(0))), "--upper", ",".join(map(str, X.max(0))))
    done = invoke(
        "export", folder / "classifier", tmp_path / "m.onnx", *ends, "--dtype", "float64", "--error", 1e-5, "--json", "-"
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert max(told["error_bound"]) <= 1e-5 and told["dtype"] == "float64" and told["lower"] == X.min(0).tolist()
    session = runtime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": X})
    np.testing.assert_allclose(y, found["classifier"].decision_function(X), rtol=0, atol=1e-4)
    again = invoke("export", folder / "network", tmp_path / "m.onnx", "--lower", -3, "--upper", 3)
    assert again.exit_code == 2 and "exists already" in words(again)
    done = invoke("export", folder / "network", tmp_path / "m.onnx", "--lower", -3, "--upper", 3, "--overwrite")
    assert done.exit_code == 0 and "iterations in float32; proven error of every output at most" in done.output


@pytest.mark.parametrize(
    ("model", "options", "status", "message"),
    [
        (
            "energy",
            ("--lower", 0, "--upper", 1),
            1,
            "unroll takes an LRRN, an LRRNClassifier or an LRRNRegressor; got LRRNEnergyModel",
        ),
        ("classifier", ("--lower", "0,1", "--upper", 1), 1, "one for each of 4 features"),
        ("classifier", ("--lower", 2, "--upper", 1), 2, "lower must not exceed upper"),
        (
            "classifier",
            ("--lower", "0,1", "--upper", "1,2,3"),
            2,
            "lower must be a finite number, or one for each of 3 features",
        ),
        ("classifier", ("--lower", 0, "--upper", 1, "--error", 1e-12), 1, "cannot be proven in torch.float32"),
        ("classifier", ("--lower", 0, "--upper", 1, "--error", 0), 2, "--error should be a positive number"),
        ("classifier", ("--lower", "a", "--upper", 1), 2, "--lower should be numbers separated by commas"),
        ("classifier", ("--lower", 0, "--upper", 1, "--dtype", "float16"), 2, "--dtype should be one of float32, float64"),
        ("missing", ("--lower", 0, "--upper", 1), 1, "no file"),
    ],
)
def test_what_cannot_be_exported_is_told(models, tmp_path, model, options, status, message):
    done = invoke("export", models[0] / model, tmp_path / "m.onnx", *options)
    assert done.exit_code == status and message in words(done)
    assert not (tmp_path / "m.onnx").exists()
