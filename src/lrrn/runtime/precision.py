"""Matrix products in full float32 precision, independent of the TF32 settings of torch.

``torch.set_float32_matmul_precision("high")`` and ``torch.backends.cuda.matmul.fp32_precision = "tf32"`` allow float32
products in TF32, with a mantissa of ten bits. That is acceptable for gradients. A Hessian, a residual or a certificate computed
from such products would be wrong.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
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
"""Attributes of torch with the setting, one per type of device; before torch 2.9 there is one for all."""
_FULL = ("none", "ieee", "highest")


def _allowed() -> tuple[str, ...]:
    """Return the precisions that torch may use for float32 products."""
    if not _SWITCHES:
        return (torch.get_float32_matmul_precision(),)
    return tuple(switch.fp32_precision for switch in _SWITCHES)


def _is_full() -> bool:
    try:
        # much faster, but raises an error if the newer settings differ
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        return all(setting in _FULL for setting in _allowed())


def convolves_in_full_precision() -> bool:
    """Whether torch computes float32 convolutions on the CPU in full precision; before torch 2.9 it always does."""
    return getattr(getattr(torch.backends.mkldnn, "conv", None), "fp32_precision", "none") in _FULL


def _allow(settings: tuple[str, ...]) -> None:
    if not _SWITCHES:
        torch.set_float32_matmul_precision(settings[0])
    for switch, setting in zip(_SWITCHES, settings, strict=False):
        switch.fp32_precision = setting


class _Guard:
    """Counter of the threads inside: the setting is process-wide, so the first thread changes it and the last restores it."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: tuple[str, ...] = ()

    def enter(self) -> bool:
        """Enforce full precision; return whether :meth:`leave` must be called."""
        with self._lock:
            if self._inside == 0:
                if _is_full():
                    return False
                self._before = _allowed()
                _allow(("ieee",) * len(_SWITCHES) or ("highest",))
            self._inside += 1
            return True

    def leave(self) -> None:
        """Leave the guard."""
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _allow(self._before)

    def reset(self) -> None:
        """Forget threads inside, and the lock that one of them may hold: a forked child has none of them."""
        inside, self._lock, self._inside = self._inside, threading.Lock(), 0
        if inside:
            _allow(self._before)


_guard = _Guard()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_guard.reset)


def in_full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to compute its products in full precision: TF32 is off process-wide while any thread is inside."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        inside = _guard.enter()
        try:
            return function(*args, **kwargs)
        finally:
            if inside:
                _guard.leave()

    return guarded
