"""What a fitted model is worth: accuracy, certified accuracy, familiarity of strange inputs; in numbers and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lrrn.estimators import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.reference import UNKNOWN, Reference
from lrrn.report import Page

Array = NDArray[Any]
Model = LRRNClassifier | LRRNRegressor | LRRNEnergyModel
EPS = (0.1, 0.25, 0.5)
"""Sizes of perturbations to certify, in units of the data's scale, unless others are asked for."""
KEPT_ENERGIES = 2000
"""Energies of each kind that a reference holds at most."""
KEPT_SAMPLES = 60
"""Samples that a file saved by the command line holds, if they are public."""


@final
@dataclass(frozen=True)
class Evaluation:
    """A model on some samples.

    Attributes
    ----------
    name : str
        What the model is called in tables.
    n_samples : int
        How many samples it was evaluated on.
    score : float or None
        Accuracy of a classifier, R^2 of a regressor.
    lipschitz : float
        Proven bound on the Lipschitz constant, in the units of X.
    median_radius : float or None
        Median certified radius over all samples of a classifier, 0 where it is wrong.
    certified : dict of float to float
        By perturbation size: certified accuracy of a classifier, mean certified half-width of a regressor's intervals.
    auroc : dict of str to float
        By what was put in: how well the energy tells it from the samples, 1 is perfectly and 0.5 not at all.
    seconds : float or None
        Training time.
    """

    name: str
    n_samples: int
    score: float | None
    lipschitz: float
    median_radius: float | None
    certified: dict[float, float]
    auroc: dict[str, float]
    seconds: float | None
    model: Model = field(repr=False)
    radii: Array | None = field(repr=False)
    energies: dict[str, Array] = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        """Return the figures, ready for ``json.dump``."""
        left_out = ("model", "radii", "energies", "certified")
        plain = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**plain, "certified": {f"{eps:g}": value for eps, value in self.certified.items()}}


def evaluate(
    name: str,
    model: Model,
    X: Array,
    y: Array | None = None,
    eps: Sequence[float] | None = None,
    image_shape: tuple[int, int] | None = None,
    familiar: Array | None = None,
    seconds: float | None = None,
    seed: int = 0,
) -> Evaluation:
    """Evaluate a fitted model.

    Parameters
    ----------
    name : str
        What to call it.
    model : LRRNClassifier, LRRNRegressor or LRRNEnergyModel
    X : array of shape (n_samples, n_features)
    y : array of shape (n_samples,) or (n_samples, n_targets), optional
        Without it there are no scores.
    eps : sequence of float, optional
        Sizes of perturbations, in the units of X. By default 0.1, 0.25 and 0.5, times the scale that
        ``standardize`` found.
    image_shape : (int, int), optional
        Height and width if samples are images: then mirrored ones serve as strange inputs too.
    familiar : array of shape (n, n_features), optional
        What to fit the Gaussian of strange inputs to; X if not given.
    seconds : float, optional
        Training time, to be reported.
    seed : int, default=0
        Of the Gaussian.

    Returns
    -------
    Evaluation
    """
    sizes = sizes_for(model, eps)
    score, radii, certified = None, None, dict[float, float]()
    if y is not None and not isinstance(model, LRRNEnergyModel):
        score = float(model.score(X, y))
    if isinstance(model, LRRNClassifier) and y is not None:
        radii = np.where(model.predict(X) == y, model.certified_radius(X), 0.0)
        certified = {size: float(np.mean(radii > size)) for size in sizes}
    if isinstance(model, LRRNRegressor):
        for size in sizes:
            lower, upper = model.predict_interval(X, size)
            certified[size] = float(np.mean(upper - lower) / 2)
    energies = energies_of(model, X, image_shape, familiar, seed)
    return Evaluation(
        name=name,
        n_samples=len(X),
        score=score,
        lipschitz=float(model.lipschitz_),
        median_radius=None if radii is None else float(np.median(radii)),
        certified=certified,
        auroc={kind: auroc(energies["samples"], values) for kind, values in energies.items() if kind != "samples"},
        seconds=seconds,
        model=model,
        radii=radii,
        energies=energies,
    )


def reference_of(
    model: Model,
    X: Array,
    y: Array | None,
    image_shape: tuple[int, int] | None,
    source: str,
    keep: int,
    score: float | None,
    radii: Array | None,
    energies: Mapping[str, Array],
) -> Reference:
    """Return what a file may hold of held-out samples, for whoever explores the model.

    Parameters
    ----------
    model : LRRNClassifier or LRRNEnergyModel
    X : array of shape (n_samples, n_features)
    y : array of shape (n_samples,), optional
    image_shape : (int, int), optional
    source : str
        Where the samples come from, in words.
    keep : int
        How many samples to give along, of every class in turn; 0 keeps them private.
    score, radii, energies
        As in :class:`Evaluation`.

    Returns
    -------
    Reference
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


def sizes_for(model: Model, eps: Sequence[float] | None) -> tuple[float, ...]:
    """Return the sizes asked for or, if none were, the usual ones times the scale that ``standardize`` found."""
    return tuple(float(f"{factor * model.scale_in_:.2g}") for factor in EPS) if eps is None else tuple(eps)


def energies_of(
    model: Model, X: Array, image_shape: tuple[int, int] | None, familiar: Array | None = None, seed: int = 0
) -> dict[str, Array]:
    """Return the energies of samples and of strange inputs made from them, by what they are; arguments as for `evaluate`."""
    strange = _strange_inputs(X, image_shape, X if familiar is None else familiar, seed)
    return {"samples": model.energy(X), **{kind: model.energy(inputs) for kind, inputs in strange.items()}}


def _strange_inputs(X: Array, image_shape: tuple[int, int] | None, familiar: Array, seed: int) -> dict[str, Array]:
    """Return inputs that are not samples: mirrored images, and draws from the Gaussian with the mean and covariance of data."""
    strange = {}
    if image_shape is not None:
        if math.prod(image_shape) != X.shape[1]:
            raise ValueError(f"images of {image_shape[0]} x {image_shape[1]} do not fit {X.shape[1]} features")
        strange["mirrored"] = X.reshape(len(X), *image_shape)[:, :, ::-1].reshape(X.shape)
    centred = familiar - familiar.mean(axis=0)
    values, directions = np.linalg.eigh(centred.T @ centred / len(familiar))
    noise = np.random.default_rng(seed).standard_normal(X.shape)
    draws = noise * np.sqrt(np.clip(values, 0.0, None)) @ directions.T + familiar.mean(axis=0)
    strange["Gaussian"] = draws.astype(X.dtype)
    return strange


def auroc(familiar: Array, strange: Array) -> float:
    """Return how well energies tell strange inputs from familiar ones: 1 is perfectly, 0.5 not at all."""
    from sklearn.metrics import roc_auc_score

    truth = np.repeat([0, 1], [len(familiar), len(strange)])
    return float(roc_auc_score(truth, np.concatenate([familiar, strange])))


def as_table(evaluations: Sequence[Evaluation]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of one table: a column a model, a row a measure, "-" where one does not apply."""
    sizes = sorted({size for evaluation in evaluations for size in evaluation.certified})
    kinds = list(dict.fromkeys(kind for evaluation in evaluations for kind in evaluation.auroc))
    regression = all(isinstance(evaluation.model, LRRNRegressor) for evaluation in evaluations)
    share = "{:.3g}" if regression else "{:.1%}"
    what = "certified half-width of intervals" if regression else "certified accuracy"
    rows = [
        ["R^2" if regression else "accuracy", *(_cell(e.score, share) for e in evaluations)],
        ["Lipschitz constant, at most", *(_cell(e.lipschitz, "{:.3g}") for e in evaluations)],
    ]
    if not regression:
        rows.append(["median certified radius", *(_cell(e.median_radius, "{:.3f}") for e in evaluations)])
    for size in sizes:
        rows.append([f"{what} at {size:g}", *(_cell(e.certified.get(size), share) for e in evaluations)])
    for kind in kinds:
        rows.append([f"AUROC of energy, {kind}", *(_cell(e.auroc.get(kind), "{:.3f}") for e in evaluations)])
    if any(e.seconds is not None for e in evaluations):
        rows.append(["training", *(_cell(e.seconds, "{:.1f} s") for e in evaluations)])
    counts = dict.fromkeys(e.n_samples for e in evaluations)
    return [f"{', '.join(map(str, counts))} samples", *(e.name for e in evaluations)], rows


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def as_page(title: str, evaluations: Sequence[Evaluation], image_shape: tuple[int, int] | None = None) -> str:
    """Return a self-contained HTML page: the table, loss curves, certified accuracy, energies and filters."""
    page = Page(title)
    page.table(*as_table(evaluations))
    page.heading("Learning")
    # losses of different objectives have different scales, so each is shown relative to its first epoch
    curves = {e.name: (range(1, len(e.model.loss_curve_) + 1), np.abs(e.model.loss_curve_)) for e in evaluations}
    relative = {name: (epochs, losses / max(losses[0], 1e-30)) for name, (epochs, losses) in curves.items() if len(losses)}
    page.lines("Loss of each epoch, relative to the first", "epoch", "loss", relative, log_y=True)
    certified = {e.name: e.radii for e in evaluations if e.radii is not None}
    if certified:
        page.heading("Certified accuracy")
        page.text(
            "The share of samples that are classified correctly under every perturbation of the given Euclidean norm. It is "
            "proven, with the solver's error and rounding inside it."
        )
        largest = max(float(radii.max()) for radii in certified.values())
        grid = np.linspace(0.0, largest if largest > 0 else 1.0, 200)
        shares = {name: (grid, [float(np.mean(radii > size)) for size in grid]) for name, radii in certified.items()}
        page.lines("Certified accuracy against the size of the perturbation", "norm of the perturbation", "share", shares)
    page.heading("Energy")
    page.text("Low energy means familiar. The energy is not normalised: it orders inputs and is no log-likelihood.")
    for e in evaluations:
        page.histograms(f"Energies: {e.name}", "energy", e.energies)
    if image_shape is not None:
        page.heading("First-layer filters")
        for e in evaluations:
            filters = e.model.network_.W[0].detach().cpu().numpy().reshape(-1, *image_shape)
            page.images(f"Rows of the first weight matrix: {e.name}", filters)
    return page.html()
