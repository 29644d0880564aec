"""Evaluate a fitted model: accuracy, certified accuracy and out-of-distribution AUROC, as numbers and as a page."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import r2_score

from lrrn.datasets.rows import ArrayRows, Rows
from lrrn.datasets.tables import with_labels
from lrrn.estimators import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.persistence.reference import UNKNOWN, ImageShape, Reference
from lrrn.reports.images import image_shape_of, mirrored, show_filters
from lrrn.reports.page import Page
from lrrn.reports.pipelines import PipelineModel, identity_of, last_of
from lrrn.reports.scoring import Parts, over_rows
from lrrn.reports.targets import check_quantities

Array = NDArray[Any]
Model = LRRNClassifier | LRRNRegressor | LRRNEnergyModel | PipelineModel
EPS = (0.1, 0.25, 0.5)
"""Default perturbation sizes to certify, in units of the data's scale."""
MOST_OUTSIDE = 65_536
"""Largest number of out-of-distribution inputs to generate. It suffices to estimate the AUROC for any number of samples."""
TELLING = 0.6
"""AUROC from which on a page shows the energies of a model that was not trained as an energy model."""
MEANINGS = {
    "accuracy": "share of the samples that are classified correctly",
    "R^2": "share of the targets' variance that is predicted: 1 is perfect, 0 is no better than their mean",
    "Lipschitz constant, at most": "proven: outputs move at most this many times as far as the input; a regressor's in the "
    "units of the target",
    "median certified radius": "proven: half of the samples are right under every perturbation below this norm",
    "certified accuracy": "proven: share of the samples that are right under every perturbation of this norm",
    "certified half-width": "proven: the most that predictions move under any perturbation of this norm, on average",
    "norm of perturbations": "scaled: every feature is divided by its standard deviation first",
    "AUROC of energy, mirrored": "how well the energy separates mirrored images from the samples: 1 is perfectly, "
    "0.5 is chance",
    "AUROC of energy, Gaussian": "the same for draws from a Gaussian with the mean and covariance of the data",
    "training": "time of the fit",
}
"""Explanations of the rows of a table, by how their names begin."""
KEPT_ENERGIES = 2000
"""Largest number of energies of each kind in a reference."""
KEPT_SAMPLES = 60
"""Number of samples stored in a file that the command line saves, if the samples are public."""


@final
@dataclass(frozen=True)
class Evaluation:
    """Results of evaluating a model on a set of samples.

    Attributes
    ----------
    name : str
        Name of the model in tables.
    n_samples : int
        Number of samples it was evaluated on.
    score : float or None
        Accuracy of a classifier, R^2 of a regressor.
    lipschitz : float or None
        Proven bound on the Lipschitz constant, in the norm of perturbations: of a classifier's scores, of an energy model's
        activations, or of a regressor's predictions in the units of the target. None for class energies, which have none.
    median_radius : float or None
        Median certified radius over all samples of a classifier; misclassified samples count as 0.
    certified : dict of float to float
        Certified accuracy of a classifier, by perturbation size.
    half_width : dict of float to float
        Mean half-width of a regressor's certified intervals, by perturbation size.
    auroc : dict of str to float
        Out-of-distribution AUROC of the energy by kind of input: 1 is perfect separation, 0.5 is chance.
    seconds : float or None
        Training time.
    norm : str
        Norm of radii and perturbations: "euclidean" in the units of X, or "scaled" for features divided by their standard
        deviation.
    """

    name: str
    n_samples: int
    score: float | None
    lipschitz: float | None
    median_radius: float | None
    certified: dict[float, float]
    half_width: dict[float, float]
    auroc: dict[str, float]
    seconds: float | None
    model: Model = field(repr=False)
    radii: Array | None = field(repr=False)
    energies: dict[str, Array] = field(repr=False)
    norm: str = "euclidean"

    def as_json(self) -> dict[str, Any]:
        """Return the results in a form that ``json.dump`` accepts."""
        content = {name: value for name, value in vars(self).items() if name not in ("model", "radii", "energies")}
        for name in ("certified", "half_width"):
            content[name] = {f"{eps:g}": finite(value) for eps, value in content[name].items()}
        return content


def evaluate(
    name: str,
    model: Model,
    X: Array | Rows,
    y: Array | None = None,
    eps: Sequence[float] | None = None,
    image_shape: Sequence[int] | None = None,
    in_distribution: Array | None = None,
    seconds: float | None = None,
    seed: int = 0,
    samples: Path | None = None,
) -> Evaluation:
    """Evaluate a fitted model; inside :func:`lrrn.runtime.ranks.joined` all ranks share the work and get the same result.

    Parameters
    ----------
    name : str
        Name of the model in the result.
    model : LRRNClassifier, LRRNRegressor, LRRNEnergyModel or PipelineModel
    X : array of shape (n_samples, n_features), or Rows
        Rows contain their own targets and need not fit into memory.
    y : array of shape (n_samples,) or (n_samples, n_targets), optional
        Without targets, no scores are computed.
    eps : sequence of float, optional
        Perturbation sizes, in the model's default norm. By default 0.1, 0.25 and 0.5, times the common scale that
        ``standardize`` found.
    image_shape : tuple of int, optional
        (height, width) or (channels, height, width), with 1 or 3 channels, if samples are images; by default that of the model.
        Mirrored images then serve as out-of-distribution inputs too.
    in_distribution : array of shape (n, n_features), optional
        Samples to fit the Gaussian of out-of-distribution inputs to; X if not given. Out-of-distribution inputs are generated
        from, and compared with, at most the first 65,536 samples.
    seconds, seed
        Training time, to be reported, and the seed of the Gaussian.
    samples : path, optional
        Write the results of each sample to this ``.npz`` or ``.parquet`` file; see :mod:`lrrn.reports.scoring`.

    Returns
    -------
    Evaluation
    """
    rows = X if isinstance(X, Rows) else ArrayRows(np.asanyarray(X), None if y is None else np.asarray(y))
    if isinstance(last_of(model), LRRNClassifier):
        rows = with_labels(rows)
    if isinstance(last_of(model), LRRNRegressor):
        check_quantities(rows, model.network_.sizes[-1])
    sizes = sizes_for(model, eps)
    shape = image_shape_of(model, image_shape)
    parts = None
    if samples is not None:
        # what identifies a run, so that it does not resume from the parts of another one
        run = {"model": identity_of(model), "sizes": list(sizes), "seed": seed, "as": "evaluate"}
        parts = Parts(samples, run)
    work = partial(_score_chunk, model, sizes, rows.has_targets or samples is not None)
    columns = over_rows(rows, model.chunk_rows_, work, parts)
    score, radii, certified, half_width = _scored(model, sizes, rows.has_targets, columns)
    energies = {"samples": columns["energy"], **_energies_outside(model, rows, shape, in_distribution, seed)}
    outside = {kind: auroc(energies["samples"], values) for kind, values in energies.items() if kind != "samples"}
    median = None if radii is None else float(np.median(radii))
    measured = (score, lipschitz_of(model), median, certified, half_width, outside, seconds)
    return Evaluation(name, rows.n_samples, *measured, model=model, radii=radii, energies=energies, norm=model._norm(None))


def lipschitz_of(model: Model) -> float | None:
    """Return the proven bound on the Lipschitz constant; None for class energies, which are quadratic and have none."""
    return None if getattr(last_of(model), "objective", None) == "class_energy" else float(model.lipschitz_)


def _scored(
    model: Model, sizes: Sequence[float], has_targets: bool, columns: Mapping[str, Array]
) -> tuple[float | None, Array | None, dict[float, float], dict[float, float]]:
    """Return the score, the radii, certified accuracies and half-widths by perturbation size; see :class:`Evaluation`."""
    score, radii, certified, half_width = None, None, dict[float, float](), dict[float, float]()
    if isinstance(last_of(model), LRRNClassifier) and has_targets:
        _warn_of_targets(model, columns["target"])
        right = columns["prediction"] == columns["target"]
        score, radii = float(np.mean(right)), np.where(right, columns["radius"], 0.0)
        certified = {size: float(np.mean(radii > size)) for size in sizes}
    if isinstance(last_of(model), LRRNRegressor):
        score = float(r2_score(columns["target"], columns["prediction"])) if has_targets else None
        for size in sizes:
            half_width[size] = float(np.mean(columns[f"upper {size}"] - columns[f"lower {size}"]) / 2)
    return score, radii, certified, half_width


def _warn_of_targets(model: Any, targets: Array) -> None:
    """Warn of targets none of which is a label of the model, such as quantities: the accuracy is then 0."""
    if not np.isin(targets, model.classes_).any():
        here, there = (labels[:1].tolist()[0] for labels in (targets, model.classes_))
        warnings.warn(
            f"no target of the data is one of the model's labels: the data has such as {here!r} and the model such as "
            f"{there!r}, so that every prediction counts as wrong; if it is not the target, choose another",
            UserWarning,
            stacklevel=4,  # the line that calls evaluate
        )


def _score_chunk(model: Any, sizes: Sequence[float], predict: bool, X: Array, y: Array | None, _: int) -> dict[str, Array]:
    columns = {} if y is None else {"target": y}
    if y is not None and isinstance(last_of(model), LRRNClassifier):
        check_labels(model, y)
    if predict and isinstance(last_of(model), LRRNClassifier):
        found = model.certificate(X)
        return {**columns, "prediction": found.prediction, "radius": found.radius, "energy": found.energy}
    if isinstance(last_of(model), LRRNRegressor):
        intervals = model.certificate(X, sizes)
        if predict:
            columns["prediction"] = intervals.prediction
        for size, (lower, upper) in intervals.intervals.items():
            columns[f"lower {size}"], columns[f"upper {size}"] = lower, upper
        return {**columns, "energy": intervals.energy}
    return {**columns, "energy": model.energy(X)}


def reference_of(
    model: Model,
    X: Array,
    y: Array | None,
    image_shape: ImageShape | None,
    source: str,
    keep: int,
    score: float | None,
    radii: Array | None,
    energies: Mapping[str, Array],
) -> Reference:
    """Return the reference stored with a model: statistics of held-out samples, and samples if they are public.

    ``source`` describes where the samples come from. ``keep`` of them are included, taken from every class in turn; 0 keeps
    them private. Scores, radii and energies are as in :class:`Evaluation`.
    """
    labels = np.full(len(X), UNKNOWN, dtype=np.int64)
    order = np.arange(len(X))
    if isinstance(model, LRRNClassifier) and y is not None:
        known = np.isin(y, model.classes_)
        labels[known] = np.searchsorted(model.classes_, np.asarray(y)[known])
        # the first of every class, then the second of every class, and so on
        turn = np.zeros(len(X), dtype=np.int64)
        for label in np.unique(labels):
            turn[labels == label] = np.arange(np.count_nonzero(labels == label))
        order = np.lexsort((labels, turn))
    low, high = float(X.min()), float(X.max())
    return Reference(
        source=source,
        image_shape=image_shape,
        low=low,
        high=high if high > low else low + 1.0,
        score=score,
        radii=radii,
        energies={kind: np.asarray(values[:KEPT_ENERGIES]) for kind, values in energies.items()},
        samples=X[order[:keep]].astype(np.float32),
        labels=labels[order[:keep]],
    )


def heading_of(norm: str) -> str:
    """Return the heading of a column of perturbation sizes."""
    return "norm of the perturbation" if norm == "euclidean" else f"{norm} norm of the perturbation"


def sizes_for(model: Model, eps: Sequence[float] | None) -> tuple[float, ...]:
    """Return ``eps`` or, if it is None, the default sizes times the scale that ``standardize`` found, and the model's own."""
    if eps is not None:
        return tuple(eps)
    own = _trained_for(model)
    return tuple(sorted({*(float(f"{factor * model._unit():.2g}") for factor in EPS), *([] if own is None else [own])}))


def _trained_for(model: Model) -> float | None:
    """Return the size of perturbations that a model was trained for, if there is one."""
    eps = getattr(model, "eps", None)
    return None if eps is None else float(eps)


def energies_of(
    model: Model, X: Array, image_shape: ImageShape | None, in_distribution: Array | None = None, seed: int = 0
) -> dict[str, Array]:
    """Return the energies of samples and of out-of-distribution inputs, by kind of input; arguments as for `evaluate`."""
    return {"samples": model.energy(X), **_energies_outside(model, ArrayRows(X), image_shape, in_distribution, seed)}


def check_labels(model: Any, y: Array) -> None:
    """Raise unless labels are a vector, and text where the model's classes are text: none would ever match."""
    if y.ndim != 1:
        raise ValueError(
            f"labels must have shape (n_samples,), one for each sample; got {y.shape}: use y.ravel() for one column"
        )
    if (y.dtype.kind in "USO") != (model.classes_.dtype.kind in "USO"):
        here, there = (labels[:1].tolist()[0] for labels in (y, model.classes_))
        raise ValueError(f"the data has labels such as {here!r} and the model's are such as {there!r}; choose another target")


def _energies_outside(
    model: Model, rows: Rows, image_shape: ImageShape | None, in_distribution: Array | None, seed: int
) -> dict[str, Array]:
    """Return energies of out-of-distribution inputs: mirrored images, and draws from a Gaussian with the data's moments."""
    rows, size = rows.first(MOST_OUTSIDE), model.chunk_rows_
    mean, root = _moments(rows if in_distribution is None else ArrayRows(in_distribution).first(MOST_OUTSIDE), size)

    def work(X: Array, y: Array | None, chunk: int) -> dict[str, Array]:
        columns = {}
        if image_shape is not None:
            columns["mirrored"] = model.energy(mirrored(X, image_shape))
        # one random stream per chunk, far apart, so that a chunk's draws do not depend on which rank makes them
        generator = np.random.Generator(np.random.PCG64(seed).jumped(chunk))
        draws = generator.standard_normal(X.shape) @ root + mean
        columns["Gaussian"] = model.energy(draws.astype(X.dtype))
        return columns

    return over_rows(rows, size, work)


def _moments(rows: Rows, size: int) -> tuple[Array, Array]:
    """Return the mean and a matrix R such that R^T R is the covariance; every rank computes them, in the same order."""
    mean = sum(X.sum(axis=0, dtype=np.float64) for X, _ in rows.pieces(0, rows.n_samples, size)) / rows.n_samples
    covariance = np.zeros((rows.n_features, rows.n_features))
    for X, _ in rows.pieces(0, rows.n_samples, size):
        centred = X - mean
        covariance += centred.T @ centred
    values, directions = np.linalg.eigh(covariance / rows.n_samples)
    return np.asarray(mean), np.sqrt(np.clip(values, 0.0, None))[:, None] * directions.T


def finite(values: Any) -> Any:
    """Return a number, or an array as a list, with None for what JSON cannot hold: infinities and NaN."""
    numbers = np.asarray(values, dtype=np.float64)
    kept = numbers.astype(object)
    kept[~np.isfinite(numbers)] = None
    return kept.tolist()


def auroc(in_distribution: Array, out_of_distribution: Array) -> float:
    """Return the AUROC of energies as a score for out-of-distribution inputs: 1 is perfect separation, 0.5 is chance."""
    from sklearn.metrics import roc_auc_score

    truth = np.repeat([0, 1], [len(in_distribution), len(out_of_distribution)])
    return float(roc_auc_score(truth, np.concatenate([in_distribution, out_of_distribution])))


def as_table(evaluations: Sequence[Evaluation]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of one table: one column per model, one row per metric, "-" where it does not apply."""
    sizes = sorted({size for evaluation in evaluations for size in (*evaluation.certified, *evaluation.half_width)})
    kinds = list(dict.fromkeys(kind for evaluation in evaluations for kind in evaluation.auroc))
    regression = all(isinstance(last_of(evaluation.model), LRRNRegressor) for evaluation in evaluations)
    share = "{:.3g}" if regression else "{:.1%}"
    what = "certified half-width of intervals" if regression else "certified accuracy"
    by_size = [e.half_width if regression else e.certified for e in evaluations]
    rows = [
        ["R^2" if regression else "accuracy", *(_cell(e.score, share) for e in evaluations)],
        ["Lipschitz constant, at most", *(_cell(e.lipschitz, "{:.3g}") for e in evaluations)],
    ]
    if not regression:
        rows.append(["median certified radius", *(_cell(e.median_radius, "{:.3f}") for e in evaluations)])
    if any(e.norm != "euclidean" for e in evaluations):
        rows.append(["norm of perturbations", *(e.norm for e in evaluations)])
    marked = {_trained_for(e.model) for e in evaluations}
    for size in sizes:
        rows.append(
            [
                f"{what} at {size:g}" + (", trained for" if size in marked else ""),
                *(_cell(found.get(size), share) for found in by_size),
            ]
        )
    for kind in kinds:
        rows.append([f"AUROC of energy, {kind}", *(_cell(e.auroc.get(kind), "{:.3f}") for e in evaluations)])
    if any(e.seconds is not None for e in evaluations):
        rows.append(["training", *(_cell(e.seconds, "{:.1f} s") for e in evaluations)])
    counts = dict.fromkeys(e.n_samples for e in evaluations)
    return [f"{', '.join(map(str, counts))} samples", *(e.name for e in evaluations)], rows


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def as_page(title: str, evaluations: Sequence[Evaluation], image_shape: Sequence[int] | None = None) -> str:
    """Return a self-contained HTML page: the table, loss curves, certified accuracy, energies and filters of images."""
    page = Page(title)
    columns, rows = as_table(evaluations)
    page.table(columns, rows, [next((text for name, text in MEANINGS.items() if row[0].startswith(name)), "") for row in rows])
    page.heading("Charts")
    certified = {e.name: e.radii for e in evaluations if e.radii is not None}
    if certified:
        page.text(
            "Certified accuracy is the share of samples that are classified correctly under every perturbation of the given "
            "norm. It is proven, with the solver's error and rounding inside it. Norms are Euclidean; a model whose norm is "
            "scaled divides every feature by its standard deviation first."
        )
    telling = [
        e for e in evaluations if isinstance(last_of(e.model), LRRNEnergyModel) or max(e.auroc.values(), default=0) >= TELLING
    ]
    if telling:
        page.text("Low energy means in distribution. The energy is not normalised: it orders inputs and is no log-likelihood.")
    # losses of different objectives have different scales, so each is shown relative to its first epoch
    curves = {e.name: (range(1, len(e.model.loss_curve_) + 1), np.abs(e.model.loss_curve_)) for e in evaluations}
    relative = {name: (epochs, losses / max(losses[0], 1e-30)) for name, (epochs, losses) in curves.items() if len(losses)}
    page.lines("Loss of each epoch, relative to the first", "epoch", "loss", relative, log_y=True)
    if certified:
        largest = max(float(radii.max()) for radii in certified.values())
        grid = np.linspace(0.0, largest if largest > 0 else 1.0, 200)
        shares: dict[str, Any] = {
            name: (grid, [float(np.mean(radii > size)) for size in grid]) for name, radii in certified.items()
        }
        for size in sorted({_trained_for(e.model) for e in evaluations} - {None}):  # type: ignore[type-var]
            shares[f"trained for {size:g}"] = ([size, size], [0.0, 1.0])
        page.lines("Certified accuracy against the size of the perturbation", "norm of the perturbation", "share", shares)
    for e in telling:
        page.histograms(f"Energies: {e.name}", "energy", e.energies)
    show_filters(page, {e.name: e.model for e in evaluations}, image_shape)
    return page.html()
