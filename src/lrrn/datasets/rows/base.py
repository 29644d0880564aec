"""What a table of samples is to those who read it, and tables that are arrays already."""

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
"""What is read at once when nobody asks for a certain number of rows."""


class DataError(ValueError):
    """A data file is missing, damaged or not what it should be."""


def unreadable(path: object, error: OSError) -> DataError:
    """Return the error to raise when the system did not let a file be read."""
    return DataError(f"{path} cannot be read ({error.strerror or error}); see that it is there, whole, and yours to read")


class Rows(ABC):
    """Samples with features and, where there are any, targets.

    Attributes
    ----------
    name : str
        What errors call it: the file.
    n_samples, n_features : int
    has_targets : bool
    """

    name: str
    n_samples: int
    n_features: int
    has_targets: bool

    @abstractmethod
    def pieces(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        """Yield features and targets of rows ``start`` to ``stop`` in order, ``size`` rows at a time and the rest last.

        Features are float32 or float64. A piece may be dropped from memory when the next one is asked for.
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
                "lrrn evaluate and lrrn certify do not"
            ) from error

    def checked(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        """Yield as :meth:`pieces`, and raise where a feature is not finite."""
        at = start
        for X, y in self.pieces(start, stop, size):
            if not np.isfinite(X).all():
                row, column = np.argwhere(~np.isfinite(X))[0]
                raise DataError(
                    f"{self.name}: feature {column} of sample {at + row} is {X[row, column]}; fill missing values in first"
                )
            yield X, y
            at += len(X)

    def first(self, n: int | None) -> Rows:
        """Return the first ``n`` rows, or all."""
        return self if n is None or n >= self.n_samples else FirstRows(self, n)


@final
class FirstRows(Rows):
    """The first rows of another table."""

    def __init__(self, rows: Rows, n: int) -> None:
        self._rows = rows
        self.name, self.n_features, self.has_targets = rows.name, rows.n_features, rows.has_targets
        self.n_samples = n

    def pieces(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        """Read the other table."""
        return self._rows.pieces(start, min(stop, self.n_samples), size)


@final
class ArrayRows(Rows):
    """Arrays in memory or mapped from a file, of which no more pages stay in memory than a piece has.

    Parameters
    ----------
    X : array of shape (n_samples, n_features)
    y : array of shape (n_samples,) or (n_samples, n_targets), optional
    name : str, default="X"
    """

    def __init__(self, X: Array, y: Array | None = None, name: str = "X") -> None:
        self._X, self._y, self.name = X, y, name
        check_shapes(name, X.shape, None if y is None else y.shape)
        (self.n_samples, self.n_features), self.has_targets = X.shape, y is not None

    def pieces(self, start: int, stop: int, size: int) -> Iterator[Piece]:
        """Slice."""
        for at in range(start, stop, size):
            rows = slice(at, min(at + size, stop))
            yield as_features(_in_memory(self._X[rows])), None if self._y is None else _in_memory(self._y[rows])


def _in_memory(part: Array) -> Array:
    """Copy what is mapped, since it will be read several times, and let the pages go."""
    if mapped(part) is None:
        return part
    there = np.array(part)
    release(part)
    return there


def check_shapes(name: str, X: tuple[int, ...], y: tuple[int, ...] | None) -> None:
    """Raise unless the shapes are those of a table and its targets."""
    if len(X) != 2 or min(X) < 1:
        raise DataError(f"{name}: features must form a table; got an array of shape {X}")
    if y is not None and (len(y) == 0 or y[0] != X[0] or min(y) < 1):
        raise DataError(f"{name}: {X[0]} samples do not go with {y[0] if y else 1} targets")


def as_features(X: Array) -> Array:
    """Return float32 as it is and anything else as float64."""
    if X.dtype == np.float32:
        return X
    with np.errstate(over="ignore"):  # what float64 cannot hold becomes infinite, and is refused as such
        return X.astype(np.float64, copy=False)


def regrouped(pieces: Iterable[Piece], size: int) -> Iterator[Piece]:
    """Cut pieces of any length anew, into ``size`` rows each and the rest."""
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
    """Return the memory map an array is a view of, if its pages can be dropped without losing anything."""
    mode = None
    while isinstance(array, np.ndarray):
        mode = getattr(array, "mode", None) or mode
        array = array.base
    # mode "c" keeps changes in the pages alone; a map that is no np.memmap does not tell
    return array if isinstance(array, mmap.mmap) and mode in ("r", "r+", "w+") else None


def release(array: Array) -> None:
    """Let the system have the pages of an array's memory map back; they are read again when they are needed again."""
    source = mapped(array)
    if source is not None and hasattr(source, "madvise"):
        # all of the map: systems map a few MB around what is touched, which would add up over the chunks of a large file
        source.madvise(mmap.MADV_DONTNEED)
