"""Identity of a training run, which decides whether it may resume from a checkpoint."""

from __future__ import annotations

import math
from dataclasses import asdict, is_dataclass
from typing import Any

from lrrn.learning.objectives import Objective
from lrrn.learning.settings import Data, Settings
from lrrn.network import LRRN, Conv
from lrrn.runtime.storage import fingerprint

NOT_PART = ("patience", "max_seconds", "max_unconverged")
"""Settings that a resumed run may change: they decide when to stop, but do not affect a step."""


def identity(net: LRRN, objective: Objective, settings: Settings, data: Data, stage: str) -> dict[str, Any]:
    """Describe a run by JSON values. A run may resume from a checkpoint if these are equal.

    Of the network only the structure is used; the parameters are in the checkpoint. An objective is described by its class
    and, if it is a dataclass, its fields; data by shapes, dtypes and a thousand rows.
    """
    fields: dict[str, Any] = asdict(objective) if is_dataclass(objective) and not isinstance(objective, type) else {}
    # without flips it is left out: checkpoints from before there were any can be resumed
    left_out = NOT_PART if settings.flips else (*NOT_PART, "flips")
    return {
        **{name: value for name, value in vars(settings).items() if name not in left_out},
        "stage": stage,
        "objective": {"class": type(objective).__name__, **_plain(fields)},
        "network": _plain(
            {"sizes": _sizes(net), "beta": net.beta, "gamma": net.gamma, "sets": [(i.lo, i.hi) for i in net.intervals]}
        ),
        "data": fingerprint(data.x, data.target, data.label, data.weight),
    }


def _sizes(net: LRRN) -> list[Any]:
    """Return the architecture; a convolution by its fields."""
    return [vars(size) if isinstance(size, Conv) else size for size in net.architecture]


def _plain(value: Any) -> Any:
    """Convert to JSON types: tuples to lists, and unsupported values to strings."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    finite = isinstance(value, float) and math.isfinite(value)
    return value if finite or isinstance(value, bool | int | str | None) else str(value)
