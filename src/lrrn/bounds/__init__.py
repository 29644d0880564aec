"""Proven bounds on the Lipschitz constant of a network, computed from its weights."""

from lrrn.bounds.layerwise import LipschitzBound, paper, singular_range, spectral
from lrrn.bounds.outputs import BUDGET, of_pair

__all__ = ["BUDGET", "LipschitzBound", "of_pair", "paper", "singular_range", "spectral"]
