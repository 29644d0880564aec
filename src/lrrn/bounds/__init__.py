"""Proven bounds on the Lipschitz constant of a network, computed from its weights."""

from lrrn.bounds.layerwise import LipschitzBound, paper, singular_range, spectral

__all__ = ["LipschitzBound", "paper", "singular_range", "spectral"]
