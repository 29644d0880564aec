"""Products in full precision, whatever torch is allowed to do elsewhere.

``torch.set_float32_matmul_precision("high")`` lets products of float32 be computed in TF32, with ten bits. That is a fair
choice for gradients. A Hessian, a residual or a certificate made of such products would say something that is not so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
HIGHEST = "highest"


class _State:
    """torch has one setting for all threads: the first to come in changes it, the last to leave restores it."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, HIGHEST


_state = _State()


@contextmanager
def full_precision() -> Iterator[None]:
    """Hold products of float32 to full precision, for all threads, as long as one is in here."""
    with _state.lock:
        if _state.inside == 0:
            _state.before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(HIGHEST)
        _state.inside += 1
    try:
        yield
    finally:
        with _state.lock:
            _state.inside -= 1
            if _state.inside == 0:
                torch.set_float32_matmul_precision(_state.before)


def in_full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function compute its products in full precision; next to free where nobody has asked for less."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        if _state.inside == 0 and torch.get_float32_matmul_precision() == HIGHEST:
            return function(*args, **kwargs)
        with full_precision():
            return function(*args, **kwargs)

    return guarded
