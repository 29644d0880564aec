"""Properties that are computed once.

Up to Python 3.11 those of functools hold a lock while they are computed, one for all objects of a class. A child that is forked
while another thread holds it would wait for ever, and threads that have nothing to do with each other wait for each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

T = TypeVar("T")


class lazy(functools.cached_property[T]):
    """What :class:`functools.cached_property` is from Python 3.12 on: two threads may compute one value, and none waits."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()
