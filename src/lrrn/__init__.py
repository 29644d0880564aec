"""Lifted regression/reconstruction networks: energy-based networks with a guaranteed Lipschitz constant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lrrn.bounds import LipschitzBound
from lrrn.certify import Certificate, certify, output_interval
from lrrn.constraints import Interval
from lrrn.network import LRRN
from lrrn.qp import Status
from lrrn.solution import ConvergenceError, Solution
from lrrn.threads import blas_threads

if TYPE_CHECKING:
    from lrrn.estimators import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
    from lrrn.serialization import load, save

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
    "certify",
    "load",
    "output_interval",
    "save",
]

_LATER = {
    "LRRNClassifier": "lrrn.estimators",
    "LRRNEnergyModel": "lrrn.estimators",
    "LRRNRegressor": "lrrn.estimators",
    "load": "lrrn.serialization",
    "save": "lrrn.serialization",
    "datasets": "lrrn.datasets",
    "learning": "lrrn.learning",
}
"""Names that load scikit-learn, imported when first asked for: a second of start-up that many sessions can do without."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'lrrn' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_LATER[name])
    return module if _LATER[name] == f"lrrn.{name}" else getattr(module, name)
