"""Two methods that maximise the shared dual of a batch by products with the layers' operators: splitting, and ascent.

With sigma eliminated, the dual is a concave quadratic function of p and r, plus concave functions of single entries of p and
bounds on r. Both methods stop by rules that depend on no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from lrrn.certificates.complementarity import Faces

if TYPE_CHECKING:
    from lrrn.certificates.matrix_free_dual import MatrixFreeSolver

FINAL = 400
"""Largest number of steps of conjugate gradients for a minimiser that is used often, or in a proof."""


@final
class Response(NamedTuple):
    """A minimiser v, w = H v - B u at the best u, and the derivative of the form at v."""

    v: Tensor
    w: Tensor
    bent: Tensor


class Batch:
    """Samples with leads of one, and the dual of each as a function of p and r, at the best sigma.

    Parameters
    ----------
    solver : MatrixFreeSolver
    c, low, high, slack : Tensor of shape (n, dim)
        As of :meth:`MatrixFreeSolver.maximised`, in units of the leads; ``low`` is infinite without a lower bound.
    goal : Tensor of shape (n,)
        Value of the dual that is large enough.
    faces : Faces, optional
        Conditions that hold as equations.
    """

    STRIDE: ClassVar[int]
    """Iterations between two evaluations of the dual."""
    LONGEST: ClassVar[int]
    """Largest number of iterations."""
    ROWS: ClassVar[tuple[str, ...]]
    ROWS = ("p", "r", "goal", "c", "low", "high", "slack", "kink", "r_lo", "r_hi", "v_c", "w_c", "bend")
    """Attributes with one row per sample."""

    def __init__(
        self,
        solver: MatrixFreeSolver,
        c: Tensor,
        low: Tensor,
        high: Tensor,
        slack: Tensor,
        goal: Tensor,
        faces: Faces | None = None,
    ) -> None:
        self.solver, self.goal = solver, goal
        lam = solver.lam
        self.r_lo, self.r_hi = -lam * high, lam * low
        if faces is not None:
            # the multiplier of an equation has either sign: v + low = 0 is v + low >= 0 and v <= -low
            self.r_hi = self.r_hi.masked_fill(faces.active, float("inf"))
            high = torch.where(faces.inactive, -low, high)
        self.c, self.low, self.high, self.slack, self.kink = c, low, high, slack, lam * slack
        self.v_c, self.w_c, _ = solver.response(c, torch.zeros_like(c), steps=FINAL)
        self.bend = -(c * self.v_c).sum(-1).clamp(max=-1e-30)
        p = torch.zeros_like(c)
        p = torch.where(low.isinf(), torch.maximum(p, self.kink), p)
        self.p = torch.where(high.isinf(), torch.minimum(p, self.kink), p)
        self.r = torch.zeros_like(p)
        self.start: Response | None = None

    def moved(self, p: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best sigma and, with it, the minimiser's v and w."""
        self.start = self.solver.response(p, r, self.start)
        v, w, _ = self.start
        sigma = ((1 + (self.c * v).sum(-1)) / self.bend).clamp(min=0.0)
        return sigma, v + sigma[:, None] * self.v_c, w + sigma[:, None] * self.w_c

    def value(self) -> tuple[Tensor, Tensor]:
        """Return the dual and the best sigma."""
        p, r = self.p, self.r
        sigma, v, w = self.moved(p, r)
        past = p - self.kink
        ends = torch.where(past < 0, self.low * past, torch.where(past > 0, -self.high * past, 0.0))
        linear = sigma[:, None] * self.c + p
        return sigma + (ends + r * self.slack + (linear * v + r * w) / 2).sum(-1), sigma

    def best(self) -> tuple[Tensor, Tensor, Tensor]:
        """Iterate; return sigma, p and r of the largest dual."""
        kept, sigma = self.value()
        found = [sigma.clone(), self.p.clone(), self.r.clone()]
        rows = torch.arange(len(kept), device=kept.device)
        for _ in range(0, self.LONGEST, self.STRIDE):
            self.advance()
            value, sigma = self.value()
            better = value > kept
            for old, new in zip(found, (sigma, self.p, self.r), strict=True):
                old[rows[better]] = new[better]
            going = self.going(value, kept, (found[1][rows], found[2][rows]))
            kept = torch.where(better, value, kept)
            keep = (going & ~(kept > self.goal)).nonzero().squeeze(1)
            if len(keep) == 0:
                break
            if len(keep) < len(rows):
                rows, kept = rows[keep], kept[keep]
                self.keep(keep)
        return found[0], found[1], found[2]

    def advance(self) -> None:
        """Iterate ``STRIDE`` times."""
        raise NotImplementedError

    def going(self, value: Tensor, kept: Tensor, best: tuple[Tensor, Tensor]) -> Tensor:
        """Return which samples go on, given the dual, the largest one before, and where the largest one is."""
        raise NotImplementedError

    def keep(self, rows: Tensor) -> None:
        """Continue with some rows only."""
        for name in self.ROWS:
            setattr(self, name, getattr(self, name)[rows])
        if self.start is not None:
            self.start = Response(*(t[rows] for t in self.start))


@final
class Ascent(Batch):
    """Accelerated proximal gradients with a restart wherever momentum points downhill, for any depth."""

    STRIDE, LONGEST = 20, 1500
    ROWS = (*Batch.ROWS, "shorter", "momentum", "p_ahead", "r_ahead", "fell")
    GAIN = 5e-5
    """A sample stops when a stride raises the dual by less than this fraction, or two strides lower it."""

    def __init__(self, solver: MatrixFreeSolver, *problem: Any, **more: Any) -> None:
        super().__init__(solver, *problem, **more)
        goal = self.goal
        self.p_step, self.r_step = solver.steps
        self.shorter = torch.ones_like(goal)[:, None]
        self.momentum, self.p_ahead, self.r_ahead = torch.ones_like(self.shorter), self.p, self.r
        self.fell = torch.zeros_like(goal, dtype=torch.bool)

    def advance(self) -> None:
        """Iterate ``STRIDE`` times."""
        p_step, r_step = self.p_step * self.shorter, self.r_step * self.shorter
        (p, r), (at_p, at_r) = (self.p, self.r), (self.p_ahead, self.r_ahead)
        for _ in range(self.STRIDE):
            _, v, w = self.moved(at_p, at_r)
            middle = at_p + p_step * v
            new_p = torch.clamp(self.kink, middle - p_step * self.high, middle + p_step * self.low)
            new_r = torch.clamp(at_r + r_step * (w + self.slack), self.r_lo, self.r_hi)
            turn = ((new_p - at_p) * (new_p - p) / p_step).sum(-1) + ((new_r - at_r) * (new_r - r) / r_step).sum(-1)
            momentum = torch.where(turn[:, None] < 0, 1.0, self.momentum)
            self.momentum = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
            push = (momentum - 1) / self.momentum
            at_p, at_r = new_p + push * (new_p - p), new_r + push * (new_r - r)
            p, r = new_p, new_r
        self.p, self.r, self.p_ahead, self.r_ahead = p, r, at_p, at_r

    def going(self, value: Tensor, kept: Tensor, best: tuple[Tensor, Tensor]) -> Tensor:
        """Go back to the best point with a shorter step where steps were too long. Momentum may lower the dual for a while."""
        gained, size = value - kept, torch.maximum(value, kept).abs()
        wild = ~(gained > -0.1 * size)
        self._reset(wild[:, None], best)
        self.fell, before = gained <= 0, self.fell
        return (wild & (self.shorter[:, 0] > 1e-3)) | (gained > self.GAIN * size) | (self.fell & ~before)

    def _reset(self, wild: Tensor, best: tuple[Tensor, Tensor]) -> None:
        """Continue wild samples from their best points, without momentum."""
        self.shorter = torch.where(wild, self.shorter / 2, self.shorter)
        self.momentum = torch.where(wild, 1.0, self.momentum)
        self.p, self.p_ahead = (torch.where(wild, best[0], t) for t in (self.p, self.p_ahead))
        self.r, self.r_ahead = (torch.where(wild, best[1], t) for t in (self.r, self.r_ahead))
        if self.start is not None:
            self.start = Response(*(torch.where(wild, 0.0, t) for t in self.start))


@final
class Splitting(Batch):
    """Douglas-Rachford splitting (ADMM), for one layer.

    An iteration maximises the quadratic part with penalties on the distances of p and r from feasible ones, by the eigenvectors
    of A^T A, and costs about as much as one of the ascent. The ascent needs many more of them: the quadratic part is
    singular in the null space of A^T, where the dual is linear.
    """

    STRIDE, LONGEST = 10, 500
    ROWS = (*Batch.ROWS, "penalty", "p_state", "r_state", "last")
    GAIN = 1e-5
    """A sample stops when a stride changes the dual by less than this fraction."""
    PENALTY, RELAXATION = 0.3, 1.6
    """First penalty, relative to the curvature in p and to that in r at the mean eigenvalue, and over-relaxation."""
    BALANCED, FARTHEST = 1.2, 5.0
    """Smallest change of the penalty, and the largest after one stride, as factors."""

    def __init__(self, solver: MatrixFreeSolver, *problem: Any, **more: Any) -> None:
        super().__init__(solver, *problem, **more)
        goal = self.goal
        self.penalty = torch.full_like(goal, self.PENALTY)[:, None]
        self.p_state, self.r_state = self.p, self.r
        self.last = torch.full_like(goal, float("-inf"))

    def advance(self) -> None:
        """Iterate ``STRIDE`` times; then choose the penalties of the next stride by the residuals of the last iteration."""
        spectrum, (p, r) = self.solver.spectrum, (self.p_state, self.r_state)
        weights = spectrum.at_mean.pp, spectrum.at_mean.rr
        p_unit, r_unit = (weight * self.penalty for weight in weights)
        inverse = spectrum.inverse(p_unit, r_unit)
        # the change of the solution with sigma
        by_sigma = inverse.solved(self.v_c, self.w_c)
        left = self.bend[:, None] - _dot((self.v_c, self.w_c), by_sigma)
        reach = self.low / p_unit, self.high / p_unit
        p_now, r_now = self._feasible(p, r, *reach)
        for _ in range(self.STRIDE):
            free = inverse.solved(p_unit * (2 * p_now - p), r_unit * (2 * r_now - r) + self.slack)
            sigma = ((1 + _dot((self.v_c, self.w_c), free)) / left).clamp(min=0.0)
            gap = free[0] + sigma * by_sigma[0] - p_now, free[1] + sigma * by_sigma[1] - r_now
            p, r = p + self.RELAXATION * gap[0], r + self.RELAXATION * gap[1]
            before = p_now, r_now
            p_now, r_now = self._feasible(p, r, *reach)
        moved = p_now - before[0], r_now - before[1]
        sizes = [weights[0] * _dot(pair[:1], pair[:1]) + weights[1] * _dot(pair[1:], pair[1:]) for pair in (gap, moved)]
        factor = (sizes[0] / sizes[1]).pow(0.25)
        factor = factor.nan_to_num(1.0).clamp(1 / self.FARTHEST, self.FARTHEST)
        factor = torch.where((factor > self.BALANCED) | (factor < 1 / self.BALANCED), factor, 1.0)
        self.penalty = self.penalty * factor
        self.p_state, self.r_state = p_now + (p - p_now) / factor, r_now + (r - r_now) / factor
        self.p, self.r = p_now, r_now

    def _feasible(self, p: Tensor, r: Tensor, below: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
        """Return the proximal points of the functions of single entries of p, and of the bounds on r."""
        return torch.clamp(self.kink, p - above, p + below), torch.clamp(r, self.r_lo, self.r_hi)

    def going(self, value: Tensor, kept: Tensor, best: tuple[Tensor, Tensor]) -> Tensor:
        """Stop where the dual has settled. In the first strides it is far below the best one, and rises."""
        settled = (value - self.last).abs() <= self.GAIN * value.abs()
        self.last = value
        return ~settled


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Return the products of rows, of shape (n, 1), summed over pairs of tensors."""
    return torch.stack([(a * b).sum(-1, keepdim=True) for a, b in zip(left, right, strict=True)]).sum(0)
