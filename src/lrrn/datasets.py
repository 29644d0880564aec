"""Data sets: scikit-learn's digits, the MNIST family from idx files in torchvision's folder layout, and users' own tables.

Files of the MNIST family that are nowhere at hand are downloaded into the user's cache.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import logging
import math
import os
import struct
import tempfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from lrrn.rows import ArrayRows, Rows, open_npy, open_npz, open_parquet, unreadable
from lrrn.rows import DataError as DataError
from lrrn.rows.files import DEFLATED

logger = logging.getLogger("lrrn.datasets")

FOLDERS = {"mnist": "MNIST", "kmnist": "KMNIST", "fashion_mnist": "FashionMNIST"}
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
NAMES = ("digits", *FOLDERS)
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
"""Published digests of the compressed files."""
MIRRORS = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "kmnist": ("https://codh.rois.ac.jp/kmnist/dataset/kmnist/", "http://codh.rois.ac.jp/kmnist/dataset/kmnist/"),
    "fashion_mnist": (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
}
TIMEOUT = 20
"""Seconds a mirror may stay silent."""
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""
DEBIAN_MD5 = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
"""Digests of Fashion-MNIST uncompressed: Debian stamps its .gz files with the date of the package."""
PREFIX = "train_7011"
"""The split of KMNIST with the first 7,011 training images."""
PREFIX_FOLDER = Path("KMNIST", "train_prefix_7011")
TABLES = (".npz", ".npy", ".parquet", ".csv")
"""Endings of the files that :func:`open_table` reads."""
PREFIX_FILES = "images-idx3-ubyte", "labels-idx1-ubyte"
MAX_BYTES = 2**31
"""Largest array that an idx file may announce, or that labels may take."""


def load(
    name: str, split: str = "train", root: str | os.PathLike[str] | None = None, download: bool = True
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Load a data set.

    Parameters
    ----------
    name : {"digits", "mnist", "kmnist", "fashion_mnist"}
        "digits" is embedded in scikit-learn; its split is a fixed stratified quarter for testing. The others are read from idx
        files as torchvision stores them, such as ``root/MNIST/raw/train-images-idx3-ubyte.gz``. Compressed files must have the
        published MD5. Uncompressed ones may hold data of your own: only their header and size are checked.
    split : {"train", "test", "train_7011"}, default="train"
        "train_7011" is for "kmnist" only: the first 7,011 training images, from ``root/KMNIST/train_prefix_7011``, for where
        the full file cannot be had. It is never downloaded.
    root : path-like, optional
        Folder with the data; the environment variable LRRN_DATA if not given. Files that are not there are looked for in the
        user's cache, then, for "fashion_mnist", where Debian's package dataset-fashion-mnist puts them.
    download : bool, default=True
        Whether to download files that are nowhere to be found, into the user's cache.

    Returns
    -------
    X : float32 array of shape (n_samples, n_features)
        Grey values in [0, 1].
    y : int64 array of shape (n_samples,)
    """
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}; use one of {', '.join(NAMES)}")
    splits = (*FILES, PREFIX) if name == "kmnist" else tuple(FILES)
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; use one of {', '.join(splits)}")
    if name == "digits":
        return _digits(split)
    paths = _prefix(root) if split == PREFIX else [_obtain(name, file, root, download) for file in FILES[split]]
    images, labels = (read_idx(path) for path in paths)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"{paths[0]} and {paths[1]}: images of shape {images.shape} do not go with labels of shape {labels.shape}"
        )
    if split == PREFIX and len(images) != 7011:
        raise DataError(f"{paths[0]} should hold 7011 images and holds {len(images)}")
    return (images.reshape(len(images), -1) / np.float32(255)).astype(np.float32, copy=False), labels.astype(np.int64)


def find(root: str | os.PathLike[str] | None = None) -> dict[str, dict[str, Path | None]]:
    """Say what is at hand without reading or downloading anything.

    Parameters
    ----------
    root : path-like, optional
        As in :func:`load`.

    Returns
    -------
    dict of str to dict of str to Path or None
        For every data set but the embedded one and each of its splits, where :func:`load` would find the images; None if images
        or labels are missing. Files are checked only when they are loaded.
    """
    roots = _roots(root)
    found: dict[str, dict[str, Path | None]] = {}
    for name in FOLDERS:
        places = _places(name, roots)
        found[name] = {}
        for split, files in FILES.items():
            paths = [_existing(places, file) for file in files]
            found[name][split] = paths[0] if None not in paths else None
        if name == "kmnist":
            paths = [_existing([base / PREFIX_FOLDER for base in roots], file) for file in PREFIX_FILES]
            found[name][PREFIX] = paths[0] if None not in paths else None
    return found


def _digits(split: str) -> tuple[NDArray[Any], NDArray[Any]]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    X, y = load_digits(return_X_y=True)
    train_X, test_X, train_y, test_y = train_test_split(X / 16, y, test_size=0.25, stratify=y, random_state=0)
    chosen = (train_X, train_y) if split == "train" else (test_X, test_y)
    return chosen[0].astype(np.float32), chosen[1].astype(np.int64)


def _roots(root: str | os.PathLike[str] | None) -> list[Path]:
    """Return the folders to look into: the user's, if there is one, and last the cache."""
    base = root if root is not None else os.environ.get("LRRN_DATA") or None
    try:
        import pooch

        cache = Path(pooch.os_cache("lrrn"))
    except ImportError:
        cache = Path(os.path.expanduser("~/.cache/lrrn"))
    return [cache] if base is None else [Path(base), cache]


def _places(name: str, roots: list[Path]) -> list[Path]:
    """Return the folders that files of a data set may be in."""
    folders = [base / FOLDERS[name] / "raw" for base in roots]
    return [*folders, DEBIAN] if name == "fashion_mnist" else folders


def _existing(folders: list[Path], file: str) -> Path | None:
    candidates = (folder / f"{file}{suffix}" for folder in folders for suffix in ("", ".gz"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _prefix(root: str | os.PathLike[str] | None) -> list[Path]:
    folders = [base / PREFIX_FOLDER for base in _roots(root)]
    paths = [path for file in PREFIX_FILES if (path := _existing(folders, file)) is not None]
    if len(paths) < len(PREFIX_FILES):
        raise DataError(
            f"split {PREFIX!r} is never downloaded, and {' and '.join(PREFIX_FILES)} (or .gz) are not in "
            f"{' or '.join(map(str, folders))}; put them there"
        )
    return paths


def _obtain(name: str, file: str, root: str | os.PathLike[str] | None, download: bool) -> Path:
    """Return where a file is, after downloading it if need be and checking its digest if it is compressed."""
    roots = _roots(root)
    folders, places = [base / FOLDERS[name] / "raw" for base in roots], _places(name, roots)
    path = _existing(places, file)
    if path is not None:
        if path.suffix == ".gz":
            _check_digest(path, name, file)
        return path
    advice = f"put {file}.gz (MD5 {MD5[name][file]}) into {folders[0]}, or set LRRN_DATA to where {FOLDERS[name]}/raw is"
    if name == "kmnist" and file in FILES["train"] and any((base / PREFIX_FOLDER).is_dir() for base in roots):
        advice += f"; the first 7,011 training images are at hand as split {PREFIX!r}"
    if not download:
        raise DataError(
            f"there is neither {file} nor {file}.gz in {' or '.join(map(str, places))}; allow the download, or {advice}"
        )
    return _download(name, file, folders[-1], advice)


def _check_digest(path: Path, name: str, file: str) -> None:
    packaged = path.parent == DEBIAN
    expected = DEBIAN_MD5[file] if packaged else MD5[name][file]
    try:
        with gzip.open(path) if packaged else path.open("rb") as stream:
            found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except (EOFError, zlib.error, gzip.BadGzipFile):
        found = "none, being no whole gzip file"
    if found != expected:
        raise DataError(
            f"{path} should have MD5 {expected}{' uncompressed' * packaged} and has {found}: it is damaged or another file; "
            "replace it, or remove it to have it downloaded (your own data are read uncompressed)"
        )


def _download(name: str, file: str, folder: Path, advice: str) -> Path:
    """Try each mirror in turn. A file appears in the folder only when it is whole: pooch renames it after checking it."""
    try:
        import pooch
    except ImportError as error:
        raise DataError(f"downloading {file}.gz of {name} needs pooch: install it; or {advice}") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DataError(
            f"{file}.gz of {name} could not be downloaded into {folder}, which cannot be written ({error.strerror}); {advice}"
        ) from error
    failures = []
    level = pooch.get_logger().level
    pooch.get_logger().setLevel(logging.WARNING)  # it would announce every mirror on standard error
    try:
        for mirror in MIRRORS[name]:
            try:
                with _DownloadBar(f"{name} {file}") as bar:
                    pooch.retrieve(
                        f"{mirror}{file}.gz",
                        known_hash=f"md5:{MD5[name][file]}",
                        fname=f"{file}.gz",
                        path=folder,
                        downloader=pooch.HTTPDownloader(progressbar=bar, chunk_size=2**16, timeout=TIMEOUT),
                    )
                return folder / f"{file}.gz"
            except (OSError, ValueError) as error:  # requests' own errors are OSErrors, another digest is a ValueError
                logger.info("%s%s.gz: %s", mirror, file, error)
                failures.append(f"{mirror} ({_reason(error)})")
    finally:
        pooch.get_logger().setLevel(level)
    raise DataError(
        f"{file}.gz of {name} could not be downloaded into {folder} from {', '.join(failures) or 'anywhere'}; {advice}"
    )


def _reason(error: Exception) -> str:
    """Say in a few words why a download failed, for which requests takes a paragraph."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"{response.status_code} {response.reason}"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "a file with another MD5"


@final
class _DownloadBar:
    """The progress bar pooch asks for; shows nothing unless standard error is a terminal."""

    def __init__(self, label: str) -> None:
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TextColumn("left"), TimeRemainingColumn()
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(label, total=None)
        self.total = 0

    def update(self, size: int) -> None:
        """Count bytes."""
        self._bar.update(self._task, total=self.total or None, advance=size)

    def reset(self) -> None:
        """Count from 0 again."""
        self._bar.reset(self._task)

    def close(self) -> None:
        """Stop drawing."""
        self._bar.stop()

    def __enter__(self) -> _DownloadBar:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_idx(path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """Read an idx file of bytes, gzip-compressed or not.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    uint8 array

    Raises
    ------
    DataError
        The file is missing, cannot be read or is damaged.
    """
    path = Path(path)
    _check_there(path)
    packed = path.suffix == ".gz"
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] != 8 or not 1 <= head[3] <= 4:
                raise DataError(f"{path} is not an idx file of bytes: it begins with {head!r}")
            n_axes = head[3]
            sizes = file.read(4 * n_axes)
            if len(sizes) < 4 * n_axes:
                raise DataError(f"{path} is truncated: its header ends after {4 + len(sizes)} bytes; fetch it again")
            shape = struct.unpack(f">{n_axes}I", sizes)
            expected = math.prod(shape)
            # reading takes memory for all it is asked for, so what is announced is checked first
            most = min(MAX_BYTES, DEFLATED * path.stat().st_size) if packed else MAX_BYTES
            room = math.prod(max(size, 1) for size in shape)  # NumPy has none for 0 x 10^19 bytes either
            if expected > most or room > MAX_BYTES:
                raise DataError(f"{path} announces {room} bytes, more than {most}; it is damaged: fetch it again")
            there = expected if packed else path.stat().st_size - 4 - len(sizes)
            content = file.read(min(expected, there) + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}); fetch it again") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) != expected:
        more = "more" if len(content) > expected else f"only {len(content)}"
        raise DataError(f"{path} should hold {expected} bytes after its header and holds {more}; fetch it again")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _check_there(path: Path) -> None:
    try:
        there = os.path.isfile(path)
    except ValueError:  # a name that no file can have
        there = False
    if not there:
        raise DataError(f"there is no file {path}")


def open_table(path: str | os.PathLike[str], target: str | None = None) -> Rows:
    """Open a table of features and, where there are any, targets, to be read a few rows at a time.

    Parameters
    ----------
    path : path-like
        A ``.npz`` file with arrays "X" and, optionally, "y"; a ``.npy`` file with features alone; a ``.parquet`` file (needs
        pyarrow); or a ``.csv`` file, with or without a line of column names, which is read into memory at once.
    target : str, optional
        For ``.csv`` and ``.parquet``: name of the column that holds the target, or, for ``.csv``, its number, counted from 0;
        the last column if not given. For ``.npy``: another ``.npy`` file with the targets. "none" if there is none.

    Returns
    -------
    Rows
    """
    path = Path(path)
    if path.suffix not in TABLES:
        kinds = f"{', '.join(TABLES[:-1])} or {TABLES[-1]}"
        raise DataError(f"{path}: tables are read from {kinds} files, not from {path.suffix or 'one without a suffix'!r}")
    _check_there(path)
    return dict(zip(TABLES, (open_npz, open_npy, open_parquet, _open_csv), strict=True))[path.suffix](path, target)


def read_table(path: str | os.PathLike[str], target: str | None = None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Read a table of features and, where there are any, targets into memory.

    Parameters
    ----------
    path, target
        As for :func:`open_table`.

    Returns
    -------
    X : float64 or float32 array of shape (n_samples, n_features)
    y : array of shape (n_samples,) or, in ``.npz`` files, (n_samples, n_targets), or None
        Integers where all targets are, otherwise numbers, otherwise strings.

    Raises
    ------
    DataError
        The file is missing, cannot be read, is damaged, or does not hold such a table. Nothing in it is ever executed, and no
        memory is taken for more than it holds.
    """
    return open_table(path, target).everything()


def _open_csv(path: Path, target: str | None) -> Rows:
    return ArrayRows(*_read_csv(path, target), str(path))


def _read_csv(path: Path, target: str | None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [(number, row) for number, row in enumerate(csv.reader(file), 1) if row]
    except OSError as error:
        raise unreadable(path, error) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a .csv file ({error}); save it as text in UTF-8") from error
    if not rows:
        raise DataError(f"{path} is empty")
    width = len(rows[0][1])
    for number, row in rows:
        if len(row) != width:
            raise DataError(f"{path}, line {number}: {len(row)} columns where line {rows[0][0]} has {width}")
    names = rows[0][1]
    column = _target_column(path, names, target)
    features = [j for j in range(width) if j != column]
    has_names = not all(_is_number(names[j]) for j in features)
    table = np.empty((len(rows) - has_names, len(features)))
    for i, (number, row) in enumerate(rows[has_names:]):
        for k, j in enumerate(features):
            if not _is_number(row[j]):
                name = names[j] if has_names else j
                raise DataError(f"{path}, line {number}: column {name!r} holds {row[j]!r}, which is no number; encode it first")
            table[i, k] = float(row[j])
    return table, None if column is None else _plainest(path, [row[column] for _, row in rows[has_names:]])


def _target_column(path: Path, names: list[str], target: str | None) -> int | None:
    if target == "none":
        return None
    if target is None:
        return len(names) - 1
    if target in names and not _is_number(target):
        return names.index(target)
    if target.isdecimal() and len(target) < 10 and int(target) < len(names):
        return int(target)
    raise DataError(f"{path} has no column {target!r}; its first line is {', '.join(names)}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _plainest(path: Path, values: list[str]) -> NDArray[Any]:
    """Return integers if all are, otherwise numbers if all are, otherwise strings."""
    for kind in (np.int64, np.float64):
        try:
            return np.array(values, dtype=kind)
        except (ValueError, OverflowError):
            continue
    longest = max(map(len, values))
    if 4 * longest * len(values) > MAX_BYTES:  # an array has room for the longest of them in every place
        raise DataError(f"{path}: a target of {longest} characters is no label; name the column that holds targets")
    return np.array(values)
