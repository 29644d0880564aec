"""Interval sets: the closed, convex, separable feasible sets C_k of the activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class Interval:
    """The closed interval ``[lo, hi]``; either end may be infinite.

    Parameters
    ----------
    lo, hi : float
        The ends, ``lo <= hi``. ``-inf`` and ``inf`` mean "no bound".
    """

    lo: float
    hi: float

    def __post_init__(self) -> None:
        lo, hi = float(self.lo), float(self.hi)
        if math.isnan(lo) or math.isnan(hi) or lo > hi or lo == math.inf or hi == -math.inf:
            raise ValueError(
                f"an interval needs two numbers lo <= hi with a finite point between them; got lo={self.lo}, hi={self.hi}"
            )
        object.__setattr__(self, "lo", lo)
        object.__setattr__(self, "hi", hi)

    @property
    def is_free(self) -> bool:
        """Whether the interval is the whole real line."""
        return self.lo == -math.inf and self.hi == math.inf

    def __str__(self) -> str:
        return next((name for name, known in NAMED.items() if known == self), f"[{self.lo:g}, {self.hi:g}]")


FREE = Interval(-math.inf, math.inf)
NONNEG = Interval(0.0, math.inf)
BOX = Interval(-1.0, 1.0)

NAMED: dict[str, Interval] = {"free": FREE, "nonneg": NONNEG, "box": BOX}

ConstraintSpec = str | Interval | tuple[float, float]


def interval(spec: ConstraintSpec) -> Interval:
    """Convert a constraint argument to an :class:`Interval`.

    Parameters
    ----------
    spec : {"free", "nonneg", "box"}, (lo, hi) or Interval
        A named set, a pair of bounds, or an interval, which is returned unchanged.

    Returns
    -------
    Interval
        The feasible set.
    """
    if isinstance(spec, Interval):
        return spec
    if isinstance(spec, str):
        if spec not in NAMED:
            raise ValueError(f"unknown constraint {spec!r}; use one of {', '.join(NAMED)}, or a pair (lo, hi)")
        return NAMED[spec]
    if not isinstance(spec, Sequence) or len(spec) != 2:
        raise ValueError(f"a constraint is one of {', '.join(NAMED)}, or a pair (lo, hi); got {spec!r}")
    return Interval(*spec)


def bounds(intervals: Sequence[Interval], sizes: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds of stacked layers, each of shape ``(1, sum(sizes))``, in the dtype of ``like``."""
    if not sizes:
        return like.new_zeros((1, 0)), like.new_zeros((1, 0))
    lo = [like.new_full((1, size), i.lo) for i, size in zip(intervals, sizes, strict=True)]
    hi = [like.new_full((1, size), i.hi) for i, size in zip(intervals, sizes, strict=True)]
    return torch.cat(lo, dim=1), torch.cat(hi, dim=1)
