"""Lifted regression/reconstruction networks: energy-based networks with a guaranteed Lipschitz constant."""

from lrrn.bounds import LipschitzBound
from lrrn.constraints import Interval
from lrrn.network import LRRN
from lrrn.qp import Status
from lrrn.solution import Solution
from lrrn.threads import blas_threads

__version__ = "0.1.0"

__all__ = ["LRRN", "Interval", "LipschitzBound", "Solution", "Status", "__version__", "blas_threads"]
