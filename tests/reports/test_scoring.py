"""Long certifications: saved at intervals and on interrupts, continued to the same bits, shared between processes."""

from __future__ import annotations

import copy
import io
import json
import os
import signal
import subprocess
import sys
import time
from datetime import date

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler
from typer.testing import CliRunner

import lrrn
from lrrn.cli import app
from lrrn.datasets.rows import ArrayRows
from lrrn.learning import progress
from lrrn.reports import audit, scoring
from lrrn.reports.pipelines import PipelineModel, identity_of
from lrrn.reports.scoring import Parts, Share, over_rows
from lrrn.runtime import memory
from lrrn.runtime.interrupts import Terminated, termination_interrupts
from small_estimators import blobs, classifier, curve, energy_model, regressor, weights

N = 203


def numbers(n=N, seed=0):
    return ArrayRows(np.random.default_rng(seed).random((n, 3)), np.arange(n) % 2, "numbers")


def twice(X, y, chunk):
    return {"twice": 2 * X[:, 0], "name": np.array([f"{chunk}"] * len(X))}


def stopped_in(chunk, how=KeyboardInterrupt):
    def work(X, y, at):
        if at == chunk:
            raise how
        return twice(X, y, at)

    return work


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small classifier in a file, and samples of their own."""
    folder = tmp_path_factory.mktemp("saved")
    X, y = blobs()
    model = lrrn.LRRNClassifier(hidden_sizes=(6,), epochs=2, random_state=0, device="cpu").fit(X, y)
    lrrn.save(model, folder / "m.safetensors")
    np.savez(folder / "t.npz", X=np.tile(X, (5, 1)), y=np.tile(y, 5))
    return folder


@pytest.fixture
def small_chunks(monkeypatch, saved):
    """Chunks of ten samples."""
    sizes = lrrn.load(saved / "m.safetensors").network_.sizes
    monkeypatch.setitem(memory.NUMBERS, "cpu", 10 * sum(sizes))


def certified(saved, *options):
    return CliRunner().invoke(app, ["certify", str(saved / "m.safetensors"), str(saved / "t.npz"), *map(str, options)])


# --- saving and continuing --------------------------------------------------------------------------------------------


def test_an_interrupt_keeps_what_is_finished_and_says_how_to_continue(tmp_path):
    rows, out = numbers(), tmp_path / "out.npz"
    for how in (KeyboardInterrupt, Terminated):
        with pytest.raises(how, match=r"what is finished is in .*out\.npz\.parts, and the same command continues"):
            over_rows(rows, 10, stopped_in(7, how), Parts(out, {"model": 1}))
        names = sorted(path.name for path in (tmp_path / "out.npz.parts").glob("*.npz"))
        assert names == ["part-000000000-000000007.npz"] and not out.exists()
    worked = []
    columns = over_rows(rows, 10, lambda X, y, chunk: worked.append(chunk) or twice(X, y, chunk), Parts(out, {"model": 1}))
    assert worked == list(range(7, 21)) and not (tmp_path / "out.npz.parts").exists()
    whole = over_rows(rows, 10, twice)
    for name in ("twice", "name"):
        np.testing.assert_array_equal(columns[name], whole[name])


def test_results_are_saved_at_intervals_even_if_nothing_stops_the_run(tmp_path, monkeypatch):
    clock = iter(range(0, 10**6, 4))
    monkeypatch.setattr(scoring.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(scoring, "PART_SECONDS", 11.0)
    seen = []

    def work(X, y, chunk):
        seen.append(len(list((tmp_path / "out.npz.parts").glob("part-*"))))
        return twice(X, y, chunk)

    over_rows(numbers(), 10, work, Parts(tmp_path / "out.npz", {}))
    # the clock moves 4 s a look: the third chunk after a save is the first to end 11 s after it
    assert seen == [k // 3 for k in range(21)]


def test_parts_of_another_run_are_refused_by_what_differs_and_left_alone(tmp_path):
    out, folder = tmp_path / "out.npz", tmp_path / "out.npz.parts"
    with pytest.raises(KeyboardInterrupt):
        over_rows(numbers(), 10, stopped_in(5), Parts(out, {"model": "a", "method": "shared"}))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for rows, size, run, told in (
        (numbers(), 10, {"model": "b", "method": "shared"}, r"\(model: 'a' there, 'b' here\)"),
        (numbers(), 10, {"model": "a", "method": "local"}, r"\(method: 'shared' there, 'local' here\)"),
        (numbers(seed=1), 10, {"model": "a", "method": "shared"}, r"\(data: '[0-9a-f]{32}' there, '[0-9a-f]{32}' here\)"),
        (numbers(), 11, {"model": "a", "method": "shared"}, "chunk: 10 there, 11 here"),
        (numbers(N - 1), 10, {"model": "a", "method": "shared"}, "samples: 203 there, 202 here"),
    ):
        with pytest.raises(ValueError, match=told) as error:
            over_rows(rows, size, twice, Parts(out, run))
        assert "Repeat that run to continue it; or write to another file, or remove the folder" in str(error.value)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    # the same samples under another name and with another time of change are the same data
    renamed = ArrayRows(*numbers().everything(), "copied")
    assert len(over_rows(renamed, 10, twice, Parts(out, {"model": "a", "method": "shared"}))["twice"]) == N


def test_a_part_of_another_length_is_damaged(tmp_path):
    parts = Parts(tmp_path / "out.npz", {})
    with pytest.raises(KeyboardInterrupt):
        over_rows(numbers(), 10, stopped_in(5), parts)
    part = parts.folder / "part-000000000-000000005.npz"
    np.savez(part, twice=np.zeros(49), name=np.array(["0"] * 49))
    with pytest.raises(ValueError, match="202 values of twice for 203 samples"):
        over_rows(numbers(), 10, twice, Parts(tmp_path / "out.npz", {}))
    (parts.folder / "run.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        over_rows(numbers(), 10, twice, Parts(tmp_path / "out.npz", {}))


def test_models_that_compute_something_else_have_another_identity(saved):
    model, other = (lrrn.load(saved / "m.safetensors") for _ in range(2))
    assert identity_of(model) == identity_of(other)
    other.max_sweeps = 7
    assert identity_of(model) != identity_of(other)
    other.max_sweeps, other.scale_in_ = model.max_sweeps, 2 * np.asarray(model.scale_in_)
    assert identity_of(model) != identity_of(other)
    other.scale_in_ = model.scale_in_
    assert identity_of(model) == identity_of(other)
    with torch.no_grad():
        other.network_.W[0][0, 0] += 1e-7
    assert identity_of(model) != identity_of(other)


def test_regressors_that_differ_only_in_the_units_of_their_target_have_another_identity():
    """A target times four is the same after standardization, so that the weights have the same bits and predictions not."""
    X, y = curve()
    one, other, column = (regressor(epochs=1).fit(X, target) for target in (y, 4 * y, y[:, None]))
    assert torch.equal(weights(one), weights(other)) and torch.equal(weights(one), weights(column))
    assert len({identity_of(model) for model in (one, other, column)}) == 3
    np.testing.assert_allclose(other.predict(X), 4 * one.predict(X), rtol=1e-6)
    moved = copy.deepcopy(one)
    moved.offset_out_ = one.offset_out_ + 1
    assert identity_of(moved) != identity_of(one)


@pytest.mark.parametrize(
    "step", [StandardScaler(), PCA(), RobustScaler(), MinMaxScaler()], ids=lambda step: type(step).__name__
)
def test_pipelines_that_differ_only_in_the_sign_of_an_offset_have_another_identity(step):
    X, y = blobs()
    one = make_pipeline(step, classifier(epochs=1)).fit(X, y)
    other = copy.deepcopy(one)
    name = next(name for name in ("mean_", "center_", "min_") if hasattr(step, name))
    setattr(other[0], name, -getattr(one[0], name))
    assert identity_of(PipelineModel(one)) != identity_of(PipelineModel(other))


@pytest.mark.parametrize("make", [classifier, regressor, energy_model, lambda: make_pipeline(StandardScaler(), classifier())])
def test_a_file_keeps_the_identity_of_its_model(make, tmp_path):
    X, y = blobs()
    model = make().fit(X, y)
    lrrn.save(model, tmp_path / "m")
    one, other = (PipelineModel(each) if isinstance(each, Pipeline) else each for each in (model, lrrn.load(tmp_path / "m")))
    assert identity_of(one) == identity_of(other)


def test_the_time_that_a_fit_took_is_no_part_of_the_identity(saved):
    model, other = (lrrn.load(saved / "m.safetensors") for _ in range(2))
    other._set_history([{**record, "seconds": 1.0} for record in other.history_])
    assert identity_of(model) == identity_of(other)


def test_labels_that_cannot_be_saved_are_told_apart():
    X, y = blobs()
    days = [np.array([date(2026, 1, day) for day in (first, 2, 3)], dtype=object) for first in (1, 1, 4)]
    models = [classifier(epochs=1).fit(X, y) for _ in days]
    for model, labels in zip(models, days, strict=True):
        model.classes_ = labels
    first, same, other = map(identity_of, models)
    assert first == same and first != other


def test_shares_of_two_models_are_not_merged(tmp_path, monkeypatch):
    """The two regressors have the same weights, and intervals of other sizes."""
    X, y = curve()
    monkeypatch.setitem(memory.NUMBERS, "cpu", 200)  # chunks of ten samples
    np.savez(tmp_path / "t.npz", X=X, y=y)
    out = tmp_path / "radii.npz"
    for name, target in (("one", y), ("other", 4 * y)):
        lrrn.save(regressor(epochs=1).fit(X, target), tmp_path / name)

    def done(name, part):
        arguments = ["certify", tmp_path / name, tmp_path / "t.npz", "--samples", out, "--part", part, "--eps", "0.1"]
        return CliRunner().invoke(app, [str(argument) for argument in arguments], terminal_width=300)

    assert done("one", "1/2").exit_code == 0
    assert done("one", "2/2").exit_code == 0 and not out.exists()
    refused = done("other", "2/2")
    assert refused.exit_code == 1 and "holds parts of another run (model: " in refused.output


def test_parts_of_a_release_whose_record_names_too_little_are_refused(tmp_path):
    out = tmp_path / "out.npz"
    with pytest.raises(KeyboardInterrupt):
        over_rows(numbers(), 10, stopped_in(5), Parts(out, {"model": "a"}))
    record = tmp_path / "out.npz.parts" / "run.json"
    content = json.loads(record.read_text())
    del content["record"]  # as before 2
    record.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="parts that another release of lrrn wrote, which cannot be continued") as error:
        over_rows(numbers(), 10, twice, Parts(out, {"model": "a"}))
    assert "Remove the folder, or write to another file" in str(error.value) and not out.exists()


# --- shares -----------------------------------------------------------------------------------------------------------


def test_shares_are_certified_apart_and_merged_to_the_same_bits(tmp_path):
    rows, out, whole = numbers(), tmp_path / "out.npz", tmp_path / "whole.npz"
    over_rows(rows, 10, twice, Parts(whole, {}))
    for index, chunks in ((2, range(7, 14)), (3, range(14, 21))):
        found = over_rows(rows, 10, twice, Parts(out, {}), Share(index, 3))
        expected = [str(chunk) for chunk in chunks for _ in range(3 if chunk == 20 else 10)]
        assert found["name"].tolist() == expected and not out.exists()
    # shares that are cut otherwise overlap what is there; what is missing is made, and nothing else
    worked = []
    half = over_rows(rows, 10, lambda X, y, k: worked.append(k) or twice(X, y, k), Parts(out, {}), Share(1, 2))
    assert worked == list(range(7)) and half["name"].tolist() == [str(k // 10) for k in range(100)]
    merged = over_rows(rows, 10, stopped_in(0), Parts(out, {}))
    assert out.read_bytes() == whole.read_bytes() and len(merged["twice"]) == N
    assert sorted(os.listdir(tmp_path)) == ["out.npz", "whole.npz"]


def test_more_shares_than_chunks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the samples are 21 chunks, too few to be divided by 22"):
        over_rows(numbers(), 10, twice, Parts(tmp_path / "out.npz", {}), Share(1, 22))


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_continues_after_ctrl_c_to_the_same_file(saved, small_chunks, tmp_path, monkeypatch):
    out, whole = tmp_path / "radii.npz", tmp_path / "whole.npz"
    assert certified(saved, "--samples", whole).exit_code == 0
    real, calls = audit._certified_chunk, []

    def interrupted(*arguments):
        calls.append(arguments[-1])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(audit, "_certified_chunk", interrupted)
    done = certified(saved, "--samples", out)
    assert done.exit_code == 130 and "stopped; what is finished is in" in done.stderr and not out.exists()
    done = certified(saved, "--samples", out, "--method", "spectral")
    assert done.exit_code == 1 and "(method: 'auto' there, 'spectral' here)" in done.stderr
    assert certified(saved, "--samples", out).exit_code == 0
    assert calls[4:] == list(range(3, max(calls) + 1))
    assert out.read_bytes() == whole.read_bytes()
    calls.clear()
    done = certified(saved)
    assert done.exit_code == 130 and "nothing was kept; with --samples FILE the same command continues" in done.stderr


def test_the_command_takes_shares_and_merges_them(saved, small_chunks, tmp_path):
    out, whole, told = tmp_path / "radii.npz", tmp_path / "whole.npz", tmp_path / "told.json"
    assert certified(saved, "--samples", whole).exit_code == 0
    counts = []
    for part in ("1/3", "2/3", "3/3"):
        done = certified(saved, "--samples", out, "--part", part, "--json", told)
        assert done.exit_code == 0 and "the command without --part merges all parts" in " ".join(done.output.split())
        counts.append(json.loads(told.read_text())["n_samples"])
        assert not out.exists()
    assert certified(saved, "--samples", out, "--json", told).exit_code == 0
    assert out.read_bytes() == whole.read_bytes() and sum(counts) == json.loads(told.read_text())["n_samples"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--part", "1/2"], "--part needs --samples"),
        (["--part", "3/2", "--samples", "s.npz"], "a share such as 2/4"),
        (["--part", "0/2", "--samples", "s.npz"], "a share such as 2/4"),
        (["--part", "1", "--samples", "s.npz"], "a share such as 2/4"),
        (["--part", "1/2", "--samples", "s.npz", "--export-proof", "p.json"], "leave --part out"),
    ],
)
def test_parts_that_cannot_be_are_refused_before_any_work(saved, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = certified(saved, *options)
    assert done.exit_code == 2 and message in " ".join(done.output.replace("\u2502", "").split())
    assert os.listdir(tmp_path) == []


SLOW = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
from lrrn.reports import audit
from lrrn.runtime import memory
real = audit._certified_chunk
def slow(*given):
    time.sleep(0.02)
    found = real(*given)
    os.write(seen, b".")
    return found
seen = os.open(os.environ["SEEN"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
audit._certified_chunk = slow
memory.NUMBERS["cpu"] = 200
from lrrn.cli import app
app()
"""


@pytest.mark.parametrize(("sign", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_process_that_is_stopped_leaves_what_it_has(saved, tmp_path, monkeypatch, sign, status):
    out, whole, seen = (tmp_path / name for name in ("radii.npz", "whole.npz", "seen"))
    command = [sys.executable, "-c", SLOW, "certify", saved / "m.safetensors", saved / "t.npz", "--samples", out]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    stopped = subprocess.Popen(command, env={**os.environ, "SEEN": str(seen)}, **pipes)
    deadline = time.monotonic() + 120
    while not (seen.exists() and seen.stat().st_size >= 3) and stopped.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    stopped.send_signal(sign)
    _, errors = stopped.communicate(timeout=60)
    # no progress in a pipe
    assert errors == f"stopped; what is finished is in {out}.parts, and the same command continues\n"
    assert stopped.returncode == status and not out.exists()
    (part,) = (tmp_path / "radii.npz.parts").glob("part-000000000-*.npz")
    with np.load(part) as file:
        assert len(file["radius"]) >= 3 * 13  # chunks of 13 samples
    monkeypatch.setitem(memory.NUMBERS, "cpu", 200)
    assert certified(saved, "--samples", out).exit_code == certified(saved, "--samples", whole).exit_code == 0
    assert out.read_bytes() == whole.read_bytes()


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_is_shown_on_a_terminal_and_counts_what_was_there(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        over_rows(numbers(), 10, stopped_in(5), Parts(tmp_path / "out.npz", {}))
    screen, told = io.StringIO(), []
    usual = progress.Console

    def console(**options):
        return usual(file=screen, force_terminal=True, width=100)

    def work(X, y, chunk):
        told.append(bar[0].tasks[0].completed)
        return twice(X, y, chunk)

    bar, made = [], progress.Progress
    monkeypatch.setattr(progress, "Console", console)
    monkeypatch.setattr(progress, "Progress", lambda *given, **options: bar.append(made(*given, **options)) or bar[-1])
    over_rows(numbers(), 10, work, Parts(tmp_path / "out.npz", {}), progress="certifying")
    assert told == [50 + 10 * k for k in range(16)] and bar[0].tasks[0].total == bar[0].tasks[0].completed == N
    assert "certifying" in screen.getvalue() and "100 %" in screen.getvalue()
    screen.truncate(0)
    over_rows(numbers(), 10, twice)
    assert screen.getvalue().strip("\0") == ""


# --- memory and signals -----------------------------------------------------------------------------------------------


def test_chunks_are_sized_by_memory(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert memory.rows_at_once((784, 64, 64, 10), cpu) == 2**22 // 922
    assert memory.rows_at_once((3072, 25088, 10), cpu, slow=True) == 2**19 // 28170
    assert memory.rows_at_once((10**8, 10), cpu) == 1

    def card(gigabytes):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("", (), {"total_memory": gigabytes * 2**30}))
        return memory.rows_at_once((3072, 25088, 10), cuda)

    assert [card(size) for size in (140, 24, 1)] == [2**26 // 28170, 2**23 // 28170, 2**22 // 28170]


def test_chunks_of_slow_certificates_are_small(saved, monkeypatch):
    model = lrrn.load(saved / "m.safetensors")
    assert audit._chunk_rows(model, "shared") == audit._chunk_rows(model, "spectral") == model.chunk_rows_
    assert audit._chunk_rows(model, "local") == audit.LOCAL_ROWS
    monkeypatch.setattr(audit, "SEARCHED", 2)
    assert audit._chunk_rows(model, "shared") == 2**19 // sum(model.network_.sizes)
    assert audit._chunk_rows(model, "spectral") == model.chunk_rows_


def test_a_request_to_terminate_is_an_interrupt_inside_only():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), termination_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) is before
    seen = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        with termination_interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [1]
