"""Suite ``solve``: time of one free phase for every contender, by size, batch and conditioning; and our kernel's rate."""

from __future__ import annotations

import math
from typing import Any

from lrrn.studies.bench.clock import Settings
from lrrn.studies.bench.contest import TARGET, contest
from lrrn.studies.bench.journal import Journal
from lrrn.studies.bench.problems import Problem, free_phase, random_phase, trained
from lrrn.studies.bench.rate import sweep_rates
from lrrn.studies.bench.tables import Chart, Part, Table, contest_table, number

FULL = ((32, 1000), (64, 1), (64, 10), (64, 100), (64, 1000), (64, 10_000), (256, 1000), (1024, 50), (2048, 20))
QUICK = ((8, 1), (8, 30))
ILL = 8.0
"""Factor on the weights of the ill-conditioned case."""


def run(settings: Settings, journal: Journal) -> list[dict[str, Any]]:
    """Time to max|z - z*| <= 1e-6 in float64 for every contender on the same problems in the same run, then sweep rates."""
    width, n = (8, 30) if settings.quick else (64, 1000)
    budget = 0.02 if settings.quick else 0.5
    records = []
    for hidden, batch in QUICK if settings.quick else FULL:
        problem = random_phase((784, hidden, hidden, 10), batch, settings.seed)
        records += contest(_case(problem, "random"), problem, settings, budget, journal)
    ill = random_phase((784, width, width, 10), n, settings.seed, scale=ILL)
    records += contest(_case(ill, "ill-conditioned"), ill, settings, budget, journal)
    net, x, name = trained(settings, n)
    real = free_phase(net, x, name)
    records += contest(_case(real, "trained"), real, settings, budget, journal)
    return records + journal.once("sweep rates", sweep_rates, settings)


def _case(problem: Problem, weights: str) -> dict[str, Any]:
    n, dim = problem.reference.shape
    return {
        "kind": "solve",
        "case": f"{problem.name}, batch {n}",
        "weights": weights,
        "dim": dim,
        "batch": n,
        "condition": problem.condition,
    }


def present(records: list[dict[str, Any]]) -> list[Part]:
    """Turn the records into tables of ratios and charts."""
    solves = [record for record in records if record["kind"] == "solve"]
    parts: list[Part] = []
    for case in dict.fromkeys(record["case"] for record in solves):
        rows = [record for record in solves if record["case"] == case]
        dim, condition = rows[0]["dim"], rows[0]["condition"]
        title = f"One free phase, {case}: {dim} unknowns, condition {condition:.0f}, float64, to max|z - z*| <= {TARGET:.0e}"
        parts.append(contest_table(title, rows))
    random = [record for record in solves if record["weights"] == "random" and record["seconds"] is not None]
    parts.append(_chart(random, "batch", "dim", "batch"))
    parts.append(_chart(random, "dim", "batch", "unknowns"))
    return [*parts, _rate_table([record for record in records if record["kind"] == "sweep rate"])]


def _chart(records: list[dict[str, Any]], along: str, fixed: str, label: str) -> Chart:
    """Return seconds per sample along one axis, for the most similar contenders, at the other axis' value with most points."""
    values = [record[fixed] for record in records if record["contender"] == "auto"]
    most = max(values, key=values.count) if values else None
    chosen = [record for record in records if record[fixed] == most] if along == "batch" else records
    series = {}
    for name in (
        "auto",
        "torch FISTA, momentum from mu and L",
        "jaxopt BoxCDQP, jit + vmap",
        "osqp, in a loop",
        "quadprog, in a loop",
    ):
        points = {}
        for record in chosen:
            if record["contender"] == name:
                # the largest batch of each size
                points[record[along]] = record["seconds"] / record["batch"]
        if len(points) > 1:
            keys = sorted(points)
            series[name] = ([math.log2(key) for key in keys], [points[key] for key in keys])
    return Chart(f"Seconds a sample against {label}", f"log2 of {label}", "seconds a sample", series, True)


def _rate_table(records: list[dict[str, Any]]) -> Table:
    columns = (
        "unknowns",
        "dtype",
        "threads",
        "performed, G/s",
        "of them needed, G/s",
        "BLAS, G/s",
        "performed / BLAS",
        "needed / BLAS",
    )
    rows = [
        (
            str(record["dim"]),
            record["dtype"],
            str(record["threads"]),
            number(record["performed_per_second"] / 1e9),
            number(record["needed_per_second"] / 1e9),
            number(record["blas_per_second"] / 1e9),
            f"{record['performed_per_second'] / record['blas_per_second']:.2f}",
            f"{record['needed_per_second'] / record['blas_per_second']:.2f}",
        )
        for record in records
    ]
    return Table(
        "Multiply-adds a second of coordinate-descent sweeps against a matrix product of the same type and threads",
        columns,
        rows,
    )
