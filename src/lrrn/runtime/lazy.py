"""Cached properties and functions without a lock.

Up to Python 3.11, ``functools.cached_property`` holds a lock during the computation, shared by all objects of a class. A
process that is forked while another thread holds the lock would deadlock, and unrelated threads would wait for each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class lazy(functools.cached_property[T]):
    """Backport of :class:`functools.cached_property` of Python 3.12: no lock, so two threads may compute the same value."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()


def once_per_owner(function: F) -> F:
    """Cache the results of a function by its positional arguments, for the lifetime of the first one, its owner.

    A result must not refer to its owner, which would then never be freed.
    """
    known: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()

    @functools.wraps(function)
    def remembered(owner: Any, *rest: Any) -> Any:
        results = known.setdefault(owner, {})
        if rest not in results:
            results[rest] = function(owner, *rest)
        return results[rest]

    return remembered  # type: ignore[return-value]
