"""Download files of the MNIST family and the archive of CIFAR-10: digests, mirrors and the download itself.

A pooch.Pooch registry has one URL per file. Several mirrors would need one registry each, which would not shorten the code.
"""

from __future__ import annotations

import logging
import os
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from lrrn.datasets import cifar
from lrrn.datasets.rows import DataError

logger = logging.getLogger("lrrn.datasets")

MD5 = {
    "mnist": {
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    "kmnist": {
        "train-images-idx3-ubyte": "bdb82020997e1d708af4cf47b453dcf7",
        "train-labels-idx1-ubyte": "e144d726b3acfaa3e44228e80efcd344",
        "t10k-images-idx3-ubyte": "5c965bf0a639b31b8f53240b1b52f4d7",
        "t10k-labels-idx1-ubyte": "7320c461ea6c1c855c0b718fb2a4b134",
    },
    "fashion_mnist": {
        "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
    },
}
"""Published MD5 digests of the compressed files."""
MIRRORS = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "kmnist": ("https://codh.rois.ac.jp/kmnist/dataset/kmnist/", "http://codh.rois.ac.jp/kmnist/dataset/kmnist/"),
    "fashion_mnist": (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
}
ARCHIVE, ARCHIVE_MD5 = "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
"""File with the binary version of CIFAR-10, and its published MD5."""
ARCHIVE_MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
TIMEOUT = 20
"""Timeout of a mirror in seconds."""


def download_file(name: str, file: str, folder: Path, advice: str) -> Path:
    """Download a file of the MNIST family into a folder."""
    return _download(name, f"{file}.gz", MD5[name][file], MIRRORS[name], folder, advice)


def download_cifar(folder: Path, advice: str) -> None:
    """Download the archive of CIFAR-10 and unpack its binary files into a folder; files that exist there are replaced.

    The archive is deleted afterwards. A file appears in the folder only when it is complete.
    """
    path = _download(cifar.NAME, ARCHIVE, ARCHIVE_MD5, ARCHIVE_MIRRORS, folder, advice)
    try:
        with tarfile.open(path) as archive, tempfile.TemporaryDirectory(dir=folder) as unpacked:
            for file in cifar.MD5:
                archive.extract(f"{cifar.FOLDER}/{file}", unpacked, filter="data")
                os.replace(Path(unpacked) / cifar.FOLDER / file, folder / file)
    except (OSError, tarfile.TarError, LookupError, EOFError, zlib.error) as error:
        raise DataError(f"{path} could not be unpacked ({error}); remove it, or {advice}") from error
    path.unlink()


def _download(name: str, file: str, digest: str, mirrors: Sequence[str], folder: Path, advice: str) -> Path:
    """Try each mirror in turn. A file appears in the folder only when it is complete: pooch verifies it, then renames it."""
    try:
        import pooch
    except ImportError as error:
        raise DataError(f"downloading {file} of {name} needs pooch: install it; or {advice}") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DataError(
            f"{file} of {name} could not be downloaded into {folder}, which cannot be written ({error.strerror}); {advice}"
        ) from error
    failures = []
    level = pooch.get_logger().level
    pooch.get_logger().setLevel(logging.WARNING)  # it would log every mirror to standard error
    try:
        for mirror in mirrors:
            try:
                with closing(_DownloadBar(f"{name} {file.removesuffix('.gz')}")) as bar:
                    pooch.retrieve(
                        f"{mirror}{file}",
                        known_hash=f"md5:{digest}",
                        fname=file,
                        path=folder,
                        downloader=pooch.HTTPDownloader(progressbar=bar, chunk_size=2**16, timeout=TIMEOUT),
                    )
                return folder / file
            except (OSError, ValueError) as error:  # errors of requests are OSErrors, a wrong digest is a ValueError
                failures.append(f"{mirror} ({_reason(error)})")
    finally:
        pooch.get_logger().setLevel(level)
    raise DataError(
        f"{file} of {name} could not be downloaded into {folder} from {', '.join(failures) or 'anywhere'}; {advice}"
    )


def _reason(error: Exception) -> str:
    """Return a short reason why a download failed; the messages of requests are long."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"{response.status_code} {response.reason}"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "a file with another MD5"


@final
class _DownloadBar:
    """Progress bar with the interface that pooch requires; shows nothing unless standard error is a terminal."""

    def __init__(self, label: str) -> None:
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TextColumn("left"), TimeRemainingColumn()
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(label, total=None)
        self.total = 0
        self._bar.start()

    def update(self, size: int) -> None:
        """Count bytes."""
        self._bar.update(self._task, total=self.total or None, advance=size)

    def reset(self) -> None:
        """Count from 0 again."""
        self._bar.reset(self._task)

    def close(self) -> None:
        """Stop drawing."""
        self._bar.stop()
