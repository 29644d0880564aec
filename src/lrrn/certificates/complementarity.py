"""KKT conditions at a perturbed input, relative to a sample, and Lagrange multipliers that give lower bounds from them.

Let z be the activations computed at x and z' the exact ones at x + u. With v = z' - z and w = H v - B u, the optimality
conditions at x + u read, for every unit, in terms of what is known at x (its distance a from the lower bound and its slack g):

    v + a >= 0,    w + g >= 0,    (v + a) (w + g) = 0,

and likewise at an upper bound. See docs/theory/local-radii.md for the derivation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import final

import torch
from torch import Tensor

from lrrn.bounds.multiplier import MultiplierProblem
from lrrn.energy import LiftedEnergy
from lrrn.energy.lifted import matrix_hessian
from lrrn.linalg import verified
from lrrn.qp import row_norms
from lrrn.runtime.lazy import lazy, once_per_owner
from lrrn.runtime.threads import one_thread

REACH, COST = 8.0, 1e-3
"""The search for a radius goes up to ``REACH`` times a proven radius. It goes further as long as the errors of later solves,
which grow with the radius, are at most the fraction ``COST`` of the lead."""
FARTHEST = 200.0
"""Limit of the search, as a multiple of the global radius. It ends the search where no perturbation changes the label."""

EVALUATIONS = 40
"""Evaluations in the search for the network's multipliers. With more of them, radii grow by less than a percent."""

NEARLY = 1 - 1e-12
"""A radius of at least this fraction of the limit of the search counts as having reached the limit."""


@final
@dataclass(frozen=True, eq=False)
class Sample:
    """One sample, or a batch, in the variables of the local problem. Fixed units are removed; lower bounds are finite."""

    low: Tensor  # (..., m): distances of the computed activations from their lower bounds
    high: Tensor  # and from their upper bounds; may be infinite
    slack: Tensor  # (..., m): H z - q as computed
    low_error: Tensor  # (...): bound on the norm of the error of low and high
    slack_error: Tensor  # (...): bound on the norm of the error of slack
    drift: Tensor  # (...): bound on the distance of the eliminated units from the solution of their equations

    @lazy
    def room(self) -> Tensor:
        """Distances from the upper bounds; 0 for units without one."""
        return self.high.masked_fill(self.high.isinf(), 0.0)

    def take(self, rows: Tensor) -> Sample:
        """Return the given rows of a batch."""
        return Sample(*(getattr(self, field.name)[rows] for field in fields(self)))


@final
@dataclass(frozen=True, eq=False)
class Faces:
    """Conditions on units with a lower bound only that are assumed to hold as equations, in a batch."""

    inactive: Tensor  # bool (n, m): v + low = 0
    active: Tensor  # bool (n, m): w + slack = 0


@final
@dataclass(frozen=True, eq=False)
class Terms:
    """Lagrange multipliers of the conditions of one sample or a batch; zero where a unit has no such condition.

    They are not negative, except those of equations.
    """

    sigma: Tensor  # (...): multiplier of the remaining lead
    low: Tensor  # (..., m), as are the following: of the products (v + low) (w + slack)
    high: Tensor  # of the products (v - high) (w + slack)
    floor: Tensor  # of v + low, which is at least zero
    ceiling: Tensor  # of high - v, likewise
    sign: Tensor  # of w + slack, likewise

    @lazy
    def lam(self) -> Tensor:
        """Multipliers of v w."""
        return self.low + self.high

    def slopes(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the coefficients of v and of w in the Lagrangian."""
        of_v = self.lam * sample.slack - self.floor + self.ceiling
        return of_v, self.low * sample.low - self.high * sample.room - self.sign

    def constant(self, sample: Sample, lead: Tensor) -> Tensor:
        """Return the constant term of the Lagrangian: its value at v = 0 and u = 0."""
        ends = self.floor * sample.low + self.ceiling * sample.room
        return self.sigma * lead - ends.sum(-1) + (self.slopes(sample)[1] * sample.slack).sum(-1)

    def error(self, problem: LocalProblem, sample: Sample, c: Tensor, d: Tensor, lead: Tensor) -> Tensor:
        """Bound the norm of the error of the Lagrangian, as a quadratic form of (v, u, 1), due to data errors and rounding."""
        norm = partial(torch.linalg.vector_norm, dim=-1)
        rounding = 8 * (len(problem.h) + 8) * verified.EPS
        return self.error_of(problem.errors, (problem.h.norm(), problem.root.norm()), rounding, sample, norm(c), norm(d), lead)

    def pull(self, sample: Sample) -> Tensor:
        """Return the norm of the coefficients of w, without cancellation."""
        return torch.linalg.vector_norm(self.low * sample.low.abs() + self.high * sample.room.abs() + self.sign.abs(), dim=-1)

    def error_of(
        self,
        errors: tuple[float, float, float, float],
        sizes: tuple[float | Tensor, float | Tensor],
        rounding: float,
        sample: Sample,
        c: Tensor,
        d: Tensor,
        lead: Tensor,
    ) -> Tensor:
        """Bound the same from bounds on the errors of H, B, c and d, the sizes of H and B, and the norms of c and d.

        ``rounding`` is the relative rounding error of everything that is computed from them.
        """
        eh, er, ec, ed = errors
        norm = partial(torch.linalg.vector_norm, dim=-1)
        largest = self.lam.amax(-1) if self.lam.shape[-1] else torch.zeros_like(self.sigma)
        # norms of the coefficients of w and of v, without cancellation, and of their changes by the errors of a and g
        pull = self.pull(sample)
        push = norm(self.lam * sample.slack.abs() + self.floor.abs() + self.ceiling)
        linear = norm(self.floor) + norm(self.ceiling)
        (nh, nr), tension = sizes, norm(sample.slack)
        shifted = largest * sample.low_error
        # coefficients of v w and v u; then of v 1 and u 1; then of 1 1
        error = largest * (eh + er)
        error = error + self.sigma * (ec + ed) + (eh + er) * pull + (nh + nr) * shifted + largest * sample.slack_error
        error = error + pull * sample.slack_error + linear * sample.low_error + shifted * (tension + sample.slack_error)
        extent = norm(sample.low) + norm(sample.room)
        size = largest * (nh + nr) + self.sigma * (c + d) + push + (nh + nr) * pull
        size = size + self.sigma * lead.abs() + linear * extent + pull * tension
        return error + rounding * size


@final
class LocalProblem:
    """The data common to all samples: the programme with free and fixed units eliminated, and multipliers to begin with.

    The energy must be in float64 and have at least one unknown layer.
    """

    def __init__(self, energy: LiftedEnergy) -> None:
        self.device = energy.weights[0].device
        energy = energy.unfolded.to(torch.float64, "cpu")
        problem = MultiplierProblem(energy)
        self.threads = problem.threads
        hessian = matrix_hessian(energy)
        self.mu = energy.free_mu
        n = hessian.dim
        self.h_error = energy.rounding.inner * float(hessian.diagonal.sum())
        self.h_norm = verified.largest_eigenvalue(hessian, self.h_error)
        lo, hi = (bound[0, :n] for bound in energy.box)
        # negate units that have only an upper bound
        self.sign = torch.where(lo.isinf() & hi.isfinite(), -1.0, 1.0).to(torch.float64)
        self.lo, self.hi = torch.where(self.sign < 0, -hi, lo), torch.where(self.sign < 0, -lo, hi)
        free = self.lo.isinf()
        self.free = free.nonzero().squeeze(1)
        self.open = (~free & (self.lo < self.hi)).nonzero().squeeze(1)
        h = hessian.dense() * self.sign * self.sign[:, None]
        first, self.root_error = problem.proven_root()
        root = h.new_zeros((n, first.shape[1]))
        root[: len(first)] = first
        root *= self.sign[:, None]
        rows = h.new_zeros((len(problem.read_out), n))
        rows[:, -problem.read_out.shape[1] :] = problem.read_out
        self.read_out = rows = rows * self.sign
        self._eliminate(h, root, rows)
        self.two_sided = self.hi[self.open].isfinite()
        # move everything from the CPU to the network's device
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(self.device))
        self._multipliers = problem

    @lazy
    def _searched(self) -> Tensor:
        with one_thread():
            return self._multipliers.searched(1.0, EVALUATIONS)

    @lazy
    def lam(self) -> Tensor:
        """Multipliers of the products of single units, for the network's Lipschitz constant; found by a search."""
        return self._searched[self.open.cpu()].to(self.device)

    @lazy
    def scales(self) -> _PairScales:
        """Scalings of these multipliers for pairs of outputs."""
        return _PairScales(self._multipliers, self._searched)

    def _eliminate(self, h: Tensor, root: Tensor, rows: Tensor) -> None:
        """Eliminate the free units, whose conditions are equations; set h, root, c, d and bounds on their errors."""
        u, f = self.open, self.free
        coupling, eps = h[u][:, f], 8 * (len(h) + 8) * verified.EPS
        right = torch.cat([coupling.mT, root[f]], 1)
        solved, error = right, 0.0
        if len(f):
            inner = h[f][:, f]
            factor, info = torch.linalg.cholesky_ex(inner)
            solved = torch.cholesky_solve(right, factor) if int(info) == 0 else torch.full_like(right, math.nan)
            # a posteriori: |X - X*| <= |H_ff X - rhs| / mu, and H_ff has no eigenvalue below that of H
            size = float(solved.norm())
            left = float((inner @ solved - right).norm()) + eps * (float(inner.norm()) * size + float(right.norm()))
            error = (left + self.h_error * (1 + size) + self.root_error) / self.mu if self.mu > 0 else math.inf
        x_open, x_root = solved[:, : len(u)], solved[:, len(u) :]
        reduced = h[u][:, u] - coupling @ x_open
        self.h, self.root = (reduced + reduced.mT) / 2, root[u] - coupling @ x_root
        self.gram = self.root @ self.root.mT
        self.c, self.d = rows[:, u] - rows[:, f] @ x_open, rows[:, f] @ x_root
        size, length, by_open, by_root = (float(t.norm()) for t in (coupling, rows, x_open, x_root))
        self.errors = (
            self.h_error * (2 + by_open) + size * error + eps * (float(self.h.norm()) + size * by_open),
            self.root_error + self.h_error * by_root + size * error + eps * (float(self.root.norm()) + size * by_root),
            2 * length * (error + eps * (1 + by_open)),
            2 * length * (error + eps * by_root),
        )

    def sample(self, z: Tensor, g: Tensor, g_error: Tensor) -> Sample:
        """Build a sample or a batch from computed z and g = H z - q; ``g_error`` bounds the norm of the error of g."""
        z, g = z.to(self.device) * self.sign, g.to(self.device) * self.sign
        u = self.open
        low, high = z[..., u] - self.lo[u], self.hi[u] - z[..., u]
        # exact free units have zero slack; a nonzero slack displaces them, which changes the slack of the other units
        g_error = g_error.to(self.device)
        drift = (row_norms(g[..., self.free]) + g_error) / self.mu * (1 + 1e-9) if len(self.free) else torch.zeros_like(g_error)
        low_error = verified.EPS * (row_norms(low) + row_norms(high.masked_fill(high.isinf(), 0.0))) * 2
        return Sample(low, high, g[..., u], low_error, g_error + self.h_norm * drift, drift)


@final
class _PairScales:
    """Scalings of the network's multipliers for pairs of outputs, and the resulting Lipschitz constants (not proven)."""

    def __init__(self, problem: MultiplierProblem, lam: Tensor) -> None:
        self._problem, self._lam = problem, lam
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, label: int) -> tuple[Tensor, Tensor]:
        """Return the scales and constants of ``label`` paired with every output."""
        if label not in self._known:
            rows = self._problem.read_out
            others = torch.arange(len(rows)) != label
            scales = torch.ones(len(rows), dtype=torch.float64)
            constants = torch.zeros(len(rows), dtype=torch.float64)
            scales[others], constants[others] = self._problem.scales(self._lam, rows[label] - rows[others])
            self._known[label] = scales, constants
        return self._known[label]


def sought(radius: Tensor, lead: Tensor, extra: Tensor, ceiling: Tensor) -> tuple[Tensor, Tensor]:
    """Return the limit of the search for a radius, and the lead minus the errors of later solves.

    ``radius`` is proven. Those errors grow with it, by ``extra`` per unit, so their value at the limit bounds them. The search
    goes no further than ``ceiling``: a larger radius is of no use.
    """
    free = extra == 0
    most = torch.maximum(REACH * radius, COST * lead / extra).masked_fill(free, math.inf).minimum(ceiling)
    return most, torch.where(free, lead, lead - extra * most)


@once_per_owner
def local_problem(energy: LiftedEnergy) -> LocalProblem:
    """Return the local problem of a network; cached for the lifetime of its energy."""
    # LAPACK's threads synchronise at every panel or column; beside busy processes this takes longer than one thread alone
    with one_thread():
        return LocalProblem(energy)
