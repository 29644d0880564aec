"""Threads: one policy for BLAS and for our own kernels.

Small matrix products with several BLAS threads can run tens of times slower than with one, because their threads spin
against the kernels' own. So long work (a fit, a command) holds ``blas_threads(1)`` while the solvers spread samples over
``workers()`` Python threads running kernels that release the interpreter lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_here = threading.local()


@dataclass
class _Held:
    """Limits that threads of this process hold at the moment; a forked child begins with none."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    torch_holders: int = 0
    torch_before: int = 0
    blas_holders: int = 0
    blas_limits: Any = None
    keeper: ThreadPoolExecutor | None = None


_held = _Held()


def workers() -> int:
    """Return how many threads the CPU kernels use: torch's own number, as it was before :func:`blas_threads` held it."""
    return getattr(_here, "workers", None) or torch.get_num_threads()


@contextmanager
def blas_threads(n: int = 1) -> Iterator[None]:
    """Hold torch's BLAS and OpenMP to ``n`` threads in the calling thread, and restore their number afterwards.

    Enter it around a whole fit or command, not around single calls. It may be nested, and several threads may be inside at
    once: torch keeps the number per thread.

    Parameters
    ----------
    n : int, default=1
        Number of threads.
    """
    held, outer = _held, getattr(_here, "workers", None)
    before = torch.get_num_threads()
    with held.lock:
        if held.torch_holders == 0:
            held.torch_before = before
        elif not getattr(_here, "known", False):
            # torch gives a new thread the number that any thread set last: here the limit another one holds, not its own
            before = held.torch_before
        held.torch_holders += 1
    _here.known = True
    _here.workers = outer or before
    torch.set_num_threads(n)
    try:
        yield
    finally:
        if held is _held:  # or else this is a child, forked meanwhile, which has begun anew
            torch.set_num_threads(before)
            _here.workers = outer
            with held.lock:
                held.torch_holders -= 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Hold torch's BLAS, and that of NumPy and SciPy that compiled kernels call, to one thread."""
    held = _held
    with held.lock:
        if held.blas_holders == 0:
            # one number for the whole process: the first to come sets it, the last to leave restores it, and both by the same
            # thread, since threadpoolctl lets only the one that set a limit lift it
            held.keeper = held.keeper or ThreadPoolExecutor(1, "lrrn-limits")
            held.blas_limits = held.keeper.submit(_limit_blas).result()
        held.blas_holders += 1
    try:
        with blas_threads(1):
            yield
    finally:
        if held is _held:
            with held.lock:
                held.blas_holders -= 1
                if held.blas_holders == 0 and held.keeper is not None:
                    held.keeper.submit(held.blas_limits.__exit__, None, None, None).result()


def holds_one_thread() -> bool:
    """Whether :func:`one_thread` is held in this process; never in a forked child, whose BLAS may wait for its threads."""
    return _held.blas_holders > 0


def _limit_blas() -> Any:
    # loaded first, or the limit would not reach it
    import scipy.linalg.cython_blas  # noqa: F401
    import threadpoolctl

    # since 3.8 the first thread to set a limit alone can set others: inside a caller's own limit ours would be lost
    release = getattr(getattr(threadpoolctl, "OpenBLASController", None), "clear_controlling_thread", None)
    if release is not None:
        release(force=True)
    return threadpoolctl.threadpool_limits(1, user_api="blas").__enter__()


def over_rows(work: Callable[[int, int], None], n_rows: int, min_rows: int) -> None:
    """Call ``work(start, stop)`` for consecutive parts of ``n_rows``, on as many threads as pay off.

    Parameters
    ----------
    work : callable
        Must release the interpreter lock to gain anything, and touch only the rows it is given.
    n_rows : int
        How many rows there are.
    min_rows : int
        The least number of rows worth a thread of their own.
    """
    parts = max(1, min(workers(), n_rows // min_rows))
    edges = [n_rows * i // parts for i in range(parts + 1)]
    side_by_side(lambda part: work(edges[part], edges[part + 1]), parts)


def side_by_side(work: Callable[[int], None], parts: int, at_once: int | None = None) -> None:
    """Call ``work(0)``, ..., ``work(parts - 1)``, at most ``workers()`` at a time, or ``at_once`` if that is less."""
    threads = min(workers(), parts, at_once or parts)
    if threads <= 1:
        for part in range(parts):
            work(part)
        return

    def share(first: int) -> None:
        for part in range(first, parts, threads):
            work(part)

    pool = _executor(threads)
    futures = [pool.submit(share, first) for first in range(1, threads)]
    share(0)
    for future in futures:
        future.result()


def _executor(size: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < size:
            _pool, _pool_size = ThreadPoolExecutor(max_workers=size, thread_name_prefix="lrrn"), size
        return _pool


def _forget_after_fork() -> None:
    """Drop the parent's pool and limits, and keep torch from waiting for its threads: none of them exist in a forked child."""
    global _pool, _pool_size, _lock, _held
    _pool, _pool_size, _lock, _held = None, 0, threading.Lock(), _Held()
    _here.workers = None
    # torch's OpenMP would wait for its threads for ever; with one thread it starts none, as in torch's own data loaders
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
