"""Accelerated steps on a CUDA device in mixed precision: products in half precision, with iterative refinement.

Half precision alone reaches three digits. Each call therefore computes a correction. The gradient at z is known in full
precision; the correction is scaled to the size of a projected step, improved by a number of cheap steps, and added to z. Every
call gains up to three digits. The loop checks the residual in the dtype of the solve. Networks of up to 128 units use one
kernel that keeps its samples on chip (:class:`Tiles`). Wider networks use one matrix product and one pass over the samples per
step (:class:`Rows`, or :class:`Equations` for problems without active bounds). No call synchronises with the device, so that
all of them can be captured in a CUDA graph.
"""

from __future__ import annotations

from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.linalg.split_products import BLOCK, LOW, product, row_shape, split_rows, splits
from lrrn.qp import BoxQP, Status
from lrrn.runtime.devices import has_kernels
from lrrn.solvers.base import Stepper, once_per_hessian, recompute

ON_CHIP = 128
"""Largest number of units that the kernel of :class:`Tiles` supports."""
IN_ROWS = 8192
"""Largest number of units that the kernel of :class:`Rows` supports."""
UP, DOWN = 4, 9
"""Numbers of matrix squarings for bounding the largest and for estimating the smallest eigenvalue."""
FARTHEST = 3e4
"""Limit on the extrapolated point, which may otherwise exceed the largest half-precision number, 65,504."""
ROUNDS, STEPS = 2, 16
"""Minimum number of refinements per call of the kernel of :class:`Tiles`, and maximum number of steps in each."""
SPREAD = 50.0
"""Largest ratio of two diagonal entries of a layer for which the layer has one common scale."""
MOST_SQUARED = 4096
"""Largest number of units for which the smallest eigenvalue is estimated by matrix squaring."""
WARM = 0.75
"""Share of the steps of the heavy ball that a solve takes if it starts at the solution for a perturbed input."""
LONGEST = 48
"""Maximum number of steps of :class:`Rows` and :class:`Equations` per correction; in half precision, more gain little."""


def fits_on_chip(qp: BoxQP) -> bool:
    """Whether the kernel of :class:`Tiles` supports a problem."""
    return 0 < qp.dim <= ON_CHIP and has_kernels(qp.q) and qp.has_matrix


def fits_in_rows(qp: BoxQP) -> bool:
    """Whether the kernel of :class:`Rows` supports a problem."""
    return 0 < qp.dim <= IN_ROWS and has_kernels(qp.q) and qp.has_matrix


def rounds_and_steps(sweeps: int) -> tuple[int, int]:
    """Divide sweeps into a number of refinements and a number of steps in each."""
    rounds = min(max(ROUNDS, -(-sweeps // STEPS)), sweeps)
    return rounds, sweeps // rounds


def tile_and_warps(n: int) -> tuple[int, int]:
    """Return the number of samples and of warps per program of the kernel of :class:`Tiles`."""
    # use more warps if every program has a multiprocessor of its own
    return (16, 8) if n <= 2048 else (16, 4)


def largest_by_squaring(a: Tensor, times: int, from_below: bool = False) -> Tensor:
    """Bound the largest eigenvalue of a positive semidefinite matrix by |A^(2^times)|_F^(1/2^times), up to rounding.

    It is too large by a factor of at most n^(1/2^(times + 1)), needs only matrix products, and does not synchronise with the
    device. With ``from_below`` it is a lower bound: with P = A^(2^(times - 1)), (|P^2|_F / |P|_F)^(1/2^(times - 1)). This one
    is exact if the largest eigenvalue has a high multiplicity and all others are far from it.
    """
    logarithm = torch.zeros((), dtype=torch.float64, device=a.device)
    for k in range(times + 1):
        size = torch.linalg.matrix_norm(a, dtype=torch.promote_types(a.dtype, torch.float32))
        size = size.clamp(min=torch.finfo(a.dtype).tiny)
        logarithm = logarithm + size.double().log() / 2**k
        if k < times:
            a = a / size.to(a.dtype)
            a = a @ a
    if from_below:
        logarithm = logarithm + size.double().log() / 2**times
    return logarithm.exp()


@once_per_hessian
def halves_and_rates(h: BlockTridiagonal) -> tuple[Tensor, ...]:
    """Return the arguments of the kernel: diag(H)^-1/2, A as a sum of two float16 matrices, I - A / L, and 1 / L with momentum.

    A is the Hessian scaled to a unit diagonal, and L a bound on its largest eigenvalue.
    """
    dim, dense = h.dim, h.dense()
    width = max(16, 1 << (dim - 1).bit_length())
    unit, rates = (torch.empty(size, dtype=torch.float32, device=h.device) for size in (dim, 2))
    high, low, move = (torch.empty((width, width), dtype=torch.float16, device=h.device) for _ in range(3))
    # the smallest eigenvalue is resolved to about half a per cent of L only
    arrays = (dense, unit, high, low, move, rates)
    _on_chip().prepare[(1,)](*arrays, dim, UP, DOWN, WIDTH=width, num_warps=16 if width > 64 else 4)
    return unit, high, low, move, rates


@final
class Tiles(Stepper):
    """Runs the on-chip kernel: on z itself for float32 problems, on a scaled correction of z for float64 problems.

    In float32 a call performs the refinement itself, needs no initial gradient, and returns the gradient at its result.
    """

    def __init__(self, qp: BoxQP) -> None:
        self._matrices = halves_and_rates(qp.matrix)
        self._found: tuple[Tensor, Tensor] | None = None
        self.refines = qp.q.dtype == torch.float32

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        n, dim = z.shape
        if self.refines:
            self._found = torch.empty_like(z), torch.empty(n, dtype=torch.float64, device=z.device)
            spent = self._launch(qp.q.contiguous(), z, qp.lo.contiguous(), qp.hi.contiguous(), sweeps, self._found)
        else:
            size = torch.linalg.vector_norm(g, dim=-1, keepdim=True, ord=float("inf")).clamp(min=1e-300)
            correction = torch.zeros((n, dim), dtype=torch.float32, device=z.device)
            lo, hi = (((bound - z) / size).float() for bound in (qp.lo, qp.hi))
            spent = self._launch((-g / size).float(), correction, lo, hi, sweeps)
            moved = qp.project(torch.addcmul(z, correction.double(), size))
            # units on a bound must equal the bound bitwise
            z.copy_(torch.where(correction <= lo, qp.lo, torch.where(correction >= hi, qp.hi, moved)))
        return spent

    def _launch(
        self, q: Tensor, z: Tensor, lo: Tensor, hi: Tensor, sweeps: int, found: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Improve z, and return the number of sweeps of each sample."""
        n, dim = z.shape
        spent = torch.empty(n, dtype=torch.int64, device=z.device)
        width = self._matrices[1].shape[0]
        tile, warps = tile_and_warps(n)
        strides = (0 if len(bound) == 1 else dim for bound in (lo, hi))
        arrays = (q, z, lo, hi, *self._matrices, *((z, z) if found is None else found), spent)
        shape = {"WIDTH": width, "TILE": tile, "CHECK": found is not None, "num_warps": warps}
        _on_chip().sweep[(-(-n // tile),)](*arrays, n, dim, *strides, *rounds_and_steps(sweeps), **shape)
        return spent

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        found, self._found = self._found, None
        return recompute(qp, z) if found is None else found

    def keep(self, rows: Tensor) -> None:
        """Do nothing: there is no state per sample."""


def layer_or_own(diagonal: Tensor) -> Tensor:
    """Return the mean of a layer's diagonal for all entries, or the entries themselves if their ratio exceeds ``SPREAD``."""
    smallest, largest = diagonal.aminmax()
    return torch.where(largest > SPREAD * smallest, diagonal, diagonal.mean())


@once_per_hessian
def half_and_rate(h: BlockTridiagonal) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of :class:`Rows`: scales of the variables, A / L in two parts, A the scaled Hessian, and rates.

    A layer has one common scale, its mean diagonal to the power of -1/2, unless its largest diagonal entry is more than
    ``SPREAD`` times the smallest: then each variable has its own scale. In trained wide layers, individual scales make the
    condition number worse. Where a few weights are far larger than the others, a common scale does. The second part, in
    float32 only, is what half precision leaves out; see :mod:`lrrn.linalg.split_products`. The rates are 1 / L and, for a
    Hessian a I + b W W^T, step and momentum of the heavy ball: its smallest eigenvalue is at least a.
    """
    kernels = _in_rows()
    unit = torch.empty(h.dim, dtype=h.dtype, device=h.device)
    for block, part in zip(h.diag, unit.split(h.sizes), strict=True):
        kernels.scales[(1,)](block.contiguous(), part, len(part), SPREAD, **row_shape(len(part)))
    dense = h.diag[0].contiguous() if len(h.diag) == 1 else h.dense()
    rates = torch.ones(3, dtype=torch.float32, device=h.device)
    # the diagonal of A is one on average, so its largest eigenvalue is between 1 and n, and over the root of n its powers stay
    # within the range of float32. Eight bits are enough for a step size, and residuals are checked
    times, rough = h.dim**0.5, torch.bfloat16 if dense.is_cuda else h.dtype
    least, b, w = (0.0, 0.0, dense) if h.factor is None else h.factor
    added = least if w.shape[1] < h.dim else 0.0
    if added:
        # W W^T and W^T W have the same eigenvalues except for zero, and the latter is smaller
        tall = (((b / times) ** 0.5 * unit)[:, None] * w).to(rough)
        power = tall.mT @ tall
    else:
        power, _ = _narrowed(dense, unit, rates / times, rough, False)
    for _ in range(UP):
        power = power @ power
    size = torch.linalg.matrix_norm(power, dtype=torch.float64)
    numbers = (h.dim, 0.5**UP, times, added, least, 1.01)
    kernels.rates[(1,)](size, unit, rates, *numbers, HEAVY=h.factor is not None, **row_shape(h.dim))
    return unit, *_narrowed(dense, unit, rates, torch.float16, splits(dense)), rates


def _narrowed(dense: Tensor, unit: Tensor, factor: Tensor, dtype: torch.dtype, split: bool) -> tuple[Tensor, Tensor]:
    """Return the scaled Hessian times a factor in another dtype and, with ``split``, what half precision leaves out."""
    high = torch.empty(dense.shape, dtype=dtype, device=dense.device)
    low = torch.empty_like(high) if split else high
    grid = (-(-dense.numel() // BLOCK),)
    _in_rows().narrow[grid](dense, unit, factor, high, low, len(dense), LOW, SPLIT=split, BLOCK=BLOCK, num_warps=4)
    return high, low


@once_per_hessian
def most_momentum(h: BlockTridiagonal) -> Tensor:
    """Return the optimal momentum for the condition number of A, from an estimate of its smallest eigenvalue."""
    _, matrix, _, _ = half_and_rate(h)
    rest = torch.eye(h.dim, dtype=torch.float32, device=h.device) - matrix
    largest = largest_by_squaring(rest.half(), DOWN, from_below=True)
    root = (1 - largest).clamp(min=1e-4).sqrt()
    return ((1 - root) / (1 + root)).float()


@final
class Rows(Stepper):
    """Accelerated steps on a scaled correction: a product with A / L, then one kernel with one program per sample.

    For a Hessian a I + b W W^T, whose smallest eigenvalue is known, the method is the heavy ball (Polyak, 1964), which takes
    about half as many steps as Nesterov's momentum. That needs no such eigenvalue, and is for all other problems. After
    ``LONGEST`` steps it is limited to the optimal value for the condition number, which reduces the number of steps of long
    solves. The estimate of that value costs as much as several steps, so short solves do without it.

    Momentum is kept from call to call. If it were reset in each call, it would never grow large enough for ill-conditioned
    problems.
    """

    def __init__(self, qp: BoxQP) -> None:
        self._unit, self._matrix, _, self._rates = half_and_rate(qp.matrix)
        self._heavy = qp.matrix.factor is not None
        self.warm_share = WARM if self._heavy else 1.0
        # extrapolated point minus current point, or last move, in scaled variables, and the state of Nesterov's momentum
        self._lead: Tensor | None = None
        self._t = self._rates if self._heavy else torch.ones(qp.n_samples, dtype=torch.float32, device=qp.q.device)
        self._taken = 0

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        n, dim = z.shape
        kernels, shape = _in_rows(), row_shape(dim)
        (lo, hi), strides = bounds_and_strides(qp)
        push, down, up, here = (torch.empty((n, dim), dtype=torch.float32, device=z.device) for _ in range(4))
        ahead, product = (torch.empty((n, dim), dtype=torch.float16, device=z.device) for _ in range(2))
        size = z.new_empty(n)
        lead = torch.empty_like(z) if self._lead is None else self._lead
        given = (z, g.contiguous(), lo, hi, self._unit, self._rates, lead)
        scaled = (push, down, up, here, ahead, size)
        kernels.begin_relax[(n,)](*given, *scaled, dim, *strides, FARTHEST, LEADS=self._lead is not None, **shape)
        if self._heavy:
            half = torch.empty_like(ahead)
            for k in range(sweeps):
                if k > 0:
                    torch.mm(half, self._matrix, out=product)
                arrays = (product, half, here, ahead, push, down, up, self._rates)
                kernels.roll[(n,)](*arrays, dim, FARTHEST, FIRST=k == 0, **shape)
        else:
            capped = dim <= MOST_SQUARED and self._taken >= LONGEST
            most = most_momentum(qp.matrix) if capped else self._t
            for _ in range(sweeps):
                torch.mm(ahead, self._matrix, out=product)
                arrays = (product, ahead, here, self._t, push, down, up, most)
                kernels.relax[(n,)](*arrays, dim, FARTHEST, CAPPED=capped, **shape)
        self._taken += sweeps
        found = (z, lo, hi, self._unit, lead, self._t, down, up, here, ahead, size)
        kernels.end_relax[(n,)](*found, dim, *strides, HEAVY=self._heavy, **shape)
        self._lead = lead
        return torch.full((n,), sweeps, dtype=torch.int64, device=z.device)

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        return _judged(qp, z, self.by_parts)

    def keep(self, rows: Tensor) -> None:
        if not self._heavy:
            self._t = self._t[rows]
        if self._lead is not None:
            self._lead = self._lead[rows]


@final
class Equations(Stepper):
    """Conjugate gradients on a scaled correction, for problems whose units are all fixed or free, such as the adjoint.

    Directions are kept from call to call and continue from the recomputed residual.
    """

    def __init__(self, qp: BoxQP) -> None:
        self._unit, self._matrix, _, self._rates = half_and_rate(qp.matrix)
        # the heavy ball takes about as many steps, Nesterov's momentum twice as many
        self._share = 1 if qp.matrix.factor is not None else 2
        self._direction: Tensor | None = None

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        n, dim = z.shape
        kernels, shape = _in_rows(), row_shape(dim)
        (lo, hi), strides = bounds_and_strides(qp)
        direction, left, moved = (torch.empty((n, dim), dtype=torch.float32, device=z.device) for _ in range(3))
        half, product = (torch.empty((n, dim), dtype=torch.float16, device=z.device) for _ in range(2))
        # squared norm of the remaining residual, and the factor by which the half-precision direction was divided
        state = torch.empty((n, 2), dtype=torch.float32, device=z.device)
        mask, size = torch.empty((n, dim), dtype=torch.int8, device=z.device), z.new_empty(n)
        kept = torch.empty_like(z) if self._direction is None else self._direction
        given = (g.contiguous(), lo, hi, self._unit, self._rates, kept)
        scaled = (half, direction, left, moved, mask, state)
        kernels.begin_conjugate[(n,)](*given, *scaled, size, dim, *strides, KEPT=self._direction is not None, **shape)
        sweeps = -(-sweeps // self._share)
        for _ in range(sweeps):
            torch.mm(half, self._matrix, out=product)
            kernels.conjugate[(n,)](product, *scaled, dim, **shape)
        kernels.end_conjugate[(n,)](z, self._unit, kept, direction, moved, size, dim, **shape)
        self._direction = kept
        return torch.full((n,), sweeps, dtype=torch.int64, device=z.device)

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        return _judged(qp, z, self.by_parts)

    def keep(self, rows: Tensor) -> None:
        if self._direction is not None:
            self._direction = self._direction[rows]


def _judged(qp: BoxQP, z: Tensor, by_parts: bool) -> tuple[Tensor, Tensor]:
    """Compute the same as :func:`recompute`; in float32 by products of parts, if they may be used and there are such."""
    n, dim = z.shape
    unit, high, low, rates = half_and_rate(qp.matrix)
    (lo, hi), strides = bounds_and_strides(qp)
    residual, split, shape = torch.empty(n, dtype=torch.float64, device=z.device), by_parts and splits(z), row_shape(dim)
    if split:
        g, (parts, size) = torch.empty_like(z), split_rows(z, unit)
        both, rest = product(parts, high), product(parts[:n], low)
    else:
        g = both = rest = qp.hessian.matmul(z)
        size = unit
    arrays = (z, qp.q.contiguous(), lo, hi, both, rest, unit, rates, size, g, residual)
    _in_rows().judge[(n,)](*arrays, n, dim, *strides, LOW, SPLIT=split, **shape)
    return g, residual


def statuses(gradient: Tensor, residual: Tensor, must: Tensor) -> Tensor:
    """Return the status of each sample after a fixed number of sweeps, in one kernel."""
    n, dim = gradient.shape
    status = torch.empty(n, dtype=torch.int64, device=gradient.device)
    arrays = (gradient.contiguous(), residual, must, status)
    _in_rows().settle[(n,)](*arrays, dim, NON_FINITE=int(Status.NON_FINITE), **row_shape(dim))
    return status


def bounds_and_strides(qp: BoxQP) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Return the bounds as contiguous arrays, and their row strides: 0 if all samples share the bounds."""
    lo, hi = qp.lo.contiguous(), qp.hi.contiguous()
    return (lo, hi), (0 if len(lo) == 1 else qp.dim, 0 if len(hi) == 1 else qp.dim)


@cache
def _on_chip() -> Any:
    """Import the kernels of narrow networks on first use: Triton is slow to import, and may be absent."""
    from lrrn.kernels.cuda import on_chip

    return on_chip


@cache
def _in_rows() -> Any:
    """Import the kernels of wider networks on first use."""
    from lrrn.kernels.cuda import in_rows

    return in_rows
