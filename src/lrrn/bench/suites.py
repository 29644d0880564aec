"""How it is measured: one run, one thread policy, warm-up outside the clock, medians with spread."""

from __future__ import annotations

import logging
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

import torch

from lrrn.bench.contenders import CONTENDERS, Contender, Solve, threads
from lrrn.bench.problems import Problem, free_phase, images
from lrrn.learning import Contrastive, Data, Settings, Trainer
from lrrn.network import LRRN
from lrrn.solvers import SOLVERS
from lrrn.threads import blas_threads, one_thread

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


@final
@dataclass(frozen=True)
class Epoch:
    """Seconds of one epoch: the median over interleaved rounds, and half their range."""

    batch: int
    contender: str
    optimizer: str
    peer: bool
    seconds: float
    spread: float


def train_suite(
    n: int = 60_000,
    batches: tuple[int, ...] = (100, 10),
    sizes: tuple[int, ...] = (784, 64, 64, 10),
    seed: int = 0,
    rounds: int = 5,
) -> list[Epoch]:
    """Time of an epoch of contrastive learning against scikit-learn's MLPClassifier on the same data with the same optimiser.

    Contenders take turns, so that a machine that changes its pace hurts all of them alike. Both run single-threaded BLAS, which
    is the faster choice for either at these sizes.
    """
    x = images(n, sizes[0], seed, torch.float32)
    label = torch.randint(0, sizes[-1], (n,), generator=torch.Generator().manual_seed(seed))
    data = Data(x, torch.nn.functional.one_hot(label, sizes[-1]).to(x), label)
    results = []
    for batch in batches:
        runs = {
            (optimizer, peer): (_peer_epoch if peer else _our_epoch)(data, sizes, batch, optimizer, seed)
            for optimizer in ("sgd", "adam")
            for peer in (False, True)
        }
        times: dict[tuple[str, bool], list[float]] = {key: [] for key in runs}
        with one_thread():
            for turn in range(rounds + 1):
                for key, run in runs.items():
                    seconds = run()
                    if turn > 0:  # the first round warms up
                        times[key].append(seconds)
        for (optimizer, peer), seconds_each in times.items():
            name = f"{'MLPClassifier' if peer else 'lrrn, contrastive'}, {optimizer}"
            spread = (max(seconds_each) - min(seconds_each)) / 2
            results.append(Epoch(batch, name, optimizer, peer, statistics.median(seconds_each), spread))
    return results


def _our_epoch(data: Data, sizes: tuple[int, ...], batch: int, optimizer: str, seed: int) -> Callable[[], float]:
    net = LRRN(sizes, generator=torch.Generator().manual_seed(seed))
    rate = 0.1 if optimizer == "sgd" else 1e-3
    settings = Settings(optimizer=optimizer, learning_rate=rate, batch_size=batch, epochs=1, weight_decay=1e-4, seed=seed)

    def run() -> float:
        start = time.perf_counter()
        Trainer(net, Contrastive(), settings).fit(data)
        return time.perf_counter() - start

    return run


def _peer_epoch(data: Data, sizes: tuple[int, ...], batch: int, optimizer: str, seed: int) -> Callable[[], float]:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    assert data.label is not None
    X, y = data.x.numpy(), data.label.numpy()
    network = MLPClassifier(sizes[1:-1], solver=optimizer, batch_size=batch, max_iter=1, warm_start=True, random_state=seed)

    def run() -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # one epoch is what we want
            start = time.perf_counter()
            network.fit(X, y)
            return time.perf_counter() - start

    return run


def machine() -> dict[str, Any]:
    """Describe what the figures were measured on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def as_json(solve_rows: list[Row], depth_rows: list[dict[str, float]], epochs: list[Epoch]) -> dict[str, Any]:
    """All tables and the machine, ready for ``json.dump``."""
    return {
        "machine": machine(),
        "solve": [asdict(row) for row in solve_rows],
        "depth": depth_rows,
        "train": [asdict(epoch) for epoch in epochs],
    }
