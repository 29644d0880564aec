"""Certificates on the paper's MNIST network (784-64-64-10, contrastive): every method compared with the paper's formula.

Trains once as in the paper (SGD, learning rate 0.4, batch size 10, lambda 5e-5, 100 epochs) and saves the model. Then certifies
the test images by the global methods and the shared one, and the first 1,000 by the local one; these are also attacked.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

import lrrn
from lrrn import LRRNClassifier, datasets
from lrrn.attacks import minimal_perturbation
from lrrn.bounds import BUDGET


def trained(path: Path, epochs: int) -> LRRNClassifier:
    if not path.exists():
        X, y = datasets.load("mnist")
        classifier = LRRNClassifier(
            init="uniform",
            optimizer="sgd",
            schedule=None,
            learning_rate=0.4,
            batch_size=10,
            epochs=epochs,
            weight_decay=5e-5,
            checkpoint=path.with_suffix(".ckpt"),
            resume=True,
            random_state=0,
            verbose=1,
        )
        lrrn.save(classifier.fit(X, y), path)
    return lrrn.load(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("local/mnist-paper.safetensors"), help="kept between runs")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--local", type=int, default=1000, help="images for local radii and attacks")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    options.model.parent.mkdir(parents=True, exist_ok=True)
    classifier = trained(options.model, options.epochs)
    net = classifier.network_
    X, y = datasets.load("mnist", "test")
    x, right = torch.from_numpy(X), torch.from_numpy(classifier.predict(X) == y)
    report: dict[str, object] = {
        "accuracy": float(right.double().mean()),
        "seconds an epoch": float(np.median([record["seconds"] for record in classifier.history_])),
        "condition number": classifier.history_[-1]["condition_number"],
    }
    with lrrn.blas_threads(1):
        for method in ("paper", "spectral", "multiplier"):
            start = time.perf_counter()
            report[f"Lipschitz bound, {method}"] = float(net.lipschitz(method))
            report[f"seconds of that, {method}"] = time.perf_counter() - start
        medians = {}
        for method in ("paper", "pairwise", "spectral", "auto", "multiplier", "shared"):
            start = time.perf_counter()
            lrrn.certify(net, x[:1], method)  # compute the constants, which are cached
            constants = time.perf_counter() - start
            start = time.perf_counter()
            certificate = lrrn.certify(net, x, method)
            medians[method] = float(certificate.radius.median())
            report[f"radii, {method}"] = {
                "median": medians[method],
                "times the paper's": medians[method] / medians["paper"],
                "certified accuracy": {f"{eps:g}": certified(certificate, right, eps) for eps in (0.1, 0.3, 0.5, 1.0)},
                "seconds for the constants": constants,
                "seconds for 10,000 images": time.perf_counter() - start,
                "budget": BUDGET.get(method),
            }
        n = options.local
        start = time.perf_counter()
        lrrn.certify(net, x[:1], "local")
        constants = time.perf_counter() - start
        start = time.perf_counter()
        certificate = lrrn.certify(net, x[:n], "local")
        seconds = (time.perf_counter() - start) / n
        paper, wide, shared = (lrrn.certify(net, x[:n], method).radius for method in ("paper", "multiplier", "shared"))
        attack = minimal_perturbation(net, x[:n].double(), certificate.prediction, seed=0)
        median = float(paper.median())
        report[f"first {n} images"] = {
            "multiplier, median times the paper's": float(wide.median()) / median,
            "shared, median times the paper's": float(shared.median()) / median,
            "local, median times the paper's": float(certificate.radius.median()) / median,
            "attack, median times the paper's": float(attack.distance.median()) / median,
            "attacks inside a local radius": int((attack.distance < certificate.radius).sum()),
            "seconds for the constants": constants,
            "seconds an image": seconds,
        }
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def certified(certificate: lrrn.Certificate, right: torch.Tensor, eps: float) -> float:
    return float((right & (certificate.radius > eps)).double().mean())


if __name__ == "__main__":
    main()
