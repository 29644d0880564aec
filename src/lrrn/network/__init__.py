"""The network as a torch module: predictions, energies, implicit gradients."""

from lrrn.network.layers import Conv
from lrrn.network.module import BUDGET, LRRN
from lrrn.network.policy import SolvePolicy

__all__ = ["BUDGET", "LRRN", "Conv", "SolvePolicy"]
