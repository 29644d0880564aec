"""Audit a classifier or an energy model: certified radii and attacks, on the same samples and in the same units."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lrrn.attacks.perturbations import minimal_perturbation, pgd
from lrrn.certificates.shared import SEARCHED
from lrrn.datasets.rows import ArrayRows, Rows
from lrrn.estimators import LRRNClassifier, LRRNEnergyModel
from lrrn.reports.evaluation import check_labels, finite, heading_of, sizes_for
from lrrn.reports.images import obstacle_of
from lrrn.reports.page import Page
from lrrn.reports.pipelines import PipelineModel, identity_of, last_of
from lrrn.reports.scoring import ALL, Parts, Share, over_rows
from lrrn.runtime.memory import rows_at_once

Array = NDArray[Any]
REFINE = 20
"""Most steps of an ascent that refines a minimal-norm attack."""
logger = logging.getLogger("lrrn.reports")
LOCAL_ROWS = 16
"""Number of samples in a chunk of local radii, each of which takes a fraction of a second."""
GUARANTEE = "deployed"
"""Guarantee of the radii; see :func:`lrrn.certify`."""


@final
@dataclass(frozen=True)
class Audit:
    """Certified and attacked robustness of labels on a set of samples; all sizes in the norm ``norm``.

    Attributes
    ----------
    name : str
        Name of the model.
    eps : tuple of float
        Perturbation sizes to report.
    method, guarantee : str
        Method and guarantee of the certificate; see :func:`lrrn.certify`.
    right : bool array of shape (n_samples,) or None
        Whether the prediction is correct. None if there are no labels: then all samples count, whatever their label.
    radii : array of shape (n_samples,)
        Certified radii: no smaller perturbation changes the predicted label.
    distances : array of shape (n_samples,) or None
        Attack distances: some perturbation of this size makes the prediction wrong. 0 where it is wrong already, ``inf`` where
        no attack succeeded. None if no attack was run.
    settings : dict
        Settings of the attacks.
    seconds : float
        Time taken.
    norm : str
        Norm of sizes and radii: "euclidean" in the units of X, or "scaled" for features divided by their standard deviation.
    """

    name: str
    eps: tuple[float, ...]
    method: str
    guarantee: str
    right: Array | None = field(repr=False)
    radii: Array = field(repr=False)
    distances: Array | None = field(default=None, repr=False)
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    norm: str = "euclidean"

    @property
    def counted(self) -> Array:
        """Whether a sample may count as certified: its prediction is correct, or there are no labels."""
        return np.ones(len(self.radii), dtype=bool) if self.right is None else self.right

    @property
    def clean(self) -> float:
        """Accuracy without any perturbation."""
        if self.right is None:
            raise ValueError("there are no labels to compare predictions with")
        return float(self.right.mean())

    @property
    def median_radius(self) -> float:
        """Median certified radius; misclassified samples count as 0."""
        return float(np.median(np.where(self.counted, self.radii, 0.0)))

    def certified(self, eps: float) -> float:
        """Return the certified accuracy: share of samples proven correct under every perturbation of norm ``eps``.

        Without labels it is the share of samples whose prediction is proven not to change.
        """
        return float((self.counted if eps == 0 else self.counted & (self.radii > eps)).mean())

    def attacked(self, eps: float) -> float:
        """Return the accuracy under attacks of norm at most ``eps``, an upper bound on the true robust accuracy."""
        if self.distances is None:
            raise ValueError("nothing was attacked; see lrrn.reports.audit.attack")
        return float((self.distances > eps).mean())

    @property
    def refuted(self) -> NDArray[np.int64]:
        """Indices of the samples whose label an attack changed within the certified radius: none, unless there is a bug."""
        if self.distances is None:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self.counted & (self.distances < self.radii))

    def as_json(self, samples: bool = True) -> dict[str, Any]:
        """Return figures and, if ``samples``, arrays, for ``json.dump``; a distance of null means that no attack succeeded."""
        content: dict[str, Any] = {"name": self.name, "n_samples": len(self.radii), "method": self.method}
        content |= {"guarantee": self.guarantee, "norm": self.norm, "median_radius": self.median_radius}
        shares = {f"{size:g}": self.certified(size) for size in self.eps}
        content |= {"certified_share": shares} if self.right is None else {"accuracy": self.clean, "certified": shares}
        if self.distances is not None:
            content["median_distance"] = finite(np.median(self.distances))
            content["attacked"] = {f"{size:g}": self.attacked(size) for size in self.eps}
            content["gap"] = {f"{size:g}": self.attacked(size) - self.certified(size) for size in self.eps}
            content["refuted"] = self.refuted.tolist()
            content["attacks"] = self.settings
        content["seconds"] = self.seconds
        if samples:
            content["samples"] = {"radius": self.radii.tolist()}
            if self.right is not None:
                content["samples"]["right"] = self.right.tolist()
            if self.distances is not None:
                content["samples"]["distance"] = finite(self.distances)
        return content


def certify(
    name: str,
    model: LRRNClassifier | LRRNEnergyModel | PipelineModel,
    X: Array | Rows,
    y: Array | None = None,
    eps: Sequence[float] | None = None,
    method: str = "auto",
    samples: Path | None = None,
    share: Share = ALL,
    progress: str | None = None,
) -> Audit:
    """Certify the predictions of a fitted model; inside :func:`lrrn.runtime.ranks.joined` all ranks share the work.

    Parameters
    ----------
    name : str
        Name of the model in the result.
    model : LRRNClassifier or LRRNEnergyModel, or PipelineModel of one
        The labels of a classifier, or the decisions of an energy model, which no target is compared with.
    X : array of shape (n_samples, n_features), or Rows
        Rows contain their own labels and need not fit into memory.
    y : array of shape (n_samples,), optional
    eps : sequence of float, optional
        Perturbation sizes, in the model's default norm. By default 0.1, 0.25 and 0.5, times the common scale that
        ``standardize`` found.
    method : str, default="auto"
        As in :func:`lrrn.certify`.
    samples : path, optional
        Write label, radius and whether the label is correct to this ``.npz`` or ``.parquet`` file. An interrupted call is
        continued by the next one.
    share, progress
        Which of the samples to certify and report on, and whether to show progress; see
        :func:`lrrn.reports.scoring.over_rows`.

    Returns
    -------
    Audit
    """
    start = time.perf_counter()
    rows = X if isinstance(X, Rows) else ArrayRows(np.asanyarray(X), None if y is None else np.asarray(y))
    if isinstance(last_of(model), LRRNEnergyModel):
        if method not in ("auto", "energy"):
            raise ValueError(f"an energy model has one method, 'energy'; got {method!r}")
        method = "energy"
    obstacle = obstacle_of(model.network_, method)
    if obstacle is not None:  # before hours of solves
        raise ValueError(obstacle)

    work = partial(_certified_chunk, model, method)
    last = last_of(model)
    chosen = last._chosen_method(method) if isinstance(last, LRRNClassifier) else method
    parts = None
    if samples is not None:
        parts = Parts(samples, {"model": identity_of(model), "method": method, "guarantee": GUARANTEE, "as": "certify"})
    columns = over_rows(rows, _chunk_rows(model, chosen), work, parts, share, progress)
    seconds = time.perf_counter() - start
    sizes, norm = sizes_for(model, eps), model._norm(None)
    return Audit(name, sizes, chosen, GUARANTEE, columns.get("right"), columns["radius"], seconds=seconds, norm=norm)


def _chunk_rows(model: Any, method: str) -> int:
    """Return the number of samples in a chunk: few where a sample takes long, so that they are distributed and saved soon."""
    if method in ("local", "branched"):
        return LOCAL_ROWS
    net = model.network_
    slow = method == "shared" and sum(net.energy_snapshot(torch.float64).free_sizes) > SEARCHED
    return rows_at_once(net.sizes, net.W[0].device, slow=True) if slow else model.chunk_rows_


def _certified_chunk(model: Any, method: str, X: Array, y: Array | None, _: int) -> dict[str, Array]:
    """Return labels, radii and, with targets, whether the labels are right."""
    if isinstance(last_of(model), LRRNEnergyModel):
        found = model.certificate(X)
        return {"prediction": found.prediction, "radius": found.radius}
    if y is not None:
        check_labels(model, y)
    found = model.certificate(X, method)
    columns = {"prediction": found.prediction, "radius": found.radius}
    return columns if y is None else {**columns, "right": found.prediction == y}


def attack(
    name: str,
    model: LRRNClassifier,
    X: Array,
    y: Array | None,
    eps: Sequence[float] | None = None,
    method: str = "auto",
    *,
    steps: int = 50,
    restarts: int = 3,
    clip: tuple[float, float] | None = None,
    seed: int = 0,
) -> Audit:
    """Certify a fitted classifier, then attack it: first minimal perturbations, then gradient ascent at every size.

    Parameters
    ----------
    name, model, X, y, eps, method
        As in :func:`certify`; the prediction must be the network's largest output, so "class_energy" is refused.
    steps, restarts
        Settings of the gradient ascent; see :func:`lrrn.attacks.pgd`.
    clip : (lo, hi), optional
        Interval for perturbed features, such as (0, 1) for images.
    seed : int, default=0
        Seed of the random starts.

    Returns
    -------
    Audit
    """
    if model.objective == "class_energy":
        raise ValueError(
            "this classifier has objective 'class_energy': it predicts by energies, and the attacks here are on the network's "
            "largest output. Its radii stand (lrrn certify); to attack, train another objective, such as 'contrastive'"
        )
    if y is None:
        raise ValueError(f"{name} cannot be attacked on data that has no labels to compare predictions with")
    audit = certify(name, model, X, y, eps, method)
    start = time.perf_counter()
    offset, scale = model.offset_in_, model.scale_in_
    rows = np.flatnonzero(audit.counted)
    distances = np.zeros(len(X))
    if len(rows):
        given = np.asarray(X[rows], dtype=np.float64)
        label = torch.as_tensor(np.searchsorted(model.classes_, np.asarray(y)[rows]))
        box = None if clip is None else tuple(torch.as_tensor((np.full(X.shape[1], end) - offset) / scale) for end in clip)

        def measured(some: Array, x: torch.Tensor) -> Array:
            return _measured(model, given[some], np.asarray(y)[rows[some]], x.cpu().numpy())

        options: dict[str, Any] = {"scale": model._unit(), "steps": steps, "restarts": restarts, "clip": box, "seed": seed}
        x = torch.as_tensor((given - offset) / scale)
        distances[rows] = attack_distances(model.network_, x, label, audit.eps, measured, **options)
    settings = {"steps": steps, "restarts": restarts, "seed": seed, "clip": None if clip is None else list(clip)}
    return replace(audit, distances=distances, settings=settings, seconds=audit.seconds + time.perf_counter() - start)


def attack_distances(
    net: nn.Module,
    x: torch.Tensor,
    label: torch.Tensor,
    sizes: Sequence[float],
    measured: Callable[[Array, torch.Tensor], Array],
    *,
    scale: float = 1.0,
    steps: int = 50,
    restarts: int = 3,
    clip: Any = None,
    seed: int = 0,
) -> Array:
    """Return the norms of the smallest perturbations found by a minimal-norm attack and by gradient ascent at every size.

    Parameters
    ----------
    net, x, label, steps, restarts, clip, seed
        As in :func:`lrrn.attacks.pgd`; the minimal-norm attack is refined by at most as many steps.
    sizes : sequence of float
        Perturbation sizes of the gradient ascents; one unit of x is ``scale`` of their units.
    measured : callable
        Maps sample indices and perturbed inputs to the norms of the perturbations that succeeded, ``inf`` for the others.
    """
    nearest = minimal_perturbation(net, x, label, refine_steps=min(REFINE, steps), seed=seed, clip=clip)
    distances = measured(np.arange(len(x)), nearest.x)
    for size in sizes:
        left = np.flatnonzero(distances > size)
        if size > 0 and len(left):
            logger.info("gradient ascent at %g on %d samples", size, len(left))
            options: dict[str, Any] = {"steps": steps, "restarts": restarts, "seed": seed, "clip": clip}
            found = pgd(net, x[left], label[left], size / scale, **options)
            distances[left] = np.minimum(distances[left], measured(left, found.x))
    return distances


def _measured(model: LRRNClassifier, X: Array, y: Array, x: Array) -> Array:
    """Return norms of perturbations that the classifier itself misclassifies; ``inf`` for the others."""
    perturbed = x * model.scale_in_ + model.offset_in_
    moved = (perturbed - X) / (model.scale_in_ / model._unit())  # the divisor is 1 unless the norm is scaled
    return np.where(model.predict(perturbed) != y, np.linalg.norm(moved, axis=1), np.inf)


def as_table(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a table, with one row per perturbation size."""
    headings, rows = [heading_of(audit.norm), "certified share" if audit.right is None else "certified accuracy"], []
    if audit.distances is not None:
        headings += ["accuracy under attack", "gap"]
    for size in (*([] if audit.right is None else [0.0]), *(size for size in audit.eps if size > 0)):
        rows.append([f"{size:g}", f"{audit.certified(size):.1%}"])
        if audit.distances is not None:
            rows[-1] += [f"{audit.attacked(size):.1%}", f"{audit.attacked(size) - audit.certified(size):.1%}"]
    return headings, rows


def summary(audit: Audit) -> str:
    """Return the figures that do not depend on the perturbation size, in one or two sentences."""
    text = f"{len(audit.radii)} samples{'' if audit.right is None else f', accuracy {audit.clean:.1%}'}; "
    text += f"median certified radius {audit.median_radius:.3g} (method {audit.method}, {audit.norm} norm)"
    if audit.distances is not None:
        text += f"; median distance of the nearest attack found {float(np.median(audit.distances)):.3g}"
    return text + f"; {audit.seconds:.1f} s."


def as_page(title: str, audit: Audit) -> str:
    """Return a self-contained HTML page: the figures, and one chart of accuracy over perturbation size."""
    page = Page(title)
    page.text(summary(audit))
    page.table(*as_table(audit))
    reached = [*audit.radii[audit.counted], *audit.eps]
    if audit.distances is not None:
        reached += [distance for distance in audit.distances if np.isfinite(distance)]
    grid = np.linspace(0.0, max([float(size) for size in reached if np.isfinite(size)], default=1.0) or 1.0, 200)
    certified = np.array([audit.certified(size) for size in grid])
    series: dict[str, tuple[Array, Array]] = {} if audit.right is None else {"clean": (grid, np.full(len(grid), audit.clean))}
    page.heading(f"{'Share' if audit.right is None else 'Accuracy'} against the size of the perturbation")
    if audit.distances is not None:
        under_attack = np.array([audit.attacked(size) for size in grid])
        series["under attack"] = (grid, under_attack)
        series["certified"] = (grid, certified)
        series["gap"] = (grid, under_attack - certified)
        page.text(
            "The share that is right under every perturbation of a norm lies between the certified accuracy, which is proven, "
            "and the accuracy under attack, which is what our attacks left. The gap is what neither has settled."
        )
    else:
        series["certified"] = (grid, certified)
        what = "keeps its label" if audit.right is None else "is classified correctly"
        page.text(
            f"The certified share {what} under every perturbation of the given {audit.norm} norm. It is proven, with the "
            "solver's error and rounding inside it."
        )
    page.lines("Shares of samples", heading_of(audit.norm), "share", series)
    return page.html()
