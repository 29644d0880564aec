"""Training objectives: callables from a network and a batch to a loss per sample.

The energy objectives use the envelope theorem: their gradient is that of energies at fixed activations. The others
differentiate the prediction by implicit differentiation. Any callable of the same form is an objective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lrrn.energy import LiftedEnergy
from lrrn.energy.derivatives import Phase, energy_gradients
from lrrn.network import LRRN
from lrrn.network.policy import SolvePolicy
from lrrn.qp import BoxQP, QPSolution


@dataclass
class Batch:
    """A mini-batch, as passed to an objective.

    Attributes
    ----------
    x : Tensor of shape (n, d_0)
        Inputs.
    target : Tensor of shape (n, d_L) or None
        Target vectors: one-hot labels or regression targets. Rows without a label are zero.
    label : int64 Tensor of shape (n,) or None
        Class indices, -1 for unlabelled samples.
    start : Tensor of shape (n, dim) or None
        Stacked activations for a warm start of the free phase.
    activations : Tensor of shape (n, dim) or None
        Set by the objective: the stacked activations of its solution of the free phase.
    progress : float or Tensor of shape ()
        Completed share of training, from 0 to 1.
    policy : SolvePolicy
        The trainer's policy for the solves; its observer counts them. Pass it to ``net(batch.x, batch.policy)``.
    """

    x: Tensor
    target: Tensor | None = None
    label: Tensor | None = None
    start: Tensor | None = None
    activations: Tensor | None = field(default=None, repr=False)
    progress: float | Tensor = 0.0
    policy: SolvePolicy = field(default=SolvePolicy(), repr=False)

    def select(self, rows: Tensor) -> None:
        """Restrict ``x``, ``target`` and ``label``, which hold all samples, to some rows."""
        self.x = self.x.index_select(0, rows)
        self.target = None if self.target is None else self.target.index_select(0, rows)
        self.label = None if self.label is None else self.label.index_select(0, rows)


class Objective(Protocol):
    """A loss.

    It may also have a method ``project(net)``, called before training and after every step, and two boolean attributes.
    ``row_norms(rows)`` says that ``project`` only limits the norms of rows of the output weights.
    ``capturable``: neither the loss nor ``project`` synchronises with a CUDA device, so that a CUDA graph can contain them.
    ``of_prediction``: the loss depends on the prediction alone, so that the solver tolerance of a prediction suffices.
    """

    def __call__(self, net: LRRN, batch: Batch) -> Tensor:
        """Return the loss of each sample, of shape (n,), differentiable in the parameters."""
        ...


@final
@dataclass(frozen=True)
class EnergyTerm:
    """A signed sum of energies at fixed activations, per sample, with its value already known."""

    energy: LiftedEnergy
    x: Tensor  # (n, d_0)
    value: Tensor  # (n,): the sum
    phases: list[tuple[float, list[Tensor]]]  # pairs of a sign and the activations
    rows: Tensor | None = None  # the samples of the batch that the term applies to; all of them if None
    share: Tensor | None = None  # a factor on each of them, already included in value

    def gradients(self, weight: Tensor) -> list[Tensor]:
        """Return the derivatives of the weighted sum over samples, for ``weight`` of shape (n,)."""
        column = weight[:, None] if self.rows is None else weight[self.rows, None]
        column = column if self.share is None else column * self.share[:, None]
        balanced = sum(sign for sign, _ in self.phases) == 0
        phases = [Phase(blocks, column if sign == 1 else sign * column) for sign, blocks in self.phases]
        return energy_gradients(self.energy, self.x, phases, balanced).flat()


class EnergyObjective(ABC):
    """An objective that is a sum of energies at fixed activations. By the envelope theorem, its derivatives are theirs.

    A call returns losses for autograd, whose backward pass computes those derivatives in closed form.

    Attributes
    ----------
    signs : (float, float) or None
        Factors on the free and on the clamped energy, if the objective is a weighted sum of these two. Then the trainer may
        compute it by a compiled step.
    """

    signs: ClassVar[tuple[float, float] | None] = None

    @abstractmethod
    def terms(self, net: LRRN, batch: Batch) -> list[EnergyTerm]:
        """Solve the necessary phases and return the energies to sum."""

    def __call__(self, net: LRRN, batch: Batch) -> Tensor:
        """Return the loss of each sample, differentiable in the parameters."""
        return _FixedEnergies.apply(self.terms(net, batch), batch.x, *net.energy_parameters())


def total(terms: Sequence[EnergyTerm], n: int) -> Tensor:
    """Sum the values of terms per sample, of shape (n,)."""
    losses = terms[0].value if terms[0].rows is None else terms[0].value.new_zeros(n)
    for term in terms[1:] if terms[0].rows is None else terms:
        losses = losses + term.value if term.rows is None else losses.index_add(0, term.rows, term.value)
    return losses


def total_gradients(terms: Sequence[EnergyTerm], weight: Tensor) -> list[Tensor]:
    """Sum the derivatives of terms, weighted per sample."""
    gradients = terms[0].gradients(weight)
    for term in terms[1:]:
        gradients = [a + b for a, b in zip(gradients, term.gradients(weight), strict=True)]
    return gradients


@final
class _FixedEnergies(torch.autograd.Function):
    """Autograd function with precomputed values and closed-form derivatives."""

    @staticmethod
    def forward(ctx: Any, terms: Sequence[EnergyTerm], x: Tensor, *_: Tensor) -> Tensor:
        ctx.terms = terms
        return total(terms, len(x)).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *total_gradients(ctx.terms, grad_outputs[0])


@final
class FreeEnergy(EnergyObjective):
    """The paper's unsupervised loss (eq. unsupervised): E(z*(x); x)."""

    signs = (1.0, 0.0)
    capturable = True

    def terms(self, net: LRRN, batch: Batch) -> list[EnergyTerm]:
        """Infer the free phase."""
        energy = net.energy_now()
        return [_free_term(energy, batch.x, _free(energy, batch)[1], 1.0)]


@final
class ClassEnergy(EnergyObjective):
    """The paper's class-specific loss (eq. class_specific): E(zhat(x, y); x), predicted by the label of least energy."""

    signs = (0.0, 1.0)
    capturable = True

    def terms(self, net: LRRN, batch: Batch) -> list[EnergyTerm]:
        """Infer the clamped phase."""
        energy, target = net.energy_now(), needed(batch.target)
        start = None if batch.start is None else batch.start[:, : sum(energy.sizes[1:-1])]
        clamped = batch.policy.solve(energy.clamped(batch.x, target), "clamped phase", start)
        blocks = energy.activations(batch.x, clamped.z, target)
        return [EnergyTerm(energy, batch.x, energy.value(batch.x, blocks), [(1.0, blocks)])]


@final
class Contrastive(EnergyObjective):
    """The paper's supervised loss (eq. contrastive): E(zhat(x, y); x) - E(z*(x); x)."""

    signs = (-1.0, 1.0)
    capturable = True

    def terms(self, net: LRRN, batch: Batch) -> list[EnergyTerm]:
        """Infer the free phase, then the clamped phase with a warm start from it."""
        energy = net.energy_now()
        qp, free = _free(energy, batch)
        return [_gap_term(batch.policy, energy, batch.x, needed(batch.target), qp, free)]


@final
@dataclass(frozen=True)
class SemiSupervised(EnergyObjective):
    """Contrastive loss on labelled samples plus ``weight`` times the free energy on all; optionally with self-training.

    Parameters
    ----------
    weight : float, default=0.0001
        lambda, the weight of the free energy.
    self_training : float, default=0.0
        Weight of the contrastive loss of unlabelled samples with their predicted class as pseudo-label, where the margin of
        the prediction is above ``confidence``.
    confidence : float, default=0.5
        Margin above which a prediction is a pseudo-label. Targets are one-hot, so a margin of one is a perfect fit.
    """

    weight: float = 0.0001
    self_training: float = 0.0
    confidence: float = 0.5

    def terms(self, net: LRRN, batch: Batch) -> list[EnergyTerm]:
        """Infer the free phase of all samples, and the clamped phase of those whose label is not -1."""
        energy = net.energy_now()
        qp, free = _free(energy, batch)
        terms = [_free_term(energy, batch.x, free, self.weight)]
        target, known = needed(batch.target), needed(batch.label) >= 0
        weight = known.to(batch.x.dtype)
        if self.self_training:
            lead, guess = energy.activations(batch.x, free.z)[-1].topk(2, dim=-1)
            sure = ~known & (lead[:, 0] - lead[:, 1] > self.confidence)
            target = torch.where(known[:, None], target, functional.one_hot(guess[:, 0], target.shape[1]).to(target))
            weight = weight + self.self_training * sure
        rows = weight.nonzero().squeeze(1)
        if rows.numel() > 0:
            gap = _gap_term(batch.policy, energy, batch.x[rows], target[rows], qp.take(rows), free.take(rows))
            terms.append(replace(gap, rows=rows, value=gap.value * weight[rows], share=weight[rows]))
        return terms


def _free(energy: LiftedEnergy, batch: Batch) -> tuple[BoxQP, QPSolution]:
    qp = energy.free(batch.x)
    free = batch.policy.solve(qp, "free phase", batch.start)
    batch.activations = free.z
    return qp, free


def _free_term(energy: LiftedEnergy, x: Tensor, free: QPSolution, weight: float) -> EnergyTerm:
    blocks = energy.activations(x, free.z)
    return EnergyTerm(energy, x, weight * energy.value(x, blocks), [(weight, blocks[: energy.n_free])])


def _gap_term(policy: SolvePolicy, energy: LiftedEnergy, x: Tensor, target: Tensor, qp: BoxQP, free: QPSolution) -> EnergyTerm:
    """Return the term E(zhat) - E(z*), given the free phase and its solution."""
    clamped_qp = energy.clamp(qp, target)
    clamped = policy.solve(clamped_qp, "clamped phase", free.z[:, : clamped_qp.dim])
    up = energy.activations(x, clamped.z, target)
    down = list(free.z.split(energy.free_sizes, dim=-1)) if energy.n_free else []
    if energy.n_layers == 1:
        value = energy.value(x, up) - energy.value(x, energy.activations(x, free.z))
    else:
        value = clamped.value(clamped_qp) - free.value(qp) + _constant(energy, target)
    return EnergyTerm(energy, x, value, [(1.0, up), (-1.0, down)])


def _constant(energy: LiftedEnergy, target: Tensor) -> Tensor:
    """E(0, ..., 0, y) - E(0, ..., 0): the constants of the two phases differ in the last layer only."""
    a, beta = energy.discounts[-1], energy.beta[-1]
    b, c = energy.b[-1], energy.c[-1]
    constant = 0.5 * a * (target if b is None else target - b).square().sum(-1)
    if beta:
        back = energy.operators[-1].adjoint(target)
        constant += 0.5 * a * beta * (back if c is None else back - c).square().sum(-1)
    if not energy.eliminated:
        constant -= 0.5 * a * (0.0 if b is None else b.square().sum())
        constant -= 0.5 * a * beta * (0.0 if c is None else c.square().sum())
    return constant


def needed(value: Tensor | None) -> Tensor:
    """Return a tensor that an objective requires; raise if it is None."""
    if value is None:
        raise ValueError("this objective needs targets y, and none were given")
    return value
