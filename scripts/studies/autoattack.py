"""AutoAttack (Croce and Hein, 2020) in the Euclidean norm on an MNIST classifier, compared with our attacks and certificates.

The attacks and the criterion of success are described in lrrn.attacks.autoattack.

Requires torchattacks, which is in the benchmark environment, the MNIST files, and the network trained by
scripts/studies/mnist_certificates.py. Runs on one thread; 500 images at two sizes take about ten minutes. Exits with status 1
if an attack succeeds within a certified radius.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

import lrrn
from lrrn import LRRNClassifier, datasets
from lrrn.attacks import as_image_model
from lrrn.attacks.autoattack import SLACK, autoattack
from lrrn.reports import audit
from lrrn.runtime.threads import one_thread

if find_spec("torchattacks") is None:
    raise SystemExit("torchattacks is not installed here; make .venv-bench/.bench and use .venv-bench/bin/python")

IMAGE = (1, 28, 28)
NOTES = (
    "attacks keep images in [0, 1]; certificates hold for every perturbation",
    "APGD-T of torchattacks 3.5.1 adapts its step to the first image of each batch only, which may weaken it",
)


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
    torch.set_num_threads(1)  # limits the kernels too, not only BLAS
    with one_thread():
        own = audit.attack(options.model.stem, classifier, X, y, sizes, options.method, clip=(0.0, 1.0), seed=options.seed)
        distances = np.where(own.right, np.inf, 0.0)
        labels = np.searchsorted(classifier.classes_, y)
        figures = {}
        for eps in sizes:
            settings = {"steps": options.steps, "queries": options.queries, "seed": options.seed}
            done = autoattack(as_image_model(classifier, IMAGE), classifier.predict, X, y, labels, distances, eps, **settings)
            print(f"eps {eps:g}: {done}", file=sys.stderr)
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
