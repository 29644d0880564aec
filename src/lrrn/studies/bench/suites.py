"""Benchmark suites by name. Each returns a list of plain records, and presents such a list as tables and charts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lrrn
from lrrn.runtime.storage import write_bytes
from lrrn.studies.bench import certify, depth, grad, scaling, solve, train
from lrrn.studies.bench.clock import POLICY, Settings, machine
from lrrn.studies.bench.headlines import headlines
from lrrn.studies.bench.journal import Journal
from lrrn.studies.bench.tables import Part, Table, as_markdown, as_page

SUITES = {"solve": solve, "depth": depth, "grad": grad, "train": train, "certify": certify, "scaling": scaling}

INTRODUCTION = (
    f"{POLICY} Every answer is held against a float64 reference: a contender that misses the required error is shown with the "
    "error it reached, and never wins. Peers that take too long are timed on fewer samples and scaled; their note says so. "
    "`make bench` makes the environments and repeats all of it; `lrrn bench --quick` is a smoke run of two minutes."
)
ABOUT = {
    "solve": "One free phase by every contender, to the same error, each at the loosest tolerance that reaches it.",
    "depth": "A sweep of coordinate descent touches the non-zero blocks of H only, so its cost follows their number.",
    "grad": "From the network's parameters to the gradient of a scalar loss; other libraries receive H and q built in torch.",
    "train": "One epoch on random images of the size of MNIST. Learners take turns: changes of the machine's speed affect all.",
    "certify": "Radii once the constants are known, and what the constants cost by the size of the network.",
    "scaling": "Inference by `net.infer` along one axis at a time, exponents by least squares in the logarithms.",
}

Results = dict[str, dict[str, Any]]
"""Results by suite: the machine, the relevant settings and the records."""


def run(name: str, settings: Settings, journal: Journal) -> dict[str, Any]:
    """Run one suite and return its machine, settings and records, in a form that ``json.dump`` accepts."""
    kept = {"quick": settings.quick, "seed": settings.seed, "repeats": settings.repeats}
    records = SUITES[name].run(settings, journal)
    return {"machine": machine(), "policy": POLICY, "settings": kept, "sittings": journal.sittings, "records": records}


def journal(name: str, settings: Settings, path: Path | None) -> Journal:
    """Return the journal of intermediate measurements of a suite: a file beside ``path``, where its results will be written."""
    if path is None:
        return Journal()
    about = {"suite": name, "version": lrrn.__version__, "settings": {k: str(v) for k, v in asdict(settings).items()}}
    return Journal(path.with_name(f"{path.name}.{name}.part"), {**about, "machine": machine()})


def present(name: str, result: dict[str, Any]) -> Sequence[Part]:
    """Return the tables and charts of one suite's result."""
    return SUITES[name].present(result["records"])


def where(result: dict[str, Any]) -> str:
    """Describe the machine of a suite's result: processor with its instruction set, cores, versions, and the date."""
    machine = result["machine"]
    parts = (f"{machine['cores']} cores", f"Python {machine['python']}", f"torch {machine['torch']}", machine["date"])
    return ", ".join((machine["processor"], *parts))


def read_json(path: Path) -> Results:
    """Return the results of an earlier run; raise an error with the reason if they cannot be read."""
    try:
        results: Results = json.loads(path.read_text())
        if not isinstance(results, dict) or not all(name in SUITES and "records" in results[name] for name in results):
            raise ValueError("it has other names in it")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} does not hold results of lrrn bench: {error}") from error
    return results


def write_json(path: Path, results: Results, update: bool) -> Results:
    """Write results to a file and return its contents; ``update`` keeps other suites already in the file."""
    before = read_json(path) if update and path.is_file() else {}
    both = {**before, **results}
    ordered = {name: both[name] for name in SUITES if name in both}
    write_bytes(path, (json.dumps(ordered, indent=1) + "\n").encode())
    return ordered


def _full(results: Results) -> dict[str, list[dict[str, Any]]]:
    """Return the records by suite, except those of smoke runs."""
    return {name: result["records"] for name, result in results.items() if not result["settings"]["quick"]}


def _machines(several: Sequence[Results]) -> Table:
    """Return the headline figures of the suites that more than one of several results have, side by side."""
    full = [_full(results) for results in several]
    shared = [name for name in SUITES if sum(name in records for records in full) > 1]
    tables = [headlines({name: records[name] for name in shared if name in records}) for records in full]
    measured = [{figure: value for figure, value, _, _ in table.rows} for table in tables]
    aims = {figure: aim for table in tables for figure, _, aim, _ in table.rows}
    names = [f"{one['processor']}, {one['cores']} cores, {one['date']}" for one in (_newest(results) for results in several)]
    rows = [(figure, *(values.get(figure, "-") for values in measured), aim) for figure, aim in aims.items()]
    return Table("The same on several machines", ("figure", *names, "aim"), rows)


def _newest(results: Results) -> dict[str, Any]:
    """Return the machine of the suite that was run last."""
    return max((result["machine"] for result in results.values()), key=lambda machine: str(machine["date"]))


def document(results: Results, markdown: bool = False, beside: Sequence[Results] = ()) -> str:
    """Return results as a self-contained HTML page with charts, or as Markdown without charts.

    The headline figures of results of other machines, or of other days, stand ``beside``.
    """
    short = [headlines(_full(results))]
    if beside:
        short.append(_machines([results, *beside]))
    sections: dict[str, tuple[str, Sequence[Part]]] = {"In short": (INTRODUCTION, short)}
    for name, result in results.items():
        words = f"{ABOUT[name]} Measured by `lrrn bench --suite {name}` on {where(result)}."
        sections[name] = (words, present(name, result))
    return (as_markdown if markdown else as_page)("Benchmarks", sections)
