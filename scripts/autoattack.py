"""AutoAttack (Croce and Hein, 2020) in the Euclidean norm on an MNIST classifier, beside our own attacks and certificates.

The four attacks are torchattacks', in AutoAttack's order and with its published numbers of steps and queries; torchattacks' own
bundle takes a tenth of the steps. Each is given what the ones before it, at this size and at smaller ones, have left. A success
counts if the classifier's own prediction is wrong there.

Images are float32: FAB converts to it and cannot mix it with float64. The adapter solves in float64 all the same, so gradients
lose their last digits only.

Needs torchattacks, which the benchmark environment has, the MNIST files, and the network scripts/mnist_certificates.py trains.
Runs on one thread; 500 images at two sizes take some ten minutes. Ends with status 1 if an attack gets inside a radius.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import lrrn
from lrrn import LRRNClassifier, audit, datasets
from lrrn.certify import as_image_model
from lrrn.threads import one_thread

try:
    import torchattacks
except ImportError as error:
    raise SystemExit("torchattacks is not installed here; make .venv-bench/.bench and use .venv-bench/bin/python") from error

IMAGE = (1, 28, 28)
BATCH = 250
"""Images attacked at once."""
SLACK = 1e-5
"""By how much, relative to eps, rounding to float32 may enlarge a perturbation."""
NOTES = (
    "attacks keep images in [0, 1]; certificates hold for every perturbation",
    "APGD-T of torchattacks 3.5.1 adapts its step to the first image of each batch only, which may weaken it",
)

Array = NDArray[Any]


def parts(model: torch.nn.Module, n_classes: int, eps: float, steps: int, queries: int, seed: int) -> dict[str, Any]:
    common = {"norm": "L2", "eps": eps, "n_restarts": 1, "seed": seed}
    return {
        "APGD-CE": torchattacks.APGD(model, steps=steps, loss="ce", **common),
        "APGD-T": torchattacks.APGDT(model, steps=steps, n_classes=n_classes, **common),
        "FAB-T": torchattacks.FAB(model, steps=steps, n_classes=n_classes, multi_targeted=True, **common),
        "Square": torchattacks.Square(model, n_queries=queries, **common),
    }


def autoattack(
    classifier: LRRNClassifier,
    X: Array,
    y: Array,
    distances: Array,
    eps: float,
    image: tuple[int, int, int] = IMAGE,
    steps: int = 100,
    queries: int = 5000,
    seed: int = 0,
) -> dict[str, Any]:
    """Attack the images with a distance above eps, lower in place the distances of those broken, and say what each part did."""
    n_classes = len(classifier.classes_)
    if n_classes < 4:
        raise ValueError(f"the targeted loss of AutoAttack needs at least 4 classes; got {n_classes}")
    images = torch.from_numpy(np.asarray(X, dtype=np.float32)).reshape(-1, *image)
    labels = torch.from_numpy(np.searchsorted(classifier.classes_, y))
    done: dict[str, Any] = {}
    for name, attack in parts(as_image_model(classifier, image), n_classes, eps, steps, queries, seed).items():
        start = time.perf_counter()
        left = np.flatnonzero(distances > eps * (1 + SLACK))
        done[name] = {"attacked": len(left)}
        for rows in np.split(left, range(BATCH, len(left), BATCH)) if len(left) else []:
            try:
                moved = attack(images[rows], labels[rows])
            except Exception as error:  # the figures are then those of the other parts, and the output says so
                done[name]["failed"] = f"{type(error).__name__}: {error}"
                break
            moved = moved.detach().double().flatten(1).numpy()
            norms = np.linalg.norm(moved - X[rows], axis=1)
            distances[rows] = np.minimum(distances[rows], np.where(classifier.predict(moved) != y[rows], norms, np.inf))
        done[name]["broken"] = int((distances[left] <= eps * (1 + SLACK)).sum())
        done[name]["seconds"] = time.perf_counter() - start
        print(f"eps {eps:g}, {name}: {done[name]}", file=sys.stderr)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=Path("local/mnist-paper.safetensors"))
    parser.add_argument("--images", type=int, default=500, help="how many of the test images, from the first")
    parser.add_argument("--eps", default="0.5,1.0", help="sizes of perturbations, such as 0.3,0.5,0.8,1.0")
    parser.add_argument("--steps", type=int, default=100, help="of APGD and FAB")
    parser.add_argument("--queries", type=int, default=5000, help="of Square")
    parser.add_argument("--method", default="local", help="of the certificate that is put to the test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    sizes = sorted(float(size) for size in options.eps.split(","))
    classifier = lrrn.load(options.model)
    if not isinstance(classifier, LRRNClassifier):
        parser.error(f"{options.model} holds a {type(classifier).__name__}, not a classifier")
    X, y = (part[: options.images] for part in datasets.load("mnist", "test"))
    torch.set_num_threads(1)  # the kernels too, not only BLAS
    with one_thread():
        own = audit.attack(options.model.stem, classifier, X, y, sizes, options.method, clip=(0.0, 1.0), seed=options.seed)
        distances = np.where(own.right, np.inf, 0.0)
        figures = {}
        for eps in sizes:
            done = autoattack(classifier, X, y, distances, eps, steps=options.steps, queries=options.queries, seed=options.seed)
            figures[f"{eps:g}"] = {
                "accuracy under AutoAttack": float((distances > eps * (1 + SLACK)).mean()),
                "accuracy under our attacks": own.attacked(eps),
                "accuracy under both": float((np.minimum(distances, own.distances) > eps * (1 + SLACK)).mean()),
                "certified accuracy": own.certified(eps),
                "parts": done,
            }
    inside = {
        name: found.refuted.tolist()
        for name, found in {"AutoAttack": dataclasses.replace(own, distances=distances), "ours": own}.items()
    }
    report = {
        "model": str(options.model),
        "images": len(X),
        "seed": options.seed,
        "steps": options.steps,
        "queries": options.queries,
        "versions": {name: version(name) for name in ("lrrn", "torchattacks", "torch", "numpy")}
        | {"python": platform.python_version()},
        "notes": NOTES,
        "accuracy": own.clean,
        "certificate": own.method,
        "sizes": figures,
        "attacks inside a certified radius": sum(map(len, inside.values())),
        "images of those": inside,
        "seconds, certificates and our attacks": own.seconds,
        "seconds, AutoAttack": sum(part["seconds"] for figure in figures.values() for part in figure["parts"].values()),
    }
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if any(inside.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
