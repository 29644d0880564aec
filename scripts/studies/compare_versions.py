"""Time two versions of the package on the same machine, in turn: solving, gradients, training, certifying.

Each round starts one process a version, with one thread, and takes the best of a few repetitions of every case after a warm-up.
The table has the medians over the rounds and their ratio. A version is a folder with sources, such as ``src`` of a worktree.
With ``--cold`` it times the first use instead: a process without compiled kernels, then one that finds them in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPEATS = 3


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names and what to time; only names that every version has are used."""
    import torch

    import lrrn
    from lrrn.learning import Contrastive, Data, Margin, Settings, Trainer

    try:
        from lrrn.runtime.threads import one_thread
    except ModuleNotFoundError:  # before the folders
        from lrrn.threads import one_thread  # type: ignore[import-not-found, no-redef]

    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2000, 784, generator=generator) * (torch.rand(2000, 784, generator=generator) < 0.2)
    label = torch.randint(0, 10, (2000,), generator=generator)
    data = Data(x, torch.nn.functional.one_hot(label, 10).float(), label)

    def net(*hidden: int, dtype: torch.dtype = torch.float32) -> lrrn.LRRN:
        return lrrn.LRRN((784, *hidden, 10), generator=torch.Generator().manual_seed(1), dtype=dtype)

    small, wide = net(64, 64), net(512)
    yield "solve 784-64-64-10, float32, 2,000 samples", lambda: small.infer(x)
    yield "solve 784-64-64-10, float64, 2,000 samples", lambda: small.infer(x.double())
    yield "solve 784-512-10, float32, 500 samples", lambda: wide.infer(x[:500])

    def gradients(batch: int) -> None:
        with one_thread():
            for start in range(0, 20 * batch, batch):
                rows = x[start % 1000 : start % 1000 + batch]
                small(rows).square().sum().backward()

    for batch in (10, 100):
        yield f"20 gradients 784-64-64-10, batch {batch}", lambda batch=batch: gradients(batch)
    for objective, batch in ((Contrastive(), 10), (Contrastive(), 100), (Margin(), 100), (Margin(), 256)):
        settings = Settings(batch_size=batch, epochs=1, learning_rate=1e-3, optimizer="adam")
        name = f"epoch of 2,000, {type(objective).__name__}, batch {batch}"
        yield name, lambda o=objective, s=settings: Trainer(net(64, 64), o, s).fit(data)

    def certificates(method: str, n: int) -> None:
        fresh = net(64, 64, dtype=torch.float64)
        lrrn.certify(fresh, x[:n].double(), method, seconds=0.5)

    for method, n in (("spectral", 1000), ("multiplier", 1000), ("shared", 200), ("local", 4)):
        yield f"certify {n} samples, {method}", lambda method=method, n=n: certificates(method, n)


def measure() -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    found = {}
    for name, work in cases():
        work()
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        found[name] = min(times)
    return found


def first_use() -> dict[str, float]:
    """Return seconds of the import and of the first calls of an estimator in this process, of the wall and of the CPU."""
    clocks = {"": time.perf_counter, ", CPU": time.process_time}
    starts = {clock: read() for clock, read in clocks.items()}
    found = {}

    def lap(name: str) -> None:
        for clock, read in clocks.items():
            found[name + clock] = read() - starts[clock]
            starts[clock] = read()

    import lrrn

    lap("import lrrn")
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    classifier = lrrn.LRRNClassifier(random_state=0)
    lap("import scikit-learn, torch and the classifier")
    classifier.fit(x / 16, y)
    lap("fit on digits")
    classifier.predict(x / 16)
    lap("predict")
    classifier.certified_radius(x[:100] / 16)
    lap("certified_radius of 100 samples")
    return found


def process(folder: Path, *arguments: str, **variables: str) -> dict[str, float]:
    """Run this script on one version, with one thread, and return the seconds it prints."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, **variables, "PYTHONPATH": str(folder.resolve())}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cold_start(folder: Path) -> dict[str, float]:
    """Return the seconds of two processes, of which the first finds an empty cache of compiled kernels."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty cache", "second process"):
            times = process(folder, "--cold", NUMBA_CACHE_DIR=cache)
            found |= {f"{name}: {key}": value for key, value in times.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", nargs="?", type=Path, help="sources of one version")
    parser.add_argument("after", nargs="?", type=Path, help="sources of the other")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="time the first use, with an empty cache of compiled kernels")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.before is None:
        print(json.dumps(first_use() if options.cold else measure()))
        return
    seconds: list[dict[str, list[float]]] = [{}, {}]
    for number in range(0 if options.cold else -1, options.rounds):  # the first compiles what is not compiled yet
        for version, folder in zip(seconds, (options.before, options.after), strict=True):
            for name, value in (cold_start(folder) if options.cold else process(folder)).items():
                if number >= 0:
                    version.setdefault(name, []).append(value)
    rows = []
    for name in seconds[0]:
        before, after = (statistics.median(version[name]) for version in seconds)
        rows.append({"case": name, "before, ms": 1e3 * before, "after, ms": 1e3 * after, "ratio": after / before})
        print(f"{name:60} {1e3 * before:9.1f} ms {1e3 * after:9.1f} ms {after / before:6.2f}", flush=True)
    if options.json:
        from lrrn.runtime.machine import processor

        options.json.write_text(json.dumps({"processor": processor(), "rounds": options.rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
