"""Projected gradient with momentum, for wide layers and for any torch device.

Coordinates are scaled by diag(H)^-1/2, so the step is 1 / (L H_jj) with L a bound on the largest eigenvalue of the scaled
Hessian. Momentum restarts sample by sample when it points uphill (O'Donoghue and Candes, 2015). On a CUDA device, networks of a
few hundred units go through one kernel that keeps its samples on chip and computes in half precision, with refinement.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import Tensor

from lrrn import verified
from lrrn.blocks import BlockTridiagonal
from lrrn.qp import BoxQP
from lrrn.solvers.base import Stepper, once_per_hessian, recompute

ON_CHIP = 256
"""Most units of a network that the kernel takes."""
ROUNDS = 2
"""Refinements in one call of the kernel."""


@final
class Accelerated:
    """One matrix product an iteration over the whole batch."""

    name = "accelerated"
    chunk = 24
    patience = 5

    def obstacle(self, qp: BoxQP) -> str | None:
        """Return None: any device, any float type of at least 32 bits."""
        return None

    def begin(self, qp: BoxQP) -> Stepper:
        """Bound the spectrum."""
        return _Tiles(qp) if fits_on_chip(qp) else _Momentum(qp)


def fits_on_chip(qp: BoxQP) -> bool:
    """Whether the kernel can take a problem: it needs Triton, and a CUDA device unless Triton only interprets."""
    return qp.dim <= ON_CHIP and find_spec("triton") is not None and (qp.q.is_cuda or _interpreting())


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@once_per_hessian
def diagonal_and_step(h: BlockTridiagonal) -> tuple[Tensor, Tensor]:
    """Return diag(H) and the step of each unit, 1 / (L H_jj)."""
    if h.device.type == "cpu":
        double = h.to(torch.float64)
        largest: Any = verified.largest_eigenvalue(double.scaled(double.diagonal.rsqrt()))
    else:
        largest = largest_by_squaring(h.scaled(h.diagonal.rsqrt()).dense(), 4)
    # the float32 products of the iteration deviate from exact ones by a relative 1e-6 or so
    return h.diagonal, h.diagonal.reciprocal() / (largest * (1 + 1e-4))


def largest_by_squaring(a: Tensor, times: int) -> Tensor:
    """Bound the largest eigenvalue of a positive semidefinite matrix by |A^(2^times)|_F^(1/2^times), up to rounding.

    It is too large by a factor of at most n^(1/2^(times + 1)), needs nothing but products, and waits for no result.
    """
    logarithm = torch.zeros((), dtype=torch.float64, device=a.device)
    for k in range(times + 1):
        size = torch.linalg.matrix_norm(a).clamp(min=torch.finfo(a.dtype).tiny)
        logarithm = logarithm + size.double().log() / 2**k
        if k < times:
            a = a / size
            a = a @ a
    return logarithm.exp()


@final
class _Momentum:
    def __init__(self, qp: BoxQP) -> None:
        self._diagonal, self._step = diagonal_and_step(qp.hessian)
        self._ahead: Tensor | None = None
        self._t = torch.ones((qp.n_samples, 1), dtype=qp.q.dtype, device=qp.q.device)

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        ahead = z.clone() if self._ahead is None else self._ahead
        here, t = z, self._t
        for _ in range(sweeps):
            new = qp.project(torch.addcmul(ahead, qp.gradient(ahead), self._step, value=-1))
            move = new - here
            uphill = ((ahead - new) * move * self._diagonal).sum(-1, keepdim=True) > 0
            t_new = torch.where(uphill, 1.0, 0.5 * (1 + (1 + 4 * t * t).sqrt()))
            weight = torch.where(uphill, 0.0, (t - 1) / t_new)
            ahead, here, t = torch.addcmul(new, weight, move), new, t_new
        z.copy_(here)
        self._ahead, self._t = ahead, t
        return torch.full((qp.n_samples,), sweeps, dtype=torch.int64, device=z.device)

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        return recompute(qp, z)

    def keep(self, rows: Tensor) -> None:
        self._t = self._t[rows]
        if self._ahead is not None:
            self._ahead = self._ahead[rows]


@once_per_hessian
def halves_and_rates(h: BlockTridiagonal) -> tuple[Tensor, ...]:
    """Return what the kernel reads: diag(H)^-1/2, the scaled Hessian in two halves, I - A / L, and 1 / L with the momentum."""
    unit = h.diagonal.double().rsqrt()
    dim = h.dim
    width = max(16, 1 << (dim - 1).bit_length())
    a = torch.eye(width, dtype=torch.float64, device=h.device)
    a[:dim, :dim] = h.to(torch.float64).scaled(unit).dense()
    identity = torch.eye(width, dtype=torch.float64, device=h.device)
    largest = largest_by_squaring(a, 8) * (1 + 1e-3)
    # the same for L I - A bounds the smallest eigenvalue from below; half a per cent of L is what its error leaves to be told
    smallest = (largest - largest_by_squaring(largest * identity - a, 10)).clamp(min=0.0) + 1e-4 * largest
    root = (smallest / largest).sqrt()
    rates = torch.stack([1 / largest, (1 - root) / (1 + root)]).float()
    high = a.half()
    return unit.float(), high, (a - high.double()).half(), (identity - a / largest).half(), rates


@final
class _Tiles:
    """Runs the kernel, on z itself in float32 and on a scaled correction of it in float64."""

    def __init__(self, qp: BoxQP) -> None:
        self._matrices = halves_and_rates(qp.hessian)

    def advance(self, qp: BoxQP, z: Tensor, g: Tensor, sweeps: int, threshold: Tensor) -> Tensor:
        n, dim = z.shape
        steps = max(sweeps // ROUNDS, 1)
        rounds = max(sweeps // steps, 1)
        if z.dtype == torch.float32:
            self._launch(qp.q.contiguous(), z, qp.lo.contiguous(), qp.hi.contiguous(), rounds, steps)
        else:
            size = torch.linalg.vector_norm(g, dim=-1, keepdim=True, ord=float("inf")).clamp(min=1e-300)
            correction = torch.zeros((n, dim), dtype=torch.float32, device=z.device)
            lo, hi = (((bound - z) / size).float() for bound in (qp.lo, qp.hi))
            self._launch((-g / size).float(), correction, lo, hi, rounds, steps)
            moved = qp.project(torch.addcmul(z, correction.double(), size))
            # what is on a bound must be so to the last bit
            z.copy_(torch.where(correction <= lo, qp.lo, torch.where(correction >= hi, qp.hi, moved)))
        return torch.full((n,), rounds * steps, dtype=torch.int64, device=z.device)

    def _launch(self, q: Tensor, z: Tensor, lo: Tensor, hi: Tensor, rounds: int, steps: int) -> None:
        n, dim = z.shape
        width = self._matrices[1].shape[0]
        tile = 16 if n <= 4096 or width > 128 else 32
        strides = (0 if bound.shape[0] == 1 else dim for bound in (lo, hi))
        arrays = (q, z, lo, hi, *self._matrices)
        warps = 8 if width > 128 else 4
        _kernel()[(-(-n // tile),)](*arrays, n, dim, *strides, rounds, steps, WIDTH=width, TILE=tile, num_warps=warps)

    def check(self, qp: BoxQP, z: Tensor) -> tuple[Tensor, Tensor]:
        return recompute(qp, z)

    def keep(self, rows: Tensor) -> None:
        """Nothing is kept from sample to sample."""


@cache
def _kernel() -> Any:
    """Import the kernel when it is first needed: Triton takes its time, and may be absent."""
    from lrrn.solvers._accelerated_triton import sweep

    return sweep
