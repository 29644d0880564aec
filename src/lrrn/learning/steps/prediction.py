"""Gradients of losses of the prediction on the CPU: solves, loss and derivatives in one compiled call."""

from __future__ import annotations

from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor

from lrrn.kernels.cpu.arguments import Course, Loss, Network, PackedQP, Rule
from lrrn.learning.flat import FlatParameters
from lrrn.learning.losses import CrossEntropy, Margin, SquaredError, at_progress
from lrrn.learning.monitor import SolveCounts
from lrrn.learning.objectives import Batch, Objective
from lrrn.learning.settings import Settings
from lrrn.learning.steps.base import course_samples, edges_of, parts_of, shares
from lrrn.network import LRRN
from lrrn.network.policy import SolvePolicy
from lrrn.network.small_batch import CACHED, SWEEPS, Structure, fit, gram, structure_of
from lrrn.runtime.threads import side_by_side


@final
class CompiledPrediction:
    """Differentiates a loss of the prediction, at adversarial inputs if asked for.

    It computes the same as :class:`Autograd`. A large batch is split into parts, for several threads. One that is still too
    large, or that has a slowly converging solve, is passed to the next backend.
    """

    name = "compiled prediction"
    reads_rows = False

    def __init__(self, net: LRRN, objective: Objective, flat: FlatParameters, aim: float) -> None:
        self._net, self._objective, self._flat = net, cast(Margin | CrossEntropy | SquaredError, objective), flat
        self._first = net.W[0].detach()
        self._fixed: tuple[Any, ...] = ()
        attacks = isinstance(objective, Margin) and objective.adversarial_eps != 0
        self._solves = 4 if attacks else 2

    @staticmethod
    def applies(net: LRRN, objective: Objective, settings: Settings) -> bool:
        """Whether the objective has a derivative in closed form, and the network is dense and on the CPU."""
        differentiable = isinstance(objective, Margin | CrossEntropy | SquaredError)
        return differentiable and net.is_dense and net.W[0].device.type == "cpu"

    @torch.no_grad()
    def gradients(self, batch: Batch, weight: Tensor | None, n: int, rows: Tensor | None) -> float | None:
        """Return None if the batch is too large, or has a slowly converging solve; ``batch.start`` is then the last iterate."""
        here, parts = len(batch.x), 1
        structure = self._structure(batch.policy, batch.x)
        if structure is None:
            # larger parts than those of an energy loss: each packs a Hessian
            energy = self._net.energy_now()
            parts = max(2, parts_of(here // 2, structure_of(energy).plan[3] if energy.n_free else 0))
            structure = self._structure(batch.policy, batch.x[: -(-here // parts)])
        if structure is None or batch.target is None or batch.x.dtype != self._flat.vector.dtype:
            return None
        from lrrn.kernels.cpu.predicted_loss import prediction_step
        from lrrn.kernels.cpu.training_step import add_up

        share = shares(batch.x, weight, here, n).numpy()
        z = batch.x.new_zeros((here, structure.lo.shape[1]))
        cold = batch.start is None and structure.from_zero
        if not cold:
            torch.clamp(z if batch.start is None else batch.start.to(z.dtype), structure.lo, structure.hi, out=z)
        goal, loss = batch.policy.tolerances(z.dtype), self._loss(np.array([float(batch.progress)]), batch.policy)
        data = batch.x.contiguous().numpy(), batch.target.contiguous().numpy()
        arrays = np.arange(here), share, z.numpy(), np.empty(here)
        sweeps, done, edges = np.zeros((parts, 1), np.int64), [False] * parts, edges_of(here, parts)
        gradient = self._flat.gradient.numpy()
        others = np.empty((parts - 1, len(gradient)), gradient.dtype)
        if structure.reconstructs:
            gram(self._first, torch.from_numpy(self._fixed[-1]))

        def work(part: int) -> None:
            network, layers, *phases, square = self._fixed
            if part:  # every part writes a Hessian of its own, which takes less time than to wait for one
                phases = [
                    one._replace(panels=np.zeros_like(one.panels), inverse_diagonal=np.zeros_like(one.inverse_diagonal))
                    for one in phases
                ]
            picked, factors, start, losses = (array[edges[part] : edges[part + 1]] for array in arrays)
            done[part] = prediction_step(
                network, layers, *phases, square, *data, picked, factors, loss, 0, goal.aim, goal.limit, SWEEPS, cold,
                start, sweeps[part], losses, others[part - 1] if part else gradient,
            )  # fmt: skip

        side_by_side(work, parts)
        self._count(batch.policy, self._solves * here if all(done) else 0, int(sweeps.sum()))
        if not all(done):
            batch.start = z
            return None
        add_up(others, gradient)
        batch.activations = z
        return float(arrays[-1] @ share)

    def takes_several(self, size: int, policy: SolvePolicy) -> bool:
        """Whether batches need not be split, and W_0 is small."""
        return self._first.nbytes <= CACHED and self._structure(policy, self._first.new_empty((size, 0))) is not None

    def several(self, course: Course, progress: np.ndarray, rule: Rule, policy: SolvePolicy, totals: np.ndarray) -> int:
        """Take steps in one compiled call, except without targets."""
        structure = self._structure(policy, torch.from_numpy(course.inputs[: course.size]))
        if structure is None or not course.targets.size:
            return 0
        from lrrn.kernels.cpu.several_steps import prediction_steps

        goal = policy.tolerances(self._first.dtype)
        taken = prediction_steps(
            *self._fixed, self._first.numpy(), self._loss(progress, policy), goal.aim, goal.limit, SWEEPS, structure.from_zero,
            course, rule, self._flat.gradient.numpy(), totals,
        )  # fmt: skip
        self._count(policy, self._solves * course_samples(course, taken), int(totals[1]))
        return taken

    def _structure(self, policy: SolvePolicy, x: Tensor) -> Structure | None:
        """Return the structure of the network if the compiled passes apply to such a batch; prepare their arguments."""
        structure, first = fit(policy, self._net.energy_now(), x), self._first
        if structure is not None and not self._fixed:
            flat, (layout, place, units, length) = self._flat.vector.numpy(), structure.plan
            bounds, wide = (structure.lo.numpy(), structure.hi.numpy()), flat.dtype == np.float64
            panels, inverse = (np.empty(size if wide else 0, np.float32) for size in (length, units))
            width = len(first) if structure.reconstructs else 0
            self._fixed = (
                Network(flat, *structure.layers), structure.n_free,
                PackedQP(np.zeros(length, flat.dtype), layout, np.zeros(units, flat.dtype), place, *bounds),
                PackedQP(panels, layout, inverse, place, *bounds),
                np.empty((width, width), flat.dtype),
            )  # fmt: skip
        return structure

    def _loss(self, progress: np.ndarray, policy: SolvePolicy) -> Loss:
        """Return the arguments that describe the loss, for steps at some shares of training."""
        objective, ones = self._objective, np.ones(len(progress))
        attack = policy.direction_tolerances(self._first.dtype)
        if isinstance(objective, Margin):
            numbers = (objective.margin, objective.temperature, objective.adversarial_eps)
            margin, temperature, size = (at_progress(number, progress) * ones for number in numbers)
            return Loss(False, margin, temperature, size, attack.aim, attack.limit)
        return Loss(isinstance(objective, SquaredError), 0 * ones, ones, 0 * ones, attack.aim, attack.limit)

    @staticmethod
    def _count(policy: SolvePolicy, samples: int, sweeps: int) -> None:
        """Add to the counts of the trainer; other observers are notified only of solves that are not compiled."""
        if isinstance(policy.observer, SolveCounts):
            policy.observer.samples += samples
            policy.observer.sweeps += sweeps
