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

import torch

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_here = threading.local()


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
    before, outer = torch.get_num_threads(), getattr(_here, "workers", None)
    _here.workers = workers()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _here.workers = outer


@contextmanager
def one_thread() -> Iterator[None]:
    """Hold torch's BLAS, and that of NumPy and SciPy that compiled kernels call, to one thread."""
    # loaded first, or the limit would not reach it
    import scipy.linalg.cython_blas  # noqa: F401
    from threadpoolctl import threadpool_limits

    with blas_threads(1), threadpool_limits(1, user_api="blas"):
        yield


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


def side_by_side(work: Callable[[int], None], parts: int) -> None:
    """Call ``work(0)``, ..., ``work(parts - 1)``, at most ``workers()`` at a time."""
    threads = min(workers(), parts)
    if threads == 1:
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
    """Drop the parent's pool, whose threads do not exist in a forked child."""
    global _pool, _pool_size, _lock
    _pool, _pool_size, _lock = None, 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
