"""Facts of this machine: its processor and its cores."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """Name the processor, and the widest vectors it has that matter to the kernels."""
    lines = _cpuinfo()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return name + (", AVX-512" if "avx512f" in cpu_flags() else ", AVX2" if "avx2" in cpu_flags() else "")


def cpu_flags() -> frozenset[str]:
    """Return the instruction sets of the processor, by the names Linux has for them; none where it cannot be asked."""
    return frozenset(next((line for line in _cpuinfo() if line.startswith("flags")), "").partition(":")[2].split())


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
