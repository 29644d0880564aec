"""Signals that stop long work: Ctrl-C, and the request to terminate that batch systems send."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived inside :func:`termination_interrupts`."""


@contextmanager
def first_interrupt(call: Callable[[], None]) -> Iterator[None]:
    """Call a function on the first Ctrl-C; the second stops immediately. For the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: Any) -> None:
        call()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """Raise :class:`Terminated` on SIGTERM, as Ctrl-C raises KeyboardInterrupt, so that finished work can be saved.

    For the main thread only. A handler that is set already is kept.
    """
    usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
