"""Information on this machine: processor and cores."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """Return the name of the processor, and its widest SIMD instruction set that the kernels use."""
    lines = _cpuinfo()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return name + (", AVX-512" if "avx512f" in cpu_flags() else ", AVX2" if "avx2" in cpu_flags() else "")


def cpu_flags() -> frozenset[str]:
    """Return the instruction sets of the processor, by their Linux names; empty if they are unknown."""
    return frozenset(next((line for line in _cpuinfo() if line.startswith("flags")), "").partition(":")[2].split())


def cpu_vendor() -> str:
    """Return the maker of the processor as it states it, such as GenuineIntel; empty if it is unknown."""
    return next((line for line in _cpuinfo() if line.startswith("vendor_id")), "").partition(":")[2].strip()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def cores() -> int:
    """Return the number of processor cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
