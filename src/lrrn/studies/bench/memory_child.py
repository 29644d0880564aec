"""Certify the rows of a memory map in a separate process and print the memory it used.

Arguments: the file to create and the number of rows. The file is sparse: its rows are zeros that take no disk space.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np

from lrrn.estimators import LRRNClassifier


def resident(field: str) -> int:
    """Return a field of the process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field + ":")))


def main(path: str, rows: int) -> dict[str, float]:
    """Fit a small classifier, certify all rows, and compare the peak memory with that of the interpreter after imports."""
    baseline, before = resident("VmRSS"), resident("RssAnon")
    generator = np.random.default_rng(0)
    X = generator.random((200, 784), np.float32)
    classifier = LRRNClassifier(hidden_sizes=(64, 64), epochs=1, random_state=0).fit(X, np.arange(200) % 10)
    classifier.certified_radius(X)  # compile kernels and compute the constants
    data = np.memmap(path, np.float32, "w+", shape=(rows, 784))
    del data
    data = np.memmap(path, np.float32, "r", shape=(rows, 784))
    private = [before]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            private[0] = max(private[0], resident("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    radius = classifier.certified_radius(data)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    assert radius.shape == (rows,)
    peak = max(resident("VmHWM") - baseline, 0)
    return {"baseline_bytes": baseline, "peak_bytes": peak, "private_bytes": private[0] - before, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
