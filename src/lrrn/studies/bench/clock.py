"""Time measurement: one thread policy for all, untimed warm-up, medians with spread.

Every contender is timed with one thread and with all threads, and the better time counts: at these sizes more threads are not
always faster. Single-threaded contenders are timed with one thread. jax manages its own threads and is timed as it is.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from lrrn.runtime.machine import cores, processor

T = TypeVar("T")

POLICY = (
    "Each contender gets the better of one and of all threads, warm-up outside the clock; "
    "medians of repeats, +- half their range."
)


class Timing(NamedTuple):
    """Median seconds of several repeats, half their range, and the number of threads (0: the contender's own choice)."""

    seconds: float
    spread: float
    threads: int


@final
@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark run.

    Parameters
    ----------
    quick : bool
        Smoke test: small sizes, about two minutes for all suites together.
    seed : int
        Seed of all random numbers.
    repeats : int
        Number of timings per contender; the median is reported.
    samples : int
        Number of samples of the training epoch.
    rows : int
        Number of rows of the memory map in the measurement of peak memory.
    model : path, optional
        A saved model with real weights, for the suites ``solve`` and ``certify``; trained on digits if not given.
    root : path, optional
        Folder of the MNIST family, the data for such a model.
    """

    quick: bool = False
    seed: int = 0
    repeats: int = 5
    samples: int = 60_000
    rows: int = 1_000_000
    model: Path | None = None
    root: Path | None = None


def spread(times: Sequence[float]) -> float:
    """Return half the range."""
    return (max(times) - min(times)) / 2


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """Return the duration of one call in seconds, and its result."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def measure(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Return the median of ``repeats`` timings and half their range."""
    times = [timed(run)[0] for _ in range(repeats)]
    return statistics.median(times), spread(times)


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Set the number of threads of torch, and of the BLAS of NumPy and SciPy, to ``n``."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        with threadpool_limits(n):
            yield
    finally:
        torch.set_num_threads(before)


def best_of_threads(run: Callable[[], Any], repeats: int, options: Sequence[int] | None = None) -> Timing:
    """Time ``run`` with each number of threads, by default one and all, and return the better; warms up first.

    The option 0 stands for a contender that manages its own threads.
    """
    timings = []
    for n in options or sorted({1, cores()}):
        with threads(n or cores()):
            run()
            timings.append(Timing(*measure(run, repeats), n))
    return min(timings)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Fit y = c x^p by least squares in the logarithms and return p; nan with fewer than two points."""
    if len(x) < 2:
        return math.nan
    return float(np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)[0])


def machine() -> dict[str, Any]:
    """Describe the machine that the figures were measured on."""
    return {
        "processor": processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
