"""Suite ``depth``: the cost of one coordinate-descent sweep should grow with the number of non-zero blocks."""

from __future__ import annotations

from typing import Any

import torch

from lrrn.runtime.threads import blas_threads
from lrrn.solvers.coordinate_descent import CoordinateDescent
from lrrn.studies.bench.clock import Settings, measure
from lrrn.studies.bench.journal import Journal
from lrrn.studies.bench.problems import images, random_network
from lrrn.studies.bench.tables import Part, Table

DEPTHS = (2, 4, 8, 16)


def run(settings: Settings, journal: Journal) -> list[dict[str, Any]]:
    """Time sweeps of networks with layers of equal width, parallelised over samples with all threads."""
    return journal.once("sweeps", _sweeps, settings)


def _sweeps(settings: Settings) -> list[dict[str, Any]]:
    width, n, sweeps = (8, 32, 5) if settings.quick else (64, 1000, 50)
    records = []
    with blas_threads(1):
        for depth in DEPTHS:
            net = random_network((width,) * (depth + 2), settings.seed, torch.float64)
            qp = net.energy_snapshot(torch.float64).free(images(n, width, settings.seed + 1, torch.float64))
            stepper = CoordinateDescent().begin(qp, corrections=False)
            never = torch.zeros(n, dtype=torch.float64)

            def sweep(stepper: Any = stepper, qp: Any = qp, never: Any = never) -> None:
                stepper.advance(qp, torch.zeros_like(qp.q), -qp.q, sweeps, never)

            sweep()
            seconds, spread = measure(sweep, settings.repeats)
            blocks = 3 * depth - 2
            records.append(
                {
                    "kind": "depth",
                    "depth": depth,
                    "width": width,
                    "batch": n,
                    "blocks": blocks,
                    "us_per_sweep": seconds / sweeps * 1e6,
                    "spread_us": spread / sweeps * 1e6,
                    "us_per_sweep_and_block": seconds / sweeps / blocks * 1e6,
                }
            )
    return records


def present(records: list[dict[str, Any]]) -> list[Part]:
    """Turn the records into a table."""
    columns = ("depth", "non-zero blocks", "us a sweep", "+-", "us a sweep and block")
    rows = [
        (
            str(record["depth"]),
            str(record["blocks"]),
            f"{record['us_per_sweep']:.0f}",
            f"{record['spread_us']:.0f}",
            f"{record['us_per_sweep_and_block']:.1f}",
        )
        for record in records
    ]
    width, n = records[0]["width"], records[0]["batch"]
    return [Table(f"Cost of one coordinate-descent sweep, width {width}, batch {n}, float64", columns, rows)]
