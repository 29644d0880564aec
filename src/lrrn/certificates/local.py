"""Local radii: per-sample lower bounds on the norm of the smallest perturbation that changes a label.

In the notation of :mod:`lrrn.certificates.complementarity`, a label changes if the lead + c v reaches zero. The least |u|^2
for which that can happen is a quadratic programme with complementarity constraints. Its Lagrangian dual is concave and a lower
bound for any multipliers. An interior-point method (Newton's method with a logarithmic barrier) maximises it. The result is
used only after a verified factorisation has proven it. See docs/theory/local-radii.md for the derivation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lrrn.certificates.complementarity import FARTHEST, NEARLY, LocalProblem, Sample, Terms, sought
from lrrn.linalg import verified
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import row_norms

BARRIER = 10.0
"""Initial weight of the barrier, all terms together, in units of the squared global radius."""
FADING = 0.15
"""Factor on the weight of the barrier each time the iterates are near the central path."""
NEAR = 1.0
"""Ratio of Newton decrement to barrier weight below which an iterate is near the central path. If the weight is reduced farther
from the path, the iterates end at a boundary point that is not the maximum."""
GAP, EXACT_GAP = 1e-2, 1e-3
"""Relative duality gap at which optimisation stops: the contribution of the barrier over the squared radius. ``EXACT_GAP``
applies where no errors of later solves are subtracted. It is smaller so that the remaining gap does not outweigh those errors:
an "exact" radius is not below a "deployed" one."""
ITERATIONS = 100
"""Maximum number of Newton steps."""
NEARBY = 0.25
"""Share of the units off a bound that count as near it. The multipliers of their conditions are active from the start."""
ROOM = 2e-2
"""Relative amount by which the dual should exceed the value to prove, since the proof loses some of it to rounding."""


@final
@dataclass(frozen=True, eq=False)
class Point:
    """The dual function at given multipliers."""

    value: float  # of the dual: no perturbation with a smaller squared norm reduces the lead to zero
    barrier: float  # logarithm of the determinant of the Lagrangian's quadratic form
    factor: Tensor  # Cholesky factor of that form as a function of v, with u eliminated
    half: Tensor  # Lam R / 2, its block between v and u up to sign
    v: Tensor  # the minimiser of the Lagrangian is (v, u)
    u: Tensor


@final
class Dual:
    """Lagrangian dual of the smallest squared norm of a perturbation that reduces one lead of one sample to zero.

    The lead changes by c v + d u. The Lagrangian is |u|^2 plus multipliers times: the remaining lead (the first multiplier);
    (v + low)(w + slack), which is never positive; (v - high)(w + slack), likewise; -(v + low); -(w + slack) where there is no
    upper bound; -(high - v). All multipliers are at least zero. Its minimum over v and u is the dual. Most multipliers of the
    last three kinds stay zero: the lower bound is inactive for a unit far above it, and the sign condition for a unit with a
    large slack. They are unknowns only where :attr:`active` is true.
    """

    def __init__(self, problem: LocalProblem, sample: Sample, c: Tensor, d: Tensor, lead: float) -> None:
        self.problem, self.sample, self.c, self.d, self.lead = problem, sample, c, d, lead
        self._lead = c.new_tensor(lead)
        sides = problem.two_sided
        self.all, self.two, self.one = (which.nonzero().squeeze(1) for which in (sides | True, sides, ~sides))
        groups = (self.all, self.two, self.all, self.one, self.two)
        self.sizes = [1, *(len(group) for group in groups)]
        self.unit = torch.cat(groups)
        self.n_products = len(self.all) + len(self.two)
        self.shift = torch.cat([sample.low, -sample.high[self.two]])
        slack = torch.where(sample.low > 0, 0.0, sample.slack)
        wanted = (_near(sample.low), ((sample.low > 0) | _near(slack))[self.one], _near(sample.high)[self.two])
        self.active = torch.cat([wanted[0].new_ones(1 + self.n_products), *wanted])

    def terms(self, theta: Tensor) -> Terms:
        """Return the multipliers per unit."""
        sigma, low, high, floor, sign, ceiling = theta.split(self.sizes)
        none = torch.zeros_like(low)
        return Terms(
            sigma[0],
            low,
            none.index_add(0, self.two, high),
            floor,
            none.index_add(0, self.two, ceiling),
            none.index_add(0, self.one, sign),
        )

    def at(self, theta: Tensor) -> Point | None:
        """Evaluate the dual; None where the Lagrangian has no minimum."""
        problem, terms = self.problem, self.terms(theta)
        sigma, lam, (of_v, of_w) = terms.sigma, terms.lam, terms.slopes(self.sample)
        scaled = lam[:, None] * problem.h
        s = (scaled + scaled.mT) / 2 - lam[:, None] * problem.gram * (lam / 4)
        factor, info = torch.linalg.cholesky_ex(s)
        if int(info) != 0:
            return None
        half = lam[:, None] * problem.root / 2
        by_v = sigma * self.c + of_v + problem.h @ of_w
        by_u = sigma * self.d - problem.root.mT @ of_w
        v = torch.cholesky_solve((by_v + half @ by_u)[:, None], factor)[:, 0] / -2
        u = half.mT @ v - by_u / 2
        value = float(terms.constant(self.sample, self._lead) + (by_v @ v + by_u @ u) / 2)
        return Point(value, 2 * float(factor.diagonal().log().sum()), factor, half, v, u)

    def gradient(self, point: Point) -> Tensor:
        """Return the gradient of the dual: the residual of each condition at (v, u), positive where it is violated."""
        problem, sample, v = self.problem, self.sample, point.v
        away, slack = v + sample.low, problem.h @ v - problem.root @ point.u + sample.slack
        closed = self.lead + self.c @ v + self.d @ point.u
        products = (v[self.unit[: self.n_products]] + self.shift) * slack[self.unit[: self.n_products]]
        return torch.cat([closed[None], products, -away, -slack[self.one], v[self.two] - sample.high[self.two]])

    def curvature(self, point: Point, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return minus the Hessian of the dual in the active multipliers, and gradient and minus Hessian of the form's barrier.

        The latter two are in the multipliers of products: the quadratic form depends on no others.
        """
        problem, n = self.problem, self.n_products
        active = self.active[1:]
        unit, v = self.unit[active], point.v
        slack = problem.h @ v - problem.root @ point.u + self.sample.slack
        # derivative of the Lagrangian's gradient in (v, u) by each multiplier: E e + K k, E = [I; 0] and K = [H; -R^T]
        none, minus, plus = (v.new_full((len(v),), value) for value in (0.0, -1.0, 1.0))
        e = torch.cat([slack[self.unit[:n]], minus, none[self.one], plus[self.two]])[active]
        k = torch.cat([v[self.unit[:n]] + self.shift, none, minus[self.one], none[self.two]])[active]
        ee = torch.cholesky_inverse(point.factor)
        t = problem.h - lam[:, None] * problem.gram / 2
        ek = ee @ t
        kk = torch.addmm(problem.gram, t.mT, ek)
        first = ee @ (self.c + point.half @ self.d)
        first_u = self.d + point.half.mT @ first
        mixed = e * first[unit] + k * (problem.h @ first - problem.root @ first_u)[unit]
        size = len(unit) + 1
        hessian = v.new_empty((size, size))
        hessian[0, 0] = self.c @ first + self.d @ first_u
        hessian[0, 1:] = hessian[1:, 0] = mixed
        wide = [block[unit][:, unit] for block in (ee, ek, kk)]
        cross = e[:, None] * wide[1] * k
        hessian[1:, 1:] = e[:, None] * wide[0] * e + cross + cross.mT + k[:, None] * wide[2] * k
        outer = [block[:n, :n] for block in wide]
        return hessian / 2, ek.diagonal()[unit[:n]], (outer[1] * outer[1].mT + outer[0] * outer[2]) / 2

    def start(self, lam: Tensor, constant: float) -> tuple[Tensor, float]:
        """Return initial multipliers and the initial weight of the barrier, from multipliers of the pair and their constant."""
        sample, two = self.sample, self.two
        radius = self.lead / constant
        weight = BARRIER * radius**2 / (int(self.active.sum()) + len(lam))
        lam = lam / constant**2
        # expected displacements, chosen so that multiplier times slack is about the weight of the barrier
        reach = radius * float(torch.linalg.vector_norm(self.problem.root, dim=1).mean())
        step = reach / float(self.problem.h.diagonal().mean()) if len(lam) else 1.0
        low, high = lam.clone(), lam[two] * 0.5
        low[two] *= 0.5
        floor = (lam * sample.slack).clamp(min=0) + weight / (sample.low + step)
        sign = lam * sample.low + weight / (sample.slack.clamp(min=0) + reach)
        ceiling = (-lam * sample.slack).clamp(min=0) + weight / (sample.high + step)
        theta = torch.cat([lam.new_tensor([self.lead / constant**2]), low, high, floor, sign[self.one], ceiling[two]])
        return torch.where(self.active, theta, 0.0), weight

    def maximised(self, theta: Tensor, weight: float, goal: float, decide: bool = False, gap: float = GAP) -> Tensor:
        """Maximise the dual by an interior-point method, until it reaches ``goal`` or is near its maximum.

        With ``decide``, a value below the goal is of no use, and the method stops as soon as the goal is out of reach.
        """
        point = self.at(theta)
        if point is None:
            return theta
        best, found = point.value, theta
        # a start with a value far below zero is near the central path only for a larger weight
        weight += max(0.0, -best) / self._n_barriers
        # after the weight is reduced, a step with the curvature at the previous weight ends near the new centre; see _newton
        before = weight
        for _ in range(ITERATIONS):
            step, decrement = self._newton(theta, point, weight, before)
            moved, there = self._searched(theta, point, step, decrement, weight)
            if there is None:
                if before == weight:
                    break
                before = weight
                continue
            theta, point, before = moved, there, weight
            if point.value > best:
                best, found = point.value, theta
            if best >= goal:
                break
            if decrement < NEAR * weight:
                wider = self._widened(theta, point, weight)
                if wider is not None:
                    theta, point = wider
                    continue
                # near the central path, the maximum exceeds the value by about the contribution of the barrier
                share = weight * self._n_barriers
                if share < gap * best or (decide and best + 2 * share < goal):
                    break
                before, weight = weight, weight * FADING
        return found

    @property
    def _n_barriers(self) -> int:
        return int(self.active.sum()) + len(self.all)

    def _newton(self, theta: Tensor, point: Point, weight: float, before: float) -> tuple[Tensor, float]:
        """Return the Newton step in all multipliers, with the barrier's curvature at the weight ``before``, and its decrement.

        Take a multiplier that is zero at the maximum. At the centre for the weight ``before`` it is ``before`` over its slack.
        A step with the curvature at the new, smaller weight would make it strongly negative. A step with the curvature at the
        old weight moves it to its value at the new centre.
        """
        n, active = self.n_products, self.active
        some = theta[active]
        matrix, pull, stiffness = self.curvature(point, self.terms(theta).lam)
        gradient = self.gradient(point)[active] + weight / some
        gradient[1 : n + 1] += weight * pull
        matrix.diagonal().add_(before / some.square())
        matrix[1 : n + 1, 1 : n + 1] += before * stiffness
        factor, info = torch.linalg.cholesky_ex(matrix)
        step = torch.zeros_like(theta)
        if int(info) == 0:
            step[active] = torch.cholesky_solve(gradient[:, None], factor)[:, 0]
        return step, float(gradient @ step[active])

    def _searched(
        self, theta: Tensor, point: Point, step: Tensor, decrement: float, weight: float
    ) -> tuple[Tensor, Point | None]:
        """Backtracking line search: shorten a step until the dual plus barrier rises enough; the point is None on failure."""
        active = self.active
        limit = float((-step[active] / theta[active]).max())
        length = min(1.0, 0.95 / limit) if limit > 0 else 1.0
        height = point.value + weight * (point.barrier + float(theta[active].log().sum()))
        while decrement > 0 and length > 1e-6:
            moved = theta + length * step
            there = self.at(moved)
            if there is not None:
                rise = there.value + weight * (there.barrier + float(moved[active].log().sum())) - height
                if rise >= 1e-4 * length * decrement:
                    return moved, there
            length /= 2
        return theta, None

    def _widened(self, theta: Tensor, point: Point, weight: float) -> tuple[Tensor, Point] | None:
        """Activate the multipliers of violated conditions; all other inactive multipliers are optimal at zero."""
        violation = self.gradient(point)
        new = (violation > 0) & ~self.active
        if not bool(new.any()):
            return None
        self.active = self.active | new
        # the maximiser over each new multiplier alone, barrier included
        bend = torch.ones_like(theta)
        bend[self.active] = self.curvature(point, self.terms(theta).lam)[0].diagonal()
        theta = torch.where(new, (violation + (violation.square() + 4 * weight * bend).sqrt()) / (2 * bend), theta)
        # they enter only the linear part, so the Lagrangian still has a minimum
        there = self.at(theta)
        assert there is not None
        return theta, there

    def is_proven(self, theta: Tensor, square: float) -> bool:
        """Whether it is proven that no perturbation with squared norm below ``square`` closes the lead.

        Data errors and rounding are included.
        The Lagrangian minus ``square`` is a quadratic form in (v, u, 1). The proof shows that it is positive definite.
        """
        if not bool((theta >= 0).all()):
            return False
        problem, terms = self.problem, self.terms(theta)
        sigma, lam, (of_v, of_w) = terms.sigma, terms.lam, terms.slopes(self.sample)
        m, r = problem.root.shape
        scaled = lam[:, None] * problem.h
        matrix = problem.h.new_zeros((m + r + 1, m + r + 1))
        matrix[:m, :m] = (scaled + scaled.mT) / 2
        matrix[m : m + r, :m] = -(lam[:, None] * problem.root).mT / 2
        matrix[m : m + r, m : m + r].fill_diagonal_(1.0)
        matrix[-1, :m] = (sigma * self.c + of_v + problem.h @ of_w) / 2
        matrix[-1, m:-1] = (sigma * self.d - problem.root.mT @ of_w) / 2
        matrix[-1, -1] = terms.constant(self.sample, self._lead) - square
        matrix[:, -1] = matrix[-1]
        matrix[:m, m : m + r] = matrix[m : m + r, :m].mT
        error = float(terms.error(problem, self.sample, self.c, self.d, self._lead))
        return verified.is_positive_definite(BlockTridiagonal((matrix,), ()), 0.0, error)


def _near(distance: Tensor) -> Tensor:
    """Whether a unit is at its bound or, compared with the other units, near it."""
    away = distance[(distance > 0) & distance.isfinite()]
    return distance <= (away.quantile(NEARBY) if len(away) else 0.0)


def local_radius(
    problem: LocalProblem,
    z: Tensor,
    g: Tensor,
    g_error: Tensor,
    label: int,
    leads: Tensor,
    rates: Tensor,
    target_radius: float = math.inf,
) -> float:
    """Return a certified radius for one sample, at least that of the global Lipschitz constants.

    Parameters
    ----------
    problem : LocalProblem
    z, g : Tensor of shape (dim,)
        Computed activations and slack; ``g_error`` bounds the norm of the rounding error of ``g``.
    label : int
        The predicted output.
    leads : Tensor of shape (d_L,)
        Lead of the predicted output over every other output, minus errors.
    rates : Tensor of shape (d_L, 2)
        For each other output: the proven global Lipschitz constant of the difference, and the addition to it for the errors of
        a later solve.
    target_radius : float, optional
        Largest radius of interest. The search tries to raise smaller radii to it and stops there.
    """
    others = [j for j in range(len(leads)) if j != label]
    known = {j: float(leads[j] / rates[j].sum()) for j in others}
    base = min(known.values())
    if not (0 < base < math.inf and problem.mu > 0):
        return max(base, 0.0) if base < math.inf else base
    sample, (scales, constants) = problem.sample(z, g, g_error), problem.scales.of(label)
    lengths = row_norms(problem.read_out[label] - problem.read_out)
    nearest = math.inf
    for j in sorted(others, key=lambda j: known[j]):
        if known[j] >= min(nearest, target_radius):
            nearest = min(nearest, known[j])
            continue
        radius, most = known[j], 0.0
        ceiling = leads.new_tensor(min(nearest, target_radius * (1 + 1e-6), FARTHEST * known[j]))
        # if the limit of the search is proven, search again with a larger limit
        while radius >= most * NEARLY and most < ceiling:
            upto, left = sought(leads.new_tensor(radius), leads[j], rates[j, 1], ceiling)
            most, lead = float(upto), float(left) - float(lengths[j] * sample.drift)
            if not (lead > 0 and 0 < float(constants[j]) < math.inf):
                break
            dual = Dual(problem, sample, problem.c[label] - problem.c[j], problem.d[label] - problem.d[j], lead)
            start, weight = dual.start(problem.lam * scales[j], float(constants[j]))
            gap = GAP if rates[j, 1] > 0 else EXACT_GAP
            theta = dual.maximised(start, weight, most**2 * (1 + ROOM), target_radius < math.inf, gap)
            radius = max(radius, _proven(dual, start, theta, most))
        nearest = min(nearest, radius)
    return nearest


def _proven(dual: Dual, start: Tensor, theta: Tensor, most: float) -> float:
    """Return a proven radius of at most ``most``, or zero.

    The quadratic form is singular at the optimal multipliers, so rounding makes a proof there impossible. The dual is concave,
    so mixing in a small part of the initial multipliers costs little and makes the form positive definite. The dual is zero at
    zero multipliers. Where it far exceeds the value to prove, which happens with large multipliers, they are scaled down: that
    suffices and reduces rounding.
    """
    reached = dual.at(theta)
    if reached is not None and reached.value > most**2 * (1 + ROOM):
        theta = theta * (most**2 * (1 + ROOM) / reached.value)
    for share in (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2):
        mixed = torch.lerp(theta, start, share)
        point = dual.at(mixed)
        square = 0.0 if point is None else min(point.value * (1 - share), most**2)
        if square > 0 and dual.is_proven(mixed, square):
            return math.sqrt(square) * (1 - 1e-15)
    return 0.0
