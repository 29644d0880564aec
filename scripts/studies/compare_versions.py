"""Time two versions of the package on the same machine, in turn: solving, gradients, training, certifying.

Each round starts one process a version, with one thread, and takes the best of a few repetitions of every case after a warm-up.
The table has the medians over the rounds and their ratio. A version is a folder with sources, such as ``src`` of a worktree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
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
    for objective, batch in ((Contrastive(), 10), (Contrastive(), 100), (Margin(), 100)):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", nargs="?", type=Path, help="sources of one version")
    parser.add_argument("after", nargs="?", type=Path, help="sources of the other")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.before is None:
        print(json.dumps(measure()))
        return
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    seconds: list[dict[str, list[float]]] = [{}, {}]
    for number in range(-1, options.rounds):  # the first compiles what is not compiled yet
        for version, folder in zip(seconds, (options.before, options.after), strict=True):
            environment = {**os.environ, **threads, "PYTHONPATH": str(folder.resolve())}
            done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                if number >= 0:
                    version.setdefault(name, []).append(value)
    rows = []
    for name in seconds[0]:
        before, after = (statistics.median(version[name]) for version in seconds)
        rows.append({"case": name, "before, ms": 1e3 * before, "after, ms": 1e3 * after, "ratio": after / before})
        print(f"{name:45} {1e3 * before:9.1f} ms {1e3 * after:9.1f} ms {after / before:6.2f}", flush=True)
    if options.json:
        from lrrn.runtime.machine import processor

        options.json.write_text(json.dumps({"processor": processor(), "rounds": options.rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
