"""Empirical lower estimates of the Lipschitz constant, to compare with proven upper bounds."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lrrn.attacks.inputs import checked_inputs
from lrrn.attacks.slopes import Slopes, jacobian, normalised
from lrrn.network import LRRN
from lrrn.qp import row_norms
from lrrn.runtime.threads import blas_threads

NEAREST = 1e-3
"""Smallest distance of the two inputs of a pair, relative to one plus the norm of the input."""


@final
class LipschitzEstimate(float):
    """Empirical lower estimate of a Lipschitz constant: the steepest slope found. It proves nothing.

    Up to rounding, the constant is at least this large. It may be far larger. Use :class:`lrrn.LipschitzBound` where a
    guarantee is needed.

    Attributes
    ----------
    value : float
        The estimate.
    x : float64 Tensor of shape (d_0,)
        The input with that slope.
    quotient : float
        The largest |f(a) - f(b)| / |a - b| observed for pairs of inputs, computed without derivatives.
    """

    x: Tensor
    quotient: float

    def __new__(cls, value: float, x: Tensor, quotient: float) -> LipschitzEstimate:
        """Attach the evidence."""
        estimate = super().__new__(cls, value)
        estimate.x, estimate.quotient = x, quotient
        return estimate

    @property
    def value(self) -> float:
        """The estimate as a plain float."""
        return float(self)

    def __reduce__(self) -> tuple[type[LipschitzEstimate], tuple[float, Tensor, float]]:
        """Support copying and pickling."""
        return LipschitzEstimate, (self.value, self.x, self.quotient)

    def __repr__(self) -> str:
        return f"LipschitzEstimate({self.value!r}, quotient={self.quotient!r})"


def empirical_lipschitz(net: LRRN, x: Tensor, *, steps: int = 20, seed: int = 0) -> LipschitzEstimate:
    """Estimate the Lipschitz constant of the prediction from below, by ascent on the spectral norm of its Jacobian.

    The Jacobian is exact but piecewise constant, so the ascent compares points: along the right singular vector of its largest
    singular value, in both directions, and along a random direction. A point moves to the larger norm. Otherwise its step is
    halved.

    Parameters
    ----------
    net : LRRN
    x : Tensor of shape (n, d_0)
        Starting points; a hundred samples suffice.
    steps : int, default=20
        Moves of each point.
    seed : int, default=0
        Seed of the random directions.

    Returns
    -------
    LipschitzEstimate
    """
    if steps < 0:
        raise ValueError(f"steps must be at least 0; got {steps}")
    x = checked_inputs(net, x, modules=False)
    if len(x) == 0:
        raise ValueError("the ascent needs at least one input to start from; x is empty")
    x = x.to(device=net.W[0].device, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), blas_threads(1):
        slopes = Slopes(net)
        z, y = slopes.outputs(x)
        norm, direction = slopes.spectral(jacobian(slopes, z))
        # for pairs closer than this, the solver's error would dominate the slope
        floor = NEAREST * (1 + row_norms(x))
        reach = 0.5 * (1 + row_norms(x))
        steepest, pair = -1.0, torch.stack([x[0], x[0] + direction[0] * floor[0]])
        for _ in range(steps):
            noise = torch.randn((len(x), slopes.n_coefficients), generator=generator, dtype=x.dtype).to(x.device)
            ways = (direction, -direction, normalised(slopes.gradient(noise)))
            origin, origin_y, before = x, y, norm
            for way in ways:
                other = origin + way * reach[:, None]
                z, there = slopes.outputs(other)
                rise = row_norms(there - origin_y) / reach
                if float(rise.max()) > steepest:
                    row = int(rise.argmax())
                    steepest, pair = float(rise[row]), torch.stack([origin[row], other[row]])
                steeper, stretched = slopes.spectral(jacobian(slopes, z))
                better = steeper > norm
                norm = torch.where(better, steeper, norm)
                x, y, direction = (
                    torch.where(better[:, None], new, old) for new, old in ((other, x), (there, y), (stretched, direction))
                )
            reach = torch.where(norm > before, reach, torch.maximum(0.5 * reach, floor))
        best = int(norm.argmax())
        quotient = _quotient(net, pair)
        return LipschitzEstimate(max(float(norm[best]), quotient), x[best], quotient)


def _quotient(net: LRRN, pair: Tensor) -> float:
    """Return |f(a) - f(b)| / |a - b| with the error of both solves subtracted."""
    gap = float(row_norms(pair[1:] - pair[:1]))
    if gap == 0:
        return 0.0
    solution = net.infer(pair, tol=1e-9)
    error = float(solution.error_bound.sum()) * max(1.0, net.energy_snapshot(torch.float64).operators[-1].norm())
    return max(0.0, float(row_norms(solution.output[1:] - solution.output[:1])) - error) / gap
