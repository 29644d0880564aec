"""The network as a torch module: predictions, energies, implicit gradients."""

from lrrn.network.layers import Conv
from lrrn.network.module import LRRN
from lrrn.network.policy import SolvePolicy

__all__ = ["LRRN", "Conv", "SolvePolicy"]
