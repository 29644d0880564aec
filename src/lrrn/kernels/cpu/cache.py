"""Where compiled kernels are kept: in the user's cache folder, a folder for every version of the kernels.

Numba keeps a function beside its source, and compiles it again when that file changes. Kernels are compiled into their callers,
in other files, whose machine code would then be out of date. Here all kernels count, by what their files contain, and the
version of the compiler. So another version of this package or of Numba has another folder, and the same versions in another
environment find their kernels compiled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, final

import llvmlite
import numba
from numba.core import caching, config
from numba.misc.appdirs import AppDirs

KERNELS = Path(__file__).resolve().parents[1]


@cache
def version_of(file: str) -> str:
    """Return a digest of the compiler, of all kernels and, for a kernel of somebody else, of the file that it is in."""
    files = {*KERNELS.rglob("*.py"), Path(file).resolve()}
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for each in sorted(files):
        content = each.read_bytes()
        digest.update(f"\n{each.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def folders(file: str) -> Iterator[Path]:
    """Yield folders in which kernels of a file may be kept, the best first."""
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR)
        return
    yield Path(AppDirs("lrrn", appauthor=False).user_cache_dir) / "kernels"
    yield Path(file).parent / "__pycache__"


@final
class _Locator(caching._CacheLocator):  # type: ignore[misc]
    """The first of these folders that can be written."""

    def __init__(self, function: Callable[..., Any], folder: Path, version: str) -> None:
        self._line, self._folder, self._version = function.__code__.co_firstlineno, folder / version, version

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._version

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator | None:
        try:
            version = version_of(file)
        except OSError:  # there are no sources to tell versions by: the package has bytecode only, or is in an archive
            return None
        for folder in folders(file):
            found = cls(function, folder, version)
            try:
                found.ensure_cache_path()
            except OSError:
                continue
            return found
        return None


@final
class _Impl(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


@final
class KernelCache(caching.Cache):  # type: ignore[misc]
    """Numba's cache of one function, in a folder of this package."""

    _impl_class = _Impl
