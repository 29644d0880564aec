"""Base class of the three estimators: validation of input, preparation of data, training, inference in chunks."""

from __future__ import annotations

import copy
import math
import os
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
from lrrn.estimators.parameters import check_common, checked_device, checked_size, plain_beta
from lrrn.estimators.resuming import check_same_pretraining
from lrrn.estimators.scaling import Scaling, fitted, warn_of_scale
from lrrn.learning import Data, Objective, Settings, Trainer
from lrrn.learning.augment import shape_of_images
from lrrn.learning.budget import Budget
from lrrn.learning.checkpoint import peek
from lrrn.learning.objectives import FreeEnergy
from lrrn.learning.trainer import Callback
from lrrn.linalg.verified import EPS
from lrrn.network import LRRN, Conv
from lrrn.network.layers import checked_image_shape
from lrrn.network.solution import Solution, check_on_failure
from lrrn.network.structure import checked_solving
from lrrn.runtime import ranks, storage
from lrrn.runtime.devices import to_dtype
from lrrn.runtime.memory import rows_at_once
from lrrn.runtime.threads import blas_threads

Array = NDArray[Any]


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
    _optimizer_name: str

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

    def _prepare(self, X: Array) -> int:
        """Check what depends on the data and on files, before any work; set up scaling and seed of a fit; return the seed."""
        check_images(self._widths, self.image_shape, X.shape[1])
        if self.shifts or self.flips:
            shape_of_images(X.shape[1], self.image_shape)
        self._check_files()
        seconds = None if self.max_seconds is None else float(self.max_seconds)
        self._optimizer_state, self.chosen_, self._budget = None, {}, Budget(seconds)
        self._seed = self._draw_seed()
        self.offset_in_, self.scale_in_ = fitted(X, self.standardize)
        return self._seed

    def _check_files(self) -> None:
        """Raise an error if the checkpoint or the log cannot be written, or if the checkpoint to resume from is damaged."""

        def check() -> None:
            for path in (self.checkpoint, self.log):
                if path is not None:
                    storage.check_writable(path)
            if self.resume and self.checkpoint is not None and os.path.isfile(self.checkpoint):
                peek(self.checkpoint)

        ranks.current().on_main(check)

    def _warn_of_scale(self, X: Array, stacklevel: int) -> None:
        """Warn of features on which the network may train badly; called where a user's fit begins, not a trial's."""
        if not self.standardize:
            warn_of_scale(X, stacklevel + 1)

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
        self.network_ = self._network(sizes, generator, checked_device(self.device))

    def _network(
        self,
        sizes: Sequence[int | Sequence[int] | Conv],
        generator: torch.Generator,
        device: torch.device | None = None,
    ) -> LRRN:
        """Return a network of these sizes."""
        beta: Any = plain_beta(self.beta)
        if not self.READS_OUT and isinstance(beta, float):
            beta = (beta,) * (len(sizes) - 1)  # hidden layers only, and a number is for all of them
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
        check_common(self)
        check_on_failure(self.on_failure)
        eps = getattr(self, "eps", None)
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

    @property
    def scaling(self) -> Scaling:
        """The fitted scaling, whatever ``standardize`` has become since."""
        return Scaling(self.offset_in_, self.scale_in_)

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
        if done:
            check_same_pretraining(cast(Any, path), pretrain, len(data), bool(self.callbacks))
        elif pretrain is not None:
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
        # another optimiser has no use for the state; one that was pickled before names were kept is taken for the same
        same = getattr(self, "_optimizer_name", settings.optimizer) == settings.optimizer
        if self._optimizer_state is not None and same:
            groups = trainer.optimizer.state_dict()["param_groups"]  # settings that may have changed
            trainer.optimizer.load_state_dict({**self._optimizer_state, "param_groups": groups})
        (record,) = trainer.fit(data)
        self._optimizer_state, self._optimizer_name = trainer.optimizer.state_dict(), settings.optimizer
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
                yield self.scaling.apply(chunk, torch.float64, device)
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
        return self.scaling.norm(norm)

    def _unit(self, norm: str | None = None) -> float:
        return self.scaling.unit(norm)

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
        size = checked_size(eps)

        def interval(x: Tensor) -> Tensor:
            reach = self.scaling.reach(size, x, norm)
            return torch.stack(energy_interval(self.network_, x, reach, max_sweeps=self.max_sweeps), dim=1)

        lower, upper = self._over_chunks(X, interval).T
        return lower, upper

    @property
    def lipschitz_(self) -> LipschitzBound:
        """Proven bound on the Lipschitz constant of the prediction as a function of X, in the default norm.

        The prediction is the vector of scores that ``decision_function`` returns, or of targets.
        """
        check_is_fitted(self, "network_")
        bound = self._constant()
        if not self.scaling.changes:
            return bound
        return LipschitzBound((*bound.per_layer, 1 / self._unit() * (1 + 4 * EPS)), bound.method)

    def _constant(self) -> LipschitzBound:
        """Return a proven Lipschitz constant of the prediction as a function of the network's input."""
        return self.network_.lipschitz()
