"""The lifted energy of the paper (eq. LRRN, discounted) and the QPs derived from it.

    E(z; x) = 1/2 sum_k gamma^k ( |z_{k+1} - W_k z_k - b_k|^2 + beta_k |W_k^T z_{k+1} - z_k - c_k|^2 ),   z_0 = x

As a function of the stacked activations z = (z_1, ..., z_L) it is 1/2 z^T H z - q(x)^T z + const(x) with a block-tridiagonal
H that depends on the weights only. Block k below holds z_{k+1}; a_k = gamma^k. W_k may be any linear operator, such as a
convolution, and H is then used through products with W_k and W_k^T alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lrrn.energy.constraints import Interval, bounds
from lrrn.energy.rounding import Rounding
from lrrn.linalg import split_products
from lrrn.linalg.blocks import BlockTridiagonal, Deferred, Factor, shifted_gram, symmetrised
from lrrn.linalg.layer_shape import LayerShape
from lrrn.linalg.operator_hessian import Hessian, hessian_of
from lrrn.linalg.operators import Dense, Operator
from lrrn.linalg.products import RightFactor
from lrrn.qp import BoxQP, row_norms
from lrrn.runtime.lazy import lazy
from lrrn.runtime.precision import in_full_precision

UNFOLDED_UNITS = 4096
"""Largest number of unknown units for which operators are turned into matrices."""


@final
@dataclass(frozen=True, eq=False)
class LiftedEnergy:
    """The energy of a network with given parameters.

    Derived quantities are cached, so build a new object after changing the parameters.

    Parameters
    ----------
    weights : tuple of Tensor of shape (d_{k+1}, d_k)
        W_k, all of one dtype and device; of other operators than matrices, their own parameters.
    b : tuple of Tensor of shape (d_{k+1},) or None
        Regression biases, one per unit; None means zero.
    c : tuple of Tensor of shape (d_k,) or None
        Reconstruction biases, one per unit; None means zero.
    beta : tuple of float
        Weights of the reconstruction terms, one per layer, >= 0.
    gamma : float
        Discount of later layers, > 0.
    intervals : tuple of Interval
        The sets C_1, ..., C_L.
    layers : tuple of LayerShape, optional
        How the weights act; by default, all are matrices.
    by_parts : bool, default=False
        Whether products with a large W_0 on a GPU may be off by some 1e-6 of their size, for a third of the time; see
        :mod:`lrrn.linalg.split_products`.
    """

    weights: tuple[Tensor, ...]
    b: tuple[Tensor | None, ...]
    c: tuple[Tensor | None, ...]
    beta: tuple[float, ...]
    gamma: float
    intervals: tuple[Interval, ...]
    layers: tuple[LayerShape, ...] | None = None
    by_parts: bool = False

    @lazy
    def operators(self) -> tuple[Operator, ...]:
        """The weights as linear operators."""
        if self.layers is None:
            return tuple(Dense(w) for w in self.weights)
        return tuple(layer.operator(w) for layer, w in zip(self.layers, self.weights, strict=True))

    @property
    def n_layers(self) -> int:
        """L, the number of weight matrices."""
        return len(self.weights)

    @lazy
    def sizes(self) -> tuple[int, ...]:
        """d_0, ..., d_L."""
        if self.layers is not None:
            return (self.layers[0].columns, *(layer.rows for layer in self.layers))
        return (self.weights[0].shape[1], *(w.shape[0] for w in self.weights))

    @lazy
    def discounts(self) -> tuple[float, ...]:
        """a_k = gamma^k."""
        return tuple(self.gamma**k for k in range(self.n_layers))

    @property
    def eliminated(self) -> bool:
        """Whether the output is eliminated from the free phase: it is unconstrained and has no reconstruction term."""
        return self.intervals[-1].is_free and self.beta[-1] == 0

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> LiftedEnergy:
        """Return the same energy, detached, with parameters of another dtype or on another device."""
        return LiftedEnergy(
            tuple(w.detach().to(device, dtype) for w in self.weights),
            tuple(None if b is None else b.detach().to(device, dtype) for b in self.b),
            tuple(None if c is None else c.detach().to(device, dtype) for c in self.c),
            self.beta,
            self.gamma,
            self.intervals,
            self.layers,
        )

    @property
    def has_matrices(self) -> bool:
        """Whether every operator is a matrix, or small enough to become one."""
        return self.layers is None or sum(self.free_sizes) <= UNFOLDED_UNITS

    @lazy
    def unfolded(self) -> LiftedEnergy:
        """The same energy with every operator as a matrix, detached; raises ValueError if the matrices are too large."""
        if self.layers is None:
            return self
        if not self.has_matrices:
            raise ValueError(
                f"this needs matrices of the size of all hidden units, and this network with convolutions has "
                f"{sum(self.free_sizes):,}; at most {UNFOLDED_UNITS:,} are possible. Method 'spectral' needs none"
            )
        weights = tuple(operator.dense().detach() for operator in self.operators)
        return LiftedEnergy(weights, self.b, self.c, self.beta, self.gamma, self.intervals)

    @lazy
    def exact(self) -> LiftedEnergy:
        """The same energy in float64, which proven bounds use."""
        return self if self.weights[0].dtype == torch.float64 else self.to(torch.float64)

    def value(self, x: Tensor, z: Sequence[Tensor]) -> Tensor:
        """Return E(z; x) per sample, differentiable in ``x``, ``z`` and the parameters.

        Parameters
        ----------
        x : Tensor of shape (n, d_0)
        z : sequence of L tensors of shape (n, d_k)

        Returns
        -------
        Tensor of shape (n,)
        """
        total = x.new_zeros(x.shape[0])
        for k, a in enumerate(self.discounts):
            regression, reconstruction = self.mismatch(k, x if k == 0 else z[k - 1], z[k])
            total = total + 0.5 * a * regression.square().sum(-1)
            if reconstruction is not None:
                total = total + 0.5 * a * self.beta[k] * reconstruction.square().sum(-1)
        return total

    def mismatch(self, k: int, below: Tensor, above: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return z_{k+1} - W_k z_k - b_k and, where beta_k > 0, W_k^T z_{k+1} - z_k - c_k."""
        reconstruction = self.reconstruction_mismatch(k, below, above) if self.beta[k] else None
        return self.regression_mismatch(k, below, above), reconstruction

    @in_full_precision
    def regression_mismatch(self, k: int, below: Tensor, above: Tensor) -> Tensor:
        """Return z_{k+1} - W_k z_k - b_k."""
        regression, b = above - self.operators[k].apply(below), self.b[k]
        return regression if b is None else regression - b

    @in_full_precision
    def reconstruction_mismatch(self, k: int, below: Tensor, above: Tensor) -> Tensor:
        """Return W_k^T z_{k+1} - z_k - c_k."""
        reconstruction, c = self.operators[k].adjoint(above) - below, self.c[k]
        return reconstruction if c is None else reconstruction - c

    @torch.no_grad()
    def free(self, x: Tensor) -> BoxQP:
        """Return the free phase: minimise E(z; x) over the activations, except an eliminated output."""
        return self._boxed(self.free_hessian, self._linear(x))

    @torch.no_grad()
    def clamped(self, x: Tensor, y: Tensor) -> BoxQP:
        """Return the clamped phase: minimise E(z; x) over z_1, ..., z_{L-1} with z_L = y."""
        return self.clamp(self.free(x), y)

    @in_full_precision
    @torch.no_grad()
    def clamp(self, free: BoxQP, y: Tensor) -> BoxQP:
        """Return the clamped phase for the inputs of a free phase; only the last hidden block of q differs."""
        hidden = sum(self.sizes[1:-1])
        q = free.q[:, :hidden].clone()
        if hidden:
            a, b = self.discounts[-1], self.b[-1]
            # q[L-1] += a_{L-1} (1 + beta_{L-1}) W_{L-1}^T y, plus the bias term if the output is eliminated
            pull = y * (1 + self.beta[-1]) - b if self.eliminated and b is not None else y * (1 + self.beta[-1])
            last = q[:, -self.sizes[-2] :]
            last.copy_(self.operators[-1].adjoint_added(last, pull, a))
        return self._boxed(self.clamped_hessian, q)

    @in_full_precision
    @torch.no_grad()
    def nudged(self, x: Tensor, v: Tensor, t: float) -> BoxQP:
        """Return the nudged phase: the free phase of E(z; x) + t v^T z_L, for ``v`` of shape (n, d_L).

        An eliminated output is then z_L = W_{L-1} z_{L-1} + b_{L-1} - t v / a_{L-1}.
        """
        q = self._linear(x)
        if self.n_free > 0:
            push = self.operators[-1].adjoint(v) if self.eliminated else v
            q[:, -push.shape[1] :].sub_(push, alpha=t)
        return self._boxed(self.free_hessian, q)

    @torch.no_grad()
    def adjoint(self, z: Tensor, v: Tensor) -> BoxQP:
        """Return the adjoint of the free phase at its minimiser: 1/2 w^T H w - v^T w, w = 0 where z is on a bound.

        Parameters
        ----------
        z : Tensor of shape (n, dim)
            Stacked minimiser of :meth:`free`.
        v : Tensor of shape (n, dim)
            Gradient of a loss in ``z``.
        """
        lo, hi = (bound[:, : z.shape[1]] for bound in self.box)
        reach = torch.full_like(z, torch.inf).masked_fill_((z <= lo) | (z >= hi), 0)
        return BoxQP(self.free_hessian, v, -reach, reach, linear=True, holds_zero=True)

    def inside(self, z: Tensor) -> Tensor | None:
        """Return the share of rows of ``z`` in which a unit is strictly inside its interval, of shape (dim,).

        None if no solver has a use for it.
        """
        if self._through is None:
            return None
        lo, hi = (bound[:, : z.shape[1]] for bound in self.box)
        return ((z > lo) & (z < hi)).to(z.dtype).mean(0)

    def activations(self, x: Tensor, z: Tensor, y: Tensor | None = None) -> list[Tensor]:
        """Split stacked activations of the free phase, or of the phase clamped to ``y``, into z_1, ..., z_L.

        An eliminated output is W_{L-1} z_{L-1} + b_{L-1}.
        """
        sizes = self.free_sizes if y is None else self.sizes[1:-1]
        blocks = list(z.split(sizes, dim=-1)) if sizes else []
        if y is not None:
            return [*blocks, y]
        if self.eliminated:
            blocks.append(self.output(x, z))
        return blocks

    @in_full_precision
    def output(self, x: Tensor, z: Tensor) -> Tensor:
        """Return only z_L, from stacked free activations."""
        if not self.eliminated:
            return z[:, -self.sizes[-1] :]
        features = z[:, -self.sizes[-2] :] if self.n_free else x
        operator, b = self.operators[-1], self.b[-1]
        return operator.apply(features) if b is None else operator.added(b, features)

    @in_full_precision
    @torch.no_grad()
    def reconstruct(self, z: Tensor, layer: int) -> Tensor:
        """Reconstruct inputs from the activations of one layer, top-down: z_k = W_k^T z_{k+1} - c_k, projected onto C_k.

        Parameters
        ----------
        z : Tensor of shape (n, d_layer)
        layer : int
            1, ..., L.

        Returns
        -------
        Tensor of shape (n, d_0)
        """
        below = z
        for k in reversed(range(layer)):
            c = self.c[k]
            below = self.operators[k].adjoint(below) - (0.0 if c is None else c)
            if k > 0:
                below = below.clamp(self.intervals[k - 1].lo, self.intervals[k - 1].hi)
        return below

    @torch.no_grad()
    def error_bound(self, x: Tensor, z: Tensor, y: Tensor | None = None) -> Tensor:
        """Return a proven bound on |z - z*| per sample, rounding included; for float64 energies.

        Parameters
        ----------
        x : float64 Tensor of shape (n, d_0)
        z : Tensor of shape (n, dim)
            Stacked solution of the free phase or, with ``y``, to the clamped phase.
        y : float64 Tensor of shape (n, d_L), optional
        """
        qp = self.free(x) if y is None else self.clamped(x, y)
        mu, rounding = (self.free_mu, self.rounding.free) if y is None else (self.clamped_mu, self.rounding.clamped)
        # a clamped output enters q as the input does, through the last weights
        return qp.distance_bound(z, mu, rounding, row_norms(x) if y is None else row_norms(x) + row_norms(y))

    @lazy
    def rounding(self) -> Rounding:
        """Bounds on the rounding errors of quantities computed with this energy."""
        return Rounding(self)

    @lazy
    def free_mu(self) -> float:
        """Proven lower bound on the smallest eigenvalue of :attr:`free_hessian`; for float64 energies."""
        return self.rounding.smallest_eigenvalue(self.free_hessian)

    @lazy
    def clamped_mu(self) -> float:
        """Proven lower bound on the smallest eigenvalue of :attr:`clamped_hessian`; for float64 energies."""
        return self.rounding.smallest_eigenvalue(self.clamped_hessian)

    @lazy
    def input_gain(self) -> float:
        """Proven bound on how much q grows per unit of x: a_0 (1 + beta_0) |W_0|_2; for float64 energies."""
        return self.discounts[0] * (1 + self.beta[0]) * self.operators[0].norm()

    @property
    def n_free(self) -> int:
        """Number of layers that are unknowns of the free phase."""
        return self.n_layers - 1 if self.eliminated else self.n_layers

    @property
    def free_sizes(self) -> tuple[int, ...]:
        """Widths of the unknowns of the free phase."""
        return self.sizes[1 : 1 + self.n_free]

    @lazy
    def free_hessian(self) -> Hessian:
        """H of the free phase."""
        return self._hessian(self.n_free, False)

    @lazy
    def clamped_hessian(self) -> Hessian:
        """H of the clamped phase."""
        return self._hessian(self.n_layers - 1, True)

    @torch.no_grad()
    def _hessian(self, m: int, closed: bool) -> Hessian:
        """Return the first ``m`` blocks of H; if ``closed``, block m - 1 includes the terms of layer m."""
        if self.layers is not None and m:
            operators = [layer.operator(w.detach()) for layer, w in zip(self.layers, self.weights, strict=True)]
            return hessian_of(operators, self.discounts, self.beta, m, closed)
        a, beta = self.discounts[0], self.beta[0]
        factor = Factor(a, a * beta, self.weights[0].detach()) if m == 1 and not closed else None
        if factor is not None and factor.saves_time:
            # solvers that use the factor never need the matrix, which costs as much as several of their iterations
            return BlockTridiagonal(Deferred(factor), (), factor)
        diag = [self._own_block(k) if k + 1 == m and not closed else self._pressed_block(k) for k in range(m)]
        return BlockTridiagonal(tuple(diag), tuple(self._coupling(k + 1) for k in range(m - 1)), factor)

    @lazy
    def _blocks(self) -> dict[tuple[str, int], Tensor]:
        """Blocks that the free and the clamped phase share."""
        return {}

    @lazy
    def _halves(self) -> split_products.Halves | None:
        """Parts of W_0, if products may use them, and it is a large matrix on a device with tensor cores."""
        return split_products.halves(self.weights[0].detach()) if self.by_parts and self.layers is None else None

    @property
    def _through(self) -> tuple[RightFactor, RightFactor] | None:
        """Products of rows with W_0 and with its transpose, if solvers of the free phase use them."""
        return self.free_hessian.through if isinstance(self.free_hessian, BlockTridiagonal) else None

    @in_full_precision
    @torch.no_grad()
    def to_inputs(self, y: Tensor) -> Tensor:
        """Return W_0^T y for rows of ``y``, of shape (n, d_1)."""
        if self._through is not None:
            return self._through[0](y)
        halves = self._halves if len(y) >= split_products.MANY else None
        return self.operators[0].adjoint(y) if halves is None else split_products.rows_times(y, halves)

    @in_full_precision
    def _own_block(self, k: int) -> Tensor:
        """Return a_k (I + beta_k W_k W_k^T)."""
        if ("own", k) not in self._blocks:
            w, a, beta = self.weights[k].detach(), self.discounts[k], self.beta[k]
            halves = self._halves if k == 0 and beta else None
            found = shifted_gram(w, a, a * beta) if halves is None else split_products.shifted_gram(halves, a, a * beta)
            self._blocks["own", k] = found
        return self._blocks["own", k]

    @in_full_precision
    def _pressed_block(self, k: int) -> Tensor:
        """Return the same plus a_{k+1} (W_{k+1}^T W_{k+1} + beta_{k+1} I), from the layer above."""
        if ("pressed", k) not in self._blocks:
            above, a = self.weights[k + 1].detach(), self.discounts[k + 1]
            block = symmetrised(torch.addmm(self._own_block(k), above.mT, above, alpha=a))
            if self.beta[k + 1]:
                block.diagonal().add_(a * self.beta[k + 1])
            self._blocks["pressed", k] = block
        return self._blocks["pressed", k]

    def _coupling(self, k: int) -> Tensor:
        if ("coupling", k) not in self._blocks:
            self._blocks["coupling", k] = self.weights[k].detach() * (-self.discounts[k] * (1 + self.beta[k]))
        return self._blocks["coupling", k]

    @in_full_precision
    def _linear(self, x: Tensor) -> Tensor:
        """Return q(x) of the free phase, of shape (n, dim)."""
        m = self.n_free
        constants = [self._bias_term(k, k + 1 < m) for k in range(m)]
        if m == 0:
            return x.new_empty((x.shape[0], 0))
        alpha, halves = self.discounts[0] * (1 + self.beta[0]), self._halves if len(x) >= split_products.MANY else None
        if self._through is not None:
            first = self._through[1](x).mul_(alpha).add_(constants[0])
        elif halves is None:
            first = self.operators[0].added(constants[0], x, alpha)
        else:
            first = split_products.rows_times(x, halves.mT, constants[0], alpha)
        return first if m == 1 else torch.cat([first, *(part.expand(len(x), -1) for part in constants[1:])], dim=-1)

    @in_full_precision
    def _bias_term(self, k: int, pressed: bool) -> Tensor:
        """Return a_k (b_k + beta_k W_k c_k) and, if pressed, minus a_{k+1} (W_{k+1}^T b_{k+1} + beta_{k+1} c_{k+1})."""
        a, b, c = self.discounts[k], self.b[k], self.c[k]
        term = self.weights[k].new_zeros(self.sizes[k + 1]) if b is None else b * a
        if c is not None and self.beta[k]:
            term = self.operators[k].added(term, c, a * self.beta[k])
        if pressed:
            a, b, c = self.discounts[k + 1], self.b[k + 1], self.c[k + 1]
            if b is not None:
                term = self.operators[k + 1].adjoint_added(term, b, -a)
            if c is not None and self.beta[k + 1]:
                term = term.sub(c, alpha=a * self.beta[k + 1])
        return term

    def _boxed(self, hessian: Hessian, q: Tensor) -> BoxQP:
        lo, hi = self.box
        holds_zero = all(within.lo <= 0 <= within.hi for within in self.intervals)
        return BoxQP(hessian, q, lo[:, : q.shape[1]], hi[:, : q.shape[1]], holds_zero=holds_zero)

    @lazy
    def box(self) -> tuple[Tensor, Tensor]:
        """Bounds of all layers, each of shape (1, d_1 + ... + d_L)."""
        return bounds(self.intervals, self.sizes[1:], self.weights[0].detach())


def matrix_hessian(energy: LiftedEnergy) -> BlockTridiagonal:
    """Return H of the free phase of an energy whose operators are matrices."""
    hessian = energy.free_hessian
    assert isinstance(hessian, BlockTridiagonal)
    return hessian
