"""How it is measured: one run, one thread policy, warm-up outside the clock, medians with spread."""

from __future__ import annotations

import logging
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

import torch

from lrrn.bench.contenders import CONTENDERS, Contender, Solve, threads
from lrrn.bench.problems import Problem, free_phase
from lrrn.solvers import SOLVERS
from lrrn.threads import blas_threads

logger = logging.getLogger("lrrn.bench")

LADDER = tuple(10.0 ** (-k / 2) for k in range(6, 27))
"""Tolerances tried from loose to tight until a contender's answer is accurate enough."""


@final
@dataclass(frozen=True)
class Row:
    """One contender's result: median seconds to the target accuracy, their spread, and the accuracy reached."""

    contender: str
    seconds: float | None
    spread: float | None
    error: float | None
    tol: float | None
    note: str
    ours: bool


def measure(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Return the median of ``repeats`` timings and half their range."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times), (max(times) - min(times)) / 2


def solve_suite(
    sizes: tuple[int, ...] = (784, 64, 64, 10), n: int = 1000, target: float = 1e-6, seed: int = 0, repeats: int = 7
) -> list[Row]:
    """Time to max|z - z*| <= target in float64, for every contender on the same problems in the same run."""
    problem = free_phase(sizes, n, seed)
    return [_time_to_target(contender, problem, target, repeats) for contender in CONTENDERS]


def _time_to_target(contender: Contender, problem: Problem, target: float, repeats: int) -> Row:
    missing = contender.missing()
    if missing is not None:
        note = f"skipped: {missing} is not installed (pip install 'lrrn[bench]')"
        return Row(contender.name, None, None, None, None, note, contender.ours)
    logger.info("timing %s", contender.name)
    run = contender.prepare(problem)
    tol, error = _loosest(run, problem, target)
    if tol is None:
        return Row(contender.name, None, None, error, None, "did not reach the target", contender.ours)
    count = 3 if contender.slow else repeats
    # more threads are not always faster at these sizes, so each contender gets the better of one and all
    options = {1, torch.get_num_threads()} if not contender.ours else {torch.get_num_threads()}
    timings = []
    for n_threads in options:
        with blas_threads(1) if contender.ours else threads(n_threads):
            timings.append((*measure(lambda: run(tol), count), n_threads))
    seconds, spread, n_threads = min(timings)
    note = f"torch threads: {n_threads}" if len(options) > 1 else ""
    return Row(contender.name, seconds, spread, error, tol, note, contender.ours)


def _loosest(run: Solve, problem: Problem, target: float) -> tuple[float | None, float]:
    """Tighten the tolerance until the answer is accurate enough; also warms everything up."""
    error = float("inf")
    for tol in LADDER:
        error = problem.error(run(tol))
        if error <= target:
            return tol, error
    return None, error


def depth_suite(width: int = 64, n: int = 1000, sweeps: int = 50, repeats: int = 9) -> list[dict[str, float]]:
    """Cost of one coordinate-descent sweep against depth: it should grow with the number of non-zero blocks."""
    rows = []
    with blas_threads(1):
        for depth in (2, 4, 8, 16):
            qp = free_phase((width,) * (depth + 2), n).qp
            stepper = SOLVERS["coordinate_descent"].begin(qp)
            never = torch.zeros(n, dtype=torch.float64)

            def run(stepper: Any = stepper, qp: Any = qp, never: Any = never) -> None:
                stepper.advance(qp, torch.zeros_like(qp.q), -qp.q, sweeps, never)

            run()
            seconds, spread = measure(run, repeats)
            blocks = 3 * depth - 2
            per_sweep = seconds / sweeps
            rows.append(
                {
                    "depth": depth,
                    "blocks": blocks,
                    "us_per_sweep": per_sweep * 1e6,
                    "spread_us": spread / sweeps * 1e6,
                    "us_per_sweep_and_block": per_sweep / blocks * 1e6,
                }
            )
    return rows


def machine() -> dict[str, Any]:
    """Describe what the figures were measured on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def as_json(solve_rows: list[Row], depth_rows: list[dict[str, float]]) -> dict[str, Any]:
    """Both tables and the machine, ready for ``json.dump``."""
    return {"machine": machine(), "solve": [asdict(row) for row in solve_rows], "depth": depth_rows}
