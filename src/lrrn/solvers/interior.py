"""A batched primal-dual interior-point method for box QPs, which gives Newton a start near the solution.

Mehrotra's predictor-corrector on  H z - q - l + u = 0,  (z - lo) l = 0,  (hi - z) u = 0,  l, u >= 0. The iterates are strictly
inside the box, so the final point must be rounded to a face; :mod:`lrrn.solvers.newton` does that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lrrn.qp import BoxQP, row_norms

FRACTION_TO_BOUNDARY = 0.995


class _State(NamedTuple):
    z: Tensor
    lower: Tensor
    upper: Tensor


def centre(qp: BoxQP, z: Tensor, max_iterations: int, accuracy: float = 1e-10) -> tuple[Tensor, Tensor]:
    """Follow the central path until complementarity and dual infeasibility are at most ``accuracy``.

    The problems are in float64, scaled to a unit diagonal and a ``q`` of norm about one, and ``z`` is a feasible start.
    Return feasible points, with units on those bounds that are active, and the number of iterations of each sample.
    """
    used = torch.zeros(z.shape[0], dtype=torch.int64, device=z.device)
    result = z.clone()
    rows = torch.arange(z.shape[0], device=z.device)
    inner = _inside(qp, z)
    g = qp.gradient(inner)
    floor = qp.residual(inner).clamp(min=1e-3)[:, None] / qp.dim**0.5
    state = _State(
        inner,
        torch.where(qp.lo.isfinite(), g.clamp(min=0) + floor, 0.0).expand_as(z),
        torch.where(qp.hi.isfinite(), (-g).clamp(min=0) + floor, 0.0).expand_as(z),
    )
    for _ in range(max_iterations):
        state, gap = _iterate(qp, state)
        used[rows] += 1
        result[rows] = _rounded(qp, state)
        keep = torch.nonzero((gap > accuracy) & gap.isfinite()).squeeze(1)
        if keep.numel() == 0:
            break
        if keep.numel() < rows.numel():
            rows, qp = rows[keep], qp.take(keep)
            state = _State(*(t[keep] for t in state))
    return result, used


def _inside(qp: BoxQP, z: Tensor) -> Tensor:
    """Move the point off the bounds by up to 0.1, less in a narrow box; units whose bounds meet stay."""
    room = (0.1 * (qp.hi - qp.lo)).clamp(max=0.1)
    return torch.minimum(torch.maximum(z, qp.lo + room), qp.hi - room)


def _rounded(qp: BoxQP, state: _State) -> Tensor:
    """Move a unit to a bound if its Lagrangian multiplier exceeds its slack."""
    z = torch.where(state.lower > state.z - qp.lo, qp.lo, state.z)
    return qp.project(torch.where(state.upper > qp.hi - state.z, qp.hi, z))


def _iterate(qp: BoxQP, state: _State) -> tuple[_State, Tensor]:
    z, lower, upper = state
    fixed = (qp.lo >= qp.hi).expand_as(z)
    below = torch.where(fixed, 1.0, z - qp.lo)
    above = torch.where(fixed, 1.0, qp.hi - z)
    g = qp.gradient(z)
    lower, upper = (torch.where(fixed, 0.0, t) for t in (lower, upper))
    barrier = lower / below + upper / above
    factor = qp.matrix.restricted(~fixed).plus_diagonal(torch.where(fixed, 0.0, barrier)).cholesky()
    pairs = (qp.lo.isfinite() & ~fixed).sum(-1) + (qp.hi.isfinite() & ~fixed).sum(-1)

    def average(s_below: Tensor, low: Tensor, s_above: Tensor, up: Tensor) -> Tensor:
        products = torch.where(low > 0, s_below * low, 0.0) + torch.where(up > 0, s_above * up, 0.0)
        return (products.sum(-1) / pairs.clamp(min=1))[:, None]

    def direction(c_lower: Tensor | float, c_upper: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """Solve for complementarity products c_lower and c_upper."""
        rhs = torch.where(fixed, 0.0, -g + c_lower / below - c_upper / above)
        dz = factor.solve(rhs)
        dl = torch.where(lower > 0, c_lower / below - lower - lower / below * dz, 0.0)
        du = torch.where(upper > 0, c_upper / above - upper + upper / above * dz, 0.0)
        return dz, dl, du

    gap = average(below, lower, above, upper)
    dz, dl, du = direction(0.0, 0.0)
    primal, dual = _reach(below, dz, above, -dz), _reach(lower, dl, upper, du)
    ahead = average(below + primal * dz, lower + dual * dl, above - primal * dz, upper + dual * du)
    target = gap * (ahead / gap.clamp(min=1e-300)).clamp(0, 1) ** 3
    dz, dl, du = direction(torch.where(lower > 0, target - dz * dl, 0.0), torch.where(upper > 0, target + dz * du, 0.0))
    primal = FRACTION_TO_BOUNDARY * _reach(below, dz, above, -dz)
    dual = FRACTION_TO_BOUNDARY * _reach(lower, dl, upper, du)
    new = _State(qp.project(z + primal * dz), lower + dual * dl, upper + dual * du)
    mismatch = torch.where(fixed, 0.0, qp.gradient(new.z) - new.lower + new.upper)
    ok = factor.ok[:, None] & dz.isfinite().all(-1, keepdim=True)
    new = _State(*(torch.where(ok, after, before) for after, before in zip(new, (z, lower, upper), strict=True)))
    return new, torch.where(ok[:, 0], torch.maximum(gap[:, 0], row_norms(mismatch)), 0.0)


def _reach(a: Tensor, da: Tensor, b: Tensor, db: Tensor) -> Tensor:
    """Return the largest t <= 1, of shape (n, 1), for which a + t da and b + t db stay non-negative."""
    t_a = torch.where(da < 0, -a / da, 2.0).amin(-1, keepdim=True)
    t_b = torch.where(db < 0, -b / db, 2.0).amin(-1, keepdim=True)
    return torch.minimum(t_a, t_b).clamp(max=1.0 / FRACTION_TO_BOUNDARY)
