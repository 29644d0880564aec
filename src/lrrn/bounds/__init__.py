"""From weights to proven Lipschitz constants."""

from lrrn.bounds.layerwise import LipschitzBound, paper, singular_range, spectral

__all__ = ["LipschitzBound", "paper", "singular_range", "spectral"]
