"""Convolutional networks on the CPU: their speed, the memory of large ones, and convolutions as matrices.

Inference, certificates and training steps at 25,088 units; certificates at 100,352 units, with the peak of memory; and a small
convolution as a matrix against a dense layer.

LRRN_DATA=data python scripts/studies/convolutions.py --json benchmarks/results/DATE-convolutions.json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lrrn
from lrrn.learning import Data, Settings, Trainer
from lrrn.learning.losses import Margin
from lrrn.learning.objectives import Contrastive
from lrrn.runtime.machine import cores, processor


def network() -> lrrn.LRRN:
    """Return 512 kernels of 8 x 8 at stride 4 on images of 3 x 32 x 32."""
    net = lrrn.LRRN(((3, 32, 32), lrrn.Conv(512, 8, 4), 10), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        net.W[0].mul_(12)  # to a condition number as of a trained network
    return net


def inference(n: int, repeats: int) -> dict[str, Any]:
    """Time the free phase, at the default tolerance."""
    net = network()
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


def certificates(n: int) -> dict[str, Any]:
    """Time ``shared`` radii, after a first certificate that computes the constants."""
    net = network().double()
    x = torch.rand((n, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    lrrn.certify(net, x[:1], "shared")
    start = time.perf_counter()
    lrrn.certify(net, x, "shared")
    return {"images": n, "milliseconds per image": 1000 * (time.perf_counter() - start) / n}


def step(n: int, steps: int) -> dict[str, Any]:
    """Time training steps of the margin loss with adversarial inputs, after an epoch that compiles."""
    generator = torch.Generator().manual_seed(1)
    x, label = torch.rand((n * steps, 3072), generator=generator), torch.randint(10, (n * steps,), generator=generator)
    objective, settings = Margin(0.25, 0.12, adversarial_eps=0.15), Settings("adamw", 0.002, batch_size=n, epochs=2, tol=1e-3)
    history = Trainer(network(), objective, settings).fit(Data(x, torch.nn.functional.one_hot(label, 10).float(), label))
    return {"batch": n, "milliseconds per image": 1000 * history[-1]["seconds"] / len(x)}


def large(samples: int, n: int) -> dict[str, Any]:
    """Train 128 kernels of 3 x 3 briefly on Fashion-MNIST, and certify test images; with the peak memory of this process."""
    X, y = lrrn.datasets.load("fashion_mnist")
    options: dict[str, Any] = {"objective": "margin", "margin": 1.0, "max_condition": 30, "epochs": 1, "batch_size": 64}
    model = lrrn.LRRNClassifier(
        (lrrn.Conv(128, 3, padding=1),), image_shape=(1, 28, 28), device="cpu", random_state=0, **options
    )
    model.fit(X[:samples], y[:samples])
    X, y = (part[:n] for part in lrrn.datasets.load("fashion_mnist", "test"))
    start = time.perf_counter()
    found, pairs = model.certificate(X, "shared"), model.certificate(X, "pairwise")
    return {
        "units": model.network_.sizes[1],
        "images": n,
        "right": float((found.prediction == y).mean()),
        "seconds per image": (time.perf_counter() - start) / n,
        "median radius, shared": float(np.median(found.radius)),
        "median radius, pairwise": float(np.median(pairs.radius)),
        "smallest ratio of the two": float((found.radius / pairs.radius).min()),
        "smallest radius": float(found.radius.min()),
        "peak memory of the process, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
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
    parser.add_argument(
        "--large", type=int, default=2048, metavar="N", help="training images of the large network; 0: left out"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    result: dict[str, Any] = {"processor": processor(), "cores": cores()}
    if options.large:
        result["large"] = large(options.large, 20)  # first, since the peak of memory counts
    result |= {"inference": inference(64, 5), "certificates": certificates(32), "step": step(64, 4), "digits": digits(4)}
    epochs = {row["layer"]: row["seconds per epoch"] for row in result["digits"]}
    result["convolution over dense"] = epochs["convolution"] / epochs["dense"]
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
