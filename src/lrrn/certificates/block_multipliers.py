"""One multiplier per layer for which the Lagrangian of local radii has a minimum, proven from scalars.

With block-constant multipliers the quadratic part of the Lagrangian is a sum over layers, and each layer's share is a function
of the singular values of its operator. Minimising over the activations layer by layer, from the input upwards, leaves a
multiple of the squared norm of the next layer: a recursion for one number. The form is positive definite if this number stays
positive, and the recursion bounds its smallest eigenvalue as well. See docs/theory/matrix-free.md for the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from lrrn.linalg import verified

SHARE, SHARE_DEEP = 0.97, 0.93
"""Multiplier of the last layer, as a fraction of the largest for which the form is positive definite, with one layer and with
several: the closer to it, the larger the condition number of the form."""
WORTH = 1.1
"""One layer: a larger multiplier than the one that needs no inverse must be larger by this factor."""
SWEEPS, GOLDEN = 3, (math.sqrt(5) - 1) / 2
_STEPS = 40


LARGEST_BETA = 1e8
"""Largest weight of a reconstruction term for which bounds are computed."""


@final
@dataclass(frozen=True)
class Layers:
    """Layers by their scalars: discounts a_k, weights beta_k of the reconstruction, upper bounds on the spectral norms."""

    discounts: tuple[float, ...]
    beta: tuple[float, ...]
    norms: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.discounts)

    def rest(self, k: int, kept: float, below: float, above: float) -> float:
        """Return what is left of ``kept`` |v_k|^2 plus the share of layer k in the form, as a multiple of |v_{k+1}|^2.

        The minimum over v_k and over all singular values of

            a M (1 + beta x) - (a (1 + beta) (M + L))^2 x / (4 (kept + a L (beta + x))),   0 <= x <= |A_k|^2,

        with L and M the multipliers ``below`` and ``above``. It is convex in x. The result is rounded down.
        """
        a, beta, top = self.discounts[k], self.beta[k], self.norms[k] * self.norms[k]
        half = a * (1 + beta) * (above + below) / 2
        slope, pull = a * above * beta, half * half
        firm, gain = kept + a * below * beta, a * below
        # the difference below loses digits in proportion to beta
        if not (kept > 0 and 0 <= top < math.inf and beta <= LARGEST_BETA):
            return -math.inf
        # the first layer: linear in x, and least at an end, which rounding may hide
        least = [0.0, top]
        if gain > 0:
            # the derivative slope - pull firm / (firm + gain x)^2 vanishes
            least = [min(max((math.sqrt(pull * firm / slope) - firm) / gain, 0.0), top) if slope > 0 else top]
        both = [(a * above + slope * x, pull * x / (firm + gain * x)) for x in least]
        # x is within 4 EPS (firm + gain x) / gain of the minimum, which changes the value in second order
        missed = (4 * verified.EPS) ** 2 * pull / gain if gain > 0 else 0.0
        return min(plus - minus - 64 * verified.EPS * (plus + minus) for plus, minus in both) - missed

    def reach(self, k: int, kept: float, below: float, above: float) -> tuple[float, float]:
        """Return n and f with |v_k| <= n |v_{k+1}| + f |e|, where |e|^2 is what completing the square leaves of the form."""
        a, beta, s = self.discounts[k], self.beta[k], self.norms[k]
        firm, gain = kept + a * below * beta, a * below
        peak = math.sqrt(firm / gain) if gain > 0 else math.inf
        s = min(s, peak)
        return a * (1 + beta) * (above + below) / 2 * s / (firm + gain * s * s), 1 / math.sqrt(firm)


def _floor(reaches: Sequence[tuple[float, float]], last: float) -> float:
    """Return a lower bound on the smallest eigenvalue from the reaches of all layers and the rest ``last`` of the last one."""
    if not last > 0:
        return 0.0
    factors = [factor for _, factor in reaches] + [1 / math.sqrt(last)]
    total = 0.0
    for k in range(len(factors)):
        gain = 1.0
        for j in range(k, len(factors)):
            total += gain * factors[j] * (gain * factors[j])
            gain *= reaches[j][0] if j < len(reaches) else 1.0
    return (1 - 1e-9) / total if total < math.inf else 0.0


def form_floor(layers: Layers, lam: Sequence[float]) -> float:
    """Return a proven lower bound on the smallest eigenvalue of the form with these multipliers; 0 if there is none."""
    kept, below, reaches = 1.0, 0.0, []
    for k, above in enumerate(lam):
        rest = layers.rest(k, kept, below, above) if above > 0 else 0.0
        if not rest > 0:
            return 0.0
        reaches.append(layers.reach(k, kept, below, above))
        kept, below = rest, above
    return _floor(reaches, kept)


def hessian_floor(layers: Layers) -> float:
    """Return a proven lower bound on the smallest eigenvalue of the free phase's Hessian; 0 if there is none."""
    kept, reaches = layers.discounts[0], []
    for k in range(1, len(layers)):
        rest = layers.rest(k, kept, 1.0, 1.0)
        if not rest > 0:
            return 0.0
        reaches.append(layers.reach(k, kept, 1.0, 1.0))
        kept = rest
    return _floor(reaches, kept)


def without_norms(beta: float, discount: float = 1.0) -> float:
    """Return the largest multiplier of a first layer that is admissible whatever its operator; 0 without reconstruction."""
    return 4 * beta / (1 + beta) / (1 + beta) / discount


def block_multipliers(layers: Layers) -> tuple[float, ...]:
    """Return one multiplier per layer, up to a share of the largest possible multiplier of the last layer.

    Multipliers of earlier layers are those that admit the largest last one. For one layer, the multiplier that needs no
    inverse is preferred where a larger one would hardly differ.
    """
    if len(layers) == 1:
        simple, largest = without_norms(layers.beta[0], layers.discounts[0]), _largest(layers, 0, 1.0, 0.0)
        return (simple if SHARE * largest < WORTH * simple else SHARE * largest,)
    shares = [0.5] * (len(layers) - 1)
    for _ in range(SWEEPS):
        for k in range(len(shares)):
            shares[k] = _best(lambda share, k=k: _multipliers(layers, [*shares[:k], share, *shares[k + 1 :], 1.0])[-1])  # type: ignore[misc]
    return _multipliers(layers, [*shares, SHARE_DEEP])


def _multipliers(layers: Layers, shares: Sequence[float]) -> tuple[float, ...]:
    """Return multipliers from the position of each between the one below it and the largest possible one."""
    kept, below, lam = 1.0, 0.0, []
    for k, share in enumerate(shares):
        above = below + share * (_largest(layers, k, kept, below) - below)
        kept, below = layers.rest(k, kept, below, above), above
        lam.append(above)
        if not kept > 0 and k + 1 < len(layers):
            return (0.0,) * len(layers)
    return tuple(lam)


def _largest(layers: Layers, k: int, kept: float, below: float) -> float:
    """Return the largest multiplier of layer k that leaves something, by bisection; ``below`` itself always does."""
    step = below if below > 0 else 1.0 / layers.discounts[k]
    low, high = below, below + step
    while layers.rest(k, kept, below, high) > 0 and high < 1e100:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if layers.rest(k, kept, below, middle) > 0 else (low, middle)
    return low


def _best(value: Callable[[float], float]) -> float:
    """Return where a function of one number between 0 and 1 is largest, by golden section."""
    low, high = 0.0, 1.0
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = value(left), value(right)
    for _ in range(_STEPS):
        if at_left < at_right:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = value(right)
        else:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = value(left)
    return (low + high) / 2
