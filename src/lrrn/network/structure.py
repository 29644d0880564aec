"""Validation of constructor arguments (betas, discount, constraint sets, solver settings), and initial weights."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lrrn.energy.constraints import ConstraintSpec, Interval, interval
from lrrn.solvers import SOLVERS


def checked_beta(beta: float | Sequence[float], n_layers: int) -> tuple[float, ...]:
    """Return one beta per layer; raise ValueError if they are invalid."""
    if isinstance(beta, numbers.Real):
        beta = (float(beta),) * (n_layers - 1) + (0.0,)
    values = tuple(float(b) for b in beta)  # type: ignore[union-attr]
    if len(values) != n_layers or any(not math.isfinite(b) or b < 0 for b in values):
        raise ValueError(f"beta needs one finite number >= 0 for each of {n_layers} layers; got {values}")
    return values


def checked_gamma(gamma: float, n_layers: int) -> float:
    """Return the discount as a float; raise ValueError if it is invalid."""
    if not (math.isfinite(gamma) and gamma > 0):
        raise ValueError(f"gamma must be a positive number; got {gamma}")
    with_depth = (n_layers - 1) * math.log10(gamma)
    if abs(with_depth) > 30:
        raise ValueError(f"gamma^(L-1) = 1e{with_depth:.0f} is beyond what floating point can hold together; got gamma={gamma}")
    return float(gamma)


def hidden_intervals(constraint: ConstraintSpec | Sequence[ConstraintSpec], n_hidden: int) -> tuple[Interval, ...]:
    """Return one interval per hidden layer; raise ValueError if the number is wrong."""
    single = isinstance(constraint, str | Interval) or (
        len(constraint) == 2 and all(isinstance(end, numbers.Real) for end in constraint)
    )
    if single:
        return (interval(constraint),) * n_hidden  # type: ignore[arg-type]
    if len(constraint) != n_hidden:  # type: ignore[arg-type]
        raise ValueError(f"constraint needs one entry for each of {n_hidden} hidden layers; got {constraint!r}")
    return tuple(interval(spec) for spec in constraint)  # type: ignore[union-attr, arg-type]


def checked_solving(solver: str, tol: float | None, max_sweeps: int) -> tuple[str, float | None, int]:
    """Return the solver settings, numbers as those of Python; raise ValueError if they are invalid."""
    if solver not in ("auto", *SOLVERS):
        raise ValueError(f"unknown solver {solver!r}; use 'auto' or one of {', '.join(SOLVERS)}")
    if tol is not None and not (isinstance(tol, numbers.Real) and 0 < tol < math.inf):
        raise ValueError(f"tol must be a positive number, or None for the default; got {tol!r}")
    if not isinstance(max_sweeps, numbers.Integral) or isinstance(max_sweeps, bool) or max_sweeps < 1:
        raise ValueError(f"max_sweeps must be an integer of at least 1; got {max_sweeps!r}")
    return solver, None if tol is None else float(tol), int(max_sweeps)


def initial_weight(shape: tuple[int, ...], init: str, generator: torch.Generator | None) -> Tensor:
    """Draw the initial weights of a layer."""
    # drawn in float64 on the generator's device, so that a seed gives the same weights for every dtype and device
    weight = torch.empty(shape, dtype=torch.float64, device="cpu" if generator is None else generator.device)
    if init == "glorot":
        return nn.init.xavier_uniform_(weight, generator=generator)
    if init == "orthogonal":
        return nn.init.orthogonal_(weight, generator=generator)
    if init == "uniform":
        reach = 1 / math.sqrt(math.prod(shape[1:]))
        return nn.init.uniform_(weight, -reach, reach, generator=generator)
    raise ValueError(f"unknown init {init!r}; use 'glorot', 'orthogonal' or 'uniform'")
