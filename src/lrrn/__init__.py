"""Lifted regression/reconstruction networks: energy-based networks with a guaranteed Lipschitz constant."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lrrn.bounds import LipschitzBound
from lrrn.certificates import Certificate, certify, output_interval
from lrrn.energy.constraints import Interval
from lrrn.network import LRRN
from lrrn.network.solution import ConvergenceError, Solution
from lrrn.qp import Status
from lrrn.runtime.threads import blas_threads

if TYPE_CHECKING:
    from lrrn.estimators import LRRNClassifier, LRRNEnergyModel, LRRNRegressor, certified_scorer, certify_pipeline
    from lrrn.persistence import load, save

__version__ = "0.1.0"

__all__ = [
    "LRRN",
    "Certificate",
    "ConvergenceError",
    "Interval",
    "LRRNClassifier",
    "LRRNEnergyModel",
    "LRRNRegressor",
    "LipschitzBound",
    "Solution",
    "Status",
    "__version__",
    "blas_threads",
    "certified_scorer",
    "certify",
    "certify_pipeline",
    "load",
    "output_interval",
    "save",
]

_LAZY = {
    **dict.fromkeys(
        ("LRRNClassifier", "LRRNEnergyModel", "LRRNRegressor", "certified_scorer", "certify_pipeline"), "lrrn.estimators"
    ),
    **dict.fromkeys(("load", "save"), "lrrn.persistence"),
}
"""Names that load scikit-learn, imported on first use: it takes a second to import."""
_PACKAGES = ("attacks", "certificates", "datasets", "estimators", "learning", "persistence", "solvers")
"""Public packages, imported on first use."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"lrrn.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'lrrn' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})
