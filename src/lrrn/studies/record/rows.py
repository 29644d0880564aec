"""Rows of the record: classifier, data set and seed; and the images for training and measurement."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lrrn import datasets
from lrrn.network import Conv
from lrrn.persistence.values import plain
from lrrn.studies.common.runs import load_test, load_training
from lrrn.studies.record.baselines.learners import LEARNERS
from lrrn.studies.record.data import NAMES
from lrrn.studies.record.recipes import OURS, Recipe, recipe, rows_of

Array = NDArray[Any]
VALIDATION_SHARE = 6
"""The last 1 / ``VALIDATION_SHARE`` of the training images is the validation split, used to choose recipes."""


@final
@dataclass(frozen=True)
class Extent:
    """Which images to use.

    Attributes
    ----------
    validation : bool
        Whether to measure on held-out training images instead of test images. Test images are then not loaded.
    samples, tests : int or None
        Number of images to train and to measure on, counted from the first; all if None.
    quick : bool
        Whether to use the small networks of a smoke test.
    """

    validation: bool = False
    samples: int | None = None
    tests: int | None = None
    quick: bool = False


@final
@dataclass(frozen=True)
class Row:
    """One classifier to train and measure.

    Attributes
    ----------
    kind : str
        One of ``lrrn.studies.record.recipes.rows_of(data)``.
    data : str
        A key of ``lrrn.studies.record.data.NAMES``.
    seed : int
    extent : Extent
    """

    kind: str
    data: str
    seed: int = 0
    extent: Extent = Extent()

    @property
    def recipe(self) -> Recipe:
        """Hyper-parameters of the training."""
        return recipe(self.data, self.kind, self.extent.quick)

    @property
    def is_ours(self) -> bool:
        """Whether it is a network of this library."""
        return self.kind in OURS

    @property
    def title(self) -> str:
        """Name in tables."""
        if not self.is_ours:
            return LEARNERS[self.kind].title
        hidden = [_told(layer) for layer in self.recipe["hidden_sizes"]]
        convolves = any(isinstance(layer, Conv) for layer in self.recipe["hidden_sizes"])
        shape = self.recipe["image_shape"] if convolves else (3072 if self.data == datasets.cifar.NAME else 784,)
        return f"lrrn {self.kind} ({'-'.join(['x'.join(map(str, shape)), *hidden, '10'])})"

    @property
    def name(self) -> str:
        """Unique name, which depends on the recipe too; the name of its folder."""
        extent = self.extent
        identity = [self.recipe, extent.validation, extent.samples, extent.tests]
        text = json.dumps(identity, sort_keys=True, default=plain)  # convolutions as in the files of models
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        return "-".join([self.data, self.kind, *(["validation"] if extent.validation else []), digest, f"seed{self.seed}"])

    @property
    def epochs(self) -> int:
        """Number of training epochs; 1 for classifiers that have none."""
        return int(self.recipe.get("epochs", 1))

    def obstacle(self) -> str | None:
        """Return why it cannot be trained on this machine, or None."""
        return None if self.is_ours else LEARNERS[self.kind].obstacle()


def _told(layer: int | Conv) -> str:
    """Return the width of a layer, or the kernels of a convolution: 512c8s4 has 512 of 8 x 8 at stride 4."""
    if not isinstance(layer, Conv):
        return str(layer)
    more = (("s", layer.stride, 1), ("p", layer.padding, 0), ("a", layer.pool, 1))
    return f"{layer.channels}c{layer.kernel}" + "".join(f"{name}{value}" for name, value, usual in more if value != usual)


def plan(data: str, chosen: Sequence[str] | None, seeds: int, first_seed: int, extent: Extent) -> list[Row]:
    """Return the rows of a data set.

    Parameters
    ----------
    data : str
    chosen : sequence of str, optional
        Kinds of rows, or single ones such as "wide:1"; all of them if not given.
    seeds : int
        Number of seeds for rows that depend on the seed.
    first_seed : int
        The first of them.
    extent : Extent
    """
    if data not in NAMES:
        raise ValueError(f"there is no record on {data!r}; use one of {', '.join(NAMES)}")
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1; got {seeds}")
    known_rows = rows_of(data)
    wanted: dict[str, set[int] | None] = {}
    for item in chosen or known_rows:
        kind, colon, number = item.partition(":")
        if kind not in known_rows or (colon and not (number.isdigit() and int(number) < seeds)):
            raise ValueError(
                f"there is no row {item!r}; use some of {', '.join(known_rows)}, or one seed of a row such as wide:0 "
                f"(below {seeds})"
            )
        known = wanted.setdefault(kind, set() if colon else None)
        if known is not None and colon:
            known.add(int(number))
        else:
            wanted[kind] = None
    rows = []
    for kind in (kind for kind in known_rows if kind in wanted):
        numbers = range(seeds if kind in OURS or LEARNERS[kind].random else 1)
        only = wanted[kind]
        rows += [Row(kind, data, first_seed + k, extent) for k in numbers if only is None or k in only]
    return rows


def images(data: str, extent: Extent, root: Path | None, download: bool) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Load the images that rows are trained on and those they are measured on."""
    X, y = load_training(data, root, download)
    if extent.validation:
        kept = len(X) - len(X) // VALIDATION_SHARE
        (X, y), held = (X[:kept], y[:kept]), (X[kept:], y[kept:])
    else:
        held = load_test(data, root, download)
    (X, y), (X_test, y_test) = (
        tuple(part[:n] for part in pair) for pair, n in (((X, y), extent.samples), (held, extent.tests))
    )
    present = np.unique(y)
    if not np.array_equal(present, np.arange(len(present))) or not np.isin(y_test, present).all():
        raise datasets.DataError(f"labels of {data} should be 0, 1, ... with none left out; got {present.tolist()}")
    return (X, y), (X_test, y_test)
