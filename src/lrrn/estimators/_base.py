"""Base class of the three estimators: validation of input, preparation of data, training, inference in chunks."""

from __future__ import annotations

import copy
import math
import numbers
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
from torch import Tensor

from lrrn.bounds import LipschitzBound
from lrrn.certificates import energy_interval
from lrrn.datasets.rows import mapped, release
from lrrn.estimators.images import as_table, check_images, checked_widths
from lrrn.learning import Data, Objective, Settings, Trainer
from lrrn.learning.budget import Budget
from lrrn.learning.checkpoint import peek
from lrrn.learning.objectives import FreeEnergy
from lrrn.learning.trainer import Callback
from lrrn.linalg.verified import EPS
from lrrn.network import LRRN, Conv
from lrrn.network.layers import checked_image_shape
from lrrn.network.solution import Solution, check_on_failure
from lrrn.network.structure import checked_solving
from lrrn.runtime import ranks
from lrrn.runtime.devices import choose_device, to_dtype
from lrrn.runtime.memory import rows_at_once
from lrrn.runtime.threads import blas_threads

Array = NDArray[Any]
STANDARDIZE = (False, True, "common", "features")
"""Values of ``standardize``."""
COUNTS = {"epochs": 1, "batch_size": 1, "max_sweeps": 1, "n_iter_no_change": 1, "pretrain_epochs": 0, "shifts": 0}
"""Parameters that are whole numbers, with their smallest values."""
LARGE, UNEVEN, LOOKED_AT = 5.0, 30.0, 2000
"""Root mean square of the features, and their largest standard deviation over the median one, above which a fit warns; and the
most samples that it looks at for that."""
NORMS = {"input": "euclidean", "euclidean": "euclidean", "scaled": "scaled"}
"""Values of ``norm``, and the name that a certificate has for each."""


class LiftedEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class of the estimators; concrete subclasses add parameters and targets."""

    # parameters of every concrete subclass
    hidden_sizes: int | Conv | tuple[int | Conv, ...] | None
    image_shape: tuple[int, int, int] | None
    beta: float | tuple[float, ...]
    gamma: float
    constraint: Any
    init: str
    optimizer: str | None
    schedule: str | None
    learning_rate: float
    batch_size: int | None
    epochs: int | None
    weight_decay: float
    decoupled_weight_decay: float | None
    max_weight_norm: float | None
    max_condition: float | None
    standardize: bool | str
    early_stopping: bool
    validation_fraction: float
    n_iter_no_change: int
    max_seconds: float | None
    shifts: int
    flips: bool
    reuse_activations: bool
    tol: float | None
    max_sweeps: int
    on_failure: str
    dtype: str
    device: str
    checkpoint: str | os.PathLike[str] | None
    resume: bool
    log: str | os.PathLike[str] | None
    callbacks: tuple[Callback, ...]
    random_state: Any
    verbose: int

    # fitted attributes
    chosen_: dict[str, Any]
    network_: LRRN
    loss_curve_: list[float]
    history_: list[dict[str, Any]]
    n_iter_: int
    n_features_in_: int
    offset_in_: Array
    scale_in_: float | Array
    _seed: int
    _budget: Budget
    _optimizer_state: dict[str, Any] | None

    def _store(self, given: dict[str, Any]) -> None:
        """Store constructor parameters, given as ``locals()``, as attributes of the same names, as scikit-learn requires."""
        for name in self._get_param_names():
            setattr(self, name, given[name])

    DEFAULTS: ClassVar[dict[str, Any]] = {}
    """Values of parameters that are None, if ``eps`` does not decide them."""
    CHOSEN: ClassVar[dict[str, Any]] = {}
    """What ``eps`` chooses for all data, as far as it decides which other values are allowed."""
    READS_OUT: ClassVar[bool] = True
    """Whether the last layer is a read-out that comes after the hidden layers."""

    def _use(self, name: str) -> Any:
        """Return the value in use of a parameter: the one given, else the one chosen by ``eps``, else the default."""
        given = getattr(self, name)
        return given if given is not None else getattr(self, "chosen_", {}).get(name, self.DEFAULTS.get(name))

    # --- preparing ----------------------------------------------------------------------------------------------------

    def _features(self, X: ArrayLike) -> Array:
        """Validate X for inference on a fitted estimator; a memory map in chunks, since it may not fit into memory."""
        check_is_fitted(self, "network_")
        X = self._table(X)
        if mapped(X) is None or np.ndim(X) != 2 or len(cast(Array, X)) == 0:
            return self._checked(X)
        rows = cast(Array, X)
        for start in range(0, len(rows), self.chunk_rows_):
            chunk = rows[start : start + self.chunk_rows_]
            self._checked(chunk)
            release(chunk)
        return rows

    def _checked(self, X: ArrayLike) -> Array:
        return cast(Array, validate_data(self, X, dtype=[np.float64, np.float32], reset=False))

    def _table(self, X: Any) -> Any:
        return as_table(X, self.image_shape)

    def _prepare(self, X: Array) -> tuple[int, torch.device]:
        """Set up scaling, device and seed for a fit; return seed and device."""
        check_images(self._widths, self.image_shape, X.shape[1])
        device = choose_device(self.device)
        self._optimizer_state, self.chosen_, self._budget = None, {}, Budget(self.max_seconds)
        self._seed = seed = self._draw_seed()
        self._fit_scaling(X)
        return seed, device

    def _draw_seed(self) -> int:
        """Return the seed of a fit; without a random state, that of the run that is resumed."""
        drawn = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        path = self.checkpoint if self.resume and self.random_state is None else None
        return ranks.current().on_main(lambda: peek(path)[1] if path is not None and os.path.isfile(path) else drawn)

    def _build(self, n_features: int, n_outputs: int | None = None) -> None:
        """Set up the network for a fit."""
        first = n_features if self.image_shape is None else checked_image_shape(self.image_shape)
        generator = torch.Generator().manual_seed(self._seed)
        sizes = (first, *self._widths) if n_outputs is None else (first, *self._widths, n_outputs)
        self.network_ = self._network(sizes, generator, choose_device(self.device))

    def _network(
        self,
        sizes: Sequence[int | Sequence[int] | Conv],
        generator: torch.Generator,
        device: torch.device | None = None,
    ) -> LRRN:
        """Return a network of these sizes."""
        beta: Any = self.beta
        if not self.READS_OUT and isinstance(beta, numbers.Real):
            beta = (float(beta),) * (len(sizes) - 1)  # hidden layers only, and a number is for all of them
        return LRRN(
            sizes,
            beta=beta,
            gamma=self.gamma,
            constraint=self.constraint,
            output_constraint="free" if self.READS_OUT else self.constraint,
            init=self.init,
            generator=generator,
            device=device,
            dtype=to_dtype(self.dtype),
        )

    @property
    def _widths(self) -> tuple[int | Conv, ...]:
        """Widths of the hidden layers, or convolutions; one of them means one layer, as in scikit-learn."""
        return checked_widths(self._use("hidden_sizes"))

    def check_parameters(self) -> None:
        """Raise ValueError for values of parameters that are wrong for all data; a fit begins with it."""
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must lie between 0 and 1; got {self.validation_fraction}")
        for name, least in COUNTS.items():
            value = getattr(self, name, least)
            if value is None and name in self.DEFAULTS:
                continue
            if isinstance(value, bool) or not (isinstance(value, numbers.Integral) and int(value) >= least):
                kind = "a positive integer" if least else "an integer of at least 0"
                raise ValueError(f"{name} must be {kind}; got {value!r}")
        check_on_failure(self.on_failure)
        if self.standardize not in STANDARDIZE:
            raise ValueError(f"standardize must be False, True, 'common' or 'features'; got {self.standardize!r}")
        if self.resume and self.checkpoint is None:
            raise ValueError("resume=True needs checkpoint to name the file to continue from")
        eps = getattr(self, "eps", None)
        if eps is not None and (isinstance(eps, bool) or not (isinstance(eps, numbers.Real) and 0 < float(eps) < math.inf)):
            raise ValueError(f"eps must be None or a positive number, the size of perturbations to withstand; got {eps!r}")
        checked_solving("auto", self.tol, self.max_sweeps)
        trial = copy.copy(self)  # without what an earlier fit has chosen
        trial.chosen_ = {} if eps is None else self.CHOSEN
        trial._check_own()
        trial._settings(0)
        trial._network((1,) * (len(trial._widths) + 1 + self.READS_OUT), torch.Generator())
        if self.image_shape is not None:
            check_images(trial._widths, self.image_shape, math.prod(checked_image_shape(self.image_shape)))

    def _check_own(self) -> None:
        """Refuse values of the parameters that a concrete subclass adds."""
        raise NotImplementedError

    def _fit_scaling(self, X: Array) -> None:
        """Centre every feature and divide by one common scale, so that balls remain balls, or by its standard deviation."""
        self.offset_in_, self.scale_in_ = np.zeros(X.shape[1]), 1.0
        if not self.standardize:
            _warn_of_scale(X)
            return
        mean, variance = X.mean(axis=0, dtype=np.float64), X.var(axis=0, dtype=np.float64)
        self.offset_in_ = mean
        if self.standardize == "features":
            # the computed variance of a constant feature is rounding error
            rounding = len(X) * EPS * variance + (len(X) * EPS * mean) ** 2
            self.scale_in_ = np.where(variance > rounding, np.sqrt(variance), 1.0)
        else:
            spread = float(np.sqrt(variance.mean()))
            self.scale_in_ = spread if spread > 0 else 1.0

    @property
    def _scales(self) -> bool:
        """Whether the fitted network takes scaled features, whatever ``standardize`` has become since."""
        return bool(np.ndim(self.scale_in_) or self.scale_in_ != 1 or np.any(self.offset_in_))

    def _scaled(self, X: Array, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return rows of X scaled for the network."""
        if not self._scales:
            return torch.as_tensor(np.require(X, requirements=["C", "W"])).to(device=device, dtype=dtype)
        scaled = (X.astype(np.float64) - self.offset_in_) / self.scale_in_
        return torch.as_tensor(scaled).to(device=device, dtype=dtype)

    # --- training -----------------------------------------------------------------------------------------------------

    def _settings(self, seed: int, **changes: Any) -> Settings:
        values: dict[str, Any] = {
            "optimizer": self._use("optimizer"),
            "learning_rate": self.learning_rate,
            "schedule": self.schedule,
            "batch_size": self._use("batch_size"),
            "epochs": self._use("epochs"),
            "weight_decay": self.weight_decay,
            "decoupled_weight_decay": self._use("decoupled_weight_decay"),
            "max_weight_norm": self.max_weight_norm,
            "max_condition": self.max_condition,
            "tol": self.tol,
            "max_sweeps": self.max_sweeps,
            "shifts": self.shifts,
            "flips": self.flips,
            "reuse_activations": self.reuse_activations,
            "patience": self.n_iter_no_change if self.early_stopping else None,
            "max_seconds": self.max_seconds,
            "seed": seed,
        }
        return Settings(**{**values, **changes})

    def _train(
        self,
        objective: Objective,
        data: Data,
        seed: int,
        validate: Callable[[LRRN], float] | None = None,
        pretrain: Settings | None = None,
    ) -> None:
        """Pretrain if requested, train, and set the fitted attributes."""
        settings = self._settings(seed)
        if self.chosen_:
            settings = replace(settings, max_seconds=self._budget.left)
        options: dict[str, Any] = {"checkpoint": self.checkpoint, "log": self.log, "verbose": self.verbose > 0}
        options["callbacks"] = self.callbacks
        resume, history = self.resume, []
        path = self.checkpoint if resume else None
        done = ranks.current().on_main(lambda: path is not None and os.path.isfile(path) and peek(path)[0] == "train")
        if pretrain is not None and not done:
            first = Trainer(self.network_, FreeEnergy(), pretrain, stage="pretrain", **options)
            history = first.fit(Data(data.x), resume=resume)
            resume = False
            settings = replace(settings, max_seconds=self._budget.left)
        trainer = Trainer(self.network_, objective, settings, history=history, **options)
        self._set_history(trainer.fit(data, validate, resume=resume))

    def _pass_over(self, objective: Objective, data: Data) -> None:
        """Train for one epoch at a constant learning rate, with the optimiser's state from the last call."""
        history = getattr(self, "history_", [])
        settings = self._settings(self._seed + len(history), epochs=1, schedule=None, patience=None)
        trainer = Trainer(self.network_, objective, settings)
        if self._optimizer_state is not None:
            trainer.optimizer.load_state_dict(self._optimizer_state)
        (record,) = trainer.fit(data)
        self._optimizer_state = trainer.optimizer.state_dict()
        self._set_history([*history, {**record, "epoch": len(history) + 1}])

    def _set_history(self, history: list[dict[str, Any]]) -> None:
        self.history_ = history
        self.loss_curve_ = [record["loss"] for record in history if record["stage"] == "train"]
        self.n_iter_ = len(self.loss_curve_)

    # --- inferring ----------------------------------------------------------------------------------------------------

    @property
    def chunk_rows_(self) -> int:
        """Number of samples per chunk of inference. It affects results at most in the last bit."""
        check_is_fitted(self, "network_")
        return rows_at_once(self.network_.sizes, self.network_.W[0].device)

    def _chunks(self, X: Array) -> Iterator[Tensor]:
        """Yield chunks of X as float64 tensors on the network's device."""
        device = self.network_.W[0].device
        with blas_threads(1):
            for start in range(0, len(X), self.chunk_rows_):
                chunk = X[start : start + self.chunk_rows_]
                yield self._scaled(chunk, torch.float64, device)
                release(chunk)

    def _over_chunks(self, X: ArrayLike, work: Callable[[Tensor], Tensor]) -> Array:
        """Apply ``work`` to X in chunks and concatenate the results as a NumPy array."""
        return self._columns(X, lambda x: {"result": work(x)})["result"]

    def _columns(self, X: ArrayLike, work: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Array]:
        """Apply ``work`` to X in chunks and concatenate every column of the results as a NumPy array.

        Every chunk is copied into place at once: results kept between chunks would scatter small blocks through the memory that
        the next chunk needs, so that it grows with the number of chunks.
        """
        X = self._features(X)
        columns: dict[str, Array] = {}
        start = 0
        for x in self._chunks(X):
            for name, part in work(x).items():
                values = part.cpu().numpy()
                if name not in columns:
                    columns[name] = np.empty((len(X), *values.shape[1:]), values.dtype)
                columns[name][start : start + len(x)] = values
            start += len(x)
        return columns

    def _infer(self, x: Tensor, y: Tensor | None = None, on_failure: str | None = None) -> Solution:
        """Infer in float64. Predictions and certificates use the same solve."""
        return self.network_.infer(x, y, max_sweeps=self.max_sweeps, on_failure=on_failure or self.on_failure)

    def _norm(self, norm: str | None) -> str:
        """Return the norm that ``norm`` names: "euclidean", or "scaled" for |(X' - X) / scale_in_|, the one of the network."""
        if norm is None:
            return "scaled" if np.ndim(self.scale_in_) else "euclidean"
        if norm not in NORMS:
            raise ValueError(f"unknown norm {norm!r}; use 'input' for the Euclidean norm of X, or 'scaled'")
        return NORMS[norm]

    def _unit(self, norm: str | None = None) -> float:
        """Return the size, in this norm of X, that a perturbation needs at least to move the network's input by 1."""
        return 1.0 if self._norm(norm) == "scaled" else float(np.min(self.scale_in_))

    def _radius_in(self, radius: Tensor, x: Tensor, norm: str | None = None) -> Tensor:
        """Convert radii from the network's units to a norm of X, minus the rounding error of the scaling."""
        if not self._scales:
            return radius
        offset = float(np.linalg.norm(self.offset_in_ / self.scale_in_))
        rounding = 16 * EPS * (torch.linalg.vector_norm(x, dim=-1) + offset + radius)
        return (radius - rounding).clamp(min=0.0) * (self._unit(norm) * (1 - 4 * EPS))

    def _feature_scale(self, norm: str | None) -> Array:
        """Return, for each feature, a lower bound on how far it may move alone within a ball of radius 1 in this norm."""
        return np.broadcast_to(self.scale_in_ / self._unit(norm) * (1 - 4 * EPS), (self.n_features_in_,))

    def energy(self, X: ArrayLike) -> Array:
        """Return the free energy min_z E(z; x) of each sample: low in distribution, high for out-of-distribution inputs.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)

        Returns
        -------
        array of shape (n_samples,)
        """
        return self._over_chunks(X, lambda x: self._infer(x).energy)

    def energy_interval(self, X: ArrayLike, eps: float, norm: str | None = None) -> tuple[Array, Array]:
        """Return certified bounds on each sample's energy under perturbations of norm at most ``eps``.

        They hold for the values that :meth:`energy` computes, solver error and rounding included.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
        eps : float
            Size of the perturbation.
        norm : {None, "input", "scaled"}, default=None
            Norm that measures it: "input" is the Euclidean norm in the units of X, "scaled" the Euclidean norm after every
            feature is divided by its ``scale_in_``. None is "scaled" with ``standardize="features"``, otherwise "input".

        Returns
        -------
        lower, upper : array of shape (n_samples,)
        """
        check_is_fitted(self, "network_")
        self._norm(norm)
        if not eps >= 0:
            raise ValueError(f"eps must be at least 0; got {eps}")

        def interval(x: Tensor) -> Tensor:
            reach = self._reach(eps, x, norm)
            return torch.stack(energy_interval(self.network_, x, reach, max_sweeps=self.max_sweeps), dim=1)

        lower, upper = self._over_chunks(X, interval).T
        return lower, upper

    def _reach(self, eps: float, x: Tensor, norm: str | None = None) -> float:
        """Convert a perturbation size from a norm of X to the network's units, plus the rounding of scaling both inputs."""
        if not self._scales:
            return eps
        offset = float(np.linalg.norm(self.offset_in_ / self.scale_in_))
        rounding = 16 * EPS * float(torch.linalg.vector_norm(x, dim=-1).max() + offset)
        return eps / self._unit(norm) * (1 + 4 * EPS) + rounding

    @property
    def lipschitz_(self) -> LipschitzBound:
        """Proven bound on the Lipschitz constant of the prediction as a function of X, in the default norm.

        The prediction is the vector of scores that ``decision_function`` returns, or of targets.
        """
        check_is_fitted(self, "network_")
        bound = self._constant()
        if not self._scales:
            return bound
        return LipschitzBound((*bound.per_layer, 1 / self._unit() * (1 + 4 * EPS)), bound.method)

    def _constant(self) -> LipschitzBound:
        """Return a proven Lipschitz constant of the prediction as a function of the network's input."""
        return self.network_.lipschitz()


def _warn_of_scale(X: Array) -> None:
    """Warn of features on which networks train badly: of large ones, and of some that are much larger than others."""
    some = np.asarray(X[:: -(-len(X) // LOOKED_AT)], dtype=np.float64)
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
        stacklevel=5,  # the line that calls fit
    )
