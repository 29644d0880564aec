"""Small batches on the CPU: the minimiser and its derivative in one compiled call each.

For ten samples of a network of a hundred units, the arithmetic takes a fraction of a millisecond, but a hundred calls of torch
take several milliseconds. Batches that do not converge within a few sweeps fall back to the general solvers. These kernels
call SciPy's BLAS, whose threads would cost more than they save. They are therefore used only inside ``one_thread``, which every
fit enters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from lrrn.energy import LiftedEnergy
from lrrn.energy.constraints import Interval, bounds
from lrrn.kernels.cpu.arguments import Network, PackedQP
from lrrn.linalg import blocks
from lrrn.network.policy import SolvePolicy, Tolerances
from lrrn.qp import QPSolution
from lrrn.runtime.threads import holds_one_thread
from lrrn.solvers.coordinate_descent import SINGLE_FROM, THREAD_WORK, panel_plan

SWEEPS = 64
"""Maximum number of sweeps of a solve."""

CACHED = 2**19
"""Size of W, in bytes, up to which the compiled W W^T is faster than that of BLAS."""


@final
class Minimum(NamedTuple):
    """Result of a solve of the free phase.

    The solution, the scale of its residuals, whether all samples converged, and, if requested, the output.
    """

    solution: QPSolution
    scale: Tensor
    converged: bool
    output: Tensor


@final
class Adjoint(NamedTuple):
    """The solution of the adjoint, the scale of its residuals, and derivatives in x, if requested."""

    solution: QPSolution
    scale: Tensor
    d_x: Tensor | None


@final
class SmallBatch:
    """The free phase of one batch and its adjoint.

    It keeps no reference to its results: together with the autograd node, one would form a reference cycle. The parameters
    are all W, then all b, then all c, in one vector.
    """

    def __init__(self, structure: Structure, parameters: Tensor, x: Tensor, tolerances: Tolerances) -> None:
        self.tolerances, self._parameters, self._structure = tolerances, parameters.detach(), structure
        flat, self._x = self._parameters.numpy(), x.detach().contiguous().numpy()
        layout, place, units, length = structure.plan
        lo, hi, wide = structure.lo.numpy(), structure.hi.numpy(), flat.dtype == np.float64
        panels, inverse = (np.empty(size if wide else 0, np.float32) for size in (length, units))
        self._fixed = (
            Network(flat, *structure.layers), structure.n_free,
            PackedQP(np.zeros(length, flat.dtype), layout, np.zeros(units, flat.dtype), place, lo, hi),
            PackedQP(panels, layout, inverse, place, lo, hi),
        )  # fmt: skip
        self._z = np.zeros((len(x), lo.shape[1]), flat.dtype)

    def minimise(self, start: Tensor | None, with_output: bool = False) -> Minimum:
        """Solve the free phase, with an optional warm start of shape (n, dim)."""
        from lrrn.kernels.cpu.small_batch import forward

        structure, tolerances, z = self._structure, self.tolerances, torch.from_numpy(self._z)
        cold = start is None and structure.from_zero
        if not cold:
            torch.clamp(z if start is None else start.to(z.dtype), structure.lo, structure.hi, out=z)
        d_0, d_1 = structure.layers[3][:2].tolist()
        square = self._parameters.new_empty((d_1, d_1) if structure.reconstructs else (0, 0))
        if structure.reconstructs:
            gram(self._parameters[: d_0 * d_1].view(d_1, d_0), square)
        report, output = _Report(self._z), np.empty((len(z) if with_output else 0, structure.outputs), self._z.dtype)
        converged = forward(
            *self._fixed,
            square.numpy(),
            self._x,
            tolerances.aim,
            tolerances.limit,
            SWEEPS,
            False,
            cold,
            self._z,
            output,
            *report.arrays,
        )
        return Minimum(report.solution(z, converged), report.scale, converged, torch.from_numpy(output))

    def adjoint(self, given: Tensor, out: Tensor, with_x: bool, of_output: bool = False) -> Adjoint | None:
        """Solve the adjoint for the derivatives of a loss in the minimiser; return None if it takes too many sweeps.

        With ``of_output``, derivatives in the output are given instead. Derivatives in the parameters are written to ``out``,
        unless it is empty. ``with_x`` asks for derivatives in x.
        """
        from lrrn.kernels.cpu.small_batch import backward

        tolerances, w = self.tolerances, np.zeros_like(self._z)
        report = _Report(w)
        d_x = np.empty((len(w) if with_x else 0, self._x.shape[1]), w.dtype)
        done = backward(
            *self._fixed, self._x, tolerances.aim, tolerances.limit, SWEEPS,
            self._z, given.contiguous().numpy(), of_output, *report.arrays, w, d_x, out.numpy(),
        )  # fmt: skip
        if not done:
            return None
        return Adjoint(report.solution(torch.from_numpy(w), True), report.scale, torch.from_numpy(d_x) if with_x else None)


def fit(policy: SolvePolicy, energy: LiftedEnergy, x: Tensor) -> Structure | None:
    """Return the structure of the network for the compiled passes, or None if they do not apply to this batch.

    The batch must be on the CPU, not empty, and too small for a second thread. BLAS must be limited to one thread. The policy
    must allow coordinate descent.
    """
    if (
        not holds_one_thread()
        or policy.fixed_sweeps is not None
        or policy.solver not in ("auto", "coordinate_descent")
        or policy.max_sweeps < SWEEPS
        or x.device.type != "cpu"
        or x.dtype not in (torch.float32, torch.float64)
        or not energy.n_free
        or energy.layers is not None
        or not x.shape[0]
    ):
        return None
    structure = structure_of(energy)
    total = structure.plan[3]
    return structure if total < SINGLE_FROM and x.shape[0] * total < THREAD_WORK else None


def gram(w: Tensor, out: Tensor) -> None:
    """Write W W^T to ``out``, bitwise symmetric."""
    if w.numel() * w.itemsize <= CACHED and w.is_contiguous():
        from lrrn.kernels.cpu import gram as _gram_numba

        _gram_numba.gram(w.numpy(), out.numpy())
    else:
        out.copy_(blocks.gram(w))


class _Report:
    """Output arrays of a kernel that describe its solve."""

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
    """Arguments of compiled kernels that describe a network, apart from its parameters."""

    layers: tuple[np.ndarray, ...]  # all fields of lrrn.kernels.cpu.arguments.Network but the parameters
    n_free: int  # number of layers that are unknowns of the free phase
    plan: tuple[np.ndarray, np.ndarray, int, int]  # panel plan of the free phase
    lo: Tensor  # (1, dim): its bounds
    hi: Tensor
    from_zero: bool  # whether zero is feasible
    reconstructs: bool  # whether the first layer has a reconstruction term, so that W_0 W_0^T is needed
    outputs: int  # width of the output


def structure_of(energy: LiftedEnergy) -> Structure:
    """Return the structure of a network; results are cached."""
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
    n_free = n - 1 if intervals[-1].is_free and beta[-1] == 0 else n
    lengths = [above * below for below, above in pairwise(sizes)]
    lengths += [size if there else 0 for size, there in zip(sizes[1:], has_b, strict=True)]
    lengths += [size if there else 0 for size, there in zip(sizes[:-1], has_c, strict=True)]
    places = np.array([0, *accumulate(lengths[:-1])], np.int64)
    places[n:][~np.array([*has_b, *has_c])] = -1
    kind = np.float64 if dtype == torch.float64 else np.float32
    discounts, betas = np.array([gamma**k for k in range(n)]), np.array(beta)
    scales = (discounts.astype(kind), (discounts * betas).astype(kind), (discounts * (1 + betas)).astype(kind))
    lo, hi = bounds(intervals[:n_free], sizes[1 : n_free + 1], torch.empty(0, dtype=dtype))
    layers = (*(places[i * n : (i + 1) * n].copy() for i in range(3)), np.array(sizes, np.int64), *scales)
    from_zero = all(i.lo <= 0 <= i.hi for i in intervals[:n_free])
    return Structure(layers, n_free, panel_plan(sizes[1 : n_free + 1]), lo, hi, from_zero, beta[0] > 0, sizes[-1])
