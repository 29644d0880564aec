"""Scoring: apply a function to every row of a table, which may be larger than memory, on one or more ranks.

The result is bit-identical for any number of ranks. The table is split into chunks whose number and size do not depend on the
ranks. Each rank processes a contiguous range of chunks. Only a few numbers per sample are kept. They stay in memory, or they
are written to part files, which are merged at the end. With part files, an interrupted run resumes with the missing parts.
"""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lrrn.datasets.rows import DataError, Rows
from lrrn.runtime import ranks, storage

logger = logging.getLogger("lrrn.reports")

Array = NDArray[Any]
Columns = dict[str, Array]
Work = Callable[[Array, Array | None, int], Columns]
"""Maps features, targets and the index of a chunk to columns with the same number of rows."""
PART_CHUNKS = 64
"""Number of chunks in a part, unless a rank has fewer."""
SUFFIXES = (".npz", ".parquet")


def over_rows(rows: Rows, size: int, work: Work, parts: Parts | None = None) -> Columns:
    """Apply ``work`` to all rows, distributed over the ranks, and return its columns, merged in order, on every rank.

    Chunks have ``size`` rows. Every feature is checked to be finite before any work is done. Intermediate columns are
    stored in ``parts``, or in memory if there are none.
    """
    team = ranks.current()
    n_chunks = -(-rows.n_samples // size)
    mine = range(n_chunks)[team.part(n_chunks)]
    _check(rows, mine, size)
    if parts is None:
        done = [columns for _, columns in _worked(rows, size, work, mine)]
        return _merged([columns for share in team.gather(done) for columns in share])
    present = parts.begin(rows, size)
    for first, last in _missing(mine, present):
        held: list[Columns] = []
        for chunk, columns in _worked(rows, size, work, range(first, last)):
            held.append(columns)
            if len(held) == PART_CHUNKS or chunk == last - 1:
                parts.write(chunk + 1 - len(held), chunk + 1, _merged(held))
                held = []
    team.gather(None)  # wait until every rank has written
    return parts.finish(n_chunks)


def _worked(rows: Rows, size: int, work: Work, chunks: range) -> Iterator[tuple[int, Columns]]:
    if chunks:
        stop = min(chunks[-1] * size + size, rows.n_samples)
        for chunk, (X, y) in zip(chunks, rows.pieces(chunks[0] * size, stop, size), strict=True):
            yield chunk, work(X, y, chunk)


def _check(rows: Rows, chunks: range, size: int) -> None:
    """Read this rank's rows once; on every rank, raise the first error that any rank found."""
    error: DataError | None = None
    try:
        if chunks:
            for _ in rows.checked(chunks[0] * size, min(chunks[-1] * size + size, rows.n_samples), size):
                pass
    except DataError as found:
        error = found
    for told in ranks.current().gather(error):
        if told is not None:
            raise told


def _missing(mine: range, present: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of chunks that no part covers."""
    covered = {chunk for first, last in present for chunk in range(first, last)}
    first = None
    for chunk in [*mine, None]:
        if chunk is not None and chunk not in covered:
            first = chunk if first is None else first
        elif first is not None:
            yield first, (mine.stop if chunk is None else chunk)
            first = None


def _merged(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@final
class Parts:
    """Part files, each with the columns of some chunks, in a folder beside the file they will be merged into.

    ``run`` identifies the run: parts of other runs are refused.
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"results of samples are written as {' or '.join(SUFFIXES)}; got {path}")
        if path.suffix == ".parquet":
            _pyarrow(path)
        storage.check_writable(path)
        self._path, self._run = path, run
        self._folder = path.with_name(path.name + ".parts")

    def begin(self, rows: Rows, size: int) -> list[tuple[int, int]]:
        """Create the folder, or find what an interrupted run left there; return the ranges of chunks present."""
        run = {**self._run, "data": _stamp(rows), "chunk": size}
        team, record = ranks.current(), self._folder / "run.json"
        team.check_same("samples or settings", run)

        def prepare() -> list[tuple[int, int]]:
            self._folder.mkdir(exist_ok=True)
            if record.is_file() and self._recorded(record) != json.loads(json.dumps(run)):
                raise ValueError(
                    f"{self._folder} holds parts of another run, with another model, other data or settings; "
                    "remove it, or write elsewhere"
                )
            storage.write_bytes(record, json.dumps(run).encode())
            present = [self._stretch(part) for part in sorted(self._folder.glob("part-*.npz"))]
            if present:
                logger.info("continuing with %d parts in %s", len(present), self._folder)
            return present

        return team.on_main(prepare)

    def write(self, first: int, last: int, columns: Columns) -> None:
        """Store the columns of chunks ``first`` to ``last``."""
        storage.write_bytes(self._folder / f"part-{first:09d}-{last:09d}.npz", _npz(columns))

    def finish(self, n_chunks: int) -> Columns:
        """Read all parts; rank 0 merges them into one file and removes them."""
        team, at, columns = ranks.current(), 0, list[Columns]()
        for part in sorted(self._folder.glob("part-*.npz")):
            first, last = self._stretch(part)
            if first != at:
                break
            columns.append(self._columns(part))
            at = last
        if at != n_chunks:
            raise FileNotFoundError(
                f"{self._folder} lacks the part that begins with chunk {at}; ranks on several machines need a folder they share"
            )
        merged = _merged(columns)
        team.gather(None)  # wait until every rank has read
        team.on_main(lambda: self._merge(merged))
        return merged

    def _merge(self, columns: Columns) -> None:
        storage.write_bytes(self._path, _npz(columns) if self._path.suffix == ".npz" else _parquet(self._path, columns))
        shutil.rmtree(self._folder)

    def _stretch(self, part: Path) -> tuple[int, int]:
        found = re.fullmatch(r"part-([0-9]{9})-([0-9]{9})", part.stem)
        if found is None:
            raise self._damaged(part, "parts have other names")
        return int(found[1]), int(found[2])

    def _recorded(self, record: Path) -> Any:
        try:
            return json.loads(record.read_bytes())
        except (ValueError, RecursionError) as error:
            raise self._damaged(record, error) from error

    def _columns(self, part: Path) -> Columns:
        try:
            with part.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (ValueError, AttributeError, LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise self._damaged(part, error) from error

    def _damaged(self, file: Path, reason: object) -> storage.FileFormatError:
        return storage.FileFormatError(f"{file} is damaged ({reason}); remove it, and the same command makes it anew")


def _stamp(rows: Rows) -> list[Any]:
    """Return what distinguishes a table from others of the same name."""
    path = Path(rows.name)
    file = [path.stat().st_size, path.stat().st_mtime_ns] if path.is_file() else []
    return [rows.name, rows.n_samples, rows.n_features, rows.has_targets, *file]


def _npz(columns: Columns) -> bytes:
    content = io.BytesIO()
    # labels from a data frame are Python objects, which would need pickle
    plain = {name: values.astype(str) if values.dtype == object else values for name, values in columns.items()}
    np.savez(content, allow_pickle=False, **plain)
    return content.getvalue()


def _parquet(path: Path, columns: Columns) -> bytes:
    pyarrow = _pyarrow(path)
    from pyarrow import parquet

    content = io.BytesIO()
    flat = {name: np.ascontiguousarray(values) for name, values in flattened(columns).items()}
    parquet.write_table(pyarrow.table(flat), content)
    return content.getvalue()


def flattened(columns: Columns) -> Columns:
    """Return the columns with one for each target in place of those with several, numbered from 0."""
    flat: Columns = {}
    for name, column in columns.items():
        flat.update({name: column} if column.ndim == 1 else {f"{name} {j}": values for j, values in enumerate(column.T)})
    return flat


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(f"writing {path} needs pyarrow; install it with pip install 'lrrn[parquet]'") from error
    return pyarrow
