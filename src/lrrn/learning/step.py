"""What one training step does: the gradients of a batch, then the update."""

from __future__ import annotations

from typing import cast, final

import torch
from torch import Tensor

from lrrn.learning.augment import image_side, shifted
from lrrn.learning.captured import CapturedSteps
from lrrn.learning.flat import FlatParameters
from lrrn.learning.flat_adam import FlatAdam
from lrrn.learning.fused import SWEEPS, FusedStep
from lrrn.learning.fused_kernels import FusedKernels
from lrrn.learning.monitor import SolveCounts, layer_norms, start_vectors
from lrrn.learning.objectives import Batch, EnergyObjective, Objective, total, total_gradients
from lrrn.learning.settings import Data, Settings
from lrrn.network import LRRN
from lrrn.qp import DEFAULT_TOL

AIM = {torch.float64: 1e-8, torch.float32: 4e-6}
"""How far solves go while they make progress, unless ``tol`` is set. The two phases of contrastive learning differ by little,
and by less as training goes on: at the tolerance of a prediction their difference drowns in the error of the solves. A loss of
the prediction has no such difference, and its solves are content with that tolerance."""


@final
class Step:
    """Steps of one network towards one objective.

    Parameters
    ----------
    net : LRRN
    objective : Objective
    settings : Settings
    flat : FlatParameters
        The network's; attached while steps are taken.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
    vectors : list of Tensor
        Where power iterations for the cap on weight norms stand.
    activations : Tensor of shape (n, dim) or None
        Where solves start from, sample by sample.
    """

    def __init__(self, net: LRRN, objective: Objective, settings: Settings, flat: FlatParameters) -> None:
        self._net, self._objective, self._settings, self._flat = net, objective, settings, flat
        self._last = flat.last_weights()
        self._fused: FusedStep | None = None
        self._kernels: FusedKernels | None = None
        self._adam: FlatAdam | None = None
        self._shares: Tensor | None = None
        self._shared_by = 0
        self.optimizer = _optimizer(flat, settings)
        self.vectors = start_vectors(net)
        self.activations: Tensor | None = None

    @property
    def aim(self) -> float:
        """Relative residual that solves go on to while they make progress."""
        if self._settings.tol is not None:
            return self._settings.tol
        of_prediction = getattr(self._objective, "of_prediction", False)
        return (DEFAULT_TOL if of_prediction else AIM)[self._net.W[0].dtype]

    def check(self, data: Data) -> None:
        """Raise if these samples cannot be learnt from, and make room for their activations."""
        if len(data) == 0:
            raise ValueError("there are no samples to learn from")
        if self._settings.shifts:
            image_side(data.x.shape[1])
        if self._settings.reuse_activations:
            self.activations = data.x.new_zeros((len(data), sum(self._net.energy_now().free_sizes)))

    def begin(self) -> None:
        """Choose the way through a step; the parameters must be attached."""
        if FusedStep.applies(self._net, self._objective) and self._settings.max_sweeps >= SWEEPS:
            self._fused = FusedStep(self._net, cast(EnergyObjective, self._objective), self._flat, self.aim)
        elif self._flat.vector.is_cuda and FusedKernels.applies(self._net, self._objective):
            self._kernels = FusedKernels(self._net, cast(EnergyObjective, self._objective), self._flat)
        if self._flat.vector.is_cuda and FlatAdam.applies(self.optimizer, self._flat):
            self._adam = FlatAdam(self.optimizer, self._flat)

    def set_rate(self, rate: float | Tensor) -> None:
        """Set the learning rate of the next update."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def gradients(self, data: Data, rows: Tensor, moment: int | Tensor, of: int, n: int, counts: SolveCounts) -> float | Tensor:
        """Set the gradients of some rows' part of the mean over ``n`` samples, and return that part of the loss.

        Parameters
        ----------
        data : Data
        rows : int64 Tensor
            Samples to use, on the device of the data.
        moment, of : int
            Number of this step, and of all steps of training.
        n : int
            Samples of the whole batch.
        counts : SolveCounts
            What the compiled step's solves report to; other solves report to the network's own observer.
        """
        if rows.shape[0] == 0:
            self._flat.gradient.zero_()
            return 0.0
        pick = rows if self._picks_rows(data) else None
        batch, weight = self._batch(data, rows, moment, of, pick is None)
        loss = self._descend(batch, weight, n, counts, pick)
        if self.activations is not None and batch.activations is not None:
            self.activations[rows] = batch.activations
        return loss

    def _batch(self, data: Data, rows: Tensor, moment: int | Tensor, of: int, select: bool) -> tuple[Batch, Tensor | None]:
        """Return what the objective sees of some rows, and their weights; x and target are those of all unless ``select``."""
        # the compiled steps read no labels
        label = data.label if self._fused is None and self._kernels is None else None
        x, target = data.x, data.target
        if select:
            x, target = x.index_select(0, rows), None if target is None else target.index_select(0, rows)
        label, start, weight = (
            None if part is None else part.index_select(0, rows) for part in (label, self.activations, data.weight)
        )
        if self._settings.shifts:
            x = shifted(x, rows, moment, self._settings.seed, self._settings.shifts)
        # energies do not change with progress, and on a device even a division takes its time
        progress = 0.0 if isinstance(self._objective, EnergyObjective) else moment / of
        return Batch(x, target, label, start, progress=progress), weight

    def _picks_rows(self, data: Data) -> bool:
        """Whether kernels read the rows of the data themselves, so that no copy of them is made."""
        return (
            (self._fused is not None or (self._kernels is not None and self._net.fixed_sweeps is not None))
            and not self._settings.shifts
            and all(part is None or part.is_contiguous() for part in (data.x, data.target))
        )

    def _descend(self, batch: Batch, weight: Tensor | None, n: int, counts: SolveCounts, rows: Tensor | None) -> float | Tensor:
        here = (batch.x if rows is None else rows).shape[0]
        if isinstance(self._objective, EnergyObjective):
            with torch.no_grad():
                share = self._equal_shares(batch.x, here, n) if weight is None else weight.div_(n)
                loss = None if self._fused is None else self._fused(batch, share, counts, rows)
                if loss is not None:
                    return loss
                if self._kernels is not None and self._net.fixed_sweeps is not None:
                    return self._kernels(batch, share, rows)
                if rows is not None:
                    batch.x = batch.x.index_select(0, rows)
                    batch.target = None if batch.target is None else batch.target.index_select(0, rows)
                terms = self._objective.terms(self._net, batch)
                self._flat.set_gradient(total_gradients(terms, share))
                return torch.dot(total(terms, here), share)
        losses = self._objective(self._net, batch)
        mean = (losses if weight is None else losses * weight).sum() / n
        self._flat.gradient.zero_()
        mean.backward()
        return mean.detach()

    def _equal_shares(self, x: Tensor, here: int, n: int) -> Tensor:
        """Return the factors of ``here`` samples in the mean over ``n``; the compiled step's hardly change and are kept."""
        if self._fused is None:
            return x.new_full((here,), 1 / n)
        if self._shares is None or self._shares.shape[0] != here or self._shared_by != n:
            self._shares, self._shared_by = x.new_full((here,), 1 / n), n
        return self._shares

    def update(self) -> None:
        """Change the parameters by their gradients."""
        if self._settings.weight_decay:
            # lambda |W_{L-1}|_F^2
            weights, slope = self._last
            slope.add_(weights, alpha=2 * self._settings.weight_decay)
        if self._settings.optimizer == "sgd":
            # what torch's step does, without what it does around it: a tenth of a small step
            rate = self.optimizer.param_groups[0]["lr"]
            for stretch in self.optimizer.param_groups[0]["params"]:
                if isinstance(rate, Tensor):
                    stretch.addcmul_(stretch.grad, rate, value=-1)
                else:
                    stretch.add_(stretch.grad, alpha=-rate)
        elif self._adam is not None:
            self._adam()
        else:
            self.optimizer.step()
        self.project()

    def project(self) -> None:
        """Keep what must hold after every step: the objective's own constraint, and the cap on weight norms."""
        project = getattr(self._objective, "project", None)
        if project is not None:
            project(self._net)
        cap = self._settings.max_weight_norm
        if cap is not None:
            with torch.no_grad():
                for w, norm in zip(self._net.W[:-1], layer_norms(self._net, self.vectors, 1)[:-1], strict=True):
                    w.mul_((cap / norm).clamp(max=1))

    def capturable(self, data: Data) -> bool:
        """Whether a graph can hold a step: on a CUDA device, with solves and an objective that never wait for it."""
        return (
            data.x.is_cuda
            and bool(getattr(self._objective, "capturable", False))
            and self._net.energy_now().n_free > 0
            and self._net.solver in ("auto", "accelerated")
            and len(data) >= self._settings.batch_size
        )

    def captured(self, data: Data, sweeps: int) -> CapturedSteps:
        """Return the graphs of steps on full batches, beginning with so many sweeps."""
        size = self._settings.batch_size
        of, nobody = self._settings.epochs * -(-len(data) // size), SolveCounts()

        def slopes(rows: Tensor, moment: Tensor) -> Tensor:
            return cast(Tensor, self.gradients(data, rows, moment, of, size, nobody))

        return CapturedSteps(self._net, slopes, self.update, size, len(data) // size, self.aim, sweeps)


def _optimizer(flat: FlatParameters, settings: Settings) -> torch.optim.Optimizer:
    rate = settings.learning_rate
    if settings.optimizer == "sgd":
        return torch.optim.SGD(flat.everything(), lr=rate, fused=True)
    if settings.optimizer == "adam":
        return torch.optim.Adam(flat.everything(), lr=rate, fused=True, capturable=flat.vector.is_cuda)
    groups = [
        {"params": flat.weights(), "weight_decay": settings.decoupled_weight_decay},
        {"params": flat.biases(), "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=rate, fused=True, capturable=flat.vector.is_cuda)
