"""Common interface of the classifiers in the record: labels, certified radii, attacks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lrrn.attacks import as_image_model
from lrrn.certificates.radius import certify_solution
from lrrn.estimators import LRRNClassifier
from lrrn.network.solution import Solution
from lrrn.qp import DEFAULT_TOL
from lrrn.reports import audit
from lrrn.runtime.threads import blas_threads
from lrrn.studies.common.measures import METHODS
from lrrn.studies.record.baselines import Baseline

Array = NDArray[Any]
ImageShape = tuple[int, int, int]
SHARED, BRANCHED, LOCAL = "shared", "branched", "local"
"""Per-sample certificates: ``SHARED`` for all images in batches, ``BRANCHED`` for those of them that are near a size, and
``LOCAL`` for the first images one by one. What has the first has the second, too."""
ROWS = 2048
"""Batch size for scores."""
KEPT = 2**28
"""Number of activations that are kept for further methods."""


class Contender(Protocol):
    """A trained classifier; labels are class numbers.

    Attributes
    ----------
    methods : tuple of str
        Fast certificates, from loose to tight.
    by_sample : tuple of str
        Certificates per sample: some of ``SHARED`` and ``LOCAL``.
    rows_at_once : int
        Number of images that fit into memory at once.
    n_parameters : int
    """

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of fast certificates."""

    @property
    def by_sample(self) -> tuple[str, ...]:
        """Names of certificates per sample."""

    @property
    def rows_at_once(self) -> int:
        """Largest number of images in a call."""

    @property
    def n_parameters(self) -> int:
        """Numbers learnt or kept."""

    def predict(self, X: Array) -> Array:
        """Return labels."""

    def radii(self, X: Array, method: str, target_radius: float = math.inf, branches: int | None = None) -> Array:
        """Return proven radii; ``BRANCHED`` stops at ``target_radius``, or after ``branches`` branches per image and pair."""

    def attack(self, X: Array, y: Array, sizes: Sequence[float], seed: int) -> Array:
        """Return distances of our own attacks, up to these sizes: 0 where the label is wrong already, inf where none works."""

    def image_model(self, shape: ImageShape) -> nn.Module:
        """Return a torch module from images of a shape, channels first, to scores, for attacks of other libraries."""


@final
class Lifted:
    """A lifted network of this library.

    Parameters
    ----------
    model : LRRNClassifier
        Fitted, with classes 0, 1, ...
    bound_seconds : float
        Time budget of the multiplier bounds, as in :func:`lrrn.certify`.
    """

    def __init__(self, model: LRRNClassifier, bound_seconds: float) -> None:
        if model.scaling.changes:
            raise ValueError(
                "rows of the record measure in the units of the network's inputs; leave standardize out of recipes"
            )
        self._model, self._seconds = model, bound_seconds
        self._solved: dict[bytes, Solution] = {}
        self._has_matrices = model.network_.energy_snapshot(torch.float64).has_matrices

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of fast certificates: in networks with large convolutions, those without a matrix."""
        return tuple(method for method in METHODS if self._has_matrices or method != "multiplier")

    @property
    def by_sample(self) -> tuple[str, ...]:
        """Names of certificates per sample."""
        return (SHARED, LOCAL) if self._has_matrices else (SHARED,)

    @property
    def rows_at_once(self) -> int:
        """Number of images, by the rule of the estimators."""
        return self._model.chunk_rows_

    @property
    def n_parameters(self) -> int:
        """Numbers learnt."""
        return sum(p.numel() for p in self._model.network_.parameters())

    def predict(self, X: Array) -> Array:
        """Return labels."""
        known = self._solved.get(_digest(X))
        return self._model.predict(X) if known is None else known.output.argmax(-1).cpu().numpy()

    def radii(self, X: Array, method: str, target_radius: float = math.inf, branches: int | None = None) -> Array:
        """Return certified radii. Their constants are computed once, and each image is solved once for all methods."""
        net, tol, key = self._model.network_, DEFAULT_TOL[torch.float64], _digest(X)
        x = torch.from_numpy(X).to(net.W[0].device, torch.float64)
        # several BLAS threads are faster only for wide networks
        with blas_threads(1 if sum(net.sizes[1:]) < 512 else torch.get_num_threads()):
            solution = self._solved[key] if key in self._solved else net.infer(x, tol=tol)
            if method not in (BRANCHED, LOCAL) and (len(self._solved) + 1) * len(X) * sum(net.sizes[1:]) <= KEPT:
                self._solved[key] = solution
            # what branches start from is cheap in wide networks: the result is compared with the other radii anyway
            seconds = None if method == BRANCHED else self._seconds
            certificate = certify_solution(net, x, solution, method, "deployed", seconds, tol, target_radius, branches)
        return certificate.radius.cpu().numpy()

    def attack(self, X: Array, y: Array, sizes: Sequence[float], seed: int) -> Array:
        """Run the attacks of ``lrrn attack``."""
        distances = audit.attack("", self._model, X, y, sizes, "paper", seed=seed).distances
        assert distances is not None
        return distances

    def image_model(self, shape: ImageShape) -> nn.Module:
        """Return the network on images."""
        return as_image_model(self._model, shape)


@final
class Plain:
    """A baseline classifier.

    Parameters
    ----------
    model : Baseline
    """

    by_sample: tuple[str, ...] = ()
    rows_at_once = 10**6

    def __init__(self, model: Baseline) -> None:
        self._model = model
        self._device = next(model.parameters()).device

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the certificates of this baseline."""
        return self._model.methods

    @property
    def n_parameters(self) -> int:
        """Numbers learnt or kept."""
        return self._model.n_parameters

    def _inputs(self, X: Array) -> Tensor:
        return torch.from_numpy(np.asarray(X)).to(self._device, torch.float64)

    @torch.no_grad()
    def predict(self, X: Array) -> Array:
        """Return labels."""
        return torch.cat([self._model(x).argmax(-1) for x in self._inputs(X).split(ROWS)]).cpu().numpy()

    @torch.no_grad()
    def radii(self, X: Array, method: str, target_radius: float = math.inf, branches: int | None = None) -> Array:
        """Return proven radii, which have closed forms: there is nothing to search."""
        return self._model.radii(self._inputs(X), method).cpu().numpy()

    def attack(self, X: Array, y: Array, sizes: Sequence[float], seed: int) -> Array:
        """Run the same attacks as on our networks."""
        rows = np.flatnonzero(self.predict(X) == y)
        distances = np.zeros(len(X))
        if len(rows) == 0:
            return distances
        x, label = self._inputs(X[rows]), torch.from_numpy(y[rows])

        def measured(some: Array, moved: Tensor) -> Array:
            where = moved.cpu().numpy()
            norms = np.linalg.norm(where - X[rows[some]], axis=1)
            return np.where(self.predict(where) != y[rows[some]], norms, np.inf)

        distances[rows] = audit.attack_distances(self._model, x, label, sizes, measured, seed=seed)
        return distances

    def image_model(self, shape: ImageShape) -> nn.Module:
        """Return the baseline on images."""
        return _OnImages(self._model)


@final
class _OnImages(nn.Module):
    """Module from images of any float type to scores of the same type, computed in float64."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.flatten(1).to(torch.float64)).to(x.dtype)


def _digest(X: Array) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(X).tobytes()).digest()
