"""Time the accelerated solver's kernel on a GPU: one free phase to 1e-4, residual checked, against torch FISTA in a CUDA graph.

Every timing is the median of graph replays between device events. Both contenders take as few steps as reach the error asked
for, measured against a float64 solution; the answer that was timed is the one that is rescored.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lrrn
from lrrn.qp import BoxQP
from lrrn.solvers import solve
from lrrn.solvers._half_precision import fits_on_chip
from lrrn.solvers.accelerated import Accelerated
from lrrn.solvers.base import recompute

ERROR = 1e-4
BATCHES = (16, 256, 4096, 60_000)


def replayed(work: Callable[[], None], repeats: int = 30) -> float:
    """Capture ``work`` in a CUDA graph and return the median microseconds of a replay."""
    work()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def ours(qp: BoxQP, exact: torch.Tensor) -> dict[str, Any]:
    """Start, kernel, gradient and residual."""
    stepper = Accelerated().begin(qp)
    z, g, never = torch.zeros_like(qp.q), -qp.q, torch.zeros(qp.n_samples, dtype=torch.float64, device=qp.q.device)
    for sweeps in range(8, 400, 4):
        answer: dict[str, torch.Tensor] = {}

        def work(sweeps: int = sweeps, answer: dict[str, torch.Tensor] = answer) -> None:
            z.zero_()
            stepper.advance(qp, z, g, sweeps, never)
            answer["residual"] = recompute(qp, z)[1]

        work()
        if float((z.double() - exact).abs().max()) <= ERROR:
            microseconds = replayed(work)
            error = float((z.double() - exact).abs().max())
            return {"us": microseconds, "error": error, "sweeps": sweeps, "largest residual": float(answer["residual"].max())}
    return {"us": None}


def fista(qp: BoxQP, exact: torch.Tensor) -> dict[str, Any]:
    """Projected gradient with the best constant momentum, in float32 with torch's own products."""
    h = qp.hessian.dense()
    values = torch.linalg.eigvalsh(h.double())
    small, large = float(values[0]), float(values[-1])
    momentum = (1 - math.sqrt(small / large)) / (1 + math.sqrt(small / large))
    z = torch.zeros_like(qp.q)

    def run(steps: int) -> torch.Tensor:
        here, ahead = torch.zeros_like(qp.q), torch.zeros_like(qp.q)
        for _ in range(steps):
            new = qp.project(torch.addmm(ahead + qp.q / large, ahead, h, alpha=-1 / large))
            here, ahead = new, torch.lerp(here, new, 1 + momentum)
        return here

    for steps in range(8, 600, 4):
        if float((run(steps).double() - exact).abs().max()) <= ERROR:

            def work(steps: int = steps) -> None:
                z.copy_(run(steps))
                recompute(qp, z)

            microseconds = replayed(work)
            return {"us": microseconds, "error": float((z.double() - exact).abs().max()), "steps": steps}
    return {"us": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a saved classifier with 784 inputs: real weights beside random ones")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    nets = {"random weights": lrrn.LRRN((784, 64, 64, 10), generator=torch.Generator().manual_seed(0), device="cuda")}
    if options.model:
        nets["trained weights"] = lrrn.load(options.model).network_.to("cuda")
    rows = []
    for name, net in nets.items():
        for n in BATCHES:
            x = torch.rand((n, 784), generator=torch.Generator().manual_seed(1)).to("cuda")
            qp = net.energy_snapshot(torch.float32).free(x)
            assert fits_on_chip(qp)
            exact = solve(net.energy_snapshot(torch.float64).free(x.double()), tol=1e-11, max_sweeps=5000).z
            row: dict[str, Any] = {"weights": name, "batch": n, "lrrn": ours(qp, exact), "torch FISTA": fista(qp, exact)}
            if row["lrrn"]["us"]:
                row["lrrn"]["million solves a second"] = n / row["lrrn"]["us"]
            rows.append(row)
            print(json.dumps(row), flush=True)
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "error": ERROR, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
