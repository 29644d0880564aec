"""A scikit-learn transformer and outlier detector (out-of-distribution detection) based on the free energy."""

from __future__ import annotations

import os
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassNamePrefixFeaturesOutMixin, OutlierMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import Tensor

from lrrn.certificates.energies import decide_solution
from lrrn.estimators._base import Array, LiftedEstimator
from lrrn.estimators.certificate import SampleCertificate
from lrrn.estimators.held_out import split_off_validation
from lrrn.learning import Data, FreeEnergy
from lrrn.learning.settings import checked_number
from lrrn.learning.trainer import Callback
from lrrn.network import LRRN, Conv
from lrrn.qp import DEFAULT_TOL


@final
class LRRNEnergyModel(ClassNamePrefixFeaturesOutMixin, TransformerMixin, OutlierMixin, LiftedEstimator):  # type: ignore[misc]
    """Unsupervised lifted network: the free energy of an input is its outlier score, and its activations are features.

    The energy is low for in-distribution inputs and high for out-of-distribution inputs. It is not normalised: it ranks inputs,
    but exp(-energy) is not a density, and energies of different models are not comparable.

    Parameters
    ----------
    hidden_sizes : int, Conv, or tuple of these, default=(32, 32)
        Widths of the layers, or convolutions, which need ``image_shape``. :meth:`transform` returns the activations of the
        last.
    beta : float or tuple of float, default=1.0
        Weights of the reconstruction terms; a single number means (beta, ..., beta).
    gamma : float, default=1/8
        Discount factor: layer k is weighted by gamma^k.
    constraint : {"free", "nonneg", "box"} or (lo, hi), default="nonneg"
        Set of the activations of every layer.
    contamination : float, default=0.1
        Share of the training data to classify as outliers, in (0, 0.5].
    init : {"glorot", "orthogonal", "uniform"}, default="glorot"
        Initial weights.
    optimizer : {"sgd", "adam", "adamw"}, default="adam"
    schedule : {None, "one_cycle", "cosine"}, default="cosine"
    learning_rate : float, default=0.002
    batch_size : int, default=32
    epochs : int, default=60
    weight_decay : float, default=0.0
        lambda: the loss has lambda * |W_{L-1}|_F^2 added.
    decoupled_weight_decay : float, default=0.0
        Decoupled weight decay of AdamW, on all weights; needs optimizer="adamw".
    max_weight_norm : float, optional
        Upper bound on the spectral norm of hidden weights; keeps inference well conditioned in long runs.
    standardize : {False, True, "common", "features"}, default=False
        True or "common": centre every feature and divide all of them by one common scale; radii stay Euclidean, in the units of
        X. "features": divide every feature by its own standard deviation (constant features by 1); radii are in the norm of the
        scaled features unless ``norm="input"`` is asked for. Energies are those of the scaled data.
    early_stopping : bool, default=False
        Hold out ``validation_fraction`` of the data, stop after ``n_iter_no_change`` epochs without a lower validation energy,
        and restore the best parameters.
    validation_fraction : float, default=0.1
    n_iter_no_change : int, default=10
    max_seconds : float, optional
        Time that :meth:`fit` may take. Training ends after the first step that ends later, with a ConvergenceWarning. The
        result then depends on the speed of the machine.
    shifts, flips : int and bool, default=0 and False
        Data augmentation for images, at every step: random shifts by up to this many pixels in each direction, and mirroring
        left to right with probability 1/2.
    reuse_activations : bool, default=False
        Warm-start solves from the activations of the previous epoch.
    tol, max_sweeps
        Tolerance and maximum sweeps of the solves during training; predictions use float64 and its default tolerance.
    on_failure : {"warn", "raise", "ignore"}, default="warn"
        Behaviour of predictions and energies if a sample's solve does not converge: issue a ConvergenceWarning, raise
        :class:`lrrn.ConvergenceError`, or neither. Certified radii hold wherever the solve at the perturbed input converges.
        With "raise", no prediction is returned otherwise.
    dtype : {"float32", "float64"}, default="float32"
        Type of the parameters.
    device : {"auto", "cpu", "cuda"} or torch.device, default="auto"
    checkpoint : path-like, optional
        File for the state of the run, written at regular intervals and on Ctrl-C.
    resume : bool, default=False
        Resume from ``checkpoint`` if it exists.
    log : path-like, optional
        File for one JSON record per epoch.
    callbacks : tuple of callables, default=()
        Called after each epoch with the trainer and the epoch's record; one that returns True ends training.
    random_state : int, RandomState or None, default=None
    verbose : int, default=0
        Whether to show progress on a terminal.
    max_condition : float, optional
        Upper bound on the estimated condition number of the Hessian: hidden weights are scaled down after a step that exceeds
        it. It keeps solves fast in long runs; 30 to 40 suits wide and convolutional networks.
    image_shape : (int, int, int), optional
        Channels, height and width, if samples are images: for convolutions in ``hidden_sizes``, ``shifts`` and ``flips``. X
        then has shape (n_samples, n_features) or (n_samples, channels, height, width).

    Attributes
    ----------
    network_ : LRRN
        The trained network.
    offset_ : float
        Score below which a sample is classified as an outlier.
    lipschitz_ : LipschitzBound
        Proven bound on the Lipschitz constant of :meth:`transform`, in the norm of the radii.
    offset_in_ : array of shape (n_features,)
        What is subtracted from every feature.
    scale_in_ : float, or array of shape (n_features,)
        What the features are divided by; an array with ``standardize="features"``.
    loss_curve_ : list of float
        Mean energy of the training data in each epoch.
    history_ : list of dict
        One record per epoch.
    n_iter_ : int
        Number of epochs.
    n_features_in_ : int

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from lrrn import LRRNEnergyModel
    >>> X = load_digits().data / 16
    >>> model = LRRNEnergyModel(epochs=5, random_state=0).fit(X)
    >>> bool(model.energy(1 - X).mean() > model.energy(X).mean())
    True
    """

    READS_OUT: ClassVar[bool] = False

    contamination: float

    def __init__(
        self,
        hidden_sizes: int | Conv | tuple[int | Conv, ...] = (32, 32),
        beta: float | tuple[float, ...] = 1.0,
        gamma: float = 1 / 8,
        constraint: Any = "nonneg",
        contamination: float = 0.1,
        init: str = "glorot",
        optimizer: str = "adam",
        schedule: str | None = "cosine",
        learning_rate: float = 0.002,
        batch_size: int = 32,
        epochs: int = 60,
        weight_decay: float = 0.0,
        decoupled_weight_decay: float = 0.0,
        max_weight_norm: float | None = None,
        standardize: bool | str = False,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        max_seconds: float | None = None,
        shifts: int = 0,
        flips: bool = False,
        reuse_activations: bool = False,
        tol: float | None = None,
        max_sweeps: int = 1000,
        on_failure: str = "warn",
        dtype: str = "float32",
        device: str = "auto",
        checkpoint: str | os.PathLike[str] | None = None,
        resume: bool = False,
        log: str | os.PathLike[str] | None = None,
        callbacks: tuple[Callback, ...] = (),
        random_state: Any = None,
        verbose: int = 0,
        max_condition: float | None = None,
        image_shape: tuple[int, int, int] | None = None,
    ) -> None:
        self._store(locals())

    def fit(self, X: ArrayLike, y: Any = None) -> LRRNEnergyModel:
        """Learn the energy of unlabelled samples.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
        y : ignored

        Returns
        -------
        LRRNEnergyModel
            The estimator itself.
        """
        self.check_parameters()
        features = validate_data(self, self._table(X), dtype=[np.float64, np.float32])
        seed = self._prepare(features)
        self._warn_of_scale(features, stacklevel=2)
        self._build(features.shape[1])
        device = self.network_.W[0].device
        rows, validate = np.arange(len(features)), None
        if self.early_stopping:
            rows, held = split_off_validation(len(features), self.validation_fraction, seed, None)
            x_held = self.scaling.apply(features[held], torch.float64, device)

            def validate(net: LRRN) -> float:
                return -float(self._infer(x_held, on_failure="warn").energy.mean())

        self._train(FreeEnergy(), Data(self.scaling.apply(features[rows], self.network_.W[0].dtype, device)), seed, validate)
        self._n_features_out = int(self.network_.sizes[-1])
        scores = self._over_chunks(X, lambda x: -self._infer(x, on_failure="warn").energy)
        self.offset_ = float(np.percentile(scores, 100 * self.contamination))
        return self

    def _check_own(self) -> None:
        checked_number("contamination", self.contamination, "be a number in (0, 0.5]", lambda share: 0 < share <= 0.5)
        if not self._widths:
            raise ValueError("hidden_sizes must name at least one layer; got none")

    def score_samples(self, X: ArrayLike) -> Array:
        """Return minus the energy of each sample: high for inliers, low for outliers.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)

        Returns
        -------
        array of shape (n_samples,)
        """
        return -self.energy(X)

    def decision_function(self, X: ArrayLike) -> Array:
        """Return the score minus ``offset_``: negative for outliers.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)

        Returns
        -------
        array of shape (n_samples,)
        """
        return self.score_samples(X) - self.offset_

    def predict(self, X: ArrayLike) -> Array:
        """Return +1 for inliers and -1 for outliers.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)

        Returns
        -------
        int array of shape (n_samples,)
        """
        return np.where(self.decision_function(X) < 0, -1, 1)

    def certificate(self, X: ArrayLike, norm: str | None = None) -> SampleCertificate:
        """Return decisions (+1 or -1), scores, certified radii and energies of samples, all from one solve.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
        norm : {None, "input", "scaled"}, default=None
            Norm of the radii: "input" is the Euclidean norm in the units of X, "scaled" the Euclidean norm after every feature
            is divided by its ``scale_in_``. None is "scaled" with ``standardize="features"``, otherwise "input".

        Returns
        -------
        SampleCertificate
            ``margin`` is the distance of the energy from the threshold.
        """
        check_is_fitted(self, "network_")
        named = self._norm(norm)

        def work(x: Tensor) -> dict[str, Tensor]:
            free = self._infer(x)
            radius = decide_solution(self.network_, x, free, -self.offset_, "deployed", DEFAULT_TOL[torch.float64])
            return {"radius": self.scaling.radius(radius, x, norm), "energy": free.energy, "converged": free.converged}

        columns = self._columns(X, work)
        score = -columns["energy"] - self.offset_
        columns["prediction"], columns["margin"] = np.where(score < 0, -1, 1), np.abs(score)
        scale = self.scaling.feature_scale(norm)
        return SampleCertificate(**columns, method="energy", norm=named, feature_scale=scale, by_products=False)

    def certified_radius(self, X: ArrayLike, norm: str | None = None) -> Array:
        """Return the radius within which each sample's decision (+1 or -1) is proven not to change.

        Parameters
        ----------
        X, norm
            As in :meth:`certificate`.

        Returns
        -------
        array of shape (n_samples,)
        """
        return self.certificate(X, norm).radius

    def transform(self, X: ArrayLike) -> Array:
        """Return the activations of the last layer.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)

        Returns
        -------
        array of shape (n_samples, hidden_sizes[-1])
        """
        return self._over_chunks(X, lambda x: self._infer(x).output)

    def inverse_transform(self, Z: ArrayLike) -> Array:
        """Reconstruct inputs from activations of the last layer, by layers: z_k = W_k^T z_{k+1} - c_k, projected onto C_k.

        Parameters
        ----------
        Z : array of shape (n_samples, hidden_sizes[-1])

        Returns
        -------
        array of shape (n_samples, n_features)
        """
        check_is_fitted(self, "network_")
        codes = check_array(Z, dtype=[np.float64, np.float32])
        net = self.network_
        if codes.shape[1] != net.sizes[-1]:
            raise ValueError(f"Z must have {net.sizes[-1]} columns, as many as transform returns; got {codes.shape[1]}")
        z = torch.as_tensor(np.require(codes, requirements=["C", "W"])).to(device=net.W[0].device, dtype=torch.float64)
        below = net.energy_snapshot(torch.float64).reconstruct(z, len(net.W))
        return below.cpu().numpy() * self.scale_in_ + self.offset_in_
