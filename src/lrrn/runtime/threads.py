"""Threads: limits on BLAS threads, and the thread pool of the CPU kernels.

Small matrix products with several BLAS threads can be tens of times slower than with one, because spinning BLAS threads compete
with the threads of the kernels. Long computations (a fit, a command) therefore run inside ``blas_threads(1)``, while the
solvers distribute samples over ``workers()`` Python threads, whose kernels release the global interpreter lock.
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
    """Thread limits currently in force in this process; a forked child starts without any."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    torch_holders: int = 0
    torch_before: int = 0
    blas_holders: int = 0
    blas_limits: Any = None
    keeper: ThreadPoolExecutor | None = None


_held = _Held()


def workers() -> int:
    """Return the number of threads of the CPU kernels: that of torch, as it was before :func:`blas_threads`."""
    return getattr(_here, "workers", None) or torch.get_num_threads()


@contextmanager
def blas_threads(n: int = 1) -> Iterator[None]:
    """Limit torch's BLAS and OpenMP to ``n`` threads in the calling thread, and restore the number afterwards.

    Use it around a whole fit or command, not around single calls. It may be nested, and several threads may be inside at
    once: torch stores the number per thread.

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
            # torch gives a new thread the number set last by any thread, which here is the limit of another one
            before = held.torch_before
        held.torch_holders += 1
    _here.known = True
    _here.workers = outer or before
    torch.set_num_threads(n)
    try:
        yield
    finally:
        if held is _held:  # skip in a forked child, which resets its own state
            torch.set_num_threads(before)
            _here.workers = outer
            with held.lock:
                held.torch_holders -= 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch's BLAS, and the BLAS of NumPy and SciPy that compiled kernels call, to one thread."""
    held = _held
    with held.lock:
        if held.blas_holders == 0:
            # one process-wide limit: set when the first thread enters, removed when the last one leaves. The same thread does
            # both, since threadpoolctl requires that the thread that set a limit removes it
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
    """Whether :func:`one_thread` is active in this process; never in a forked child, whose BLAS may wait for lost threads."""
    return _held.blas_holders > 0


def _limit_blas() -> Any:
    # load the library first: a limit applies only to loaded libraries
    import scipy.linalg.cython_blas  # noqa: F401
    import threadpoolctl

    # since 3.8 only the first thread that set a limit can set others: inside a caller's limit, this one would have no effect
    release = getattr(getattr(threadpoolctl, "OpenBLASController", None), "clear_controlling_thread", None)
    if release is not None:
        release(force=True)
    return threadpoolctl.threadpool_limits(1, user_api="blas").__enter__()


def over_rows(work: Callable[[int, int], None], n_rows: int, min_rows: int) -> None:
    """Call ``work(start, stop)`` for consecutive parts of ``n_rows``, on as many threads as save time.

    ``work`` must access only the given rows, and release the global interpreter lock for any speed-up. A thread gets at
    least ``min_rows``.
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
    """Reset thread pool and limits after a process fork, and limit torch to one thread: a child has none of the threads."""
    global _pool, _pool_size, _lock, _held
    _pool, _pool_size, _lock, _held = None, 0, threading.Lock(), _Held()
    _here.workers = None
    # torch's OpenMP would wait for lost threads for ever; with one thread it needs none, as in torch's data loaders
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
