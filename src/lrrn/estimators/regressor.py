"""A scikit-learn regressor whose predictions come with certified intervals."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from lrrn.bounds import LipschitzBound
from lrrn.certificates.intervals import interval_of_solution
from lrrn.estimators import robust
from lrrn.estimators._base import Array, LiftedEstimator
from lrrn.estimators.certificate import RegressionCertificate
from lrrn.estimators.held_out import split_off_validation
from lrrn.estimators.labels import of_mean_one
from lrrn.estimators.parameters import checked_size
from lrrn.estimators.scaling import fitted_targets
from lrrn.learning import Contrastive, Data, Objective, SquaredError
from lrrn.learning.trainer import Callback
from lrrn.linalg.verified import EPS
from lrrn.network import LRRN, Conv
from lrrn.qp import DEFAULT_TOL


@final
class LRRNRegressor(RegressorMixin, LiftedEstimator):  # type: ignore[misc]
    """Regressor on a lifted regression/reconstruction network, with certified intervals.

    Targets are centred and scaled internally; predictions and intervals are in the units of y.

    Set ``eps`` for narrow intervals. Parameters that are None are then chosen from the data. Parameters that are given are
    kept.

    Parameters
    ----------
    eps : float, optional
        Keep the certified intervals at this size, in the units of X, at most as wide as those of ridge regression: it sets
        ``max_output_norm`` to the norm of its weights and, unless ``hidden_sizes`` is given, compares a hidden layer with ridge
        regression on held-out rows. Widths are proportional to the size, so all sizes lead to the same model. ``chosen_`` has
        what it chose.
    hidden_sizes : int, Conv, or tuple of these, optional
        Widths of the hidden layers, or convolutions, :class:`lrrn.Conv`, which need ``image_shape``; none for a linear model.
        None means (64, 64), or a choice by ``eps``.
    objective : {"squared_error", "contrastive"}, default="squared_error"
        Squared error by implicit differentiation, or the paper's contrastive loss.
    beta : float or tuple of float, default=1.0
        Weights of the reconstruction terms; a single number means (beta, ..., beta, 0).
    gamma : float, default=1/8
        Discount factor: layer k is weighted by gamma^k.
    constraint : {"free", "nonneg", "box"} or (lo, hi), default="nonneg"
        Set of the hidden activations.
    init : {"glorot", "orthogonal", "uniform"}, default="glorot"
        Initial weights.
    optimizer : {"sgd", "adam", "adamw"}, default="adam"
    schedule : {None, "one_cycle", "cosine"}, default="cosine"
    learning_rate : float, default=0.004
    batch_size, epochs : int, optional
        None means 32 and 30, or a choice by ``eps``.
    weight_decay : float, default=0.0
        lambda of the paper: the loss has lambda * |W_{L-1}|_F^2 added.
    decoupled_weight_decay : float, default=0.0
        Decoupled weight decay of AdamW, on all weights; needs optimizer="adamw".
    max_weight_norm : float, optional
        Upper bound on the spectral norm of hidden weights; keeps inference well conditioned in long runs.
    max_output_norm : float or tuple of float, optional
        For squared error: upper bound on the norm of the output weights of every target, for targets of standard deviation one.
        With one hidden layer and beta = 1, it bounds the Lipschitz constant. None means no bound, or a choice by ``eps``.
    standardize : {False, True, "common", "features"}, default=False
        True or "common": centre every feature and divide all of them by one common scale; perturbations stay Euclidean, in the
        units of X. "features": divide every feature by its own standard deviation (constant features by 1); perturbations are
        measured in the norm of the scaled features unless ``norm="input"`` is asked for.
    early_stopping : bool, default=False
        Hold out ``validation_fraction`` of the data, stop after ``n_iter_no_change`` epochs without a better validation score,
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
    chosen_ : dict
        Values that ``eps`` chose for parameters that are None; empty without ``eps``.
    network_ : LRRN
        The trained network, from scaled inputs to scaled targets.
    lipschitz_ : LipschitzBound
        Proven bound on the Lipschitz constant of the prediction as a function of X, in the norm of perturbations.
    offset_in_ : array of shape (n_features,)
        What is subtracted from every feature.
    scale_in_ : float, or array of shape (n_features,)
        What the features are divided by; an array with ``standardize="features"``.
    loss_curve_ : list of float
        Mean loss of each epoch.
    history_ : list of dict
        One record per epoch.
    n_iter_ : int
        Number of epochs.
    n_features_in_ : int

    Examples
    --------
    >>> import numpy as np
    >>> from lrrn import LRRNRegressor
    >>> X = np.linspace(-1, 1, 200)[:, None]
    >>> regressor = LRRNRegressor(random_state=0).fit(X, np.abs(X[:, 0]))
    >>> lower, upper = regressor.predict_interval(X, eps=0.01)
    >>> bool(np.all(lower <= regressor.predict(X)) and np.all(regressor.predict(X) <= upper))
    True
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {"hidden_sizes": (64, 64), "batch_size": 32, "epochs": 30}
    CHOSEN: ClassVar[dict[str, Any]] = {"hidden_sizes": robust.HIDDEN}

    eps: float | None
    objective: str
    max_output_norm: float | tuple[float, ...] | None

    def __init__(
        self,
        hidden_sizes: int | Conv | tuple[int | Conv, ...] | None = None,
        objective: str = "squared_error",
        beta: float | tuple[float, ...] = 1.0,
        gamma: float = 1 / 8,
        constraint: Any = "nonneg",
        init: str = "glorot",
        optimizer: str = "adam",
        schedule: str | None = "cosine",
        learning_rate: float = 0.004,
        batch_size: int | None = None,
        epochs: int | None = None,
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
        max_output_norm: float | tuple[float, ...] | None = None,
        eps: float | None = None,
        max_condition: float | None = None,
        image_shape: tuple[int, int, int] | None = None,
    ) -> None:
        self._store(locals())

    def __sklearn_tags__(self) -> Any:
        """Declare support for several targets to scikit-learn."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> LRRNRegressor:
        """Train on samples with one or several targets.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
        y : array of shape (n_samples,) or (n_samples, n_targets)
        sample_weight : array of shape (n_samples,), optional

        Returns
        -------
        LRRNRegressor
            The estimator itself.
        """
        self.check_parameters()
        return self._fit(X, y, sample_weight)

    def _fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, trial: bool = False) -> LRRNRegressor:
        """Train; without warnings of the features for a trial inside of another fit."""
        table = self._table(X)
        features, values = validate_data(self, table, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
        self._single = values.ndim == 1
        targets = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
        weight, counts = None, np.ones(len(targets), dtype=bool)
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, features, dtype=np.float64, ensure_non_negative=True)
            weight, counts = of_mean_one(weight, "sample_weight"), weight > 0
        self.offset_out_, self.scale_out_ = fitted_targets(targets[counts])
        targets = (targets - self.offset_out_) / self.scale_out_
        seed = self._prepare(features[counts])
        if not trial:
            self._warn_of_scale(features[counts], stacklevel=3)
        linear = None
        if self.eps is not None:
            x = self.scaling.apply(features[counts], torch.float64, torch.device("cpu")).numpy()
            linear = robust.choose_regressor(self, x, targets[counts], None if weight is None else weight[counts], seed)
        self._build(features.shape[1], targets.shape[1])
        if linear is not None:
            robust.use_linear(self, linear)
            return self
        device, dtype = self.network_.W[0].device, self.network_.W[0].dtype
        rows, validate = np.arange(len(features)), None
        if self.early_stopping:
            known = np.flatnonzero(counts)
            kept, held = split_off_validation(len(known), self.validation_fraction, seed, None)
            rows, held = known[kept], known[held]
            x_held = self.scaling.apply(features[held], torch.float64, device)
            y_held = torch.as_tensor(targets[held]).to(device)

            def validate(net: LRRN) -> float:
                return -float((self._infer(x_held, on_failure="warn").output - y_held).square().mean())

        if weight is not None:
            rows = rows[weight[rows] > 0]
        data = Data(
            self.scaling.apply(features[rows], dtype, device),
            torch.as_tensor(targets[rows]).to(device=device, dtype=dtype),
            weight=None if weight is None else torch.as_tensor(weight[rows]).to(device=device, dtype=dtype),
        )
        self._train(self._objective(), data, seed, validate)
        return self

    def _check_own(self) -> None:
        self._objective()

    def _objective(self) -> Objective:
        objectives: dict[str, Callable[[], Objective]] = {
            "squared_error": lambda: SquaredError(self._use("max_output_norm")),
            "contrastive": Contrastive,
        }
        if self.objective not in objectives:
            raise ValueError(f"unknown objective {self.objective!r}; use one of {', '.join(objectives)}")
        bounded = {name: getattr(self, name) for name in ("eps", "max_output_norm") if getattr(self, name) is not None}
        if bounded and self.objective != "squared_error":
            given = ", ".join(f"{name}={value!r}" for name, value in bounded.items())
            raise ValueError(f"{given} needs objective 'squared_error'; got {self.objective!r}")
        return objectives[self.objective]()

    def predict(self, X: ArrayLike) -> Array:
        """Predict the targets.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)

        Returns
        -------
        array of shape (n_samples,) or (n_samples, n_targets)
        """
        return self._unscaled(self._over_chunks(X, lambda x: self._infer(x).output))

    def _constant(self) -> LipschitzBound:
        bound = self.network_.lipschitz()
        return LipschitzBound((*bound.per_layer, float(np.max(self.scale_out_)) * (1 + 4 * EPS)), bound.method)

    def predict_interval(self, X: ArrayLike, eps: float, norm: str | None = None) -> tuple[Array, Array]:
        """Return the range each prediction is proven to stay in under every perturbation of norm at most ``eps``.

        It holds for the values that :meth:`predict` computes, solver error and rounding included. It bounds the change of the
        prediction under perturbations. It is no prediction interval for the true target.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
        eps : float
            Size of the perturbation.
        norm : {None, "input", "scaled"}, default=None
            As in :meth:`certificate`.

        Returns
        -------
        lower, upper : array of shape (n_samples,) or (n_samples, n_targets)
        """
        if not (isinstance(eps, Real) or (isinstance(eps, np.ndarray) and eps.ndim == 0)):
            raise ValueError(f"eps must be one number; got {eps!r}. certificate(X, eps) takes several sizes")
        size = checked_size(eps)
        return self.certificate(X, size, norm).intervals[size]

    def certificate(self, X: ArrayLike, eps: float | Sequence[float], norm: str | None = None) -> RegressionCertificate:
        """Return predictions, certified intervals and energies of samples, all from one solve.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
        eps : float or sequence of float
            Sizes of perturbations.
        norm : {None, "input", "scaled"}, default=None
            Norm that measures them: "input" is the Euclidean norm in the units of X, "scaled" the Euclidean norm after every
            feature is divided by its ``scale_in_``. None is "scaled" with ``standardize="features"``, otherwise "input".

        Returns
        -------
        RegressionCertificate
        """
        check_is_fitted(self, "network_")
        named = self._norm(norm)
        sizes = [checked_size(size) for size in np.ravel(np.asarray(eps))]

        def work(x: Tensor) -> dict[str, Tensor]:
            free = self._infer(x)
            columns = {"output": free.output, "energy": free.energy, "converged": free.converged}
            for k, size in enumerate(sizes):
                reach = self.scaling.reach(size, x, norm)
                ends = interval_of_solution(self.network_, x, free, reach, "deployed", DEFAULT_TOL[torch.float64])
                columns |= {f"lower {k}": ends[0], f"upper {k}": ends[1]}
            return columns

        columns = self._columns(X, work)
        intervals = {size: self._interval(columns[f"lower {k}"], columns[f"upper {k}"]) for k, size in enumerate(sizes)}
        output = self._unscaled(columns["output"])
        return RegressionCertificate(output, intervals, columns["energy"], columns["converged"], named)

    def _interval(self, lower: Array, upper: Array) -> tuple[Array, Array]:
        """Return intervals in the units of y, widened by the rounding error of the scaling."""
        slack = 8 * EPS * (np.abs(self.offset_out_) + self.scale_out_ * np.maximum(np.abs(lower), np.abs(upper)))
        slack = np.where(np.isfinite(slack), slack, 0.0)
        return self._unscaled(lower, -slack), self._unscaled(upper, slack)

    def _unscaled(self, y: Array, slack: Array | float = 0.0) -> Array:
        """Return outputs of the network in the units of y."""
        values = y * self.scale_out_ + self.offset_out_ + slack
        return values[:, 0] if self._single else values
