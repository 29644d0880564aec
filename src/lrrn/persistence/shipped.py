"""Models that ship with the package or the repository, by name: an index with digests, weights, cards and published radii.

This is the only module that turns a name into a file. A file that exists wins over a name.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

from lrrn.runtime import storage

VARIABLE = "LRRN_MODELS"
"""Environment variable with another folder of models."""
INDEX = "index.json"
_PACKAGE = Path(__file__).resolve().parents[1]
_WHEEL, _CHECKOUT = _PACKAGE / "shipped_models", _PACKAGE.parents[1] / "models"
"""Where an installed wheel has its models, and where a checkout has them, which an editable installation uses."""


@final
@dataclass(frozen=True)
class Shipped:
    """A model of the index.

    Attributes
    ----------
    name : str
    file, sha256 : str
        File of the weights, in the folder of the index, and its digest.
    radii, radii_sha256 : str
        File of the published radii, and its digest.
    data : str
        Data set whose test images the radii are of.
    row, seed : str, int
        Row of the record.
    method, guarantee : str
        Those of the published radii, as in :func:`lrrn.certify`.
    accuracy : float
        Share of test images with the right label.
    certified : dict of str to float
        Certified accuracy by size of the perturbation.
    folder : Path
        Folder of the index.
    """

    name: str
    file: str
    sha256: str
    radii: str
    radii_sha256: str
    data: str
    row: str
    seed: int
    method: str
    guarantee: str
    accuracy: float
    certified: dict[str, float]
    folder: Path

    @property
    def weights_path(self) -> Path:
        """File of the weights."""
        return self.folder / self.file

    @property
    def radii_path(self) -> Path:
        """File of the published radii."""
        return self.folder / self.radii

    def as_json(self) -> dict[str, Any]:
        """Return the entry of the index."""
        return {key: value for key, value in asdict(self).items() if key != "folder"}


def folder() -> Path:
    """Return the folder of shipped models: that of ``LRRN_MODELS``, the wheel's or the checkout's."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    return _WHEEL if (_WHEEL / INDEX).is_file() else _CHECKOUT


def shipped_models(where: Path | None = None) -> dict[str, Shipped]:
    """Read the index of shipped models, by name; empty if there is none.

    Parameters
    ----------
    where : Path, optional
        Folder of the index; by default that of :func:`folder`.

    Raises
    ------
    FileFormatError
        The index is damaged.
    """
    where = folder() if where is None else where
    path = where / INDEX
    if not path.is_file():
        return {}
    names = {field.name for field in fields(Shipped)} - {"folder"}
    try:
        entries = [Shipped(**{name: entry[name] for name in names}, folder=where) for entry in json.loads(path.read_text())]
    except (KeyError, TypeError, ValueError) as error:
        raise storage.FileFormatError(f"{path} is damaged ({error!r}); restore it from a copy") from error
    return {entry.name: entry for entry in entries}


def shipped_model(name: str) -> Shipped:
    """Return the model of a name; raises ValueError, with all names, if there is none."""
    known = shipped_models()
    if name not in known:
        raise ValueError(f"no shipped model is called {name!r}; {_names(known)}")
    return known[name]


def located(path: str | os.PathLike[str]) -> Path:
    """Return the file of a model, given as a path or a name; the digest of a shipped file is checked.

    Raises
    ------
    FileNotFoundError
        Neither a file nor a shipped model; the message lists the names.
    IsADirectoryError
        A folder, and no shipped model.
    FileFormatError
        A shipped file does not have the digest of the index; the message has both.
    """
    try:
        storage.check_readable(path)
        return Path(path)
    except FileNotFoundError:
        known = shipped_models()
        if os.fspath(path) not in known:
            if os.path.isdir(path):
                raise IsADirectoryError(f"{path} is a folder, not a model file; name a file in it") from None
            raise FileNotFoundError(f"no file {path}; {_names(known)}") from None
    model = known[os.fspath(path)]
    check_digest(model.weights_path, model.sha256)
    return model.weights_path


def _names(known: dict[str, Shipped]) -> str:
    return f"models by name: {', '.join(sorted(known))}" if known else "no models are shipped here"


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    storage.check_readable(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_digest(path: Path, expected: str) -> None:
    """Raise FileFormatError if a shipped file is missing or differs from what was published."""
    try:
        found = digest(path)
    except FileNotFoundError:
        raise storage.FileFormatError(
            f"{path} is not here, although the index lists it: larger models are in the repository only; "
            f"set {VARIABLE} to its folder models"
        ) from None
    if found != expected:
        raise storage.FileFormatError(f"{path} has SHA-256 {found} and {expected} was published; restore it from a copy")
