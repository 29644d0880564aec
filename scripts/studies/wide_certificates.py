"""Certificates of a wide MNIST network (784-2048-10, margin loss) by products with its weights, and by matrices.

Trains briefly and saves the model, or takes one by name. Then measures the first certificate from a cold start, the time per
image after it, and, on the first images, radii and time of two other ways: the dual maximised by ascent, and the path by
matrices, whose constants have the budget of "auto".
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch

import lrrn
from lrrn import LRRNClassifier, datasets
from lrrn.certificates import matrix_free, matrix_free_dual


def trained(path: Path, samples: int, epochs: int, device: str) -> LRRNClassifier:
    if not path.exists() and path.suffix:
        X, y = datasets.load("mnist")
        classifier = LRRNClassifier(
            hidden_sizes=(2048,),
            objective="margin",
            gamma=1.0,
            margin=2.2,
            temperature=0.25,
            optimizer="adamw",
            schedule="one_cycle",
            learning_rate=2e-3,
            decoupled_weight_decay=0.5,
            batch_size=256,
            epochs=epochs,
            random_state=0,
            device="cpu",
        )
        lrrn.save(classifier.fit(X[:samples], y[:samples]), path)
    return lrrn.load(path if path.suffix else str(path), device)


def timed(net: lrrn.LRRN, x: torch.Tensor, method: str, seconds: float | None = None) -> tuple[torch.Tensor, float, float]:
    """Radii, and the time and the processor time that they took."""
    start, busy = time.perf_counter(), time.process_time()
    radius = lrrn.certify(net, x, method, seconds=seconds).radius.cpu()
    return radius, time.perf_counter() - start, time.process_time() - busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("local/mnist-wide-brief.safetensors"), help="kept; or a name")
    parser.add_argument("--samples", type=int, default=12_000, help="training images")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=30, help="test images to certify by products")
    parser.add_argument("--ascent", type=int, default=16, help="of them, those to certify by accelerated ascent too")
    parser.add_argument("--dense", type=int, default=5, help="of them, those to certify by matrices too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where to certify")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.model.parent.mkdir(parents=True, exist_ok=True)
    classifier = trained(options.model, options.samples, options.epochs, options.device)
    net = classifier.network_
    X, y = datasets.load("mnist", "test")
    x = torch.from_numpy(X[: options.images]).double().to(options.device)
    _, first, first_busy = timed(net, x[:1], "auto")
    radius, seconds, busy = timed(net, x, "auto")
    report: dict[str, object] = {
        "network": "784-2048-10",
        "accuracy on 1,000 images": float(classifier.score(X[:1000], y[:1000])),
        "norm of the hidden weights": float(torch.linalg.matrix_norm(net.W[0].detach().double(), 2)),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "threads": options.threads,
        "images": options.images,
        "method": lrrn.certify(net, x[:1]).method,
        "seconds of the first certificate": first,
        "processor seconds of the first certificate": first_busy,
        "seconds per image": seconds / options.images,
        "processor seconds per image": busy / options.images,
        "median radius": float(radius.median()),
        "median radius, spectral": float(lrrn.certify(net, x, "spectral").radius.median()),
    }
    if options.ascent:
        twin = copy.deepcopy(net)
        matrix_free_dual.INPUTS = 0
        slow, seconds, busy = timed(twin, x[: options.ascent], "shared")
        report |= {
            "by ascent: images": options.ascent,
            "by ascent: seconds per image": seconds / options.ascent,
            "by ascent: processor seconds per image": busy / options.ascent,
            "radii by splitting over those by ascent": (radius[: options.ascent] / slow).tolist(),
        }
    if options.dense:
        matrix_free.WIDE = math.inf  # type: ignore[assignment]
        _, first, first_busy = timed(net, x[:1], "shared", 5.0)
        slow, seconds, busy = timed(net, x[: options.dense], "shared", 5.0)
        report |= {
            "by matrices: images": options.dense,
            "by matrices: seconds of the first certificate": first,
            "by matrices: processor seconds of the first certificate": first_busy,
            "by matrices: seconds per image": seconds / options.dense,
            "by matrices: processor seconds per image": busy / options.dense,
            "radii by products over those by matrices": (radius[: options.dense] / slow).tolist(),
        }
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
