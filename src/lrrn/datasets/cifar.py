"""The binary version of CIFAR-10: files of records, each a label followed by the pixels of an image."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrrn.datasets.rows import DataError, unreadable

NAME, FOLDER = "cifar10", "cifar-10-batches-bin"
"""Name of the data set, and of the folder with its files."""
SHAPE = 3, 32, 32
"""Channels, height and width of the images."""
RECORD = 1 + 3 * 32 * 32
"""Bytes of a record: the label, then red, green and blue values row by row."""
FILES = {"train": tuple(f"data_batch_{k}.bin" for k in range(1, 6)), "test": ("test_batch.bin",)}
MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
"""Digests of the files in the published archive."""


def places(roots: Sequence[Path]) -> list[Path]:
    """Return the folders that the files may be in, below each of the folders to search."""
    return [place for root in roots for place in (root / FOLDER, root / "CIFAR10" / FOLDER)]


def find_files(folders: Sequence[Path], split: str) -> list[Path | None]:
    """Return the path of each file of a split, None where it is missing."""
    return [next((folder / file for folder in folders if (folder / file).is_file()), None) for file in FILES[split]]


def read_files(paths: Sequence[Path]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read images and labels from files in order; raise a DataError for a file that is not the published one.

    Returns
    -------
    X : float32 array of shape (n, 3072)
        Values in [0, 1]. Channels come first: an image is ``X[i].reshape(3, 32, 32)``.
    y : int64 array of shape (n,)
    """
    parts = [_records(path) for path in paths]
    X = np.empty((sum(map(len, parts)), RECORD - 1), np.float32)
    y, start = np.empty(len(X), np.int64), 0
    for part in parts:
        rows = slice(start, start + len(part))
        np.divide(part[:, 1:], np.float32(255), out=X[rows])
        y[rows], start = part[:, 0], rows.stop
    return X, y


def _records(path: Path) -> NDArray[np.uint8]:
    """Return the records of a file, an array of shape (n, 3073)."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    remedy = "replace it, or remove it to have it downloaded"
    if len(content) % RECORD:
        raise DataError(f"{path} is truncated: {len(content)} bytes are not a whole number of records of {RECORD}; {remedy}")
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != MD5[path.name]:
        raise DataError(f"{path} should have MD5 {MD5[path.name]} and has {found}: it is damaged or another file; {remedy}")
    return np.frombuffer(content, np.uint8).reshape(-1, RECORD)
