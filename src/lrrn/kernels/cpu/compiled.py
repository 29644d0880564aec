"""Decorators for Numba kernels, with a disk cache whose failures are tolerated."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import config
from numba.core.compiler_lock import global_compiler_lock

from lrrn.kernels.cpu.cache import KernelCache
from lrrn.kernels.cpu.parts import compile_kernel, link_into_callers

logger = logging.getLogger("lrrn.kernels")

LEVEL = 1
"""LLVM's level of optimisation. Loops are vectorised at any level, and the inner ones are written with vectors."""

_told: set[str] = set()


def summing(function: Callable[..., Any]) -> Any:
    """Compile like :func:`kernel`, but allow sums to be reordered, so that they can be vectorised."""
    return kernel(function, fastmath={"reassoc", "nsz", "contract"})


def kernel(function: Callable[..., Any], **more: Any) -> Any:
    """Compile a function on its first call, release the global interpreter lock in it, and cache the result on disk.

    If the cache cannot be written (no writable folder, a full disk) or is damaged, the kernel is compiled again and a warning
    is logged once.
    """
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False, **more}
    compiled = compile_kernel(function, no_cfunc_wrapper=True, **options)
    try:
        compiled._cache = _Forgiving(KernelCache(function))
    except RuntimeError as error:  # there is no folder that can be written
        _tell(str(error))
    link_into_callers(compiled, function, options)
    compiled.compile = _quickly()(compiled.compile)
    return compiled


@contextmanager
def _quickly() -> Iterator[None]:
    """Compile with fewer of LLVM's optimisations, which these kernels do not gain from, and without garbage collection.

    Searching all objects of torch and Numba takes a sixth of the time of a compilation.
    """
    with global_compiler_lock:
        paused, level = gc.isenabled(), config.OPT
        gc.disable()
        config.OPT = min(level, type(level)(LEVEL))
        try:
            yield
        finally:
            config.OPT = level
            if paused:
                if gc.get_freeze_count() == 0:
                    # the compiler's objects count as old, or the next collection would search all of them
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()


class _Forgiving:
    """The cache of one function; errors of the cache do not propagate to callers."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def load_overload(self, signature: Any, context: Any) -> Any:
        try:
            return self._cache.load_overload(signature, context)
        except Exception as error:  # a damaged file may raise any error: compile again
            _tell(f"{self._cache.cache_path}: {type(error).__name__}: {error}")
            try:
                self._cache.flush()
            except OSError:
                logger.debug("the damaged cache %s could not be emptied", self._cache.cache_path)
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        try:
            self._cache.save_overload(signature, compiled)
        except OSError as error:
            _tell(f"{self._cache.cache_path}: {error}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _tell(reason: str) -> None:
    if not _told:
        logger.warning(
            "compiled kernels cannot be kept or read (%s), so this process compiles them, which takes seconds. "
            "Make that folder writable and its disk not full, or set NUMBA_CACHE_DIR to a folder that is",
            reason,
        )
    _told.add(reason)
