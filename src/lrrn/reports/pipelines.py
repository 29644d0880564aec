"""A saved Pipeline in the place of an estimator: what reports ask of a model, in the units of the Pipeline's input."""

from __future__ import annotations

import hashlib
import json
from typing import Any, final

import numpy as np
from sklearn.pipeline import Pipeline

from lrrn.bounds import LipschitzBound
from lrrn.estimators import LRRNRegressor, certify_pipeline
from lrrn.estimators._base import Array, LiftedEstimator
from lrrn.estimators.affine import AffineChain, AffineMap, split
from lrrn.persistence.serialization import deciding
from lrrn.persistence.values import plain


@final
class PipelineModel:
    """A fitted Pipeline of affine steps and an estimator, with the methods and attributes of an estimator that reports use.

    The norm of perturbations is "scaled" if the Pipeline begins with a scaler of the features: Euclidean after every feature is
    divided by its scale. Otherwise it is Euclidean in the units of X.

    Parameters
    ----------
    pipeline : Pipeline
        As for :func:`lrrn.certify_pipeline`.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.steps, self.last = split(pipeline)
        self.n_features_in_ = int(self._first.n_features_in_)
        self.chunk_rows_, self.network_ = self.last.chunk_rows_, self.last.network_
        self.loss_curve_ = self.last.loss_curve_
        scaled = AffineMap.of(self._first).diagonal if self.steps else self.last._norm(None) == "scaled"
        self.norm = "scaled" if scaled else "euclidean"

    @property
    def _first(self) -> Any:
        return self.steps[0][1] if self.steps else self.last

    @property
    def classes_(self) -> Array:
        """Labels of a classifier."""
        return self.last.classes_

    def predict(self, X: Array) -> Array:
        """Return the predictions of the Pipeline."""
        return np.asarray(self.pipeline.predict(X))

    def energy(self, X: Array) -> Array:
        """Return the energies of the network at what the steps make of X."""
        for _, step in self.steps:
            X = step.transform(X)
        return self.last.energy(X)

    def certificate(self, X: Array, how: Any = "auto") -> Any:
        """Return the certificate of the Pipeline; ``how`` is the method or, for a regressor, the sizes of perturbations."""
        if isinstance(self.last, LRRNRegressor):
            return certify_pipeline(self.pipeline, X, eps=how, norm=self.norm)
        return certify_pipeline(self.pipeline, X, how, norm=self.norm)

    def _norm(self, norm: None = None) -> str:
        return self.norm

    def _unit(self) -> float:
        """Return the size, in the norm, that a perturbation needs at least to move the network's input by 1."""
        return 1.0 if self.norm == "scaled" else 1 / self._rate

    @property
    def _rate(self) -> float:
        """Proven bound on how far the network's input moves per unit of a move of X in the norm."""
        chain, Z = AffineChain(self.n_features_in_), np.zeros((1, self.n_features_in_))
        for _, step in self.steps:
            Z = chain.through(step, Z)
        chain.end(self.last.scale_in_)
        return chain.rates(self.norm)[0]

    @property
    def lipschitz_(self) -> LipschitzBound:
        """Proven bound on the Lipschitz constant of the prediction as a function of X, in the norm."""
        bound = self.last._constant()
        return LipschitzBound((*bound.per_layer, self._rate), bound.method)


def last_of(model: Any) -> LiftedEstimator:
    """Return the estimator of a model: itself, or the last step of a Pipeline."""
    return model.last if isinstance(model, PipelineModel) else model


def identity_of(model: Any) -> str:
    """Return a hash of all that decides what a model computes; models that differ in any of it are taken for different ones."""
    tensors, values = deciding(model.pipeline if isinstance(model, PipelineModel) else model)
    digest = hashlib.blake2b(json.dumps(plain(values), default=repr).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
