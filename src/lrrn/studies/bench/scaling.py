"""Suite ``scaling``: time over width, depth, batch and threads, with fitted exponents; peak memory of certification."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from lrrn.network import LRRN
from lrrn.runtime.machine import cores
from lrrn.runtime.threads import blas_threads
from lrrn.studies.bench.clock import Settings, best_of_threads, exponent
from lrrn.studies.bench.journal import Journal
from lrrn.studies.bench.problems import images, name_of, random_network
from lrrn.studies.bench.tables import Chart, Part, Table, number, seconds

logger = logging.getLogger("lrrn.studies.bench")

AXES = ("width", "depth", "batch")


def run(settings: Settings, journal: Journal) -> list[dict[str, Any]]:
    """Time ``net.infer`` in float64 at its default tolerance along each axis, the others fixed; then measure peak memory."""
    rows = settings.rows if not settings.quick else min(settings.rows, 2000)
    return [*journal.once("times", _times, settings), journal.once("memory", memory, rows)]


def _times(settings: Settings) -> list[dict[str, Any]]:
    widths, depths, batches, width, n = (
        ((8, 16), (2, 4), (16, 64), 8, 32)
        if settings.quick
        else ((64, 128, 256, 512, 1024), (4, 8, 16, 32), (100, 1000, 10_000, 100_000), 64, 1000)
    )
    records = []
    for hidden in widths:
        records.append(_point("width", hidden, _random((784, hidden, hidden, 10), 1 / 8, settings), n, settings))
    for depth in depths:
        # gamma = 1: otherwise the condition number, and with it the number of sweeps, would grow with depth
        records.append(_point("depth", depth, _random((784, *(width,) * depth, 10), 1.0, settings), n, settings))
    net = _random((784, width, width, 10), 1 / 8, settings)
    for batch in batches:
        records.append(_point("batch", batch, net, batch, settings))
    for n_threads in range(1, cores() + 1):
        records.append(_point("threads", n_threads, net, batches[-2], settings, (n_threads,)))
    for axis in AXES:
        points = [record for record in records if record["axis"] == axis]
        at = [record["value"] for record in points]
        records.append(
            {
                "kind": "exponent",
                "axis": axis,
                "exponent": exponent(at, [record["seconds"] for record in points]),
                "exponent_of_a_sweep": exponent(at, [record["seconds"] / record["sweeps"] for record in points]),
            }
        )
    return records


def _random(sizes: tuple[int, ...], gamma: float, settings: Settings) -> LRRN:
    return random_network(sizes, settings.seed, torch.float64, gamma=gamma)


def _point(
    axis: str, value: int, net: LRRN, n: int, settings: Settings, options: tuple[int, ...] | None = None
) -> dict[str, Any]:
    logger.info("%s %d", axis, value)
    x = images(n, net.sizes[0], settings.seed + 1, torch.float64)
    net.energy_snapshot(torch.float64)  # the Hessian is built once and cached

    def infer() -> Any:
        with blas_threads(1):
            return net.infer(x)

    solution = infer()
    timing = best_of_threads(infer, settings.repeats, options)
    return {
        "kind": "point",
        "axis": axis,
        "value": value,
        "network": name_of(net) if len(net.sizes) < 6 else f"784-{net.sizes[1]} x {len(net.sizes) - 2}-10",
        "batch": n,
        **timing._asdict(),
        "sweeps": float(solution.n_sweeps.double().mean()),
        "converged": float(solution.converged.double().mean()),
    }


def memory(rows: int) -> dict[str, Any]:
    """Return the peak memory of ``certified_radius`` on a memory map of float32 rows, minus that after the imports."""
    logger.info("memory: %d rows", rows)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).with_name("memory_child.py")
        command = [sys.executable, str(script), str(Path(folder) / "rows.dat"), str(rows)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"kind": "memory", "rows": rows, "features": 784, **json.loads(done.stdout.splitlines()[-1])}


def present(records: list[dict[str, Any]]) -> list[Part]:
    """Turn the records into tables and log-log charts."""
    points = [record for record in records if record["kind"] == "point"]
    rows = [
        (
            record["axis"],
            f"{record['value']:,}",
            record["network"],
            f"{record['batch']:,}",
            seconds(record["seconds"]),
            seconds(record["spread"]),
            f"{record['sweeps']:.1f}",
            f"{100 * record['converged']:.0f} %",
            str(record["threads"]),
        )
        for record in points
    ]
    columns = ("axis", "value", "network", "batch", "median", "+-", "sweeps", "converged", "threads")
    fits = [
        (record["axis"], f"{record['exponent']:.2f}", f"{record['exponent_of_a_sweep']:.2f}")
        for record in records
        if record["kind"] == "exponent"
    ]
    parts: list[Part] = [
        Table("Inference, float64, default tolerance", columns, rows),
        Table("Fitted exponents", ("axis", "of the time", "of the time of a sweep"), fits),
    ]
    for axis in AXES:
        chosen = [record for record in points if record["axis"] == axis]
        at = [math.log2(record["value"]) for record in chosen]
        series = {"lrrn": (at, [record["seconds"] for record in chosen])}
        parts.append(Chart(f"Time of inference against {axis}", f"log2 of {axis}", "seconds", series, True))
    return parts + [_memory_words(record) for record in records if record["kind"] == "memory"]


def _memory_words(record: dict[str, Any]) -> str:
    mib = 2.0**20
    return (
        f"certified_radius on {record['rows']:,} x {record['features']} float32 from a memory map: peak "
        f"{number(record['peak_bytes'] / mib)} MiB above the interpreter's {number(record['baseline_bytes'] / mib)} MiB, "
        f"{number(record['private_bytes'] / mib)} MiB of it the process's own; the rest are pages of files, "
        f"which the system can take back; "
        f"{seconds(record['seconds'])}."
    )
