"""Early stopping: the parameters of the best epoch, and when to end."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lrrn.learning.checkpoint import Position
from lrrn.network import LRRN


@final
class EarlyStopping:
    """Keeps the parameters of the epoch with the best validation score; of equal scores the latest, which was trained longest.

    Attributes
    ----------
    best : list of Tensor
        These parameters; before the first score those of the beginning.
    """

    def __init__(self, net: LRRN, patience: int | None) -> None:
        self._net, self._patience = net, patience
        self.best: list[Tensor] = [p.detach().clone() for p in net.parameters()]

    @torch.no_grad()
    def note(self, position: Position, score: float) -> None:
        """Note the score of the epoch that ends."""
        best = position.best_score
        if best is None or score > best:
            position.best_score, position.best_epoch = score, position.epoch + 1
        if best is None or score >= best:
            for kept, p in zip(self.best, self._net.parameters(), strict=True):
                kept.copy_(p)

    @torch.no_grad()
    def restore(self) -> None:
        """Return to the best parameters."""
        for p, kept in zip(self._net.parameters(), self.best, strict=True):
            p.copy_(kept)

    def ends(self, position: Position) -> bool:
        """Whether the score has not improved for as many epochs as allowed; a resumed run then ends at once.

        As long as all scores are equal, learning has not begun to show, and training goes on.
        """
        if self._patience is None or position.best_score is None or position.step > 0:
            return False
        scores = {record.get("validation_score") for record in position.history if record["stage"] == position.stage}
        return len(scores) > 1 and position.epoch - position.best_epoch >= self._patience
