"""Users' own tables: .npz, .npy, .parquet, .csv and .tsv files."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lrrn.datasets.idx import MAX_BYTES, check_there
from lrrn.datasets.rows import ArrayRows, DataError, Rows, open_npy, open_npz, open_parquet, unreadable
from lrrn.datasets.rows.base import Piece
from lrrn.datasets.rows.columns import Choice, check_distinct_names

TABLES = (".npz", ".npy", ".parquet", ".csv", ".tsv")
"""File name extensions that :func:`open_table` reads, in upper or lower case."""
DELIMITERS = (",", ";", "\t")
"""Delimiters that are detected; the first one is the default."""
MISSING = ("", "?", "na", "n/a", "nan", "null", "none")
"""Texts, in lower case, that stand for a missing value."""

Lines = list[tuple[int, list[str]]]
"""Lines of a text file: number and cells."""


def open_table(
    path: str | os.PathLike[str],
    target: str | None = None,
    *,
    features: Sequence[str] | int | None = None,
    drop: Sequence[str] = (),
    delimiter: str | None = None,
) -> Rows:
    """Open a table of features and optional targets, to be read in chunks of rows.

    Parameters
    ----------
    path : path-like
        A ``.npz`` file with arrays "X" and, optionally, "y"; a ``.npy`` file with features alone; a ``.parquet`` file (needs
        pyarrow); or a ``.csv`` or ``.tsv`` file, with or without a header line, which is read into memory at once.
    target : str, optional
        For ``.csv``, ``.tsv`` and ``.parquet``: name of the column that holds the target, or its number, counted from 0; the
        last column if not given. For ``.npy``: another ``.npy`` file with the targets. "none" if there is none.
    features : sequence of str, or int, optional
        What a model was trained on. Named columns are read in this order. If no target is named, it is then the one other
        column, or, where the table or the model has no names, the last column unless the number of columns is that of the
        features.
    drop : sequence of str, optional
        Columns to leave out, by name or number.
    delimiter : str, optional
        Character between the cells of a ``.csv`` or ``.tsv`` file. By default a tab in ``.tsv`` files, otherwise whichever of
        comma, semicolon and tab occurs most often in the first line.

    Returns
    -------
    Rows
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in TABLES:
        kinds = f"{', '.join(TABLES[:-1])} or {TABLES[-1]}"
        raise DataError(f"{path}: tables are read from {kinds} files, not from {path.suffix or 'one without a suffix'!r}")
    check_there(path)
    check_delimiter(delimiter)
    if kind in (".csv", ".tsv"):
        return _open_csv(path, Choice(target, features, drop), delimiter or ("\t" if kind == ".tsv" else None))
    if delimiter is not None:
        raise DataError(f"{path}: only .csv and .tsv files have a delimiter; leave it out")
    if kind == ".parquet":
        return open_parquet(path, Choice(target, features, drop))
    if drop:
        raise DataError(f"{path}: the columns of {kind} files have no names to drop them by; remove {drop[0]!r} beforehand")
    return (open_npz if kind == ".npz" else open_npy)(path, target)


def check_delimiter(delimiter: str | None) -> None:
    """Raise an error for what cannot stand between cells."""
    if delimiter is not None and (len(delimiter) != 1 or delimiter.isalnum() or delimiter in '"\r\n.+-_\0'):
        raise DataError(f"a delimiter is one character that no number contains, such as ',' or ';'; got {delimiter!r}")


def read_table(
    path: str | os.PathLike[str], target: str | None = None, **options: Any
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Read a table of features and optional targets into memory.

    Parameters
    ----------
    path, target, **options
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
    return open_table(path, target, **options).everything()


def with_labels(rows: Rows) -> Rows:
    """Return a table with one label per sample: targets of shape (n_samples, 1) become vectors.

    Compared with predictions, which are a vector, a column would be broadcast to all pairs.

    Parameters
    ----------
    rows : Rows
        With or without targets. Its first row is read.

    Raises
    ------
    DataError
        A sample has several targets.
    """
    _, first = next(rows.pieces(0, 1, 1))
    if first is None or first.ndim == 1:
        return rows
    if first.size != 1:
        shape = ", ".join(map(str, (rows.n_samples, *first.shape[1:])))
        raise DataError(
            f"{rows.name}: targets have shape ({shape}), and a classifier needs one label for each of {rows.n_samples} "
            "samples; keep the column with the labels, or train a regressor"
        )
    return LabelledRows(rows)


@final
class LabelledRows(Rows):
    """Another table whose targets are an array of one column, as a vector."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.name, self.n_features, self.n_samples = rows.name, rows.n_features, rows.n_samples
        self.has_targets, self.feature_names = rows.has_targets, rows.feature_names

    def pieces(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        """Yield chunks of the other table."""
        for X, y in self._rows.pieces(start, stop, size):
            yield X, None if y is None else y.reshape(len(y))


def _open_csv(path: Path, choice: Choice, delimiter: str | None) -> Rows:
    lines = _lines(path, delimiter)
    first = lines[0][1]
    header = first if _is_header(first, choice) else None
    if header is not None:
        check_distinct_names(path, header)
        lines = lines[1:]
    features, target = choice.columns(path, header, first)
    if not features:
        raise DataError(
            f"{path} has no features: of its {len(first)} column{'s' * (len(first) > 1)}, "
            f"{_shortened(', '.join(first))}, none is left beside the target and what is dropped; "
            "if it should have more, give its --delimiter"
        )
    if not lines:
        raise DataError(f"{path} has a header line and no rows")
    names = [str(j) if header is None else repr(header[j]) for j in range(len(first))]
    table = np.empty((len(lines), len(features)))
    for i, (number, row) in enumerate(lines):
        for k, j in enumerate(features):
            try:
                table[i, k] = float(row[j])
            except ValueError:
                raise DataError(f"{path}, line {number}: column {names[j]} {_not_a_number(row[j])}") from None
        if target is not None and not row[target].strip():
            raise DataError(f"{path}, line {number}: the target {names[target]} is empty; fill it in, or leave out the row")
    y = None if target is None else _plainest(path, [row[target] for _, row in lines])
    return ArrayRows(table, y, str(path), None if header is None else [header[j] for j in features])


def _lines(path: Path, delimiter: str | None) -> Lines:
    """Return the lines that are not empty; all of them have the same number of cells."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            start = file.tell()
            used = delimiter or _detected(next((line for line in file if line.strip()), ""))
            file.seek(start)
            lines = [(number, row) for number, row in enumerate(csv.reader(file, delimiter=used), 1) if row]
    except OSError as error:
        raise unreadable(path, error) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a {path.suffix} file ({error}); save it as text in UTF-8") from error
    if not lines:
        raise DataError(f"{path} is empty")
    width = len(lines[0][1])
    for number, row in lines:
        if len(row) != width:
            raise DataError(
                f"{path}, line {number}: {len(row)} columns where line {lines[0][0]} has {width} (delimiter {used!r})"
            )
    return lines


def _detected(line: str) -> str:
    """Return the delimiter that occurs most often in a line, outside quotation marks."""
    bare = re.sub(r'"[^"]*"', "", line)
    return max(DELIMITERS, key=bare.count)


def _is_header(first: list[str], choice: Choice) -> bool:
    """Whether the first line names the columns: it has the model's names, or a feature that is neither number nor missing."""
    named = [*choice.drop, *([] if choice.target in (None, "none") else [str(choice.target)])]
    if any(column in first and not _is_number(column) for column in named):
        return True
    if choice.names is not None and {*choice.names} <= {*first}:
        return True
    others = [cell for j, cell in enumerate(first) if str(j) not in named]
    if choice.target is None and len(others) != choice.n_features:
        others = others[:-1]
    return any(not _is_number(cell) and cell.strip().lower() not in MISSING for cell in others)


def _not_a_number(text: str) -> str:
    """Say what is wrong with a cell, and what to do."""
    if text.strip().lower() in MISSING:
        what = "is empty" if not text.strip() else f"holds {text!r}"
        return f"{what}: a missing value; fill it in, or leave out the row or the column"
    if re.fullmatch(r"\s*[-+]?\d*,\d+\s*", text):
        return f"holds {text!r}; write numbers with a decimal point"
    return f"holds {_shortened(text)!r}, which is no number; encode it first, or leave the column out"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


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
