"""Where compiled kernels are kept: in the user's cache folder, a folder for every version of the kernels.

Numba keeps a function beside its source, and compiles it again when that file changes. Kernels are compiled into their callers,
in other files, whose machine code would then be out of date. Here all kernels count, by what their files contain, and the
version of the compiler. So another version of this package or of Numba has another folder, and the same versions in another
environment find their kernels compiled.

Numba numbers the files of machine code, and writes the index before them: after an error, or between two processes, an entry of
the index could name the machine code of another signature. Here a file is named by what it is for, and is written first.
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
    """Return a digest of the compiler, of all kernels and, for a kernel of somebody else, of its file and where that is.

    The same text elsewhere may import something else.
    """
    path, files = Path(file).resolve(), {*KERNELS.rglob("*.py")}
    other = "" if path in files else str(path)
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {other}".encode())
    for each in sorted({*files, path}):
        content = each.read_bytes()
        digest.update(f"\n{each.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def folders(file: str) -> Iterator[Path]:
    """Yield folders in which kernels of a file may be kept, the best first."""
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR)
        return
    users = Path(AppDirs("lrrn", appauthor=False).user_cache_dir) / "kernels"
    if users.is_absolute():  # not without a home: machine code in the current folder may be anybody's
        yield users
    yield Path(file).parent / "__pycache__"


@final
class _Locator(caching._CacheLocator):  # type: ignore[misc]
    """The first of these folders that can be written, or else the first that holds kernels of this version."""

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
        places = [cls(function, folder, version) for folder in folders(file)]
        return next(filter(_can_write, places), None) or next((one for one in places if one._folder.is_dir()), None)


def _can_write(place: _Locator) -> bool:
    try:
        place.ensure_cache_path()
    except OSError:
        return False
    return True


@final
class _Files(caching.IndexDataCacheFile):  # type: ignore[misc]
    """The index of one function and its files of machine code, each named by the signature and the processor that it is for."""

    def save(self, key: Any, data: Any) -> None:
        """Write the machine code, then the index. If two processes write the index, one entry may be lost, not mixed up."""
        name = self._data_name(int(hashlib.sha256(self._dump(key)).hexdigest()[:12], 16))
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


@final
class _Impl(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


@final
class KernelCache(caching.Cache):  # type: ignore[misc]
    """Numba's cache of one function, in a folder of this package."""

    _impl_class = _Impl

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())
