"""Tables in Parquet files, read with pyarrow: one row group after the other, a few pages at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import numpy as np

from lrrn.datasets.rows.base import Array, DataError, Piece, Rows, check_shapes, regrouped, unreadable
from lrrn.datasets.rows.columns import Choice, check_distinct_names

BUFFER_BYTES = 2**16
"""Read buffer per column in bytes; without it pyarrow reads a whole row group, which may be the whole file."""


def open_parquet(path: Path, choice: Choice) -> Rows:
    """Open the chosen columns of a table in a ``.parquet`` file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow; install it with pip install 'lrrn[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except (FileNotFoundError, PermissionError) as error:
        raise unreadable(path, error) from error
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged or no Parquet file ({error})") from error
    names = list(schema.names)
    check_distinct_names(path, names)
    wanted, at = choice.columns(path, names, names)
    features, target = [names[j] for j in wanted], None if at is None else names[at]
    is_number = (pyarrow.types.is_floating, pyarrow.types.is_integer, pyarrow.types.is_boolean)
    for name in features:
        kind = schema.field(name).type
        if not any(test(kind) for test in is_number):
            raise DataError(
                f"{path}: column {name!r} is of type {kind}, which is no number; encode it first, or leave the column out"
            )
    check_shapes(str(path), (sum(groups), len(features)), None)
    narrow = all(pyarrow.types.is_float32(schema.field(name).type) for name in features)
    return ParquetRows(path, features, target, groups, np.dtype(np.float32 if narrow else np.float64))


@final
class ParquetRows(Rows):
    """A Parquet file in which every column but the target is numeric."""

    def __init__(
        self, path: Path, features: list[str], target: str | None, groups: list[int], dtype: np.dtype[np.generic]
    ) -> None:
        self._path, self._features, self._target, self._dtype = path, features, target, dtype
        self._ends = list(accumulate(groups))
        self.name, self.has_targets = str(path), target is not None
        self.n_samples, self.n_features, self.feature_names = self._ends[-1], len(features), features

    def pieces(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        """Read the row groups that contain the requested rows."""
        return regrouped(self._batches(start, stop, size), size)

    def _batches(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        import pyarrow
        from pyarrow import parquet

        first, last = bisect_right(self._ends, start), bisect_right(self._ends, stop - 1)
        at = self._ends[first - 1] if first else 0
        columns = self._features if self._target is None else [*self._features, self._target]
        try:
            with parquet.ParquetFile(self._path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
                groups = list(range(first, last + 1))
                for batch in file.iter_batches(size, row_groups=groups, columns=columns, use_threads=False):
                    low, high = max(start - at, 0), min(stop - at, batch.num_rows)
                    if high > low:
                        yield self._piece(batch.slice(low, high - low), at + low)
                    at += batch.num_rows
        except (FileNotFoundError, PermissionError) as error:
            raise unreadable(self._path, error) from error
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self._path} is damaged ({error})") from error

    def _piece(self, batch: Any, at: int) -> Piece:
        X = np.empty((batch.num_rows, self.n_features), self._dtype)
        for j, name in enumerate(self._features):
            X[:, j] = batch.column(name).to_numpy(zero_copy_only=False)  # a missing value becomes NaN
        return X, None if self._target is None else self._targets(batch.column(self._target), at)

    def _targets(self, column: Any, at: int) -> Array:
        if column.null_count:
            row = at + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise DataError(f"{self._path}: sample {row} has no target; fill it in or leave the sample out")
        if hasattr(column, "dictionary_decode"):
            column = column.dictionary_decode()
        values = column.to_numpy(zero_copy_only=False)
        return np.array(values.tolist()) if values.dtype == object else values
