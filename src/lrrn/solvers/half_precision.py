"""Accelerated steps on a CUDA device: products in half precision, refined until the residual says so.

Half precision alone stops at three digits. So a call works on a correction: the gradient at z is known in full precision, the
correction is scaled to the size of a projected step, a number of cheap steps improve it, and it is added. Every call gains up
to three digits; the loop looks at the residual in the dtype of the solve. Networks of up to 128 units go through one kernel
that keeps its samples on chip (:class:`Tiles`), wider ones take a matrix product and one pass over the samples a step
(:class:`Rows`, or :class:`Equations` where no bound is in the way). No call waits for the device: a CUDA graph can hold them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import BoxQP
from lrrn.runtime.devices import has_kernels
from lrrn.solvers.base import once_per_hessian, recompute

ON_CHIP = 128
"""Most units of a network that the kernel of :class:`Tiles` takes."""
IN_ROWS = 8192
"""Most units that the kernel of :class:`Rows` takes."""
UP, DOWN = 4, 9
"""Squarings for the largest and for the smallest eigenvalue: a bound on the one, an estimate of the other."""
FARTHEST = 3e4
"""Half precision ends at 65,504, and a point ahead may be anywhere."""
ROUNDS, STEPS = 2, 16
"""Fewest refinements in one call of the kernel of :class:`Tiles`, and most steps in each."""
SPREAD = 50.0
"""Largest ratio of two entries of a layer's diagonal that have one unit."""
MOST_SQUARED = 4096
"""Most units of a Hessian that is squared for its smallest eigenvalue."""
LONGEST = 48
"""Most steps of :class:`Rows` and :class:`Equations` on one correction: beyond that, half precision leaves little to gain."""


def fits_on_chip(qp: BoxQP) -> bool:
    """Whether the kernel of :class:`Tiles` can take a problem."""
    return 0 < qp.dim <= ON_CHIP and has_kernels(qp.q)


def fits_in_rows(qp: BoxQP) -> bool:
    """Whether that of :class:`Rows` can."""
    return 0 < qp.dim <= IN_ROWS and has_kernels(qp.q)


def rounds_and_steps(sweeps: int) -> tuple[int, int]:
    """Divide sweeps into refinements and the steps of each."""
    rounds = min(max(ROUNDS, -(-sweeps // STEPS)), sweeps)
    return rounds, sweeps // rounds


def tile_and_warps(n: int) -> tuple[int, int]:
    """Return the samples of a program of the kernel of :class:`Tiles`, and its warps."""
    # as long as there is a multiprocessor for every program, it may have more warps
    return (16, 8) if n <= 2048 else (16, 4)


def largest_by_squaring(a: Tensor, times: int, from_below: bool = False) -> Tensor:
    """Bound the largest eigenvalue of a positive semidefinite matrix by |A^(2^times)|_F^(1/2^times), up to rounding.

    It is too large by a factor of at most n^(1/2^(times + 1)), needs nothing but products, and waits for no result. With
    ``from_below``, a bound from the other side: with P = A^(2^(times - 1)), (|P^2|_F / |P|_F)^(1/2^(times - 1)), which is exact
    where the largest eigenvalue occurs many times and all others are far.
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
    """Return what the kernel reads: diag(H)^-1/2, the scaled Hessian in two halves, I - A / L, and 1 / L with the momentum."""
    dim, dense = h.dim, h.dense()
    width = max(16, 1 << (dim - 1).bit_length())
    unit, rates = (torch.empty(size, dtype=torch.float32, device=h.device) for size in (dim, 2))
    high, low, move = (torch.empty((width, width), dtype=torch.float16, device=h.device) for _ in range(3))
    # half a per cent of L is what the error of the smallest eigenvalue leaves to be told
    arrays = (dense, unit, high, low, move, rates)
    _kernels().prepare[(1,)](*arrays, dim, UP, DOWN, WIDTH=width, num_warps=16 if width > 64 else 4)
    return unit, high, low, move, rates


@final
class Tiles:
    """Runs the kernel, on z itself in float32 and on a scaled correction of it in float64.

    In float32 a call refines by itself, needs no gradient to begin with, and leaves that of its answer.
    """

    def __init__(self, qp: BoxQP) -> None:
        self._matrices = halves_and_rates(qp.hessian)
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
            # what is on a bound must be so to the last bit
            z.copy_(torch.where(correction <= lo, qp.lo, torch.where(correction >= hi, qp.hi, moved)))
        return spent

    def _launch(
        self, q: Tensor, z: Tensor, lo: Tensor, hi: Tensor, sweeps: int, found: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Improve z, and return how many sweeps each sample took."""
        n, dim = z.shape
        spent = torch.empty(n, dtype=torch.int64, device=z.device)
        width = self._matrices[1].shape[0]
        tile, warps = tile_and_warps(n)
        strides = (0 if len(bound) == 1 else dim for bound in (lo, hi))
        arrays = (q, z, lo, hi, *self._matrices, *((z, z) if found is None else found), spent)
        shape = {"WIDTH": width, "TILE": tile, "CHECK": found is not None, "num_warps": warps}
        _kernels().sweep[(-(-n // tile),)](*arrays, n, dim, *strides, *rounds_and_steps(sweeps), **shape)
        return spent

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        found, self._found = self._found, None
        return recompute(qp, z) if found is None else found

    def keep(self, rows: Tensor) -> None:
        """Nothing is kept from sample to sample."""


def layer_or_own(diagonal: Tensor) -> Tensor:
    """Return the mean of a layer's diagonal for all entries, or the entries where they differ by more than ``SPREAD``."""
    smallest, largest = diagonal.aminmax()
    return torch.where(largest > SPREAD * smallest, diagonal, diagonal.mean())


@once_per_hessian
def half_and_rate(h: BlockTridiagonal) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :class:`Rows` needs: units, A / L in half precision with A the Hessian in them, and 1 / L.

    A unit is for a whole layer, its mean diagonal to the power of -1/2, unless the largest entry there is more than ``SPREAD``
    times the smallest: then each has its own. In trained wide layers own ones make the condition number worse; where a few
    weights are far larger than the others, the layer's do.
    """
    unit = torch.cat([layer_or_own(part) for part in h.diagonal.split([block.shape[-1] for block in h.diag])]).rsqrt()
    a = h.scaled(unit).dense()
    # eight bits are enough for a step length, and the residual is looked at anyway
    rough = a.to(torch.bfloat16) if a.is_cuda else a
    inverse = (1 / (largest_by_squaring(rough, 4) * 1.01)).to(a.dtype)
    return unit, (a * inverse).half(), inverse


@once_per_hessian
def most_momentum(h: BlockTridiagonal) -> Tensor:
    """Return the momentum that is best for the condition number of A, by an estimate of its smallest eigenvalue."""
    _, matrix, _ = half_and_rate(h)
    rest = torch.eye(h.dim, dtype=torch.float32, device=h.device) - matrix
    largest = largest_by_squaring(rest.half(), DOWN, from_below=True)
    root = (1 - largest).clamp(min=1e-4).sqrt()
    return ((1 - root) / (1 + root)).float()


@final
class Rows:
    """Takes steps on a scaled correction: a product with A / L, then one kernel for the rest of a step, a program a sample.

    Momentum goes on from call to call: begun anew each time, it never gets going where the conditioning asks for it most. After
    ``LONGEST`` steps it is held to what the condition number asks for, which saves steps where there are many; to estimate that
    costs as much as some of them, so solves that are easy go without.
    """

    def __init__(self, qp: BoxQP) -> None:
        self._unit, self._matrix, self._inverse = half_and_rate(qp.hessian)
        # how far the point ahead is ahead, in scaled units, and the momentum's state
        self._lead: Tensor | None = None
        self._t = torch.ones(qp.n_samples, dtype=torch.float32, device=qp.q.device)
        self._taken = 0

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        n, dim = z.shape
        kernels, shape = _kernels(), _row_shape(dim)
        (lo, hi), strides = _bounds(qp)
        capped = dim <= MOST_SQUARED and self._taken >= LONGEST
        self._taken += sweeps
        most = most_momentum(qp.hessian) if capped else self._t
        push, down, up, here = (torch.empty((n, dim), dtype=torch.float32, device=z.device) for _ in range(4))
        ahead, product = (torch.empty((n, dim), dtype=torch.float16, device=z.device) for _ in range(2))
        size = z.new_empty(n)
        lead = torch.empty_like(z) if self._lead is None else self._lead
        given = (z, g.contiguous(), lo, hi, self._unit, self._inverse, lead)
        scaled = (push, down, up, here, ahead, size)
        kernels.begin_relax[(n,)](*given, *scaled, dim, *strides, FARTHEST, LEADS=self._lead is not None, **shape)
        for _ in range(sweeps):
            torch.mm(ahead, self._matrix, out=product)
            kernels.relax[(n,)](product, ahead, here, self._t, push, down, up, most, dim, FARTHEST, CAPPED=capped, **shape)
        kernels.end_relax[(n,)](
            z, lo, hi, self._unit, lead, self._t, down, up, here, ahead, size, dim, *strides, **shape
        )  # fmt: skip
        self._lead = lead
        return torch.full((n,), sweeps, dtype=torch.int64, device=z.device)

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        return _judged(qp, z)

    def keep(self, rows: Tensor) -> None:
        self._t = self._t[rows]
        if self._lead is not None:
            self._lead = self._lead[rows]


@final
class Equations:
    """Conjugate gradients on a scaled correction, for problems whose units are fixed or free: the adjoint.

    Directions go on from call to call, from the residual as recomputed.
    """

    def __init__(self, qp: BoxQP) -> None:
        self._unit, self._matrix, self._inverse = half_and_rate(qp.hessian)
        self._direction: Tensor | None = None

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        n, dim = z.shape
        kernels, shape = _kernels(), _row_shape(dim)
        (lo, hi), strides = _bounds(qp)
        direction, left, moved = (torch.empty((n, dim), dtype=torch.float32, device=z.device) for _ in range(3))
        half, product = (torch.empty((n, dim), dtype=torch.float16, device=z.device) for _ in range(2))
        # squared norm of what is left, and the factor by which the half-precision direction was shrunk
        state = torch.empty((n, 2), dtype=torch.float32, device=z.device)
        mask, size = torch.empty((n, dim), dtype=torch.int8, device=z.device), z.new_empty(n)
        kept = torch.empty_like(z) if self._direction is None else self._direction
        given = (g.contiguous(), lo, hi, self._unit, self._inverse, kept)
        scaled = (half, direction, left, moved, mask, state)
        kernels.begin_conjugate[(n,)](*given, *scaled, size, dim, *strides, KEPT=self._direction is not None, **shape)
        # conjugate gradients go as far in half the steps
        sweeps = -(-sweeps // 2)
        for _ in range(sweeps):
            torch.mm(half, self._matrix, out=product)
            kernels.conjugate[(n,)](product, *scaled, dim, **shape)
        kernels.end_conjugate[(n,)](z, self._unit, kept, direction, moved, size, dim, **shape)
        self._direction = kept
        return torch.full((n,), sweeps, dtype=torch.int64, device=z.device)

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        return _judged(qp, z)

    def keep(self, rows: Tensor) -> None:
        if self._direction is not None:
            self._direction = self._direction[rows]


def _judged(qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
    """Do what :func:`recompute` does, in a product and a kernel."""
    n, dim = z.shape
    g = qp.hessian.matmul(z)
    residual = torch.empty(n, dtype=torch.float64, device=z.device)
    (lo, hi), strides = _bounds(qp)
    _kernels().judge[(n,)](z, qp.q.contiguous(), lo, hi, g, residual, dim, *strides, **_row_shape(dim))
    return g, residual


def _bounds(qp: BoxQP) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Return the bounds as arrays without gaps, and how far apart the rows of each are: 0 if all samples share one."""
    lo, hi = qp.lo.contiguous(), qp.hi.contiguous()
    return (lo, hi), (0 if len(lo) == 1 else qp.dim, 0 if len(hi) == 1 else qp.dim)


def _row_shape(dim: int) -> dict[str, int]:
    """Return the padded width of a row, and the warps that go with it."""
    width = 1 << (dim - 1).bit_length()
    return {"WIDTH": width, "num_warps": 4 if width <= 512 else 8 if width <= 2048 else 16}


@cache
def _kernels() -> Any:
    """Import the kernels when one is first needed: Triton takes its time, and may be absent."""
    from lrrn.kernels.cuda import accelerated

    return accelerated
