"""Predictions of a fitted model on a table, with certified radii or intervals."""

from __future__ import annotations

from typing import Any

from lrrn.datasets.rows import Rows
from lrrn.estimators import LRRNEnergyModel, LRRNRegressor
from lrrn.reports.evaluation import Model
from lrrn.reports.pipelines import last_of
from lrrn.reports.scoring import Array, Columns, over_rows


def predict(model: Model, rows: Rows, radius: bool = False, eps: float | None = None, method: str = "auto") -> Columns:
    """Predict; inside :func:`lrrn.runtime.ranks.joined` all ranks share the work and get the same result.

    Parameters
    ----------
    model : LRRNClassifier, LRRNRegressor, LRRNEnergyModel or PipelineModel
    rows : Rows
        They need not fit into memory, and their targets are ignored.
    radius : bool, default=False
        For a classifier or an energy model: certified radii too.
    eps : float, optional
        For a regressor: certified intervals too, under perturbations of this size, in the units of X.
    method : str, default="auto"
        Of a classifier's radii, as in :func:`lrrn.certify`.

    Returns
    -------
    dict of str to array
        "prediction" and, as asked for, "radius" or "lower" and "upper".
    """
    regression = isinstance(last_of(model), LRRNRegressor)
    if radius and regression:
        raise ValueError("a regressor has intervals, not radii; give a size of perturbations (--eps) instead of --radius")
    if eps is not None and not regression:
        raise ValueError("a size of perturbations (--eps) is for a regressor's intervals; labels have a radius (--radius)")

    certificate: Any = model.certificate  # whose second argument depends on the model

    def work(X: Array, y: Array | None, _: int) -> Columns:
        if eps is not None:
            intervals = certificate(X, eps)
            lower, upper = intervals.intervals[eps]
            return {"prediction": intervals.prediction, "lower": lower, "upper": upper}
        if not radius:
            return {"prediction": model.predict(X)}
        found = certificate(X) if isinstance(last_of(model), LRRNEnergyModel) else certificate(X, method)
        return {"prediction": found.prediction, "radius": found.radius}

    return over_rows(rows, model.chunk_rows_, work)
