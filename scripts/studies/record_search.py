"""Hyper-parameter search for the certified-accuracy record: train on five sixths of the training images, validate on the rest.

The test images are not read. The input file has one recipe per line, a JSON object of ``LRRNClassifier`` parameters; a
convolution is {"conv": [channels, kernel, stride, padding, pool]}, of which the last ones may be left out. Results
are appended to another file, one per line. Recipes that already have a result are skipped.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from lrrn import LRRNClassifier, certify, datasets
from lrrn.persistence.values import restored
from lrrn.runtime.storage import write_bytes
from lrrn.studies.record.data import sizes_of
from lrrn.studies.record.rows import VALIDATION_SHARE

COMMON: dict[str, Any] = {
    "objective": "margin",
    "gamma": 1.0,
    "init": "uniform",
    "optimizer": "adamw",
    "schedule": "one_cycle",
    "learning_rate": 2e-3,
    "decoupled_weight_decay": 0.5,
    "weight_decay": 0.0,
    "batch_size": 256,
    "margin": 2.2,
    "temperature": 0.25,
    "tol": 1e-3,
    "random_state": 0,
}


def tried(recipe: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    X, y = datasets.load(options.data, "train", download=False)
    cut = len(X) - len(X) // VALIDATION_SHARE
    values = {key: restored(value) for key, value in recipe.items()}
    pairs = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    model = LRRNClassifier(**{**COMMON, **pairs}, device=options.device)
    start = time.perf_counter()
    model.fit(X[:cut], y[:cut])
    training = time.perf_counter() - start
    held = slice(cut, None if options.images is None else cut + options.images)
    x = torch.as_tensor(X[held]).to(model.network_.W[0].device)
    labels = torch.as_tensor(y[held]).to(x.device)
    start = time.perf_counter()
    certificate = certify(model.network_, x, options.method, seconds=options.seconds)
    return {
        "data": options.data,
        "images": len(x),
        "recipe": recipe,
        "common": COMMON,
        "training seconds": training,
        "certifying seconds": time.perf_counter() - start,
        "clean": certificate.certified_accuracy(labels, 0.0),
        "certified": {size: certificate.certified_accuracy(labels, eps) for size, eps in sizes_of(options.data).items()},
        "method": options.method,
        "median radius": float(certificate.radius.median()),
        "last epoch": model.history_[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--method", default="spectral", help='of the certificate: "shared" is what the record counts')
    parser.add_argument("--seconds", type=float, help="budget of the constants that methods begin from")
    parser.add_argument("--images", type=int, help="held-out images to certify, counted from the first; all if not given")
    args = parser.parse_args()
    done = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.is_file() else []
    for line in args.recipes.read_text().splitlines():
        recipe = json.loads(line)
        wanted = {"recipe": recipe, "data": args.data, "method": args.method}
        if any(wanted.items() <= result.items() for result in done):
            continue
        result = tried(recipe, args)
        done.append(result)
        certified = "  ".join(f"{eps}: {100 * share:.2f}" for eps, share in result["certified"].items())
        last = result["last epoch"]
        print(
            json.dumps(recipe),
            f"\n  clean {100 * result['clean']:.2f}  {certified}  {result['training seconds']:.0f} s",
            flush=True,
        )
        print(f"  sweeps {last['sweeps']:.0f}, kappa {last['condition_number']:.0f}, norms {last['weight_norms']}", flush=True)
        write_bytes(args.results, "".join(json.dumps(record) + "\n" for record in done).encode())


if __name__ == "__main__":
    main()
