"""Peak memory of a piece of work: how far the resident set grows."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What to write into ``clear_refs`` so that the kernel forgets the peak so far."""


def _kibibytes(field: str) -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))


@contextmanager
def growth() -> Iterator[list[float]]:
    """Append, at the end of the block, how many MiB its peak was above the resident set at its beginning.

    Memory that was freed before is given back first, so that the block cannot use it unnoticed. Nothing is appended where the
    kernel does not keep a peak that can be reset, which Linux does.
    """
    found: list[float] = []
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR.write_text(RESET_PEAK)
        before = _kibibytes("VmRSS")
    except (OSError, AttributeError):
        yield found
        return
    yield found
    found.append(max(_kibibytes("VmHWM") - before, 0) / 1024)
