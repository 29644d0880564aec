"""Gradients of losses of the prediction on the CPU: compiled solves and derivatives, the loss in closed form, no autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import cast, final

import torch
from torch import Tensor

from lrrn.learning.flat import FlatParameters
from lrrn.learning.losses import CrossEntropy, Margin, SquaredError
from lrrn.learning.objectives import Batch, Objective
from lrrn.learning.settings import Settings
from lrrn.learning.steps.base import shares
from lrrn.network import LRRN
from lrrn.network.implicit import ADJOINT, FORWARD
from lrrn.network.small_batch import SmallBatch, fit


@final
class CompiledPrediction:
    """Differentiates a loss of the prediction by two compiled calls, and by two more for adversarial inputs.

    It computes the same as :class:`Autograd`. A batch that is too large, or that has a slowly converging solve, is passed to
    the next backend.
    """

    name = "compiled prediction"
    reads_rows = False

    def __init__(self, net: LRRN, objective: Objective, flat: FlatParameters, aim: float) -> None:
        self._net, self._objective, self._flat = net, cast(Margin | CrossEntropy | SquaredError, objective), flat

    @staticmethod
    def applies(net: LRRN, objective: Objective, settings: Settings) -> bool:
        """Whether the objective has a derivative in closed form, and the network is on the CPU."""
        return isinstance(objective, Margin | CrossEntropy | SquaredError) and net.W[0].device.type == "cpu"

    @torch.no_grad()
    def gradients(self, batch: Batch, weight: Tensor | None, n: int, rows: Tensor | None) -> Tensor | None:
        """Return None if the batch is too large, or has a slowly converging solve; ``batch.start`` is then the last iterate."""
        structure = fit(batch.policy, self._net.energy_now(), batch.x)
        if structure is None or batch.target is None or batch.x.dtype != self._flat.vector.dtype:
            return None
        loss, objective, moved = None, self._objective, batch
        small = SmallBatch(structure, self._flat.vector, batch.x, batch.policy.tolerances(batch.x.dtype))
        scores = self._scores(small, batch)
        if scores is not None and isinstance(objective, Margin) and objective.adversarial_eps != 0:
            d_x = self._derivatives(small, batch, objective.attack_slope(scores, batch), batch.x.new_empty(0))
            if d_x is None:
                return None
            moved = replace(batch, x=objective.attacked(d_x, batch), start=batch.activations)
            small = small.at(moved.x)
            scores = self._scores(small, moved)
        if scores is not None:
            share = shares(batch.x, weight, len(batch.x), n)
            slope = objective.slope(scores, batch).mul_(share[:, None])
            if self._derivatives(small, batch, slope, self._flat.gradient) is not None:
                loss = torch.dot(objective.loss(scores, batch), share)
        return loss

    @staticmethod
    def _scores(small: SmallBatch, batch: Batch) -> Tensor | None:
        """Solve the free phase and return the prediction; None if it does not converge within a few sweeps."""
        found = small.minimise(batch.start, with_output=True)
        if not found.converged:
            batch.start = found.solution.z
            return None
        batch.policy.observer(found.solution, found.scale, small.tolerances.must, FORWARD)
        batch.activations = found.solution.z
        return found.output

    @staticmethod
    def _derivatives(small: SmallBatch, batch: Batch, slope: Tensor, out: Tensor) -> Tensor | None:
        """Write derivatives in the parameters to ``out``; return those in x if ``out`` is empty, and None if this failed."""
        found = small.adjoint(slope, out, with_x=len(out) == 0, of_output=True)
        if found is None:
            return None
        batch.policy.observer(found.solution, found.scale, small.tolerances.must, ADJOINT)
        return out if found.d_x is None else found.d_x
