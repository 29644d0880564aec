"""Files: safetensors with a JSON header, written atomically; reading never executes code."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
"""Version of the layout of all files this package writes."""
_KEY = "lrrn"


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space there, or choose another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a folder that can be written, or change its permissions"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "make its folder first"),
    errno.EISDIR: "name a file, not a folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}


class FileFormatError(ValueError):
    """A file is truncated, not a file of this package, or written by a newer release."""


class WriteError(OSError):
    """A file could not be written; an existing file is unchanged."""


def write(path: str | os.PathLike[str], kind: str, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write tensors and a header atomically: the file is either the old or the new one, never a partial one.

    ``kind`` is checked when the file is read. The header may be any value that JSON can represent.
    """
    import torch  # here, so that the command line checks paths without it
    from safetensors.torch import save

    envelope = {"kind": kind, "version": VERSION, "header": header}
    contiguous = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    write_bytes(path, save(contiguous, metadata={_KEY: json.dumps(envelope)}))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically: write a temporary file beside it, flush it to disk, rename it. Write special files directly.

    A :class:`WriteError`, for example on a full disk, leaves an existing file unchanged.
    """
    target, part = _behind_links(path), None
    try:
        if _is_special(path):
            with open(path, "ab") as file:
                file.write(content)
            return
        handle, part = tempfile.mkstemp(dir=target.parent, prefix=_prefix(target), suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, target)
        part = None
    except OSError as error:
        raise write_error(path, error, len(content)) from error
    finally:
        if part is not None:
            Path(part).unlink(missing_ok=True)


def _behind_links(path: str | os.PathLike[str]) -> Path:
    """Resolve symbolic links, so that links are preserved and the temporary file is on the same disk."""
    return Path(os.path.realpath(path))


def _is_special(path: str | os.PathLike[str]) -> bool:
    """Whether this is a device, a pipe, or standard output (which may be redirected to a file): they are never replaced."""
    stream = os.path.abspath(path).startswith(("/dev/stdout", "/dev/stderr", "/dev/fd/"))
    return os.path.exists(path) and (stream or not (os.path.isfile(path) or os.path.isdir(path)))


def _prefix(target: Path) -> str:
    """Return the prefix of a file's temporary files, truncated if the name is long."""
    name = os.fsencode(target.name)
    if len(name) <= 200:
        return f".{target.name}."
    return f".{hashlib.blake2b(name, digest_size=16).hexdigest()}."


def write_error(path: str | os.PathLike[str], error: OSError, size: int | None = None) -> WriteError:
    """Return the error to raise when writing a file failed: it states the file, the reason and advice."""
    needed = "" if size is None else f" ({size} bytes to write)"
    remedy = _REMEDIES.get(error.errno or 0, "choose another place")
    intact = "; what the file held before is intact" if os.path.isfile(path) else ""
    told = WriteError(f"cannot write {path}: {error.strerror or error}{needed}; {remedy}{intact}")
    told.errno = error.errno
    return told


def clear_remains(path: str | os.PathLike[str]) -> None:
    """Remove temporary files of processes that were killed while writing this file."""
    target = _behind_links(path)
    for part in target.parent.glob(f"{glob.escape(_prefix(target))}*.part"):
        try:
            part.unlink(missing_ok=True)
        except OSError:  # harmless: writing will raise an error if the folder is read-only
            continue


def read(path: str | os.PathLike[str], *kinds: str) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Read a file written by :func:`write`; return its kind, its tensors and its header.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    FileFormatError
        It is truncated, damaged, not a file of this package, of another kind than ``kinds`` or of a newer release.
    OSError
        It cannot be read.
    """
    check_readable(path)
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
            # copy: a memory-mapped tensor would become invalid if the file is truncated
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
            return envelope["kind"], tensors, envelope["header"]
    except FileFormatError:
        raise
    except (SafetensorError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"{path} is damaged or not a file that lrrn wrote ({error}); restore it from a copy, or remove it and make it again"
        ) from error


def check_readable(path: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError or another OSError if a file cannot be read."""
    try:
        if os.path.isfile(path):
            with open(path, "rb"):
                return
    except ValueError:  # an invalid file name
        pass
    raise FileNotFoundError(f"no file {path}")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise an error if a file cannot be written; call it before long computations."""
    if "\0" in os.fspath(path):
        raise WriteError(f"cannot write {os.fspath(path)!r}: no file can have this name; choose another")
    if _is_special(path):
        return
    folder = _behind_links(path).parent
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"cannot write {path}: the folder {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"cannot write {path}: the folder {folder} is read-only; choose another")
    try:
        if os.path.isdir(path):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.path.lexists(path):
            _try_name(path)
        # permissions are not the only obstacle
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise write_error(path, error) from error


def _try_name(path: str | os.PathLike[str]) -> None:
    """Raise the OSError of an invalid file name; a missing file is not an error."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        pass


def fingerprint(*tensors: Tensor | None) -> str:
    """Return a hash of the shapes, dtypes and about a thousand rows of each tensor."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
            continue
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        rows = tensor.detach()[:: max(1, len(tensor) // 1000)]
        digest.update(rows.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
