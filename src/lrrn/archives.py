"""Arrays in .npz files, read without pickle and without believing what their headers announce."""

from __future__ import annotations

import lzma
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_BYTES, MAX_RATIO = 2**31, 100
"""An array of more bytes than this must not be packed tighter than that: no data are, and a small file could fill memory."""
CHUNK = 2**20
"""Bytes unpacked at a time."""
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_DAMAGE = (
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,  # an encrypted archive, an unknown compression, deep nesting
    SyntaxError,
    TypeError,
    ValueError,
    lzma.LZMAError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What zipfile and NumPy raise on damaged input."""


class ArchiveError(ValueError):
    """A .npz file is damaged, or holds what is not read."""


def read_npz(path: str | os.PathLike[str], wanted: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Read some arrays of a .npz file.

    Parameters
    ----------
    path : path-like
    wanted : dict of str to str
        Names of arrays, and the kinds they may be of, as in ``numpy.dtype.kind``.

    Returns
    -------
    dict of str to array
        Those of the arrays that are there.

    Raises
    ------
    ArchiveError
        The file is damaged, announces more than it holds, or holds other kinds or Python objects.
    OSError
        It cannot be read.
    """
    size = os.stat(path).st_size
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            chosen = {name: kinds for name, kinds in wanted.items() if name in members}
            return {name: _read(archive, members[name], name, kinds, size) for name, kinds in chosen.items()}
    except ArchiveError:
        raise
    except _DAMAGE as error:
        raise ArchiveError(f"this is damaged or no .npz file ({type(error).__name__}: {error})") from error


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, kinds: str, file_size: int) -> NDArray[Any]:
    announced, packed = info.file_size, info.compress_size
    if packed > file_size or (announced > MAX_BYTES and announced > MAX_RATIO * packed):
        raise ArchiveError(f"array {name} announces {announced} bytes, packed into {packed}: the file is damaged")
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ArchiveError(f"array {name} has format version {version}, which is not read")
        shape, by_columns, dtype = _HEADERS[version](file)
        if dtype.hasobject:
            raise ArchiveError(f"array {name} holds Python objects, which are not loaded")
        if dtype.kind not in kinds:
            raise ArchiveError(f"array {name} is of type {dtype}, which is not read")
        expected, there = math.prod(shape) * dtype.itemsize, announced - file.tell()
        if any(length < 0 for length in shape) or expected != there:
            raise ArchiveError(f"array {name} announces {expected} bytes and holds {there}: the file is damaged")
        return _filled(file, np.empty(shape, dtype, order="F" if by_columns else "C"))


def _filled(file: Any, array: NDArray[Any]) -> NDArray[Any]:
    """Fill an array from a stream part by part, and read on to the end, where zipfile compares checksums."""
    flat = array.ravel(order="A").view(np.uint8)  # a view: the array is contiguous, by rows or by columns
    at = 0
    while at < len(flat):
        part = np.frombuffer(file.read(min(len(flat) - at, CHUNK)), np.uint8)
        if not len(part):
            raise ArchiveError("the file is truncated")
        flat[at : at + len(part)] = part
        at += len(part)
    file.read(1)
    return array
