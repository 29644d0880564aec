"""The solver loop: stopping criterion, non-finite check, sweep count, status, and switching between solvers."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from lrrn.qp import DEFAULT_TOL, BoxQP, QPSolution, Status
from lrrn.runtime.devices import has_kernels
from lrrn.solvers.base import SOLVERS, Solver, Stepper
from lrrn.solvers.dual import fits_dual
from lrrn.solvers.half_precision import IN_ROWS, LONGEST, statuses

logger = logging.getLogger("lrrn.solvers")

DIGITS = 2.5
"""Decimal digits that a round of half-precision sweeps is assumed to gain in a well-conditioned problem."""
COARSE = 5e-5
"""Smallest aim of a solve whose residuals may be off by some 1e-6."""
WIDE = 1024
"""Smallest number of units for which linear equations are solved by conjugate gradients on the CPU."""


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
        A name in ``SOLVERS``, or "auto": coordinate descent on the CPU, accelerated elsewhere, for the equations of wide layers
        and for large batches of one wide layer, and Newton for the samples on which progress is too slow. A Hessian without a
        matrix has accelerated only.
    tol : float, optional
        A sample has converged when its KKT residual is at most ``tol * max(1, |q|)``. Default 1e-6 in float64, 1e-4 in float32.
    aim : float, optional
        Tighter tolerance, to which the solve continues while it makes progress. Missing it is not a failure. Default ``tol``.
    max_sweeps : int, default=1000
        Maximum number of sweeps or iterations per sample, over all solvers.
    start : Tensor of shape (n, dim), optional
        Warm start, projected onto the box. Default zero.

    Returns
    -------
    QPSolution
        A feasible point per sample, with its residual and status.
    """
    tol = DEFAULT_TOL[qp.q.dtype] if tol is None else tol
    if not (tol > 0 and math.isfinite(tol)):
        raise ValueError(f"tol must be a positive number; got {tol}")
    if max_sweeps < 1:
        raise ValueError(f"max_sweeps must be at least 1; got {max_sweeps}")
    stages = plan(solver, qp)
    z = _cold_start(qp) if start is None else qp.project(start.to(qp.q)).contiguous()
    if qp.dim == 0 or qp.n_samples == 0:
        nothing = torch.zeros(qp.n_samples, dtype=torch.int64, device=qp.q.device)
        return QPSolution(z, -qp.q, nothing.to(torch.float64), nothing, nothing, ())
    run = _Run(qp, z, stages[0].begin(qp), tol, tol if aim is None else min(aim, tol), max_sweeps)
    for index, stage in enumerate(stages):
        following = stages[index + 1] if index + 1 < len(stages) else None
        if not run.through(stage, following):
            break
    return run.result()


@torch.no_grad()
def solve_fixed(qp: BoxQP, sweeps: int, *, tol: float, aim: float, start: Tensor | None = None) -> QPSolution:
    """Solve by a fixed number of accelerated sweeps without synchronising with the device, as a CUDA graph requires.

    Arguments are as in :func:`solve`; samples that miss ``tol`` are flagged in the status. The target ``aim`` determines
    the number of rounds: sweeps in half precision gain at most three digits before the residual must be recomputed. With
    convolutions, fewer sweeps and digits follow a warm start.
    """
    z = _cold_start(qp) if start is None else qp.project(start.to(qp.q)).contiguous()
    stepper = SOLVERS["accelerated"].begin(qp)
    stepper.by_parts = aim >= COARSE
    share = 1.0 if start is None else stepper.warm_share
    sweeps = math.ceil(sweeps * share)
    must = tol * qp.scale
    if stepper.refines:
        spent = stepper.advance(qp, z, z, sweeps, must)
        gradient, residual = stepper.check(qp, z)
        return _fixed(z, gradient, residual, spent, must)
    gradient = -qp.q if start is None and qp.holds_zero else stepper.check(qp, z)[0]
    rounds = max(math.ceil(-math.log10(aim) * share / DIGITS), -(-sweeps // LONGEST), 1)
    used = list[Tensor]()
    for k in range(rounds):
        used.append(stepper.advance(qp, z, gradient, max(1, (sweeps * (k + 1)) // rounds - (sweeps * k) // rounds), must))
        gradient, residual = stepper.check(qp, z)
    return _fixed(z, gradient, residual, sum(used[1:], start=used[0]), must)


def _fixed(z: Tensor, gradient: Tensor, residual: Tensor, spent: Tensor, must: Tensor) -> QPSolution:
    if 0 < z.shape[1] <= IN_ROWS and has_kernels(z):
        return QPSolution(z, gradient, residual, spent, statuses(gradient, residual, must), ("accelerated",))
    status = (~(residual <= must)).to(torch.int64)  # CONVERGED is 0, MAX_SWEEPS is 1
    status.masked_fill_(~(residual.isfinite() & _finite(gradient)), int(Status.NON_FINITE))
    return QPSolution(z, gradient, residual, spent, status, ("accelerated",))


def plan(solver: str, qp: BoxQP) -> list[Solver]:
    """Return the solvers to use, in order; raise an error if the requested solver cannot run."""
    if solver == "auto" and not qp.has_matrix:
        return [SOLVERS["accelerated"]]
    if solver == "auto":
        sweeps_units = qp.q.device.type == "cpu" and not (qp.linear and qp.dim >= WIDE) and not fits_dual(qp)
        names = ["coordinate_descent" if sweeps_units else "accelerated", "newton"]
        logger.debug("auto: %s for %d x %d on %s", " then ".join(names), qp.n_samples, qp.dim, qp.q.device)
        return [SOLVERS[name] for name in names]
    if solver not in SOLVERS:
        raise ValueError(f"unknown solver {solver!r}; use 'auto' or one of {', '.join(SOLVERS)}")
    obstacle = SOLVERS[solver].obstacle(qp)
    if obstacle is not None:
        raise ValueError(f"solver {solver!r} cannot run: {obstacle}")
    return [SOLVERS[solver]]


def _finite(gradient: Tensor) -> Tensor:
    """Whether every entry of a row is finite. The KKT residual can hide an overflow in a unit at a bound."""
    return (gradient * 0).sum(-1) == 0  # nan if any is nan or infinite, at a fraction of isfinite's cost


def _cold_start(qp: BoxQP) -> Tensor:
    """Return zero, projected onto the box."""
    if qp.holds_zero:
        return torch.zeros_like(qp.q, memory_format=torch.contiguous_format)
    z = torch.zeros_like(qp.lo, memory_format=torch.contiguous_format).clamp_(qp.lo, qp.hi)
    return z if z.shape[0] == qp.n_samples else z.repeat(qp.n_samples, 1)


class _Run:
    """The state of one solve: full-size results, and the rows that have not converged yet."""

    def __init__(self, qp: BoxQP, z: Tensor, stepper: Stepper, tol: float, aim: float, max_sweeps: int) -> None:
        scale = qp.scale
        self.qp, self.z, self.max_sweeps = qp, z, max_sweeps
        self.must = tol * scale
        self.want = self.must if aim == tol else aim * scale
        self.by_parts = stepper.by_parts = aim >= COARSE
        self.first_stepper: Stepper | None = stepper
        self.gradient, self.residual = stepper.check(qp, z)
        self.sweeps: Tensor | None = None
        self.stalled: Tensor | None = None
        self.spent = 0
        self.used: list[str] = []

    def result(self) -> QPSolution:
        sweeps = torch.zeros_like(self.residual, dtype=torch.int64) if self.sweeps is None else self.sweeps
        finite = _finite(self.gradient)
        missed = ~(self.residual <= self.must) | ~finite
        status = missed.to(torch.int64)  # CONVERGED is 0, MAX_SWEEPS is 1
        if bool(missed.any()):
            if self.stalled is not None:
                status.masked_fill_(missed & self.stalled, int(Status.STALLED))
            status.masked_fill_(~(finite & self.residual.isfinite()), int(Status.NON_FINITE))
        return QPSolution(self.z, self.gradient, self.residual, sweeps, status, tuple(self.used))

    def through(self, solver: Solver, following: Solver | None) -> bool:
        """Run one solver until every sample has converged, stalled or been handed over; return whether any was handed over."""
        unfinished = (self.residual > self.want) & (self.residual < math.inf)
        count = int(unfinished.count_nonzero())
        if self.spent >= self.max_sweeps or count == 0:
            return False
        self.used.append(solver.name)
        qp, z, g, best = self.qp, self.z, self.gradient, self.residual
        rows = None if count == len(z) else unfinished.nonzero().squeeze(1)
        if rows is not None:
            qp, z, g, best = qp.take(rows), z[rows], g[rows], best[rows]
        stepper = solver.begin(qp) if self.first_stepper is None else self.first_stepper
        stepper.by_parts = self.by_parts
        if self.first_stepper is not None and rows is not None:
            stepper.keep(rows)
        self.first_stepper = None
        idle: Tensor | int = 0
        handed = 0
        budget = self._budget(solver, following)
        while self.spent < budget:
            chunk = min(solver.chunk(self.qp), budget - self.spent)
            want = self.want if rows is None else self.want[rows]
            used = stepper.advance(qp, z, g, chunk, want)
            self.spent += chunk
            g, residual = stepper.check(qp, z)
            self._record(rows, z, g, residual, used)
            open_ = (residual > want) & (residual < math.inf)
            if not bool(open_.any()):
                break
            must = self.must if rows is None else self.must[rows]
            # stop samples that are within the required tolerance and make little progress towards the tighter one
            open_ &= (residual > must) | (residual <= 0.5 * best)
            idle = torch.where(residual < 0.99 * best, 0, idle + 1)
            if following is None:
                stuck = open_ & (idle >= solver.patience)
                self._note_stalled(rows, stuck)
            elif self.spent >= budget:
                stuck = open_
            elif self._newton_is_expensive(budget):
                stuck = open_ & (idle >= solver.patience)
            else:
                stuck = open_ & (self._sweeps_to_go(residual, best, want, chunk) >= self._patience(budget))
            handed += 0 if following is None else int(stuck.sum())
            keep = (open_ & ~stuck).nonzero().squeeze(1)
            if keep.numel() == 0:
                break
            best = torch.minimum(best, residual)
            if keep.numel() < len(residual):
                rows = keep if rows is None else rows[keep]
                qp, z, g, best = qp.take(keep), z[keep], g[keep], best[keep]
                idle = idle[keep] if isinstance(idle, Tensor) else idle
                stepper.keep(keep)
        if handed and following is not None:
            logger.info("%s is slow on %d of %d samples: over to %s", solver.name, handed, len(self.z), following.name)
        return handed > 0

    def _note_stalled(self, rows: Tensor | None, stuck: Tensor) -> None:
        if self.stalled is None:
            self.stalled = torch.zeros_like(self.residual, dtype=torch.bool)
        self.stalled[slice(None) if rows is None else rows] = stuck

    def _record(self, rows: Tensor | None, z: Tensor, g: Tensor, residual: Tensor, used: Tensor) -> None:
        if rows is None:
            self.z, self.gradient, self.residual = z, g, residual
            self.sweeps = used if self.sweeps is None else self.sweeps + used
        else:
            if self.sweeps is None:
                self.sweeps = torch.zeros_like(self.residual, dtype=torch.int64)
            self.z[rows], self.gradient[rows], self.residual[rows] = z, g, residual
            self.sweeps[rows] += used

    def _sweeps_to_go(self, residual: Tensor, before: Tensor, want: Tensor, chunk: int) -> Tensor:
        """Extrapolate the linear rate of the last chunk; infinite where there was no progress."""
        rate = torch.log(before / residual)
        return torch.where(rate > 0, chunk * torch.log(residual / want) / rate, math.inf)

    def _budget(self, solver: Solver, following: Solver | None) -> int:
        """Return the maximum number of sweeps of a solver; one chunk is reserved for the next solver."""
        if following is None:
            return self.max_sweeps
        return max(self.max_sweeps - following.chunk(self.qp), min(solver.chunk(self.qp), self.max_sweeps))

    def _newton_is_expensive(self, budget: int) -> bool:
        """Whether a Newton step costs more than all sweeps. Only stalled samples are then handed over before the budget ends.

        The rate of one chunk underestimates methods with momentum, so it is not extrapolated in this case.
        """
        return 2 * self.qp.dim > budget

    def _patience(self, budget: int) -> float:
        """Return the predicted number of sweeps from which Newton is preferred; a factorisation costs a few sweeps per unit."""
        return min(budget - self.spent, max(64, 2 * self.qp.dim))
