"""Interface between solvers and the loop in :mod:`lrrn.solvers.loop`, and the registry of solvers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lrrn.qp import BoxQP, kkt_residual, row_norms
from lrrn.runtime.lazy import once_per_owner


class Stepper(Protocol):
    """A solver applied to one batch; it may keep state per sample.

    Attributes
    ----------
    refines : bool
        Whether ``advance`` computes the gradients that it needs, and all digits of a solve, in one call.
    warm_share : float
        Share of the sweeps, and of the digits to gain, that a solve needs if it starts near the solution.
    by_parts : bool
        Whether ``check`` may compute products that are off by some 1e-6 of their size, which is negligible beside the
        tolerance. The loop sets it.
    """

    refines: bool = False
    warm_share: float = 1.0
    by_parts: bool = False

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        """Improve ``z`` in place by at most ``sweeps`` sweeps.

        Parameters
        ----------
        qp : BoxQP
            The problems that have not converged yet.
        z, g : Tensor of shape (n, dim)
            Feasible points, kept feasible, and ``H z - q`` there; ``g`` may be overwritten.
        sweeps : int
            Maximum number of sweeps.
        threshold : float64 Tensor of shape (n,)
            KKT residual at which a sample has converged; a solver that does not check it runs all sweeps.

        Returns
        -------
        int64 Tensor of shape (n,)
            Sweeps spent per sample.
        """
        ...

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        """Recompute the gradient ``H z - q`` from scratch, and the norm of the KKT residual as float64 of shape (n,)."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop the state of all samples but these (indices into the current batch)."""
        ...


class Solver(Protocol):
    """An algorithm for :class:`~lrrn.qp.BoxQP`."""

    @property
    def name(self) -> str:
        """Name of the solver, as users select it."""
        ...

    def chunk(self, qp: BoxQP) -> int:
        """Return the number of sweeps between two residual checks by the loop."""
        ...

    @property
    def patience(self) -> int:
        """Number of successive residual checks without a reduction of one per cent after which a sample counts as stalled."""
        ...

    def obstacle(self, qp: BoxQP) -> str | None:
        """Return why this solver cannot solve the problem (for example, wrong device), or None if it can."""
        ...

    def begin(self, qp: BoxQP) -> Stepper:
        """Prepare for a batch: factor or pack the Hessian, or bound its spectrum."""
        ...


SOLVERS: dict[str, Solver] = {}
"""All solvers by name; the contract tests run on each."""


def register(solver: Solver) -> None:
    """Add a solver under its own name."""
    SOLVERS[solver.name] = solver


def recompute(qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient ``H z - q`` and the norm of the KKT residual: the default implementation of ``check``."""
    g = qp.gradient(z)
    return g, row_norms(kkt_residual(z, g, qp.lo, qp.hi))


def needs_matrix(qp: BoxQP) -> str | None:
    """Return why a solver that reads entries of the Hessian cannot solve the problem, or None if it can."""
    if qp.has_matrix:
        return None
    return "it needs the entries of the Hessian, which a network with large convolutions does not have; use 'accelerated'"


once_per_hessian = once_per_owner
"""Caches the preparation of a solver for the lifetime of the Hessian, which a pass shares with its adjoint."""
