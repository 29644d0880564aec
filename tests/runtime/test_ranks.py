"""Several ranks against one process: gradients, training, resuming, scoring. One torchrun of two ranks serves all tests."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import rank_worker as worker
from lrrn.cli import app
from lrrn.estimators import LRRNClassifier
from lrrn.learning.monitor import condition_number
from lrrn.runtime import ranks
from lrrn.runtime.ranks import RankLostError, Ranks, joined
from tolerances import rounding

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    worker.make_tables(path)
    return path


@pytest.fixture(scope="module")
def two(folder):
    done = subprocess.run(
        [*TORCHRUN, str(Path(worker.__file__)), str(folder)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "out.json").read_text()), torch.load(folder / "tensors.pt")


def test_parts_cover_everything_once(two):
    out, _ = two
    assert out["size"] == 2
    assert out["part"] == [[[], []], [[], [0]], [[0], [1]], [[0, 1, 2], [3, 4, 5, 6]]]
    for size in (1, 2, 3, 8):
        for n in (0, 1, 5, 8, 100):
            shares = [range(n)[Ranks(i, size).part(n)] for i in range(size)]
            assert [i for share in shares for i in share] == list(range(n))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("n", [1, 5, 64])
@pytest.mark.parametrize("dtype", worker.DTYPES)
@pytest.mark.parametrize("objective", worker.OBJECTIVES)
def test_two_ranks_compute_the_gradient_of_one(two, objective, dtype, n):
    one, both = worker.gradient(objective, dtype, n), two[1][f"{objective} {dtype} {n}"]
    assert float(one.norm()) > 0
    allowed = float(one.norm()) * (1e-6 if dtype == "float32" else 1e-14)
    if objective in ("Contrastive", "SemiSupervised"):
        # a small difference of two phases: products over other numbers of rows round each phase at its own size
        one_phase = float(worker.gradient("FreeEnergy", dtype, n).norm())
        allowed = max(allowed, rounding(one_phase, 1, worker.DTYPES[dtype]))
    assert float((both - one).norm()) <= allowed


@pytest.mark.parametrize("n", [1, 5, 64])
@pytest.mark.parametrize("objective", worker.OBJECTIVES)
@pytest.mark.parametrize("kind", ["matrices", "products"])
def test_two_ranks_compute_the_gradient_of_one_with_convolutions(two, kind, objective, n):
    one, both = worker.gradient(objective, "float64", n, kind, worker.TOL), two[1][f"{kind} {objective} {n}"]
    assert float(one.norm()) > 0
    # the residuals of two solves may both be as large as tol; contrastive gradients are a small difference of two phases
    one_phase = float(worker.gradient("FreeEnergy", "float64", n, kind, worker.TOL).norm())
    allowed = 2 * worker.TOL * condition_number(worker.network(kind=kind)) * max(float(one.norm()), one_phase)
    assert float((both - one).norm()) <= allowed


@pytest.mark.parametrize("name", ["matrices", "products"])
def test_ranks_hold_the_condition_number_by_the_same_vector(two, name):
    out, _ = two
    first, second = out[f"vectors {name}"]
    assert first == second and any(first[0])
    assert condition_number(worker.start(name)) > 1.1 * worker.MAX_CONDITION
    for record in out[f"history {name}"]:
        # one step of the power iteration per update follows weights that change by a few per cent
        assert 0.5 * worker.MAX_CONDITION < record["condition_number"] <= 1.2 * worker.MAX_CONDITION


@pytest.mark.parametrize("name", worker.RUNS)
def test_two_ranks_train_as_one_does(two, name):
    out, tensors = two
    alone = worker.training(name)
    moved = worker.flat(alone.net) - worker.flat(worker.start(name))
    assert float((tensors[f"trained {name}"] - worker.flat(alone.net)).norm() / moved.norm()) < 1e-3
    assert moved.norm() > 0.01
    # a loss is a difference of float32 energies of order one
    losses = [r["loss"] for r in alone.history]
    assert [r["loss"] for r in out[f"history {name}"]] == pytest.approx(losses, rel=1e-4, abs=3e-7)
    # every solve is counted once, whoever made it; both phases of 49 samples
    assert [r["sweeps"] for r in out[f"history {name}"]] == pytest.approx([r["sweeps"] for r in alone.history], rel=1e-2)
    assert [r["validation_score"] for r in out[f"history {name}"]] == pytest.approx(
        [r["validation_score"] for r in alone.history], rel=1e-5
    )


@pytest.mark.parametrize("name", worker.RUNS)
def test_the_same_seed_gives_the_same_bits_and_so_does_resuming(two, name):
    out, tensors = two
    assert out[f"again {name}"] is True
    assert torch.equal(tensors[f"resumed {name}"], tensors[f"trained {name}"])


def test_rank_0_alone_writes_and_calls_back(two, folder):
    out, _ = two
    for name in worker.RUNS:
        assert out[f"calls {name}"] == [[1, 2, 3], []]
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]
        assert (folder / f"{name}.ckpt").is_file()


@pytest.mark.parametrize("name", worker.RUNS)
def test_one_process_continues_what_two_ranks_began(two, folder, name):
    """Where a run stands does not depend on how many ranks it had."""
    _, tensors = two
    there = worker.training(name, folder / f"half-{name}", resume=True)
    assert there.calls == [3]
    moved = worker.flat(there.net) - worker.flat(worker.start(name))
    assert float((tensors[f"trained {name}"] - worker.flat(there.net)).norm() / moved.norm()) < 1e-3
    finished = worker.training(name, folder, resume=True)  # nothing left to do
    assert torch.equal(worker.flat(finished.net), tensors[f"trained {name}"])


def test_interrupting_one_rank_stops_all_at_one_step_and_they_continue(two):
    out, _ = two
    first, second = (json.loads(told) for told in out["interrupted"])
    assert first == second
    net = worker.network()
    worker.Trainer(net, worker.Contrastive(), worker.Settings(batch_size=8, epochs=3)).fit(worker.blobs(49))
    torch.testing.assert_close(torch.tensor(first), worker.flat(net), rtol=1e-3, atol=1e-4)


def test_errors_reach_every_rank(two):
    out, _ = two
    assert all("ranks 0 and 1 were given different settings or data: data" in told for told in out["other data"])
    assert out["error on main"] == ["ZeroDivisionError: integer division or modulo by zero"] * 2
    assert out["error that cannot travel"] == ["Strange: odd", "RuntimeError: Strange: odd"]
    assert all("after epoch 1 the parameters of ranks 1 differ" in told for told in out["drift"])
    assert all("feature 7 of sample 300 is nan" in told for told in out["bad row"])


def test_an_estimator_without_a_seed_is_the_same_on_every_rank(two):
    first, second = two[0]["unseeded"]
    assert first == second


def test_scores_are_those_of_one_process_to_the_bit(two, folder, monkeypatch):
    out, _ = two
    monkeypatch.setattr(LRRNClassifier, "chunk_rows_", LRRNClassifier.chunk_rows_, raising=False)
    alone = json.loads(json.dumps(worker.scored(folder, "X.npy", "one.npz")))
    assert out["scores"] == alone and out["scores of all ranks"]
    assert len(out["scores of other files"]) >= 2
    for other in out["scores of other files"]:
        assert other["evaluation"] == alone["evaluation"] and other["energies"] == alone["energies"]
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("two-*.npz")}
    assert digests == {hashlib.sha256((folder / "one.npz").read_bytes()).hexdigest()}
    assert not list(folder.glob("*.parts"))


def test_the_command_line_under_torchrun_gives_the_files_of_one_process(folder, tmp_path):
    """333 samples are one chunk for the command line, so rank 1 only listens; rank 0 alone prints and writes."""

    def arguments(name):
        files = ["--samples", str(tmp_path / f"{name}.npz"), "--json", str(tmp_path / f"{name}.json"), "--device", "cpu"]
        return ["evaluate", str(folder / "model.safetensors"), str(folder / "X.npy"), "--target", str(folder / "y.npy"), *files]

    done = subprocess.run(
        [*TORCHRUN, "-m", "lrrn", *arguments("two")], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("333 samples") == 1
    assert CliRunner().invoke(app, arguments("one")).exit_code == 0
    assert (tmp_path / "two.json").read_text() == (tmp_path / "one.json").read_text()
    assert (tmp_path / "two.npz").read_bytes() == (tmp_path / "one.npz").read_bytes()


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined() as team:
        assert team == Ranks() == ranks.current() and team.is_main
        assert team.gather(3) == [3] and team.on_main(lambda: 4) == 4
        team.check_same("things", {"a": 1})


def test_a_rank_without_a_gpu_of_its_own_is_told(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="rank 3 of this machine needs a GPU of its own and there are 2"), joined("cuda"):
        pass


def test_ranks_that_cannot_meet_say_so(monkeypatch):
    monkeypatch.setattr(ranks, "PATIENCE", ranks.timedelta(seconds=1))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankLostError, match="cannot be reached"), joined("cpu"):
        pass


def test_ranks_started_anew_do_not_take_the_dead_for_the_living():
    """What torchrun's store holds after a restart: a dead rank's name, and rank 0's answer to it."""
    from concurrent.futures import ThreadPoolExecutor

    store = torch.distributed.HashStore()
    store.set("lrrn/rank/1", "dead")
    store.set("lrrn/rank/2", "dead too")
    store.set("lrrn/answer/dead", "old")
    store.add("lrrn/met/old", 2)
    for _ in range(3):  # and once more, after those of the round before
        with ThreadPoolExecutor(3) as pool:
            places = list(pool.map(lambda index: ranks._met(store, index, 3), range(3)))
        assert not places[2].check(["word"])  # nothing is left from the round before
        places[0].set("word", "fresh")
        assert [place.get("word") for place in places[1:]] == [b"fresh", b"fresh"]
