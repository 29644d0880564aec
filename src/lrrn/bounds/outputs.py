"""Proven Lipschitz constants of single outputs and of their differences, for every kind of output layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lrrn.bounds.layerwise import LipschitzBound, paper, spectral
from lrrn.bounds.multiplier import MultiplierProblem, network_multipliers
from lrrn.energy import LiftedEnergy
from lrrn.linalg import verified

BUDGET = {"auto": 5.0, "multiplier": 300.0}
"""Default time budget, in seconds, for optimising a Lipschitz bound."""
_UP = 1 + 1e-12
"""Factor that covers the rounding of norms and products of a few float64 numbers."""
_LOST = math.sqrt(verified.UNDERFLOW)
"""Upper bound on the error of a norm by underflow of squares."""


@final
@dataclass(frozen=True, eq=False)
class OutputConstants:
    """Constants of the outputs y_i (shape (d_L,)) or of the differences y_i - y_j (shape (d_L, d_L)), in float64."""

    rho: Tensor  # Lipschitz constants with respect to x
    error: Tensor  # factors from the error of the computed activations to that of the output
    rounding: Tensor  # factors from the size of the features to the rounding error of the read-out


_known: WeakKeyDictionary[LiftedEnergy, dict[tuple[str, str, float], Tensor]] = WeakKeyDictionary()
_pairs: WeakKeyDictionary[LiftedEnergy, dict[tuple[str, float | None], OutputConstants]] = WeakKeyDictionary()


def _multiplied(energy: LiftedEnergy, what: str, method: str, rho: Tensor, seconds: float | None) -> Tensor:
    """Tighten constants of single outputs or of pairs by the multiplier bound, once for an energy."""
    if method not in BUDGET or energy.n_free == 0 or (method == "auto" and not energy.has_matrices):
        return rho
    budget = BUDGET[method] if seconds is None else seconds
    known = _known.setdefault(energy, {})
    if (what, method, budget) not in known:
        problem = MultiplierProblem(energy)
        ceiling = float(spectral(energy.operators, energy.beta))
        # a fifth of the budget for the multipliers of the whole output, which initialise the others
        lam = network_multipliers(energy, ceiling, budget / 5).lam
        rows = problem.read_out
        table = rho.to("cpu", copy=True)
        if what == "single":
            table = problem.rows(lam, rows, table, 0.8 * budget)
        else:
            i, j = torch.tril_indices(len(rows), len(rows), -1)
            table[i, j] = table[j, i] = problem.rows(lam, rows[i] - rows[j], table[i, j], 0.8 * budget)
        known[what, method, budget] = table.to(rho.device)
    return known[what, method, budget]


def single_constants(energy: LiftedEnergy, method: str = "auto", seconds: float | None = None) -> OutputConstants:
    """Return the constants of every output; ``method`` and ``seconds`` as for :func:`pair_constants`."""
    _check_outputs(energy)
    whole, features = float(spectral(energy.operators, energy.beta)), _features(energy, "spectral")
    w = energy.weights[-1]
    rho = w.new_full((len(w),), whole)
    if energy.beta[-1] == 0:
        # clipping is 1-Lipschitz: an output moves no further than its affine image
        rho = torch.minimum(rho, _lengths(w) * features)
    elif energy.intervals[-1].is_free:
        rows, slack = linear_response(w, energy.beta[-1])
        rho = torch.minimum(rho, (_lengths(rows) + slack) * features)
    error = _lengths(w) if energy.eliminated else torch.ones_like(rho)
    rho = _multiplied(energy, "single", method, rho, seconds) + _unfolding(energy, _lengths(w), features)
    return OutputConstants(rho * _UP, error * _UP, _read_out_rounding(energy))


def pair_constants(energy: LiftedEnergy, method: str, seconds: float | None = None) -> OutputConstants:
    """Return the constants of every difference of two outputs of a float64 energy, computed once.

    "paper" uses sqrt(2) times the paper's constant for every pair. "pairwise" and "spectral" bound each pair separately, from
    the paper's and from the spectral bound on the features. "multiplier" and "auto" then optimise multipliers for each pair,
    within the budget of :meth:`LRRN.lipschitz` unless ``seconds`` is given. The budget is a number of steps on any machine.
    """
    _check_outputs(energy)
    known = _pairs.setdefault(energy, {})
    if (method, seconds) not in known:
        known[method, seconds] = _pair_constants(energy, method, seconds)
    return known[method, seconds]


def of_pair(energy: LiftedEnergy, pair: tuple[int, int], method: str, seconds: float | None = None) -> LipschitzBound:
    """Return the constant of the difference of two outputs as one number, with the method that gave it."""
    n_outputs, indices = energy.sizes[-1], tuple(pair)
    known = len(indices) == 2 and all(isinstance(k, Integral) and 0 <= k < n_outputs for k in indices)
    if not known or indices[0] == indices[1]:
        raise ValueError(f"pair must be two different indices of outputs, from 0 to {n_outputs - 1}; got {pair!r}")
    i, j = map(int, indices)
    rho = float(pair_constants(energy, method, seconds).rho[i, j])
    if method in BUDGET:
        method = "multiplier" if rho < float(pair_constants(energy, "spectral").rho[i, j]) else "spectral"
    return LipschitzBound((rho,), method)


def _pair_constants(energy: LiftedEnergy, method: str, seconds: float | None) -> OutputConstants:
    whole = float((paper if method in ("paper", "pairwise") else spectral)(energy.operators, energy.beta))
    w, beta, free = energy.weights[-1], energy.beta[-1], energy.intervals[-1].is_free
    rho = w.new_full((len(w), len(w)), math.sqrt(2) * whole)
    if method != "paper":
        features = _features(energy, method)
        if beta == 0:
            pairs = _distances(w)
            if not free:
                # clipping may undo one of the two moves, but the difference moves no more than either of them or both
                pairs = torch.maximum(pairs, torch.maximum(_lengths(w)[:, None], _lengths(w)))
            rho = torch.minimum(rho, pairs * features)
        elif free:
            rows, slack = linear_response(w, beta)
            rho = torch.minimum(rho, (_distances(rows) + slack) * features)
    error = _distances(w) if energy.eliminated else torch.full_like(rho, math.sqrt(2))
    sums = _lengths(w)[:, None] + _lengths(w)
    rho = _multiplied(energy, "pair", method, rho, seconds) + _unfolding(energy, sums, _features(energy, "paper"))
    rounding = _read_out_rounding(energy)
    return OutputConstants(rho * _UP, error * _UP, rounding[:, None] + rounding)


def _unfolding(energy: LiftedEnergy, sizes: Tensor, features: float) -> Tensor:
    """Return what the rounding of rows of the output weights, spread over the windows of a pooling, can add to constants.

    Rows are rounded entry by entry where an operator becomes a matrix. ``sizes`` are the norms of the rows involved.
    """
    return torch.zeros_like(sizes) if energy.layers is None else 4 * verified.EPS * features * sizes


def linear_response(w: Tensor, beta: float) -> tuple[Tensor, float]:
    """Return A = (1 + beta) (I + beta W W^T)^-1 W, the map from features to a free output, and a bound on row differences.

    The error bound is a posteriori: M = I + beta W W^T has no eigenvalue below one, so |A - A'| <= |(1 + beta) W - M A'|.
    """
    system = torch.eye(len(w), dtype=w.dtype, device=w.device) + beta * (w @ w.mT)
    rows = torch.linalg.solve(system, (1 + beta) * w)
    left = float(torch.linalg.matrix_norm((1 + beta) * w - system @ rows))
    size = float(torch.linalg.matrix_norm(system) * torch.linalg.matrix_norm(rows)) + (1 + beta) * float(w.norm())
    return rows, 2 * (left + 8 * (max(w.shape) + 8) * verified.EPS * size)


def _features(energy: LiftedEnergy, method: str) -> float:
    """Lipschitz constant of the inputs of the last layer."""
    bound = paper if method in ("paper", "pairwise") else spectral
    return float(bound(energy.operators[:-1], energy.beta[:-1]))


def _read_out_rounding(energy: LiftedEnergy) -> Tensor:
    """Return the rounding error of y_i = W_i z + b_i and of later operations on it, per unit of (1 + |features|)."""
    w, b = energy.weights[-1], energy.b[-1]
    size = _lengths(w) + (0.0 if b is None else b.abs())
    terms = w.shape[1] if energy.layers is None else energy.operators[-1].terms
    return 4 * (terms + 8) * verified.EPS * (1 + size)


def _check_outputs(energy: LiftedEnergy) -> None:
    """Raise ValueError if the outputs are not those of a matrix, whose rows the constants are made of."""
    if energy.layers is not None and energy.layers[-1].convolves:
        raise ValueError("the outputs of this network are units of a convolution; only outputs of a dense layer are certified")


def _lengths(w: Tensor) -> Tensor:
    return torch.linalg.vector_norm(w, dim=1) * _UP + _LOST


def _distances(w: Tensor) -> Tensor:
    # the faster mode by inner products suffers from cancellation
    return torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist") * _UP + _LOST
