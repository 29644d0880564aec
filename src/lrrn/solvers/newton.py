"""Projected Newton on the faces of the box, with batched factorisations: few iterations at any condition number.

An iteration takes a scaled projected-gradient step, which picks a face, then a Newton step on that face, searched along its
projection; both steps decrease the energy. On the optimal face, one Newton step gives the solution. Samples that need many
iterations are first moved near their solution by an interior-point method, whose iteration count hardly depends on the
condition number. All computations are in float64, whatever the dtype of the batch.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lrrn.linalg import verified
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import BoxQP, kkt_residual, row_norms
from lrrn.solvers.base import Stepper, needs_matrix, once_per_hessian, recompute
from lrrn.solvers.interior import centre

MEMORY_LIMIT = 2**28
"""Memory limit for factors, in bytes; samples are processed in groups that fit."""
FACE_ITERATIONS = 6
INTERIOR_ITERATIONS = 40
BACKTRACKS = 24


@final
class Newton:
    """Projected Newton on box QPs, one block-tridiagonal Cholesky factorisation per sample and iteration."""

    name = "newton"
    patience = 1

    def chunk(self, qp: BoxQP) -> int:
        """Return the iterations of one round: on faces, by the interior-point method, and on faces again."""
        return 2 * FACE_ITERATIONS + INTERIOR_ITERATIONS

    def obstacle(self, qp: BoxQP) -> str | None:
        """Return why the problem cannot be solved: any device, but it must have a matrix."""
        return needs_matrix(qp)

    def begin(self, qp: BoxQP) -> _NewtonStepper:
        """Scale the Hessian to a unit diagonal and bound its spectrum."""
        return _NewtonStepper(qp)


@once_per_hessian
def scaled_to_unit_diagonal(h: BlockTridiagonal) -> tuple[Tensor, BlockTridiagonal, float]:
    """Return diag(H)^1/2, the scaled H and one over its largest eigenvalue, in float64."""
    h = h.to(torch.float64)
    root = h.diagonal.sqrt()
    scaled = h.scaled(root.reciprocal())
    return root, scaled, 1 / verified.largest_for_steps(scaled)


@final
class _NewtonStepper(Stepper):
    def __init__(self, qp: BoxQP) -> None:
        self._root, self._h, self._step = scaled_to_unit_diagonal(qp.matrix)
        entries = sum(d * d for d in self._h.sizes) + sum(block.numel() for block in self._h.sub)
        self._group = max(1, MEMORY_LIMIT // (8 * 3 * max(1, entries)))

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        used = torch.zeros(qp.n_samples, dtype=torch.int64, device=z.device)
        for rows in torch.arange(qp.n_samples, device=z.device).split(self._group):
            part = qp.take(rows)
            # scale to a unit diagonal and to a q of norm one, or to an H z of norm one if the bounds make z larger
            q = part.q.to(torch.float64) / self._root
            nearest = part.project(torch.zeros_like(part.q)).to(torch.float64) * self._root
            size = torch.maximum(row_norms(q), row_norms(self._h.matmul(nearest))).clamp(min=1e-300)[:, None]
            scale = self._root / size
            problem = BoxQP(self._h, q / size, part.lo.to(torch.float64) * scale, part.hi.to(torch.float64) * scale)
            point = problem.project(z[rows].to(torch.float64) * scale)
            # |r| <= threshold in the unscaled problem, whose residual is root * size times the scaled one
            goal = 0.5 * threshold[rows]
            weight = self._root * size
            point, used[rows] = self._solve(problem, point, sweeps, goal, weight)
            # set units on a scaled bound to the original bound exactly, without rounding
            answer = torch.where(point <= problem.lo, part.lo, (point / scale).to(z.dtype))
            z[rows] = part.project(torch.where(point >= problem.hi, part.hi, answer))
        return used

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        return recompute(qp, z)

    def keep(self, rows: Tensor) -> None:
        pass

    def _solve(self, qp: BoxQP, z: Tensor, sweeps: int, goal: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        z, used, rows = self._faces(qp, z, min(sweeps, FACE_ITERATIONS), goal, weight)
        left = sweeps - FACE_ITERATIONS
        if rows.numel() > 0 and left > 0:
            part = qp.take(rows)
            centred, spent = centre(part, z[rows], min(left, INTERIOR_ITERATIONS))
            used[rows] += spent
            left -= int(spent.max())
            polished, more, _ = self._faces(part, centred, max(0, min(left, FACE_ITERATIONS)), goal[rows], weight[rows])
            used[rows] += more
            better = _weighted_residual(part, polished, weight[rows]) < _weighted_residual(part, z[rows], weight[rows])
            z[rows] = torch.where(better[:, None], polished, z[rows])
        return z, used

    def _faces(self, qp: BoxQP, z: Tensor, sweeps: int, goal: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Iterate on faces; return the points, the iterations spent, and the rows that have not reached their goal."""
        z = z.clone()
        used = torch.zeros(z.shape[0], dtype=torch.int64, device=z.device)
        rows = torch.nonzero(_weighted_residual(qp, z, weight) > goal).squeeze(1)
        for _ in range(sweeps):
            if rows.numel() == 0:
                break
            part = qp.take(rows)
            z[rows] = self._iterate(part, z[rows])
            used[rows] += 1
            rows = rows[_weighted_residual(part, z[rows], weight[rows]) > goal[rows]]
        return z, used, rows

    def _iterate(self, qp: BoxQP, z: Tensor) -> Tensor:
        z = qp.project(z - self._step * qp.gradient(z))
        g = qp.gradient(z)
        binding = ((z <= qp.lo) & (g >= 0)) | ((z >= qp.hi) & (g <= 0))
        factor = self._h.restricted(~binding).cholesky()
        direction = factor.solve(torch.where(binding, 0.0, -g))
        usable = factor.ok & direction.isfinite().all(-1)
        return _search(qp, z, g, torch.where(usable[:, None], direction, 0.0))


def _weighted_residual(qp: BoxQP, z: Tensor, weight: Tensor) -> Tensor:
    return row_norms(weight * kkt_residual(z, qp.gradient(z), qp.lo, qp.hi))


def _search(qp: BoxQP, z: Tensor, g: Tensor, direction: Tensor) -> Tensor:
    """Backtrack along the projection of z + t direction until the energy decreases enough, sample by sample."""
    best = z.clone()
    rows = torch.arange(z.shape[0], device=z.device)
    t = 1.0
    for _ in range(BACKTRACKS):
        part = qp.take(rows)
        candidate = part.project(z[rows] + t * direction[rows])
        move = candidate - z[rows]
        linear = (g[rows] * move).sum(-1)
        # E(candidate) - E(z), in a form without cancellation
        change = linear + 0.5 * (move * part.hessian.matmul(move)).sum(-1)
        accept = change <= 0.1 * linear
        best[rows[accept]] = candidate[accept]
        rows = rows[~accept]
        if rows.numel() == 0:
            break
        t *= 0.5
    return best
