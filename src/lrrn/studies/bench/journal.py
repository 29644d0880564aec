"""Journal file with the measurements of a suite so far, so that an interrupted run can resume."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, final

from lrrn.runtime.storage import write_bytes

logger = logging.getLogger("lrrn.studies.bench")

T = TypeVar("T")


@final
class Journal:
    """Measurements by name, one line each, written as soon as they are made.

    Parameters
    ----------
    path : Path, optional
        The file; nothing is stored if not given. A file of another run (other settings, another machine, another day) is
        overwritten. A truncated last line is discarded and measured again.
    about : dict, optional
        Identifies the run; must be serialisable by ``json.dumps``.
    """

    def __init__(self, path: Path | None = None, about: dict[str, Any] | None = None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        self.sittings = 1
        """Number of processes that have worked on the run so far."""
        if path is None:
            return
        head = json.dumps({"about": about})
        lines = path.read_text(errors="replace").split("\n")[:-1] if path.is_file() else []
        if lines and lines[0] == head:
            self.sittings = 1 + sum(line == head for line in lines)
            kept = [json.loads(line) for line in lines if line != head]
            self._known = {entry["name"]: entry["measured"] for entry in kept}
            logger.info("%d measurements are there already, from %s", len(self._known), path)
        write_bytes(path, "".join(f"{line}\n" for line in [*(lines if self._known else []), head]).encode())

    def once(self, name: str, measure: Callable[..., T], *arguments: Any) -> T:
        """Return the stored measurement of a name, or call ``measure`` and store its result, which must be valid JSON."""
        if name not in self._known:
            self._known[name] = measure(*arguments)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"name": name, "measured": self._known[name]}) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
        known: T = self._known[name]
        return known

    def end(self) -> None:
        """Remove the file once the suite's results have been written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
