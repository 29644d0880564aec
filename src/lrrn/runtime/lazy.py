"""Cached properties without a lock.

Up to Python 3.11, ``functools.cached_property`` holds a lock during the computation, shared by all objects of a class. A
process that is forked while another thread holds the lock would deadlock, and unrelated threads would wait for each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

T = TypeVar("T")


class lazy(functools.cached_property[T]):
    """Backport of :class:`functools.cached_property` of Python 3.12: no lock, so two threads may compute the same value."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()
