"""Adam and AdamW on a CUDA device in one launch. torch's own versions process one vector with a single block of threads."""

from __future__ import annotations

from math import log
from typing import final

import torch
from torch import Tensor

from lrrn.learning.flat import FlatParameters
from lrrn.runtime.devices import has_kernels

BLOCK = 1024
"""Parameters per Triton program."""


@final
class FlatAdam:
    """Replaces the ``step`` of an optimiser for slices of ``flat``, whose groups share learning rate, betas and eps.

    The optimiser still owns its state, whose tensors become views of vectors of the length of the parameter vector. So it
    can be saved, and its own ``step`` may be called instead at any time. Create a new instance after ``load_state_dict``.
    Weight decay is decoupled (AdamW).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flat: FlatParameters) -> None:
        vector = flat.vector
        stretches = [(stretch, group) for group in optimizer.param_groups for stretch in group["params"]]
        self._optimizer, self._flat = optimizer, flat
        self._mean, self._square = torch.zeros_like(vector), torch.zeros_like(vector)
        self._decay, self._steps = torch.full_like(vector, -1.0), vector.new_zeros(len(stretches))
        for (stretch, group), step in zip(stretches, self._steps.unbind(), strict=True):
            first = stretch.storage_offset() - vector.storage_offset()
            span = slice(first, first + len(stretch))
            self._decay[span] = group["weight_decay"]
            state = {"step": step, "exp_avg": self._mean[span], "exp_avg_sq": self._square[span]}
            for name, value in optimizer.state[stretch].items():
                state[name].copy_(value)
            optimizer.state[stretch] = state

    @staticmethod
    def applies(optimizer: torch.optim.Optimizer, flat: FlatParameters) -> bool:
        """Whether the optimiser is Adam or AdamW and the kernel supports the parameters."""
        adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
        return adam and flat.vector.dtype == torch.float32 and has_kernels(flat.vector)

    @torch.no_grad()
    def __call__(self) -> None:
        """Update the parameters by their gradients."""
        from lrrn.kernels.cuda.adam import adam

        group, vector = self._optimizer.param_groups[0], self._flat.vector
        rate = group["lr"]
        rate = rate if isinstance(rate, Tensor) else vector.new_full((), rate)
        factors = (number for beta in group["betas"] for number in (beta, 1 - beta, log(beta)))
        self._steps += 1
        arrays = (vector, self._flat.gradient, self._mean, self._square, self._decay, rate, self._steps)
        n = len(vector)
        adam[(-(-n // BLOCK),)](*arrays, n, *factors, group["eps"], BLOCK=BLOCK, num_warps=4)
