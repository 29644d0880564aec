"""Users' own tables: .npz, .npy, .parquet and .csv files."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrrn.datasets.idx import MAX_BYTES, check_there
from lrrn.datasets.rows import ArrayRows, DataError, Rows, open_npy, open_npz, open_parquet, unreadable

TABLES = (".npz", ".npy", ".parquet", ".csv")
"""File name extensions that :func:`open_table` reads."""


def open_table(path: str | os.PathLike[str], target: str | None = None) -> Rows:
    """Open a table of features and optional targets, to be read in chunks of rows.

    Parameters
    ----------
    path : path-like
        A ``.npz`` file with arrays "X" and, optionally, "y"; a ``.npy`` file with features alone; a ``.parquet`` file (needs
        pyarrow); or a ``.csv`` file, with or without a header line, which is read into memory at once.
    target : str, optional
        For ``.csv`` and ``.parquet``: name of the column that holds the target, or, for ``.csv``, its number, counted from 0;
        the last column if not given. For ``.npy``: another ``.npy`` file with the targets. "none" if there is none.

    Returns
    -------
    Rows
    """
    path = Path(path)
    if path.suffix not in TABLES:
        kinds = f"{', '.join(TABLES[:-1])} or {TABLES[-1]}"
        raise DataError(f"{path}: tables are read from {kinds} files, not from {path.suffix or 'one without a suffix'!r}")
    check_there(path)
    return dict(zip(TABLES, (open_npz, open_npy, open_parquet, _open_csv), strict=True))[path.suffix](path, target)


def read_table(path: str | os.PathLike[str], target: str | None = None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Read a table of features and optional targets into memory.

    Parameters
    ----------
    path, target
        As for :func:`open_table`.

    Returns
    -------
    X : float64 or float32 array of shape (n_samples, n_features)
    y : array of shape (n_samples,) or, in ``.npz`` files, (n_samples, n_targets), or None
        Integers if all targets are integers, otherwise floats if all are numbers, otherwise strings.

    Raises
    ------
    DataError
        The file is missing, cannot be read, is damaged, or does not contain such a table. No code in the file is ever executed,
        and no more memory is allocated than its contents need.
    """
    return open_table(path, target).everything()


def _open_csv(path: Path, target: str | None) -> Rows:
    return ArrayRows(*_read_csv(path, target), str(path))


def _read_csv(path: Path, target: str | None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [(number, row) for number, row in enumerate(csv.reader(file), 1) if row]
    except OSError as error:
        raise unreadable(path, error) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a .csv file ({error}); save it as text in UTF-8") from error
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
    return table, None if column is None else _plainest(path, [row[column] for _, row in rows[has_names:]])


def _target_column(path: Path, names: list[str], target: str | None) -> int | None:
    if target == "none":
        return None
    if target is None:
        return len(names) - 1
    if target in names and not _is_number(target):
        return names.index(target)
    if target.isdecimal() and len(target) < 10 and int(target) < len(names):
        return int(target)
    raise DataError(f"{path} has no column {target!r}; its first line is {', '.join(names)}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _plainest(path: Path, values: list[str]) -> NDArray[Any]:
    """Return integers if all values are integers, otherwise floats if all are numbers, otherwise strings."""
    for kind in (np.int64, np.float64):
        try:
            return np.array(values, dtype=kind)
        except (ValueError, OverflowError):
            continue
    longest = max(map(len, values))
    if 4 * longest * len(values) > MAX_BYTES:  # every entry of an array takes the space of the longest string
        raise DataError(f"{path}: a target of {longest} characters is no label; name the column that holds targets")
    return np.array(values)
