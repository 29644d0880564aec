"""Certified accuracy of a shipped model with branch and bound, at one size of the perturbation.

Takes the images of the test set that are right and whose published radius is below the size by little, and certifies them
anew by method "branched", whose search ends at that size. Finished images are kept in a file, one per line, nearest first, so
that an interrupted run continues.

    python scripts/studies/branching.py mnist-wide --size 1.58 --results FILE.jsonl --jobs 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lrrn
from lrrn import LRRNClassifier, datasets
from lrrn.certificates import branching
from lrrn.persistence.published import read_radii
from lrrn.persistence.shipped import shipped_models
from lrrn.runtime.storage import write_bytes

AT_ONCE = 8
"""Images whose branches form one batch."""


def raised(images: list[int], name: str, size: float, leaves: int, device: str, threads: int) -> list[dict[str, Any]]:
    """Return the radii of some test images, by their numbers."""
    torch.set_num_threads(threads)
    branching.LEAVES = leaves
    start = time.perf_counter()
    model = lrrn.load(name, device)
    assert isinstance(model, LRRNClassifier)
    X, _ = datasets.load(shipped_models()[name].data, "test")
    x = torch.from_numpy(X[images]).to(device)
    found = lrrn.certify(model.network_, x, "branched", target_radius=size * (1 + 1e-9)).radius.tolist()
    seconds = (time.perf_counter() - start) / len(images)
    return [{"image": i, "radius": r, "seconds": seconds} for i, r in zip(images, found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(shipped_models()))
    parser.add_argument("--size", type=float, required=True)
    parser.add_argument("--results", type=Path, required=True, help="finished images; read and added to")
    parser.add_argument("--leaves", type=int, default=branching.LEAVES, help="branches of a sample and a pair of outputs")
    parser.add_argument("--nearest", type=int, help="images to certify, nearest first; all if not given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes, with one thread each if there are several")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    known = read_radii(shipped_models()[options.name].radii_path)
    close = known.right & (known.radius <= options.size) & (known.radius * branching.NEAR >= options.size)
    order = sorted(np.flatnonzero(close).tolist(), key=lambda i: -known.radius[i])[: options.nearest]
    done = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.is_file() else []
    todo = [i for i in order if i not in {one["image"] for one in done}]
    chunks = [todo[k : k + AT_ONCE] for k in range(0, len(todo), AT_ONCE)]
    threads = 1 if options.jobs > 1 else torch.get_num_threads()
    work = partial(raised, name=options.name, size=options.size, leaves=options.leaves, device=options.device, threads=threads)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for found in pool.imap_unordered(work, chunks):
            done += found
            write_bytes(options.results, "".join(json.dumps(one) + "\n" for one in done).encode())
            won = sum(one["radius"] > options.size for one in done)
            print(f"{len(done)} of {len(order)} images, {won} certified at {options.size}", flush=True)
    radius = known.radius.astype(np.float64)
    for one in done:
        radius[one["image"]] = max(radius[one["image"]], one["radius"])
    attacked = known.attack < radius
    report = {
        "model": options.name,
        "size": options.size,
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine(),
        "branches of a pair, at most": options.leaves,
        "images tried": len(done),
        "seconds per image tried": float(np.mean([one["seconds"] for one in done])) if done else 0.0,
        "certified accuracy, published": known.certified(options.size),
        "certified accuracy, branched": float((known.right & (radius > options.size)).mean()),
        "published attacks inside a radius": int(attacked.sum()),
    }
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
