"""Lifted regression/reconstruction networks: energy-based networks with a guaranteed Lipschitz constant."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrrn.bounds import LipschitzBound
    from lrrn.certificates import Certificate, certify, output_interval
    from lrrn.energy.constraints import Interval
    from lrrn.estimators import (
        ConformalClassifier,
        ConformalRegressor,
        LRRNClassifier,
        LRRNEnergyModel,
        LRRNRegressor,
        certified_scorer,
        certify_pipeline,
    )
    from lrrn.export import Unrolled, save_onnx, unroll
    from lrrn.network import LRRN, Conv
    from lrrn.network.solution import ConvergenceError, Solution
    from lrrn.persistence import load, save
    from lrrn.qp import Status
    from lrrn.runtime.threads import blas_threads

__version__ = "0.1.0"

__all__ = [
    "LRRN",
    "Certificate",
    "ConformalClassifier",
    "ConformalRegressor",
    "Conv",
    "ConvergenceError",
    "Interval",
    "LRRNClassifier",
    "LRRNEnergyModel",
    "LRRNRegressor",
    "LipschitzBound",
    "Solution",
    "Status",
    "Unrolled",
    "__version__",
    "blas_threads",
    "certified_scorer",
    "certify",
    "certify_pipeline",
    "load",
    "output_interval",
    "save",
    "save_onnx",
    "unroll",
]

_HOMES = {
    **dict.fromkeys(("Conv", "LRRN"), "network"),
    "LipschitzBound": "bounds",
    "Interval": "energy.constraints",
    "Status": "qp",
    "blas_threads": "runtime.threads",
    **dict.fromkeys(("Certificate", "certify", "output_interval"), "certificates"),
    **dict.fromkeys(("ConvergenceError", "Solution"), "network.solution"),
    **dict.fromkeys(("ConformalClassifier", "ConformalRegressor"), "estimators"),
    **dict.fromkeys(
        ("LRRNClassifier", "LRRNEnergyModel", "LRRNRegressor", "certified_scorer", "certify_pipeline"), "estimators"
    ),
    **dict.fromkeys(("load", "save"), "persistence"),
    **dict.fromkeys(("Unrolled", "save_onnx", "unroll"), "export"),
}
"""Modules of the public names, imported on first use: torch and scikit-learn take seconds to import."""
_PACKAGES = ("attacks", "certificates", "datasets", "estimators", "export", "learning", "persistence", "solvers")
"""Public packages, imported on first use."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"lrrn.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'lrrn' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"lrrn.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})
