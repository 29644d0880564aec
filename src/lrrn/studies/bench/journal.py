"""What a suite has measured so far, kept in a file: an interrupted run goes on where it was."""

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
        The file; nothing is kept if not given. A file of another run (other settings, another machine, another day) is begun
        anew, and a last line that was cut off is measured again.
    about : dict, optional
        What distinguishes this run from others, ready for ``json.dumps``.
    """

    def __init__(self, path: Path | None = None, about: dict[str, Any] | None = None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        self.sittings = 1
        """How many processes it took so far."""
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
        """Return what is kept under a name, or else what ``measure`` returns for the arguments, ready for ``json.dumps``."""
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
        """Remove the file: the suite's results are in another one now."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
