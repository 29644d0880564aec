"""Checkpoints: everything a run needs to continue to the same bits, in one atomically written file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from lrrn import storage

KIND = "checkpoint"


@final
@dataclass
class Position:
    """Where a run stands.

    Attributes
    ----------
    stage : str
        Which part of a fit this is, "pretrain" or "train".
    epoch, step : int
        Epochs completed, and steps completed in the present one.
    loss_sum, weight_sum : float
        Running sums of the present epoch.
    samples, sweeps, missed : int
        What the present epoch's solves reported so far.
    captured_sweeps : int
        Sweeps of the solves of captured steps.
    history : list of dict
        One record an epoch.
    best_score : float or None
        Best validation score so far.
    best_epoch : int
        Its epoch.
    """

    stage: str = "train"
    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    weight_sum: float = 0.0
    samples: int = 0
    sweeps: int = 0
    missed: int = 0
    captured_sweeps: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best_score: float | None = None
    best_epoch: int = 0


def fingerprint(*tensors: Tensor | None) -> str:
    """Identify data by their shapes, types and a thousand of their rows."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
            continue
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        rows = tensor.detach()[:: max(1, len(tensor) // 1000)]
        digest.update(rows.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def save(
    path: str | os.PathLike[str],
    settings: dict[str, Any],
    position: Position,
    groups: dict[str, Sequence[Tensor]],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write a checkpoint.

    Parameters
    ----------
    path : path-like
    settings : dict
        What must be equal for a run to be continued.
    position : Position
    groups : dict of str to sequence of Tensor
        Parameters and whatever else the run carries.
    optimizer : Optimizer
        Its state goes along.
    """
    tensors = {f"{name}/{i}": t for name, group in groups.items() for i, t in enumerate(group)}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{name}"] = value
    storage.write(path, KIND, tensors, {"settings": settings, "position": asdict(position)})


def peek(path: str | os.PathLike[str]) -> str:
    """Return the stage a checkpoint belongs to."""
    _, _, header = storage.read(path, KIND)
    return str(header["position"]["stage"])


@torch.no_grad()
def restore(
    path: str | os.PathLike[str],
    settings: dict[str, Any],
    groups: dict[str, Sequence[Tensor]],
    optimizer: torch.optim.Optimizer,
) -> Position:
    """Read a checkpoint into the tensors given; refuse one that belongs to another run."""
    _, tensors, header = storage.read(path, KIND)
    other = header["settings"]
    changed = [key for key in sorted({*settings, *other}) if settings.get(key) != other.get(key)]
    if changed:
        detail = "; ".join(f"{key}: {other.get(key)!r} there, {settings.get(key)!r} here" for key in changed)
        raise ValueError(f"{path} belongs to another run ({detail}). Start anew without resuming, or restore those settings")
    for name, group in groups.items():
        for i, t in enumerate(group):
            t.copy_(tensors[f"{name}/{i}"])
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, index, name = key.split("/")
            state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return Position(**header["position"])
