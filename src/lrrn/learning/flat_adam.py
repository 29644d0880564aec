"""Updates of all parameters in one call: torch's versions of Adam cost more than a small step, or use one block of a GPU."""

from __future__ import annotations

from math import log
from typing import Any, final

import torch
from torch import Tensor

from lrrn.kernels.cpu.arguments import Rule
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
        self._decay = decays(optimizer, flat)
        self._steps = torch.zeros(len(stretches), device=vector.device)
        for (stretch, _), step in zip(stretches, self._steps.unbind(), strict=True):
            span = _span(stretch, flat)
            state = {"step": step, "exp_avg": self._mean[span], "exp_avg_sq": self._square[span]}
            for name, value in optimizer.state[stretch].items():
                state[name].copy_(value)
            optimizer.state[stretch] = state

    @staticmethod
    def applies(optimizer: torch.optim.Optimizer, flat: FlatParameters) -> bool:
        """Whether the optimiser is Adam or AdamW and a kernel supports the parameters."""
        adam, vector = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW), flat.vector
        return adam and (compiles(vector) or (vector.dtype == torch.float32 and has_kernels(vector)))

    @torch.no_grad()
    def __call__(self) -> None:
        """Update the parameters by their gradients, on a CUDA device."""
        from lrrn.kernels.cuda.adam import adam

        group, vector = self._optimizer.param_groups[0], self._flat.vector
        rate = group["lr"]
        rate = rate if isinstance(rate, Tensor) else vector.new_full((), rate)
        factors = (number for beta in group["betas"] for number in (beta, 1 - beta, log(beta)))
        self._steps += 1
        arrays = (vector, self._flat.gradient, self._mean, self._square, self._decay, rate, self._steps)
        n = len(vector)
        adam[(-(-n // BLOCK),)](*arrays, n, *factors, group["eps"], BLOCK=BLOCK, num_warps=4)

    def rule(self, penalty: float, norms: Any) -> Rule:
        """Return the arguments of the compiled update on the CPU; ``penalty`` and ``norms`` as there."""
        group = self._optimizer.param_groups[0]
        decay, mean, square, taken = (part.numpy() for part in (self._decay, self._mean, self._square, self._steps))
        beta_mean, beta_square = map(float, group["betas"])
        return Rule(decay, mean, square, taken, beta_mean, beta_square, float(group["eps"]), penalty, norms)


def compiles(vector: Tensor) -> bool:
    """Whether the compiled update supports a vector."""
    return vector.device.type == "cpu" and vector.dtype in (torch.float32, torch.float64)


def sgd_rule(optimizer: torch.optim.Optimizer, flat: FlatParameters, penalty: float, norms: Any) -> Rule:
    """Return the arguments of the compiled update for plain gradient descent."""
    nothing = flat.vector.new_empty(0).numpy()
    return Rule(decays(optimizer, flat).numpy(), nothing, nothing, nothing, 0.0, 0.0, 0.0, penalty, norms)


def decays(optimizer: torch.optim.Optimizer, flat: FlatParameters) -> Tensor:
    """Return the decoupled weight decay of every parameter; -1 for those that are not trained."""
    decay = torch.full_like(flat.vector, -1.0)
    for group in optimizer.param_groups:
        for stretch in group["params"]:
            decay[_span(stretch, flat)] = group["weight_decay"]
    return decay


def _span(stretch: Tensor, flat: FlatParameters) -> slice:
    first = stretch.storage_offset() - flat.vector.storage_offset()
    return slice(first, first + len(stretch))
