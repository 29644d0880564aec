"""The reproduction: its set-up is the paper's, verdicts are computed, runs continue, and what is missing is said to be."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from dataclasses import asdict, replace
from threading import Barrier

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lrrn import datasets
from lrrn.cli import app
from lrrn.studies.common import pool
from lrrn.studies.common.report import summary, write_results
from lrrn.studies.common.runs import DATA, DECAYS, FULL, QUICK, Run, Scale, execute, finished, is_trained, train
from lrrn.studies.common.sections import MET, MISSED, NO_TARGET, NOT_RUN, OURS, Comparison, Results, Section
from lrrn.studies.paper import decay_tables, filters, learning_curves, pretraining, reproduce, reproduction, table1
from sleepers import sleeps

TINY = Scale(epochs=2, pretrain_epochs=1, margin_epochs=1, seeds=2, samples=60, tests=20, closely=2, bound_seconds=0.2)


def write_idx(path, array):
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(head + array.astype(np.uint8).tobytes())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Small files in place of the real ones; KMNIST has no training images."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, place in datasets.FOLDERS.items():
        (folder / place / "raw").mkdir(parents=True)
        for split, n in (("train", 60), ("test", 20)):
            labels = np.arange(n) % 10
            images = np.clip(rng.normal(20 * labels[:, None, None], 40, (n, 28, 28)), 0, 255)
            stems = datasets.FILES[split]
            if (name, split) != ("kmnist", "train"):
                write_idx(folder / place / "raw" / stems[0], images)
            write_idx(folder / place / "raw" / stems[1], labels)
    return folder


# --- the plan -------------------------------------------------------------------------------------------------------------


def test_the_set_up_is_the_papers():
    energy = Run("energy", "mnist").estimator().get_params()
    assert energy["hidden_sizes"] == (32, 32) and energy["learning_rate"] == 0.005 and energy["epochs"] == 100
    for data, rate in (("mnist", 0.4), ("kmnist", 0.4), ("fashion_mnist", 0.1)):
        supervised = Run("contrastive", data, decay=5e-4).estimator().get_params()
        assert supervised["hidden_sizes"] == (64, 64) and supervised["learning_rate"] == rate
        assert supervised["weight_decay"] == 5e-4 and supervised["objective"] == "contrastive"
        assert supervised["pretrain_epochs"] == 0
        for params in (energy, supervised):
            assert params["gamma"] == 1 / 8 and params["beta"] == 1.0 and params["batch_size"] == 10
            assert params["optimizer"] == "sgd" and params["schedule"] is None
    pretrained = Run("pretrained", "mnist", decay=5e-5).estimator().get_params()
    assert pretrained["pretrain_epochs"] == 20 and pretrained["pretrain_learning_rate"] == 0.005


def test_every_table_has_its_rows_and_no_run_is_planned_twice():
    wanted = [run for runs, _ in reproduction._PARTS.values() for run in runs(FULL)]
    names = {run.name for run in wanted}
    assert len(names) == len(set(wanted))
    for decay in DECAYS:
        assert {f"contrastive-mnist-{decay:g}-seed{seed}" for seed in range(3)} <= names
        assert f"contrastive-kmnist_7011-{decay:g}-seed0" in names
    assert {f"energy-{data}-{units}-seed0" for data in DATA for units in ("free", "nonneg", "box")} <= names
    assert {f"pretrained-{data}-5e-05-seed0" for data in DATA} <= names
    assert all(run.closely == 0 for run in wanted if run.seed > 0)


def test_table_1_is_read_as_transposed():
    assert table1.settled("mnist", "kmnist") == (59.5, 24.1)
    assert table1.settled("kmnist", "mnist") == (26.4, 6.0)
    assert table1.settled("fashion_mnist", "mnist") == (35.9, 8.3)
    assert table1.settled("mnist", "mnist") == (13.7, 5.1)
    assert table1.settled("kmnist", "mirrored") == (43.8, 15.6)


# --- verdicts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paper", "ours", "target", "verdict"),
    [
        (1.0, (1.05,), {"within": 0.05}, MET),
        (1.0, (1.051,), {"within": 0.05}, MISSED),
        (1.0, (0.949,), {"within": 0.05}, MISSED),
        (1.0, (0.9, 1.1), {"within": 0.05}, MET),  # the mean counts
        (0.972, (0.968,), {"below": 0.004}, MET),
        (0.972, (0.9679,), {"below": 0.004}, MISSED),
        (0.972, (0.999,), {"below": 0.004}, MET),
        (0.972, (), {"below": 0.004}, NOT_RUN),
        (None, (1.0,), {"within": 0.05}, OURS),
        (1.0, (7.0,), {}, NO_TARGET),
    ],
)
def test_verdicts(paper, ours, target, verdict):
    assert Comparison("row", "what", paper, ours, **target).verdict == verdict


def test_reasons_are_told_once_and_only_where_they_matter():
    rows = [Comparison("a", q, 1.0, (), within=0.1, note="no images") for q in "xy"]
    rows += [Comparison("b", "x", 1.0, (1.0,), within=0.1, note="never told")]
    assert Section("", comparisons=rows).remarks() == ["Not run, no images: a."]
    assert summary([Section("", comparisons=rows)]) == "Targets: 1 met, 0 missed, 2 not run."
    assert rows[2].cells() == ["b", "x", "1.000", "1.000", "-", "+0.0 %", MET]
    assert Comparison("c", "x", 0.9, (0.91, 0.93), below=0.1).cells()[4:] == ["0.910 to 0.930", "+2.00 points", MET]


# --- runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["energy", "contrastive", "pretrained", "margin"])
def test_a_run_leaves_its_results_and_is_not_repeated(kind, root, tmp_path):
    run = Run(kind, "mnist", decay=5e-5 if kind in ("contrastive", "pretrained") else 0.0, scale=TINY)
    result = execute(run, tmp_path / run.name, root)
    assert finished(run, tmp_path / run.name) == json.loads(json.dumps(result))
    assert result["run"] == asdict(run) and result["samples"] == 60 and result["tests"] == 20
    before = (tmp_path / run.name / "result.json").stat().st_mtime_ns
    assert execute(run, tmp_path / run.name, root) == json.loads(json.dumps(result))
    assert (tmp_path / run.name / "result.json").stat().st_mtime_ns == before
    assert finished(replace(run, seed=5), tmp_path / run.name) is None  # another run's results do not count
    figures = result["figures"]
    if kind == "energy":
        assert set(figures) == {"mnist", "kmnist", "fashion_mnist", "mirrored", "gaussian"}
        assert figures["mnist"]["mean without 1/2"] == 2 * figures["mnist"]["mean"]
        assert figures["mnist"]["auroc"] == pytest.approx(0.5)
        return
    assert result["history"][-1]["test_accuracy"] == figures["accuracy"]
    assert figures["delta"] == pytest.approx(figures["median margin"] / (2**0.5 * figures["rho"]))
    radii = figures["radii"]
    assert radii["paper"]["median"] <= radii["pairwise"]["median"] <= radii["multiplier"]["median"]
    assert (tmp_path / run.name / "pretrained.npy").is_file() == (kind == "pretrained")
    if run.closely:
        close = figures["closely"]
        assert close["images"] == 2 and close["attack"]["inside a radius"] == 0
        assert close["radii"]["local"]["median"] >= close["radii"]["multiplier"]["median"]


def test_an_interrupted_run_continues_to_the_same_result(root, tmp_path, monkeypatch):
    run = Run("pretrained", "fashion_mnist", decay=5e-5, scale=replace(TINY, closely=0, epochs=3))
    whole = execute(run, tmp_path / "whole", root)
    measure = "lrrn.studies.common.runs.measure_classifier"

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(measure, stop)
        with pytest.raises(KeyboardInterrupt):
            execute(run, tmp_path / "parts", root)
    assert not (tmp_path / "parts" / "result.json").exists()
    again = execute(run, tmp_path / "parts", root)
    assert again["figures"] == whole["figures"]
    assert [record["loss"] for record in again["history"]] == [record["loss"] for record in whole["history"]]


# --- reports --------------------------------------------------------------------------------------------------------------


def test_the_report_compares_what_was_run_and_names_what_was_not(root, tmp_path):
    done = [Run("contrastive", "mnist", decay=5e-5, seed=seed, scale=TINY) for seed in range(2)]
    done += [Run("pretrained", "mnist", decay=5e-5, scale=TINY), Run("energy", "mnist", scale=TINY)]
    by_run = {run: execute(run, tmp_path / run.name, root) for run in done}
    missing = {Run("energy", "kmnist", scale=TINY): "no images"}

    def array(run, what):
        path = tmp_path / run.name / f"{what}.npy"
        return np.load(path) if path.is_file() else None

    results = Results(by_run, missing, array)
    parts = [decay_tables.sections(5e-5, results, TINY), learning_curves.sections(results, TINY)]
    parts += [pretraining.sections(results, TINY), filters.sections(results, TINY), table1.sections(results, TINY)]
    sections = [section for part in parts for section in part]
    reproduction.report.write(tmp_path / "out", sections, ["Some words."])
    text = (tmp_path / "out" / "report.md").read_text()
    accuracy = np.mean([by_run[run]["figures"]["accuracy"] for run in done[:2]])
    assert f"| MNIST | accuracy | 0.9720 | {accuracy:.4f} |" in text
    assert "Not run, no images: trained on KMNIST, tested on MNIST; trained on KMNIST, tested on KMNIST;" in text
    files = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"supervised-loss.svg", "pretrained-accuracy.svg", "filters-pretrained-mnist-before.png"} <= files
    assert "filters-energy-mnist-nonneg.png" in files and "filters-energy-kmnist-nonneg.png" not in files
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<img") == len(files) and 'src="figures' not in page


def test_results_have_a_line_for_each_run(tmp_path):
    content = {
        "item": "all",
        "comparisons": [{"row": "a"}, {"row": "b"}],
        "not run": {},
        "runs": {"x": {"loss": [1, 2]}, "y": {}},
    }
    write_results(tmp_path / "results.json", content)
    text = (tmp_path / "results.json").read_text()
    assert json.loads(text) == content
    assert '\n{"row": "b"}\n' in text and '\n"x": {"loss": [1, 2]},\n' in text


def test_the_command_runs_in_processes_and_continues(root, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "QUICK", replace(TINY, seeds=1, closely=0))
    places = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "out"), "--json", str(tmp_path / "r.json")]
    command = ["reproduce", "learning-curves", "--quick", "--no-download", "--data", str(root), *places]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    content = json.loads((tmp_path / "r.json").read_text())
    assert set(content["runs"]) == {"contrastive-mnist-5e-05-seed0", "contrastive-fashion_mnist-5e-05-seed0"}
    verdicts = {row["row"]: row["verdict"] for row in content["comparisons"]}
    assert verdicts["KMNIST"] == NOT_RUN and verdicts["MNIST"] in (MET, MISSED)
    assert "the images of KMNIST are not at hand: KMNIST." in first.output
    (tmp_path / "work" / "quick" / "contrastive-mnist-5e-05-seed0" / "result.json").unlink()
    report = CliRunner().invoke(app, [*command, "--report-only"])
    assert report.exit_code == 0 and "Not run, not finished: MNIST." in report.output
    assert set(json.loads((tmp_path / "r.json").read_text())["runs"]) == {"contrastive-fashion_mnist-5e-05-seed0"}
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0 and json.loads((tmp_path / "r.json").read_text())["comparisons"] == content["comparisons"]


def test_on_a_device_runs_train_side_by_side_and_are_measured_on_the_cores(root, tmp_path, monkeypatch):
    runs = [Run("contrastive", "mnist", decay=5e-5, seed=seed, scale=replace(TINY, closely=0)) for seed in range(3)]
    alone = {run: execute(run, tmp_path / "alone" / run.name, root) for run in runs}
    monkeypatch.setattr(pool, "choose_device", lambda name: torch.device("cuda"))
    at_once, together = Barrier(3, timeout=60), pool.train
    monkeypatch.setattr(pool, "train", lambda *given: (at_once.wait(), together(*given)))
    assert pool.carry_out(runs, tmp_path / "many", 1, root, "cpu", False) == {}
    for run in runs:
        done = finished(run, tmp_path / "many" / run.name)
        assert done["figures"] == json.loads(json.dumps(alone[run]["figures"]))


def test_runs_in_threads_that_fail_or_are_stopped(root, tmp_path, monkeypatch):
    runs = [Run("contrastive", "mnist", seed=seed, scale=replace(TINY, closely=0, epochs=200)) for seed in range(2)]

    def fails(run, folder, stop):
        if run.seed == 0:
            raise ValueError("no such luck")
        folder.mkdir(parents=True)

    assert pool.in_threads(runs, tmp_path, [(2, fails)], lambda run, folder: folder.is_dir()) == {runs[0]: "no such luck"}

    def interrupted(self):
        if all((tmp_path / "stopped" / run.name / "state.ckpt").is_file() for run in runs):
            raise KeyboardInterrupt

    monkeypatch.setattr(pool._Display, "look", interrupted)
    stages = [(2, lambda run, folder, stop: train(run, folder, root, "cpu", False, stop))]
    arguments = (tmp_path / "stopped", stages, lambda run, folder: is_trained(folder))
    with pytest.raises(KeyboardInterrupt):
        pool.in_threads(runs, *arguments)
    logs = [tmp_path / "stopped" / run.name / "log.jsonl" for run in runs]
    epochs = [len(log.read_text().splitlines()) for log in logs]
    assert all(0 < count < 200 for count in epochs)
    monkeypatch.undo()
    assert pool.in_threads(runs, *arguments) == {}
    assert [len(log.read_text().splitlines()) for log in logs] == [200, 200]


def test_on_a_device_a_stop_reaches_what_is_being_measured_and_what_waits(root, tmp_path, monkeypatch):
    runs = [Run("contrastive", "mnist", seed=seed, scale=replace(TINY, closely=0)) for seed in range(3)]
    monkeypatch.setattr(pool, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(pool, "MOST_ON_DEVICE", 1)
    monkeypatch.setattr(pool, "execute", sleeps)

    def interrupted(self):
        if (tmp_path / runs[0].name / "asleep").is_file():
            raise KeyboardInterrupt

    monkeypatch.setattr(pool._Display, "look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.carry_out(runs, tmp_path, 1, root, "cpu", False)
    assert (tmp_path / runs[0].name / "woken").is_file()
    assert sum((tmp_path / run.name / "asleep").is_file() for run in runs) == 1
    monkeypatch.undo()
    monkeypatch.setattr(pool, "choose_device", lambda name: torch.device("cuda"))
    assert pool.carry_out(runs, tmp_path, 2, root, "cpu", False) == {}
    assert all(finished(run, tmp_path / run.name) is not None for run in runs)


def test_a_run_stops_when_the_command_that_started_it_is_killed(tmp_path):
    begin = (
        "from pathlib import Path; from lrrn.studies.common import pool; from lrrn.studies.common.runs import Run;"
        "from sleepers import sleeps;"
        f"pool.in_processes([Run('contrastive', 'mnist')], Path({str(tmp_path)!r}), 1, sleeps, (), lambda run, folder: False)"
    )
    path = os.pathsep.join(sys.path)
    folder = tmp_path / Run("contrastive", "mnist").name
    folder.mkdir()
    command = subprocess.Popen([sys.executable, "-c", begin], env={**os.environ, "PYTHONPATH": path})
    try:
        wait_for(folder / "asleep")
    finally:
        command.kill()
        command.wait()
    wait_for(folder / "woken")


def wait_for(path, seconds=60):
    """Wait until there is such a file."""
    deadline = time.monotonic() + seconds
    while not path.is_file():
        assert time.monotonic() < deadline, f"no {path.name} after {seconds} s"
        time.sleep(0.1)


def test_a_run_that_fails_is_reported_and_the_others_are_not_lost(root, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "QUICK", replace(TINY, seeds=1, closely=0))
    spoiled = tmp_path / "work" / "quick" / "contrastive-mnist-5e-05-seed0"
    spoiled.mkdir(parents=True)
    (spoiled / "model.safetensors").write_bytes(b"nonsense")
    done = reproduce("learning-curves", tmp_path / "work", tmp_path / "out", quick=True, root=root, download=False)
    assert list(done.failed) == [spoiled.name] and "model.safetensors" in done.failed[spoiled.name]
    rows = {comparison.row: comparison for comparison in done.comparisons}
    assert rows["MNIST"].verdict == NOT_RUN and "failed" in rows["MNIST"].note
    assert rows["FMNIST"].ours


def test_bad_requests_are_refused_before_any_work(root, tmp_path):
    with pytest.raises(ValueError, match="there is no 'table9' to reproduce; use one of table1"):
        reproduce("table9", tmp_path, tmp_path)
    with pytest.raises(ValueError, match="jobs must be at least 1"):
        reproduce("table1", tmp_path, tmp_path, jobs=0)
    with pytest.raises(datasets.DataError, match="none of the data is available"):
        reproduce("table1", tmp_path / "w", tmp_path / "o", quick=True, root=tmp_path, download=False)
    refused = CliRunner().invoke(app, ["reproduce", "table9"])
    assert refused.exit_code == 2 and "'table9'" in refused.output
    assert QUICK.samples is not None and FULL.samples is None
