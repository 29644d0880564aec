"""A network's parameters as one vector during training: one array for the compiled step, one tensor for the optimiser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from lrrn.network import LRRN

FLAGS = 4
"""Count of extra numbers in the all-reduce of the gradient: the loss, whether to stop, to save, and to end in time."""


@final
class FlatParameters:
    """All W, then all b, then all c of a network in one vector, and their derivatives in another.

    While :meth:`attached`, the parameters of the network are views of ``vector`` and their ``grad`` views of ``gradient``.
    ``buffer`` is that of the all-reduce: the gradient and extra numbers, ``flags``, contiguous in memory.
    """

    def __init__(self, net: LRRN) -> None:
        self._parameters = [p for p in net.parameters() if isinstance(p, nn.Parameter)]
        self.vector = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        n = len(self.vector)
        self.buffer = self.vector.new_zeros(n + FLAGS)
        self.gradient, self.flags = self.buffer[:n], self.buffer[n:]
        self._n_weights = len(net.W)

    def weights(self) -> list[Tensor]:
        """Return the slices of ``vector`` with trainable weights, for an optimiser."""
        return self._stretches(0, self._n_weights)

    def biases(self) -> list[Tensor]:
        """Return the slices of ``vector`` with trainable biases."""
        return self._stretches(self._n_weights, len(self._parameters))

    def everything(self) -> list[Tensor]:
        """Return the slices of all trainable parameters: one, unless some have ``requires_grad=False``."""
        return self._stretches(0, len(self._parameters))

    def _stretches(self, first: int, last: int) -> list[Tensor]:
        """Return slices of ``vector``, with adjacent trainable parameters merged."""
        at, spans = 0, list[tuple[int, int]]()
        for i, p in enumerate(self._parameters):
            end = at + p.numel()
            if first <= i < last and p.requires_grad:
                spans = [*spans[:-1], (spans[-1][0], end)] if spans and spans[-1][1] == at else [*spans, (at, end)]
            at = end
        stretches = []
        for start, end in spans:
            stretch = self.vector[start:end]
            stretch.grad = self.gradient[start:end]
            stretches.append(stretch)
        return stretches

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Make the network's parameters views of the vector; afterwards each has its own memory again."""
        sizes = [p.numel() for p in self._parameters]
        with torch.no_grad():
            values, slopes = self.vector.split(sizes), self.gradient.split(sizes)
            for p, value, slope in zip(self._parameters, values, slopes, strict=True):
                value.copy_(p.reshape(-1))
                p.data, p.grad = value.view(p.shape), slope.view(p.shape) if p.requires_grad else None
        try:
            yield
        finally:
            for p in self._parameters:
                p.data, p.grad = p.data.clone(), None

    def last_weights(self) -> tuple[Tensor, Tensor]:
        """Return the slices of ``vector`` and ``gradient`` that hold W_{L-1}."""
        start = sum(p.numel() for p in self._parameters[: self._n_weights - 1])
        end = start + self._parameters[self._n_weights - 1].numel()
        return self.vector[start:end], self.gradient[start:end]
