"""The multiplier bound: a Lipschitz bound with one nonnegative multiplier per unit, optimised and then proven.

Let z* minimise 1/2 z^T H z - q^T z over a box with q = B x + const, and let v, u be the differences of two minimisers and of
their inputs. The optimality conditions give v_i (B u - H v)_i >= 0 for every unit, since each unit is monotone. Multiply by
Lam = diag(lam), lam >= 0 (of either sign for a free unit, whose inequality is an equation), and sum. If
S = Lam H + H Lam - C^T C is positive definite, then |C v|^2 <= 2 v^T Lam B u - v^T S v <= u^T B^T Lam S^-1 Lam B u, so

    |C v| <= rho |u|    whenever    G = Lam H + H Lam - C^T C - Lam B B^T Lam / rho^2    is positive semidefinite.

G is block tridiagonal. The result of the optimiser is not trusted: a verified Cholesky factorisation of G proves rho.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lrrn import bounds
from lrrn.bounds.search import gain, minimised
from lrrn.energy import LiftedEnergy
from lrrn.energy.lifted import matrix_hessian
from lrrn.linalg import verified
from lrrn.linalg.blocks import BlockTridiagonal, gram
from lrrn.runtime.lazy import lazy, once_per_owner
from lrrn.runtime.threads import blas_threads, one_thread, side_by_side

logger = logging.getLogger("lrrn.bounds")
RATE = 2e10
"""Operations per second, assumed for converting a time budget into a number of evaluations."""
MANY_UNITS = 512
"""Number of unknowns above which a second BLAS thread saves time."""
LEAST, LARGEST = 1e-70, 1e70
"""Valid range of multipliers, constants and norms of the input weights. Outside of it no proof is attempted: products of
several of them could overflow, or underflow by more than the rounding error that proofs allow for."""
MEMORY = 2**32
"""Memory limit, in bytes, for read-outs processed at once, with eight matrices for each."""
SLACKS = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
"""Relative excesses of a constant over its estimate, tried in turn until a proof succeeds; each try is a factorisation."""
FEWEST, MOST = 30, 240
"""Smallest number of evaluations for which the optimiser is started, and the number after which it has converged."""


@final
@dataclass(frozen=True, eq=False)
class Multipliers:
    """A proven Lipschitz constant and the multipliers of its proof."""

    rho: float  # proven: |C v| <= rho |u|
    lam: Tensor  # (dim,) float64


@final
class MultiplierProblem:
    """Finds and proves multipliers for read-outs C of the free phase's minimiser.

    Parameters
    ----------
    energy : LiftedEnergy
        In float64, with at least one unknown layer.
    """

    def __init__(self, energy: LiftedEnergy) -> None:
        if energy.weights[0].dtype != torch.float64:
            raise TypeError(f"bounds are proven in float64; this energy is {energy.weights[0].dtype}")
        if energy.n_free == 0:
            raise ValueError("the free phase of this network has no unknowns: its output is affine in x")
        # always on the CPU, whatever the device of the network: there are thousands of small factorisations
        energy = energy.unfolded
        energy = energy if energy.weights[0].device.type == "cpu" else energy.to(torch.float64, "cpu")
        self._energy = energy
        self._h = matrix_hessian(energy)
        self._first, self._last = self._h.sizes[0], self._h.sizes[-1]
        free = [interval.is_free for interval in energy.intervals[: energy.n_free]]
        self.free_units = torch.cat([torch.full((d,), f) for d, f in zip(self._h.sizes, free, strict=True)])

    @property
    def is_finite(self) -> bool:
        """Whether no product of weights overflowed; otherwise there is nothing to optimise."""
        return self._h.is_finite() and bool(self._input_gram.isfinite().all())

    @property
    def read_out(self) -> Tensor:
        """The matrix that maps the last unknown block to the output: W_{L-1} if the output is eliminated, else the identity."""
        if self._energy.eliminated:
            return self._energy.weights[-1]
        return torch.eye(self._last, dtype=self._h.dtype, device=self._h.device)

    @lazy
    def _dense(self) -> Tensor:
        return self._h.dense()

    @lazy
    def _input_gram(self) -> Tensor:
        """B B^T, which is zero outside of the first block."""
        return gram(self._energy.weights[0]) * self._input_scale**2

    @property
    def _input_scale(self) -> float:
        return self._energy.discounts[0] * (1 + self._energy.beta[0])

    @lazy
    def _input_root(self) -> Tensor:
        """R with R R^T = B B^T and as few columns as possible; for the optimiser only."""
        w = self._energy.weights[0]
        if w.shape[1] <= w.shape[0]:
            return w * self._input_scale
        values, vectors = torch.linalg.eigh(self._input_gram)
        return vectors * values.clamp(min=0.0).sqrt()

    @lazy
    def _padded_root(self) -> Tensor:
        padded = self._dense.new_zeros((self._h.dim, self._input_root.shape[1]))
        padded[: self._first] = self._input_root
        return padded

    def proven_root(self) -> tuple[Tensor, float]:
        """Return R for the first block and an error e: some R' with |R' - R| <= e has R' R'^T - B B^T positive semidefinite.

        R can therefore replace B in proofs that account for the error. It has as few columns as possible.
        """
        w = self._energy.weights[0]
        if w.shape[1] <= w.shape[0]:
            # B itself, up to the rounding error of one product
            return w * self._input_scale, verified.EPS * self._input_scale * float(w.norm())
        product = self._input_gram
        trace = float(product.diagonal().sum())
        rounding = self._energy.rounding.inner * trace + verified.UNDERFLOW
        shift = 2 * (rounding + 8 * (self._first + 8) * verified.EPS * trace)
        shifted = BlockTridiagonal((product + shift * torch.eye(self._first, dtype=product.dtype),), ())
        factor = shifted.cholesky()
        # R R^T = B B^T + shift I - (residual and rounding error of the factor); the shift must exceed the last term
        if bool(factor.ok) and factor.defect(shifted) + rounding + 4 * verified.EPS * (trace + shift) < shift:
            return factor.lower[0], 0.0
        return torch.zeros_like(product), math.inf

    def start(self) -> Tensor:
        """Return multipliers that reproduce the spectral bound, up to a little slack: the starting point of the optimiser."""
        energy = self._energy
        constants, shrink = [], []
        for operator, beta in zip(energy.operators, energy.beta, strict=True):
            low, high = bounds.singular_range(operator)
            turning = 1 / math.sqrt(beta) if beta else math.inf
            s = min(max(turning, low), high)
            constants.append((1 + beta) * s / (1 + beta * s * s))
            shrink.append(1 / (1 + beta * s * s))
        n_free = energy.n_free
        later = [math.prod(c * c for c in constants[k + 1 : n_free]) for k in range(n_free)]
        steps = [later[k] * shrink[k] / energy.discounts[k] for k in range(n_free)]
        blocks = [torch.full((d,), sum(steps[: k + 1]), dtype=self._h.dtype) for k, d in enumerate(self._h.sizes)]
        reach = verified.spectral_norm(self.read_out) ** 2 if energy.eliminated else 1.0
        return torch.cat(blocks) * reach * (1 + 1e-3)

    def estimate(self, lam: Tensor, c: Tensor) -> float:
        """Return the unproven constant of multipliers for a read-out ``c`` of the last block; inf if they are infeasible."""
        value, _ = self._value(lam, c, math.inf)
        return math.sqrt(value) if value < math.inf else math.inf

    def _value(self, lam: Tensor, c: Tensor, sharpness: float) -> tuple[float, Tensor | None]:
        whole = c.new_zeros((len(c), self._h.dim))
        whole[:, -self._last :] = c
        return gain(self._dense, self._padded_root, lam, whole, sharpness)

    def improve(self, lam: Tensor, c: Tensor, evaluations: int) -> Tensor:
        """Optimise the multipliers for a read-out ``c`` of the last block, starting at ``lam``; the result is never worse."""
        return minimised(lambda trial, sharpness: self._value(trial, c, sharpness), lam, self.free_units, evaluations)

    def affordable(self, seconds: float) -> int:
        """Return the number of evaluations in a time budget on a typical core, from an operation count."""
        n, r = self._h.dim, self._input_root.shape[1]
        operations = n**3 / 3 + 4 * n * n * r + 10 * r**3
        return int(seconds / (3e-4 + operations / RATE))

    def prove(self, lam: Tensor, c: Tensor, ceiling: float = math.inf, estimate: float | None = None) -> float:
        """Return a proven constant for a read-out ``c``: about what ``lam`` gives, or ``ceiling`` if that cannot be proven."""
        estimate = self.estimate(lam, c) if estimate is None else estimate
        if bool((lam[~self.free_units] < 0).any()) or not estimate < ceiling:
            return ceiling
        for slack in SLACKS:
            rho = estimate * (1 + slack)
            if rho >= ceiling:
                break
            if self._is_proven(lam, c, rho):
                return rho
        return ceiling

    def _is_proven(self, lam: Tensor, c: Tensor, rho: float) -> bool:
        """Whether G is proven positive definite, including the rounding errors of its entries."""
        trace, largest = float(self._input_gram.diagonal().sum()), float(lam.abs().max())
        if not all(LEAST < size < LARGEST for size in (rho, largest, math.sqrt(trace))):
            return False
        parts = lam.split(self._h.sizes)
        diag = [(part[:, None] + part).mul_(block) for part, block in zip(parts, self._h.diag, strict=True)]
        sub = [(parts[k + 1][:, None] + parts[k]) * block for k, block in enumerate(self._h.sub)]
        gain = (parts[0][:, None] * parts[0]).mul_(self._input_gram).div_(rho**2)
        square = gram(c.mT)
        diag[0].sub_(gain)
        diag[-1].sub_(square)
        # entries of H, B B^T and C^T C have the rounding errors of inner products, those of G a few operations more
        rounding = self._energy.rounding.inner
        size = 2 * largest * (float(self._h.diagonal.sum()) + self._h.frobenius())
        size += float(square.diagonal().sum()) + float(c.square().sum())
        size += 2 * float(parts[0].abs().max()) ** 2 * trace / rho**2 + float(gain.norm())
        return verified.is_positive_definite(BlockTridiagonal(tuple(diag), tuple(sub)), 0.0, 2 * rounding * size)

    def network(self, ceiling: float, seconds: float) -> Multipliers:
        """Return a proven constant of the whole output, at most ``ceiling``."""
        lam = self.searched(seconds)
        if not self.is_finite:
            return Multipliers(ceiling, lam)
        if self.affordable(seconds) < FEWEST:
            logger.info("multiplier bound: %.3g s are not enough for %d units; the other bounds stand", seconds, self._h.dim)
            return Multipliers(ceiling, lam)
        with self.threads():
            return Multipliers(self.prove(lam, self.read_out, ceiling), lam)

    def searched(self, seconds: float, most: int = MOST) -> Tensor:
        """Return multipliers for the whole output, by at most ``most`` evaluations; nothing is proven."""
        if not self.is_finite:
            return torch.zeros(self._h.dim, dtype=self._h.dtype)
        evaluations = self.affordable(seconds)
        with self.threads():
            start = self.start()
            return start if evaluations < FEWEST else self.improve(start, self.read_out, min(evaluations, most))

    def rows(self, lam: Tensor, rows: Tensor, ceilings: Tensor, seconds: float) -> Tensor:
        """Return proven constants of several read-outs of one row each.

        Parameters
        ----------
        lam : Tensor of shape (dim,)
            Multipliers of the whole output, as a warm start.
        rows : Tensor of shape (m, d)
            Read-outs of the last block.
        ceilings : Tensor of shape (m,)
            Constants proven by other methods; the results are at most these.
        seconds : float
            Time budget for all of them together; if it is small, ``lam`` is only rescaled.

        Returns
        -------
        float64 Tensor of shape (m,)
        """
        out = ceilings.clone()
        if not self.is_finite:
            return out
        evaluations = min(self.affordable(seconds / max(len(rows), 1)), MOST)

        def work(i: int) -> None:
            with torch.no_grad(), blas_threads(1):
                c, trial, estimate = rows[i, None], lam * scales[i], float(estimates[i])
                if evaluations >= FEWEST:
                    trial = self.improve(trial, c, evaluations)
                    estimate = self.estimate(trial, c)
                out[i] = self.prove(trial, c, float(ceilings[i]), estimate)

        with one_thread():
            scales, estimates = self.scales(lam, rows)
            side_by_side(work, len(rows), at_once=max(1, MEMORY // (64 * self._h.dim**2)))
        return out

    def threads(self) -> AbstractContextManager[None]:
        """Limit BLAS to one thread unless the matrices are large: small ones are tens of times slower with more threads."""
        return one_thread() if self._h.dim <= MANY_UNITS else nullcontext()

    def scales(self, lam: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best multiple of ``lam`` for each read-out of one row, and its unproven constant.

        With K = Lam H + H Lam and tau = c K^-1 c^T, t Lam is feasible for t > tau, and by the rank-one update formula
        (Sherman-Morrison) the constant follows from the largest eigenvalue of t M + t / (t - tau) g g^T, where M and g do not
        depend on t.
        """
        h, d = self._dense, self._first
        factor, info = torch.linalg.cholesky_ex(lam[:, None] * h + h * lam)
        if int(info) != 0:
            return h.new_ones(len(rows)), h.new_full((len(rows),), math.inf)
        r = self._input_root.shape[1]
        right = h.new_zeros((len(h), r + len(rows)))
        right[:d, :r] = lam[:d, None] * self._input_root
        right[-self._last :, r:] = rows.mT
        y = torch.cholesky_solve(right, factor)
        values, vectors = torch.linalg.eigh(right[:d, :r].mT @ y[:d, :r])
        tau = (right[:, r:] * y[:, r:]).sum(0).clamp(min=1e-300)
        cross = (vectors.mT @ (right[:d, :r].mT @ y[:d, r:])).square()  # (r, m)
        factors = 1 + torch.logspace(-3, 3, 61, dtype=h.dtype, device=h.device)
        t = factors[:, None] * tau  # (61, m)
        weight = factors[:, None] / (factors[:, None] - 1)
        # the largest root of 1 = weight * sum_i cross_i / (root - t values_i), by bisection above the last pole
        low = t * values[-1]
        high = low + weight * cross.sum(0)
        for _ in range(60):
            middle = (low + high) / 2
            total = weight * (cross / (middle[:, None] - t[:, None] * values[:, None])).sum(1)
            low, high = torch.where(total > 1, middle, low), torch.where(total > 1, high, middle)
        best = high.argmin(0)
        chosen = torch.arange(len(rows), device=h.device)
        return t[best, chosen], high[best, chosen].sqrt()


@once_per_owner
def network_multipliers(energy: LiftedEnergy, ceiling: float, seconds: float) -> Multipliers:
    """Return proven multipliers for the output of a float64 energy; cached for the lifetime of the energy."""
    return MultiplierProblem(energy).network(ceiling, seconds)
