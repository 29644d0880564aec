"""Small batches on the CPU: the minimiser and its derivative in one compiled call each.

At ten samples of a network of a hundred units the arithmetic of both takes a fraction of a millisecond, and calling torch a
hundred times for it takes several. What does not converge within a few sweeps is left to the general way. These kernels call
SciPy's BLAS, whose threads would cost more than they save, so they work while :func:`~lrrn.threads.one_thread` is held, as it
is during every fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lrrn.constraints import Interval, bounds
from lrrn.energy import LiftedEnergy
from lrrn.qp import QPSolution
from lrrn.solvers.coordinate_descent import SINGLE_FROM, THREAD_WORK, panel_plan
from lrrn.threads import holds_one_thread

SWEEPS = 64
"""Sweeps a solve may take here."""
ENOUGH = 3.0
"""A residual within this factor of the aim will do, if it is within the tolerance: rounding may not allow more."""


@final
@dataclass(frozen=True)
class Tolerances:
    """Relative residuals: one that every sample must reach, and a tighter one to aim at."""

    must: float
    aim: float

    @property
    def limit(self) -> float:
        """The relative residual that will do."""
        return min(self.must, ENOUGH * self.aim)


@final
class Minimum(NamedTuple):
    """How far a solve of the free phase came, what its residuals are relative to, and whether all of them are small enough."""

    solution: QPSolution
    scale: Tensor
    converged: bool


@final
class Adjoint(NamedTuple):
    """The adjoint's solution, what its residuals are relative to, and derivatives in the parameters and, if asked for, in x."""

    solution: QPSolution
    scale: Tensor
    derivatives: Sequence[Tensor]
    d_x: Tensor


@final
class Compact:
    """The free phase of one batch and its adjoint.

    Nothing it returns is kept here: a function that kept its own result would never be freed.

    Parameters
    ----------
    energy : LiftedEnergy
        One that it :func:`applies` to.
    parameters : sequence of Tensor
        Those of the energy: all W, then all b, then all c.
    x : Tensor of shape (n, d_0)
    tolerances : Tolerances
    """

    def __init__(self, energy: LiftedEnergy, parameters: Sequence[Tensor], x: Tensor, tolerances: Tolerances) -> None:
        self.tolerances, self._parameters, self._structure = tolerances, parameters, structure_of(energy)
        self._flat, self._x = _flatten_dense_tensors(parameters).detach().numpy(), x.detach().contiguous().numpy()
        _, _, units, length = self._structure.plan
        self._panels, self._inverse = np.zeros(length, self._flat.dtype), np.zeros(units, self._flat.dtype)
        self._z = np.zeros((len(x), sum(energy.free_sizes)), self._flat.dtype)

    def minimise(self, start: Tensor | None) -> Minimum:
        """Solve the free phase, from ``start`` of shape (n, dim) on if that is given."""
        from lrrn._compact_numba import forward

        structure, tolerances, z = self._structure, self.tolerances, torch.from_numpy(self._z)
        cold = start is None and structure.from_zero
        if not cold:
            torch.clamp(z if start is None else start.to(z.dtype), structure.lo, structure.hi, out=z)
        w = self._parameters[0].detach()
        gram = torch.mm(w, w.mT) if structure.reconstructs else w[:0, :0]
        report = _Report(z)
        converged = forward(
            self._flat, *structure.layers, *structure.free, gram.numpy(), self._x, tolerances.aim, tolerances.limit, SWEEPS,
            cold, self._panels, self._inverse, self._z, *report.arrays,
        )  # fmt: skip
        return Minimum(report.solution(z), report.scale, converged)

    def adjoint(self, v: Tensor, with_x: bool) -> Adjoint | None:
        """Solve the adjoint for the derivatives ``v`` of a loss in the minimiser, or return None if that takes too long."""
        from lrrn._compact_numba import backward

        structure, tolerances = self._structure, self.tolerances
        w = torch.zeros_like(v, memory_format=torch.contiguous_format)
        report = _Report(w)
        d_x = (torch.empty if with_x else torch.zeros)(self._x.shape, dtype=v.dtype)
        out = torch.zeros(len(self._flat), dtype=v.dtype)
        done = backward(
            self._flat, *structure.layers, *structure.free, self._x, tolerances.aim, tolerances.limit, SWEEPS,
            self._panels, self._inverse, self._z, v.contiguous().numpy(), *report.arrays, w.numpy(),
            d_x[: len(v) if with_x else 0].numpy(), out.numpy(),
        )  # fmt: skip
        if not done:
            return None
        return Adjoint(report.solution(w), report.scale, _unflatten_dense_tensors(out, self._parameters), d_x)


def applies(energy: LiftedEnergy, x: Tensor) -> bool:
    """Whether a batch is one for these kernels: on the CPU, not empty, too small for a second thread, and BLAS held to one."""
    if (
        not holds_one_thread()
        or x.device.type != "cpu"
        or x.dtype not in (torch.float32, torch.float64)
        or not energy.n_free
        or not len(x)
    ):
        return False
    total = structure_of(energy).plan[3]
    return total < SINGLE_FROM and len(x) * total < THREAD_WORK


class _Report:
    """Arrays that a kernel fills in about its solve."""

    def __init__(self, z: Tensor) -> None:
        n = len(z)
        self.arrays = (np.empty_like(z.numpy()), np.empty(n), np.empty(n), np.zeros(n, np.int64))

    @property
    def scale(self) -> Tensor:
        return torch.from_numpy(self.arrays[2])

    def solution(self, z: Tensor) -> QPSolution:
        gradient, norms, _, used = (torch.from_numpy(array) for array in self.arrays)
        return QPSolution(z, gradient, norms, used, torch.zeros_like(used), ("coordinate_descent",))


@final
@dataclass(frozen=True)
class Structure:
    """What compiled kernels read of a network besides its parameters.

    Attributes
    ----------
    layers : tuple of ndarray
        ``w_at``, ``b_at``, ``c_at``, ``sizes``, ``a``, ``ab`` and ``both``, as :mod:`lrrn._energy_numba` explains them.
    free : tuple
        How many layers are unknowns of the free phase, the plan of its panels, and their bounds, each of shape (1, dim).
    plan : tuple
        That plan.
    lo, hi : Tensor of shape (1, dim)
        Those bounds.
    from_zero : bool
        Whether zero is feasible.
    reconstructs : bool
        Whether the first layer does, so that W_0 W_0^T is needed.
    """

    layers: tuple[np.ndarray, ...]
    free: tuple[Any, ...]
    plan: Any
    lo: Tensor
    hi: Tensor
    from_zero: bool
    reconstructs: bool


def structure_of(energy: LiftedEnergy) -> Structure:
    """Return the structure of a network, which is made once and remembered."""
    has_b, has_c = (tuple(part is not None for part in group) for group in (energy.b, energy.c))
    return _structure(energy.sizes, has_b, has_c, energy.beta, energy.gamma, energy.intervals, energy.weights[0].dtype)


@lru_cache(maxsize=64)
def _structure(
    sizes: tuple[int, ...],
    has_b: tuple[bool, ...],
    has_c: tuple[bool, ...],
    beta: tuple[float, ...],
    gamma: float,
    intervals: tuple[Interval, ...],
    dtype: torch.dtype,
) -> Structure:
    n = len(sizes) - 1
    layers = n - 1 if intervals[-1].is_free and beta[-1] == 0 else n
    lengths = [above * below for below, above in pairwise(sizes)]
    lengths += [size if there else 0 for size, there in zip(sizes[1:], has_b, strict=True)]
    lengths += [size if there else 0 for size, there in zip(sizes[:-1], has_c, strict=True)]
    places = np.array([0, *accumulate(lengths[:-1])], np.int64)
    places[n:][~np.array([*has_b, *has_c])] = -1
    kind = np.float64 if dtype == torch.float64 else np.float32
    discounts, betas = np.array([gamma**k for k in range(n)]), np.array(beta)
    scales = (discounts.astype(kind), (discounts * betas).astype(kind), (discounts * (1 + betas)).astype(kind))
    lo, hi = bounds(intervals[:layers], sizes[1 : layers + 1], torch.empty(0, dtype=dtype))
    plan = panel_plan(sizes[1 : layers + 1])
    at = (places[i * n : (i + 1) * n].copy() for i in range(3))
    free = (layers, plan, lo.numpy(), hi.numpy())
    return Structure(
        (*at, np.array(sizes, np.int64), *scales),
        free,
        plan,
        lo,
        hi,
        all(i.lo <= 0 <= i.hi for i in intervals[:layers]),
        beta[0] > 0,
    )
