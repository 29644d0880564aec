"""Scoring: apply a function to every row of a table, which may be larger than memory, on one or more ranks.

The result is bit-identical for any number of ranks. The table is split into chunks whose number and size do not depend on the
ranks. Each rank processes a contiguous range of chunks. Only a few numbers per sample are kept. They stay in memory, or they
are written to part files at intervals, which are merged at the end. With part files, an interrupted run resumes with what is
missing, and processes that know nothing of each other can each take a share.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lrrn.datasets.rows import DataError, Rows
from lrrn.learning.progress import ProgressBar
from lrrn.runtime import ranks, storage
from lrrn.runtime.interrupts import termination_interrupts

logger = logging.getLogger("lrrn.reports")

Array = NDArray[Any]
Columns = dict[str, Array]
Work = Callable[[Array, Array | None, int], Columns]
"""Maps features, targets and the index of a chunk to columns with the same number of rows."""
PART_CHUNKS, PART_SECONDS = 64, 30.0
"""Largest number of chunks in a part, and seconds after which a part is written if its chunk ends later."""
SUFFIXES = (".npz", ".parquet")
RECORD = 2
"""Version of the record of a run. That of the first did not tell all models apart, so its parts are not continued."""


@final
@dataclass(frozen=True)
class Share:
    """A share of the samples: number ``index`` of ``count``, from 1 on."""

    index: int = 1
    count: int = 1

    def of(self, n_chunks: int) -> range:
        """Return its contiguous range of chunks; shares differ by at most one chunk."""
        if self.count > n_chunks:
            raise ValueError(f"the samples are {n_chunks} chunks, too few to be divided by {self.count}; take fewer shares")
        return range(n_chunks * (self.index - 1) // self.count, n_chunks * self.index // self.count)


ALL = Share()


def over_rows(
    rows: Rows, size: int, work: Work, parts: Parts | None = None, share: Share = ALL, progress: str | None = None
) -> Columns:
    """Apply ``work`` to all rows, distributed over the ranks, and return its columns, merged in order, on every rank.

    Parameters
    ----------
    rows : Rows
        Every feature is checked to be finite before any work is done.
    size : int
        Number of rows in a chunk.
    work : callable
        See ``Work``.
    parts : Parts, optional
        Where intermediate columns are stored; in memory if not given. An interrupt (Ctrl-C, or SIGTERM) leaves all finished
        chunks there, and is raised with a text that says how to continue.
    share : Share, optional
        Process, and return, only these chunks; their parts stay. The call for all chunks merges the parts of all shares.
    progress : str, optional
        Label of a progress bar, shown if standard error is a terminal.
    """
    team = ranks.current()
    n_chunks = -(-rows.n_samples // size)
    wanted = share.of(n_chunks)
    stamp = _checked(rows, range(n_chunks)[team.part(n_chunks)], size, parts is not None)
    mine, present = wanted[team.part(len(wanted))], list[tuple[int, int]]()
    if parts is not None:
        present = parts.begin(size, {"samples": rows.n_samples, "targets": rows.has_targets, "data": stamp})
    bar = ProgressBar(progress is not None and team.is_main, progress or "", *_samples(rows, size, mine, present))
    if parts is None:
        with bar:
            done = [columns for _, columns in _worked(rows, size, work, mine, bar)]
        return _merged([columns for there in team.gather(done) for columns in there])
    try:
        with termination_interrupts(), bar:
            for first, last in _missing(mine, present):
                _fill(parts, last, _worked(rows, size, work, range(first, last), bar))
    except KeyboardInterrupt as error:
        raise type(error)(f"what is finished is in {parts.folder}, and the same command continues") from None
    team.gather(None)  # wait until every rank has written
    return parts.finish(wanted, rows.n_samples, merge=share == ALL)


def _fill(parts: Parts, last: int, worked: Iterator[tuple[int, Columns]]) -> None:
    """Write parts of finished chunks, up to ``last``, at intervals and before an interrupt is passed on."""
    held: list[tuple[int, Columns]] = []

    def write() -> None:
        parts.write(held[0][0], held[-1][0] + 1, _merged([columns for _, columns in held]))
        held.clear()

    try:
        saved = time.monotonic()
        for chunk, columns in worked:
            held.append((chunk, columns))
            if len(held) == PART_CHUNKS or chunk + 1 == last or time.monotonic() - saved >= PART_SECONDS:
                write()
                saved = time.monotonic()
    except KeyboardInterrupt:
        if held:
            write()
        raise


def _worked(rows: Rows, size: int, work: Work, chunks: range, bar: ProgressBar) -> Iterator[tuple[int, Columns]]:
    if chunks:
        stop = min(chunks[-1] * size + size, rows.n_samples)
        for chunk, (X, y) in zip(chunks, rows.pieces(chunks[0] * size, stop, size), strict=True):
            columns = work(X, y, chunk)
            bar.advance(len(X))
            yield chunk, columns


def _samples(rows: Rows, size: int, chunks: range, present: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the number of samples in some chunks, and of those that are present."""
    here = {chunk for first, last in present for chunk in range(first, last)} & {*chunks}
    of = {chunk: min(size, rows.n_samples - chunk * size) for chunk in chunks}
    return sum(of.values()), sum(of[chunk] for chunk in here)


def _checked(rows: Rows, chunks: range, size: int, stamped: bool) -> str:
    """Read this rank's rows once; on every rank, raise the first error of any rank, or return a digest of all rows if asked."""
    error: DataError | None = None
    digests: list[bytes] = []
    try:
        if chunks:
            for X, y in rows.checked(chunks[0] * size, min(chunks[-1] * size + size, rows.n_samples), size):
                if stamped:
                    digests.append(_digest(X, y))
    except DataError as found:
        error = found
    shared = ranks.current().gather((error, digests))
    for found_there, _ in shared:
        if found_there is not None:
            raise found_there
    return hashlib.blake2b(b"".join(one for _, there in shared for one in there), digest_size=16).hexdigest()


def _digest(X: Array, y: Array | None) -> bytes:
    digest = hashlib.blake2b(f"{X.dtype} {X.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(X).data)
    if y is not None:
        labels = y.astype(str) if y.dtype == object else y
        digest.update(f"{labels.dtype} {labels.shape}".encode() + labels.tobytes())
    return digest.digest()


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

    ``run`` identifies the run: parts of other runs are refused, and left as they are.
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"results of samples are written as {' or '.join(SUFFIXES)}; got {path}")
        if path.suffix == ".parquet":
            _pyarrow(path)
        storage.check_writable(path)
        self._path, self._run, self._size = path, run, 1
        self.folder = path.with_name(path.name + ".parts")

    def begin(self, size: int, data: dict[str, Any]) -> list[tuple[int, int]]:
        """Create the folder, or find what an interrupted run left there; return the ranges of chunks present.

        ``size`` is the number of rows in a chunk, and ``data`` identifies the rows.
        """
        self._size, run = size, {**self._run, **data, "chunk": size, "record": RECORD}
        team, record = ranks.current(), self.folder / "run.json"
        team.check_same("samples or settings", run)

        def prepare() -> list[tuple[int, int]]:
            self.folder.mkdir(exist_ok=True)
            if record.is_file():
                self._check_run(self._recorded(record), json.loads(json.dumps(run)))
            else:
                storage.write_bytes(record, json.dumps(run).encode())
            present = [self._stretch(part) for part in sorted(self.folder.glob("part-*.npz"))]
            if present:
                logger.info("continuing with %d parts in %s", len(present), self.folder)
            return present

        return team.on_main(prepare)

    def _check_run(self, there: dict[str, Any], here: dict[str, Any]) -> None:
        if there.get("record") != here["record"]:
            raise ValueError(
                f"{self.folder} holds parts that another release of lrrn wrote, which cannot be continued: their record may "
                "not tell which model they are of. Remove the folder, or write to another file"
            )
        changed = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
        if changed:
            detail = "; ".join(f"{key}: {there.get(key)!r} there, {here.get(key)!r} here" for key in changed)
            raise ValueError(
                f"{self.folder} holds parts of another run ({detail}). Repeat that run to continue it; or write to another "
                "file, or remove the folder"
            )

    def write(self, first: int, last: int, columns: Columns) -> None:
        """Store the columns of chunks ``first`` to ``last``."""
        storage.write_bytes(self.folder / f"part-{first:09d}-{last:09d}.npz", _npz(columns))

    def finish(self, chunks: range, n_samples: int, merge: bool) -> Columns:
        """Return the columns of some chunks from their parts; if asked, rank 0 merges all into one file."""
        team, at, columns = ranks.current(), chunks.start, list[Columns]()
        for part in sorted(self.folder.glob("part-*.npz")):
            first, last = self._stretch(part)
            if first > at:
                break
            if last > at and at < chunks.stop:  # shares that were cut otherwise may overlap
                some = slice(*(self._size * (end - first) for end in (at, min(last, chunks.stop))))
                columns.append({name: values[some] for name, values in self._columns(part).items()})
                at = min(last, chunks.stop)
        if at != chunks.stop:
            raise FileNotFoundError(
                f"{self.folder} lacks the part that begins with chunk {at}; ranks on several machines need a folder they share"
            )
        merged = _merged(columns)
        expected = min(chunks.stop * self._size, n_samples) - chunks.start * self._size
        wrong = [name for name, values in merged.items() if len(values) != expected]
        if wrong:
            raise self._damaged(self.folder, f"{len(merged[wrong[0]])} values of {wrong[0]} for {expected} samples")
        team.gather(None)  # wait until every rank has read
        if merge:
            team.on_main(lambda: self._merge(merged))
        return merged

    def _merge(self, columns: Columns) -> None:
        storage.write_bytes(self._path, _npz(columns) if self._path.suffix == ".npz" else _parquet(self._path, columns))
        shutil.rmtree(self.folder)

    def _stretch(self, part: Path) -> tuple[int, int]:
        found = re.fullmatch(r"part-([0-9]{9})-([0-9]{9})", part.stem)
        if found is None:
            raise self._damaged(part, "parts have other names")
        return int(found[1]), int(found[2])

    def _recorded(self, record: Path) -> dict[str, Any]:
        try:
            return dict(json.loads(record.read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(record, error) from error

    def _columns(self, part: Path) -> Columns:
        try:
            with part.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (ValueError, AttributeError, LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise self._damaged(part, error) from error

    def _damaged(self, file: Path, reason: object) -> storage.FileFormatError:
        return storage.FileFormatError(f"{file} is damaged ({reason}); remove it, and the same command recomputes it")


def _npz(columns: Columns) -> bytes:
    content = io.BytesIO()
    # labels from a data frame are Python objects, which would need pickle
    plain = {name: values.astype(str) if values.dtype == object else values for name, values in columns.items()}
    np.savez(content, **plain)  # type: ignore[arg-type]  # before NumPy 2.1, allow_pickle would be the name of an array
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
