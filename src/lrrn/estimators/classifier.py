"""A scikit-learn classifier whose predictions come with certified radii."""

from __future__ import annotations

import os
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from torch.nn import functional

from lrrn.estimators import choices, robust
from lrrn.estimators._base import Array, LiftedEstimator
from lrrn.estimators.available import AvailableIf
from lrrn.estimators.certified_labels import CertifiedLabels
from lrrn.estimators.held_out import split_off_validation
from lrrn.estimators.labels import UNLABELLED, counted, encode, known_classes, sample_weights
from lrrn.estimators.objectives import check_belongs, check_probabilities, made
from lrrn.estimators.parameters import check_class_weight
from lrrn.learning import Data, Objective, Settings
from lrrn.learning.settings import checked_number
from lrrn.learning.trainer import Callback
from lrrn.network import LRRN, Conv


@final
class LRRNClassifier(CertifiedLabels, ClassifierMixin, LiftedEstimator):  # type: ignore[misc]
    """Classifier on a lifted regression/reconstruction network, with certified radii.

    Set ``eps`` to the size of perturbations that predictions should withstand. Parameters that are None are then chosen from
    the data. Without ``eps``, the weight decay is. Parameters that are given are kept.

    Parameters
    ----------
    eps : float, optional
        Make as many predictions as possible correct and certified at this size: in the units of X, or in units of standard
        deviations with ``standardize="features"``. It sets the objective to "margin" with adversarial training and, unless
        ``hidden_sizes`` is given, compares a hidden layer with logistic regression on held-out rows. ``chosen_`` has what it
        chose. If it chose logistic regression, nothing is trained: ``n_iter_`` is 0, and ``checkpoint``, ``log`` and
        ``callbacks`` have nothing to do.
    hidden_sizes : int, Conv, or tuple of these, optional
        Widths of the hidden layers, or convolutions, :class:`lrrn.Conv`, which need ``image_shape``; none for a linear model.
        None means (64, 64), or a choice by ``eps``.
    objective : str, optional
        Training objective: "contrastive" (the paper's loss), "margin" (cross-entropy with the margin ``margin``),
        "cross_entropy", "squared_error", "class_energy" (the paper's class-specific energies; predicts the label of least
        energy), or "semi_supervised" (contrastive loss plus free energy; y = -1 means unlabelled). None means "contrastive", or
        "margin" with ``eps``.
    beta : float or tuple of float, default=1.0
        Weights of the reconstruction terms; a single number means (beta, ..., beta, 0).
    gamma : float, default=1/8
        Discount factor: layer k is weighted by gamma^k.
    constraint : {"free", "nonneg", "box"} or (lo, hi), default="nonneg"
        Set of the hidden activations.
    init : {"glorot", "orthogonal", "uniform"}, default="glorot"
        Initial weights.
    optimizer : {"sgd", "adam", "adamw"}, optional
        None means "adam", or "adamw" with ``eps`` and with a chosen weight decay.
    schedule : {None, "one_cycle", "cosine"}, default="cosine"
    learning_rate : float, default=0.004
    batch_size, epochs : int, optional
        None means 32 and 60, or a choice by ``eps``.
    weight_decay : float, default=5e-5
        lambda of the paper: the loss has lambda * |W_{L-1}|_F^2 added.
    decoupled_weight_decay : float, optional
        Decoupled weight decay of AdamW, on all weights; needs optimizer="adamw". None means 0.1 with ``eps``. Without it, for
        the contrastive objective, None means 900 * noise^2 / max(rows, 200), or 0 if that is below 0.01: noise is the error of
        the nearest neighbour's label, among at most 2,000 rows, over that of the most frequent label, and at most 1. So small
        tables with noisy labels are regularised and others are not. Otherwise, and in ``partial_fit``, None means 0.
    margin, temperature : float or (float, float), optional
        For the margin objective: the lead that the right score should have, and the softness of the loss. A pair gives the
        values at the beginning and at the end of training. None means 0.3 and 0.1, or a choice by ``eps``.
    adversarial_eps : float or (float, float), optional
        Adversarial training, for the margin objective: size of a one-step perturbation of every training input along the
        gradient of its loss, in the units of X after ``standardize``. A pair gives the values at the beginning and at the end
        of training. A step takes about twice as long. None means 0, or ``eps``.
    free_energy_weight : float, default=0.0001
        Weight of the free energy in the semi-supervised objective.
    self_training, confidence : float, default=1.0 and 0.3
        Self-training, for the semi-supervised objective: weight of unlabelled samples with their prediction as pseudo-label,
        where its margin is above ``confidence``. With 0, only the free energy uses them. Labelled samples are oversampled to
        half of the training data.
    pretrain_epochs, pretrain_learning_rate : int and float, default=0 and 0.005
        Epochs of unsupervised training (free energy) before the supervised ones, and their learning rate.
    max_weight_norm : float, optional
        Upper bound on the spectral norm of hidden weights; keeps inference well conditioned in long runs.
    class_weight : dict from labels to weights, or "balanced", optional
        Weights are finite and at least 0; 0 leaves a class out.
    standardize : {False, True, "common", "features"}, default=False
        True or "common": centre every feature and divide all of them by one common scale; radii stay Euclidean, in the units of
        X. "features": divide every feature by its own standard deviation (constant features by 1); radii are in the norm of the
        scaled features unless ``norm="input"`` is asked for.
    early_stopping : bool, default=False
        Hold out ``validation_fraction`` of the data, stop after ``n_iter_no_change`` epochs without a better validation
        accuracy, and restore the best parameters, of equally good ones the latest.
    validation_fraction : float, default=0.1
    n_iter_no_change : int, default=10
    max_seconds : float, optional
        Time that :meth:`fit` may take, pretraining included. Training ends after the first step that ends later, with a
        ConvergenceWarning. The result then depends on the speed of the machine.
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
    device : {"auto", "cpu", "cuda"} or torch.device, default="auto"
    checkpoint, resume : path-like, optional, and bool, default=False
        File for the state of the run, written at regular intervals and on Ctrl-C, and whether to resume from it if it exists.
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
    classes_ : array of shape (n_classes,)
    chosen_ : dict
        Values that were chosen from the data for parameters that are None.
    network_ : LRRN
        The trained network.
    lipschitz_ : LipschitzBound
        Proven bound on the Lipschitz constant of the scores that ``decision_function`` returns, in the norm of the radii. Not
        with objective "class_energy", whose scores are quadratic.
    offset_in_ : array of shape (n_features,)
        What is subtracted from every feature.
    scale_in_ : float, or array of shape (n_features,)
        What the features are divided by; an array with ``standardize="features"``.
    loss_curve_ : list of float
        Mean loss of each epoch.
    history_ : list of dict
        One record per epoch: also seconds, sweeps, condition number, weight norms.
    n_iter_ : int
        Number of epochs.
    n_features_in_ : int

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from lrrn import LRRNClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> classifier = LRRNClassifier(epochs=10, random_state=0).fit(X / 16, y)
    >>> bool(classifier.score(X / 16, y) > 0.9)
    True
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "hidden_sizes": (64, 64),
        "objective": "contrastive",
        "optimizer": "adam",
        "batch_size": 32,
        "epochs": 60,
        "decoupled_weight_decay": 0.0,
        "margin": 0.3,
        "temperature": 0.1,
        "adversarial_eps": 0.0,
    }
    CHOSEN: ClassVar[dict[str, Any]] = {"objective": "margin", "optimizer": "adamw", "hidden_sizes": robust.HIDDEN}

    eps: float | None
    objective: str | None
    margin: float | tuple[float, float] | None
    temperature: float | tuple[float, float] | None
    adversarial_eps: float | tuple[float, float] | None
    free_energy_weight: float
    self_training: float
    confidence: float
    pretrain_epochs: int
    pretrain_learning_rate: float
    class_weight: Any

    def __init__(
        self,
        hidden_sizes: int | Conv | tuple[int | Conv, ...] | None = None,
        objective: str | None = None,
        beta: float | tuple[float, ...] = 1.0,
        gamma: float = 1 / 8,
        constraint: Any = "nonneg",
        init: str = "glorot",
        optimizer: str | None = None,
        schedule: str | None = "cosine",
        learning_rate: float = 0.004,
        batch_size: int | None = None,
        epochs: int | None = None,
        weight_decay: float = 5e-5,
        decoupled_weight_decay: float | None = None,
        margin: float | tuple[float, float] | None = None,
        temperature: float | tuple[float, float] | None = None,
        adversarial_eps: float | tuple[float, float] | None = None,
        free_energy_weight: float = 0.0001,
        self_training: float = 1.0,
        confidence: float = 0.3,
        pretrain_epochs: int = 0,
        pretrain_learning_rate: float = 0.005,
        max_weight_norm: float | None = None,
        class_weight: Any = None,
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
        eps: float | None = None,
        max_condition: float | None = None,
        image_shape: tuple[int, int, int] | None = None,
    ) -> None:
        self._store(locals())

    # --- learning -----------------------------------------------------------------------------------------------------

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> LRRNClassifier:
        """Train on labelled samples.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
        y : array of shape (n_samples,)
            Labels; -1 means unlabelled for the semi-supervised objective.
        sample_weight : array of shape (n_samples,), optional

        Returns
        -------
        LRRNClassifier
            The estimator itself.
        """
        self.check_parameters()
        return self._fit(X, y, sample_weight)

    def _fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, trial: bool = False) -> LRRNClassifier:
        """Train; without warnings of the features for a trial inside of another fit."""
        features, labels = validate_data(self, self._table(X), y, dtype=[np.float64, np.float32])
        self.classes_, label = encode(labels, None, self._semi_supervised)
        weight = sample_weights(sample_weight, self.class_weight, features, labels, label)
        seed = self._prepare(counted(features, weight))
        if not trial:
            self._warn_of_scale(counted(features, weight), stacklevel=3)
        linear = choices.choose(self, features, label, weight, seed)
        self._build(features.shape[1], len(self.classes_))
        if linear is not None:
            robust.use_linear(self, linear)
            return self
        device, validate = self.network_.W[0].device, None
        rows = np.arange(len(features))
        if self.early_stopping:
            # only samples with a label and a weight are scored; all others remain in the training set
            known = np.flatnonzero((label != UNLABELLED) & (True if weight is None else weight > 0))
            held = known[split_off_validation(len(known), self.validation_fraction, seed, label[known])[1]]
            rows = np.setdiff1d(rows, held)
            x_held, y_held = self.scaling.apply(features[held], torch.float64, device), torch.as_tensor(label[held]).to(device)

            def validate(net: LRRN) -> float:
                return float((self._scores(x_held, "warn").argmax(-1) == y_held).double().mean())

        data = self._data(features[rows], label[rows], None if weight is None else weight[rows], device)
        self._train(self._objective(), data, seed, validate, self._pretraining(seed) if self.pretrain_epochs > 0 else None)
        return self

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> LRRNClassifier:
        """Train for one epoch on some samples, continuing from the last call, at a constant learning rate.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
        y : array of shape (n_samples,)
        classes : array of shape (n_classes,), optional
            All labels that may occur in later calls; required in the first call.
        sample_weight : array of shape (n_samples,), optional

        Returns
        -------
        LRRNClassifier
            The estimator itself.
        """
        if self.eps is not None:
            raise ValueError("partial_fit sees the data in parts, and eps chooses from all of it: call fit, or leave out eps")
        self.check_parameters()
        first = not hasattr(self, "network_")
        if first and classes is None:
            raise ValueError("classes must be given in the first call of partial_fit")
        if (
            not first
            and classes is not None
            and not np.array_equal(known_classes(classes, self._semi_supervised), self.classes_)
        ):
            raise ValueError(
                f"classes={np.unique(classes).tolist()} differ from those of the first call, {self.classes_.tolist()}"
            )
        features, labels = validate_data(self, self._table(X), y, dtype=[np.float64, np.float32], reset=first)
        self.classes_, label = encode(labels, classes if first else self.classes_, self._semi_supervised)
        weight = sample_weights(sample_weight, self.class_weight, features, labels, label)
        if first:
            self._prepare(counted(features, weight))
            self._warn_of_scale(counted(features, weight), stacklevel=2)
            self._build(features.shape[1], len(self.classes_))
        self._pass_over(self._objective(), self._data(features, label, weight, self.network_.W[0].device))
        return self

    def _check_own(self) -> None:
        check_class_weight(self.class_weight)
        for name in ("free_energy_weight", "self_training", "confidence"):
            checked_number(name, getattr(self, name), "be a finite number")
        rate = self.pretrain_learning_rate
        checked_number("pretrain_learning_rate", rate, "be positive", lambda rate: rate > 0)
        self._objective()
        if self.eps is not None and self.optimizer in ("sgd", "adam") and self.decoupled_weight_decay is None:
            raise ValueError(
                f"eps trains with AdamW's weight decay; got optimizer={self.optimizer!r}: leave out optimizer, or also give "
                "decoupled_weight_decay=0"
            )
        self._pretraining(0)

    def _pretraining(self, seed: int) -> Settings:
        changes = {"learning_rate": self.pretrain_learning_rate, "weight_decay": 0.0}
        return self._settings(seed, patience=None, epochs=max(self.pretrain_epochs, 1), **changes)

    def _objective(self) -> Objective:
        if self.eps is not None and self.objective not in (None, "margin"):
            raise ValueError(f"eps trains with objective 'margin'; got objective={self.objective!r}: leave out one of the two")
        name = self._use("objective")
        objective = made(name, self._use)
        if self.eps is None:
            check_belongs(name, self.get_params(deep=False))
        return objective

    @property
    def _semi_supervised(self) -> bool:
        return bool(self._use("objective") == "semi_supervised")

    def _data(self, X: Array, label: Array, weight: Array | None, device: torch.device) -> Data:
        keep = np.arange(len(X)) if weight is None else np.flatnonzero(weight > 0)
        if self._semi_supervised:
            known = keep[label[keep] != UNLABELLED]
            repeats = max(1, (len(keep) - len(known)) // max(len(known), 1))
            keep = np.concatenate([keep, *[known] * (repeats - 1)])
        dtype = self.network_.W[0].dtype
        classes = torch.as_tensor(label[keep]).to(device)
        target = functional.one_hot(classes.clamp(min=0), len(self.classes_)).to(dtype) * (classes >= 0)[:, None]
        weights = None if weight is None else torch.as_tensor(weight[keep]).to(device=device, dtype=dtype)
        return Data(self.scaling.apply(X[keep], dtype, device), target, classes, weights)

    # --- predicting ---------------------------------------------------------------------------------------------------

    def _scores(self, x: Tensor, on_failure: str | None = None) -> Tensor:
        """Return a score per class, of shape (n, n_classes); the prediction is the class of the largest score."""
        if self._use("objective") != "class_energy":
            return self._infer(x, on_failure=on_failure).output
        n_classes = len(self.classes_)
        energies = []
        for k in range(n_classes):
            target = x.new_zeros((len(x), n_classes))
            target[:, k] = 1
            energies.append(self._infer(x, target, on_failure).energy)
        return -torch.stack(energies, dim=-1)

    def decision_function(self, X: ArrayLike) -> Array:
        """Return the scores: the network's outputs, or minus the class energies.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)

        Returns
        -------
        array of shape (n_samples, n_classes), or (n_samples,) for two classes
            For two classes, the score of the second minus that of the first.
        """
        scores = self._over_chunks(X, self._scores)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: ArrayLike) -> Array:
        """Return the most likely label of each sample.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)

        Returns
        -------
        array of shape (n_samples,)
        """
        check_is_fitted(self, "network_")
        return self.classes_[self._over_chunks(X, lambda x: self._scores(x).argmax(-1))]

    @AvailableIf(check_probabilities)
    def predict_proba(self, X: ArrayLike) -> Array:
        """Return softmax probabilities; they are not calibrated.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)

        Returns
        -------
        array of shape (n_samples, n_classes)
        """
        temperature = float(np.ravel(self._use("temperature"))[-1]) if self._use("objective") == "margin" else 1.0
        return self._over_chunks(X, lambda x: (self._scores(x) / temperature).softmax(-1))

    @AvailableIf(check_probabilities)
    def predict_log_proba(self, X: ArrayLike) -> Array:
        """Return the logarithms of :meth:`predict_proba`.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)

        Returns
        -------
        array of shape (n_samples, n_classes)
        """
        with np.errstate(divide="ignore"):  # the logarithm of a probability that rounds to 0 is minus infinity
            return np.log(self.predict_proba(X))
