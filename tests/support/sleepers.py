"""Work that takes long, for processes that are to be stopped."""

from __future__ import annotations

import time


def sleeps(run, folder, *arguments):
    """Stand in for a measurement that takes long; at module level, so that a process can import it."""
    try:
        (folder / "asleep").touch()
        time.sleep(600)
    except KeyboardInterrupt:
        (folder / "woken").touch()
        raise
