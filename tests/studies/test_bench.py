"""The benchmark: shapes of its results, what it refuses, what it counts; sizes are the smoke ones."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lrrn.solvers.coordinate_descent
import lrrn.studies.bench.contenders
import lrrn.studies.bench.train
from lrrn.cli import app
from lrrn.kernels.cpu.vector_sweep import PANEL
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import BoxQP
from lrrn.runtime.machine import cores
from lrrn.solvers import SOLVERS
from lrrn.studies.bench import certify, contest, depth, grad, learners, rate, scaling, solve, suites, tables, train
from lrrn.studies.bench.clock import Settings, Timing, best_of_threads, exponent, measure, threads
from lrrn.studies.bench.contenders import CONTENDERS, Contender
from lrrn.studies.bench.headlines import headlines
from lrrn.studies.bench.journal import Journal
from lrrn.studies.bench.problems import free_phase, images, random_network, random_phase, trained

QUICK = Settings(quick=True, repeats=1)
runner = CliRunner()


@pytest.fixture
def no_peers(monkeypatch):
    monkeypatch.setattr(lrrn.studies.bench.contenders, "find_spec", lambda name: None)
    monkeypatch.setenv("LRRN_PCX_PYTHON", "/nowhere/python")


def small_problem(n=5):
    return random_phase((12, 6, 4, 3), n)


# --- rescoring --------------------------------------------------------------------------------------------------------


def test_installed_contenders_reach_the_target_and_absent_ones_say_so(no_peers):
    rows = {
        row["contender"]: row
        for row in contest.contest({"case": "c", "weights": "random"}, small_problem(), QUICK, 0.01, Journal())
    }
    assert set(rows) == {contender.name for contender in CONTENDERS}
    for contender in CONTENDERS:
        row = rows[contender.name]
        assert row["case"] == "c" and row["ours"] == contender.ours
        if contender.needs:
            assert row["seconds"] is None and "is not installed" in row["note"]
        else:
            assert row["seconds"] > 0 and row["error"] <= contest.TARGET


@pytest.mark.parametrize("name", ["osqp, in a loop", "quadprog, in a loop", "proxsuite", "qpth", "cvxpylayers"])
def test_peers_agree_with_the_reference(name):
    contender = next(c for c in CONTENDERS if c.name == name)
    package = lrrn.studies.bench.contenders.missing(contender.needs)
    if package is not None:
        pytest.skip(f"{package} is in the benchmark environment only")
    row = contest.record(contender, small_problem(), QUICK, 0.01)
    assert row["seconds"] > 0 and row["error"] <= contest.TARGET


def test_bounds_on_both_sides_reach_the_peers():
    net = lrrn.LRRN((12, 6, 4, 3), constraint=(0.1, 0.3), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    problem = free_phase(net, images(4, 12, 1, torch.float64), "box")
    assert problem.qp.lo.max() == 0.1 and problem.qp.hi.max() == pytest.approx(0.3)
    for name in ("quadprog, in a loop", "osqp, in a loop"):
        contender = next(c for c in CONTENDERS if c.name == name)
        if lrrn.studies.bench.contenders.missing(contender.needs) is None:
            assert problem.error(contender.prepare(problem)(1e-9)) <= 1e-6


def test_a_wrong_answer_is_shown_and_never_wins():
    problem = small_problem()

    def liar(given):
        return lambda tol: given.reference + 1e-3

    row = contest.record(Contender("liar", liar), problem, QUICK, 0.01)
    assert row["seconds"] is None and row["error"] == pytest.approx(1e-3) and "misses the required error" in row["note"]
    honest = contest.record(Contender("honest", lambda given: lambda tol: given.reference, ours=True), problem, QUICK, 0.01)
    table = tables.contest_table("t", [row, honest])
    shown = {line[0]: dict(zip(table.columns, line, strict=True)) for line in table.rows}
    assert shown["liar"]["times our best"] == "-" and shown["honest"]["times our best"] == "1"


def test_an_answer_that_is_not_a_number_is_wrong():
    problem = small_problem()
    assert problem.error(problem.reference * math.nan) == math.inf
    assert grad.gradient_error([torch.tensor([math.nan])], [torch.ones(1)]) == math.inf


def test_a_peer_that_raises_is_noted_and_ours_is_not_forgiven():
    def broken(given):
        raise ValueError("no idea")

    assert contest.record(Contender("peer", broken), small_problem(), QUICK, 0.01)["note"] == "failed: no idea"
    with pytest.raises(ValueError, match="no idea"):
        contest.record(Contender("ours", broken, ours=True), small_problem(), QUICK, 0.01)


def test_answers_wrong_with_more_threads_only_are_refused(monkeypatch):
    monkeypatch.setattr(contest, "best_of_threads", lambda run, repeats, options: Timing(1.0, 0.0, 2))

    def racy(given):
        return lambda tol: given.reference + (torch.get_num_threads() - 1)

    row = contest.record(Contender("racy", racy), small_problem(), QUICK, 0.01)
    assert row["seconds"] is None and "with 2 threads" in row["note"]


def test_slow_contenders_are_timed_on_fewer_samples_and_scaled(monkeypatch):
    monkeypatch.setattr(contest, "best_of_threads", lambda run, repeats, options: Timing(2.0, 0.5, 1))
    sizes = []

    def slow(given):
        sizes.append(len(given.reference))
        return lambda tol: given.reference

    row = contest.record(Contender("slow", slow, alone=True), small_problem(10), QUICK, budget=0.0)
    assert sizes == [1] and row["seconds"] == 20.0 and row["spread"] == 5.0
    assert row["note"] == "timed on 1 of 10 samples, scaled"


def test_a_pass_beyond_patience_is_not_repeated(monkeypatch):
    monkeypatch.setattr(contest, "PATIENCE", -1.0)
    calls = []

    def late(given):
        return lambda tol: calls.append(tol) or given.reference

    row = contest.record(Contender("late", late), small_problem(), QUICK, 1.0)
    assert calls == [contest.TARGET] and row["seconds"] > 0 and row["note"].startswith("one run on 5 of 5")
    row = contest.record(Contender("wrong", lambda given: lambda tol: given.reference + 1), small_problem(), QUICK, 1.0)
    assert row["seconds"] is None and row["error"] == pytest.approx(1.0)


def test_too_many_unknowns_for_a_contender_are_not_tried():
    row = contest.record(Contender("small", lambda given: None, largest=9), small_problem(), QUICK, 1.0)
    assert row["note"] == "not tried above 9 unknowns"


@pytest.mark.parametrize("first_right", range(5))
def test_the_loosest_right_tolerance_is_found(first_right):
    rungs = (1e-1, 1e-2, 1e-3, 1e-4)
    good = set(rungs[first_right:])
    tol, score = contest.loosest(lambda tol: tol, lambda tol: 0.0 if tol in good else 1.0, rungs, 0.5)
    assert tol == (rungs[first_right] if good else None) and score == (0.0 if good else 1.0)


# --- the clock --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.5, 1.0, 2.1])
def test_exponents_of_power_laws(power):
    x = np.array([3.0, 10.0, 50.0, 700.0])
    assert exponent(x, 0.01 * x**power) == pytest.approx(power, abs=1e-12)


def test_an_exponent_is_the_least_squares_slope():
    # by hand: log2 x = 0, 1, 2 and log2 y = 0, 0, 3 have slope 3/2
    assert exponent([1, 2, 4], [1, 1, 8]) == pytest.approx(1.5)
    assert math.isnan(exponent([1], [1]))


def test_medians_and_half_ranges(monkeypatch):
    ticks = iter([0.0, 1.0, 1.0, 4.0, 4.0, 6.0])  # 1, 3 and 2 seconds
    monkeypatch.setattr(lrrn.studies.bench.clock.time, "perf_counter", lambda: next(ticks))
    assert measure(lambda: None, 3) == (2.0, 1.0)


def test_threads_are_given_and_taken_back():
    before = torch.get_num_threads()
    with threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    seen = []
    timing = best_of_threads(lambda: seen.append(torch.get_num_threads()), 1)
    assert set(seen) == {1, cores()} and timing.threads in seen
    assert best_of_threads(lambda: None, 1, (0,)).threads == 0


# --- multiply-adds ----------------------------------------------------------------------------------------------------


def identity_qp(n, dims, q):
    blocks = tuple(torch.eye(d, dtype=torch.float64) for d in dims)
    sub = tuple(torch.zeros(above, below, dtype=torch.float64) for below, above in pairwise(dims))
    dim = sum(dims)
    lo, hi = torch.zeros(1, dim, dtype=torch.float64), torch.full((1, dim), math.inf, dtype=torch.float64)
    return BoxQP(BlockTridiagonal(blocks, sub), q.expand(n, dim).contiguous(), lo, hi)


def test_multiply_adds_of_a_case_done_by_hand():
    assert PANEL == 8
    # one layer of 8 units, 8 samples: one panel, one vector; H = I, so all that moves does so in the first sweep
    qp = identity_qp(8, (8,), torch.ones(1, 8, dtype=torch.float64))
    inside = 8 * (8 + 28)  # lanes x (steps + entries below the panel's diagonal)
    assert rate.count_multiply_adds(qp, 1) == (inside + 8 * 8 * 8, 8 * 8 * 8)
    assert rate.count_multiply_adds(qp, 2) == (2 * inside + 8 * 8 * 8, 8 * 8 * 8)


def test_skipped_and_idle_updates_do_not_count():
    # two layers of 8: only unit 3 of the first moves, and only in sample 0 of the 8
    q = torch.zeros(8, 16, dtype=torch.float64)
    q[0, 3] = 1.0
    qp = identity_qp(8, (8, 8), q)
    performed, needed = rate.count_multiply_adds(qp, 1)
    inside = 2 * 8 * (8 + 28)
    assert performed == inside + 8 * 8 * 16  # one of two panels updates, 16 rows
    assert needed == 16
    nothing = identity_qp(8, (8, 8), -torch.ones(1, 16, dtype=torch.float64))
    assert rate.count_multiply_adds(nothing, 3) == (3 * inside, 0)


def test_rows_are_those_of_the_neighbouring_layers_padded_to_panels():
    moved = torch.ones(8, 5 + 8 + 3, dtype=torch.bool)
    counts = rate._sweep_counts(moved, (5, 8, 3), 8)
    inside = 3 * 8 * 36
    assert counts.performed == inside + 8 * 8 * (16 + 24 + 16)
    assert counts.needed == 8 * (5 * (5 + 8) + 8 * 16 + 3 * (8 + 3))


def test_the_count_sees_what_the_kernel_does():
    """One sweep at a time moves the same units as the kernel in one go."""
    qp = small_problem(16).qp
    z = torch.zeros_like(qp.q)
    stepper = SOLVERS["coordinate_descent"].begin(qp)
    stepper.advance(qp, z, -qp.q, 1, torch.zeros(16, dtype=torch.float64))
    _, needed = rate.count_multiply_adds(qp, 1)
    sizes = qp.hessian.sizes
    reach = torch.tensor([sum(sizes)] * sum(sizes))  # two layers: all are neighbours
    assert needed == int(((z != 0) * reach).sum())


# --- suites -----------------------------------------------------------------------------------------------------------


def check(parts):
    for part in parts:
        if isinstance(part, tables.Table):
            assert part.rows and all(len(row) == len(part.columns) for row in part.rows)
            assert all(isinstance(cell, str) for row in part.rows for cell in row)
    return [part for part in parts if isinstance(part, tables.Table)]


def test_solve_suite(no_peers, monkeypatch):
    monkeypatch.setattr(solve, "QUICK", ((4, 1), (4, 8), (6, 8)))
    records = solve.run(QUICK, Journal())
    solves = [record for record in records if record["kind"] == "solve"]
    assert {(record["dim"], record["batch"]) for record in solves} >= {(8, 1), (8, 8), (12, 8)}
    assert {record["weights"] for record in solves} == {"random", "ill-conditioned", "trained"}
    ill, well = (next(r["condition"] for r in solves if r["weights"] == w) for w in ("ill-conditioned", "random"))
    assert ill > well
    rates = [record for record in records if record["kind"] == "sweep rate"]
    assert {(r["dtype"], r["threads"]) for r in rates} == {(d, t) for d in ("float64", "float32") for t in {1, cores()}}
    assert all(0 < r["needed"] <= r["performed"] and r["blas_per_second"] > 0 for r in rates)
    parts = solve.present(records)
    assert len(check(parts)) == 6
    charts = [part for part in parts if isinstance(part, tables.Chart)]
    assert [len(chart.series["auto"][0]) for chart in charts] == [2, 2]


def test_depth_suite_counts_the_blocks():
    records = depth.run(QUICK, Journal())
    assert [record["blocks"] for record in records] == [4, 10, 22, 46]
    assert all(record["us_per_sweep"] > 0 for record in records)
    check(depth.present(records))


def test_sweeps_of_the_depth_suite_are_in_float64_however_large(monkeypatch):
    monkeypatch.setattr(lrrn.solvers.coordinate_descent, "SINGLE_FROM", 1)
    monkeypatch.setattr(lrrn.solvers.coordinate_descent, "single", None)  # nobody may ask for it
    assert len(depth.run(QUICK, Journal())) == 4


def test_grad_suite(no_peers):
    records = grad.run(QUICK, Journal())
    ours = next(record for record in records if record["ours"])
    assert ours["seconds"] > 0 and ours["error"] <= grad.TARGET
    assert all("is not installed" in record["note"] for record in records if not record["ours"])
    check(grad.present(records))


def test_the_dense_quadratic_is_the_networks():
    net = random_network((7, 5, 4, 3, 2), 0, torch.float64)
    x = images(3, 7, 1, torch.float64)
    qp = net.energy_snapshot(torch.float64).free(x)
    h, q = grad.quadratic(net, x)
    torch.testing.assert_close(h, qp.hessian.dense())
    torch.testing.assert_close(q, qp.q)


def test_a_wrong_gradient_is_refused():
    right = [torch.ones(3)]
    row = grad.timed(lambda tol: [torch.full((3,), 1.01)], right, 1, None)
    assert "seconds" not in row and row["error"] == pytest.approx(0.01, rel=1e-5) and "misses" in row["note"]
    assert grad.timed(lambda tol: right, right, 1, (1,))["error"] == 0


def test_train_suite_times_both_sides_of_every_pair(no_peers):
    records = train.run(Settings(quick=True, repeats=1, samples=300), Journal())
    installed = {"lrrn", "MLPClassifier", "torch MLP"}
    for batch in (10, 100, 256):
        timed = {(r["contender"], r["optimizer"]) for r in records if r["batch"] == batch and r["seconds"] is not None}
        margin = {("lrrn, margin", "adam"), ("lrrn, margin, adversarial", "adam")}
        assert timed == {(name, optimizer) for name in installed for optimizer in ("sgd", "adam")} | margin
    skipped = [record for record in records if record["seconds"] is None]
    assert skipped and all(record["note"].startswith("skipped") for record in skipped)
    for table in check(train.present(records)):
        ratios = [row[4] for row in table.rows if row[0] == "MLPClassifier"]
        assert ratios == ["1.00", "1.00"]


def test_learners_that_are_slow_are_scaled(monkeypatch):
    monkeypatch.setattr(train, "_seconds", lambda epoch, n: n / 10)  # ten samples a second
    assert train._rehearse(lambda n: None, 60_000, 10)[1] == 80
    assert train._rehearse(lambda n: None, 60, 10)[1] == 60


def test_our_epoch_changes_the_network_and_takes_the_first_samples_only():
    data = learners.Data(images(40, 6, 0, torch.float32), torch.eye(3).repeat(14, 1)[:40], torch.arange(40) % 3)
    assert len(learners._first(data, 10)) == 10
    for name, optimizer, needs, make in learners.LEARNERS:
        if lrrn.studies.bench.contenders.missing(needs) is None:
            make(data, (6, 4, 4, 3), 10, optimizer, 0)(20)
        assert name


def test_predictive_coding_runs_in_an_interpreter_of_its_own(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nprint('noise')\nprint('{{\"seconds\": [1.0, 2.0, 4.0], \"samples\": 30}}')\n")
    script.chmod(0o755)
    monkeypatch.setenv("LRRN_PCX_PYTHON", str(script))
    row = train._predictive_coding(60, (6, 4, 3), 10, 3)
    assert row["seconds"] == 4.0 and row["spread"] == 3.0 and row["note"] == "timed on 30 of 60 samples, scaled"
    script.write_text(f"#!{sys.executable}\nraise SystemExit('no pcx')\n")
    assert train._predictive_coding(60, (6, 4, 3), 10, 3)["note"] == "failed: no pcx"


def test_certify_suite():
    records = certify.run(QUICK, Journal())
    radii = {record["method"]: record for record in records if record["kind"] == "radii"}
    assert set(radii) == set(certify.METHODS) and all(record["radii_per_second"] > 0 for record in radii.values())
    bounds = {record["method"]: record for record in records if record["kind"] == "bounds"}
    assert bounds["spectral"]["network_ratio"] == bounds["spectral"]["pairs_ratio"] == 1
    assert bounds["multiplier"]["network_ratio"] <= 1 <= bounds["paper"]["network_ratio"]
    tables = [record for record in records if record["kind"] == "tables"]
    assert len(tables) == 2 and all(record["least_times_multiplier"] > 1 - 1e-3 for record in tables)
    assert len(check(certify.present(records))) == 3


def test_scaling_suite():
    records = scaling.run(Settings(quick=True, repeats=1, rows=300), Journal())
    axes = [record["axis"] for record in records if record["kind"] == "point"]
    assert {axis: axes.count(axis) for axis in axes} == {"width": 2, "depth": 2, "batch": 2, "threads": cores()}
    fits = {record["axis"]: record for record in records if record["kind"] == "exponent"}
    assert set(fits) == {"width", "depth", "batch"} and all(math.isfinite(fit["exponent"]) for fit in fits.values())
    memory = records[-1]
    assert memory["rows"] == 300 and memory["peak_bytes"] > 0 and memory["baseline_bytes"] > 2**20
    assert "300 x 784 float32" in scaling.present(records)[-1]
    check(scaling.present(records))


def test_real_weights_come_from_a_saved_classifier(tmp_path):
    X, y = lrrn.datasets.load("digits", "train")
    path = tmp_path / "m.safetensors"
    lrrn.save(lrrn.LRRNClassifier(hidden_sizes=(5,), epochs=1, random_state=0).fit(X, y), path)
    net, x, name = trained(Settings(model=path), 7)
    assert net.sizes == (64, 5, 10) and x.shape == (7, 64) and name == "64-5-10, m.safetensors on digits"
    lrrn.save(lrrn.LRRNEnergyModel(hidden_sizes=(5,), epochs=1).fit(X), path)
    with pytest.raises(ValueError, match="holds a LRRNEnergyModel"):
        trained(Settings(model=path), 7)


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments):
    done = runner.invoke(app, ["bench", *map(str, arguments)], terminal_width=200)
    assert done.exit_code == 0, done.output
    return done.output


def test_suites_are_written_apart_or_together(tmp_path):
    file, page = tmp_path / "b.json", tmp_path / "b.html"
    assert "non-zero blocks" in run("--quick", "--suite", "depth", "--repeats", 1, "--json", file)
    written = json.loads(file.read_text())
    assert (
        set(written) == {"depth"} and written["depth"]["machine"]["cores"] == cores() and written["depth"]["settings"]["quick"]
    )
    written["scaling"] = {**written["depth"], "records": []}
    file.write_text(json.dumps(written))
    run("--quick", "--suite", "depth", "--repeats", 1, "--json", file, "--update", "--page", page)
    assert list(json.loads(file.read_text())) == ["depth", "scaling"]
    words = tmp_path / "b.md"
    run("--quick", "--suite", "depth", "--repeats", 1, "--page", words)
    assert "| depth | non-zero blocks |" in words.read_text() and "## depth" in words.read_text()
    html = page.read_text()
    assert "<h2>depth</h2>" in html and "non-zero blocks" in html and "better of one and of all threads" in html
    run("--quick", "--suite", "depth", "--repeats", 1, "--json", file)
    assert set(json.loads(file.read_text())) == {"depth"}


def test_every_part_reaches_the_page():
    parts = [
        tables.Table("title of the table", ("a", "b"), [("1", "2")]),
        tables.Chart("caption", "x", "y", {"line": ([0, 1], [1, 10])}, True),
        "a remark",
    ]
    html = tables.as_page("t", {"s": ("where", parts)})
    assert all(text in html for text in ("title of the table", "caption", "<polyline", "a remark", "where", "<h2>s</h2>"))


def test_headlines_compare_with_the_aims():
    def solve_row(contender, seconds, ours=False, dim=128, batch=1000):
        return {"kind": "solve", "weights": "random", "dim": dim, "batch": batch} | {
            "contender": contender,
            "ours": ours,
            "seconds": seconds,
        }

    records = {
        "solve": [
            solve_row("auto", 0.01, ours=True),
            solve_row("osqp, in a loop", 0.6),
            solve_row("proxsuite", 0.2),
            solve_row("qpth", None),
            solve_row("auto", 1.0, ours=True, dim=2048),
            solve_row("qpth", None, dim=2048),
            solve_row("torch FISTA", 0.5, dim=2048),
            {
                "kind": "sweep rate",
                "dim": 128,
                "dtype": "float64",
                "threads": 1,
                "performed_per_second": 4.0,
                "blas_per_second": 10,
            },
        ],
        "grad": [
            {"case": "c", "contender": "lrrn", "ours": True, "seconds": 1.0},
            {"case": "c", "contender": "qpth", "ours": False, "seconds": 49.0},
        ],
        "train": [
            {"batch": 10, "optimizer": "sgd", "contender": "lrrn", "ours": True, "seconds": 2.0},
            {"batch": 10, "optimizer": "sgd", "contender": "MLPClassifier", "ours": False, "seconds": 4.0},
            {"batch": 256, "optimizer": "adam", "contender": "lrrn, margin", "ours": False, "seconds": 7.0},
            {"batch": 256, "optimizer": "adam", "contender": "MLPClassifier", "ours": False, "seconds": 2.0},
        ],
        "scaling": [
            {"kind": "exponent", "axis": "width", "exponent": 2.2},
            {"kind": "memory", "rows": 10, "peak_bytes": 2**29},
        ],
    }
    table = headlines(records)
    assert [(measured, met) for _, measured, _, met in table.rows] == [
        ("60", "yes"),  # 50 times are wanted of osqp
        ("20", "no"),  # and 25 of proxsuite
        ("0.5", "no"),
        ("0.40", "yes"),
        ("49", "no"),
        ("0.50", "yes"),
        ("3.50", "no"),  # an epoch of a margin loss may take 3 times that of MLPClassifier
        ("2.20", "no"),
        ("0.50 GiB", "yes"),
    ]


def test_suites_have_the_names_the_command_takes():
    assert list(suites.SUITES) == ["solve", "depth", "grad", "train", "certify", "scaling"]


def test_times_are_written_in_their_unit():
    assert [tables.seconds(value) for value in (None, 12.3456, 0.0123456, 0.0000123, 2345.6)] == [
        "-",
        "12.3 s",
        "12.3 ms",
        "12.3 us",
        "2,346 s",
    ]


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_a_journal_measures_once_and_goes_on_after_a_cut(tmp_path):
    path, calls = tmp_path / "results.json.solve.part", []

    def measured(value):
        calls.append(value)
        return {"seconds": value}

    first = Journal(path, {"seed": 0})
    assert first.once("a", measured, 1.0) == first.once("a", measured, 2.0) == {"seconds": 1.0}
    first.once("b", measured, 3.0)
    content = path.read_text()
    path.write_text(content[:-5])  # killed while writing
    again = Journal(path, {"seed": 0})
    assert again.once("a", measured, 4.0) == {"seconds": 1.0} and again.once("b", measured, 5.0) == {"seconds": 5.0}
    assert calls == [1.0, 3.0, 5.0] and (first.sittings, again.sittings) == (1, 2)
    third = Journal(path, {"seed": 0})
    assert third.once("b", measured, 6.0) == {"seconds": 5.0} and third.sittings == 3
    assert Journal(path, {"seed": 1}).once("a", measured, 7.0) == {"seconds": 7.0}  # another run's are not ours
    third.end()
    assert not path.exists()


def test_an_interrupted_benchmark_continues(tmp_path, no_peers, monkeypatch):
    file = tmp_path / "results.json"
    real, timed = contest._timed, []

    def counting(contender, *rest):
        if len(timed) == 7:
            timed.append("interrupted")
            raise KeyboardInterrupt
        timed.append(contender.name)
        return real(contender, *rest)

    monkeypatch.setattr(contest, "_timed", counting)
    command = ["bench", "--suite", "solve", "--quick", "--repeats", "1", "--json", str(file)]
    assert runner.invoke(app, command).exit_code != 0
    part = tmp_path / "results.json.solve.part"
    assert not file.exists() and part.exists()
    assert runner.invoke(app, command).exit_code == 0
    assert not part.exists() and list(tmp_path.iterdir()) == [file]
    result = json.loads(file.read_text())["solve"]
    ran = [record for record in result["records"] if record["kind"] == "solve" and record["seconds"] is not None]
    assert len(timed) - 1 == len(ran) and result["sittings"] == 2  # none was timed twice


def test_figures_of_several_machines_stand_side_by_side():
    def results(processor, times, **more):
        machine = {"processor": processor, "cores": 2, "date": "2026-11-18", "python": "3", "torch": "2"}
        record = {
            "kind": "train",
            "batch": 10,
            "optimizer": "sgd",
            "sizes": [3, 2, 2],
            "samples": 5,
            "spread": 0.0,
            "threads": 1,
        }
        names = zip(("lrrn", "MLPClassifier"), times, strict=True)
        records = [{**record, "note": "", "contender": name, "ours": name == "lrrn", "seconds": time} for name, time in names]
        return {"train": {"machine": machine, "settings": {"quick": False}, "records": records}, **more}

    exponent = {"kind": "exponent", "axis": "width", "exponent": 1.5}
    here = results("here", (2.0, 4.0))
    only = {"scaling": {**here["train"], "records": [exponent]}}
    page = suites.document(here, True, [results("there", (6.0, 4.0), **only)])
    assert "| figure | here, 2 cores, 2026-11-18 | there, 2 cores, 2026-11-18 | aim |" in page
    assert "| epoch, batch 10, sgd: ours / MLPClassifier | 0.50 | 1.50 | <= 1 |" in page
    assert "exponent in width" not in page  # nothing to compare it with
    assert "several machines" not in suites.document(here, True)


def test_a_page_is_written_from_what_was_measured_before(tmp_path, monkeypatch):
    file, page, again = tmp_path / "results.json", tmp_path / "page.md", tmp_path / "again.md"
    command = ["bench", "--suite", "depth", "--quick", "--repeats", "1", "--json", str(file)]
    assert runner.invoke(app, [*command, "--page", str(page)]).exit_code == 0
    before = file.read_bytes()
    monkeypatch.setattr(depth, "run", None)  # nothing is measured
    assert runner.invoke(app, ["bench", "--report-only", "--json", str(file), "--page", str(again)]).exit_code == 0
    assert again.read_text() == page.read_text() and file.read_bytes() == before
    told = runner.invoke(app, ["bench", "--report-only", "--json", str(file)])
    assert told.exit_code == 2 and "give both" in told.output
    for content in ("[]", "{", '{"solve": {}}', '{"other": {"records": []}}'):
        file.write_text(content)
        told = runner.invoke(app, ["bench", "--report-only", "--json", str(file), "--page", str(again)])
        assert told.exit_code == 1 and "does not hold results" in told.output.replace("\n", " ")
