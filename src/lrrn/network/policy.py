"""Solver settings, as one immutable record, and the tolerances they imply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from lrrn.kernels.constants import ACCEPTED
from lrrn.network.solution import warn_if_not_converged
from lrrn.qp import DEFAULT_TOL, BoxQP, QPSolution
from lrrn.solvers import solve, solve_fixed
from lrrn.solvers.dual import fits_dual

Observer = Callable[[QPSolution, Tensor, float, str], None]
"""Called after every solve with the solution, the scale of each residual, the tolerance and the name of the phase."""
FORWARD, ADJOINT = "forward pass", "adjoint"
"""Names of the phases that the differentiable passes solve."""
AIM = {torch.float64: 1e-13, torch.float32: 1e-5}
"""Target relative residual of the differentiable passes while they make progress, if ``tol`` is not set."""
SLACK, DIRECTION = 30.0, 0.03
"""Factor on the tolerances of solves of which only a direction is used, and the largest tolerance of these."""


@final
@dataclass(frozen=True)
class Tolerances:
    """Two relative residuals: one that every sample must reach, and a tighter target."""

    must: float
    aim: float

    @property
    def limit(self) -> float:
        """The relative residual that compiled passes accept."""
        return min(self.must, ACCEPTED * self.aim)


@final
@dataclass(frozen=True)
class SolvePolicy:
    """Solver settings, and a callback for the results.

    Attributes
    ----------
    solver : str
        "auto" or a name in ``lrrn.solvers.SOLVERS``.
    tol : float, optional
        A sample has converged when its KKT residual is at most ``tol * max(1, |q|)``. The default depends on the dtype.
    aim : float, optional
        Tighter tolerance, to which solves continue while they make progress. By default ``tol`` if that is given, and
        otherwise as tight as the dtype allows at little cost.
    max_sweeps : int
        Maximum number of sweeps or iterations per sample.
    fixed_sweeps : int, optional
        If set, solves take exactly this number of accelerated sweeps and never synchronise with the device, as CUDA graphs
        require.
    observer : callable
        Called after every solve; by default it warns of samples that did not converge.
    of_direction : bool
        Whether only the direction of derivatives counts, as in an attack. Solves may then stop earlier.
    """

    solver: str = "auto"
    tol: float | None = None
    aim: float | None = None
    max_sweeps: int = 1000
    fixed_sweeps: int | None = None
    observer: Observer = warn_if_not_converged
    of_direction: bool = False

    def tolerances(self, dtype: torch.dtype) -> Tolerances:
        """Return the tolerance that every sample must reach and the tighter target for a dtype."""
        tol = DEFAULT_TOL[dtype] if self.tol is None else self.tol
        aim = self.aim if self.aim is not None else AIM[dtype] if self.tol is None else self.tol
        return Tolerances(tol, min(aim, tol))

    def for_direction(self) -> SolvePolicy:
        """Return a policy for derivatives of which only the direction counts: their solves may be less exact."""
        return self if self.fixed_sweeps is not None else replace(self, of_direction=True)

    def direction_tolerances(self, dtype: torch.dtype) -> Tolerances:
        """Return the tolerances of solves of which only a direction is used."""
        goal = self.tolerances(dtype)
        return Tolerances(*(max(given, min(SLACK * given, DIRECTION)) for given in (goal.must, goal.aim)))

    def solve(self, qp: BoxQP, phase: str, start: Tensor | None = None) -> QPSolution:
        """Solve a phase (free, clamped, nudged or adjoint), with an optional warm start, and notify the observer."""
        # points of the dual are near the solution long before their residual is small, those of other solvers are not
        looser = self.of_direction and (phase == ADJOINT or (self.solver in ("auto", "accelerated") and fits_dual(qp)))
        goal = (self.direction_tolerances if looser else self.tolerances)(qp.q.dtype)
        if self.fixed_sweeps is not None:
            solved = solve_fixed(qp, self.fixed_sweeps, tol=goal.must, aim=goal.aim, start=start)
        else:
            solved = solve(qp, solver=self.solver, tol=goal.must, aim=goal.aim, max_sweeps=self.max_sweeps, start=start)
        self.observer(solved, qp.scale, goal.must, phase)
        return solved
