"""Training data and training settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, final

from torch import Tensor

from lrrn.learning.schedules import schedule


def checked_number(
    name: str, value: Any, expected: str, within: Callable[[float], bool] = math.isfinite, *, whole: bool = False
) -> Any:
    """Return a number as one of Python; raise ValueError if it is none, or not among those expected.

    Parameters
    ----------
    name : str
        What the number is called in the message.
    value : object
        A number of Python or NumPy, or an array or tensor that holds one and has no axis.
    expected : str
        What the number must do: "be positive".
    within : callable, optional
        Whether a number is as expected; false for NaN. By default, every finite one is.
    whole : bool, default=False
        Whether it must be an integer.

    Returns
    -------
    int or float
    """
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    single = isinstance(number, Real) and not isinstance(number, bool)
    if single and (isinstance(number, Integral) or not whole) and within(number):
        return int(number) if isinstance(number, Integral) else float(number)
    raise ValueError(f"{name} must {expected}; got {value!r}{'' if single else ', which is not one number'}")


def _positive(value: float) -> bool:
    return value > 0


def _not_negative(value: float) -> bool:
    return value >= 0


def _any(value: float) -> bool:
    return True


_WHOLE: dict[str, tuple[str, Callable[[float], bool]]] = {
    "batch_size": ("be positive and whole", _positive),
    "epochs": ("be positive and whole", _positive),
    "max_sweeps": ("be positive and whole", _positive),
    "shifts": ("be at least 0 and whole", _not_negative),
    "seed": ("be whole", _any),
}
_REAL: dict[str, tuple[str, Callable[[float], bool]]] = {
    "learning_rate": ("be positive", _positive),
    "weight_decay": ("be at least 0", _not_negative),
    "decoupled_weight_decay": ("be at least 0", _not_negative),
    "max_unconverged": ("be at least 0", _not_negative),
}
_OPTIONAL: dict[str, tuple[str, Callable[[float], bool]]] = {
    "max_weight_norm": ("be positive or None", _positive),
    "max_seconds": ("be positive or None", _positive),
    "patience": ("be positive or None", _positive),
    "max_condition": ("be above 1 or None", lambda value: value > 1),
    "tol": ("be positive or None", _positive),
}


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
        for name, (expected, within) in (_WHOLE | _REAL | _OPTIONAL).items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            # numbers of NumPy would not go into a checkpoint
            object.__setattr__(self, name, checked_number(name, value, expected, within, whole=name in _WHOLE))
        object.__setattr__(self, "flips", bool(self.flips))
        object.__setattr__(self, "reuse_activations", bool(self.reuse_activations))
        if self.optimizer not in ("sgd", "adam", "adamw"):
            raise ValueError(f"unknown optimizer {self.optimizer!r}; use 'sgd', 'adam' or 'adamw'")
        if self.decoupled_weight_decay and self.optimizer != "adamw":
            raise ValueError(
                f"decoupled_weight_decay belongs to optimizer='adamw'; got optimizer={self.optimizer!r}. "
                "Use 'adamw', or weight_decay for the paper's penalty"
            )
        schedule(self.schedule)
