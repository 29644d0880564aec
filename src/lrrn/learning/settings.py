"""Training data and training settings."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import final

from torch import Tensor

from lrrn.learning.schedules import schedule


@final
@dataclass(frozen=True)
class Data:
    """Training data, all on one device.

    Parameters
    ----------
    x : Tensor of shape (n, d_0)
    target : Tensor of shape (n, d_L), optional
        One-hot labels or regression targets.
    label : int64 Tensor of shape (n,), optional
        Class indices, -1 for unlabelled samples.
    weight : Tensor of shape (n,), optional
        Sample weights. They are not normalised; their mean should be one.
    """

    x: Tensor
    target: Tensor | None = None
    label: Tensor | None = None
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)


@final
@dataclass(frozen=True)
class Settings:
    """Training settings.

    Parameters
    ----------
    optimizer : {"sgd", "adam", "adamw"}, default="sgd"
    learning_rate : float, default=0.4
    schedule : {None, "one_cycle", "cosine"}, default=None
    batch_size : int, default=10
    epochs : int, default=100
    weight_decay : float, default=0.0
        lambda of the paper: the loss has lambda * |W_{L-1}|_F^2 added.
    decoupled_weight_decay : float, default=0.0
        Decoupled weight decay of AdamW, on all weights (not on biases).
    max_weight_norm : float, optional
        Upper bound on the spectral norm of the hidden weights, which keeps H well conditioned.
    max_condition : float, optional
        Upper bound on the estimated condition number of H: hidden weights are scaled down after a step that exceeds it. Solves
        take a number of iterations that grows with its square root.
    tol : float, optional
        Tolerance of the solves. By default that of the dtype; solves continue to a much tighter one while that is cheap. Solves
        whose error hardly changes the result may stop earlier: the free phase of a contrastive step, at up to 25 times the
        tolerance, since its residual is carried over to the clamped phase, and the adjoint of an attack.
    max_sweeps : int, default=1000
    shifts : int, default=0
        Data augmentation for images, square ones unless the network has a shape: random shifts by up to this many pixels in
        each direction, at every step.
    flips : bool, default=False
        Data augmentation for the same images: each is mirrored left to right at every step with probability 1/2.
    reuse_activations : bool, default=False
        Warm-start every solve from the sample's activations in the previous epoch.
    patience : int, optional
        Early stopping, with a validation score: stop after this many epochs without a new best score, and restore the best
        parameters.
    max_seconds : float, optional
        Time that a fit may take. Training ends after the first step, or compiled call of a few steps, that ends later, with a
        warning; it takes at least one.
    max_unconverged : float, default=0.01
        Share of an epoch's solves that may miss the tolerance before training stops with an error.
    seed : int, default=0
        Seed of the order of the samples.
    """

    optimizer: str = "sgd"
    learning_rate: float = 0.4
    schedule: str | None = None
    batch_size: int = 10
    epochs: int = 100
    weight_decay: float = 0.0
    decoupled_weight_decay: float = 0.0
    max_weight_norm: float | None = None
    max_condition: float | None = None
    tol: float | None = None
    max_sweeps: int = 1000
    shifts: int = 0
    flips: bool = False
    reuse_activations: bool = False
    patience: int | None = None
    max_seconds: float | None = None
    max_unconverged: float = 0.01
    seed: int = 0

    @property
    def augments(self) -> bool:
        """Whether images differ from step to step."""
        return bool(self.shifts or self.flips)

    def __post_init__(self) -> None:
        positive = {"learning_rate": self.learning_rate, "batch_size": self.batch_size, "epochs": self.epochs}
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name} must be positive; got {value}")
        for name in ("weight_decay", "decoupled_weight_decay", "shifts"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}")
        for name in ("max_weight_norm", "max_seconds", "patience"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and float(value) > 0):
                raise ValueError(f"{name} must be positive or None; got {value!r}")
        if self.max_condition is not None and not (isinstance(self.max_condition, Real) and float(self.max_condition) > 1):
            raise ValueError(f"max_condition must be above 1 or None; got {self.max_condition!r}")
        if self.optimizer not in ("sgd", "adam", "adamw"):
            raise ValueError(f"unknown optimizer {self.optimizer!r}; use 'sgd', 'adam' or 'adamw'")
        if self.decoupled_weight_decay and self.optimizer != "adamw":
            raise ValueError(
                f"decoupled_weight_decay belongs to optimizer='adamw'; got optimizer={self.optimizer!r}. "
                "Use 'adamw', or weight_decay for the paper's penalty"
            )
        schedule(self.schedule)
