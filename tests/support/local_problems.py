"""What local radii are made of: constraints, activations with their slack, and one unit by hand."""

from __future__ import annotations

import math

import torch

BY_HAND = [
    (3.0, 0.0, -1.0, math.inf, 2.0),  # v = u / 2 must rise by one
    (3.0, 0.0, 1.0, math.inf, 2.0),  # v must fall by one, and may
    (0.0, 0.5, -1.0, math.inf, 2.5),  # first the slack must be used up
    (0.0, 0.5, -4.0, math.inf, 1.0),
    (3.0, 0.0, -2.0, 3.0, 1.0),
    (0.0, 0.5, -2.0, 6.0, 1.5),
]
"""Distance of a unit from its lower bound, slack, weight in the output, distance from its upper bound; and the answer."""

CONSTRAINTS = ["nonneg", "box", "free", (-0.3, 0.4), (-math.inf, 0.2), ("nonneg", "box"), ("free", (-math.inf, 0.0))]


def solved(net, x):
    """Activations and slack at x."""
    energy, solution = net.energy_snapshot(torch.float64), net.infer(x, tol=1e-10)
    z = torch.cat(solution.activations[: energy.n_free], -1)
    return z, energy.free(x).gradient(z)
