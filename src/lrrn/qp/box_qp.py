"""The problem type of this package: a box-constrained QP whose Hessian is shared by a batch.

    minimise 1/2 z^T H z - q^T z   subject to   lo <= z <= hi

The free phase, the clamped phase, the nudged phase and the adjoint of an LRRN are instances of it (``lrrn.energy``);
``lrrn.solvers`` solves it. ``H`` is shared by the batch, ``q`` is per sample, the bounds may be either.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.linalg.operator_hessian import Hessian
from lrrn.runtime.lazy import lazy

DEFAULT_TOL = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Relative KKT residual below which a sample counts as converged, by the dtype of the solve."""


@final
class Status(enum.IntEnum):
    """How the solve of one sample ended."""

    CONVERGED = 0
    MAX_SWEEPS = 1
    STALLED = 2
    NON_FINITE = 3

    @property
    def message(self) -> str:
        """Description of the status, with advice."""
        return _MESSAGES[self]


_MESSAGES = {
    Status.CONVERGED: "converged: the KKT residual is at most tol * max(1, |q|)",
    Status.MAX_SWEEPS: "stopped at max_sweeps before reaching tol; raise max_sweeps or use solver='newton'",
    Status.STALLED: "no further progress: tol is below what this dtype can resolve here; use float64 or a larger tol",
    Status.NON_FINITE: "the iterates became non-finite; check the scale of the input and of the weights",
}


def kkt_residual(z: Tensor, g: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Return the KKT residual of a feasible point, unit by unit.

    Parameters
    ----------
    z, g : Tensor of shape (n, dim)
        The point and the gradient ``H z - q`` there.
    lo, hi : Tensor of shape (1, dim) or (n, dim)
        The bounds.

    Returns
    -------
    Tensor of shape (n, dim)
        ``g`` inside the interval, ``min(g, 0)`` at its lower end, ``max(g, 0)`` at its upper end, 0 where both ends meet.
    """
    blocked = ((z <= lo) & (g > 0)).logical_or_((z >= hi) & (g < 0))
    return g.masked_fill(blocked, 0)


def row_norms(v: Tensor) -> Tensor:
    """Euclidean norms of the rows, accumulated in float64 so that large float32 values do not overflow."""
    norms = torch.linalg.vector_norm(v, dim=-1, dtype=torch.float64)
    if v.dtype != torch.float64 or (v.device.type == "cpu" and bool(norms.isfinite().all())):
        return norms
    # squares of float64 overflow from 1e154 on, and |q| = inf would let any residual pass
    return torch.where(norms.isfinite(), norms, torch.linalg.vector_norm(v * 1e-160, dim=-1) * 1e160)


@final
@dataclass(frozen=True, eq=False)
class BoxQP:
    """A batch of box-constrained QPs with one Hessian.

    Parameters
    ----------
    hessian : BlockTridiagonal or OperatorHessian
        H, symmetric positive definite, of size ``dim``; by its blocks, or by products alone.
    q : Tensor of shape (n, dim)
        Linear terms.
    lo, hi : Tensor of shape (1, dim) or (n, dim)
        Bounds, shared or per sample.
    linear : bool, default=False
        Set to True if every unit is either fixed at zero or free. The problem is then a system of linear equations.
    holds_zero : bool, default=False
        Set to True if zero is within all bounds, as it is in linear equations. The gradient there is -q, without a product.
    expected : Tensor of shape (dim,), optional
        Share of the samples in which each unit is expected strictly inside its bounds. A solver may save time by it.
    """

    hessian: Hessian
    q: Tensor
    lo: Tensor
    hi: Tensor
    linear: bool = False
    holds_zero: bool = False
    expected: Tensor | None = None

    def __post_init__(self) -> None:
        # kernels expect both bounds to be shared, or both to be per sample
        if self.lo.shape[0] != self.hi.shape[0]:
            for name in ("lo", "hi"):
                object.__setattr__(self, name, getattr(self, name).expand(self.n_samples, -1).contiguous())

    @property
    def n_samples(self) -> int:
        """Number of problems in the batch."""
        return self.q.shape[0]

    @property
    def dim(self) -> int:
        """Number of unknowns of each problem."""
        return self.q.shape[1]

    @property
    def has_matrix(self) -> bool:
        """Whether the Hessian is given by its blocks, not only by products."""
        return isinstance(self.hessian, BlockTridiagonal)

    @property
    def matrix(self) -> BlockTridiagonal:
        """The Hessian by its blocks, if :attr:`has_matrix`."""
        assert isinstance(self.hessian, BlockTridiagonal)
        return self.hessian

    @lazy
    def scale(self) -> Tensor:
        """max(1, |q|) per sample, to which ``tol`` is relative. Finite even if |q| overflows."""
        return row_norms(self.q).clamp_(min=1.0, max=1e300)

    def project(self, z: Tensor) -> Tensor:
        """Return the feasible point nearest to ``z``."""
        return torch.minimum(torch.maximum(z, self.lo), self.hi)

    def gradient(self, z: Tensor) -> Tensor:
        """Return ``H z - q``."""
        return self.hessian.matmul(z).sub_(self.q)

    def residual(self, z: Tensor) -> Tensor:
        """Euclidean norm of the KKT residual at a feasible ``z``, of shape (n,)."""
        return row_norms(kkt_residual(z, self.gradient(z), self.lo, self.hi))

    def take(self, rows: Tensor) -> BoxQP:
        """Return the sub-batch of the given row indices."""

        def pick(bound: Tensor) -> Tensor:
            return bound if bound.shape[0] == 1 else bound[rows]

        return BoxQP(self.hessian, self.q[rows], pick(self.lo), pick(self.hi), self.linear, self.holds_zero, self.expected)

    def distance_bound(self, z: Tensor, mu: float, rounding: RoundingCoefficients, x: Tensor) -> Tensor:
        """Return a proven bound on the distance from ``z`` to the minimiser, rounding included.

        Parameters
        ----------
        z : Tensor of shape (n, dim)
            Any point, in any float type. Entries equal to a bound rounded to that dtype are treated as on the bound.
        mu : float
            A proven lower bound on the smallest eigenvalue of H.
        rounding : RoundingCoefficients
            Bound on the rounding error of the computed residual.
        x : Tensor of shape (n,)
            Norms of the data that ``q`` was computed from.

        Returns
        -------
        Tensor of shape (n,)
            ``|z - z'| + (|r(z')| + rounding) / mu`` with ``z'`` the feasible point that ``z`` represents; ``inf`` if
            ``mu`` is not positive. This QP must be in float64.
        """
        if self.q.dtype != torch.float64:
            raise TypeError(f"error bounds are computed on a float64 problem; this one is {self.q.dtype}")
        if self.dim == 0:
            return self.q.new_zeros(self.n_samples)
        if not mu > 0:
            return self.q.new_full((self.n_samples,), torch.inf)
        given = z.to(torch.float64)
        feasible = torch.where(z == self.lo.to(z.dtype), self.lo, given)
        feasible = self.project(torch.where(z == self.hi.to(z.dtype), self.hi, feasible))
        slack = rounding.total(row_norms(feasible), row_norms(self.q), x)
        bound = row_norms(feasible - given) + (self.residual(feasible) + slack) / mu
        return torch.nan_to_num(bound * (1 + 1e-10), nan=torch.inf, posinf=torch.inf)


@final
class RoundingCoefficients(NamedTuple):
    """A bound on the rounding of a residual computed in float64: coefficients of |z|, |q| and |x|, and a constant."""

    z: float
    q: float
    x: float
    constant: float

    def total(self, z: Tensor, q: Tensor, x: Tensor) -> Tensor:
        """Return the bound for given norms."""
        return self.z * z + self.q * q + self.x * x + self.constant


@final
@dataclass(frozen=True, eq=False)
class QPSolution:
    """Result of a solver for a :class:`BoxQP`: a feasible point per sample, its residual and its status.

    Parameters
    ----------
    z : Tensor of shape (n, dim)
        Feasible points.
    gradient : Tensor of shape (n, dim)
        ``H z - q`` there.
    residual : Tensor of shape (n,)
        Euclidean norm of the KKT residual, recomputed from ``z`` in the dtype of the solve.
    n_sweeps : int64 Tensor of shape (n,)
        Sweeps or iterations spent.
    status : int64 Tensor of shape (n,)
        :class:`Status` codes.
    solvers : tuple of str
        Names of the solvers used, in order.
    certain : bool
        Whether all samples are known to have converged, so that ``status`` need not be read.
    """

    z: Tensor
    gradient: Tensor
    residual: Tensor
    n_sweeps: Tensor
    status: Tensor
    solvers: tuple[str, ...]
    certain: bool = False

    @property
    def converged(self) -> Tensor:
        """Whether each sample converged, of shape (n,)."""
        return self.status == int(Status.CONVERGED)

    def value(self, qp: BoxQP) -> Tensor:
        """1/2 z^T H z - q^T z per sample, of shape (n,), for the problem that was solved."""
        return 0.5 * (self.z * (self.gradient - qp.q)).sum(-1)

    def doubted(self, limit: Tensor) -> QPSolution:
        """Return a copy whose status is STALLED instead of CONVERGED where the residual exceeds ``limit``."""
        sure = self.residual <= limit
        if bool(sure.all()):
            return self
        status = torch.where(self.converged & ~sure, int(Status.STALLED), self.status)
        return QPSolution(self.z, self.gradient, self.residual, self.n_sweeps, status, self.solvers)

    def replaced(self, rows: Tensor, residual: Tensor, limit: Tensor) -> QPSolution:
        """Return a copy with more accurate residuals for some rows, and the status they imply."""
        residuals, status = self.residual.clone(), self.status.clone()
        residuals[rows] = residual
        status[rows] = torch.where(residual <= limit, int(Status.CONVERGED), status[rows])
        status[rows] = torch.where(residual.isfinite(), status[rows], int(Status.NON_FINITE))
        return QPSolution(self.z, self.gradient, residuals, self.n_sweeps, status, self.solvers)

    def flagged_unless(self, finite: Tensor) -> QPSolution:
        """Return a copy with the status NON_FINITE where ``finite``, of shape (n,), is False."""
        if bool(finite.all()):
            return self
        status = torch.where(finite, self.status, int(Status.NON_FINITE))
        return QPSolution(self.z, self.gradient, self.residual, self.n_sweeps, status, self.solvers)

    def take(self, rows: Tensor) -> QPSolution:
        """Return the solutions of the given row indices."""
        return QPSolution(
            self.z[rows], self.gradient[rows], self.residual[rows], self.n_sweeps[rows], self.status[rows], self.solvers
        )
