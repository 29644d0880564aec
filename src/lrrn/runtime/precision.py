"""Products in full precision, whatever torch is allowed to do elsewhere.

``torch.set_float32_matmul_precision("high")`` and ``torch.backends.cuda.matmul.fp32_precision = "tf32"`` let products of
float32 be computed in TF32, with ten bits. That is a fair choice for gradients. A Hessian, a residual or a certificate made of
such products would say something that is not so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_SWITCHES: tuple[Any, ...] = tuple(
    switch
    for switch in (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    if hasattr(switch, "fp32_precision")
)
"""Where torch keeps the setting, one for each kind of device; before 2.9 there is one for all."""
_FULL = ("none", "ieee", "highest")


def _allowed() -> tuple[str, ...]:
    """Return what torch may use for products of float32."""
    if not _SWITCHES:
        return (torch.get_float32_matmul_precision(),)
    return tuple(switch.fp32_precision for switch in _SWITCHES)


def _is_full() -> bool:
    try:
        # far faster, and an error where the newer switches say something else
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        return all(setting in _FULL for setting in _allowed())


def _allow(settings: tuple[str, ...]) -> None:
    if not _SWITCHES:
        torch.set_float32_matmul_precision(settings[0])
    for switch, setting in zip(_SWITCHES, settings, strict=False):
        switch.fp32_precision = setting


class _Guard:
    """torch has one setting for all threads: the first to come in changes it, the last to leave restores it."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: tuple[str, ...] = ()

    def enter(self) -> bool:
        """Hold products to full precision; return whether that is to be undone by :meth:`leave`."""
        with self._lock:
            if self._inside == 0:
                if _is_full():
                    return False
                self._before = _allowed()
                _allow(("ieee",) * len(_SWITCHES) or ("highest",))
            self._inside += 1
            return True

    def leave(self) -> None:
        """Be done with it."""
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _allow(self._before)


_guard = _Guard()


@contextmanager
def full_precision() -> Iterator[None]:
    """Hold products of float32 to full precision, for all threads, as long as one is in here."""
    inside = _guard.enter()
    try:
        yield
    finally:
        if inside:
            _guard.leave()


def in_full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function compute its products in full precision."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        inside = _guard.enter()
        try:
            return function(*args, **kwargs)
        finally:
            if inside:
                _guard.leave()

    return guarded
