"""Reproduce one table or figure of the paper, or all of them, in one call."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from lrrn.datasets import DataError
from lrrn.studies.common import report
from lrrn.studies.common.pool import carry_out
from lrrn.studies.common.runs import DATA, DECAYS, FULL, QUICK, Run, finished, test_data, training_data, undisturbed
from lrrn.studies.common.sections import Comparison, Results, Section
from lrrn.studies.paper import decay_tables, filters, learning_curves, pretraining, table1

logger = logging.getLogger("lrrn.studies.paper")

_PARTS: dict[str, tuple[Any, Any]] = {
    "table1": (table1.runs, table1.sections),
    "table2": (partial(decay_tables.runs, DECAYS[0]), partial(decay_tables.sections, DECAYS[0])),
    "table3": (partial(decay_tables.runs, DECAYS[1]), partial(decay_tables.sections, DECAYS[1])),
    "learning-curves": (learning_curves.runs, learning_curves.sections),
    "pretraining": (pretraining.runs, pretraining.sections),
    "filters": (filters.runs, filters.sections),
}
UNFINISHED = "not finished"
ITEMS = (*_PARTS, "all")
"""Tables and figures that can be reproduced."""


@final
@dataclass(frozen=True)
class Reproduction:
    """Result of a reproduction.

    Attributes
    ----------
    sections : list of Section
        Comparisons, tables and figures.
    failed : dict of str to str
        Failed runs and the reasons.
    seconds : float
        Wall time of this call.
    """

    sections: list[Section]
    failed: dict[str, str]
    seconds: float

    @property
    def comparisons(self) -> list[Comparison]:
        """Comparisons of all sections."""
        return [comparison for section in self.sections for comparison in section.comparisons]


def reproduce(
    item: str,
    work: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    quick: bool = False,
    jobs: int | None = None,
    root: str | os.PathLike[str] | None = None,
    seed: int = 0,
    device: str = "cpu",
    download: bool = True,
    report_only: bool = False,
) -> Reproduction:
    """Reproduce one of the paper's tables or figures, or all, from data.

    Finished training runs are not repeated; interrupted ones resume.

    Parameters
    ----------
    item : {"table1", "table2", "table3", "learning-curves", "pretraining", "filters", "all"}
    work : path-like
        Folder for models, checkpoints and the results of runs.
    output : path-like
        Folder for ``report.md``, ``report.html``, ``results.json`` and the figures.
    quick : bool, default=False
        A smoke test on part of the data, which takes minutes.
    jobs : int, optional
        Number of parallel runs, on a CUDA device of runs measured in parallel; by default the number of cores.
    root : path-like, optional
        Folder with the data; LRRN_DATA if not given. With ``download``, missing data are downloaded.
    seed : int, default=0
        Added to the seeds of all runs.
    device : {"cpu", "cuda", "auto"}, default="cpu"
    report_only : bool, default=False
        Report on finished runs and start none.

    Returns
    -------
    Reproduction
    """
    _check(item, jobs)
    start = time.perf_counter()
    name, scale = ("quick", QUICK) if quick else ("full", FULL)
    folder = Path(work) / (name if seed == 0 else f"{name}-{seed}")
    for place in (folder, Path(output)):
        place.mkdir(parents=True, exist_ok=True)
    root, parts = None if root is None else Path(root), _PARTS if item == "all" else {item: _PARTS[item]}
    wanted = list(dict.fromkeys(run for runs, _ in parts.values() for run in runs(scale)))
    actual = {run: replace(run, seed=run.seed + seed) for run in wanted}
    reasons = _without_data(wanted, root, download)
    possible = [actual[run] for run in wanted if run not in reasons]
    failed = {} if report_only else carry_out(possible, folder, jobs or os.cpu_count() or 1, root, device, download)
    results = _results(wanted, actual, folder, failed, reasons)
    sections = [section for _, make in parts.values() for section in make(results, scale)]
    seconds = time.perf_counter() - start
    report.write(Path(output), sections, _preface(item, quick, results))
    _write_results(Path(output), item, name, sections, results, actual)
    return Reproduction(sections, {run.name: reason for run, reason in failed.items()}, seconds)


def _check(item: str, jobs: int | None) -> None:
    if item not in ITEMS:
        raise ValueError(f"there is no {item!r} to reproduce; use one of {', '.join(ITEMS)}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")


def _results(
    wanted: Sequence[Run], actual: dict[Run, Run], folder: Path, failed: dict[Run, str], reasons: dict[Run, str]
) -> Results:
    """Read the results of runs; ``actual`` has the runs as executed, and ``reasons`` those without data, and why."""
    by_run: dict[Run, dict[str, Any]] = {}
    for run in wanted:
        if run in reasons:
            continue
        done = finished(actual[run], folder / actual[run].name)
        if done is None:
            reasons[run] = f"failed ({failed[actual[run]]})" if actual[run] in failed else UNFINISHED
            continue
        pace = undisturbed(folder / actual[run].name)
        by_run[run] = {**done, "seconds": {**done["seconds"], **({} if pace is None else {"undisturbed training": pace})}}

    def array(run: Run, what: str) -> Any:
        path = folder / actual[run].name / f"{what}.npy"
        return np.load(path, allow_pickle=False) if path.is_file() else None

    return Results(by_run, reasons, array)


def _write_results(
    output: Path, item: str, scale: str, sections: Sequence[Section], results: Results, actual: dict[Run, Run]
) -> None:
    content = {
        "item": item,
        "scale": scale,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "torch": torch.__version__,
        "comparisons": [
            {**asdict(comparison), "verdict": comparison.verdict, "section": section.title}
            for section in sections
            for comparison in section.comparisons
        ],
        "not run": {run.name: reason for run, reason in results.reasons.items()},
        "runs": {actual[run].name: result for run, result in results.by_run.items()},
    }
    report.write_results(output / "results.json", content)


def _without_data(runs: Sequence[Run], root: Path | None, download: bool) -> dict[Run, str]:
    """Return the runs whose data is unavailable, and short reasons. All data is checked before any run starts."""
    missing: dict[str, str] = {}
    for name in dict.fromkeys(run.data for run in runs):
        run = next(run for run in runs if run.data == name)
        try:
            training_data(run, root, download)
            for test in ("mnist", "kmnist", "fashion_mnist") if any(r.kind == "energy" for r in runs) else (name,):
                test_data(test, run.scale, root, download)
        except DataError as error:
            missing[name] = str(error)
    if len(missing) == len({run.data for run in runs}):
        raise DataError(f"none of the data is available: {next(iter(missing.values()))}")
    for name, why in missing.items():
        logger.warning("%s is left out: %s", DATA[name], why)
    return {run: f"the images of {DATA[run.data]} are not at hand" for run in runs if run.data in missing}


def _preface(item: str, quick: bool, results: Results) -> list[str]:
    measured = [result["seconds"] for result in results.by_run.values()]
    total = sum(part["training"] + part["measuring"] for part in measured)
    alone = sum(part.get("undisturbed training", part["training"]) + part["measuring"] for part in measured)
    command = f"lrrn reproduce {item}{' --quick' if quick else ''}"
    on_device = sum(result["device"] != "cpu" for result in results.by_run.values())
    times = (
        f"{on_device} of them side by side on a CUDA device"
        if on_device
        else f"whose wall times add up to {total / 60:.0f} minutes, or {alone / 60:.0f} at the pace of the fastest tenth of "
        "each run's epochs, when nothing else slowed it down; two cores need about half of that"
    )
    text = [
        f"Made by `{command}`: {len(measured)} training runs, {times}. "
        "Verdicts are computed. A figure of ours is the mean over seeds where there are several."
    ]
    unfinished = sum(reason == UNFINISHED for reason in results.reasons.values())
    if unfinished:
        text.append(f"{unfinished} runs are not finished; their rows say so, and the same command goes on with them.")
    if quick:
        text.append("This is a smoke run on a part of the data: its figures are not meant to meet the targets.")
    return text
