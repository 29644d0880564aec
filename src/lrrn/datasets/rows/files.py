"""Tables in NumPy files: ``.npy`` files are memory-mapped chunk by chunk, ``.npz`` files are read sequentially."""

from __future__ import annotations

import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tokenize import TokenError
from typing import IO, NamedTuple, final

import numpy as np
from numpy.lib import format as npy

from lrrn.datasets.rows.base import Array, ArrayRows, DataError, Piece, Rows, as_features, check_shapes, unreadable

SKIP_BYTES = 2**22
MAX_BYTES, MAX_RATIO = 2**31, 100
"""Arrays above ``MAX_BYTES`` may be compressed at most ``MAX_RATIO`` times. This rejects decompression bombs."""
DEFLATED = 1032
"""Largest compression ratio of deflate."""
BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that zipfile raises on archives that are damaged, encrypted or compressed by an unknown method."""


class _Header(NamedTuple):
    """Shape and dtype of an array in a file, and the offset of its data."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[np.generic]
    offset: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _read_header(file: IO[bytes], name: str) -> _Header:
    try:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, fortran_order, dtype = read(file)
    except KeyError:
        raise DataError(f"{name} is in a version of the .npy format that is not read here; save it as plain arrays") from None
    except (ValueError, TypeError, EOFError, SyntaxError, RecursionError, OverflowError, TokenError) as error:
        raise DataError(f"{name} is damaged or no {Path(name).suffix} file ({error})") from error
    if dtype.hasobject:
        raise DataError(f"{name} holds Python objects, which are not loaded; save plain arrays")
    return _Header(shape, fortran_order, dtype, file.tell())


def _check(name: str, X: _Header, y: _Header | None) -> None:
    if X.dtype.kind not in "biuf":
        raise DataError(f"{name}: X must be numeric; got {X.dtype}")
    if y is not None and y.dtype.kind not in "biufUS":
        raise DataError(f"{name}: targets must be numbers or text; got {y.dtype}")
    check_shapes(name, X.shape, None if y is None else y.shape)


def open_npy(path: Path, target: str | None) -> Rows:
    """Open a table in a ``.npy`` file; ``target`` names another one with the targets, or is None or "none"."""
    X = _npy_header(path)
    y_path = None if target in (None, "none") else Path(str(target))
    if y_path is not None and (y_path.suffix.lower() != ".npy" or not y_path.is_file()):
        raise DataError(f"{path}: the target of a .npy file is another .npy file with as many rows; there is no {target}")
    y = None if y_path is None else _npy_header(y_path)
    _check(str(path), X, y)
    if X.fortran_order or (y is not None and y.fortran_order):
        targets = None if y_path is None else np.load(y_path, mmap_mode="r", allow_pickle=False)
        return ArrayRows(np.load(path, mmap_mode="r", allow_pickle=False), targets, str(path))
    return MappedRows(path, X, y_path, y)


def _npy_header(path: Path) -> _Header:
    try:
        with path.open("rb") as file:
            header = _read_header(file, str(path))
        found = path.stat().st_size - header.offset
    except OSError as error:
        raise unreadable(path, error) from error
    if found < header.n_bytes:
        raise DataError(f"{path} is damaged: it should hold {header.n_bytes} bytes after its header and holds {found}")
    return header


@final
class MappedRows(Rows):
    """A ``.npy`` file of which only the current chunk is memory-mapped."""

    def __init__(self, path: Path, X: _Header, y_path: Path | None, y: _Header | None) -> None:
        self._path, self._X, self._y_path, self._y = path, X, y_path, y
        self.name, self.has_targets = str(path), y is not None
        self.n_samples, self.n_features = X.shape

    def pieces(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        """Map one chunk after the other."""
        for at in range(start, stop, size):
            n = min(size, stop - at)
            y = None if self._y is None or self._y_path is None else _window(self._y_path, self._y, at, n)
            yield as_features(_window(self._path, self._X, at, n)), y


def _window(path: Path, header: _Header, start: int, n: int) -> Array:
    """Return a copy of some rows; only these rows are mapped, so the file may be larger than the address space."""
    offset = header.offset + start * header.row_bytes
    try:
        return np.array(np.memmap(path, header.dtype, "r", offset, (n, *header.shape[1:])))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:  # the file has become shorter
        raise DataError(f"{path} has changed while it was read ({error}); see that it is whole, and start again") from error


def open_npz(path: Path, target: str | None) -> Rows:
    """Open a table in a ``.npz`` file with arrays X and, optionally, y; ``target="none"`` ignores y."""
    with _Archive(path) as archive:
        names = archive.names()
        if {"format", "shape", "data"} <= {*names}:
            raise DataError(f"{path} holds a sparse matrix; save its .toarray() as X")
        if "X" not in names:
            raise DataError(f"{path} should hold arrays X and y; it holds {', '.join(names) or 'none'}")
        X = archive.array("X").header
        y = archive.array("y").header if "y" in names and target != "none" else None
        _check(str(path), X, y)
        if X.fortran_order or (y is not None and y.fortran_order):
            # rows are not contiguous in the file
            return ArrayRows(archive.array("X").whole(), None if y is None else archive.array("y").whole(), str(path))
    return ArchivedRows(path, X, y is not None)


@final
class ArchivedRows(Rows):
    """A ``.npz`` file, compressed or not, read from its beginning up to the requested rows."""

    def __init__(self, path: Path, X: _Header, has_targets: bool) -> None:
        self._path, self.name, self.has_targets = path, str(path), has_targets
        self.n_samples, self.n_features = X.shape

    def pieces(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        """Read chunks of X and y alternately."""
        with _Archive(self._path) as archive:
            X, y = archive.array("X"), archive.array("y") if self.has_targets else None
            for array in (X, y):
                if array is not None:
                    array.skip(start)
            for at in range(start, stop, size):
                n = min(size, stop - at)
                yield as_features(X.take(n)), None if y is None else y.take(n)


@final
class _Archive:
    """An open ``.npz`` file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._opened = ExitStack()
            self._zip = self._opened.enter_context(zipfile.ZipFile(path))
        except OSError as error:
            raise unreadable(path, error) from error
        except BROKEN as error:
            raise DataError(f"{path} is damaged or no .npz file ({error})") from error

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def names(self) -> list[str]:
        """Return the names of the arrays."""
        return [name.removesuffix(".npy") for name in self._zip.namelist() if name.endswith(".npy")]

    def array(self, name: str) -> _Stream:
        """Open an array for sequential reading."""
        return _Stream(self._zip, f"{name}.npy", self._path, self._opened)


def _plausible(info: zipfile.ZipInfo, size: int) -> bool:
    """Whether an archive of this size can contain what its header states; checked before memory is allocated."""
    packed, ratio = info.compress_size, 1 if info.compress_type == zipfile.ZIP_STORED else DEFLATED
    return packed <= size and info.file_size <= min(ratio * packed, max(MAX_BYTES, MAX_RATIO * packed))


@final
class _Stream:
    """An array of an archive, read row by row."""

    def __init__(self, archive: zipfile.ZipFile, member: str, path: Path, opened: ExitStack) -> None:
        self._path = path
        try:
            info = archive.getinfo(member)
            if not _plausible(info, path.stat().st_size):
                raise self._damaged(f"{member} announces {info.file_size} bytes, packed into {info.compress_size}")
            self._file = opened.enter_context(archive.open(info))  # an open member keeps the archive's file open
            self.header = _read_header(self._file, str(path))
            promised = info.file_size - self.header.offset
        except DataError:
            raise
        except OSError as error:
            raise unreadable(path, error) from error
        except BROKEN as error:
            raise self._damaged(error) from error
        if promised != self.header.n_bytes:
            raise self._damaged(f"{member} should hold {self.header.n_bytes} bytes and holds {promised}")

    def skip(self, n: int) -> None:
        """Skip rows."""
        left = n * self.header.row_bytes
        while left > 0:
            left -= len(self._read(min(left, SKIP_BYTES)))

    def take(self, n: int) -> Array:
        """Return the next rows."""
        content = self._read(n * self.header.row_bytes)
        return np.frombuffer(content, self.header.dtype).reshape(n, *self.header.shape[1:])

    def whole(self) -> Array:
        """Return the whole array, in C or Fortran order."""
        values = np.frombuffer(self._read(self.header.n_bytes), self.header.dtype)
        return values.reshape(self.header.shape, order="F" if self.header.fortran_order else "C")

    def _read(self, n: int) -> bytes:
        try:
            content = self._file.read(n)
        except OSError as error:
            raise unreadable(self._path, error) from error
        except BROKEN as error:
            raise self._damaged(error) from error
        if len(content) < n:
            raise self._damaged("it ends too early")
        return content

    def _damaged(self, reason: object) -> DataError:
        return DataError(f"{self._path} is damaged or no .npz file ({reason})")
