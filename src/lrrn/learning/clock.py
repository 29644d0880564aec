"""Rows, learning rate and index of each step, kept on the device, so that one CUDA graph can be replayed for all steps."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lrrn.runtime.devices import has_kernels

BLOCK = 256
"""Rows that the kernel copies per iteration."""


@final
class StepClock:
    """Counter of the steps of an epoch, with their rows and learning rates.

    :meth:`tick` sets ``rows``, ``rate`` and ``moment``: the samples of the current step, its learning rate, and its index,
    counted from the beginning of training.
    """

    def __init__(self, steps: int, batch_size: int, device: torch.device) -> None:
        self._order = torch.zeros((steps, batch_size), dtype=torch.int64, device=device)
        self._rates = torch.zeros(steps, dtype=torch.float32, device=device)
        # indices of the next step, in the epoch and in training
        self._next = torch.zeros(2, dtype=torch.int64, device=device)
        self.rows = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.rate = torch.zeros((), dtype=torch.float32, device=device)
        self.moment = torch.zeros((), dtype=torch.int64, device=device)

    def begin(self, order: Tensor, rates: list[float], first: int, moment: int) -> None:
        """Begin an epoch: the rows of its steps, of shape (steps, batch_size), their learning rates, and the first step.

        ``moment`` is the index of the first step to take, counted from the beginning of training.
        """
        self._order.copy_(order)
        self._rates.copy_(torch.tensor(rates))
        self._next.copy_(torch.tensor([first, moment]))

    def rewind(self) -> None:
        """Go back to the first step of the epoch, to repeat it; the index from the beginning of training continues."""
        self._next[0].zero_()

    def tick(self) -> None:
        """Advance to the next step. Launch overhead dominates, so on a device with kernels this is a single launch."""
        if has_kernels(self._order):
            from lrrn.kernels.cuda.clock import tick

            arrays = (self._order, self._rates, self._next, self.rows, self.rate, self.moment)
            tick[(1,)](*arrays, len(self.rows), BLOCK=BLOCK, num_warps=1)
            return
        at = self._next[:1]
        torch.index_select(self._order, 0, at, out=self.rows.unsqueeze(0))
        torch.index_select(self._rates, 0, at, out=self.rate.unsqueeze(0))
        self.moment.copy_(self._next[1])
        self._next += 1

    def ahead(self) -> tuple[Tensor, Tensor]:
        """Return the rows and the index of the next step, or of the last one at the end, without advancing."""
        at = self._next[:1].clamp(max=len(self._order) - 1)
        return self._order.index_select(0, at)[0], self._next[1]
