"""Faults made to order: permissions that bind root too, disks that are full, and what to hold the outcome against."""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def obey_permissions() -> None:
    """Give up root's privilege to ignore permissions, in the calling thread alone: capabilities belong to threads."""
    if os.geteuid() != 0:
        return
    if not sys.platform.startswith("linux"):
        raise NotImplementedError("run these tests as an ordinary user here")
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the interface, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, the low words first
    ignore = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    sets[0] &= ~ignore
    sets[1] &= ~ignore
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def as_ordinary_user(work: Callable[[], Any]) -> Any:
    """Call a function in a thread that permissions bind, whoever runs the tests."""
    with ThreadPoolExecutor(1, initializer=obey_permissions) as pool:
        return pool.submit(work).result()


@contextmanager
def full_disk(room: int = 0) -> Iterator[None]:
    """Let no file grow beyond some bytes: writes fail half-way, as on a full disk, and the kernel sees to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(folder: Any) -> Iterator[None]:
    """Take away the permission to write into a folder."""
    mode = os.stat(folder).st_mode
    os.chmod(folder, 0o555)
    try:
        yield
    finally:
        os.chmod(folder, mode)


def device(folder: Path, name: str) -> Path:
    """Return a device like /dev/full or /dev/null, but one of our own: a test that fails must not cost the system its own."""
    path, minor = folder / name, {"null": 3, "full": 7}[name]
    if os.geteuid() != 0:
        path.symlink_to(f"/dev/{name}")  # which we could not replace
        return path
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
        with open(path, "rb") as probe:
            probe.read(1)
    except OSError:
        pytest.skip("devices can be neither made nor opened here")
    return path
