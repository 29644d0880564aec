"""Headline figures and their targets, taken from the records of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lrrn.studies.bench.tables import Table, number

Records = list[dict[str, Any]]


def headlines(records: dict[str, Records]) -> Table:
    """Return measured figures and their targets, for the suites that were run; ``records`` is by suite."""
    rows = [row for name, rows_of in SOURCES.items() if name in records for row in rows_of(records[name])]
    return Table("Aims", ("figure", "measured", "aim", "met"), rows)


def _solve(records: Records) -> list[tuple[str, ...]]:
    rows = []
    solves = [record for record in records if record["kind"] == "solve" and record["weights"] == "random"]
    case = [record for record in solves if (record["dim"], record["batch"]) == (128, 1000)]
    aims = {
        "jaxopt BoxCDQP, jit + vmap": 10,
        "osqp, in a loop": 50,
        "proxsuite": 25,
        "cvxpylayers": 500,
        "torch FISTA": 3,
        "torch FISTA, momentum from mu and L": 3,
    }
    for name, aim in aims.items():
        ratio = _ratio(case, name)
        if ratio is not None:
            rows.append(_row(f"128 unknowns, batch 1000: {name} / ours", number(ratio), f">= {aim}", ratio >= aim))
    wide = [record for record in solves if record["dim"] == 2048]
    ratios = {record["contender"]: _ratio(wide, record["contender"]) for record in wide if not record["ours"]}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if known:
        nearest = min(known, key=lambda name: known[name])
        rows.append(_row(f"2048 unknowns: nearest peer ({nearest}) / ours", number(known[nearest]), "> 1", known[nearest] > 1))
    for record in records:
        if record["kind"] == "sweep rate" and record["dim"] == 128:
            share = record["performed_per_second"] / record["blas_per_second"]
            what = f"sweep rate / BLAS, {record['dtype']}, {record['threads']} threads"
            rows.append(_row(what, f"{share:.2f}", ">= 0.33", share >= 1 / 3))
    return rows


def _grad(records: Records) -> list[tuple[str, ...]]:
    rows = []
    for case in dict.fromkeys(record["case"] for record in records):
        chosen = [record for record in records if record["case"] == case]
        for name in ("qpth", "cvxpylayers"):
            ratio = _ratio(chosen, name)
            if ratio is not None:
                rows.append(_row(f"gradient, {case}: {name} / ours", number(ratio), ">= 50", ratio >= 50))
    return rows


def _train(records: Records) -> list[tuple[str, ...]]:
    rows = []
    for batch, name, aim in (
        (10, "MLPClassifier", 1.0),
        (100, "MLPClassifier", 1.5),
        (10, "deel-torchlip", 0.4),
        (100, "deel-torchlip", 0.4),
    ):
        for optimizer in ("sgd", "adam"):
            chosen = [record for record in records if record["batch"] == batch and record["optimizer"] == optimizer]
            ratio = _ratio(chosen, name)
            if ratio is not None:
                what = f"epoch, batch {batch}, {optimizer}: ours / {name}"
                rows.append(_row(what, f"{1 / ratio:.2f}", f"<= {aim:g}", 1 / ratio <= aim))
    times = {(record["batch"], record["contender"]): record["seconds"] for record in records if record["optimizer"] == "adam"}
    for (batch, name), seconds in times.items():
        yardstick = times.get((batch, "MLPClassifier"))
        if name.startswith("lrrn, ") and seconds is not None and yardstick is not None:
            what = f"epoch, batch {batch}, adam: {name} / MLPClassifier"
            rows.append(_row(what, f"{seconds / yardstick:.2f}", "<= 3", seconds <= 3 * yardstick))
    return rows


def _scaling(records: Records) -> list[tuple[str, ...]]:
    aims = {"batch": 1.05, "depth": 1.1, "width": 2.1}
    rows = [
        _row(
            f"exponent in {record['axis']}",
            f"{record['exponent']:.2f}",
            f"<= {aims[record['axis']]}",
            record["exponent"] <= aims[record["axis"]],
        )
        for record in records
        if record["kind"] == "exponent"
    ]
    for record in records:
        if record["kind"] == "memory":
            gib = record["peak_bytes"] / 2**30
            rows.append(_row(f"peak memory of certifying {record['rows']:,} rows", f"{gib:.2f} GiB", "< 1 GiB", gib < 1))
    return rows


def _ratio(records: Records, name: str) -> float | None:
    """Return the ratio of a contender's time to our best, or None if either is missing."""
    ours = [record["seconds"] for record in records if record["ours"] and record["seconds"] is not None]
    theirs = [record["seconds"] for record in records if record["contender"] == name and record["seconds"] is not None]
    return theirs[0] / min(ours) if ours and theirs else None


def _row(what: str, measured: str, aim: str, met: bool) -> tuple[str, ...]:
    return what, measured, aim, "yes" if met else "no"


SOURCES: dict[str, Callable[[Records], list[tuple[str, ...]]]] = {
    "solve": _solve,
    "grad": _grad,
    "train": _train,
    "scaling": _scaling,
}
