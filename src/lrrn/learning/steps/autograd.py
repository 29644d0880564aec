"""Gradients of any objective by autograd. Energies and predictions supply their derivatives in closed form."""

from __future__ import annotations

from typing import final

from torch import Tensor

from lrrn.learning.flat import FlatParameters
from lrrn.learning.objectives import Batch, Objective
from lrrn.learning.settings import Settings
from lrrn.network import LRRN


@final
class Autograd:
    """Calls the objective and ``backward``."""

    name = "autograd"
    reads_rows = False

    def __init__(self, net: LRRN, objective: Objective, flat: FlatParameters, aim: float) -> None:
        self._net, self._objective, self._flat = net, objective, flat

    @staticmethod
    def applies(net: LRRN, objective: Objective, settings: Settings) -> bool:
        """Return True."""
        return True

    def gradients(self, batch: Batch, weight: Tensor | None, n: int, rows: Tensor | None) -> Tensor:
        """Sum the losses and differentiate."""
        losses = self._objective(self._net, batch)
        mean = (losses if weight is None else losses * weight).sum() / n
        self._flat.gradient.zero_()
        mean.backward()
        return mean.detach()
