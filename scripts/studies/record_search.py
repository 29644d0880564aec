"""Hyper-parameter search for the certified-accuracy record: train on five sixths of the training images, validate on the rest.

The test images are not read. The input file has one recipe per line, a JSON object of ``LRRNClassifier`` parameters; a
convolution is {"conv": [channels, kernel, stride, padding, pool]}, of which the last ones may be left out. With --row NAME it
has changes to the recipe of that baseline instead. Results are appended to another file, one per line, as each is finished.
Recipes that already have a result are skipped, so an interrupted search continues. Lines of an input file may also be objects
with a "recipe", its "row" and its "data", as in benchmarks/baseline-trials.jsonl; those of other rows and data are passed over.

    python scripts/studies/record_search.py benchmarks/baseline-trials.jsonl RESULTS --data mnist --row torchlip --jobs 6
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lrrn import LRRNClassifier, certify, datasets
from lrrn.persistence.values import plain, restored
from lrrn.runtime.storage import write_bytes
from lrrn.studies.record.baselines.learners import LEARNERS
from lrrn.studies.record.contenders import Plain
from lrrn.studies.record.data import sizes_of
from lrrn.studies.record.recipes import recipe as usual
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
    """Train with a recipe and measure on held-out images."""
    X, y = datasets.load(options.data, "train", download=False)
    cut = len(X) - len(X) // VALIDATION_SHARE
    held = slice(cut, None if options.images is None else cut + options.images)
    measure = _ours if options.row is None else _baseline
    start = time.perf_counter()
    found = measure(recipe, options, (X[:cut], y[:cut]), (X[held], y[held]))
    training = found.pop("trained") - start
    return {
        "data": options.data,
        "images": len(X[held]),
        "recipe": recipe,
        "training seconds": training,
        "certifying seconds": time.perf_counter() - start - training,
        **found,
    }


def _tried(recipe: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Do what :func:`tried` does; return the error of a trial that fails, so that the others are not ended with it."""
    try:
        return tried(recipe, options)
    except Exception as error:
        return {"recipe": recipe, "error": f"{type(error).__name__}: {error}"}


def _restored(recipe: dict[str, Any]) -> dict[str, Any]:
    # options of a loss are a plain object
    found = {key: value if key == "loss_options" else restored(value) for key, value in recipe.items()}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


def _ours(recipe: dict[str, Any], options: argparse.Namespace, known: Any, held: Any) -> dict[str, Any]:
    model = LRRNClassifier(**{**COMMON, **_restored(recipe)}, device=options.device).fit(*known)
    trained = time.perf_counter()
    x = torch.as_tensor(held[0]).to(model.network_.W[0].device)
    certificate = certify(model.network_, x, options.method, seconds=options.seconds)
    right = (certificate.prediction.cpu().numpy() == held[1]).astype(bool)
    found = _shares(options, certificate.radius.cpu().numpy(), right)
    return {"trained": trained, "common": COMMON, "method": options.method, "last epoch": model.history_[-1], **found}


def _baseline(recipe: dict[str, Any], options: argparse.Namespace, known: Any, held: Any) -> dict[str, Any]:
    common = usual(options.data, options.row)
    learn = LEARNERS[options.row].learn
    model = Plain(learn(*known, common | _restored(recipe), 0, options.device, None).to(options.device))
    trained = time.perf_counter()
    X, y = held
    found = _shares(options, model.radii(X, model.methods[-1]), model.predict(X) == y)
    return {"trained": trained, "row": options.row, "common": common, "method": model.methods[-1], **found}


def _shares(options: argparse.Namespace, radius: Any, right: Any) -> dict[str, Any]:
    certified = {size: float((right & (radius > eps)).mean()) for size, eps in sizes_of(options.data).items()}
    return {"clean": float(right.mean()), "certified": certified, "median radius": float(np.median(radius))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--row", choices=sorted(LEARNERS), help="a baseline; a network of this library if not given")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--method", default="spectral", help='of our certificate: "shared" is what the record counts')
    parser.add_argument("--seconds", type=float, help="budget of the constants that methods begin from")
    parser.add_argument("--images", type=int, help="held-out images to certify, counted from the first; all if not given")
    parser.add_argument("--jobs", type=int, default=1, help="recipes at a time")
    args = parser.parse_args()
    if args.row is not None and args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    done = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.is_file() else []
    lines = [json.loads(line) for line in args.recipes.read_text().splitlines()]
    here = {"row": args.row, "data": args.data}
    recipes = [line.get("recipe", line) for line in lines if all(line.get(key, value) == value for key, value in here.items())]
    method = {} if args.row else {"method": args.method}
    wanted = [{"recipe": recipe, "data": args.data} | method for recipe in recipes]
    todo = [
        one["recipe"] for one in wanted if not any(one.items() <= old.items() and old.get("row") == args.row for old in done)
    ]
    failed = 0
    # an interrupt ends the pool, and the trials in it
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(partial(_tried, options=args), todo):
            if "error" in result:
                failed += 1
                print(f"{json.dumps(result['recipe'])}\n  {result['error']}", flush=True)
                continue
            done.append(result)
            certified = "  ".join(f"{eps}: {100 * share:.2f}" for eps, share in result["certified"].items())
            print(json.dumps(result["recipe"]), flush=True)
            print(f"  clean {100 * result['clean']:.2f}  {certified}  {result['training seconds']:.0f} s", flush=True)
            if "last epoch" in result:
                last = result["last epoch"]
                norms = last["weight_norms"]
                print(f"  sweeps {last['sweeps']:.0f}, kappa {last['condition_number']:.0f}, norms {norms}", flush=True)
            write_bytes(args.results, "".join(json.dumps(record, default=plain) + "\n" for record in done).encode())
    if failed:
        raise SystemExit(f"{failed} of {len(todo)} trials failed; the same command tries them again")


if __name__ == "__main__":
    main()
