"""What commands read: devices, numbers, shapes, data and saved models, checked before any work begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import typer

from lrrn.cli.options import METHODS, Kind
from lrrn.cli.output import errors_explained

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lrrn.datasets.rows import Rows
    from lrrn.estimators import LRRNClassifier
    from lrrn.reports.evaluation import Model

T = TypeVar("T")
MANY_CLASSES, FEW_ROWS = 20, 5
"""A target of more distinct numbers than this, with fewer rows for each than this on average, may well be a quantity."""


def device_name(name: str) -> str:
    """Return the name of a device that exists here; "auto" is replaced by what it stands for."""
    if name not in ("auto", "cpu") and not name.startswith("cuda"):  # without the import of torch, which takes seconds
        raise typer.BadParameter(f"unknown device {name!r}; use 'auto', 'cpu' or 'cuda'")
    from lrrn.runtime.devices import choose_device

    try:
        return str(choose_device(name))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def numbers(text: str, kind: Callable[[str], T], option: str) -> tuple[T, ...]:
    """Return the numbers of a text that separates them by commas."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} should be numbers separated by commas; got {text!r}") from None


def perturbation_sizes(eps: str | None) -> tuple[float, ...] | None:
    """Return the sizes that --eps names."""
    sizes = None if eps is None else numbers(eps, float, "--eps")
    if sizes is not None and not all(size >= 0 and math.isfinite(size) for size in sizes):
        raise typer.BadParameter(f"--eps needs finite sizes of at least 0; got {eps}")
    return sizes


def one_size(eps: str | None) -> float | None:
    """Return the size that --eps names where only one is possible."""
    sizes = perturbation_sizes(eps)
    if sizes is not None and (len(sizes) != 1 or sizes[0] == 0):
        raise typer.BadParameter(f"--eps should be one size above 0 here; got {eps}")
    return sizes[0] if sizes else None


def share_of(part: str | None) -> tuple[int, int]:
    """Return which share of the samples --part names, and of how many."""
    ends = ["1", "1"] if part is None else part.split("/")
    if not (len(ends) == 2 and all(end.isdecimal() and len(end) < 10 for end in ends) and 1 <= int(ends[0]) <= int(ends[1])):
        raise typer.BadParameter(f"--part should be a share such as 2/4, the second of four; got {part!r}")
    return int(ends[0]), int(ends[1])


def one_of(value: str, option: str, choices: Sequence[str]) -> str:
    """Return a value that must be one of several."""
    if value not in choices:
        raise typer.BadParameter(f"{option} should be one of {', '.join(choices)}; got {value!r}")
    return value


def method_name(method: str) -> str:
    """Return the method that --method names."""
    return one_of(method, "--method", METHODS)


def sides_of(image: str) -> tuple[int, ...]:
    """Return the shape that --image names: height and width, after a 3 if images are in colour."""
    parts = image.split("x")
    fine = len(image) < 20 and len(parts) in (2, 3) and all(part.isdecimal() and int(part) > 0 for part in parts)
    if not fine or (len(parts) == 3 and parts[0] not in ("1", "3")):
        raise typer.BadParameter(
            f"--image should be HEIGHTxWIDTH, such as 28x28, or 3xHEIGHTxWIDTH for colour, such as 3x32x32; got {image!r}"
        )
    sides = tuple(int(part) for part in parts)
    return sides[1:] if len(sides) == 3 and sides[0] == 1 else sides


def image_shape(data: str, image: str | None, n_features: int, of_model: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """Return the shape of samples that are images: the one given, the model's, or that of a named data set.

    Images that are neither grey nor in colour have none.
    """
    from lrrn import datasets

    if image is None:
        if of_model is None and data in datasets.NAMES:
            of_model = datasets.image_shape(data, n_features)
        return None if of_model is None else {1: tuple(of_model[1:]), 3: tuple(of_model)}.get(of_model[0])
    shape = sides_of(image)
    if of_model is not None and tuple(of_model) != (1, *shape)[-3:]:
        own = "x".join(map(str, of_model))
        raise typer.BadParameter(f"the model takes images of {own}, channels first, and --image is {image}; leave it out")
    if math.prod(shape) != n_features:
        raise typer.BadParameter(
            f"--image should be HEIGHTxWIDTH or 3xHEIGHTxWIDTH with {n_features} values in all; got {image!r}"
        )
    return shape


@final
@dataclass(frozen=True)
class DataSource:
    """A named data set or a file, and how to read it. What can be checked without reading it is checked at once.

    Attributes
    ----------
    data : str
        Name or file.
    split, root
        Of a named data set; the split is "test" if not given.
    target, drop, delimiter
        Of a file; see :func:`lrrn.datasets.open_table`.
    """

    data: str
    split: str | None = None
    root: Path | None = None
    target: str | None = None
    drop: Sequence[str] | None = None
    delimiter: str | None = None

    def __post_init__(self) -> None:
        from lrrn import datasets
        from lrrn.datasets.idx import check_there
        from lrrn.datasets.tables import check_delimiter

        if self.data in datasets.NAMES:
            for option, given in (("--target", self.target), ("--drop", self.drop), ("--delimiter", self.delimiter)):
                if given:
                    raise typer.BadParameter(f"{option} is for tables in files; {self.data} is a named data set")
            known = (*datasets.FILES, datasets.PREFIX) if self.data == "kmnist" else tuple(datasets.FILES)
            one_of(self._split, "--split", known)
            return
        if Path(self.data).suffix.lower() not in datasets.TABLES:
            kinds = f"{', '.join(datasets.TABLES[:-1])} or {datasets.TABLES[-1]}"
            raise typer.BadParameter(f"unknown data {self.data!r}; use one of {', '.join(datasets.NAMES)}, or a {kinds} file")
        if self.split is not None:
            raise typer.BadParameter(f"--split is for named data sets; {self.data} is a file")
        try:
            check_delimiter(self._character)
        except datasets.DataError as error:
            raise typer.BadParameter(f"--delimiter: {error}") from None
        with errors_explained():
            check_there(Path(self.data))

    @property
    def is_named(self) -> bool:
        """Whether this is a named data set, not a file."""
        from lrrn import datasets

        return self.data in datasets.NAMES

    @property
    def _split(self) -> str:
        return "test" if self.split is None else self.split

    @property
    def _character(self) -> str | None:
        return "\t" if self.delimiter in ("tab", "\\t") else self.delimiter

    def open(self, features: Sequence[str] | int | None = None) -> Rows:
        """Open the data, with the features that a model was trained on if they are given."""
        from lrrn import datasets
        from lrrn.datasets.rows import ArrayRows

        if self.is_named:
            return ArrayRows(*datasets.load(self.data, self._split, self.root), self.data)
        options: dict[str, Any] = {"features": features, "drop": self.drop or (), "delimiter": self._character}
        return datasets.open_table(self.data, self.target, **options)


def train_and_test(
    source: DataSource, share: float, seed: int, kind: Kind
) -> tuple[tuple[Any, Any], tuple[Any, Any], list[str] | None]:
    """Return what to train on, what to hold out, and the features' names.

    Held out are the test split of a named data set, or a random share of a file.
    """
    from lrrn import datasets
    from lrrn.datasets.tables import with_labels
    from lrrn.reports.targets import check_quantities

    if source.is_named:
        train, test = (datasets.load(source.data, split, source.root) for split in ("train", "test"))
        return train, test, None
    rows = source.open()
    rows = with_labels(rows) if kind is Kind.classifier else rows
    if kind is Kind.regressor:
        check_quantities(rows)
    X, y = rows.everything()
    if y is None and kind is not Kind.energy:
        raise datasets.DataError(f"{source.data} has no targets, which a {kind} needs; --model energy learns without")
    if kind is Kind.classifier and y is not None:
        _check_classes(source.data, y)
    kept, held = _parts(source.data, len(X), share, y if kind is Kind.classifier else None, seed)
    parts = [(X[some], None if y is None else y[some]) for some in (kept, held)]
    return parts[0], parts[1], rows.feature_names


def _check_classes(data: str, y: NDArray[Any]) -> None:
    """Refuse numbers that are no classes, and warn of those that hardly can be, since a quantity needs a regressor."""
    import warnings

    import numpy as np
    from sklearn.utils.multiclass import type_of_target

    from lrrn.datasets import DataError
    from lrrn.runtime import ranks

    if y.dtype.kind not in "iuf" or not np.isfinite(y).all():  # the estimator says what is wrong with NaN
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ours says what to do
        continuous = type_of_target(y) == "continuous"
    if continuous:
        example = [*y[y != np.round(y)][:1], y[0]][0]  # numbers too large for labels have no fractions
        raise DataError(f"{data}: the target holds numbers such as {example:g}, which are no classes; use --model regressor")
    n_classes = len(np.unique(y))
    if n_classes > MANY_CLASSES and len(y) < FEW_ROWS * n_classes and ranks.current().is_main:
        typer.echo(
            f"Warning: the target of {data} has {n_classes} distinct numbers in {len(y)} rows, and each of them is a class "
            "here; if it is a quantity, use --model regressor",
            err=True,
        )
        warnings.filterwarnings("ignore", "The number of unique classes is greater", UserWarning)  # says less


def _parts(data: str, n: int, share: float, labels: NDArray[Any] | None, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows to train on and those to hold out, with the same share of every class where that is possible."""
    import numpy as np
    from sklearn.model_selection import train_test_split

    from lrrn.datasets import DataError

    if n < 2:
        raise DataError(f"{data} has one row; training needs at least two, since some are held out for the table")
    n_held = min(math.ceil(share * n), n - 1)
    counts = np.zeros(0) if labels is None else np.unique(labels, return_counts=True)[1]
    possible = len(counts) > 0 and counts.min() > 1 and len(counts) <= min(n_held, n - n_held)
    strata = labels if possible else None
    kept, held = train_test_split(np.arange(n), test_size=n_held, stratify=strata, random_state=seed)
    return kept, held


def check_model(path: Path) -> None:
    """Refuse a model that is neither a file nor the name of a shipped one."""
    from lrrn.persistence.shipped import located

    with errors_explained():
        located(path)


def load_fitted(
    path: Path, source: DataSource, device: str, limit: int | None = None, compared: bool = True, method: str = "auto"
) -> tuple[Model, Rows]:
    """Load a fitted estimator or Pipeline and open the first samples of data that fit it; columns are matched by name.

    ``compared`` says whether targets will be compared with predictions, so that a classifier's must be labels. ``method`` is
    that of certificates, refused before data are read if the model has no use for it.
    """
    from lrrn.datasets.tables import with_labels
    from lrrn.estimators import LRRNClassifier
    from lrrn.estimators._base import LiftedEstimator
    from lrrn.network import LRRN
    from lrrn.persistence.serialization import load
    from lrrn.reports.pipelines import PipelineModel, last_of

    loaded = load(path, device=device_name(device))
    if isinstance(loaded, LRRN):
        raise typer.BadParameter(f"{path} holds a bare network; save a fitted estimator to evaluate it")
    fitted = loaded if isinstance(loaded, LiftedEstimator) else PipelineModel(loaded)
    _check_method(path, fitted, method)
    names = getattr(loaded, "feature_names_in_", None)
    rows = source.open(fitted.n_features_in_ if names is None else names.tolist())
    if rows.n_features != fitted.n_features_in_:
        raise typer.BadParameter(
            f"{source.data} has {rows.n_features} features and {path} was trained on {fitted.n_features_in_}"
        )
    if compared and isinstance(last_of(fitted), LRRNClassifier):
        rows = with_labels(rows)
    return fitted, rows.first(limit)


def _check_method(path: Path, fitted: Model, method: str) -> None:
    """Refuse a --method that the model of a file has no use for."""
    from lrrn.estimators import LRRNEnergyModel, LRRNRegressor
    from lrrn.reports.pipelines import last_of

    if isinstance(last_of(fitted), LRRNRegressor) and method != "auto":
        raise typer.BadParameter(f"--method is for classifiers; {path} holds a regressor")
    if isinstance(last_of(fitted), LRRNEnergyModel) and method not in ("auto", "energy"):
        raise typer.BadParameter(f"--method: an energy model has one method, 'energy'; got {method!r}")


def load_classifier(path: Path, source: DataSource, device: str, limit: int | None) -> tuple[LRRNClassifier, Rows]:
    """Load a classifier and open the first labelled samples of some data."""
    from lrrn.estimators import LRRNClassifier

    fitted, rows = load_fitted(path, source, device, limit)
    if not isinstance(fitted, LRRNClassifier):
        kind = "Pipeline" if hasattr(fitted, "pipeline") else type(fitted).__name__
        raise typer.BadParameter(f"{path} holds a {kind}; only a classifier has labels to attack")
    if not rows.has_targets:
        raise typer.BadParameter(f"{source.data} has no labels to compare predictions with")
    return fitted, rows
