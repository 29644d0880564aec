"""The fast way through a training step on the CPU: solves and derivatives of the paper's objectives in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from lrrn.compact import structure_of
from lrrn.learning.flat import FlatParameters
from lrrn.learning.monitor import SolveCounts
from lrrn.learning.objectives import Batch, EnergyObjective, Objective
from lrrn.network import LRRN
from lrrn.solvers.coordinate_descent import panel_plan
from lrrn.threads import side_by_side

SWEEPS = 32
"""Sweeps a phase may take here; a batch that needs more goes the general way, which can call in Newton's method."""
PART_ROWS, MOST_PARTS = 256, 8
"""A batch is cut into parts of at least so many rows, whatever the number of threads, so that sums do not depend on that."""


@final
class FusedStep:
    """Loss and derivatives of a signed sum of the free and the clamped energy.

    It does what :meth:`EnergyObjective.terms` and :func:`total_gradients` do, for the objectives that name their ``signs``. A
    batch with a solve that is slow to converge is handed back.

    Parameters
    ----------
    net : LRRN
    objective : EnergyObjective
        One for which :meth:`applies`.
    flat : FlatParameters
        The network's, attached.
    tol : float
        Relative residual to solve to; a batch with a residual above three times this is handed back.
    """

    def __init__(self, net: LRRN, objective: EnergyObjective, flat: FlatParameters, tol: float) -> None:
        energy = net.energy_now()
        signs = objective.signs
        assert signs is not None
        dtype = flat.vector.numpy().dtype
        self._dtype, self._tol, self._gradient = dtype, tol, flat.gradient.numpy()
        self._signs = tuple(dtype.type(sign) for sign in signs)
        self._phases = sum(1 for sign in signs if sign)
        hidden = energy.sizes[1:-1]
        self._free, self._hidden = sum(energy.free_sizes), sum(hidden)
        self._lo, self._hi = energy.box
        self._first, self._gram = net.W[0].detach(), energy.weights[0].new_empty((energy.sizes[1], energy.sizes[1]))
        self._zero = torch.zeros_like(self._lo).clamp_(self._lo, self._hi)[:, : self._free]
        self._zero_is_feasible = not bool(self._zero.any())
        self._fixed = (
            flat.vector.numpy(),
            *structure_of(energy).layers,
            energy.eliminated,
            panel_plan(energy.free_sizes),
            panel_plan(hidden),
            *(bound[:, :units].contiguous().numpy() for units in (self._free, self._hidden) for bound in (self._lo, self._hi)),
            self._gram.numpy(),
        )

    @staticmethod
    def applies(net: LRRN, objective: Objective) -> bool:
        """Whether the objective is made of the two phases, and the network one the CPU kernels take."""
        w = net.W[0]
        return (
            isinstance(objective, EnergyObjective)
            and objective.signs is not None
            and len(net.W) > 1
            and w.device.type == "cpu"
            and w.dtype in (torch.float32, torch.float64)
            and net.solver in ("auto", "coordinate_descent")
        )

    def __call__(self, batch: Batch, weight: Tensor, counts: SolveCounts) -> float | None:
        """Set the derivatives of the weighted sum of losses and return that sum; None if the batch should go the general way.

        ``batch.activations`` gets the free phase's activations; after None, ``batch.start`` is how far it came.
        """
        x, n, target = batch.x, batch.x.shape[0], batch.target
        cold = batch.start is None and self._zero_is_feasible
        if cold:
            start = np.zeros((n, self._free), self._dtype)
        else:
            given = self._zero.repeat(n, 1) if batch.start is None else batch.start
            start = given.clamp(self._lo[:, : self._free], self._hi[:, : self._free]).numpy()
        if target is None and self._signs[1] == 0:
            target = x.new_empty((n, 0))
        if target is None:
            raise ValueError("this objective needs targets y, and none were given")
        clamped = np.empty((n, self._hidden), self._dtype) if self._signs[0] else start[:, : self._hidden].copy()
        torch.mm(self._first, self._first.mT, out=self._gram)
        parts = max(1, min(MOST_PARTS, n // PART_ROWS))
        sweeps, losses, converged = np.zeros((parts, 1), np.int64), np.empty(n, self._dtype), [False] * parts
        arrays = (x.numpy(), target.numpy(), weight.numpy(), start, clamped, losses)
        if parts == 1:
            converged[0] = self._run(arrays, sweeps[0], cold, self._gradient)
        else:
            edges = [n * i // parts for i in range(parts + 1)]
            gradients = np.empty((parts, len(self._gradient)), self._dtype)

            def work(part: int) -> None:
                rows = [array[edges[part] : edges[part + 1]] for array in arrays]
                converged[part] = self._run(rows, sweeps[part], cold, gradients[part])

            side_by_side(work, parts)
            gradients.sum(0, out=self._gradient)
        counts.sweeps += int(sweeps.sum())
        if not all(converged):
            reached = start if self._signs[0] else np.concatenate((clamped, start[:, self._hidden :]), 1)
            batch.start = torch.from_numpy(reached)
            return None
        counts.samples += n * self._phases
        batch.activations = torch.from_numpy(start) if self._signs[0] else None
        return float(losses @ arrays[2])

    def _run(self, arrays: Sequence[np.ndarray], sweeps: np.ndarray, cold: bool, gradient: np.ndarray) -> bool:
        from lrrn.learning._fused_numba import energy_step

        x, target, weight, start, clamped, losses = arrays
        gradient.fill(0)
        return energy_step(
            *self._fixed,
            x,
            target,
            weight,
            *self._signs,
            self._tol,
            SWEEPS,
            cold,
            start,
            clamped,
            sweeps,
            losses,
            gradient,
        )
