"""Affine steps of a scikit-learn Pipeline as matrices, with the rounding errors of their computation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.decomposition import PCA
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler

from lrrn.estimators._base import Array, LiftedEstimator
from lrrn.linalg.verified import EPS, UNDERFLOW, spectral_norm

AFFINE: dict[str, type] = {step.__name__: step for step in (StandardScaler, MinMaxScaler, MaxAbsScaler, RobustScaler, PCA)}
"""Steps that are affine maps, by the name of their class."""
LEAST = 1e-12
"""Smallest effect of a single feature that is told from none, relative to the largest of all features together."""
SUPPORTED = (
    "use StandardScaler, RobustScaler, MinMaxScaler or MaxAbsScaler (without clip), PCA or 'passthrough', and one of lrrn's "
    "estimators as the last step"
)


def split(pipeline: Any) -> tuple[list[tuple[str, Any]], LiftedEstimator]:
    """Return the names and steps of a Pipeline before its last, without those that do nothing, and the estimator at its end.

    Raise TypeError or ValueError, which name the step, if one is not affine or the last is not an estimator of this library.
    """
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"expected a scikit-learn Pipeline; got {type(pipeline).__name__}")
    steps = working(pipeline.steps[:-1])
    for name, step in steps:
        check_affine(name, step, SUPPORTED)
    return steps, last_step(pipeline, SUPPORTED)


def working(steps: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the steps that do something."""
    return [(name, step) for name, step in steps if step is not None and not isinstance(step, str)]


def check_affine(name: str, step: Any, supported: str) -> None:
    """Raise ValueError, which names the step and says what is supported, if the step is not affine."""
    kind = type(step).__name__
    if type(step) is not AFFINE.get(kind):  # a class derived from one of these may do anything
        raise ValueError(f"step {name!r} of the Pipeline is a {kind}, which is not known to be affine; {supported}")
    if getattr(step, "clip", False):
        raise ValueError(f"step {name!r} of the Pipeline is a {kind} with clip=True, which is not affine; {supported}")


def last_step(pipeline: Pipeline, supported: str) -> LiftedEstimator:
    """Return the estimator at the end of a Pipeline; raise ValueError if it is not one of this library."""
    name, last = pipeline.steps[-1]
    if not isinstance(last, LiftedEstimator):
        raise ValueError(f"the last step {name!r} of the Pipeline is a {type(last).__name__}; {supported}")
    return last


@final
@dataclass(frozen=True, eq=False)
class AffineMap:
    """The map z -> matrix z + offset that a fitted step computes, up to rounding.

    Attributes
    ----------
    matrix : array of shape (n_out, n_in), or (n,) for a diagonal matrix
        In float64; the relative error of an entry is a few units in the last place.
    offset : array of shape (n_out,)
        Upper bounds on the absolute values of all that is added.
    eps : float
        Unit of rounding of the parameters.
    """

    matrix: Array
    offset: Array
    eps: float

    @classmethod
    def of(cls, step: Any) -> AffineMap:
        """Read the map from a fitted step."""
        n = step.n_features_in_
        if isinstance(step, SimpleImputer):  # the identity, where a value is not missing
            return cls(np.ones(n), np.zeros(n), EPS)
        if isinstance(step, PCA):
            matrix = np.asarray(step.components_, dtype=np.float64)
            used = [step.components_, step.mean_]
            if step.whiten:
                deviation = np.sqrt(np.asarray(step.explained_variance_, dtype=np.float64))
                least = np.finfo(step.explained_variance_.dtype).eps
                matrix = matrix / np.maximum(deviation, least)[:, None]
                used.append(step.explained_variance_)
            return cls(matrix, np.abs(matrix) @ np.abs(step.mean_), _coarsest(*used))
        if isinstance(step, MinMaxScaler):
            return cls(np.asarray(step.scale_, dtype=np.float64), np.abs(step.min_), _coarsest(step.scale_, step.min_))
        centre = getattr(step, "mean_" if isinstance(step, StandardScaler) else "center_", None)
        centred = getattr(step, "with_mean", getattr(step, "with_centering", False))
        centre = np.zeros(n) if centre is None or not centred else centre
        scale = np.ones(n) if step.scale_ is None else step.scale_
        matrix = 1 / np.asarray(scale, dtype=np.float64)
        return cls(matrix, np.abs(matrix * centre), _coarsest(centre, scale))

    @property
    def diagonal(self) -> bool:
        """Whether every feature is only scaled and shifted."""
        return self.matrix.ndim == 1

    @property
    def size(self) -> float:
        """Upper bound on the spectral norm of the matrix of absolute values."""
        return float(np.abs(self.matrix).max() if self.diagonal else np.linalg.norm(self.matrix)) * (1 + 1e-6)

    def rounding(self, dtype: np.dtype[Any]) -> float:
        """Return g such that the computed value is within g (|matrix| |z| + offset) of the exact one, entry by entry."""
        terms = 1 if self.diagonal else self.matrix.shape[1]
        return float(2 * (terms + 8) * max(self.eps, np.finfo(dtype).eps))


def _coarsest(*arrays: Array) -> float:
    """Return the largest unit of rounding of the types of these arrays."""
    return max(float(np.finfo(np.result_type(array, np.float16)).eps) for array in arrays)


@final
class AffineChain:
    """A chain of affine steps at given samples: its matrix, and a bound on the rounding errors that predictions have.

    With A the exact matrix, f the function that is computed and x a sample, |f(x') - f(x) - A (x' - x)| is at most
    ``error`` + ``slope`` |x' - x| for every x' of the same type. The rounding errors of a step at x are bounded by its input
    there, and those at x' by how far that input can have moved. ``slope`` bounds the rounding error of ``matrix`` too. Values
    that are missing at x are missing at x', and features that are ``fixed`` are equal.

    Parameters
    ----------
    n_features : int
        Number of features of the samples.
    """

    def __init__(self, n_features: int) -> None:
        self.matrix: Array = np.ones(n_features)
        self.scale: Array = np.ones(n_features)
        self.fixed: Array = np.zeros(n_features, dtype=bool)
        self.error: Array | float = 0.0
        self.slope = 0.0
        self._size = 1.0

    def through(self, step: Any, Z: ArrayLike) -> Any:
        """Append a step; return what it computes from its input ``Z``."""
        # before the step, which may work in place; a missing value adds no error
        size = np.nan_to_num(np.abs(np.asarray(Z, dtype=np.float64)), nan=0.0)
        out = step.transform(Z)
        affine, computed = AffineMap.of(step), np.asarray(out)
        g, matrix = affine.rounding(computed.dtype), np.abs(affine.matrix)
        terms = (size * matrix if affine.diagonal else size @ matrix.T) + affine.offset
        here = g * np.linalg.norm(terms, axis=1) * (1 + 1e-6)
        here += float(np.finfo(computed.dtype).tiny) * size.shape[1] * computed.shape[1]  # underflow
        self._append(affine, g)
        self.error = self.error + 2 * here
        return out

    def spread(self, parts: Sequence[tuple[AffineChain, slice, Array]], fixed: Array, n_out: int) -> None:
        """Make this the map of chains side by side, each from some features to some outputs; other outputs are constant.

        Parameters
        ----------
        parts : sequence of (chain, rows, columns)
            Chains, which of the outputs are theirs, and the indices of their features.
        fixed : bool array of shape (n_features,)
            Features that do not move.
        n_out : int
            Number of outputs.
        """
        self.matrix = np.zeros((n_out, len(fixed)))
        for chain, rows, columns in parts:
            self.matrix[rows, columns] = np.diag(chain.matrix) if chain.matrix.ndim == 1 else chain.matrix
            self.error = self.error + chain.error
            self.slope += chain.slope
        self.matrix[:, fixed] = 0.0
        self.fixed = fixed
        self._size = float(np.linalg.norm(self.matrix)) * (1 + 1e-6)
        lengths = np.linalg.norm(self.matrix, axis=0)
        self.scale = 1 / np.where(lengths > 0, lengths, 1.0)

    def end(self, scale: float | Array) -> None:
        """Append the division by an estimator's scale, whose rounding its certificate accounts for."""
        self._append(AffineMap(np.broadcast_to(1 / np.asarray(scale), self.matrix.shape[:1]), np.zeros(()), EPS), 0.0)

    def _append(self, affine: AffineMap, g: float) -> None:
        size, matrix = affine.size, affine.matrix
        self.slope = size * self.slope + g * size * (self._size + self.slope)
        self.error = size * (1 + g) * self.error
        self._size *= size
        if affine.diagonal and self.matrix.ndim == 1:
            self.matrix = self.matrix * matrix
            self.scale = 1 / np.abs(np.where(self.matrix == 0, 1.0, self.matrix))
        elif affine.diagonal:
            self.matrix = matrix[:, None] * self.matrix
        else:
            self.matrix = matrix @ self.matrix if self.matrix.ndim == 2 else matrix * self.matrix

    def rates(self, norm: str) -> tuple[float, Array]:
        """Return proven bounds on how far the output moves per unit of a move of the input, beyond ``error``.

        Parameters
        ----------
        norm : {"euclidean", "scaled"}
            Norm of the move. "scaled" divides every feature by what the leading diagonal steps divide it by.

        Returns
        -------
        rate : float
            For moves in any direction, measured in the norm.
        by_feature : array of shape (n_features,)
            For moves of one feature alone, in its own units; infinite for a feature that is fixed.
        """
        unit = self.scale if norm == "scaled" else np.ones_like(self.scale)
        scaled = self.matrix * unit
        largest = np.abs(scaled).max() if scaled.ndim == 1 else spectral_norm(torch.as_tensor(scaled))
        columns = np.abs(self.matrix) if self.matrix.ndim == 1 else np.linalg.norm(self.matrix, axis=0)
        slack = 1 + 4 * (len(self.matrix) + 8) * EPS
        rate = (float(largest) + 2 * self.slope * float(unit.max())) * slack + UNDERFLOW
        # for a feature without effect some small number, so that quotients stay finite
        alone = np.maximum((columns + 2 * self.slope) * slack, LEAST * rate)
        return rate, np.where(self.fixed, np.inf, alone)
