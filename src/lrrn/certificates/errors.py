"""Bounds on the effect of solver errors on the output, at an input and at perturbed inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lrrn.network import LRRN
from lrrn.network.solution import Solution
from lrrn.qp import row_norms

GUARANTEES = ("deployed", "exact")


def check_guarantee(guarantee: str) -> None:
    """Raise ValueError for an unknown kind of guarantee."""
    if guarantee not in GUARANTEES:
        raise ValueError(f"unknown guarantee {guarantee!r}; use one of {', '.join(GUARANTEES)}")


@final
@dataclass(frozen=True, eq=False)
class SolveErrors:
    """Bounds on the errors of the activations from which the output is computed, per sample.

    At a perturbed input x + delta the error is at most ``later + slope |delta|``.
    """

    here: Tensor  # (n,): proven distance of the solved activations from the exact ones at x
    later: Tensor  # (n,): largest possible distance from the exact ones, at x, of a solve that reports convergence
    slope: float  # growth of later per unit of perturbation
    size: Tensor  # (n,): one plus the norm of the features that the output is computed from; rounding is relative to it
    size_slope: float  # growth of size per unit of perturbation

    @classmethod
    def of(
        cls, net: LRRN, x: Tensor, solution: Solution, tol: float, y: Tensor | None = None, mu: float | None = None
    ) -> SolveErrors:
        """Bound the errors of a float64 solution of the free or, with ``y``, the clamped phase, and of later solutions.

        ``mu`` is a proven lower bound on the smallest eigenvalue of the free phase's Hessian, by default the energy's.
        """
        energy = net.energy_snapshot(torch.float64)
        n_unknown = energy.n_free if y is None else energy.n_layers - 1
        if n_unknown == 0:
            nothing = torch.zeros_like(solution.residual, dtype=torch.float64)
            return cls(nothing, nothing, 0.0, 1 + row_norms(x), 1.0)
        reads_last = y is None and not energy.eliminated
        features = solution.activations[-1] if reads_last else solution.activations[-2]
        rounding = energy.rounding.free if y is None else energy.rounding.clamped
        if mu is None:
            here, mu = solution.error_bound, energy.free_mu if y is None else energy.clamped_mu
        else:
            stacked = torch.cat(solution.activations[:n_unknown], dim=-1)
            here = energy.free(x).distance_bound(stacked, mu, rounding, row_norms(x))
        if not rounding.z < 0.5 * mu:
            never = torch.full_like(here, math.inf)
            return cls(here, never, math.inf, 1 + row_norms(features), math.inf)
        # |q(x + delta)| <= |q(x)| + growth |delta|, and the exact activations move by at most growth |delta| / mu
        growth = energy.input_gain
        q = row_norms((energy.free(x) if y is None else energy.clamped(x, y)).q)
        z = row_norms(torch.cat(solution.activations[:n_unknown], dim=-1)) + here
        data = row_norms(x) if y is None else row_norms(x) + row_norms(y)
        # a solve that reports convergence has a residual of at most tol max(1, |q|) plus rounding. Rounding is relative to a
        # size that includes the error itself; the factor ``swell`` solves this inequality for the error
        swell = (1 + 1e-9) / (1 - rounding.z / mu)
        later = (tol * q.clamp(min=1.0) + rounding.total(z, q, data)) / mu * swell
        slope = (tol * growth + rounding.z * growth / mu + rounding.q * growth + rounding.x) / mu * swell
        return cls(here, later, slope, 1 + row_norms(features) + here + later, growth / mu + slope)
