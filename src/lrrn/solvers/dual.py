"""Conjugate gradients on the dual of one wide layer: an unknown per input of the layer instead of one per unit.

With H = a I + b W W^T, the dual variable is y = W^T z, and the best point for a given y is z(y) = clip((q - b W y) / a). The
dual function is smooth, strongly convex and without constraints,

    F(y) = b/2 |y|^2 + max over lo <= z <= hi of (q - b W y)^T z - a/2 |z|^2,    grad F = b (y - W^T z(y)),

with the curvature b (I + b/a W_o^T W_o), where W_o are the rows of the units strictly inside their bounds. All rows in their
place, weighted by how often a unit is inside, give a preconditioner for all samples, by one factorisation of the size of the
inputs. Nonlinear conjugate gradients (Polak and Ribière) find the units at a bound on the way. For linear equations, they are
the linear ones, and the step is exact.
"""

from __future__ import annotations

from typing import NamedTuple, cast, final

import torch
from torch import Tensor

from lrrn.kernels.constants import INSIDE
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.linalg.products import RightFactor
from lrrn.qp import BoxQP, kkt_residual, row_norms
from lrrn.runtime.precision import in_full_precision
from lrrn.solvers.base import Stepper, once_per_hessian
from lrrn.solvers.conjugate_gradients import in_parts

UNITS_FROM, SAMPLES_FROM = 1024, 64
"""Smallest number of units, and of samples, for which the factorisation of the preconditioner saves time."""
BETWEEN_CHECKS = 24
"""Largest number of iterations between two residual checks."""
FIRST = 4
"""Iterations before the first residual check, from which later residuals are predicted."""
REST = 0.75
"""Share of the samples from which iterations go on without those that have probably converged."""
GUESS = 0.5
"""Share of the samples in which a unit is inside its bounds, if nothing is known."""
DAMPING = 2.0
"""Factor on the identity in the preconditioner; see :func:`_preconditioner`."""
COLUMNS = 64
"""Smallest number of columns of the preconditioner that a thread computes."""


def fits_dual(qp: BoxQP) -> bool:
    """Whether the dual has far fewer unknowns, and the batch is large enough for the preconditioner."""
    h = qp.hessian
    factor = h.factor if isinstance(h, BlockTridiagonal) else None
    return factor is not None and factor.saves_time and qp.dim >= UNITS_FROM and qp.n_samples >= SAMPLES_FROM


class _State(NamedTuple):
    """What is kept per sample, updated in place; ``size`` is 0 where there is no last direction."""

    y: Tensor  # (n, k)
    image: Tensor  # (n, k), W^T z
    pull: Tensor  # (n, dim), (q - b W y) / a: the point z before it is clipped
    direction: Tensor  # (n, k)
    slope: Tensor  # (n, k), y - W^T z at the last point
    size: Tensor  # (n, 1), slope^T P^-1 slope there
    residual: Tensor  # (n, 1), norm of the KKT residual at the last check

    def take(self, rows: Tensor | slice) -> _State:
        return _State(*(tensor[rows] for tensor in self))


@final
class Dual(Stepper):
    """Preconditioned conjugate gradients on the dual, with one product with W and one with W^T per iteration.

    Residuals between two checks by the loop are predicted: they fall as fast as the gradient of the dual.
    """

    def __init__(self, qp: BoxQP) -> None:
        factor, through = qp.matrix.factor, qp.matrix.through
        assert factor is not None and through is not None
        (self._a, self._b, w), (self._by_w, self._by_transpose) = factor, through
        wide, narrow, one = (qp.q.new_zeros((qp.n_samples, width)) for width in (qp.dim, w.shape[1], 1))
        self._state = _State(narrow, narrow.clone(), wide, narrow.clone(), narrow.clone(), one, one.clone())
        self._inverse: RightFactor | None = None
        self._known: Tensor | None = None  # the points whose W^T z is in the state

    @in_full_precision
    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        """Iterate until the samples are predicted to have converged, the first time for a few iterations."""
        begins = self._inverse is None
        if begins:
            self._begin(qp, z, g)
        used = torch.zeros(qp.n_samples, dtype=torch.int64)
        # stop slightly below the threshold, so that the residual recomputed by the loop is below it too
        goal = (INSIDE * threshold[:, None] / self._state.residual).square().to(z.dtype)

        def work(rows: slice) -> None:
            state, bounds = self._state.take(rows), _bounds(qp, rows)
            if begins:
                used[rows] = self._iterate(state, z[rows], *bounds, qp.linear, min(sweeps, FIRST), None)
            else:
                now = state.y - state.image
                size = torch.linalg.vecdot(now, cast(RightFactor, self._inverse)(now))[:, None]
                used[rows] = self._iterate(state, z[rows], *bounds, qp.linear, sweeps, goal[rows] * size)

        in_parts(work, z)
        self._known = z
        return used

    def _begin(self, qp: BoxQP, z: Tensor, g: Tensor) -> None:
        """Factor the preconditioner; start from the points, or from a guess if they are zero."""
        a, b, state = self._a, self._b, self._state
        cold = not (qp.linear or bool(z.any()))
        if cold or qp.expected is not None:
            inverse, weight = _common_preconditioner(qp.matrix, qp.expected)
        else:
            pull = torch.add(z, g, alpha=-1 / a)
            inverse, weight = _preconditioner(qp.matrix, ((pull > qp.lo) & (pull < qp.hi)).to(z.dtype).mean(0))
        self._inverse = inverse

        def work(rows: slice) -> None:
            y, pull = state.y[rows], state.pull[rows]
            if cold:
                # the solution if every unit had the weight that it has in the preconditioner, and no bounds
                inverse(self._by_w(qp.q[rows] * (weight / a)), out=y)
                torch.sub(qp.q[rows], self._by_transpose(y), alpha=b, out=pull).div_(a)
            else:
                y.copy_(state.image[rows])
                torch.add(z[rows], g[rows], alpha=-1 / a, out=pull)
            torch.clamp(pull, *_bounds(qp, rows), out=z[rows])
            self._by_w(z[rows], out=state.image[rows])

        in_parts(work, z)

    def _iterate(
        self, state: _State, z: Tensor, lo: Tensor, hi: Tensor, linear: bool, sweeps: int, limit: Tensor | None
    ) -> Tensor:
        """Move the points and their state; return the iterations of each.

        ``limit`` has the sizes of the dual gradient at which samples have probably converged. Without it, all iterations are
        done.
        """
        from lrrn.kernels.cpu.dual_step import search, turn

        used = torch.zeros(len(z), dtype=torch.int64)
        ratio = z.numpy().dtype.type(self._b / self._a)
        arrays = tuple(tensor.numpy() for tensor in (state.slope, state.direction, state.y, state.pull, z))
        now, steepest, along = torch.empty_like(state.y), torch.empty_like(state.y), torch.empty_like(z)
        for k in range(sweeps):
            torch.sub(state.y, state.image, out=now)
            cast(RightFactor, self._inverse)(now, out=steepest)
            if limit is not None:
                # false of what is not finite
                open_ = (torch.linalg.vecdot(now, steepest)[:, None] > limit)[:, 0].nonzero()[:, 0]
                if len(open_) == 0:
                    break
                if len(open_) <= REST * len(z):
                    part, points = state.take(open_), z[open_]
                    bounds = (lo, hi) if len(lo) == 1 else (lo[open_], hi[open_])
                    used[open_] += self._iterate(part, points, *bounds, linear, sweeps - k, limit[open_])
                    z[open_] = points
                    for whole, moved in zip(state, part, strict=True):
                        whole[open_] = moved
                    break
            turn(now.numpy(), steepest.numpy(), arrays[0], state.size.numpy(), arrays[1])
            self._by_transpose(state.direction, out=along)
            search(along.numpy(), lo.numpy(), hi.numpy(), ratio, linear, *arrays)
            self._by_w(z, out=state.image)
            used += 1
        return used

    @in_full_precision
    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        """Recompute gradients and residuals; an iteration has left W^T z."""
        g, norms, state = torch.empty_like(z), torch.empty(len(z), dtype=torch.float64), self._state
        zero = self._known is None and not bool(z.any())

        def work(rows: slice) -> None:
            if zero:
                torch.neg(qp.q[rows], out=g[rows])
            else:
                if self._known is not z:
                    self._by_w(z[rows], out=state.image[rows])
                self._by_transpose(state.image[rows], out=g[rows])
                g[rows].mul_(self._b).sub_(qp.q[rows]).add_(z[rows], alpha=self._a)
            norms[rows] = row_norms(kkt_residual(z[rows], g[rows], *_bounds(qp, rows)))

        in_parts(work, z)
        state.residual.copy_(norms[:, None])
        return g, norms

    def keep(self, rows: Tensor) -> None:
        """Drop the state of the other samples."""
        self._state, self._known = self._state.take(rows), None


def _bounds(qp: BoxQP, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the bounds of some rows, or those that all share."""
    return (qp.lo, qp.hi) if len(qp.lo) == 1 else (qp.lo[rows], qp.hi[rows])


def _preconditioner(h: BlockTridiagonal, share: Tensor | None) -> tuple[RightFactor, Tensor]:
    """Return the inverse of DAMPING I + b/a W^T diag(weight) W, or the identity if it cannot be factored, and the weights.

    These are the roots of the shares: units that are seldom inside would otherwise count too little in the samples in which
    they are. Damping helps in directions in which a sample has fewer units inside than the others. Both save an iteration in
    ten.
    """
    assert h.factor is not None
    a, b, w = h.factor
    weight = (torch.full_like(w[:, 0], GUESS) if share is None else share).sqrt()
    weighted, gram = w * weight[:, None], w.new_empty((w.shape[1], w.shape[1]))

    by_weighted = RightFactor(weighted)

    def work(columns: slice) -> None:
        by_weighted(w.mT[columns], out=gram[columns])

    in_parts(work, gram, COLUMNS)
    gram.mul_(b / a).diagonal().add_(DAMPING)
    lower, info = torch.linalg.cholesky_ex(gram)
    return RightFactor(torch.eye(len(gram)).to(w) if int(info) else torch.cholesky_inverse(lower)), weight


_common_preconditioner = once_per_hessian(_preconditioner)
"""The same, shared by all batches of a Hessian that expect the same."""
