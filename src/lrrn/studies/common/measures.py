"""Measurements of a trained network: the paper's columns, certificates and attacks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lrrn.attacks import minimal_perturbation
from lrrn.certificates import certify
from lrrn.estimators import LRRNClassifier, LRRNEnergyModel
from lrrn.network import LRRN
from lrrn.reports.evaluation import auroc
from lrrn.runtime.threads import blas_threads

Array = NDArray[Any]
EPS = (0.3, 0.5, 1.0, 1.58)
"""Perturbation sizes for certified and attacked accuracy."""
PASSES = 20
"""Number of coordinate-descent passes that the paper uses for inference."""
METHODS = ("paper", "pairwise", "spectral", "multiplier")


def measure_classifier(
    model: LRRNClassifier, X: Array, y: Array, closely: int, bound_seconds: float, seed: int
) -> dict[str, Any]:
    """Measure a classifier on test images.

    Per-sample measurements use the first ``closely`` images. ``bound_seconds`` is the time budget of the multiplier bounds.
    """
    net = model.network_
    x = torch.from_numpy(X).to(net.W[0].device, torch.float64)
    labels = torch.from_numpy(y).to(x.device)
    rho = float(net.lipschitz("paper"))
    with blas_threads(1):
        output = net.infer(x).output
        figures: dict[str, Any] = _columns(output, labels, rho)
        passes = net.infer(x, solver="coordinate_descent", max_sweeps=PASSES)
        figures[f"{PASSES} passes"] = {
            **_columns(passes.output, labels, rho),
            "unconverged": int((~passes.converged).sum()),
        }
        right, radii = output.argmax(-1) == labels, dict[str, Tensor]()
        for method in METHODS:
            radii[method] = certify(net, x, method, seconds=bound_seconds).radius
        figures["multiplier bound"] = float(net.lipschitz("multiplier", seconds=bound_seconds))
        figures["radii"] = {method: _certified(radius, right) for method, radius in radii.items()}
        if closely:
            figures["closely"] = _close_look(net, x[:closely], right[:closely], radii, bound_seconds, seed)
    return figures


def _columns(output: Tensor, labels: Tensor, rho: float) -> dict[str, float]:
    """Return the columns of Tables 2 and 3."""
    best, second = output.topk(2, dim=-1).values.unbind(-1)
    margin = best - second
    return {
        "rho": rho,
        "mean margin": float(margin.mean()),
        "median margin": float(margin.median()),
        "std margin": float(margin.std()),
        "delta": float(margin.median()) / (math.sqrt(2) * rho),
        "accuracy": float((output.argmax(-1) == labels).double().mean()),
    }


def _certified(radius: Tensor, right: Tensor) -> dict[str, Any]:
    return {
        "median": float(radius.median()),
        "certified accuracy": {f"{eps:g}": float((right & (radius > eps)).double().mean()) for eps in EPS},
    }


def _close_look(
    net: LRRN, x: Tensor, right: Tensor, radii: Mapping[str, Tensor], bound_seconds: float, seed: int
) -> dict[str, Any]:
    start = time.perf_counter()
    local = certify(net, x, "local", seconds=bound_seconds)
    seconds = (time.perf_counter() - start) / len(x)
    attack = minimal_perturbation(net, x, local.prediction, seed=seed)
    return {
        "images": len(x),
        "accuracy": float(right.double().mean()),
        "radii": {
            **{method: _certified(radius[: len(x)], right) for method, radius in radii.items()},
            "local": {**_certified(local.radius, right), "seconds an image": seconds},
        },
        "attack": {
            "median": float(attack.distance.median()),
            "attacked accuracy": {f"{eps:g}": float((right & (attack.distance > eps)).double().mean()) for eps in EPS},
            "inside a radius": int((attack.distance < local.radius).sum()),
        },
    }


def measure_energies(
    model: LRRNEnergyModel, X: Array, own: Array, tests: Mapping[str, Array], seed: int
) -> dict[str, dict[str, float]]:
    """Measure energies: of every test set, of the model's own test set mirrored, of a Gaussian fitted to the training images.

    Energies are given with the factor 1/2 of the paper's formula, and without it, as in the paper's table.
    """
    side = round(math.sqrt(X.shape[1]))
    mirrored = own.reshape(-1, side, side)[:, :, ::-1].reshape(own.shape)
    noise = np.random.default_rng(seed).standard_normal(own.shape)
    gaussian = X.mean(0, dtype=np.float64) + X.std(0, dtype=np.float64) * noise
    in_distribution, figures = model.energy(own), {}
    for name, inputs in {**tests, "mirrored": mirrored, "gaussian": gaussian}.items():
        energy = model.energy(inputs)
        figures[name] = {
            "mean": float(energy.mean()),
            "std": float(energy.std()),
            "mean without 1/2": 2 * float(energy.mean()),
            "std without 1/2": 2 * float(energy.std()),
            "auroc": auroc(in_distribution, energy),
        }
    return figures
