"""Convolutional networks on the CPU: time of inference at 25,088 units, and a convolution as a matrix against a dense layer.

python scripts/studies/convolutions.py --json benchmarks/results/DATE-convolutions.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import lrrn
from lrrn.learning import Data, Settings, Trainer
from lrrn.learning.objectives import Contrastive
from lrrn.runtime.machine import cores, processor


def inference(n: int, repeats: int) -> dict[str, Any]:
    """Time the free phase of 512 kernels of 8 x 8 at stride 4 on images of 3 x 32 x 32, at the default tolerance."""
    net = lrrn.LRRN(((3, 32, 32), lrrn.Conv(512, 8, 4), 10), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        net.W[0].mul_(12)  # to a condition number as of a trained network
    x = torch.rand((n, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    seconds, solution = [], net.infer(x)
    for _ in range(repeats):
        start = time.perf_counter()
        solution = net.infer(x)
        seconds.append(time.perf_counter() - start)
    hessian = net.energy_snapshot(torch.float32).free_hessian
    return {
        "units": net.sizes[1],
        "batch": n,
        "condition number, estimated": hessian.estimate_condition(),  # type: ignore[union-attr]
        "converged": int(solution.converged.sum()),
        "iterations": int(solution.n_sweeps.max()),
        "milliseconds per image": 1000 * statistics.median(seconds) / n,
    }


def digits(epochs: int) -> list[dict[str, Any]]:
    """Train a convolution that is small enough for a matrix, and the dense layer of the same size, interleaved."""
    x, y = lrrn.datasets.load("digits", split="train")
    data = Data(torch.as_tensor(x), torch.nn.functional.one_hot(torch.as_tensor(y), 10).float(), torch.as_tensor(y))
    layers = {"convolution": ((1, 8, 8), lrrn.Conv(8, 3), 10), "dense": (64, 288, 10)}
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for turn in range(4):
        for name, sizes in layers.items():
            net = lrrn.LRRN(sizes, generator=torch.Generator().manual_seed(turn))
            history = Trainer(net, Contrastive(), Settings("adam", 0.004, batch_size=32, epochs=epochs)).fit(data)
            seconds[name] += [record["seconds"] for record in history] if turn else []  # the first compiles
    return [{"layer": name, "seconds per epoch": statistics.median(found)} for name, found in seconds.items()]


def main() -> None:
    """Print the figures, and write them to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    result = {"processor": processor(), "cores": cores(), "inference": inference(64, 5), "digits": digits(4)}
    epochs = {row["layer"]: row["seconds per epoch"] for row in result["digits"]}
    result["convolution over dense"] = epochs["convolution"] / epochs["dense"]
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
