"""The optimality conditions at a perturbed input, seen from a sample, and multipliers that make lower bounds of them.

Let z be the activations computed at x and z' the exact ones at x + u. With v = z' - z and w = H v - B u, the optimality
conditions at x + u read, for every unit, in terms of what is known at x (its distance a from the lower bound and its slack g):

    v + a >= 0,    w + g >= 0,    (v + a) (w + g) = 0,

and likewise at an upper bound. docs/theory/local-radii.md has the argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lrrn.bounds.multiplier import MultiplierProblem
from lrrn.energy import LiftedEnergy
from lrrn.linalg import verified
from lrrn.network import LRRN
from lrrn.qp import row_norms
from lrrn.runtime.lazy import lazy
from lrrn.runtime.threads import one_thread

REACH, COST = 8.0, 1e-3
"""Radii are sought up to this many times one that is proven, and further as long as the errors of later solves, which grow
with the radius that is sought, take no more than this share of the lead."""
FARTHEST = 200.0
"""Times the global radius: where no perturbation changes a label, something has to end the search."""

NEARLY = 1 - 1e-12
"""A radius of this share of what was sought has reached it."""


@final
@dataclass(frozen=True, eq=False)
class Sample:
    """A sample as the local problem sees it, or several; units that cannot move are gone, and lower bounds are finite.

    Attributes
    ----------
    low, high : Tensor of shape (..., m)
        Distances of the computed activations from their bounds; the upper ones may be infinite.
    slack : Tensor of shape (..., m)
        H z - q as computed.
    low_error, slack_error : Tensor of shape (...)
        Bounds on the norms of the errors of the first two and of the third.
    drift : Tensor of shape (...)
        Bound on how far the eliminated units are from their equations.
    """

    low: Tensor
    high: Tensor
    slack: Tensor
    low_error: Tensor
    slack_error: Tensor
    drift: Tensor

    @lazy
    def room(self) -> Tensor:
        """Distances from the upper bounds, 0 where there are none."""
        return self.high.masked_fill(self.high.isinf(), 0.0)

    def take(self, rows: Tensor) -> Sample:
        """Return some of several samples."""
        return Sample(*(getattr(self, field.name)[rows] for field in fields(self)))


@final
@dataclass(frozen=True, eq=False)
class Terms:
    """Multipliers of the conditions of a sample, or of several, all at least zero; zero where a unit has no such condition.

    Attributes
    ----------
    sigma : Tensor of shape (...)
        Of the lead that is left.
    low, high : Tensor of shape (..., m)
        Of the products (v + low) (w + slack) and (v - high) (w + slack).
    floor, ceiling, sign : Tensor of shape (..., m)
        Of v + low, of high - v and of w + slack, which are at least zero.
    """

    sigma: Tensor
    low: Tensor
    high: Tensor
    floor: Tensor
    ceiling: Tensor
    sign: Tensor

    @lazy
    def lam(self) -> Tensor:
        """Multipliers of v w."""
        return self.low + self.high

    def slopes(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the coefficients of v and of w in the Lagrangian."""
        of_v = self.lam * sample.slack - self.floor + self.ceiling
        return of_v, self.low * sample.low - self.high * sample.room - self.sign

    def constant(self, sample: Sample, lead: Tensor) -> Tensor:
        """Return what is left of the Lagrangian at v = 0 and u = 0."""
        ends = self.floor * sample.low + self.ceiling * sample.room
        return self.sigma * lead - ends.sum(-1) + (self.slopes(sample)[1] * sample.slack).sum(-1)

    def error(self, problem: LocalProblem, sample: Sample, c: Tensor, d: Tensor, lead: Tensor) -> Tensor:
        """Bound, in norm, what errors of the data and rounding change in the Lagrangian as a quadratic form of (v, u, 1)."""
        eh, er, ec, ed = problem.errors
        norm = partial(torch.linalg.vector_norm, dim=-1)
        largest = self.lam.amax(-1) if self.lam.shape[-1] else torch.zeros_like(self.sigma)
        # norms of the coefficients of w and of v, without what cancels in them, and of the changes that errors of a and g make
        pull = norm(self.low * sample.low.abs() + self.high * sample.room.abs() + self.sign)
        push = norm(self.lam * sample.slack.abs() + self.floor + self.ceiling)
        linear = norm(self.floor) + norm(self.ceiling)
        nh, nr, tension = problem.h.norm(), problem.root.norm(), norm(sample.slack)
        shifted = largest * sample.low_error
        # of v w and v u; of v 1 and u 1; of 1 1
        error = largest * (eh + er)
        error = error + self.sigma * (ec + ed) + (eh + er) * pull + (nh + nr) * shifted + largest * sample.slack_error
        error = error + pull * sample.slack_error + linear * sample.low_error + shifted * (tension + sample.slack_error)
        extent = norm(sample.low) + norm(sample.room)
        size = largest * (nh + nr) + self.sigma * (norm(c) + norm(d)) + push + (nh + nr) * pull
        size = size + self.sigma * lead.abs() + linear * extent + pull * tension
        return error + 8 * (len(problem.h) + 8) * verified.EPS * size


@final
class LocalProblem:
    """What all samples share: the programme without the units that are free or fixed, and multipliers to begin from.

    Parameters
    ----------
    net : LRRN
        With at least one unknown layer.
    """

    def __init__(self, net: LRRN) -> None:
        energy = net.energy_snapshot(torch.float64).to(torch.float64, "cpu")
        problem = MultiplierProblem(energy)
        self.threads = problem.threads
        hessian = energy.free_hessian
        self.mu = energy.free_mu
        n = hessian.dim
        self.h_error = energy.rounding.inner * float(hessian.diagonal.sum())
        self.h_norm = verified.largest_eigenvalue(hessian, self.h_error)
        lo, hi = (bound[0, :n] for bound in energy.box)
        # units bounded from above only are looked at in a mirror
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
        lam = problem.network(math.inf, 1.0).lam
        self.scales = _PairScales(problem, lam)
        self._eliminate(h, root, rows)
        self.lam = lam[self.open]
        self.two_sided = self.hi[self.open].isfinite()
        # what was set up on the CPU goes where the network lives
        self.device = net.W[0].device
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(self.device))

    def _eliminate(self, h: Tensor, root: Tensor, rows: Tensor) -> None:
        """Eliminate the free units, which satisfy equations; set h, root, c, d and bounds on their errors."""
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
        """Look at computed activations and H z - q, of one sample or of several, the latter known up to an error in norm."""
        z, g = z.to(self.device) * self.sign, g.to(self.device) * self.sign
        u = self.open
        low, high = z[..., u] - self.lo[u], self.hi[u] - z[..., u]
        # free units should have no slack: what they have moves them, and the others' slack with them
        g_error = g_error.to(self.device)
        drift = (row_norms(g[..., self.free]) + g_error) / self.mu * (1 + 1e-9) if len(self.free) else torch.zeros_like(g_error)
        low_error = verified.EPS * (row_norms(low) + row_norms(high.masked_fill(high.isinf(), 0.0))) * 2
        return Sample(low, high, g[..., u], low_error, g_error + self.h_norm * drift, drift)


@final
class _PairScales:
    """Multiples of the network's multipliers that suit pairs of outputs, and the constants they give, unproven."""

    def __init__(self, problem: MultiplierProblem, lam: Tensor) -> None:
        self._problem, self._lam = problem, lam
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, label: int) -> tuple[Tensor, Tensor]:
        """Return scales and constants of ``label`` against every output."""
        if label not in self._known:
            rows = self._problem.read_out
            others = torch.arange(len(rows)) != label
            scales = torch.ones(len(rows), dtype=torch.float64)
            constants = torch.zeros(len(rows), dtype=torch.float64)
            scales[others], constants[others] = self._problem.scales(self._lam, rows[label] - rows[others])
            self._known[label] = scales, constants
        return self._known[label]


def sought(radius: Tensor, lead: Tensor, extra: Tensor, ceiling: Tensor) -> tuple[Tensor, Tensor]:
    """Return up to where to look for a radius, at most a ceiling, and the lead that is left of the errors of later solves.

    Those errors are no more than they are at the largest radius sought.

    Parameters
    ----------
    radius : Tensor
        What is proven.
    lead : Tensor
    extra : Tensor
        What the errors of later solves take of the lead per unit of the radius.
    ceiling : Tensor
        Nothing is gained beyond this radius.
    """
    free = extra == 0
    most = torch.maximum(REACH * radius, COST * lead / extra).masked_fill(free, math.inf).minimum(ceiling)
    return most, torch.where(free, lead, lead - extra * most)


_known: WeakKeyDictionary[LiftedEnergy, LocalProblem] = WeakKeyDictionary()


def local_problem(net: LRRN) -> LocalProblem:
    """Return the network's local problem, set up once for given parameters."""
    energy = net.energy_snapshot(torch.float64)
    if energy not in _known:
        # LAPACK's threads wait for each other at every panel or column: beside busy processes, longer than one thread computes
        with one_thread():
            _known[energy] = LocalProblem(net)
    return _known[energy]
