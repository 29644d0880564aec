"""Checkpoints: the state with which a run continues bit for bit, in one file that is written atomically."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from lrrn.runtime import storage

KIND = "checkpoint"


@final
@dataclass
class Position:
    """Progress of a training run."""

    stage: str = "train"  # of the fit, "pretrain" or "train"
    epoch: int = 0  # completed epochs
    step: int = 0  # completed steps of the current epoch
    loss_sum: float = 0.0  # running sums of the current epoch
    weight_sum: float = 0.0
    samples: int = 0  # counts of its solves: samples, sweeps, and solves that missed the tolerance
    sweeps: int = 0
    missed: int = 0
    captured_sweeps: int = 0  # sweeps per solve in captured steps
    single_steps: bool = False  # whether captured steps did not converge, and steps are taken one by one since
    history: list[dict[str, Any]] = field(default_factory=list)  # one record per epoch
    best_score: float | None = None  # best validation score so far
    best_epoch: int = 0  # its epoch


def save(
    path: str | os.PathLike[str],
    settings: dict[str, Any],
    position: Position,
    groups: dict[str, Sequence[Tensor]],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write a checkpoint with the state of the optimiser.

    ``settings`` must be equal in a run that resumes from it. ``groups`` are the parameters and other tensors of the state.
    """
    tensors = {f"{name}/{i}": t for name, group in groups.items() for i, t in enumerate(group)}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{name}"] = value
    storage.write(path, KIND, tensors, {"settings": settings, "position": asdict(position)})


def peek(path: str | os.PathLike[str]) -> tuple[str, int]:
    """Return the stage a checkpoint belongs to and the seed of its run; raise FileFormatError if it is damaged."""
    _, _, header = storage.read(path, KIND)
    settings = header.get("settings") if isinstance(header, dict) else None
    seed = settings.get("seed") if isinstance(settings, dict) else None
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise _damaged(path, f"its seed is {seed!r}")
    return _position(path, header).stage, seed


@torch.no_grad()
def restore(
    path: str | os.PathLike[str],
    settings: dict[str, Any],
    groups: dict[str, Sequence[Tensor]],
    optimizer: torch.optim.Optimizer,
) -> Position:
    """Load a checkpoint into the given tensors, either completely or not at all.

    Raises
    ------
    ValueError
        It belongs to another run.
    FileFormatError
        It is damaged.
    """
    _, tensors, header = storage.read(path, KIND)
    position = _position(path, header)
    other = header.get("settings")
    if not isinstance(other, dict):
        raise _damaged(path, "it has no settings")
    changed = [key for key in sorted({*settings, *other}) if settings.get(key) != other.get(key)]
    if changed:
        detail = "; ".join(f"{key}: {other.get(key)!r} there, {settings.get(key)!r} here" for key in changed)
        raise ValueError(f"{path} belongs to another run ({detail}). Start again without resuming, or restore those settings")
    pairs = []
    for name, group in groups.items():
        for i, t in enumerate(group):
            stored = tensors.get(f"{name}/{i}")
            if stored is None and name == "condition":
                continue  # older checkpoints do not have it; steps estimate it again
            if stored is None or stored.shape != t.shape or stored.dtype != t.dtype:
                raise _damaged(path, f"its {name} {i} is not a {t.dtype} tensor of shape {tuple(t.shape)}")
            pairs.append((t, stored))
    state = _optimizer_state(path, tensors, optimizer)
    for t, stored in pairs:
        t.copy_(stored)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return position


def _damaged(path: str | os.PathLike[str], what: str) -> storage.FileFormatError:
    return storage.FileFormatError(
        f"{path} is damaged: {what}. Remove it to start again, or restore it from a copy; it was left as it is"
    )


def _position(path: str | os.PathLike[str], header: Any) -> Position:
    """Return the position of the run after checking the type of every entry."""
    stored = header.get("position") if isinstance(header, dict) else None
    if not isinstance(stored, dict):
        raise _damaged(path, "it does not say where the run stands")
    fits = {
        "stage": isinstance(stored.get("stage"), str),
        "history": isinstance(stored.get("history"), list),
        "best_score": stored.get("best_score", "") is None or type(stored.get("best_score")) in (int, float),
    }
    for name in ("epoch", "step", "samples", "sweeps", "missed", "captured_sweeps", "best_epoch"):
        fits[name] = type(stored.get(name)) is int and stored[name] >= 0
    for name in ("loss_sum", "weight_sum"):
        fits[name] = type(stored.get(name)) in (int, float)
    fits["single_steps"] = type(stored.get("single_steps", False)) is bool  # older checkpoints do not have it
    wrong = [name for name in sorted({*fits, *stored}) if not fits.get(name, False)]
    if wrong:
        raise _damaged(path, f"its {wrong[0]} is {stored.get(wrong[0])!r}")
    for record in stored["history"]:
        if not (isinstance(record, dict) and isinstance(record.get("loss"), float) and isinstance(record.get("stage"), str)):
            raise _damaged(path, f"its history holds {record!r}")
    return Position(**stored)


def _optimizer_state(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, Tensor]]:
    """Return the optimiser's state: empty before its first step, complete after it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, index, name = [*key.split("/"), "", ""][:3]
            if not index.isdecimal() or int(index) >= len(parameters):
                raise _damaged(path, f"it holds {key!r}")
            shape = torch.Size() if name == "step" else parameters[int(index)].shape
            if value.shape != shape or not value.is_floating_point():
                raise _damaged(path, f"its {key} is a {value.dtype} tensor of shape {tuple(value.shape)}")
            state.setdefault(int(index), {})[name] = value
    names: set[str] = set()
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        names = {"step", "exp_avg", "exp_avg_sq"}
    elif optimizer.defaults.get("momentum"):
        names = {"momentum_buffer"}
    if state and (len(state) < len(parameters) or any({*entry} != names for entry in state.values())):
        raise _damaged(path, "the optimiser's state is incomplete")
    return state
