"""Local radii of many samples at once: fix the nonconvex multipliers across samples, leaving a box QP with one Hessian.

In the dual of a sample, the multipliers of the products (the complementarity constraints) enter the quadratic part of the
Lagrangian, the others only its linear part. Fix the former for all samples. Then the dual is a concave quadratic function of
the latter, and samples differ only in its linear part and in the bounds of the multipliers. This is a batch of box QPs with a
common Hessian, which this package solves fast. The solver's result is clipped to nonnegative multipliers. Their bound is then
proven by one factorisation for all samples and matrix products over the batch. See docs/theory/local-radii.md for the
derivation.
"""

from __future__ import annotations

import math
from typing import Protocol, final

import torch
from torch import Tensor

from lrrn.bounds.multiplier import LARGEST, LEAST
from lrrn.certificates.complementarity import FARTHEST, NEARLY, LocalProblem, Sample, Terms, local_problem, sought
from lrrn.certificates.dual_solvers import Descent, Splitting
from lrrn.energy import LiftedEnergy
from lrrn.linalg import verified
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import row_norms
from lrrn.runtime.lazy import lazy, once_per_owner
from lrrn.runtime.threads import one_thread

SHARE = 0.97
"""Fraction of the largest scaling of the network's multipliers for which the Lagrangian has a minimum."""
FEW = 1024
"""Number of unknowns of the dual up to which it is solved by splitting, which inverts a matrix of that size."""
ABOVE = 1 + 1e-3
"""The dual need not exceed the square of the limit of the search by more than this factor."""
ROWS = 1024
"""Samples per batch."""
CACHE = 2**30
"""Size of the cache of Hessians, in bytes."""
PAIRS = 0.05
"""Labels share a Hessian as long as their pairs of outputs are at most this fraction of its unknowns."""


@final
class SharedForm:
    """Quadratic part of the Lagrangian for fixed multipliers of products; common to all samples and all pairs of outputs.

    At least one unit must be able to move.
    """

    def __init__(self, problem: LocalProblem) -> None:
        self.problem = problem
        h, root = problem.h, problem.root
        scaled = problem.lam[:, None] * h
        factor, info = torch.linalg.cholesky_ex((scaled + scaled.mT) / 2)
        right = problem.lam[:, None] * root
        top = float(torch.linalg.eigvalsh(right.mT @ torch.cholesky_solve(right, factor))[-1]) if int(info) == 0 else 0.0
        # the form is positive definite for multiples below 4 / top
        self.lam = problem.lam * (SHARE * 4 / top if top > 0 else 0.0)
        scaled = self.lam[:, None] * h
        self.half = self.lam[:, None] * root / 2
        self.top_left = (scaled + scaled.mT) / 2
        self.factor, info = torch.linalg.cholesky_ex(self.top_left - self.half @ self.half.mT)
        largest = float(self.lam.abs().max()) if len(self.lam) else 1.0
        self.floor = self._floor() if int(info) == 0 and LEAST < largest < LARGEST else 0.0
        self.duals: dict[int, SharedDual] = {}

    def _floor(self) -> float:
        """Return a proven lower bound on the smallest eigenvalue of the form as stored; 0 if there is none."""
        m, r = self.half.shape
        matrix = torch.eye(m + r, dtype=self.half.dtype, device=self.half.device)
        matrix[:m, :m] = self.top_left
        matrix[m:, :m] = -self.half.mT
        matrix[:m, m:] = -self.half
        return verified.smallest_eigenvalue(BlockTridiagonal((matrix,), ()))

    @lazy
    def size(self) -> float:
        """Upper bound on the Frobenius norm of the form."""
        return 2 * (float(self.top_left.norm()) + 2 * float(self.half.norm()) + math.sqrt(self.half.shape[1]))

    @property
    def is_narrow(self) -> bool:
        """Whether the dual is solved by splitting."""
        return 2 * len(self.lam) + int(self.problem.two_sided.sum()) <= FEW

    @lazy
    def n_labels(self) -> int:
        """Number of labels that share a dual: all of them, except in a wide network with many pairs of outputs."""
        n_outputs = len(self.problem.c)
        return n_outputs if self.is_narrow else max(1, min(n_outputs, int(PAIRS * 2 * len(self.lam)) // n_outputs))

    def of(self, label: int) -> SharedDual:
        """Return the dual for samples with this label, from a cache of limited size."""
        group = label // self.n_labels
        if group not in self.duals:
            first = group * self.n_labels
            new = SharedDual(self, range(first, min(first + self.n_labels, len(self.problem.c))))
            while self.duals and (len(self.duals) + 1) * new.solver.n_bytes > CACHE:
                del self.duals[next(iter(self.duals))]
            self.duals[group] = new
        return self.duals[group]

    def lower_bound(self, by_v: Tensor, by_u: Tensor, error: Tensor) -> Tensor:
        """Return proven lower bounds on the form plus linear terms ``by_v`` and ``by_u``, over all v and u.

        ``error`` bounds the norm of the error of the whole, as a quadratic form of (v, u, 1), per sample.
        """
        v = torch.cholesky_solve((by_v + by_u @ self.half.mT).mT, self.factor).mT / -2
        u = v @ self.half - by_u / 2
        # the gradient at (v, u), which would be zero without rounding; at any displacement p, the form is at least
        # its value here - |gradient| |p| + floor |p|^2
        slope_v = 2 * (v @ self.top_left - u @ self.half.mT) + by_v
        slope_u = 2 * (u - v @ self.half) + by_u
        value = ((slope_v + by_v) * v).sum(-1) / 2 + ((slope_u + by_u) * u).sum(-1) / 2
        far = row_norms(v) + row_norms(u)
        size = self.size * far + row_norms(by_v) + row_norms(by_u)
        rounding = 8 * (len(self.factor) + self.half.shape[1] + 8) * verified.EPS * size
        slope = row_norms(slope_v) + row_norms(slope_u) + rounding + 2 * error * far
        curvature = self.floor - error
        bound = value - rounding * far - error * (far.square() + 1) - slope.square() / (4 * curvature)
        return torch.where(curvature > 0, bound - 8 * verified.EPS * bound.abs(), -math.inf)


@final
class SharedDual:
    """The dual for samples of some labels and any other output.

    Its unknowns are the first multiplier and the coefficients of v and of w in the Lagrangian. The coefficient of v has two
    parts where a unit has an upper bound.
    """

    def __init__(self, form: SharedForm, labels: range) -> None:
        self.form, self.problem = form, form.problem
        problem, half = form.problem, form.half
        self.two = problem.two_sided.nonzero().squeeze(1)
        m, r = problem.root.shape
        self.sizes = [m, len(self.two), m]
        unit = torch.eye(m, dtype=half.dtype, device=half.device)
        lean = problem.h - form.lam[:, None] * problem.gram / 2
        by_b = torch.cat([unit, unit[:, self.two], lean], 1)
        by_u = torch.cat([half.new_zeros((r, m + len(self.two))), -problem.root.mT], 1)
        solved = torch.cholesky_solve(by_b, form.factor)
        hessian = torch.addmm(by_u.mT @ by_u, by_b.mT, solved).div_(2)
        leads, moved = problem.c + problem.d @ half.mT, problem.d
        cross = torch.addmm(moved @ by_u, leads, solved).div_(2)
        gram = torch.addmm(moved @ moved.mT, leads, torch.cholesky_solve(leads.mT, form.factor)).div_(2)
        self.solver = Splitting(hessian, cross, gram) if form.is_narrow else Descent(hessian, cross, gram, labels)

    def slopes(self, label: Tensor, rival: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficients of v and of u in the leads of labels over other outputs."""
        return self.problem.c[label] - self.problem.c[rival], self.problem.d[label] - self.problem.d[rival]

    @property
    def n_outputs(self) -> int:
        """Number of outputs."""
        return len(self.problem.read_out)

    def drift(self, sample: Sample, label: Tensor, rival: Tensor) -> Tensor:
        """Return bounds on what the errors of eliminated units take from the leads of labels over other outputs."""
        rows = self.problem.read_out
        return row_norms(rows[label] - rows[rival]) * sample.drift

    def proven(self, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor, goal: float | Tensor = math.inf) -> Tensor:
        """Return proven lower bounds on the squared norm of a perturbation that reduces the lead to zero.

        ``lead`` holds the leads of ``label`` over ``rival``, above zero. A bound above ``goal`` need not be the largest.
        """
        return self.proven_by(sample, label, rival, lead, self.terms(sample, label, rival, lead, goal))

    def terms(self, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor, goal: float | Tensor = math.inf) -> Terms:
        """Return approximately optimal multipliers for the fixed multipliers of products."""
        lam, two = self.form.lam, self.two
        infinite = torch.full_like(sample.low, math.inf)
        least = torch.where(self.problem.two_sided, -lam * sample.room, -infinite)
        q = torch.cat([sample.low, -sample.room[:, two], sample.slack], 1)
        lo = torch.cat([-infinite, torch.zeros_like(sample.low[:, two]), least], 1)
        hi = torch.cat([lam * sample.slack, infinite[:, two], lam * sample.low], 1)
        # the dual is the value of the solver's problem minus this constant
        goal = goal + (lam * sample.low * sample.slack).sum(-1)
        first, found = self.solver.maximised(label, rival, lead, q, lo, hi, goal)
        return self._signed(sample, first, *found.split(self.sizes, 1))

    def _signed(self, sample: Sample, sigma: Tensor, of_v: Tensor, more: Tensor, of_w: Tensor) -> Terms:
        """Convert coefficients to nonnegative multipliers of the conditions."""
        lam, two, sides = self.form.lam, self.two, self.problem.two_sided
        width = (sample.low + sample.room).clamp(min=1e-300)
        low = torch.where(sides, ((of_w + lam * sample.room) / width).clamp(min=0.0).minimum(lam), lam)
        return Terms(
            sigma.clamp(min=0.0),
            low,
            (lam - low).clamp(min=0.0),
            (lam * sample.slack - of_v).clamp(min=0.0),
            torch.zeros_like(low).index_copy(1, two, more.clamp(min=0.0)),
            torch.where(sides, 0.0, (lam * sample.low - of_w).clamp(min=0.0)),
        )

    def proven_by(self, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor, terms: Terms) -> Tensor:
        """Return the bounds that given multipliers prove; those of products must be the shared ones."""
        problem, (c, d) = self.problem, self.slopes(label, rival)
        of_v, of_w = terms.slopes(sample)
        sigma = terms.sigma[:, None]
        by_v, by_u = sigma * c + of_v + of_w @ problem.h, sigma * d - of_w @ problem.root
        error = terms.error(problem, sample, c, d, lead)
        constant = terms.constant(sample, lead)
        return self.form.lower_bound(by_v, by_u, error) + constant - 8 * verified.EPS * constant.abs()


def shared_radii(
    form: SharedForm,
    z: Tensor,
    g: Tensor,
    g_error: Tensor,
    best: Tensor,
    leads: Tensor,
    rates: Tensor,
    target_radius: float = math.inf,
) -> Tensor:
    """Return certified radii of a batch, of shape (n,), at least those of the global Lipschitz constants.

    The arguments are those of :func:`lrrn.certificates.local.local_radius`, with one row per sample.
    """
    problem = form.problem
    best, leads, rates = (t.to(problem.device) for t in (best, leads, rates))
    known = (leads / rates.sum(-1)).scatter(1, best[:, None], math.inf)
    radius = known.amin(1)
    look = (radius > 0) & (radius < target_radius) & radius.isfinite()
    if len(problem.lam) == 0 or not (problem.mu > 0 and form.floor > 0):
        return radius
    group = best // form.n_labels
    for number in group[look].unique().tolist():
        for rows in (look & (group == number)).nonzero().squeeze(1).split(ROWS):
            sample, dual = problem.sample(z[rows], g[rows], g_error[rows]), form.of(number * form.n_labels)
            radius[rows] = nearest_radii(dual, sample, best[rows], known[rows], leads[rows], rates[rows, :, 1], target_radius)
    return radius


class Dual(Protocol):
    """What a search for radii needs of a dual."""

    @property
    def n_outputs(self) -> int:
        """Number of outputs."""
        ...

    def drift(self, sample: Sample, label: Tensor, rival: Tensor) -> Tensor:
        """Return bounds on what the errors of eliminated units take from the leads of labels over other outputs."""
        ...

    def proven(self, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor, goal: float | Tensor = math.inf) -> Tensor:
        """Return proven lower bounds on the squared norm of a perturbation that reduces the lead to zero."""
        ...


def nearest_radii(
    dual: Dual, sample: Sample, label: Tensor, known: Tensor, leads: Tensor, extra: Tensor, target_radius: float
) -> Tensor:
    """Process the other outputs of each sample by increasing known radius, as long as they can lower the result."""
    values, order = known.sort(1)
    nearest = torch.full_like(values[:, 0], math.inf)
    for k in range(dual.n_outputs - 1):
        value, rival = values[:, k], order[:, k]
        closer = value < nearest.clamp(max=target_radius)
        nearest = torch.where(closer, nearest, torch.minimum(nearest, value))
        rows = closer.nonzero().squeeze(1)
        if len(rows) == 0:
            break
        pick = rows, rival[rows]
        lead = leads[pick]
        here = sample.take(rows)
        drift = dual.drift(here, label[rows], rival[rows])
        ceiling = nearest[rows].clamp(max=target_radius * (1 + 1e-6)).minimum(FARTHEST * value[rows])
        known_here = value[rows], lead, extra[pick], drift, ceiling
        proven = _raised(dual, here, label[rows], rival[rows], *known_here)
        nearest[rows] = torch.minimum(nearest[rows], proven)
    return nearest


def _raised(
    dual: Dual,
    sample: Sample,
    label: Tensor,
    rival: Tensor,
    radius: Tensor,
    lead: Tensor,
    extra: Tensor,
    drift: Tensor,
    ceiling: Tensor,
) -> Tensor:
    """Return proven radii of one pair per sample, at least the known ones.

    Where the limit of the search is reached, the search is repeated with a larger limit.
    """
    radius, rows = radius.clone(), torch.arange(len(radius), device=radius.device)
    while len(rows):
        most, left = sought(radius[rows], lead[rows], extra[rows], ceiling[rows])
        left = left - drift[rows]
        goal = most.square() * ABOVE
        square = dual.proven(sample.take(rows), label[rows], rival[rows], left.clamp(min=1e-300), goal)
        # NaN proves nothing, and a value that small may have lost too much to underflow
        proven = torch.minimum(torch.where((left > 0) & (square > LEAST**2), square, 0.0).sqrt(), most) * (1 - 1e-15)
        radius[rows] = torch.maximum(radius[rows], proven)
        rows = rows[(proven >= most * NEARLY) & (most < ceiling[rows])]
    return radius


@once_per_owner
def shared_form(energy: LiftedEnergy) -> SharedForm:
    """Return the shared form of a network; cached for the lifetime of its energy."""
    problem = local_problem(energy)
    with one_thread():
        return SharedForm(problem)
