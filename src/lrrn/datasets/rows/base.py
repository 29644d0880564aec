"""Interface of a table of samples, and its implementation for arrays."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Piece = tuple[Array, Array | None]
PIECE_BYTES = 2**24
"""Default chunk size in bytes."""


class DataError(ValueError):
    """A data file is missing, damaged or of the wrong kind."""


def unreadable(path: object, error: OSError) -> DataError:
    """Return the error to raise when the operating system cannot read a file."""
    return DataError(f"{path} cannot be read ({error.strerror or error}); see that it is there, whole, and yours to read")


class Rows(ABC):
    """Table of samples with features and optional targets.

    Attributes
    ----------
    name : str
        Name in error messages: the file.
    n_samples, n_features : int
    has_targets : bool
    feature_names : list of str or None
        Names of the features, if the table has names.
    """

    name: str
    n_samples: int
    n_features: int
    has_targets: bool
    feature_names: list[str] | None = None

    @abstractmethod
    def pieces(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        """Yield features and targets of rows ``start`` to ``stop``, in order, in chunks of ``size`` rows.

        The last chunk may be smaller. Features are float32 or float64. A chunk may be dropped from memory when the next one is
        requested.
        """

    def everything(self) -> Piece:
        """Return all features and targets, in memory; the features are checked to be finite."""
        n, size = self.n_samples, max(1, PIECE_BYTES // (8 * self.n_features))
        features, targets, at = np.empty((0, self.n_features)), list[Array](), 0
        for X, y in self.checked(0, n, size):
            if at == 0:
                features = self._room(n, X.dtype)
            features[at : at + len(X)] = X
            at += len(X)
            if y is not None:
                targets.append(np.array(y))
        return features, np.concatenate(targets) if targets else None

    def _room(self, n: int, dtype: np.dtype[Any]) -> Array:
        try:
            return np.empty((n, self.n_features), dtype)
        except (MemoryError, ValueError) as error:
            raise DataError(
                f"{self.name}: {n} x {self.n_features} features do not fit into memory; training needs them there, "
                "lrrn predict, lrrn evaluate and lrrn certify do not"
            ) from error

    def checked(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        """Yield the same chunks as :meth:`pieces`; raise an error if a feature is not finite."""
        at = start
        for X, y in self.pieces(start, stop, size):
            if not np.isfinite(X).all():
                row, column = np.argwhere(~np.isfinite(X))[0]
                feature = column if self.feature_names is None else repr(self.feature_names[column])
                remedy = (
                    "a missing value; fill it in, or leave out the row or the column"
                    if np.isnan(X[row, column])
                    else "no finite number"
                )
                raise DataError(f"{self.name}: feature {feature} of sample {at + row} is {X[row, column]}: {remedy}")
            yield X, y
            at += len(X)

    def first(self, n: int | None) -> Rows:
        """Return the first ``n`` rows, or all if ``n`` is None."""
        return self if n is None or n >= self.n_samples else FirstRows(self, n)


@final
class FirstRows(Rows):
    """The first rows of another table."""

    def __init__(self, rows: Rows, n: int) -> None:
        self._rows = rows
        self.name, self.n_features, self.has_targets = rows.name, rows.n_features, rows.has_targets
        self.n_samples, self.feature_names = n, rows.feature_names

    def pieces(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        """Yield chunks of the other table."""
        return self._rows.pieces(start, min(stop, self.n_samples), size)


@final
class ArrayRows(Rows):
    """Arrays in memory, or memory maps, of which only the pages of one chunk stay in memory."""

    def __init__(self, X: Array, y: Array | None = None, name: str = "X", feature_names: list[str] | None = None) -> None:
        self._X, self._y, self.name, self.feature_names = X, y, name, feature_names
        check_shapes(name, X.shape, None if y is None else y.shape)
        (self.n_samples, self.n_features), self.has_targets = X.shape, y is not None

    def pieces(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        """Yield slices of the arrays."""
        for at in range(start, stop, size):
            rows = slice(at, min(at + size, stop))
            yield as_features(_in_memory(self._X[rows])), None if self._y is None else _in_memory(self._y[rows])


def _in_memory(part: Array) -> Array:
    """Copy a memory map, since it will be read several times, and release its pages."""
    if mapped(part) is None:
        return part
    there = np.array(part)
    release(part)
    return there


def check_shapes(name: str, X: tuple[int, ...], y: tuple[int, ...] | None) -> None:
    """Raise an error unless the shapes are those of a table and its targets."""
    if len(X) != 2:
        raise DataError(f"{name}: features must form a table, of shape (samples, features); got an array of shape {X}")
    if min(X) < 1:
        raise DataError(f"{name} has no {'features' if X[0] else 'samples'}; got an array of shape {X}")
    if y is not None and (len(y) == 0 or y[0] != X[0] or min(y) < 1):
        raise DataError(f"{name}: {X[0]} samples do not go with {y[0] if y else 1} targets")


def as_features(X: Array) -> Array:
    """Return float32 arrays unchanged and all others as float64."""
    if X.dtype == np.float32:
        return X
    with np.errstate(over="ignore"):  # numbers beyond the range of float64 become infinite, and are rejected later
        return X.astype(np.float64, copy=False)


def regrouped(pieces: Iterable[Piece], size: int) -> Iterator[Piece]:
    """Regroup chunks of any length into chunks of ``size`` rows; the last may be smaller."""
    held: list[Piece] = []
    n_held = 0
    for X, y in pieces:
        held.append((X, y))
        n_held += len(X)
        while n_held >= size:
            whole = _joined(held)
            yield _cut(whole, 0, size)
            held, n_held = [_cut(whole, size, n_held)], n_held - size
    if n_held:
        yield _joined(held)


def _joined(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    targets = [y for _, y in pieces if y is not None]
    return np.concatenate([X for X, _ in pieces]), np.concatenate(targets) if targets else None


def _cut(piece: Piece, start: int, stop: int) -> Piece:
    X, y = piece
    return X[start:stop], None if y is None else y[start:stop]


def mapped(array: Any) -> mmap.mmap | None:
    """Return the memory map that an array is a view of, if its pages can be dropped without data loss."""
    mode = None
    while isinstance(array, np.ndarray):
        mode = getattr(array, "mode", None) or mode
        array = array.base
    # mode "c" keeps changes only in memory; the mode of a map that is not an np.memmap is unknown
    return array if isinstance(array, mmap.mmap) and mode in ("r", "r+", "w+") else None


def release(array: Array) -> None:
    """Release the pages of an array's memory map; the system reads them again on access."""
    source = mapped(array)
    if source is not None and hasattr(source, "madvise"):
        # release the whole map: systems map a few MB around each access, which would accumulate over the chunks of a large file
        source.madvise(mmap.MADV_DONTNEED)
