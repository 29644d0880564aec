"""Losses of the prediction, by implicit differentiation: cross-entropy with a margin, cross-entropy, squared error."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

from lrrn.energy import LiftedEnergy
from lrrn.learning.objectives import Batch, needed
from lrrn.network import LRRN
from lrrn.network.implicit import minimiser


@final
@dataclass(frozen=True)
class Margin:
    """Cross-entropy with a margin, on an output layer with unit-norm rows. It is meant for large certified radii.

    The loss is T * CE((y - m onehot) / T). Rows of norm one prevent the margin from growing with the output weights.

    Parameters
    ----------
    margin : float or (float, float), default=1.0
        m, the lead that the right score should have. A pair gives the values at the beginning and at the end of training, with
        linear interpolation between.
    temperature : float or (float, float), default=0.25
        T, the softness of the loss; likewise.
    adversarial_eps : float or (float, float), default=0.0
        Size of the adversarial perturbation of every training input, along the gradient of its loss; likewise. The attack has
        one gradient step. Its direction is approximate: the adjoint stops at 30 times the tolerance of other solves, or at
        0.03, and so does the solve at the original input if it is on the dual of a wide layer. The loss at the perturbed input
        and its gradient are as exact as any.
    """

    margin: float | tuple[float, float] = 1.0
    temperature: float | tuple[float, float] = 0.25
    adversarial_eps: float | tuple[float, float] = 0.0

    capturable: ClassVar[bool] = True
    of_prediction: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("margin", -math.inf), ("temperature", math.ulp(0.0)), ("adversarial_eps", 0.0)):
            given = getattr(self, name)
            ends = given if isinstance(given, tuple) else (given,)
            fine = all(isinstance(end, numbers.Real) and math.isfinite(end) and float(end) >= least for end in ends)
            if not fine or len(ends) not in (1, 2):
                allowed = {"margin": "finite", "temperature": "finite and positive"}.get(name, "finite and at least 0")
                raise ValueError(f"{name} must be a number, or a pair of where it begins and ends, {allowed}; got {given!r}")

    def __call__(self, net: LRRN, batch: Batch) -> Tensor:
        """Predict with implicit differentiation and return the loss."""
        if self.adversarial_eps == 0:
            return self.loss(_scores(net, batch), batch)
        parameters = [p.detach() for p in net.energy_parameters(batch.x.dtype)]
        energy = net.energy_of(parameters)
        attacked = self._attacked(net, parameters, energy, batch)
        scores = _scores(net, attacked, energy)
        batch.activations = attacked.start
        return self.loss(scores, batch)

    def loss(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the loss of given scores."""
        temperature = at_progress(self.temperature, batch.progress)
        logits = self._logits(scores, batch)
        return temperature * functional.cross_entropy(logits, needed(batch.label), reduction="none")

    def _logits(self, scores: Tensor, batch: Batch) -> Tensor:
        margin, temperature = at_progress(self.margin, batch.progress), at_progress(self.temperature, batch.progress)
        return (scores - margin * needed(batch.target)) / temperature

    def _attacked(self, net: LRRN, parameters: list[Tensor], energy: LiftedEnergy, batch: Batch) -> Batch:
        """Perturb the inputs along the gradient; solves there warm-start from the activations at the original inputs."""
        with torch.enable_grad():
            x = batch.x.detach().requires_grad_(True)
            z = minimiser(net.energy_of, batch.policy.for_direction(), x, parameters, batch.start, energy)
            scores = energy.output(x, z)
            (slope,) = torch.autograd.grad(scores, x, self.attack_slope(scores.detach(), batch))
        return replace(batch, x=self.attacked(slope, batch), start=z.detach())

    def attack_slope(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the derivative in the scores of what an attack increases.

        That is log sum exp over the wrong logits, minus the right logit, times T. The loss is an increasing function of it, and
        its gradient does not vanish in float32 where the loss is small.
        """
        target = needed(batch.target)
        return self._logits(scores, batch).masked_fill_(target > 0, -math.inf).softmax(1).sub_(target)

    def attacked(self, slope: Tensor, batch: Batch) -> Tensor:
        """Return the inputs, moved by ``adversarial_eps`` along the derivatives in x."""
        size = torch.linalg.vector_norm(slope, dim=1, keepdim=True)
        step = at_progress(self.adversarial_eps, batch.progress) / torch.where(size > 0, size, 1)
        return torch.addcmul(batch.x, slope, step)

    def row_norms(self, rows: int) -> list[tuple[float, float]]:
        """Return the least and the largest norm of every row of the output weights: one."""
        return [(1.0, 1.0)] * rows

    @torch.no_grad()
    def project(self, net: LRRN) -> None:
        """Normalise every row of the output weights."""
        w = net.W[-1]
        w.div_(torch.linalg.vector_norm(w, dim=1, keepdim=True).clamp_(min=torch.finfo(w.dtype).tiny))


@final
class CrossEntropy:
    """Cross-entropy of the scores, by implicit differentiation."""

    capturable = of_prediction = True

    def __call__(self, net: LRRN, batch: Batch) -> Tensor:
        """Predict and return the loss."""
        return self.loss(_scores(net, batch), batch)

    def loss(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the loss of given scores."""
        return functional.cross_entropy(scores, needed(batch.label), reduction="none")


@final
@dataclass(frozen=True)
class SquaredError:
    """Half the squared distance of the prediction from the target, by implicit differentiation.

    Parameters
    ----------
    max_norm : float or tuple of float, optional
        Upper bound on the norm of each row of the output weights; a tuple has one per row.
    """

    max_norm: float | tuple[float, ...] | None = None

    capturable: ClassVar[bool] = True
    of_prediction: ClassVar[bool] = True

    def __post_init__(self) -> None:
        bounds = () if self.max_norm is None else self.max_norm if isinstance(self.max_norm, tuple) else (self.max_norm,)
        if not all(isinstance(bound, numbers.Real) and float(bound) >= 0 for bound in bounds):
            raise ValueError(f"the norm of output weights needs bounds of at least 0; got {self.max_norm!r}")

    def __call__(self, net: LRRN, batch: Batch) -> Tensor:
        """Predict and return the loss."""
        return self.loss(_scores(net, batch), batch)

    def loss(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the loss of given predictions."""
        return 0.5 * (scores - needed(batch.target)).square().sum(-1)

    def row_norms(self, rows: int) -> list[tuple[float, float]]:
        """Return the least and the largest norm of every row of the output weights, or nothing if there is no bound."""
        if self.max_norm is None:
            return []
        bounds = self.max_norm if isinstance(self.max_norm, tuple) else (self.max_norm,) * rows
        if len(bounds) != rows:
            raise ValueError(f"the norm of output weights needs one bound, or one for each of {rows} outputs; got {bounds}")
        return [(0.0, float(bound)) for bound in bounds]

    @torch.no_grad()
    def project(self, net: LRRN) -> None:
        """Scale rows of the output weights down to the bound."""
        w = net.W[-1]
        for row, (_, bound) in zip(w, self.row_norms(len(w)), strict=False):
            norm = torch.linalg.vector_norm(row).clamp_(min=torch.finfo(w.dtype).tiny)
            row.mul_((bound / norm).clamp_(max=1))


def at_progress(value: Any, progress: Any) -> Any:
    """Return a number, or the linear interpolation of a pair at ``progress``."""
    if isinstance(value, tuple):
        begin, end = value
        return begin + (end - begin) * progress
    return value


def _scores(net: LRRN, batch: Batch, energy: LiftedEnergy | None = None) -> Tensor:
    z = net.minimise(batch.x, batch.start, energy, batch.policy)
    batch.activations = z.detach()
    return net.read_out(batch.x, z)
