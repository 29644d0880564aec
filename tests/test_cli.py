from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import lrrn.bench.contenders
from lrrn.bench.contenders import CONTENDERS
from lrrn.bench.suites import depth_suite, solve_suite
from lrrn.cli import app

runner = CliRunner()


def test_help_names_every_command_and_option():
    assert {"demo", "bench"} <= set(runner.invoke(app, ["--help"]).output.split())
    for command in ("demo", "bench"):
        output = runner.invoke(app, [command, "--help"]).output
        assert all(option in output for option in ("--seed", "--device", "--json"))


def test_demo_learns_the_digits(tmp_path):
    file = tmp_path / "demo.json"
    done = runner.invoke(app, ["demo", "--seed", "1", "--json", str(file)])
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert result["test_accuracy"] > 0.94 and result["largest_residual"] <= 1e-4
    assert 0 < result["lipschitz"] < 100 and "newton" in result["solver_seconds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--device", "tpu"], "unknown device 'tpu'; use auto, cpu or cuda"),
        (["demo", "--json", "/no/such/folder/out.json"], "its folder does not exist"),
        (["bench", "--device", "cuda"], "runs on the CPU so far"),
        (["bench", "--batch", "0"], "--batch"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(arguments, message):
    done = runner.invoke(app, arguments, terminal_width=200)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_contenders_that_are_installed_reach_the_target_and_absent_ones_say_so(monkeypatch):
    monkeypatch.setattr(lrrn.bench.contenders, "find_spec", lambda name: None)
    rows = {row.contender: row for row in solve_suite(sizes=(20, 8, 6, 3), n=20, repeats=1)}
    assert set(rows) == {contender.name for contender in CONTENDERS}
    for contender in CONTENDERS:
        row = rows[contender.name]
        if contender.needs:
            assert row.seconds is None and "is not installed" in row.note
        else:
            assert row.seconds is not None and row.seconds > 0 and row.error <= 1e-6


def test_osqp_contender():
    rows = {row.contender: row for row in solve_suite(sizes=(20, 8, 6, 3), n=5, repeats=1)}
    assert rows["osqp, in a loop"].error <= 1e-6


def test_depth_suite_counts_the_blocks():
    rows = depth_suite(width=4, n=20, sweeps=3, repeats=1)
    assert [row["blocks"] for row in rows] == [4, 10, 22, 46] and all(row["us_per_sweep"] > 0 for row in rows)
