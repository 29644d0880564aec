"""The network as a torch module: predictions, energies, implicit gradients."""

from lrrn.network.module import BUDGET, LRRN

__all__ = ["BUDGET", "LRRN"]
