"""Data-parallel training: all-reduce of gradients after every step, of counts at every checkpoint. No-op in one process."""

from __future__ import annotations

import hashlib
from typing import final

import torch
from torch import Tensor

from lrrn.learning.checkpoint import Position
from lrrn.learning.flat import FlatParameters
from lrrn.learning.monitor import DivergenceError, SolveCounts
from lrrn.runtime.ranks import Ranks


@final
class DataParallel:
    """Synchronises the ranks of a data-parallel training run; every rank holds the same parameters."""

    def __init__(self, ranks: Ranks, flat: FlatParameters) -> None:
        self._ranks, self._flat = ranks, flat

    def add_gradients(self, loss: float, stop: bool, save: bool, over: bool) -> tuple[float, bool, bool, bool]:
        """Sum gradients, losses and three flags over ranks in one all-reduce.

        Any rank may be interrupted (``stop``); rank 0 decides when to ``save`` and whether the time is ``over``.
        """
        if not self._ranks.connected:
            return loss, stop, save, over
        flags, main = self._flat.flags, self._ranks.is_main
        flags.copy_(torch.tensor((loss, stop, save and main, over and main), dtype=flags.dtype))
        self._ranks.add_up(self._flat.buffer)
        loss, stopping, saving, ending = flags.tolist()
        return loss, stopping > 0, saving > 0, ending > 0

    def add_counts(self, counts: SolveCounts, position: Position) -> None:
        """Sum the counts of solves since the last call over all ranks, add them to the position, and reset them."""
        counted = torch.tensor((counts.samples, counts.sweeps, counts.missed), device=self._flat.vector.device)
        self._ranks.add_up(counted)
        samples, sweeps, missed = counted.tolist()
        position.samples += samples
        position.sweeps += sweeps
        position.missed += missed
        counts.samples = counts.sweeps = counts.missed = 0

    def complete(self, activations: Tensor | None, order: Tensor, batch_size: int, steps: range) -> None:
        """Exchange the rows of activations that ranks computed in some steps, so that every rank has all."""
        if activations is None or not self._ranks.connected or not steps:
            return
        rows = order[steps.start * batch_size : steps.stop * batch_size]
        ours = torch.zeros(len(rows), dtype=torch.bool)
        for batch in ours.split(batch_size):
            batch[self._ranks.part(len(batch))] = True
        rows = rows.to(activations.device)
        values = activations[rows] * ours[:, None].to(activations)
        self._ranks.add_up(values)
        activations[rows] = values

    def check_equal(self, epoch: int) -> None:
        """Raise if the parameters of the ranks differ."""
        if not self._ranks.connected:
            return
        content = self._flat.vector.cpu().numpy().tobytes()
        digests = self._ranks.gather(hashlib.blake2b(content, digest_size=16).hexdigest())
        strays = [index for index, digest in enumerate(digests) if digest != digests[0]]
        if strays:
            raise DivergenceError(
                f"after epoch {epoch} the parameters of ranks {', '.join(map(str, strays))} differ from those of rank 0: their "
                "processors or versions round differently. Run on machines of one kind, with the same versions"
            )
