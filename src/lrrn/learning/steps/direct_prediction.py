"""Gradients of losses of the prediction, with any solver, in as few operations as possible."""

from __future__ import annotations

from dataclasses import replace
from typing import cast, final

import torch
from torch import Tensor

from lrrn.energy.adjoint import unit_adjoint
from lrrn.learning.flat import FlatParameters
from lrrn.learning.losses import CrossEntropy, Margin, SquaredError
from lrrn.learning.objectives import Batch, Objective
from lrrn.learning.settings import Settings
from lrrn.learning.steps.base import shares
from lrrn.network import LRRN
from lrrn.network.implicit import Asked, prediction_backward, through_output
from lrrn.network.policy import ADJOINT, FORWARD


@final
class DirectPrediction:
    """Differentiates a loss of the prediction, at adversarial inputs if asked for.

    It computes the same as :class:`Autograd`, but writes derivatives to their places instead of adding them up, which takes
    dozens of small kernels on a device. The solves of a step share what they find out about the units at a bound.
    """

    name = "direct prediction"
    reads_rows = False

    def __init__(self, net: LRRN, objective: Objective, flat: FlatParameters, aim: float) -> None:
        self._net, self._objective, self._flat = net, cast(Margin | CrossEntropy | SquaredError, objective), flat

    @staticmethod
    def applies(net: LRRN, objective: Objective, settings: Settings) -> bool:
        """Whether the objective is a loss of the prediction, and the network is dense and has hidden units."""
        of_prediction = isinstance(objective, Margin | CrossEntropy | SquaredError)
        return of_prediction and net.is_dense and net.energy_now().n_free > 0

    @torch.no_grad()
    def gradients(self, batch: Batch, weight: Tensor | None, n: int, rows: Tensor | None) -> Tensor:
        """Solve, attack if asked for, and differentiate."""
        objective, policy, x = self._objective, batch.policy, batch.x
        energy = self._net.energy_of([p.detach() for p in self._net.energy_parameters(x.dtype)])
        # the loss is the prediction's, and not a difference of energies
        energy = replace(energy, by_parts=True)
        attacks = isinstance(objective, Margin) and objective.adversarial_eps != 0
        direction = policy.for_direction() if attacks else policy
        z = direction.solve(energy.free(x), FORWARD, batch.start).z
        batch.activations, expected, start = z, energy.inside(z), None
        if isinstance(objective, Margin) and attacks:
            d_y = objective.attack_slope(energy.output(x, z), batch)
            # the length of the derivative in x does not matter
            adjoint, _ = unit_adjoint(energy, z, through_output(energy, d_y, z))
            start = direction.solve(replace(adjoint, expected=expected), ADJOINT).z
            x = objective.attacked(energy.to_inputs(start[:, : energy.sizes[1]]), batch)
            z = policy.solve(replace(energy.free(x), expected=expected), FORWARD, z).z
        scores = energy.output(x, z)
        with torch.enable_grad():
            losses = objective.loss(scores.requires_grad_(True), batch)
            mean = torch.dot(losses, shares(losses, weight, len(x), n))
            (d_y,) = torch.autograd.grad(mean, scores)
        if start is not None and policy.fixed_sweeps is None:
            # the attack's gradient is nearly that of the loss, up to its length
            start *= torch.linalg.vecdot(adjoint.q, through_output(energy, d_y, z))[:, None]
        else:
            start = None
        asked = Asked(policy, (False, *(True for _ in energy.weights)), expected, start)
        _, *derivatives = prediction_backward(asked, energy, d_y, x, z)
        torch.cat([cast(Tensor, part).reshape(-1) for part in derivatives], out=self._flat.gradient)
        return mean.detach()
