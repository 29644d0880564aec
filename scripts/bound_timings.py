"""How long the multiplier bounds take by size: the network's constant, and all pairs of ten outputs from its multipliers."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import lrrn
from lrrn.certify.outputs import pair_constants

WIDTHS = ((64, 64), (256, 256), (1024, 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    report = []
    for hidden in WIDTHS:
        net = lrrn.LRRN((784, *hidden, 10), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        spectral = float(net.lipschitz("spectral"))
        start = time.perf_counter()
        multiplier = float(net.lipschitz("multiplier"))
        network = time.perf_counter() - start
        start = time.perf_counter()
        pairs = pair_constants(net, "multiplier").rho
        seconds = time.perf_counter() - start
        loose = pair_constants(net, "spectral").rho
        apart = ~torch.eye(10, dtype=torch.bool)
        report.append(
            {
                "units": sum(hidden),
                "seconds, network": network,
                "network, times the spectral bound": multiplier / spectral,
                "seconds, 45 pairs": seconds,
                "pairs, times the spectral bound, median": float((pairs / loose)[apart].median()),
            }
        )
        print(json.dumps(report[-1], indent=2), flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
