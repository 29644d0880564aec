"""Shared radii of networks with several hidden layers, by the family of the multipliers that samples share.

One multiplier per layer, by products with the layers and by matrices; one per unit, found by a search; and the better of the
last two for every pair of outputs, which small networks take. The search makes no step in networks of more than some hundred
units: leave out the last two there. All start from the constants of "spectral". For each: the time of the first certificate,
with all that is computed once per network, the time of each further image, and the radii. The first certificate "per unit"
includes what is computed once for both families.

    python scripts/studies/multipliers.py mnist-paper-a:mnist fashion-mnist-paper-b:fashion_mnist --json FILE
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lrrn
from lrrn import datasets
from lrrn.certificates import matrix_free, radius, shared

USUAL = shared.shared_duals, shared.SEARCHED, matrix_free.WIDE_DEEP
WAYS: dict[str, tuple[Callable[..., Any], float, float]] = {
    "per layer by products": (USUAL[0], 0, 0),
    "per layer": (lambda energy: USUAL[0](energy)[:1], 0, math.inf),
    "per unit": (lambda energy: USUAL[0](energy)[-1:], math.inf, math.inf),
    "both": (USUAL[0], math.inf, math.inf),
}
"""What gives the duals, and the numbers of units up to which multipliers are searched for and matrices are used."""


def measured(path: str, x: torch.Tensor, way: str) -> tuple[dict[str, Any], torch.Tensor]:
    """Measure on a new copy of the network, since everything that is computed once is cached."""
    radius.shared_duals, shared.SEARCHED, matrix_free.WIDE_DEEP = WAYS[way]  # type: ignore[assignment, attr-defined]
    radius._first_method = lambda *_: "spectral"
    net = lrrn.load(path).network_
    start = time.perf_counter()
    lrrn.certify(net, x[:1], "shared")
    first = time.perf_counter() - start
    start = time.perf_counter()
    found = lrrn.certify(net, x, "shared").radius
    again = (time.perf_counter() - start) / len(x)
    return {"seconds of the first certificate": first, "seconds per image": again}, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="MODEL:DATASET, where MODEL is a file or a name")
    parser.add_argument("--images", type=int, default=500, help="test images, from the first")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of them, separated by commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"images": options.images, "threads": options.threads, "date": time.strftime("%Y-%m-%d")}
    for model in options.models:
        path, data = model.rsplit(":", 1)
        x = torch.from_numpy(datasets.load(data, "test")[0][: options.images]).double()
        radii, figures = {}, {}
        for way in options.ways.split(","):
            figures[way], radii[way] = measured(path, x, way)
        largest = torch.stack(list(radii.values())).amax(0)
        for way, found in radii.items():
            certified = largest > 0
            figures[way] |= {
                "median radius": float(found.median()),
                "mean share of the largest radius": float((found[certified] / largest[certified]).mean()),
            }
            print(f"{model}, {way}: {json.dumps(figures[way])}", flush=True)
        report[f"{Path(path).name}, {'-'.join(map(str, lrrn.load(path).network_.sizes))}"] = figures
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
