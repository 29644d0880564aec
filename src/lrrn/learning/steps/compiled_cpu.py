"""A training step on the CPU in one compiled call: solves and derivatives of the paper's objectives."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast, final

import numpy as np
import torch
from torch import Tensor

from lrrn.kernels.cpu.arguments import Course, Network, PackedQP, Rule
from lrrn.learning.flat import FlatParameters
from lrrn.learning.monitor import SolveCounts
from lrrn.learning.objectives import Batch, EnergyObjective, Objective
from lrrn.learning.settings import Settings
from lrrn.learning.steps.base import MOST_PARTS, course_samples, edges_of, parts_of, shares
from lrrn.network import LRRN
from lrrn.network.policy import Observer, SolvePolicy
from lrrn.network.small_batch import CACHED, gram, structure_of
from lrrn.qp import DEFAULT_TOL
from lrrn.runtime.threads import side_by_side
from lrrn.solvers.coordinate_descent import panel_plan

SWEEPS = 32
"""Maximum sweeps per phase. A batch that needs more is passed to the next backend, which can use Newton's method."""

CARRIED = 25.0
"""Largest tolerance of the free phase, in units of that of the clamped phase, when only their difference counts."""


def free_tolerance(aim: float, dtype: torch.dtype) -> float:
    """Return the tolerance of the free phase in a contrastive step: at most that of a prediction, unless ``aim`` is larger."""
    return max(aim, min(CARRIED * aim, DEFAULT_TOL[dtype]))


@final
class CompiledCpu:
    """Loss and derivatives of a signed sum of the free and the clamped energy.

    It computes the same as :class:`Autograd`, for objectives with ``signs``. The free phase of a contrastive step may stop at
    25 times the tolerance, since its residual is carried over to the clamped phase. A batch with a slowly converging solve is
    passed to the next backend: one with a relative residual above three times the target ``aim``.
    """

    name = "compiled"
    reads_rows = True

    def __init__(self, net: LRRN, objective: Objective, flat: FlatParameters, aim: float) -> None:
        energy = net.energy_now()
        signs = cast(EnergyObjective, objective).signs
        assert signs is not None
        dtype = flat.vector.numpy().dtype
        self._dtype, self._gradient = dtype, flat.gradient.numpy()
        self._tols = (free_tolerance(aim, flat.vector.dtype) if sum(signs) == 0 else aim, aim)
        self._shares: tuple[int, int, Tensor] | None = None
        self._signs = tuple(dtype.type(sign) for sign in signs)
        free, clamped = (bool(sign) for sign in signs)
        self._phases = free + clamped
        hidden = energy.sizes[1:-1]
        self._free, self._hidden = sum(energy.free_sizes), sum(hidden)
        self._lo, self._hi = energy.box
        self._first, self._gram = net.W[0].detach(), energy.weights[0].new_empty((energy.sizes[1], energy.sizes[1]))
        self._zero = torch.zeros_like(self._lo).clamp_(self._lo, self._hi)[:, : self._free]
        self._zero_is_feasible = not bool(self._zero.any())
        phases = []
        for sizes in (energy.free_sizes, hidden):
            layout, place, units, length = panel_plan(sizes)
            bounds = (bound[:, : sum(sizes)].contiguous().numpy() for bound in (self._lo, self._hi))
            phases.append(PackedQP(np.zeros(length, dtype), layout, np.zeros(units, dtype), place, *bounds))
        self._work = len(phases[0].panels)
        if free:
            # the clamped phase warm-starts from the free phase and differs at the output, so sweeps go from last to first layer
            phases[1] = phases[1]._replace(layout=phases[1].layout[::-1].copy())
        network = Network(flat.vector.numpy(), *structure_of(energy).layers)
        self._shared = (network, energy.eliminated, self._gram.numpy(), free, clamped, *phases)
        self._fixed = (network, energy.eliminated, *phases)
        self._others = np.empty((MOST_PARTS - 1, 0), dtype)

    @staticmethod
    def applies(net: LRRN, objective: Objective, settings: Settings) -> bool:
        """Whether the objective is a signed sum of the two phases, and the CPU kernels support the network."""
        w = net.W[0]
        return (
            isinstance(objective, EnergyObjective)
            and objective.signs is not None
            and len(net.W) > 1
            and net.is_dense
            and w.device.type == "cpu"
            and w.dtype in (torch.float32, torch.float64)
            and net.solver in ("auto", "coordinate_descent")
            and settings.max_sweeps >= SWEEPS
        )

    @torch.no_grad()
    def gradients(self, batch: Batch, weight: Tensor | None, n: int, rows: Tensor | None) -> float | None:
        """Return None if the batch has a slowly converging solve; ``batch.start`` is then the last iterate."""
        here = (batch.x if rows is None else rows).shape[0]
        return self._weighted(batch, self._share(batch.x, weight, here, n), rows)

    def _share(self, like: Tensor, weight: Tensor | None, here: int, n: int) -> Tensor:
        """Return the factors of samples in the mean; equal factors rarely change between batches and are cached."""
        if weight is not None:
            return shares(like, weight, here, n)
        if self._shares is None or self._shares[:2] != (here, n):
            self._shares = here, n, shares(like, None, here, n)
        return self._shares[2]

    def _weighted(self, batch: Batch, weight: Tensor, rows: Tensor | None) -> float | None:
        from lrrn.kernels.cpu.training_step import add_up

        counts = batch.policy.observer
        x, n, target = batch.x, weight.shape[0], batch.target
        cold = batch.start is None and self._zero_is_feasible
        if cold:
            start = np.zeros((n, self._free), self._dtype)
        else:
            given = self._zero.repeat(n, 1) if batch.start is None else batch.start
            start = given.clamp(self._lo[:, : self._free], self._hi[:, : self._free]).numpy()
        if target is None and self._signs[1] == 0:
            target = x.new_empty((0, 0))
        if target is None:
            raise ValueError("this objective needs targets y, and none were given")
        clamped = np.empty((n, self._hidden), self._dtype) if self._signs[0] else start[:, : self._hidden].copy()
        data = x.numpy(), target.numpy()
        pick = np.arange(n) if rows is None else rows.numpy()
        arrays = (pick, weight.numpy(), start, clamped, np.empty(n, self._dtype))
        parts = parts_of(n, self._work)
        sweeps, converged = np.zeros((parts, 1), np.int64), [False] * parts
        if parts == 1:
            self._prepare()
            converged[0] = self._run(data, arrays, sweeps[0], cold, self._gradient)
        else:
            edges, ready = edges_of(n, parts), threading.Event()
            if self._others.shape[1] == 0:
                self._others = np.empty((MOST_PARTS - 1, len(self._gradient)), self._dtype)
            others = self._others[: parts - 1]

            def work(part: int) -> None:
                if part == 0:  # the part of the calling thread; the other threads start later
                    try:
                        self._prepare()
                    finally:
                        ready.set()
                ready.wait()
                mine = [array[edges[part] : edges[part + 1]] for array in arrays]
                converged[part] = self._run(data, mine, sweeps[part], cold, others[part - 1] if part else self._gradient)

            side_by_side(work, parts)
            add_up(others, self._gradient)
        spent = int(sweeps.sum())
        if not all(converged):
            reached = start if self._signs[0] else np.concatenate((clamped, start[:, self._hidden :]), 1)
            batch.start = torch.from_numpy(reached)
            self._count(counts, 0, spent)
            return None
        self._count(counts, n * self._phases, spent)
        batch.activations = torch.from_numpy(start) if self._signs[0] else None
        return float(arrays[4] @ arrays[1])

    def takes_several(self, size: int, policy: SolvePolicy) -> bool:
        """Whether batches are too small to be split, and W_0 is small."""
        return parts_of(size, self._work) == 1 and self._first.nbytes <= CACHED

    def several(self, course: Course, progress: np.ndarray, rule: Rule, policy: SolvePolicy, totals: np.ndarray) -> int:
        """Take steps in one compiled call, except without the targets it needs."""
        from lrrn.kernels.cpu.several_steps import energy_steps

        if self._signs[1] and not course.targets.size:
            return 0
        network, eliminated, *phases = self._fixed
        taken = energy_steps(
            network, eliminated, self._first.numpy(), self._gram.numpy(), *phases, *self._signs, *self._tols, SWEEPS,
            self._zero_is_feasible, course, rule, self._gradient, totals,
        )  # fmt: skip
        self._count(policy.observer, self._phases * course_samples(course, taken), int(totals[1]))
        return taken

    @staticmethod
    def _count(counts: Observer, samples: int, sweeps: int) -> None:
        """Add to the counts of the trainer; other observers are notified only of solves that are not compiled."""
        if isinstance(counts, SolveCounts):
            counts.samples += samples
            counts.sweeps += sweeps

    def _prepare(self) -> None:
        from lrrn.kernels.cpu.training_step import prepare

        gram(self._first, self._gram)
        prepare(*self._shared)

    def _run(
        self,
        data: tuple[np.ndarray, np.ndarray],
        arrays: Sequence[np.ndarray],
        sweeps: np.ndarray,
        cold: bool,
        gradient: np.ndarray,
    ) -> bool:
        from lrrn.kernels.cpu.training_step import energy_step

        rows, weight, start, clamped, losses = arrays
        return energy_step(
            *self._fixed, *data, rows, weight, *self._signs, *self._tols, SWEEPS, cold, start, clamped, sweeps, losses, gradient
        )
