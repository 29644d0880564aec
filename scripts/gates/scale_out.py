"""Compare one rank with two: gradients, training, certificates, throughput and communication; extrapolate to more ranks.

Ranks are started by torchrun on this machine and communicate with Gloo. The extrapolation is computed from the measured times,
under assumptions that are printed with its figures. Nothing here was run on several machines or GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from lrrn import LRRN, Conv, LRRNClassifier, datasets
from lrrn.learning import (
    ClassEnergy,
    Contrastive,
    CrossEntropy,
    Data,
    FreeEnergy,
    Margin,
    SemiSupervised,
    Settings,
    SquaredError,
    Trainer,
)
from lrrn.reports import audit
from lrrn.runtime import ranks
from lrrn.runtime.machine import processor

OBJECTIVES = (Contrastive(), FreeEnergy(), ClassEnergy(), SemiSupervised(1e-2), Margin(), CrossEntropy(), SquaredError())
NETWORKS = ((784, 64, 64, 10), (784, 512, 512, 10))
CONVOLUTIONS = ((1, 28, 28), Conv(16, kernel=5, stride=3), 10)
"""A network of 1,024 hidden units, computed by products."""
BATCHES = (10, 100, 1000, 8000)
MESSAGES = (10**3, 10**4, 10**5, 10**6, 10**7)
LINKS = {"this machine, measured": None, "10 Gbit/s, 25 us": (25e-6, 1.25e9), "100 Gbit/s, 5 us": (5e-6, 12.5e9)}
"""Assumed links between machines: latency of a message in seconds, and bytes per second."""


# --- work of every rank -------------------------------------------------------------------------------------------------


def images(n: int, dtype: torch.dtype = torch.float32) -> Data:
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(n) % 10
    x = torch.rand(n, 784, generator=generator) + 0.5 * torch.randn(10, 784, generator=generator)[label]
    return Data(x.to(dtype), functional.one_hot(label, 10).to(dtype), label)


def network(sizes: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> LRRN:
    return LRRN(sizes, generator=torch.Generator().manual_seed(0), dtype=dtype)


def gradients(quick: bool) -> dict[str, torch.Tensor]:
    """Return the gradient of one batch for every objective, dtype and batch size."""
    found = {}
    for objective in OBJECTIVES:
        for dtype in (torch.float32, torch.float64):
            for n in (10, 100) if quick else (10, 100, 1000):
                trainer = Trainer(network(NETWORKS[0], dtype), objective, Settings(learning_rate=1e-6, batch_size=n, epochs=1))
                trainer.fit(images(n, dtype))
                name = f"{type(objective).__name__}, {str(dtype).removeprefix('torch.')}, batch {n}"
                found[name] = trainer._flat.gradient.clone()
    return found


def training(quick: bool) -> list[dict[str, Any]]:
    """Train a classifier on the digits with several seeds; the first seed twice, which must give bit-identical results."""
    (X, y), (X_test, y_test) = datasets.load("digits"), datasets.load("digits", "test")
    records, first = [], None
    for seed in (0, 0, *range(1, 2 if quick else 10)):
        model = LRRNClassifier(epochs=3 if quick else 30, random_state=seed, device="cpu").fit(X, y)
        flat = torch.cat([p.detach().reshape(-1) for p in model.network_.parameters()])
        if first is None:
            first = flat
            continue
        record = {"seed": seed, "accuracy": model.score(X_test, y_test), "loss": model.loss_curve_[-1]}
        record["median_radius"] = float(np.median(model.certified_radius(X_test, "spectral")))
        records.append({**record, **({"same_bits_again": torch.equal(first, flat)} if seed == 0 else {})})
    return records


def throughput(quick: bool) -> list[dict[str, Any]]:
    """Time epochs of contrastive learning; the first is a warm-up, the fastest of the others counts."""
    cases = [(sizes, batch) for sizes in NETWORKS[: 1 if quick else 2] for batch in (BATCHES[1:3] if quick else BATCHES)]
    cases += [(CONVOLUTIONS, batch) for batch in (BATCHES[1:2] if quick else BATCHES[1:3])]
    records = []
    for sizes, batch in cases:
        most = 2000 if quick or sizes == CONVOLUTIONS else 8000
        settings = Settings(learning_rate=1e-3, batch_size=batch, epochs=2 if quick else 4)
        trainer = Trainer(network(sizes), Contrastive(), settings)
        history = trainer.fit(images(max(min(most, 400 * batch), batch)))
        rate = max(record["samples_per_second"] for record in history[1:])
        parameters = sum(p.numel() for p in trainer.net.parameters())
        records.append({"network": named(sizes), "parameters": parameters, "batch": batch, "samples_per_second": rate})
    return records


def named(sizes: tuple[Any, ...]) -> str:
    """Return the sizes of a network as they are printed."""
    if sizes == CONVOLUTIONS:
        return "28x28, 16 kernels of 5x5, stride 3, 10"
    return "-".join(map(str, sizes))


@cache
def classifiers() -> dict[str, LRRNClassifier]:
    """Return a dense network and one with convolutions, trained by each process alone: the same on all of them."""
    X, y = datasets.load("digits")
    image: dict[str, Any] = {"hidden_sizes": (Conv(32, kernel=3),), "image_shape": (1, 8, 8)}
    options: dict[str, dict[str, Any]] = {"64-64-64-10": {}, "8x8, 32 kernels of 3x3, 10": image}
    return {name: LRRNClassifier(epochs=3, random_state=0, device="cpu", **more).fit(X, y) for name, more in options.items()}


def certifying(quick: bool) -> list[dict[str, Any]]:
    """Time certificates by `shared`: of many samples by matrices, and of fewer by products with convolutions."""
    (X, y), records = datasets.load("digits"), []
    for (name, model), times in zip(classifiers().items(), (30, 1), strict=True):
        model.certificate(X[:2], "shared")  # constants, and compiled kernels
        some = slice(40) if quick else slice(None)
        found = audit.certify(name, model, np.tile(X[some], (times, 1)), np.tile(y[some], times), method="shared")
        radii = torch.as_tensor(found.radii)
        records.append({"network": name, "samples": len(radii), "seconds": found.seconds, "radii": radii})
    return records


def communication(quick: bool) -> list[dict[str, Any]]:
    """Time the all-reduce of float32 vectors over all ranks."""
    team, records = ranks.current(), []
    for n in MESSAGES[1:4] if quick else MESSAGES:
        vector, times = torch.zeros(n), []
        for _ in range(8 if n >= 10**6 else 60):
            team.add_up(torch.zeros(1))  # barrier
            start = time.perf_counter()
            team.add_up(vector)
            times.append(time.perf_counter() - start)
        records.append({"numbers": n, "bytes": 4 * n, "seconds": statistics.median(times), "best": min(times)})
    return records


def worker(folder: Path, sections: list[str], quick: bool) -> None:
    if "certifying" in sections:
        classifiers()
    with ranks.joined("cpu") as team:
        found = {name: globals()[name](quick) for name in sections}
        if team.is_main:
            torch.save(found, folder / "found.pt")


# --- evaluation in the parent -------------------------------------------------------------------------------------------


def launch(n: int, threads: int, sections: list[str], quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", __file__]
        command += ["--worker", folder, "--sections", ",".join(sections), *(["--quick"] if quick else [])]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, check=True)
        return torch.load(Path(folder) / "found.pt")


def compared(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative differences of gradients.

    A contrastive gradient is the difference of two and has their rounding errors: its reference is the sum of their norms.
    """

    def size(name: str) -> float:
        objective, rest = name.split(", ", 1)
        parts = (f"ClassEnergy, {rest}", f"FreeEnergy, {rest}") if objective == "Contrastive" else (name,)
        return sum(float(one[part].norm()) for part in parts)

    return {name: float((two[name] - one[name]).norm()) / size(name) for name in one}


def statistically_equal(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare seed by seed with a paired t-test: the mean difference relative to its spread over seeds."""
    summary: dict[str, Any] = {"one": one, "two": two}
    for measure in ("accuracy", "median_radius", "loss"):
        differences = [b[measure] - a[measure] for a, b in zip(one, two, strict=True)]
        spread = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
        seeds = [a[measure] for a in one]
        summary[measure] = {
            "mean of one rank": statistics.mean(seeds),
            "mean of two ranks": statistics.mean([b[measure] for b in two]),
            "deviation over seeds": statistics.stdev(seeds) if len(seeds) > 1 else 0.0,
            "mean difference": statistics.mean(differences),
            "t": statistics.mean(differences) / spread if spread > 0 else 0.0,
        }
    return summary


def line(records: list[dict[str, Any]]) -> tuple[float, float]:
    """Fit seconds = latency + bytes / rate through the smallest and the largest message."""
    first, last = records[0], records[-1]
    per_byte = (last["seconds"] - first["seconds"]) / (last["bytes"] - first["bytes"])
    return max(first["seconds"] - per_byte * first["bytes"], 0.0), 1 / per_byte


def extrapolated(alone: list[dict[str, Any]], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predict the speed-up of N ranks of one core each over one such rank.

    A step takes the share b / N of its time on one rank, plus a ring all-reduce of N ranks: 2 (N - 1) messages with one latency
    each, and 2 (N - 1) / N of the bytes. The timing of the measured link is for two messages of half the bytes each.
    """
    latency, rate = line(messages)
    rows = []
    for record in alone:
        step = record["batch"] / record["samples_per_second"]
        size = 4 * (record["parameters"] + 3)
        for name, link in LINKS.items():
            a, r = (latency / 2, rate) if link is None else link
            row = {"network": record["network"], "batch": record["batch"], "link": name, "step_seconds": step}
            for n in (2, 4, 8, 16):
                ring = 2 * (n - 1) * a + 2 * (n - 1) / n * size / r
                row[f"speed-up, {n} ranks"] = step / (step * math.ceil(record["batch"] / n) / record["batch"] + ring)
            rows.append(row)
    return rows


def markdown(report: dict[str, Any]) -> str:
    """Return the tables of docs/scaling-out.md."""
    rows = [
        "| network | batch | one rank | one rank, two threads | two ranks | two over one |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in report["samples a second"]:
        speeds = [
            f"{row[name]:,.0f}" for name in ("one rank, one thread", "one rank, two threads", "two ranks, one thread each")
        ]
        rows.append(f"| {row['network']} | {row['batch']:,} | {' | '.join(speeds)} | {row['two ranks over one']:.2f} |")
    rows += ["", "| network | samples | one rank | two ranks |", "|---|---:|---:|---:|"]
    for row in report["certificates"]:
        both = " | ".join(f"{row[f'seconds, {n}']:.1f} s" for n in ("one rank", "two ranks"))
        rows.append(f"| {row['network']} | {row['samples']:,} | {both} |")
    rows += ["", "| float32 numbers | one rank | two ranks |", "|---:|---:|---:|"]
    messages = report["adding up float32 vectors"]
    for one, two in zip(messages["one rank"], messages["two ranks"], strict=True):
        rows.append(f"| {one['numbers']:,} | {1e6 * one['seconds']:,.0f} us | {1e6 * two['seconds']:,.0f} us |")
    rows += ["", "| network | batch | link | 2 ranks | 4 | 8 | 16 |", "|---|---:|---|---:|---:|---:|---:|"]
    for row in report["extrapolated"]:
        speedups = " | ".join(f"{row[f'speed-up, {n} ranks']:.1f}" for n in (2, 4, 8, 16))
        rows.append(f"| {row['network']} | {row['batch']:,} | {row['link']} | {speedups} |")
    rows += ["", "| | one rank | two ranks | deviation over seeds | t of the difference |", "|---|---:|---:|---:|---:|"]
    for measure in ("accuracy", "median_radius", "loss"):
        found = report["training"][measure]
        figures = [f"{found[name]:.4g}" for name in ("mean of one rank", "mean of two ranks", "deviation over seeds", "t")]
        rows.append(f"| {measure.replace('_', ' ')} | {' | '.join(figures)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, for a check that all of it runs")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sections", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.sections.split(","), options.quick)
        return
    everything = ["gradients", "training", "certifying", "throughput", "communication"]
    load = os.getloadavg()[0]
    one = launch(1, 1, everything, options.quick)
    two = launch(2, 1, everything, options.quick)
    threads = launch(1, 2, ["throughput"], options.quick)
    differences = compared(one["gradients"], two["gradients"])
    speeds = [
        {
            **a,
            "one rank, one thread": a["samples_per_second"],
            "one rank, two threads": t["samples_per_second"],
            "two ranks, one thread each": b["samples_per_second"],
            "two ranks over one": b["samples_per_second"] / a["samples_per_second"],
        }
        for a, b, t in zip(one["throughput"], two["throughput"], threads["throughput"], strict=True)
    ]
    for row in speeds:
        del row["samples_per_second"]
    certificates = [
        {
            "network": a["network"],
            "samples": a["samples"],
            "seconds, one rank": a["seconds"],
            "seconds, two ranks": b["seconds"],
            "same_bits": torch.equal(a["radii"], b["radii"]),
        }
        for a, b in zip(one["certifying"], two["certifying"], strict=True)
    ]
    report = {
        "machine": {
            "cores": os.cpu_count(),
            "processor": processor(),
            "torch": torch.__version__,
            # near 0 on an idle machine; timings of a busy machine are unreliable
            "load before and after": (load, os.getloadavg()[0]),
        },
        "largest relative difference of gradients": max(differences.values()),
        "relative difference of gradients": differences,
        "training": statistically_equal(one["training"], two["training"]),
        "certificates": certificates,
        "samples a second": speeds,
        "adding up float32 vectors": {"one rank": one["communication"], "two ranks": two["communication"]},
        "latency and bytes a second, two ranks": line(two["communication"]),
        "extrapolated": extrapolated(one["throughput"], two["communication"]),
    }
    print(json.dumps({key: report[key] for key in list(report)[:2]}, indent=2))
    print(markdown(report))
    assert report["largest relative difference of gradients"] <= 1e-6
    assert all(record["same_bits"] for record in certificates)
    assert all(records[0]["same_bits_again"] for records in (one["training"], two["training"]))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
