"""The batches of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final, overload

from torch import Tensor

from lrrn.runtime.lazy import lazy


@final
class Batches(Sequence[Tensor]):
    """Mini-batches of one epoch: an order of samples, split into batches of one size; the last may be smaller.

    Batches are created on access: there are thousands of them, and captured steps read only :attr:`full`.

    Parameters
    ----------
    order : int64 Tensor of shape (n,)
    size : int
    """

    def __init__(self, order: Tensor, size: int) -> None:
        self._order, self._size = order, size

    @property
    def full(self) -> Tensor:
        """All batches of full size, of shape (steps, size)."""
        steps = len(self._order) // self._size
        return self._order[: steps * self._size].view(steps, self._size)

    @lazy
    def _parts(self) -> tuple[Tensor, ...]:
        return self._order.split(self._size)

    def __len__(self) -> int:
        return -(-len(self._order) // self._size)

    @overload
    def __getitem__(self, which: int) -> Tensor: ...
    @overload
    def __getitem__(self, which: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, which: int | slice) -> Tensor | tuple[Tensor, ...]:
        if isinstance(which, slice) and not range(len(self))[which]:
            return ()
        return self._parts[which]
