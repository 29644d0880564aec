"""Scaling of features and targets: what they are centred and divided by, sizes in both units, and a warning of bad scales."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lrrn.linalg.verified import EPS

Array = NDArray[Any]
LARGE, UNEVEN, LOOKED_AT = 5.0, 30.0, 2000
"""Root mean square of the features, and their largest standard deviation over the median one, above which a fit warns; and the
largest number of samples used for this check."""
SQUARABLE = 300
"""Largest exponent of two, of either sign, of values whose squares are summed as they are."""
SMALLEST, LARGEST, APART = 1e-250, 1e250, 1e250
"""Limits of scales, and of the quotient of two: radii in the units of X neither overflow to infinity nor lose their digits."""

NORMS = {"input": "euclidean", "euclidean": "euclidean", "scaled": "scaled"}
"""Values of ``norm``, and the name that a certificate has for each."""


@final
@dataclass(frozen=True, eq=False)
class Scaling:
    """The map (X - offset) / scale from features to a network's input, and sizes in the units of both.

    Attributes
    ----------
    offset : array of shape (n_features,)
    scale : float, or array of shape (n_features,)
    """

    offset: Array
    scale: float | Array

    @property
    def changes(self) -> bool:
        """Whether the network's input differs from the features."""
        return bool(np.ndim(self.scale) or self.scale != 1 or np.any(self.offset))

    def apply(self, X: Array, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return rows of X scaled for the network."""
        if not self.changes:
            return torch.as_tensor(np.require(X, requirements=["C", "W"])).to(device=device, dtype=dtype)
        scaled = (X.astype(np.float64) - self.offset) / self.scale
        return torch.as_tensor(scaled).to(device=device, dtype=dtype)

    def norm(self, norm: str | None) -> str:
        """Return the norm that ``norm`` names: "euclidean", or "scaled" for |(X' - X) / scale|, the one of the network."""
        if norm is None:
            return "scaled" if np.ndim(self.scale) else "euclidean"
        if norm not in NORMS:
            raise ValueError(f"unknown norm {norm!r}; use 'input' for the Euclidean norm of X, or 'scaled'")
        return NORMS[norm]

    def unit(self, norm: str | None = None) -> float:
        """Return the size, in this norm of X, that a perturbation needs at least to move the network's input by 1."""
        return 1.0 if self.norm(norm) == "scaled" else float(np.min(self.scale))

    def radius(self, radius: Tensor, x: Tensor, norm: str | None = None) -> Tensor:
        """Convert radii from the network's units to a norm of X, minus the rounding error of the scaling."""
        if not self.changes:
            return radius
        rounding = 16 * EPS * (torch.linalg.vector_norm(x, dim=-1) + self._shift + radius)
        return (radius - rounding).clamp(min=0.0) * (self.unit(norm) * (1 - 4 * EPS))

    def reach(self, eps: float, x: Tensor, norm: str | None = None) -> float:
        """Convert a perturbation size from a norm of X to the network's units, plus the rounding of scaling both inputs."""
        if not self.changes:
            return eps
        rounding = 16 * EPS * float(torch.linalg.vector_norm(x, dim=-1).max() + self._shift)
        return eps / self.unit(norm) * (1 + 4 * EPS) + rounding

    def feature_scale(self, norm: str | None) -> Array:
        """Return, for each feature, a lower bound on how far it may move alone within a ball of radius 1 in this norm."""
        return np.broadcast_to(self.scale / self.unit(norm) * (1 - 4 * EPS), self.offset.shape)

    @property
    def _shift(self) -> float:
        """How far the scaling moves the origin, in the network's units."""
        return float(np.linalg.norm(self.offset / self.scale))


def moments(values: Array) -> tuple[Array, Array, Array]:
    """Return means and variances of columns after division by powers of two, and the exponents of these.

    Squares of very large or small values overflow or underflow, so columns of these are divided first, which is exact. Others
    are taken as they are: their exponent is 0.
    """
    exponent = np.frexp(np.maximum(values.max(axis=0), -values.min(axis=0)).astype(np.float64))[1]
    exponent = np.where(np.abs(exponent) > SQUARABLE, exponent, 0)
    if np.any(exponent):
        values = np.ldexp(values.astype(np.float64), -exponent)
    return values.mean(axis=0, dtype=np.float64), values.var(axis=0, dtype=np.float64), exponent


def fitted(X: Array, standardize: bool | str) -> tuple[Array, float | Array]:
    """Return what is subtracted from every feature, and one scale of all features or one for each.

    One common scale leaves balls balls. A feature that is constant is divided by 1.
    """
    if not standardize:
        return np.zeros(X.shape[1]), 1.0
    each = isinstance(standardize, str) and standardize == "features"
    mean, variance, exponent = moments(X)
    offset = np.ldexp(mean, exponent)
    scale: float | Array
    if each:
        # the computed variance of a constant feature is rounding error
        rounding = len(X) * EPS * variance + (len(X) * EPS * mean) ** 2
        scale = np.where(variance > rounding, np.ldexp(np.sqrt(variance), exponent), 1.0)
    else:
        varies = variance > 0
        top = exponent[varies].max() if varies.any() else 0
        of_top = np.ldexp(variance, np.where(varies, 2 * (exponent - top), 0))  # variances, all by one power of two
        scale = float(np.ldexp(np.sqrt(of_top.mean()), top)) if varies.any() else 1.0
    check_scale("X", X, scale)
    if np.max(scale) / np.min(scale) > APART:
        raise ValueError(
            f"features of X have standard deviations from {np.min(scale):.3g} to {np.max(scale):.3g}, too far apart for "
            "float64: choose other units, or leave out features that are noise"
        )
    return offset, scale


def fitted_targets(targets: Array) -> tuple[Array, Array]:
    """Return means and standard deviations of targets of shape (rows, targets); 1 for one that is constant."""
    mean, variance, exponent = moments(targets)
    scale = np.where(variance > 0, np.ldexp(np.sqrt(variance), exponent), 1.0)
    check_scale("y", targets, scale)
    return np.ldexp(mean, exponent), scale


def check_scale(name: str, values: Array, scale: float | Array) -> None:
    """Raise ValueError for values or a scale that are too large or too small to compute with in float64."""
    largest = max(float(values.max()), -float(values.min()))
    if largest <= LARGEST and np.all((np.asarray(scale) >= SMALLEST) & (np.asarray(scale) <= LARGEST)):
        return
    raise ValueError(
        f"{name} has absolute values up to {largest:.3g} and a standard deviation of {np.min(scale):.3g}, and arithmetic needs "
        f"both between {SMALLEST:g} and {LARGEST:g}: multiply {name} by a number that brings them near 1"
    )


def warn_of_scale(X: Array, stacklevel: int) -> None:
    """Warn of features on which networks train badly: of large ones, and of some that are much larger than others.

    ``stacklevel`` counts the calls from this one to the line to name, as that of :func:`warnings.warn` does.
    """
    some = np.asarray(X[:: -(-len(X) // LOOKED_AT)], dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is large
        size, spread = float(np.sqrt(np.mean(np.square(some)))), some.std(axis=0)
        varies = spread > len(some) * EPS * np.abs(some).max(axis=0)  # and not by rounding only
        uneven = float(spread.max() / np.median(spread[varies])) if np.any(varies) else 1.0
    if not (size > LARGE or uneven > UNEVEN):
        return
    why = f"are large, with a root mean square of {size:.3g}" if size > LARGE else "differ in scale"
    advice = "'features'" if uneven > UNEVEN else "True"
    warnings.warn(
        f"the features {why}, and the network may train badly on them: set standardize={advice}, or scale X, images to [0, 1]",
        UserWarning,
        stacklevel=stacklevel + 1,
    )
