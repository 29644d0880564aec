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
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from lrrn.bounds.multiplier import LARGEST, LEAST
from lrrn.certificates.complementarity import Faces, LocalProblem, Sample, Terms, local_problem
from lrrn.certificates.dual_solvers import Splitting
from lrrn.certificates.matrix_free import form_of, has_layer_multipliers
from lrrn.certificates.nearest import Dual, Largest, nearest_radii
from lrrn.energy import LiftedEnergy
from lrrn.linalg import verified
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import row_norms
from lrrn.runtime.lazy import lazy, once_per_owner
from lrrn.runtime.threads import one_thread

SHARE = 0.97
"""Fraction of the largest scaling of the network's multipliers for which the Lagrangian has a minimum."""
ROWS = 1024
"""Samples per batch."""
SEARCHED = 256
"""Number of units up to which multipliers of single units are searched for, besides those per layer."""


@final
class SharedForm:
    """Quadratic part of the Lagrangian for fixed multipliers of products; common to all samples and all pairs of outputs.

    Parameters
    ----------
    problem : LocalProblem
        Of a network in which at least one unit can move.
    lam : Tensor of shape (m,), optional
        The multipliers up to a common factor; those that were searched for if not given.
    """

    def __init__(self, problem: LocalProblem, lam: Tensor | None = None) -> None:
        self.problem = problem
        h, root = problem.h, problem.root
        lam = problem.lam if lam is None else lam
        scaled = lam[:, None] * h
        factor, info = torch.linalg.cholesky_ex((scaled + scaled.mT) / 2)
        right = lam[:, None] * root
        top = float(torch.linalg.eigvalsh(right.mT @ torch.cholesky_solve(right, factor))[-1]) if int(info) == 0 else 0.0
        # the form is positive definite for multiples below 4 / top
        self.lam = lam * (SHARE * 4 / top if top > 0 else 0.0)
        scaled = self.lam[:, None] * h
        self.half = self.lam[:, None] * root / 2
        self.top_left = (scaled + scaled.mT) / 2
        self.factor, info = torch.linalg.cholesky_ex(self.top_left - self.half @ self.half.mT)
        largest = float(self.lam.abs().max()) if len(self.lam) else 1.0
        self.floor = self._floor() if int(info) == 0 and LEAST < largest < LARGEST else 0.0

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

    @lazy
    def dual(self) -> SharedDual:
        """The dual for these multipliers."""
        return SharedDual(self)

    def lower_bound(self, by_v: Tensor, by_u: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return proven lower bounds on the form plus linear terms ``by_v`` and ``by_u``, over all v and u; and v and u there.

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
        return torch.where(curvature > 0, bound - 8 * verified.EPS * bound.abs(), -math.inf), v, u


@final
class SharedDual:
    """The dual for samples of any label and any other output.

    Its unknowns are the first multiplier and the coefficients of v and of w in the Lagrangian. The coefficient of v has two
    parts where a unit has an upper bound.
    """

    rows = ROWS
    """Samples per batch."""

    def __init__(self, form: SharedForm) -> None:
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
        self.solver = Splitting(hessian, cross, gram)

    def slopes(self, label: Tensor, rival: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficients of v and of u in the leads of labels over other outputs."""
        return self.problem.c[label] - self.problem.c[rival], self.problem.d[label] - self.problem.d[rival]

    @property
    def n_outputs(self) -> int:
        """Number of outputs."""
        return len(self.problem.read_out)

    @property
    def splits(self) -> Tensor:
        """Whether branches may split on a unit: it has a lower bound only."""
        return ~self.problem.two_sided

    def drift(self, sample: Sample, label: Tensor, rival: Tensor) -> Tensor:
        """Return bounds on what the errors of eliminated units take from the leads of labels over other outputs."""
        rows = self.problem.read_out
        return row_norms(rows[label] - rows[rival]) * sample.drift

    def proven(self, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor, goal: float | Tensor = math.inf) -> Tensor:
        """Return proven lower bounds on the squared norm of a perturbation that reduces the lead to zero.

        ``lead`` holds the leads of ``label`` over ``rival``, above zero. A bound above ``goal`` need not be the largest.
        """
        return self.proven_by(sample, label, rival, lead, self.terms(sample, label, rival, lead, goal))[0]

    def bounds(
        self, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor, goal: Tensor, faces: Faces
    ) -> tuple[Tensor, Tensor]:
        """Return such bounds for branches, and the products of units at the minimiser: zero at every perturbed input."""
        return self.proven_by(sample, label, rival, lead, self.terms(sample, label, rival, lead, goal, faces))

    def terms(
        self,
        sample: Sample,
        label: Tensor,
        rival: Tensor,
        lead: Tensor,
        goal: float | Tensor = math.inf,
        faces: Faces | None = None,
    ) -> Terms:
        """Return approximately optimal multipliers for the fixed multipliers of products."""
        lam, two = self.form.lam, self.two
        infinite = torch.full_like(sample.low, math.inf)
        least = torch.where(self.problem.two_sided, -lam * sample.room, -infinite)
        q = torch.cat([sample.low, -sample.room[:, two], sample.slack], 1)
        lo = torch.cat([-infinite, torch.zeros_like(sample.low[:, two]), least], 1)
        most_v, most_w = lam * sample.slack, lam * sample.low
        if faces is not None:
            # the multiplier of an equation has either sign
            most_v, most_w = torch.where(faces.inactive, infinite, most_v), torch.where(faces.active, infinite, most_w)
        hi = torch.cat([most_v, infinite[:, two], most_w], 1)
        # the dual is the value of the solver's problem minus this constant
        goal = goal + (lam * sample.low * sample.slack).sum(-1)
        first, found = self.solver.maximised(label, rival, lead, q, lo, hi, goal)
        of_v, more, of_w = found.split(self.sizes, 1)
        return self._signed(sample, first, of_v, more, of_w, faces)

    def _signed(self, sample: Sample, sigma: Tensor, of_v: Tensor, more: Tensor, of_w: Tensor, faces: Faces | None) -> Terms:
        """Convert coefficients to multipliers of the conditions, which are not negative, except those of equations."""
        lam, two, sides = self.form.lam, self.two, self.problem.two_sided
        width = (sample.low + sample.room).clamp(min=1e-300)
        low = torch.where(sides, ((of_w + lam * sample.room) / width).clamp(min=0.0).minimum(lam), lam)
        up, over = lam * sample.slack - of_v, lam * sample.low - of_w
        floor, sign = up.clamp(min=0.0), torch.where(sides, 0.0, over.clamp(min=0.0))
        if faces is not None:
            floor, sign = torch.where(faces.inactive, up, floor), torch.where(faces.active, over, sign)
        return Terms(
            sigma.clamp(min=0.0),
            low,
            (lam - low).clamp(min=0.0),
            floor,
            torch.zeros_like(low).index_copy(1, two, more.clamp(min=0.0)),
            sign,
        )

    def proven_by(self, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
        """Return the bounds that given multipliers prove; those of products must be the shared ones.

        Also returns (v + low) (w + slack) at the computed minimiser.
        """
        problem, (c, d) = self.problem, self.slopes(label, rival)
        of_v, of_w = terms.slopes(sample)
        sigma = terms.sigma[:, None]
        by_v, by_u = sigma * c + of_v + of_w @ problem.h, sigma * d - of_w @ problem.root
        error = terms.error(problem, sample, c, d, lead)
        constant = terms.constant(sample, lead)
        bound, v, u = self.form.lower_bound(by_v, by_u, error)
        product = (v + sample.low) * (v @ problem.h - u @ problem.root.mT + sample.slack)
        return bound + constant - 8 * verified.EPS * constant.abs(), product


def shared_radii(
    problem: LocalProblem,
    duals: Sequence[Dual],
    z: Tensor,
    g: Tensor,
    g_error: Tensor,
    best: Tensor,
    leads: Tensor,
    rates: Tensor,
    target_radius: float = math.inf,
) -> Tensor:
    """Return certified radii of a batch, of shape (n,), at least those of the global Lipschitz constants.

    The arguments after ``duals``, which prove bounds, are those of :func:`lrrn.certificates.local.local_radius`, with one row
    per sample.
    """
    best, leads, rates = (t.to(problem.device) for t in (best, leads, rates))
    known = (leads / rates.sum(-1)).scatter(1, best[:, None], math.inf)
    radius = known.amin(1)
    look = (radius > 0) & (radius < target_radius) & radius.isfinite()
    if not duals:
        return radius
    for rows in look.nonzero().squeeze(1).split(ROWS):
        sample = problem.sample(z[rows], g[rows], g_error[rows])
        radius[rows] = nearest_radii(
            Largest(duals), sample, best[rows], known[rows], leads[rows], rates[rows, :, 1], target_radius
        )
    return radius


@once_per_owner
def shared_duals(energy: LiftedEnergy) -> tuple[SharedDual, ...]:
    """Return the duals in use, most useful first; none if no form is proven positive definite.

    Multipliers per layer are better in most trained networks, those per unit for some pairs of outputs. Cached for the lifetime
    of the energy.
    """
    problem = local_problem(energy)
    if len(problem.open) == 0 or not problem.mu > 0:
        return ()
    forms = []
    with one_thread():
        if has_layer_multipliers(energy) and form_of(energy).usable:
            forms.append(SharedForm(problem, form_of(energy).lam[problem.open]))
        if sum(energy.free_sizes) <= SEARCHED or not forms:
            forms.append(SharedForm(problem))
    # the inverse of the dual takes all threads that the caller allows
    return tuple(form.dual for form in forms if form.floor > 0)
