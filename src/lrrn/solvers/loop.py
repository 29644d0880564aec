"""The one loop. It owns stopping, the non-finite check, the sweep count, the status and the hand-over between solvers."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from lrrn.qp import DEFAULT_TOL, BoxQP, QPSolution, Status, kkt_residual, row_norms
from lrrn.solvers.base import SOLVERS, Solver

logger = logging.getLogger("lrrn.solvers")


@torch.no_grad()
def solve(
    qp: BoxQP,
    *,
    solver: str = "auto",
    tol: float | None = None,
    aim: float | None = None,
    max_sweeps: int = 1000,
    start: Tensor | None = None,
) -> QPSolution:
    """Solve a batch of box-constrained QPs.

    Parameters
    ----------
    qp : BoxQP
        The problems.
    solver : str, default="auto"
        A name in ``SOLVERS``, or "auto": coordinate descent on the CPU, accelerated elsewhere, and Newton for the samples on
        which progress is too slow.
    tol : float, optional
        A sample has converged when its KKT residual is at most ``tol * max(1, |q|)``. Default 1e-6 in float64, 1e-4 in float32.
    aim : float, optional
        Go on to this tighter tolerance while it makes progress; falling short of it is no failure. Default ``tol``.
    max_sweeps : int, default=1000
        Sweeps or iterations per sample, over all solvers.
    start : Tensor of shape (n, dim), optional
        Where to start; projected onto the box. Default zero.

    Returns
    -------
    QPSolution
        A feasible point per sample, with its residual and status.
    """
    tol = DEFAULT_TOL[qp.q.dtype] if tol is None else tol
    aim = tol if aim is None else min(aim, tol)
    if not (tol > 0 and math.isfinite(tol)):
        raise ValueError(f"tol must be a positive number; got {tol}")
    if max_sweeps < 1:
        raise ValueError(f"max_sweeps must be at least 1; got {max_sweeps}")
    stages = plan(solver, qp)
    z = qp.project(torch.zeros_like(qp.q) if start is None else start.to(qp.q)).contiguous()
    if qp.dim == 0 or qp.n_samples == 0:
        nothing = torch.zeros(qp.n_samples, dtype=torch.int64, device=qp.q.device)
        return QPSolution(z, nothing.to(torch.float64), nothing, nothing, ())
    return _Run(qp, z, qp.scale, tol, aim, max_sweeps).through(stages)


def plan(solver: str, qp: BoxQP) -> list[Solver]:
    """Return the solvers to try in order, or say why the one asked for cannot run."""
    if solver == "auto":
        names = ["coordinate_descent" if qp.q.device.type == "cpu" else "accelerated", "newton"]
        logger.debug("auto: %s for %d x %d on %s", " then ".join(names), qp.n_samples, qp.dim, qp.q.device)
        return [SOLVERS[name] for name in names]
    if solver not in SOLVERS:
        raise ValueError(f"unknown solver {solver!r}; use 'auto' or one of {', '.join(SOLVERS)}")
    obstacle = SOLVERS[solver].obstacle(qp)
    if obstacle is not None:
        raise ValueError(f"solver {solver!r} cannot run: {obstacle}")
    return [SOLVERS[solver]]


class _Run:
    """The state of one solve: full-size results, and the rows still open."""

    def __init__(self, qp: BoxQP, z: Tensor, scale: Tensor, tol: float, aim: float, max_sweeps: int) -> None:
        self.qp, self.z, self.max_sweeps = qp, z, max_sweeps
        self.must, self.want = tol * scale, aim * scale
        self.gradient = qp.gradient(z)
        self.residual = row_norms(kkt_residual(z, self.gradient, qp.lo, qp.hi))
        self.sweeps = torch.zeros(qp.n_samples, dtype=torch.int64, device=z.device)
        self.stalled = torch.zeros(qp.n_samples, dtype=torch.bool, device=z.device)
        self.spent = 0
        self.used: list[str] = []

    def through(self, stages: list[Solver]) -> QPSolution:
        for stage, following in zip(stages, [*stages[1:], None], strict=True):
            rows = torch.nonzero((self.residual > self.want) & self.residual.isfinite()).squeeze(1)
            if rows.numel() == 0 or self.spent >= self.max_sweeps:
                break
            self.used.append(stage.name)
            left = self._stage(stage, rows, last=following is None)
            if left and following is not None:
                logger.info(
                    "%s makes slow progress on %d of %d samples: over to %s", stage.name, left, len(self.z), following.name
                )
        status = torch.full_like(self.sweeps, int(Status.MAX_SWEEPS))
        status[self.stalled] = int(Status.STALLED)
        status[~self.residual.isfinite()] = int(Status.NON_FINITE)
        status[self.residual <= self.must] = int(Status.CONVERGED)
        return QPSolution(self.z, self.residual, self.sweeps, status, tuple(self.used))

    def _stage(self, solver: Solver, rows: Tensor, last: bool) -> int:
        """Run one solver on ``rows`` until each is done or handed over; return how many are handed over."""
        everything = rows.numel() == self.qp.n_samples
        qp = self.qp if everything else self.qp.take(rows)
        z, g = (self.z, self.gradient) if everything else (self.z[rows], self.gradient[rows])
        best = self.residual[rows]
        idle = torch.zeros_like(rows)
        stepper = solver.begin(qp)
        handed = 0
        while rows.numel() > 0 and self.spent < self.max_sweeps:
            chunk = min(solver.chunk, self.max_sweeps - self.spent)
            self.sweeps[rows] += stepper.advance(qp, z, g, chunk, self.want[rows])
            self.spent += chunk
            g = qp.gradient(z)
            residual = row_norms(kkt_residual(z, g, qp.lo, qp.hi))
            self.residual[rows] = residual
            if z is not self.z:
                self.z[rows] = z
            idle = torch.where(residual < 0.99 * best, 0, idle + 1)
            stalled = idle >= solver.patience
            # good enough already, and the way to the tighter aim is no longer steep: leave it
            content = (residual <= self.must[rows]) & (residual > 0.5 * best)
            open_ = (residual > self.want[rows]) & residual.isfinite() & ~content
            if last:
                self.stalled[rows] = stalled & open_
                go_on = open_ & ~stalled
            else:
                slow = self._sweeps_to_go(residual, best, self.want[rows], chunk) > self._patience()
                go_on = open_ & ~slow
                handed += int((open_ & slow).sum())
                self.gradient[rows] = g
            best = torch.minimum(best, residual)
            if not bool(go_on.all()):
                keep = torch.nonzero(go_on).squeeze(1)
                rows, z, g, qp, best, idle = rows[keep], z[keep], g[keep], qp.take(keep), best[keep], idle[keep]
                stepper.keep(keep)
        return handed

    def _sweeps_to_go(self, residual: Tensor, before: Tensor, want: Tensor, chunk: int) -> Tensor:
        """Extrapolate the linear rate of the last chunk; infinite where there was no progress."""
        rate = torch.log(before / residual)
        return torch.where(rate > 0, chunk * torch.log(residual / want) / rate, math.inf)

    def _patience(self) -> float:
        """Sweeps worth waiting for before Newton, whose factorisation costs about as much as a few sweeps per unit."""
        return min(self.max_sweeps - self.spent, max(64, 2 * self.qp.dim))
