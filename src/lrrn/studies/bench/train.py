"""Suite ``train``: time of an epoch on MNIST-sized data; contrastive and margin losses, and other networks of the same size."""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lrrn.learning import Data
from lrrn.runtime.machine import cores
from lrrn.studies.bench import learners
from lrrn.studies.bench.clock import Settings, spread, threads, timed
from lrrn.studies.bench.contenders import NOT_TIMED, absent, missing
from lrrn.studies.bench.journal import Journal
from lrrn.studies.bench.learners import LEARNERS, Epoch
from lrrn.studies.bench.problems import images
from lrrn.studies.bench.tables import Part, Table, number

logger = logging.getLogger("lrrn.studies.bench")

YARDSTICK = "MLPClassifier"
BUDGET = 8.0
"""Time budget of an epoch in seconds; slower learners are timed on fewer samples and scaled, and their note says so."""


def run(settings: Settings, journal: Journal) -> list[dict[str, Any]]:
    """Time an epoch of every learner, by batch size and optimiser.

    Learners are timed in turn, so that changes in the machine's speed affect all of them alike.
    """
    sizes = (784, 8, 8, 10) if settings.quick else (784, 64, 64, 10)
    n, rounds = (min(settings.samples, 1000), 1) if settings.quick else (settings.samples, min(settings.repeats, 3))
    x = images(n, sizes[0], settings.seed, torch.float32)
    label = torch.randint(0, sizes[-1], (n,), generator=torch.Generator().manual_seed(settings.seed))
    data = Data(x, torch.nn.functional.one_hot(label, sizes[-1]).to(x), label)
    records = []
    for batch in (100, 10, 256):
        records += journal.once(f"batch {batch}", _contest, data, sizes, batch, rounds, settings)
    return records


def _contest(data: Data, sizes: tuple[int, ...], batch: int, rounds: int, settings: Settings) -> list[dict[str, Any]]:
    n = len(data)
    records = []
    running: list[tuple[dict[str, Any], Epoch, int, list[float]]] = []
    for name, optimizer, needs, make in LEARNERS:
        record = _blank(name, optimizer, n, sizes, batch)
        records.append(record)
        package = missing(needs)
        if package is not None:
            record["note"] = absent(package)
            continue
        logger.info("batch %d: %s, %s", batch, name, optimizer)
        epoch = make(data, sizes, batch, optimizer, settings.seed)
        n_threads, m = _rehearse(epoch, n, batch)
        record["threads"] = n_threads
        record["note"] = "" if m == n else f"timed on {m} of {n} samples, scaled"
        running.append((record, epoch, m, []))
    for _ in range(rounds):
        for record, epoch, m, times in running:
            with threads(record["threads"]):
                times.append(_seconds(epoch, m) * n / m)
    for record, _, _, times in running:
        record["seconds"], record["spread"] = statistics.median(times), spread(times)
    return [*records, _predictive_coding(n, sizes, batch, rounds)]


def _blank(name: str, optimizer: str, n: int, sizes: tuple[int, ...], batch: int) -> dict[str, Any]:
    head = {"kind": "train", "batch": batch, "contender": name, "optimizer": optimizer, "ours": name == "lrrn"}
    return {**head, "sizes": list(sizes), "samples": n, **NOT_TIMED, "note": ""}


def _rehearse(epoch: Epoch, n: int, batch: int) -> tuple[int, int]:
    """Warm up, and return the better number of threads and the number of samples within the budget."""
    some = min(n, max(20 * batch, 500))
    times = {}
    for n_threads in sorted({1, cores()}):
        with threads(n_threads):
            _seconds(epoch, some)
            times[n_threads] = min(_seconds(epoch, some) for _ in range(2))
    best = min(times, key=lambda key: times[key])
    affordable = int(BUDGET / times[best] * some) // batch * batch
    return best, n if affordable >= n else max(affordable, batch)


def _seconds(epoch: Epoch, n: int) -> float:
    return timed(lambda: epoch(n))[0]


def pcx_python() -> Path | None:
    """Return the interpreter of the environment with pcx: LRRN_PCX_PYTHON, or .venv-pcx beside ours."""
    path = Path(os.environ.get("LRRN_PCX_PYTHON", Path(sys.prefix).parent / ".venv-pcx" / "bin" / "python"))
    return path if path.is_file() else None


def _predictive_coding(n: int, sizes: tuple[int, ...], batch: int, rounds: int) -> dict[str, Any]:
    """Time pcx in its own environment, whose jax is older than ours; nothing else runs at the same time."""
    record = _blank("pcx, 8 inference steps", "adam", n, sizes, batch)
    python = pcx_python()
    if python is None:
        return {**record, "note": "skipped: no environment with pcx (make .venv-pcx/.pcx)"}
    logger.info("batch %d: pcx", batch)
    script = Path(learners.__file__).with_name("pcx_epoch.py")
    command = [str(python), str(script), *map(str, (n, batch, rounds, BUDGET, *sizes))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {**record, "note": f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:100]}"}
    answer = json.loads(done.stdout.splitlines()[-1])
    times, m = answer["seconds"], answer["samples"]
    note = "" if m == n else f"timed on {m} of {n} samples, scaled"
    return {**record, "seconds": statistics.median(times) * n / m, "spread": spread(times) * n / m, "threads": 0, "note": note}


def present(records: list[dict[str, Any]]) -> list[Part]:
    """Turn the records into one table of ratios per batch size."""
    parts: list[Part] = []
    columns = ("contender", "optimiser", "seconds", "+-", f"times {YARDSTICK}, same optimiser", "times lrrn", "threads", "note")
    for batch in dict.fromkeys(record["batch"] for record in records):
        chosen = [record for record in records if record["batch"] == batch]
        known = {(record["contender"], record["optimizer"]): record["seconds"] for record in chosen}
        rows = []
        for record in chosen:
            time, optimizer, n_threads = record["seconds"], record["optimizer"], record["threads"]
            ratios = [
                "-" if time is None or known.get((name, optimizer)) is None else f"{time / known[name, optimizer]:.2f}"
                for name in (YARDSTICK, "lrrn")
            ]
            measured = ("-", "-") if time is None else (number(time), number(record["spread"]))
            shown = "-" if n_threads is None else str(n_threads or "own")
            rows.append((record["contender"], optimizer, *measured, *ratios, shown, record["note"]))
        sizes = "-".join(map(str, chosen[0]["sizes"]))
        parts.append(Table(f"One epoch of {chosen[0]['samples']} samples, {sizes}, float32, batch {batch}", columns, rows))
    return parts
