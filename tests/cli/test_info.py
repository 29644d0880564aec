"""lrrn info says what is here: checked against the packages, files and threads themselves."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version

import pytest
import torch
from typer.testing import CliRunner

import lrrn
from lrrn import datasets
from lrrn.cli import app, info
from lrrn.solvers import SOLVERS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with the images and labels of one split, and the images alone of another."""
    for split, files in datasets.FILES.items():
        for file in files[: 2 if split == "test" else 1]:
            path = tmp_path / "MNIST" / "raw" / f"{file}.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
    monkeypatch.setenv("LRRN_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lrrn.datasets.catalogue.DEBIAN", tmp_path / "nowhere")
    return tmp_path


def test_data_is_found_only_whole_and_nothing_is_fetched(folder):
    found = datasets.find()
    assert found["mnist"]["test"] == folder / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    assert found["mnist"]["train"] is None  # its labels are missing
    assert found["kmnist"] == {"train": None, "test": None, "train_7011": None}
    assert found["fashion_mnist"] == found["cifar10"] == {"train": None, "test": None}
    assert not (folder / "cache").exists()
    assert datasets.find(folder / "elsewhere")["mnist"]["test"] is None


def test_the_command_prints_and_writes_what_is_here(folder):
    file = folder / "info.json"
    done = CliRunner().invoke(app, ["info", "--json", str(file)], terminal_width=200)
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert list(report) == ["versions", "extras", "devices", "solvers", "data", "arithmetic", "threads"]
    assert report["versions"]["lrrn"] == lrrn.__version__ and report["versions"]["python"] == platform.python_version()
    assert report["versions"]["torch"] == version("torch") and report["versions"]["numba"] == version("numba")
    assert report["solvers"]["cpu"] == {"auto": "works, by coordinate_descent", **dict.fromkeys(SOLVERS, "works")}
    assert ("cuda" in report["solvers"]) == torch.cuda.is_available()
    assert report["data"]["mnist"] == {
        "train": None,
        "test": str(folder / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"),
    }
    assert report["threads"]["workers"] == torch.get_num_threads()
    assert report["threads"]["environment"]["LRRN_DATA"] == str(folder)
    assert f"{len(os.sched_getaffinity(0))} cores" in report["devices"]["cpu"]
    for word in ("coordinate_descent", "mnist train", "not found", "holds BLAS to one thread", version("torch")):
        assert word in " ".join(done.output.split()), word


def test_a_solver_that_cannot_run_or_does_not_converge_is_said_to(monkeypatch):
    def refuse(self, x, solver):
        raise ValueError(f"solver {solver!r} cannot run: its kernels are on strike")

    monkeypatch.setattr(lrrn.LRRN, "infer", refuse)
    assert info.gather(device="cpu")["solvers"]["cpu"]["newton"] == "its kernels are on strike"


def test_extras_name_what_is_missing(monkeypatch, folder):
    stated = ["torch>=2.6", 'starlette>=1; extra == "explore"', 'no-such-package>=1; extra == "explore"']
    monkeypatch.setattr(info, "requires", lambda name: stated)
    report = info.gather(device="cpu")
    assert report["extras"]["explore"].startswith("needs ") and "no-such-package" in report["extras"]["explore"]
    assert "pip install 'lrrn[explore]'" in report["extras"]["explore"]
    assert "torch" in report["versions"] and "starlette" not in report["versions"]
    done = CliRunner().invoke(app, ["info", "--device", "cpu"], terminal_width=200)
    assert "'lrrn[explore]'" in " ".join(done.output.split())  # square brackets are no markup
