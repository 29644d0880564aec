"""Small batches on the CPU: the minimiser and its derivative in one compiled call each.

At ten samples of a network of a hundred units the arithmetic of both takes a fraction of a millisecond, and calling torch a
hundred times for it takes several. What does not converge within a few sweeps is left to the general way. These kernels call
SciPy's BLAS, whose threads would cost more than they save, so they work while ``one_thread`` is held,
as it is during every fit.
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
from torch._utils import _flatten_dense_tensors

from lrrn.energy import LiftedEnergy
from lrrn.energy.constraints import Interval, bounds
from lrrn.linalg import blocks
from lrrn.network.policy import SolvePolicy, Tolerances
from lrrn.qp import QPSolution
from lrrn.runtime.threads import holds_one_thread
from lrrn.solvers.coordinate_descent import SINGLE_FROM, THREAD_WORK, panel_plan

SWEEPS = 64
"""Sweeps a solve may take here."""

CACHED = 2**19
"""Bytes of a matrix up to which our own W W^T is faster than that of a BLAS."""


@final
class Minimum(NamedTuple):
    """How far a solve of the free phase came.

    What its residuals are relative to, whether all of them are small enough, and, if asked for, the output.
    """

    solution: QPSolution
    scale: Tensor
    converged: bool
    output: Tensor


@final
class Adjoint(NamedTuple):
    """The adjoint's solution, what its residuals are relative to, and derivatives in the parameters and, if asked for, in x."""

    solution: QPSolution
    scale: Tensor
    derivatives: Sequence[Tensor]
    d_x: Tensor | None


@final
class SmallBatch:
    """The free phase of one batch and its adjoint.

    It keeps no reference to what it returns: with the autograd node that would form a cycle.

    Parameters
    ----------
    structure : Structure
        That of the network, as :func:`fit` returns it.
    parameters : sequence of Tensor
        All W, then all b, then all c.
    x : Tensor of shape (n, d_0)
    tolerances : Tolerances
    """

    def __init__(self, structure: Structure, parameters: Sequence[Tensor], x: Tensor, tolerances: Tolerances) -> None:
        self.tolerances, self._parameters, self._structure = tolerances, parameters, structure
        self._flat, self._x = _flatten_dense_tensors(parameters).detach().numpy(), x.detach().contiguous().numpy()
        _, _, units, length = self._structure.plan
        wide = self._flat.dtype == np.float64
        self._hessian = (
            np.zeros(length, self._flat.dtype), np.zeros(units, self._flat.dtype),
            np.empty(length if wide else 0, np.float32), np.empty(units if wide else 0, np.float32),
        )  # fmt: skip
        self._z = np.zeros((len(x), structure.lo.shape[1]), self._flat.dtype)

    def minimise(self, start: Tensor | None, with_output: bool = False) -> Minimum:
        """Solve the free phase, from ``start`` of shape (n, dim) on if that is given."""
        from lrrn.kernels.cpu.small_batch import forward

        structure, tolerances, z = self._structure, self.tolerances, torch.from_numpy(self._z)
        cold = start is None and structure.from_zero
        if not cold:
            torch.clamp(z if start is None else start.to(z.dtype), structure.lo, structure.hi, out=z)
        w = self._parameters[0].detach()
        square = w.new_empty((w.shape[0],) * 2 if structure.reconstructs else (0, 0))
        if structure.reconstructs:
            gram(w, square)
        report, output = _Report(self._z), np.empty((len(z) if with_output else 0, structure.outputs), self._z.dtype)
        converged = forward(
            self._flat, *structure.layers, *structure.free, square.numpy(), self._x, tolerances.aim, tolerances.limit, SWEEPS,
            cold, *self._hessian, self._z, output, *report.arrays,
        )  # fmt: skip
        return Minimum(report.solution(z, converged), report.scale, converged, torch.from_numpy(output))

    def adjoint(self, given: Tensor, with_x: bool, of_output: bool = False) -> Adjoint | None:
        """Solve the adjoint for the derivatives of a loss in the minimiser, or return None if that takes too long.

        Parameters
        ----------
        given : Tensor of shape (n, dim)
            Those derivatives; or, of shape (n, d_L), those in the output.
        with_x : bool
            Whether derivatives in x are wanted.
        of_output : bool
            Which of the two is given.
        """
        from lrrn.kernels.cpu.small_batch import backward

        structure, tolerances, n = self._structure, self.tolerances, len(self._x)
        w = np.zeros_like(self._z)
        report = _Report(w)
        d_x = np.empty((n if with_x else 0, self._x.shape[1]), w.dtype)
        out = np.empty_like(self._flat)
        done = backward(
            self._flat, *structure.layers, *structure.free, self._x, tolerances.aim, tolerances.limit, SWEEPS,
            *self._hessian, self._z, given.contiguous().numpy(), of_output, *report.arrays, w, d_x, out,
        )  # fmt: skip
        if not done:
            return None
        lengths = [p.numel() for p in self._parameters]
        derivatives = [
            part if p.dim() == 1 else part.view(p.shape)
            for part, p in zip(torch.from_numpy(out).split(lengths), self._parameters, strict=True)
        ]
        solution = report.solution(torch.from_numpy(w), True)
        return Adjoint(solution, report.scale, derivatives, torch.from_numpy(d_x) if with_x else None)


@final
class Fit(NamedTuple):
    """What the compiled passes of a small batch work with."""

    structure: Structure
    tolerances: Tolerances


def fit(policy: SolvePolicy, energy: LiftedEnergy, x: Tensor) -> Fit | None:
    """Return None if a batch is not one for these kernels.

    It must be on the CPU, not empty, too small for a second thread, and BLAS held to one; and the policy one that coordinate
    descent can follow.
    """
    if (
        not holds_one_thread()
        or policy.fixed_sweeps is not None
        or policy.solver not in ("auto", "coordinate_descent")
        or policy.max_sweeps < SWEEPS
        or x.device.type != "cpu"
        or x.dtype not in (torch.float32, torch.float64)
        or not energy.n_free
        or not x.shape[0]
    ):
        return None
    structure = structure_of(energy)
    total = structure.plan[3]
    fits = total < SINGLE_FROM and x.shape[0] * total < THREAD_WORK
    return Fit(structure, policy.tolerances(x.dtype)) if fits else None


def gram(w: Tensor, out: Tensor) -> None:
    """Write W W^T to ``out``, symmetric to the last bit."""
    if w.numel() * w.itemsize <= CACHED and w.is_contiguous():
        from lrrn.kernels.cpu import gram as _gram_numba

        _gram_numba.gram(w.numpy(), out.numpy())
    else:
        out.copy_(blocks.gram(w))


class _Report:
    """Arrays that a kernel fills in about its solve."""

    def __init__(self, z: np.ndarray) -> None:
        n = len(z)
        self.arrays = (np.empty_like(z), np.empty(n), np.empty(n), np.zeros(n, np.int64))

    @property
    def scale(self) -> Tensor:
        return torch.from_numpy(self.arrays[2])

    def solution(self, z: Tensor, converged: bool) -> QPSolution:
        gradient, norms, _, used = (torch.from_numpy(array) for array in self.arrays)
        status = torch.from_numpy(np.zeros(len(self.arrays[3]), np.int64))
        return QPSolution(z, gradient, norms, used, status, ("coordinate_descent",), converged)


@final
@dataclass(frozen=True)
class Structure:
    """What compiled kernels read of a network besides its parameters.

    Attributes
    ----------
    layers : tuple of ndarray
        ``w_at``, ``b_at``, ``c_at``, ``sizes``, ``a``, ``ab`` and ``both``, as :mod:`lrrn.kernels.cpu.energy` explains them.
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
    outputs : int
        Width of the output.
    """

    layers: tuple[np.ndarray, ...]
    free: tuple[Any, ...]
    plan: Any
    lo: Tensor
    hi: Tensor
    from_zero: bool
    reconstructs: bool
    outputs: int


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
        sizes[-1],
    )
