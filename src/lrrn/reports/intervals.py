"""Certify a regressor: the intervals that its predictions stay in under perturbations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lrrn.datasets.rows import Rows
from lrrn.estimators import LRRNRegressor
from lrrn.reports.evaluation import finite, heading_of, sizes_for
from lrrn.reports.page import Page
from lrrn.reports.pipelines import PipelineModel, identity_of
from lrrn.reports.scoring import ALL, Parts, Share, over_rows

Array = NDArray[Any]


@final
@dataclass(frozen=True)
class Intervals:
    """Certified intervals of a regressor's predictions; perturbations in the norm ``norm``, intervals in the units of y.

    Attributes
    ----------
    name : str
        Name of the model.
    predictions : array of shape (n_samples,) or (n_samples, n_targets)
    ends : dict of float to (lower, upper)
        By perturbation size: arrays of the shape of ``predictions``.
    seconds : float
        Time taken.
    norm : str
        Norm of the perturbations, "euclidean" or "scaled"; see :class:`lrrn.estimators.RegressionCertificate`.
    """

    name: str
    predictions: Array = field(repr=False)
    ends: dict[float, tuple[Array, Array]] = field(repr=False)
    seconds: float = 0.0
    norm: str = "euclidean"

    def half_width(self, eps: float) -> Array:
        """Return the half-widths of all intervals at one perturbation size."""
        lower, upper = self.ends[eps]
        return (upper - lower) / 2

    def as_json(self, samples: bool = True) -> dict[str, Any]:
        """Return figures and, if ``samples``, arrays, for ``json.dump``; null where a solve did not converge."""
        content: dict[str, Any] = {"name": self.name, "n_samples": len(self.predictions), "guarantee": "deployed"}
        content["norm"] = self.norm
        content["half_width"] = {f"{size:g}": finite(np.mean(self.half_width(size))) for size in self.ends}
        content["seconds"] = self.seconds
        if samples:
            content["samples"] = {"prediction": self.predictions.tolist()}
            for k, end in enumerate(("lower", "upper")):
                content["samples"][end] = {f"{size:g}": finite(self.ends[size][k]) for size in self.ends}
        return content


def certify(
    name: str,
    model: LRRNRegressor | PipelineModel,
    rows: Rows,
    eps: Sequence[float] | None = None,
    samples: Path | None = None,
    share: Share = ALL,
    progress: str | None = None,
) -> Intervals:
    """Certify the predictions of a regressor; inside :func:`lrrn.runtime.ranks.joined` all ranks share the work.

    Parameters
    ----------
    name : str
        Name of the model in the result.
    model : LRRNRegressor, or PipelineModel of one
    rows : Rows
        Targets are ignored.
    eps : sequence of float, optional
        Perturbation sizes, in the model's default norm. By default 0.1, 0.25 and 0.5, times the common scale that
        ``standardize`` found.
    samples : path, optional
        Write predictions and intervals to this ``.npz`` or ``.parquet`` file.
    share, progress
        As in :func:`lrrn.reports.audit.certify`.

    Returns
    -------
    Intervals
    """
    start, sizes = time.perf_counter(), sizes_for(model, eps)

    def work(X: Array, y: Array | None, _: int) -> dict[str, Array]:
        found = model.certificate(X, sizes)
        columns = {"prediction": found.prediction}
        for size, (lower, upper) in found.intervals.items():
            columns |= {f"lower {size}": lower, f"upper {size}": upper}
        return columns

    parts = None
    if samples is not None:
        parts = Parts(samples, {"model": identity_of(model), "sizes": list(sizes), "as": "certify"})
    columns = over_rows(rows, model.chunk_rows_, work, parts, share, progress)
    ends = {size: (columns[f"lower {size}"], columns[f"upper {size}"]) for size in sizes}
    return Intervals(name, columns["prediction"], ends, time.perf_counter() - start, model._norm(None))


def as_table(found: Intervals) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a table, with one row per perturbation size."""
    rows = []
    for size in found.ends:
        widths = found.half_width(size)
        rows.append([f"{size:g}", *(f"{figure:.3g}" for figure in (np.mean(widths), np.median(widths), np.max(widths)))])
    return [heading_of(found.norm), "mean half-width", "median", "largest"], rows


def summary(found: Intervals) -> str:
    """Return the figures that do not depend on the perturbation size, in a sentence."""
    n = len(found.predictions)
    return f"{n} samples; half-widths of certified intervals, in the units of the target; {found.seconds:.1f} s."


def as_page(title: str, found: Intervals) -> str:
    """Return a self-contained HTML page: the figures, and the distribution of the half-widths."""
    page = Page(title)
    page.text(summary(found))
    page.table(*as_table(found))
    page.heading("Certified intervals")
    page.text(
        "Every prediction stays in its interval under every perturbation of the given norm. It is proven, with the "
        "solver's error and rounding inside it. It says nothing about the true target."
    )
    widths = {f"norm {size:g}": found.half_width(size).ravel() for size in found.ends}
    shown = {name: values[np.isfinite(values)] for name, values in widths.items() if np.isfinite(values).any()}
    if shown:
        page.histograms("Half-widths of the intervals", "half-width", shown)
    return page.html()
