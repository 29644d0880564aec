"""Catalogue of named data sets and the locations of their files.

Missing files of the MNIST family and of CIFAR-10 are downloaded into the user's cache.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrrn.datasets import cifar
from lrrn.datasets.download import ARCHIVE, ARCHIVE_MD5, MD5, download_cifar, download_file
from lrrn.datasets.idx import read_idx
from lrrn.datasets.rows import DataError

FOLDERS = {"mnist": "MNIST", "kmnist": "KMNIST", "fashion_mnist": "FashionMNIST"}
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
NAMES = ("digits", *FOLDERS, cifar.NAME)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist."""
DEBIAN_MD5 = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
"""Digests of the uncompressed files of Fashion-MNIST: Debian's .gz files contain the date of the package."""
PREFIX = "train_7011"
"""The split of KMNIST with the first 7,011 training images."""
PREFIX_FOLDER = Path("KMNIST", "train_prefix_7011")
PREFIX_FILES = "images-idx3-ubyte", "labels-idx1-ubyte"


def load(
    name: str, split: str = "train", root: str | os.PathLike[str] | None = None, download: bool = True
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Load a data set by name.

    Parameters
    ----------
    name : {"digits", "mnist", "kmnist", "fashion_mnist", "cifar10"}
        "digits" is embedded in scikit-learn; its split is a fixed stratified quarter for testing. The MNIST family is read from
        idx files as torchvision stores them, such as ``root/MNIST/raw/train-images-idx3-ubyte.gz``. Compressed files must have
        the published MD5. Uncompressed ones may hold data of your own: only their header and size are checked. "cifar10" is
        read from the binary version, ``root/cifar-10-batches-bin/data_batch_1.bin`` and so on, or from the same folder in
        ``root/CIFAR10``. Its files must have the published MD5.
    split : {"train", "test", "train_7011"}, default="train"
        "train_7011" is for "kmnist" only: the first 7,011 training images, from ``root/KMNIST/train_prefix_7011``, for use if
        the full file is not available. It is never downloaded.
    root : path-like, optional
        Folder with the data; the environment variable LRRN_DATA if not given. Files that are not there are searched for in the
        user's cache, then, for "fashion_mnist", in the folder of Debian's package dataset-fashion-mnist.
    download : bool, default=True
        Whether to download missing files into the user's cache.

    Returns
    -------
    X : float32 array of shape (n_samples, n_features)
        Grey values in [0, 1]. For "cifar10" red, green and blue values, channels first: ``X[i].reshape(3, 32, 32)``.
    y : int64 array of shape (n_samples,)
    """
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}; use one of {', '.join(NAMES)}")
    splits = (*FILES, PREFIX) if name == "kmnist" else tuple(FILES)
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; use one of {', '.join(splits)}")
    if name == "digits":
        return _digits(split)
    if name == cifar.NAME:
        return cifar.read_files(_obtain_cifar(split, root, download))
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
    """List the available data sets without reading or downloading anything.

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
    found[cifar.NAME] = {}
    for split in cifar.FILES:
        paths = cifar.find_files(cifar.places(roots), split)
        found[cifar.NAME][split] = paths[0] if None not in paths else None
    return found


def image_shape(name: str, n_features: int) -> tuple[int, int, int]:
    """Return channels, height and width of the images of a data set: those of CIFAR-10 are in colour, others grey and square.

    Parameters
    ----------
    name : str
    n_features : int
        Number of features. Files of the MNIST format may hold images of any size.
    """
    if name == cifar.NAME:
        return cifar.SHAPE
    side = round(n_features**0.5)
    return 1, side, side


def _digits(split: str) -> tuple[NDArray[Any], NDArray[Any]]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    X, y = load_digits(return_X_y=True)
    train_X, test_X, train_y, test_y = train_test_split(X / 16, y, test_size=0.25, stratify=y, random_state=0)
    chosen = (train_X, train_y) if split == "train" else (test_X, test_y)
    return chosen[0].astype(np.float32), chosen[1].astype(np.int64)


def _roots(root: str | os.PathLike[str] | None) -> list[Path]:
    """Return the folders to search: the user's, if there is one, then the cache."""
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
    """Return the path of a file, after downloading it if necessary and checking its digest if it is compressed."""
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
    return download_file(name, file, folders[-1], advice)


def _obtain_cifar(split: str, root: str | os.PathLike[str] | None, download: bool) -> list[Path]:
    """Return the paths of the files of CIFAR-10, after downloading them if one is missing."""
    roots = _roots(root)
    folders = cifar.places(roots)
    paths = cifar.find_files(folders, split)
    if None in paths:
        missing = cifar.FILES[split][paths.index(None)]
        advice = f"unpack {ARCHIVE} (MD5 {ARCHIVE_MD5}) in {roots[0]}, or set LRRN_DATA to where the folder {cifar.FOLDER} is"
        if not download:
            raise DataError(f"there is no {missing} in {' or '.join(map(str, folders))}; allow the download, or {advice}")
        download_cifar(roots[-1] / cifar.FOLDER, advice)
        paths = cifar.find_files(folders, split)
    return [path for path in paths if path is not None]


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
