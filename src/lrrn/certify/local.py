"""Local radii: inside a small ball most units stay where they are, and what cannot move need not be feared.

Every unit's activation and slack (H z - q) is Lipschitz with a proven constant of its own. So within a ball around x a unit far
from its kink keeps its state: one that sits on a bound with room to spare stays there and leaves the problem, one inside its
interval keeps satisfying an equation and can be eliminated exactly. The multiplier bound on what is left is a constant for the
ball. docs/theory.md has the argument; everything an optimiser suggests is proven afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lrrn import verified
from lrrn.blocks import BlockTridiagonal
from lrrn.energy import LiftedEnergy
from lrrn.multiplier import MultiplierProblem, gain, minimised
from lrrn.network import LRRN

STEPS = 7
"""Halvings in the search for the largest ball."""
REACH = 1.8
"""How far beyond the global radius the search begins."""
EVALUATIONS = 24
"""Steps of the optimiser for one pair of classes in one ball."""
UNIT_EVALUATIONS = 60
"""Steps of the optimiser for the constant of one unit, once a network."""


@final
@dataclass(frozen=True, eq=False)
class Part:
    """A quadratic programme's sensitivity: H v against R u, read out by C v + D u, each known up to an error in norm.

    Attributes
    ----------
    h : Tensor of shape (m, m)
    root : Tensor of shape (m, r)
    c : Tensor of shape (k, m)
    d : Tensor of shape (k, r)
    free : bool Tensor of shape (m,)
        Units whose multipliers may have either sign.
    errors : tuple of float
        Bounds on the spectral norms of the errors of h, root, c and d.
    """

    h: Tensor
    root: Tensor
    c: Tensor
    d: Tensor
    free: Tensor
    errors: tuple[float, float, float, float]

    def row(self, c: Tensor, d: Tensor, error_c: float, error_d: float) -> Part:
        """Return the same programme with another read-out."""
        return Part(self.h, self.root, c, d, self.free, (self.errors[0], self.errors[1], error_c, error_d))

    def estimate(self, lam: Tensor) -> float:
        """Return the constant that multipliers give, unproven."""
        value, _ = gain(self.h, self.root, lam, self.c, self.d, math.inf)
        return math.sqrt(value) if value < math.inf else math.inf

    def improve(self, lam: Tensor, evaluations: int) -> Tensor:
        """Lower the constant from ``lam`` on."""
        return minimised(
            lambda trial, sharp: gain(self.h, self.root, trial, self.c, self.d, sharp), lam, self.free, evaluations
        )

    def is_proven(self, lam: Tensor, rho: float) -> bool:
        """Whether |C v + D u| <= rho |u| is proven by these multipliers.

        It holds if [[S, -N], [-N^T, rho^2 I - D^T D]] is positive definite, S = Lam H + H Lam - C^T C and N = Lam R + C^T D.
        """
        if bool((lam[~self.free] < 0).any()):
            return False
        s = lam[:, None] * self.h + self.h * lam - self.c.mT @ self.c
        n = lam[:, None] * self.root + self.c.mT @ self.d
        corner = rho * rho * torch.eye(self.root.shape[1], dtype=s.dtype) - self.d.mT @ self.d
        matrix = torch.cat([torch.cat([s, -n], 1), torch.cat([-n.mT, corner], 1)])
        largest, (eh, er, ec, ed) = float(lam.abs().max()) if len(lam) else 0.0, self.errors
        nc, nd, nh, nr = (float(t.norm()) for t in (self.c, self.d, self.h, self.root))
        error = 2 * largest * eh + 2 * nc * ec + ec * ec + 2 * nd * ed + ed * ed
        error += 2 * (largest * er + nc * ed + nd * ec + ec * ed)
        size = 2 * largest * (nh + nr) + (nc + nd) ** 2 + rho * rho
        error += 8 * (len(matrix) + 8) * verified.EPS * size
        return verified.is_positive_definite(BlockTridiagonal((matrix,), ()), 0.0, error)

    def prove(self, lam: Tensor, ceiling: float) -> float:
        """Return a proven constant: about what ``lam`` gives, or ``ceiling`` if that cannot be proven."""
        estimate = self.estimate(lam)
        for slack in (1e-9, 1e-7, 1e-5, 1e-3):
            rho = estimate * (1 + slack)
            if rho < ceiling and self.is_proven(lam, rho):
                return rho
        return ceiling


@final
class LocalProblem:
    """What all balls share: the programme, the constants of its units, and multipliers to begin from.

    Parameters
    ----------
    net : LRRN
        With at least one unknown layer.
    """

    def __init__(self, net: LRRN) -> None:
        energy = net.energy_snapshot(torch.float64).to(torch.float64, "cpu")
        problem = MultiplierProblem(energy)
        hessian = energy.free_hessian
        self.dim = hessian.dim
        self.mu = energy.free_mu
        h = hessian.dense()
        self.h_error = energy.inner_rounding * float(hessian.diagonal.sum())
        self.h_norm = verified.largest_eigenvalue(hessian, self.h_error)
        root = problem.proven_root()
        padded = h.new_zeros((self.dim, root.shape[1]))
        padded[: len(root)] = root
        free = problem.free_units
        none = h.new_zeros((1, root.shape[1]))
        self.whole = Part(h, padded, h.new_zeros((1, self.dim)), none, free, (self.h_error, 0.0, 0.0, 0.0))
        self.lo, self.hi = (bound[0, : self.dim] for bound in energy.box)
        self.rows = h.new_zeros((len(problem.read_out), self.dim))
        self.rows[:, -problem.read_out.shape[1] :] = problem.read_out
        self.threads = problem.threads
        with problem.threads():
            self.lam = problem.network(math.inf, 1.0).lam
            self.activation, self.slack = self._unit_constants()
        self._pairs: dict[tuple[int, int], Tensor] = {}

    def _unit_constants(self) -> tuple[Tensor, Tensor]:
        """Return proven constants of every unit's activation and slack."""
        h, root, mu = self.whole.h, self.whole.root, self.mu
        reach = float(torch.linalg.matrix_norm(root, ord=2)) * (1 + 1e-9)
        activation, slack = h.new_empty(self.dim), h.new_empty(self.dim)
        for i in range(self.dim):
            unit = h.new_zeros((1, self.dim))
            unit[0, i] = 1.0
            part = self.whole.row(unit, root.new_zeros((1, root.shape[1])), 0.0, 0.0)
            ceiling = reach / mu if mu > 0 else math.inf
            activation[i] = part.prove(self._begun(part, UNIT_EVALUATIONS), ceiling)
            part = self.whole.row(h[i : i + 1], -root[i : i + 1], self.h_error, 0.0)
            # |(H v - B u)_i| <= |H_i| |v| + |B_i| |u|
            ceiling = (float(h[i].norm()) + self.h_error) * ceiling + float(root[i].norm())
            slack[i] = part.prove(self._begun(part, UNIT_EVALUATIONS), ceiling * (1 + 1e-9))
        return activation, slack

    def _begun(self, part: Part, evaluations: int) -> Tensor:
        """Return good multipliers for a read-out of one row, from the best multiple of those of the whole output."""
        scales = [10.0**e for e in torch.linspace(-3, 3, 13).tolist()]
        best = min(scales, key=lambda scale: part.estimate(self.lam * scale))
        return part.improve(self.lam * best, evaluations)

    def pair(self, i: int, j: int) -> Part:
        """Return the whole programme with the difference of outputs i and j read out."""
        c = (self.rows[i] - self.rows[j])[None]
        return self.whole.row(c, torch.zeros_like(self.whole.d), 4 * verified.EPS * float(c.norm()), 0.0)

    def pair_multipliers(self, i: int, j: int) -> Tensor:
        """Return good multipliers for a pair, without any ball."""
        key = (max(i, j), min(i, j))
        if key not in self._pairs:
            self._pairs[key] = self._begun(self.pair(*key), 2 * UNIT_EVALUATIONS)
        return self._pairs[key]

    # --- one ball -----------------------------------------------------------------------------------------------------

    def states(self, z: Tensor, g: Tensor, error: float, g_error: float, radius: float) -> tuple[Tensor, Tensor]:
        """Return which units stay inside their intervals, and which stay on a bound, for all inputs within ``radius``.

        Parameters
        ----------
        z, g : Tensor of shape (dim,)
            Activations and H z - q, as computed at the centre.
        error : float
            Proven distance of ``z`` from the exact activations.
        g_error : float
            Bound on the rounding made in computing ``g``.
        radius : float

        Returns
        -------
        inside, fixed : bool Tensor of shape (dim,)
        """
        room = (self.activation * radius + error) * (1 + 1e-12)
        inside = (z - self.lo > room) & (self.hi - z > room)
        # the exact slack is within |H| |z - z*| plus rounding of the one computed
        need = (self.slack * radius + self.h_norm * error + g_error) * (1 + 1e-12)
        fixed = ((z <= self.lo) & (g > need)) | ((z >= self.hi) & (-g > need)) | (self.lo == self.hi)
        return inside & ~fixed, fixed

    def reduced(self, inside: Tensor, fixed: Tensor) -> Reduction:
        """Take fixed units out and eliminate those that stay inside."""
        h, root = self.whole.h, self.whole.root
        open_ = ~(inside | fixed)
        u, a = open_.nonzero().squeeze(1), inside.nonzero().squeeze(1)
        huu, hua, haa = h[u][:, u], h[u][:, a], h[a][:, a]
        right = torch.cat([hua.mT, root[a]], 1)
        if len(a) == 0:
            return Reduction(u, a, huu, root[u], hua.mT, root[a], 0.0, self)
        factor, info = torch.linalg.cholesky_ex(haa)
        solved = torch.cholesky_solve(right, factor) if int(info) == 0 else torch.full_like(right, math.nan)
        # a posteriori: |X - X*| <= |H_aa X - rhs| / mu, and H_aa has no eigenvalue below that of H
        rounding = 8 * (self.dim + 8) * verified.EPS * (float(haa.norm()) * float(solved.norm()) + float(right.norm()))
        left = float((haa @ solved - right).norm()) + rounding + self.h_error * (1 + float(solved.norm()))
        error = left / self.mu if self.mu > 0 else math.inf
        x_u, x_r = solved[:, : len(u)], solved[:, len(u) :]
        return Reduction(u, a, huu - hua @ x_u, root[u] - hua @ x_r, x_u, x_r, error, self)


@final
@dataclass(frozen=True, eq=False)
class Reduction:
    """The programme over the units that may change their state in a ball.

    Attributes
    ----------
    open, inside : int64 Tensor
        Units that may change, and those that were eliminated.
    h, root : Tensor
        H and R over the open units.
    x_open, x_root : Tensor
        H_aa^-1 H_au and H_aa^-1 R_a.
    error : float
        Bound on the error of the last two, stacked.
    problem : LocalProblem
    """

    open: Tensor
    inside: Tensor
    h: Tensor
    root: Tensor
    x_open: Tensor
    x_root: Tensor
    error: float
    problem: LocalProblem

    def part(self, i: int, j: int) -> Part:
        """Return the programme with the difference of outputs i and j read out."""
        row = (self.problem.rows[i] - self.problem.rows[j])[None]
        c_u, c_a = row[:, self.open], row[:, self.inside]
        coupling = self.problem.whole.h[self.open][:, self.inside]
        size, eps, length = float(coupling.norm()), 8 * (self.problem.dim + 8) * verified.EPS, float(row.norm())
        h_error = self.problem.h_error * (2 + float(self.x_open.norm())) + size * self.error
        h_error += eps * (float(self.h.norm()) + size * float(self.x_open.norm()))
        root_error = self.problem.h_error * float(self.x_root.norm()) + size * self.error
        root_error += eps * (float(self.root.norm()) + size * float(self.x_root.norm()))
        c_error = length * self.error + eps * length * (1 + float(self.x_open.norm()))
        d_error = length * self.error + eps * length * float(self.x_root.norm())
        free = self.problem.whole.free[self.open]
        h = (self.h + self.h.mT) / 2
        return Part(h, self.root, c_u - c_a @ self.x_open, c_a @ self.x_root, free, (h_error, root_error, c_error, d_error))


def local_radius(
    problem: LocalProblem, z: Tensor, g: Tensor, error: float, g_error: float, label: int, leads: Tensor, rates: Tensor
) -> float:
    """Return a proven radius for one sample, at least what the global constants give.

    Parameters
    ----------
    problem : LocalProblem
    z, g : Tensor of shape (dim,)
        Activations and slack as computed.
    error, g_error : float
        Proven distance of ``z`` from the exact activations, and of ``g`` from the slack at ``z``.
    label : int
        The predicted output.
    leads : Tensor of shape (d_L,)
        By how much it leads each other output, errors taken off.
    rates : Tensor of shape (d_L, 2)
        For each other output: the proven global constant of the difference, and what the errors of a later solve add to it.

    Returns
    -------
    float
    """
    others = [j for j in range(len(leads)) if j != label]
    base = min(float(leads[j] / rates[j].sum()) for j in others)
    if not (0 < base < math.inf and error < math.inf and problem.mu > 0):
        return max(base, 0.0) if base < math.inf else base
    best, low, high = base, 1.0, REACH

    def holds(radius: float, improve: bool, prove: bool) -> bool:
        """Whether every other output stays behind within ``radius``; estimated or proven."""
        rivals = [j for j in others if float(leads[j]) < radius * float(rates[j].sum()) * (1 + 1e-9)]
        if not rivals:
            return True
        reduction = problem.reduced(*problem.states(z, g, error, g_error, radius))
        for j in sorted(rivals, key=lambda j: float(leads[j] / rates[j].sum())):
            allowed = float(leads[j]) / radius - float(rates[j, 1])
            part = reduction.part(label, j)
            lam = problem.pair_multipliers(label, j)[reduction.open]
            if part.estimate(lam) >= allowed * (1 - 1e-8) and improve:
                lam = part.improve(lam, EVALUATIONS)
            if part.estimate(lam) >= allowed * (1 - 1e-8):
                return False
            if prove and not part.is_proven(lam, allowed):
                return False
        return True

    for step in range(STEPS):
        middle = (low + high) / 2
        if holds(base * middle, improve=step >= 2, prove=step >= 2):
            low = middle
            best = base * middle if step >= 2 else best
        else:
            high = middle
    if best < base * low and holds(base * low, improve=True, prove=True):
        best = base * low
    return best


_known: WeakKeyDictionary[LiftedEnergy, LocalProblem] = WeakKeyDictionary()


def local_problem(net: LRRN) -> LocalProblem:
    """Return the network's local problem; its constants are computed once for given parameters."""
    energy = net.energy_snapshot(torch.float64)
    if energy not in _known:
        _known[energy] = LocalProblem(net)
    return _known[energy]
