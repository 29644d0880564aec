"""Data sets: scikit-learn's digits, the MNIST family from idx files in torchvision's folder layout, and users' own tables."""

from __future__ import annotations

import csv
import gzip
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDERS = {"mnist": "MNIST", "kmnist": "KMNIST", "fashion_mnist": "FashionMNIST"}
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
NAMES = ("digits", *FOLDERS)
MAX_BYTES = 2**31
"""Largest array an idx file may announce."""


class DataError(ValueError):
    """A data file is missing, damaged or not what it should be."""


def load(name: str, split: str = "train", root: str | os.PathLike[str] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Load a data set.

    Parameters
    ----------
    name : {"digits", "mnist", "kmnist", "fashion_mnist"}
        "digits" is embedded in scikit-learn; its split is a fixed stratified quarter for testing. The others are read from idx
        files, compressed or not, as torchvision stores them: ``root/MNIST/raw/train-images-idx3-ubyte.gz``.
    split : {"train", "test"}, default="train"
    root : path-like, optional
        Folder with the data; the environment variable LRRN_DATA if not given.

    Returns
    -------
    X : float32 array of shape (n_samples, n_features)
        Grey values in [0, 1].
    y : int64 array of shape (n_samples,)
    """
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}; use one of {', '.join(NAMES)}")
    if split not in FILES:
        raise ValueError(f"unknown split {split!r}; use one of {', '.join(FILES)}")
    if name == "digits":
        return _digits(split)
    folder = _folder(name, root)
    images, labels = (read_idx(_existing(folder, file)) for file in FILES[split])
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(f"{folder}: images of shape {images.shape} do not go with labels of shape {labels.shape}")
    return (images.reshape(len(images), -1) / np.float32(255)).astype(np.float32, copy=False), labels.astype(np.int64)


def _digits(split: str) -> tuple[NDArray[Any], NDArray[Any]]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    X, y = load_digits(return_X_y=True)
    train_X, test_X, train_y, test_y = train_test_split(X / 16, y, test_size=0.25, stratify=y, random_state=0)
    chosen = (train_X, train_y) if split == "train" else (test_X, test_y)
    return chosen[0].astype(np.float32), chosen[1].astype(np.int64)


def _folder(name: str, root: str | os.PathLike[str] | None) -> Path:
    base = root if root is not None else os.environ.get("LRRN_DATA")
    if base is None:
        raise DataError(
            f"{name} is read from files: give root=..., or set LRRN_DATA to the folder that holds {FOLDERS[name]}/raw "
            "(torchvision's layout)"
        )
    folder = Path(base) / FOLDERS[name] / "raw"
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; put the idx files of {name} there, or point LRRN_DATA elsewhere")
    return folder


def _existing(folder: Path, file: str) -> Path:
    for candidate in (folder / file, folder / f"{file}.gz"):
        if candidate.is_file():
            return candidate
    raise DataError(f"there is neither {file} nor {file}.gz in {folder}; fetch it and put it there")


def read_idx(path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """Read an idx file of bytes, gzip-compressed or not.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    uint8 array
    """
    path = Path(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] != 8 or not 1 <= head[3] <= 4:
                raise DataError(f"{path} is not an idx file of bytes: it begins with {head!r}")
            n_axes = head[3]
            sizes = file.read(4 * n_axes)
            if len(sizes) < 4 * n_axes:
                raise DataError(f"{path} is truncated: its header ends after {4 + len(sizes)} bytes")
            shape = struct.unpack(f">{n_axes}I", sizes)
            expected = int(np.prod(shape, dtype=object))
            if expected > MAX_BYTES:
                raise DataError(f"{path} announces {expected} bytes, more than {MAX_BYTES}; it is damaged")
            content = file.read(expected + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}); fetch it again") from error
    if len(content) != expected:
        more = "more" if len(content) > expected else f"only {len(content)}"
        raise DataError(f"{path} should hold {expected} bytes after its header and holds {more}; fetch it again")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def read_table(path: str | os.PathLike[str], target: str | None = None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Read a table of features and, where there are any, targets.

    Parameters
    ----------
    path : path-like
        A ``.npz`` file with arrays "X" and, optionally, "y"; or a ``.csv`` file, with or without a line of column names.
    target : str, optional
        For ``.csv``: name or number of the column that holds the target, counted from 0; "none" if there is none. The last
        column if not given.

    Returns
    -------
    X : float64 or float32 array of shape (n_samples, n_features)
    y : array of shape (n_samples,) or, in ``.npz`` files, (n_samples, n_targets), or None
        Integers where all targets are, otherwise numbers, otherwise strings.
    """
    path = Path(path)
    readers = {".npz": _read_npz, ".csv": _read_csv}
    if path.suffix not in readers:
        raise DataError(f"{path}: tables are read from .npz or .csv files, not from {path.suffix or 'one without a suffix'!r}")
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    X, y = readers[path.suffix](path, target)
    if X.ndim != 2 or X.size == 0:
        raise DataError(f"{path}: features must form a table; got an array of shape {X.shape}")
    if not np.isfinite(X).all():
        row, column = np.argwhere(~np.isfinite(X))[0]
        raise DataError(f"{path}: feature {column} of sample {row} is {X[row, column]}; fill missing values in first")
    if y is not None and len(y) != len(X):
        raise DataError(f"{path}: {len(X)} samples do not go with {len(y)} targets")
    return X, y


def _read_npz(path: Path, target: str | None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            if "X" not in file:
                raise DataError(f"{path} should hold arrays X and y; it holds {', '.join(file.files) or 'none'}")
            X, y = file["X"], file["y"] if "y" in file and target != "none" else None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise DataError(f"{path} is damaged or no .npz file ({error})") from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} holds Python objects, which are not loaded; save plain arrays ({error})") from error
    if X.dtype.kind not in "biuf":
        raise DataError(f"{path}: X must be numeric; got {X.dtype}")
    return X if X.dtype == np.float32 else X.astype(np.float64), y


def _read_csv(path: Path, target: str | None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [(number, row) for number, row in enumerate(csv.reader(file), 1) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a .csv file ({error})") from error
    if not rows:
        raise DataError(f"{path} is empty")
    width = len(rows[0][1])
    for number, row in rows:
        if len(row) != width:
            raise DataError(f"{path}, line {number}: {len(row)} columns where line {rows[0][0]} has {width}")
    names = rows[0][1]
    column = _target_column(path, names, target)
    features = [j for j in range(width) if j != column]
    has_names = not all(_is_number(names[j]) for j in features)
    table = np.empty((len(rows) - has_names, len(features)))
    for i, (number, row) in enumerate(rows[has_names:]):
        for k, j in enumerate(features):
            if not _is_number(row[j]):
                name = names[j] if has_names else j
                raise DataError(f"{path}, line {number}: column {name!r} holds {row[j]!r}, which is no number; encode it first")
            table[i, k] = float(row[j])
    return table, None if column is None else _plainest([row[column] for _, row in rows[has_names:]])


def _target_column(path: Path, names: list[str], target: str | None) -> int | None:
    if target == "none":
        return None
    if target is None:
        return len(names) - 1
    if target in names and not _is_number(target):
        return names.index(target)
    if target.isdigit() and int(target) < len(names):
        return int(target)
    raise DataError(f"{path} has no column {target!r}; its first line is {', '.join(names)}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _plainest(values: list[str]) -> NDArray[Any]:
    """Return integers if all are, otherwise numbers if all are, otherwise strings."""
    for kind in (np.int64, np.float64):
        try:
            return np.array(values, dtype=kind)
        except (ValueError, OverflowError):
            continue
    return np.array(values)
