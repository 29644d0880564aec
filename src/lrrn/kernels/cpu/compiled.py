"""Compiled kernels: the one way to declare them, and what becomes of them where nothing can be kept on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from numba import njit

logger = logging.getLogger("lrrn.kernels")

_told: set[str] = set()


def summing(function: Callable[..., Any]) -> Any:
    """Do as :func:`kernel` does, and let sums be taken in any order: in vectors, they take a fraction of the time."""
    return kernel(function, fastmath={"reassoc", "nsz", "contract"})


def kernel(function: Callable[..., Any], **more: Any) -> Any:
    """Compile a function on its first call, without the interpreter lock, and keep the result for later processes.

    Where it cannot be kept (no folder that can be written, a full disk) or what was kept is damaged, the kernel is compiled
    anew, a warning is logged once, and all else goes on.
    """
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False, **more}
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError as error:  # Numba found no folder for its cache
        _tell(str(error))
        return njit(**options)(function)
    compiled._cache = _Forgiving(compiled._cache)
    return compiled


class _Forgiving:
    """Numba's cache of one function, whose failures are not those of the function."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def load_overload(self, signature: Any, context: Any) -> Any:
        try:
            return self._cache.load_overload(signature, context)
        except Exception as error:  # whatever a damaged file makes of reading it, compiling is the answer
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
            "compiled kernels cannot be kept or read (%s), so this process compiles them anew, which takes seconds. "
            "Make that folder writable and its disk not full, or set NUMBA_CACHE_DIR to a folder that is",
            reason,
        )
    _told.add(reason)
