"""Time trained wide layers on the CPU: free phases, adjoints, and a training step.

Free phases are solved by sweeps alone, in turn with conjugate gradients on faces, and on the dual; adjoints by conjugate
gradients, by coordinate descent, and on the dual. Models are files or names, such as mnist-wide. Every answer is compared with
a float64 solve to 1e-9.
Training steps use the model's own recipe, with a learning rate so small that the weights do not change.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

import lrrn
from lrrn import LRRNClassifier, datasets
from lrrn.learning.monitor import condition_number
from lrrn.qp import BoxQP
from lrrn.solvers import coordinate_descent, dual, solve

TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Tolerances of training (float32) and of prediction (float64)."""


def adjoints(network: lrrn.LRRN, x: torch.Tensor, dtype: torch.dtype) -> BoxQP:
    """Return the adjoint problem for random output gradients, as in the gradient of a loss."""
    energy = network.energy_snapshot(dtype)
    z = solve(energy.free(x.to(dtype)), tol=TOLERANCES[dtype]).z
    slopes = torch.randn(len(x), network.sizes[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    v = slopes @ energy.weights[-1]
    return energy.adjoint(z, v / v.norm(dim=1, keepdim=True))


def free_phases(network: lrrn.LRRN, x: torch.Tensor, repeats: int) -> Iterator[dict[str, Any]]:
    """Time the free phase by sweeps alone, in turn with conjugate gradients on faces, and on the dual where it applies."""
    exact = solve(network.energy_snapshot(torch.float64).free(x.double()), tol=1e-9, max_sweeps=5000).z
    for dtype in TOLERANCES:
        qp = network.energy_snapshot(dtype).free(x.to(dtype))
        row: dict[str, Any] = {"units": qp.dim, "samples": len(x), "type": str(dtype).removeprefix("torch.")}
        usual = coordinate_descent.FACES_FROM
        for name, least in (("sweeps alone", math.inf), ("with faces", 0)):
            coordinate_descent.FACES_FROM = least  # type: ignore[assignment]
            row[name] = measured(qp, "coordinate_descent", exact, repeats)
        coordinate_descent.FACES_FROM = usual
        if dual.fits_dual(qp):
            row["on the dual"] = measured(qp, "accelerated", exact, repeats)
        row["times as fast"] = row["sweeps alone"]["milliseconds"] / row["with faces"]["milliseconds"]
        yield row


def measured(qp: BoxQP, solver: str, exact: torch.Tensor, repeats: int) -> dict[str, float]:
    tol = TOLERANCES[qp.q.dtype]
    solution = solve(qp, solver=solver, tol=tol)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        solve(qp, solver=solver, tol=tol)
        seconds.append(time.perf_counter() - start)
    return {
        "milliseconds": 1e3 * statistics.median(seconds),
        "products with H": float(solution.n_sweeps.double().mean()),
        "largest error": float((solution.z.double() - exact).norm(dim=1).max()),
        "not converged": int((~solution.converged).sum()),
    }


def training_step(classifier: LRRNClassifier, X: NDArray[Any], y: NDArray[Any], steps: int) -> float:
    """Return the seconds per step, as the median of several passes over ``steps`` batches."""
    classifier.set_params(learning_rate=1e-12, verbose=0)
    n = steps * classifier.batch_size
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        classifier.partial_fit(X[:n], y[:n])
        seconds.append((time.perf_counter() - start) / steps)
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, action="append", required=True, help="may be given again")
    parser.add_argument("--dataset", action="append", required=True, help="one for each model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of training, at a time")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    report: list[dict[str, Any]] = []
    free: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for path, name in zip(options.model, options.dataset, strict=True):
        classifier = lrrn.load(path)
        assert isinstance(classifier, LRRNClassifier)
        X, y = datasets.load(name)
        images = torch.from_numpy(X[:256])
        with lrrn.blas_threads(1):
            for found in free_phases(classifier.network_, images, options.repeats):
                free.append({"data": name, **found})
                print(json.dumps(free[-1]), flush=True)
        for dtype in TOLERANCES:
            for n in (8, 64, 256):
                qp = adjoints(classifier.network_, images[:n], dtype)
                double = BoxQP(qp.hessian.to(torch.float64), qp.q.double(), qp.lo.double(), qp.hi.double(), linear=True)
                exact = solve(double, tol=1e-9, max_sweeps=5000).z
                row: dict[str, Any] = {"data": name, "units": qp.dim, "samples": n, "type": str(dtype).removeprefix("torch.")}
                with lrrn.blas_threads(1):
                    if dual.fits_dual(qp):
                        row["on the dual"] = measured(qp, "accelerated", exact, options.repeats)
                    usual, dual.UNITS_FROM = dual.UNITS_FROM, qp.dim + 1
                    for solver in ("coordinate_descent", "accelerated"):
                        row[solver] = measured(qp, solver, exact, options.repeats)
                    dual.UNITS_FROM = usual
                row["times as fast"] = row["coordinate_descent"]["milliseconds"] / row["accelerated"]["milliseconds"]
                print(json.dumps(row), flush=True)
                report.append(row)
        seconds = training_step(classifier, X, y, options.steps)
        steps.append(
            {
                "data": name,
                "units": classifier.network_.sizes[1],
                "condition number": condition_number(classifier.network_),
                "samples": classifier.batch_size,
                "seconds of a training step": seconds,
                "seconds of an epoch of them": seconds * -(-len(X) // classifier.batch_size),
                "minutes of all epochs of them": seconds * -(-len(X) // classifier.batch_size) * classifier.epochs / 60,
            }
        )
        print(json.dumps(steps[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(
            json.dumps(
                {"threads": torch.get_num_threads(), "free phases": free, "adjoints": report, "training": steps}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
