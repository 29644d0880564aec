"""Time one contender on one problem: find the loosest tolerance that is accurate enough, then measure the time.

A contender that misses the required error is listed with the error it reached, and cannot win.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lrrn.runtime.machine import cores
from lrrn.studies.bench.clock import Settings, best_of_threads, threads, timed
from lrrn.studies.bench.contenders import CONTENDERS, NOT_TIMED, Contender, Solve, absent, missing
from lrrn.studies.bench.journal import Journal
from lrrn.studies.bench.problems import Problem

logger = logging.getLogger("lrrn.studies.bench")

TARGET = 1e-6
"""Largest error max|z - z*| of an accepted solution."""
LADDER = tuple(10.0 ** (-k / 2) for k in range(6, 27))
"""Tolerances from loose to tight."""
PATIENCE = 20.0
"""A pass that takes more seconds than this is not repeated."""
FEW_RUNGS = (1e-6, 1e-8, 1e-10, 1e-12)
"""Tolerances tried for contenders that take seconds."""


def contest(
    case: dict[str, Any], problem: Problem, settings: Settings, budget: float, journal: Journal
) -> list[dict[str, Any]]:
    """Return one record per contender: median seconds to the target accuracy, their spread, and the accuracy reached.

    Parameters
    ----------
    case : dict
        Name and size of the problem; part of every record.
    problem : Problem
    settings : Settings
    budget : float
        Seconds allowed for a pass over the samples. A slower peer is timed on fewer samples and scaled, and its note says so.
    journal : Journal
    """
    records = []
    for contender in CONTENDERS:
        name = f"{case['case']}, {case['weights']} weights, {contender.name}"
        records.append({**case, **journal.once(name, record, contender, problem, settings, budget)})
    return records


def record(contender: Contender, problem: Problem, settings: Settings, budget: float) -> dict[str, Any]:
    """Time one contender, or record why it was not timed."""
    blank = {"contender": contender.name, "ours": contender.ours, **NOT_TIMED, "error": None}
    package = missing(contender.needs)
    if package is not None:
        return {**blank, "note": absent(package)}
    if problem.qp.dim > contender.largest:
        return {**blank, "note": f"not tried above {contender.largest} unknowns"}
    logger.info("%s: %s", problem.name, contender.name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of peers about their own tolerances
            return {**blank, **_timed(contender, problem, settings, budget)}
    except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
        if contender.ours:
            raise
        return {**blank, "note": f"failed: {str(error).splitlines()[0][:100]}"}


def _timed(contender: Contender, problem: Problem, settings: Settings, budget: float) -> dict[str, Any]:
    n = len(problem.reference)
    options = contender.threads
    with threads((options or (1,))[0] or cores()):
        part, run, seconds, answer = _affordable(contender, problem, budget)
        m = len(part.reference)
        if seconds > PATIENCE:
            error = part.error(answer)
            if not error <= TARGET:
                return {
                    "error": error,
                    "note": f"misses the required error; {seconds:.0f} s for {m} of {n} samples at tol {TARGET:.0e}",
                }
            note = f"one run on {m} of {n} samples, scaled"
            return {"seconds": seconds * n / m, "spread": 0.0, "threads": 1, "error": error, "tol": TARGET, "note": note}
        tol, error = loosest(run, part.error, LADDER if seconds < 1 else FEW_RUNGS, TARGET)
    if tol is None:
        return {"error": error, "note": "misses the required error"}
    tolerance = tol
    repeats = settings.repeats if seconds < 1 else min(settings.repeats, 3) if seconds < 3 else 1
    timing = best_of_threads(lambda: run(tolerance), repeats, options)
    if timing.threads > 1:
        # the solution with the better number of threads must be accurate too
        with threads(timing.threads):
            error = part.error(run(tolerance))
        if not error <= TARGET:
            return {"error": error, "note": f"misses the required error with {timing.threads} threads"}
    return {
        "seconds": timing.seconds * n / m,
        "spread": timing.spread * n / m,
        "threads": timing.threads,
        "error": error,
        "tol": tolerance,
        "note": "" if m == n else f"timed on {m} of {n} samples, scaled",
    }


def _affordable(contender: Contender, problem: Problem, budget: float) -> tuple[Problem, Solve, float, Tensor]:
    """Return the first samples that fit into the time budget, their ``Solve``, and the seconds and result of a pass."""
    n = len(problem.reference)
    m = n if contender.ours else min(n, 1 if contender.alone else 100)
    while True:
        part = problem if m == n else problem.first(m)
        run = contender.prepare(part)
        for _ in range(2):  # the first pass is a warm-up
            seconds, answer = timed(partial(run, TARGET))
            if seconds > PATIENCE:
                return part, run, seconds, answer
        more = min(n, int(m * budget / max(seconds, 1e-9)))
        if contender.ours or more <= 2 * m:
            return part, run, seconds, answer
        m = min(more, 16 * m)  # a single sample predicts the time of many poorly


def loosest(
    run: Callable[[float], Any], score: Callable[[Any], float], rungs: Sequence[float], target: float
) -> tuple[float | None, float]:
    """Bisect for the loosest tolerance whose solution scores at most ``target``; also return its score, or the tightest's.

    Only a tolerance whose own solution was scored and reached the target is returned.
    """
    best: tuple[float | None, float] = (None, math.inf)
    low, high = 0, len(rungs) - 1
    while low <= high:
        middle = (low + high) // 2
        error = score(run(rungs[middle]))
        if error <= target:
            best, high = (rungs[middle], error), middle - 1
        else:
            low = middle + 1
            if best[0] is None:
                best = (None, error)
    return best
