"""Progress of a long run: a bar with rate and remaining time on a terminal, no output to a pipe, JSON lines in a log file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lrrn.runtime.storage import write_bytes, write_error


@final
class ProgressBar:
    """Progress bar that counts samples; shown only if enabled and standard error is a terminal."""

    def __init__(self, wanted: bool, label: str, total: int, done: int) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not (wanted and console.is_terminal),
        )
        self._task = self._bar.add_task(label, total=total, completed=done, note="")

    def advance(self, samples: int) -> None:
        """Count samples."""
        if not self._bar.disable:
            self._bar.advance(self._task, samples)

    def note(self, text: str) -> None:
        """Show a text beside the bar."""
        if not self._bar.disable:
            self._bar.update(self._task, note=text)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()


@final
class JsonLines:
    """Log with one JSON object per line. A resumed run first rewrites it with the records up to its checkpoint."""

    def __init__(self, path: str | os.PathLike[str] | None, history: Sequence[dict[str, Any]]) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None:
            write_bytes(self._path, "".join(json.dumps(record) + "\n" for record in history).encode())

    def append(self, record: dict[str, Any]) -> None:
        """Append a line."""
        if self._path is None:
            return
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise write_error(self._path, error) from error
