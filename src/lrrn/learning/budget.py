"""The time that training may take."""

from __future__ import annotations

import math
from time import monotonic
from typing import final

LEAST = 1e-9
"""Seconds left of a budget that is spent: enough for one step, so that training never ends with nothing done."""


@final
class Budget:
    """Counts down from its construction on; without ``max_seconds`` it never ends."""

    def __init__(self, max_seconds: float | None) -> None:
        self._end = math.inf if max_seconds is None else monotonic() + max_seconds

    @property
    def spent(self) -> bool:
        """Whether the time is over."""
        return monotonic() > self._end

    @property
    def left(self) -> float | None:
        """Remaining seconds, always positive; None if there is no end."""
        return None if self._end == math.inf else max(self._end - monotonic(), LEAST)
