"""Time ``shared`` certificates of a wide network on an idle machine and with one busy loop per core, and compare.

With one busy loop per core the fair share of CPU time is one half, so twice the time is the best possible. The network has
random weights and a read-out with rows of unit norm. The inputs are MNIST images if LRRN_DATA has them, else random numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import lrrn
from lrrn import datasets
from lrrn.runtime.machine import cores, processor


def network(width: int) -> lrrn.LRRN:
    net = lrrn.LRRN((784, width, 10), gamma=1.0, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        net.W[-1].div_(net.W[-1].norm(dim=1, keepdim=True))
    return net


def inputs(n: int) -> tuple[str, torch.Tensor]:
    if datasets.find()["mnist"]["test"] is not None:
        return "MNIST", torch.as_tensor(datasets.load("mnist", split="test")[0][:n]).to(torch.float64)
    return "random", torch.rand(n, 784, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def certified(width: int, x: torch.Tensor, busy: int) -> dict[str, Any]:
    """Time the constants shared by all images, and the images, while ``busy`` busy loops run."""
    net = network(width)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        start = time.perf_counter()
        lrrn.certify(net, x[:1], "shared", seconds=1.0)
        first = time.perf_counter()
        print(f"{busy} busy loops: the first certificate took {first - start:.1f} s", flush=True)
        radius = lrrn.certify(net, x, "shared", seconds=1.0).radius
        done = time.perf_counter()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    return {
        "busy loops": busy,
        "first certificate": round(first - start, 2),
        "images": round(done - first, 2),
        "all": round(done - start, 2),
        "median radius": float(radius.median()),
    }


def main() -> None:
    """Measure, print one line per run, and write the output file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    name, x = inputs(options.images)
    certified(64, x[:32], 0)  # warm-up: compile all kernels
    rows = []
    for busy in (0, cores()):
        rows.append(certified(options.width, x, busy))
        print(rows[-1], flush=True)
    ratio = rows[1]["all"] / rows[0]["all"]
    print(f"{options.images} images ({name}), 784-{options.width}-10: beside {cores()} busy loops {ratio:.2f} times as long")
    if options.json:
        report = {
            "processor": processor(),
            "cores": cores(),
            "torch": torch.__version__,
            "data": name,
            "rows": rows,
            "ratio": ratio,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
