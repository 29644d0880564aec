"""Files: safetensors with a JSON header, written atomically; reading never executes code."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

VERSION = 1
"""Version of the layout of all files this package writes."""
_KEY = "lrrn"


class FileFormatError(ValueError):
    """A file is truncated, foreign or too new to be read."""


def write(path: str | os.PathLike[str], kind: str, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write tensors and a header so that the file is either the old or the new one, never half of it.

    Parameters
    ----------
    path : path-like
        Where to write.
    kind : str
        What the file holds, checked when it is read.
    tensors : dict of str to Tensor
    header : dict
        Anything JSON can hold.
    """
    envelope = {"kind": kind, "version": VERSION, "header": header}
    contiguous = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    write_bytes(path, save(contiguous, metadata={_KEY: json.dumps(envelope)}))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically: to a temporary neighbour, flushed to disk, then renamed."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.resolve().parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def clear_remains(path: str | os.PathLike[str]) -> None:
    """Remove what a process killed while writing this file left beside it."""
    target = Path(path)
    for part in target.resolve().parent.glob(f".{target.name}.*.part"):
        part.unlink(missing_ok=True)


def read(path: str | os.PathLike[str], *kinds: str) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Read a file written by :func:`write`.

    Parameters
    ----------
    path : path-like
        The file.
    *kinds : str
        What it may hold.

    Returns
    -------
    kind : str
    tensors : dict of str to Tensor
    header : dict
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if _KEY not in metadata:
                raise FileFormatError(f"{path} is a safetensors file, but not one that lrrn wrote")
            envelope = json.loads(metadata[_KEY])
            version = envelope["version"]
            if version > VERSION:
                raise FileFormatError(
                    f"{path} has format version {version} and this release of lrrn reads up to {VERSION}: update lrrn"
                )
            if envelope["kind"] not in kinds:
                raise FileFormatError(f"{path} holds a {envelope['kind']}, not a {' or '.join(kinds)}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return envelope["kind"], tensors, envelope["header"]
    except FileFormatError:
        raise
    except (SafetensorError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path} is damaged or not a file that lrrn wrote ({error})") from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise before any work is done if a file cannot be written there."""
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"cannot write {path}: the folder {folder} is read-only")


def to_dtype(name: str) -> torch.dtype:
    """Turn "float32" or "float64" into torch's dtype."""
    known = {"float32": torch.float32, "float64": torch.float64}
    if name not in known:
        raise ValueError(f"unknown dtype {name!r}; use one of {', '.join(known)}")
    return known[name]
