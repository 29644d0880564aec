"""The command line: parse, call, print."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Lifted regression/reconstruction networks: prediction, certified radius and energy from one convex model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console()

Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the results to this file, for machines.")]


@app.callback()
def main(verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the library decides.")] = False) -> None:
    """Set up logging for every command."""
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, format="%(name)s: %(message)s")


@app.command()
def demo(seed: Seed = 0, device: Device = "auto", json_file: JsonFile = None) -> None:
    """Train a network on handwritten digits, in a few seconds and without a network connection."""
    from lrrn.demo import run

    json_file = _writable(json_file)
    result = run(seed=seed, device=_device(device))
    table = Table("", "", title="Digits, 64-64-64-10, cross-entropy through the implicit gradient", show_header=False)
    table.add_row("accuracy, training / test", f"{result.train_accuracy:.1%} / {result.test_accuracy:.1%}")
    table.add_row("Lipschitz constant at most (paper's bound)", f"{result.lipschitz:.3f}")
    table.add_row("largest relative KKT residual", f"{result.largest_residual:.1e}")
    table.add_row("activations proven exact to within", f"{result.largest_error_bound:.1e}")
    table.add_row("training time", f"{result.train_seconds:.1f} s")
    for name, seconds in result.solver_seconds.items():
        table.add_row(f"inference of 450 digits by {name}", f"{1e3 * seconds:.1f} ms")
    console.print(table)
    _dump(json_file, asdict(result))


@app.command()
def bench(
    seed: Seed = 0,
    device: Device = "cpu",
    json_file: JsonFile = None,
    batch: Annotated[int, typer.Option(help="Number of problems solved at once.", min=1)] = 1000,
    repeats: Annotated[int, typer.Option(help="Timings per contender; their median counts.", min=1)] = 7,
) -> None:
    """Time our solvers against their peers on the same problems, rescored in float64."""
    from lrrn.bench.suites import as_json, depth_suite, solve_suite

    if device not in ("auto", "cpu"):
        raise typer.BadParameter(f"the benchmark runs on the CPU so far; got --device {device}")
    json_file = _writable(json_file)
    rows = solve_suite(n=batch, seed=seed, repeats=repeats)
    ours = min(row.seconds for row in rows if row.ours and row.seconds is not None)
    table = Table(title=f"One free phase, 784-64-64-10 (128 unknowns), batch {batch}, float64, to max|z - z*| <= 1e-6")
    for column in ("solver", "median", "+-", "error", "times our best", "note"):
        table.add_column(column, justify="left" if column in ("solver", "note") else "right")
    for row in rows:
        if row.seconds is None or row.spread is None:
            table.add_row(row.contender, "-", "-", "-" if row.error is None else f"{row.error:.0e}", "-", row.note)
        else:
            times = f"{row.seconds / ours:.1f}"
            table.add_row(
                row.contender, f"{1e3 * row.seconds:.1f} ms", f"{1e3 * row.spread:.1f}", f"{row.error:.0e}", times, row.note
            )
    console.print(table)
    depths = depth_suite(n=batch)
    table = Table(title=f"Cost of one coordinate-descent sweep, width 64, batch {batch}, float64")
    for column in ("depth", "non-zero blocks", "us a sweep", "+-", "us a sweep and block"):
        table.add_column(column, justify="right")
    for entry in depths:
        table.add_row(
            f"{entry['depth']:.0f}",
            f"{entry['blocks']:.0f}",
            f"{entry['us_per_sweep']:.0f}",
            f"{entry['spread_us']:.0f}",
            f"{entry['us_per_sweep_and_block']:.1f}",
        )
    console.print(table)
    _dump(json_file, as_json(rows, depths))


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise typer.BadParameter(f"unknown device {name!r}; use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device is available here; use --device cpu")
    return name


def _writable(path: Path | None) -> Path | None:
    """Refuse a place that cannot be written before any work is done."""
    if path is not None and not path.resolve().parent.is_dir():
        raise typer.BadParameter(f"cannot write {path}: its folder does not exist")
    return path


def _dump(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n")
