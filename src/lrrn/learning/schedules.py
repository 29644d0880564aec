"""Learning-rate schedules as functions of the progress of training; stateless, so that a resumed run is identical."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[float], float]
"""From the completed share of training, in [0, 1], to a factor on the learning rate."""


def constant(progress: float) -> float:
    """Return one."""
    return 1.0


def cosine(progress: float) -> float:
    """Decrease from one to zero along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def one_cycle(progress: float, rise: float = 0.3, start: float = 0.04, end: float = 4e-6) -> float:
    """Increase from ``start`` to one, then decrease to ``end``, both along half a cosine (Smith's one-cycle policy)."""
    if progress < rise:
        return start + (1 - start) * 0.5 * (1 - math.cos(math.pi * progress / rise))
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * (progress - rise) / (1 - rise)))


SCHEDULES: dict[str | None, Schedule] = {None: constant, "cosine": cosine, "one_cycle": one_cycle}


def schedule(name: str | None) -> Schedule:
    """Return a schedule by name."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; use one of {', '.join(map(repr, SCHEDULES))}")
    return SCHEDULES[name]
