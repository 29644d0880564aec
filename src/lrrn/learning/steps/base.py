"""What a backend promises."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lrrn.learning.flat import FlatParameters
from lrrn.learning.objectives import Batch, Objective
from lrrn.learning.settings import Settings
from lrrn.network import LRRN


class GradientBackend(Protocol):
    """One way to the gradient of a batch.

    Attributes
    ----------
    name : str
        As the history shows it.
    reads_rows : bool
        Whether it reads rows of the data itself, so that no copy of them is made.
    """

    name: str
    reads_rows: bool

    def __init__(self, net: LRRN, objective: Objective, flat: FlatParameters, aim: float) -> None:
        """Prepare for batches of a network; its parameters are attached to ``flat``."""

    @staticmethod
    def applies(net: LRRN, objective: Objective, settings: Settings) -> bool:
        """Whether this backend can take steps of this network towards this objective."""
        ...

    def gradients(self, batch: Batch, weight: Tensor | None, n: int, rows: Tensor | None) -> float | Tensor | None:
        """Set the gradients of a batch's part of the mean over ``n`` samples, and return that part of the loss.

        Parameters
        ----------
        batch : Batch
            ``batch.activations`` gets the free phase's activations.
        weight : Tensor of shape (n_rows,), optional
            Of every sample; one if not given.
        n : int
            Samples of the whole batch, of which this may be one rank's part.
        rows : Tensor of shape (n_rows,), optional
            Which rows of ``batch.x`` and ``batch.target`` are meant; all if not given.

        Returns
        -------
        float, Tensor of shape () or None
            None hands the batch to the next backend; ``batch.start`` may then be closer to the solution.
        """
        ...


def shares(like: Tensor, weight: Tensor | None, here: int, n: int) -> Tensor:
    """Return the factors of ``here`` samples in the mean over ``n``."""
    return like.new_full((here,), 1 / n) if weight is None else weight / n
