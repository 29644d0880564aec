"""Interface of the gradient backends."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lrrn.learning.flat import FlatParameters
from lrrn.learning.objectives import Batch, Objective
from lrrn.learning.settings import Settings
from lrrn.network import LRRN


class GradientBackend(Protocol):
    """Computes the gradient of a batch.

    Attributes
    ----------
    name : str
        Name in the history.
    reads_rows : bool
        Whether it gathers rows of the data itself, which avoids a copy.
    """

    name: str
    reads_rows: bool

    def __init__(self, net: LRRN, objective: Objective, flat: FlatParameters, aim: float) -> None:
        """Prepare for batches of a network; its parameters are attached to ``flat``."""

    @staticmethod
    def applies(net: LRRN, objective: Objective, settings: Settings) -> bool:
        """Whether this backend supports this network and this objective."""
        ...

    def gradients(self, batch: Batch, weight: Tensor | None, n: int, rows: Tensor | None) -> float | Tensor | None:
        """Set the gradients of the contribution of a batch to the mean loss over ``n`` samples; return this contribution.

        Parameters
        ----------
        batch : Batch
            ``batch.activations`` is set to the activations of the free phase.
        weight : Tensor of shape (n_rows,), optional
            Sample weights; one if not given.
        n : int
            Samples of the whole batch; this may be one rank's part of it.
        rows : Tensor of shape (n_rows,), optional
            Rows of ``batch.x`` and ``batch.target`` to use; all if not given.

        Returns
        -------
        float, Tensor of shape () or None
            None passes the batch to the next backend; ``batch.start`` may then be closer to the solution.
        """
        ...


def shares(like: Tensor, weight: Tensor | None, here: int, n: int) -> Tensor:
    """Return the factors of ``here`` samples in the mean over ``n``."""
    return like.new_full((here,), 1 / n) if weight is None else weight / n
