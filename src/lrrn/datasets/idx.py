"""The idx format of the MNIST family: arrays of bytes, gzip-compressed or not."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lrrn.datasets.rows import DataError, unreadable
from lrrn.datasets.rows.files import DEFLATED

MAX_BYTES = 2**31
"""Largest size in bytes of an array in an idx file, or of an array of labels."""


def read_idx(path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """Read an idx file of bytes, gzip-compressed or not; raise a DataError if it is missing, unreadable or damaged."""
    path = Path(path)
    check_there(path)
    packed = path.suffix == ".gz"
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] != 8 or not 1 <= head[3] <= 4:
                raise DataError(f"{path} is not an idx file of bytes: it begins with {head!r}")
            n_axes = head[3]
            sizes = file.read(4 * n_axes)
            if len(sizes) < 4 * n_axes:
                raise DataError(f"{path} is truncated: its header ends after {4 + len(sizes)} bytes; fetch it again")
            shape = struct.unpack(f">{n_axes}I", sizes)
            expected = math.prod(shape)
            # reading allocates all the memory requested, so the size in the header is checked first
            most = min(MAX_BYTES, DEFLATED * path.stat().st_size) if packed else MAX_BYTES
            room = math.prod(max(size, 1) for size in shape)  # NumPy also rejects empty shapes such as 0 x 10^19
            if expected > most or room > MAX_BYTES:
                raise DataError(f"{path} announces {room} bytes, more than {most}; it is damaged: fetch it again")
            there = expected if packed else path.stat().st_size - 4 - len(sizes)
            content = file.read(min(expected, there) + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}); fetch it again") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) != expected:
        more = "more" if len(content) > expected else f"only {len(content)}"
        raise DataError(f"{path} should hold {expected} bytes after its header and holds {more}; fetch it again")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def check_there(path: Path) -> None:
    """Raise a DataError unless the file exists."""
    try:
        there = os.path.isfile(path)
    except ValueError:  # not a valid file name
        there = False
    if not there:
        raise DataError(f"there is no file {path}")
