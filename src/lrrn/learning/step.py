"""One training step: the gradients of a batch, then the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, final

import numpy as np
import torch
from torch import Tensor

from lrrn.kernels.cpu.arguments import Course, Rule
from lrrn.learning.augment import flipped, shape_of_images, shifted
from lrrn.learning.cuda_graph import BURSTS, CapturedSteps
from lrrn.learning.flat import FlatParameters
from lrrn.learning.flat_adam import FlatAdam, compiles, sgd_rule
from lrrn.learning.monitor import FIRST_STEPS, ConditionLimit, layer_norms, start_vectors
from lrrn.learning.objectives import Batch, EnergyObjective, Objective
from lrrn.learning.settings import Data, Settings
from lrrn.learning.steps import GradientBackend, SeveralSteps, backends
from lrrn.network import LRRN
from lrrn.network.policy import Observer, SolvePolicy
from lrrn.network.solution import ignore_failures
from lrrn.qp import DEFAULT_TOL
from lrrn.solvers.half_precision import ON_CHIP

AIM = {torch.float64: 1e-8, torch.float32: 4e-6}
"""Relative residual to which solves continue while they make progress, unless ``tol`` is set. The two phases of contrastive
learning differ by little, and by less as training goes on. At the tolerance of a prediction, the error of the solves would
dominate their difference. A loss of the prediction has no such difference, so that tolerance suffices."""


@final
class Step:
    """Training steps of one network for one objective.

    Attributes
    ----------
    vectors : list of Tensor
        Vectors of the power iterations for ``max_weight_norm``.
    condition : ConditionLimit or None
        Control of the condition number by ``max_condition``.
    activations : Tensor of shape (n, dim) or None
        Warm starts of the solves, per sample.
    backend : str
        Name of the backend of the last step.
    """

    def __init__(self, net: LRRN, objective: Objective, settings: Settings, flat: FlatParameters) -> None:
        self._net, self._objective, self._settings, self._flat = net, objective, settings, flat
        self._last = flat.last_weights()
        self._backends: list[GradientBackend] = []
        self._adam: FlatAdam | None = None
        self._rule: Rule | None = None
        self.optimizer = _optimizer(flat, settings)
        self.vectors = start_vectors(net)
        self.condition = None if settings.max_condition is None else ConditionLimit(net, settings.max_condition)
        self.activations: Tensor | None = None
        self.backend = ""

    @property
    def aim(self) -> float:
        """Relative residual to which solves continue while they make progress."""
        if self._settings.tol is not None:
            return self._settings.tol
        of_prediction = getattr(self._objective, "of_prediction", False)
        return (DEFAULT_TOL if of_prediction else AIM)[self._net.W[0].dtype]

    def check(self, data: Data) -> None:
        """Raise if the data are unsuitable for training; allocate memory for their activations."""
        if len(data) == 0:
            raise ValueError("there are no samples to learn from")
        dtype = self._flat.vector.dtype
        for name, part in (("x", data.x), ("target", data.target), ("weight", data.weight)):
            if part is not None and part.dtype != dtype:
                raise ValueError(
                    f"{name} is {part.dtype} and the network {dtype}: convert one of them, as by {name}.to({dtype})"
                )
        if self._settings.augments:
            shape_of_images(data.x.shape[1], self._net.image_shape)
        if self._settings.reuse_activations:
            self.activations = data.x.new_zeros((len(data), sum(self._net.energy_now().free_sizes)))

    def begin(self) -> None:
        """Choose the backends; the parameters must be attached."""
        self._backends = backends(self._net, self._objective, self._settings, self._flat, self.aim)
        if FlatAdam.applies(self.optimizer, self._flat):
            self._adam = FlatAdam(self.optimizer, self._flat)
        if compiles(self._flat.vector):
            limits: list[tuple[float, float]] = getattr(self._objective, "row_norms", lambda rows: [])(len(self._net.W[-1]))
            more = (self._settings.weight_decay, np.array(limits, dtype=np.float64).reshape(-1, 2))
            adam = self._adam
            self._rule = sgd_rule(self.optimizer, self._flat, *more) if adam is None else adam.rule(*more)

    def policy(self, observer: Observer) -> SolvePolicy:
        """Return the policy of the solves in training."""
        return SolvePolicy(self._net.solver, self._settings.tol, self.aim, self._settings.max_sweeps, None, observer)

    def set_rate(self, rate: float | Tensor) -> None:
        """Set the learning rate of the next update."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def gradients(
        self, data: Data, rows: Tensor, moment: int | Tensor, total_steps: int, n: int, policy: SolvePolicy
    ) -> float | Tensor:
        """Set the gradients of the contribution of some rows to the mean loss over ``n`` samples; return this contribution.

        ``moment`` is the index of this step of ``total_steps``. The rows, on the device of the data, may be one rank's part
        of a batch of ``n``.
        """
        if rows.shape[0] == 0:
            self._flat.gradient.zero_()
            return 0.0
        whole = self._backends[0].reads_rows and self._readable(data)
        batch, weight = self._batch(data, rows, moment, total_steps, not whole, policy)
        for backend in self._backends:
            if whole and not backend.reads_rows:
                batch.select(rows)
                whole = False
            loss = backend.gradients(batch, weight, n, rows if whole else None)
            if loss is not None:
                break
        self.backend = backend.name
        if self.activations is not None and batch.activations is not None:
            self.activations[rows] = batch.activations
        return cast(float | Tensor, loss)

    def _batch(
        self, data: Data, rows: Tensor, moment: int | Tensor, total_steps: int, select: bool, policy: SolvePolicy
    ) -> tuple[Batch, Tensor | None]:
        """Return the batch of some rows, and their weights; without ``select``, x, target and label hold all samples."""
        start, weight = (None if part is None else part.index_select(0, rows) for part in (self.activations, data.weight))
        batch = Batch(data.x, data.target, data.label, start, policy=policy)
        if select:
            batch.select(rows)
        if self._settings.flips:
            batch.x = flipped(batch.x, rows, moment, self._settings.seed, self._net.image_shape)
        if self._settings.shifts:
            batch.x = shifted(batch.x, rows, moment, self._settings.seed, self._settings.shifts, self._net.image_shape)
        # energies do not depend on progress, and on a device even a division costs a launch
        if not isinstance(self._objective, EnergyObjective):
            batch.progress = moment / total_steps
        return batch, weight

    def _readable(self, data: Data) -> bool:
        """Whether backends may gather the rows of the data themselves."""
        return not self._settings.augments and all(part is None or part.is_contiguous() for part in (data.x, data.target))

    def takes_several(self, data: Data, policy: SolvePolicy) -> bool:
        """Whether :meth:`several` applies to these data."""
        backend = self._backends[0]
        floats = (data.x, data.target, data.weight, self.activations)
        return (
            self._rule is not None
            and isinstance(backend, SeveralSteps)
            and backend.takes_several(self._settings.batch_size, policy)
            and (hasattr(self._objective, "row_norms") or not hasattr(self._objective, "project"))
            and self._settings.max_weight_norm is None
            and self.condition is None
            and self._readable(data)
            and all(part is None or part.dtype == self._flat.vector.dtype for part in floats)
        )

    def several(
        self, data: Data, order: Tensor, first: int, rates: Sequence[float], progress: Sequence[float], policy: SolvePolicy,
        loss_sum: float,
    ) -> tuple[int, float]:  # fmt: skip
        """Take steps of an epoch, from ``first`` on, in one compiled call, one for each learning rate.

        Return how many were taken, since it stops before a batch with a slowly converging solve, and ``loss_sum`` plus the sum
        of their losses.
        """
        backend, rule, nothing = cast(SeveralSteps, self._backends[0]), cast(Rule, self._rule), self._flat.vector[:0]
        target, weight, activations = data.target, data.weight, self.activations
        course = Course(
            data.x.numpy(),
            (nothing[None] if target is None else target).numpy(),
            (nothing if weight is None else weight).numpy(),
            (nothing[None][:0] if activations is None else activations).numpy(),
            order.numpy(),
            self._settings.batch_size,
            first,
            np.array(rates),
        )
        totals = np.array((loss_sum, 0.0))
        taken = backend.several(course, np.array(progress), rule, policy, totals)
        if taken:
            self.backend = backend.name
            self.set_rate(rates[taken - 1])
        return taken, float(totals[0])

    def update(self) -> None:
        """Update the parameters by their gradients."""
        if self._rule is not None:
            from lrrn.kernels.cpu.several_steps import update

            vector, rows = self._flat.vector, len(self._net.W[-1])
            width = self._net.W[-1].numel() // rows
            last = self._last[0].storage_offset() - vector.storage_offset()
            rate = float(self.optimizer.param_groups[0]["lr"])
            update(vector.numpy(), self._flat.gradient.numpy(), last, width, rows, rate, self._rule)
            self.project(after_update=True)
            return
        if self._settings.weight_decay:
            # lambda |W_{L-1}|_F^2
            weights, slope = self._last
            slope.add_(weights, alpha=2 * self._settings.weight_decay)
        if self._settings.optimizer == "sgd":
            # same update as torch's step, without its overhead, which is a tenth of a small step
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

    def project(self, after_update: bool = False, first: bool = False) -> None:
        """Project the parameters onto the constraints: that of the objective, and the bounds on weight norms and on H.

        A compiled update has limited the norms of rows already. The ``first`` estimate of the largest eigenvalue of H takes
        more steps.
        """
        project = getattr(self._objective, "project", None)
        if project is not None and not (after_update and hasattr(self._objective, "row_norms")):
            project(self._net)
        cap = self._settings.max_weight_norm
        if cap is not None:
            with torch.no_grad():
                for w, norm in zip(self._net.W[:-1], layer_norms(self._net, self.vectors, 1)[:-1], strict=True):
                    w.mul_((cap / norm).clamp(max=1))
        if self.condition is not None:
            self.condition.enforce(FIRST_STEPS if first else 1)

    def capturable(self, data: Data) -> bool:
        """Whether a CUDA graph can contain a step: on a CUDA device, with solves and an objective that never synchronise."""
        return (
            data.x.is_cuda
            and bool(getattr(self._objective, "capturable", False))
            and self._net.energy_now().n_free > 0
            # eigenvalues of layers without reconstruction need proven norms, which are computed on the host
            and (
                (self._net.is_dense and self.condition is None)
                or all(beta > 0 for beta in self._net.beta[1 : self._net.energy_now().n_free])
            )
            and self._net.solver in ("auto", "accelerated")
            and len(data) >= self._settings.batch_size
        )

    def captured(self, data: Data, sweeps: int) -> CapturedSteps:
        """Return the CUDA graphs of steps on full batches, initially with this number of sweeps."""
        size = self._settings.batch_size
        total_steps = self._settings.epochs * -(-len(data) // size)

        def slopes(rows: Tensor, moment: Tensor, policy: SolvePolicy) -> Tensor:
            return cast(Tensor, self.gradients(data, rows, moment, total_steps, size, policy))

        policy, device = self.policy(ignore_failures), data.x.device
        bursts = BURSTS if self._net.is_dense and sum(self._net.sizes[1:-1]) <= ON_CHIP else BURSTS[1:]
        return CapturedSteps(policy, device, slopes, self.update, size, len(data) // size, self.aim, sweeps, bursts)


class _Light(torch.optim.Optimizer):
    """An optimiser that is made without torch's compiler, whose import takes a second or more."""

    add_param_group = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", torch.optim.Optimizer.add_param_group)


@final
class _SGD(_Light, torch.optim.SGD):
    pass


@final
class _Adam(_Light, torch.optim.Adam):
    pass


@final
class _AdamW(_Light, torch.optim.AdamW):
    pass


def _optimizer(flat: FlatParameters, settings: Settings) -> torch.optim.Optimizer:
    rate = settings.learning_rate
    if settings.optimizer == "sgd":
        return _SGD(flat.everything(), lr=rate, fused=True)
    if settings.optimizer == "adam":
        return _Adam(flat.everything(), lr=rate, fused=True, capturable=flat.vector.is_cuda)
    groups = [
        {"params": flat.weights(), "weight_decay": settings.decoupled_weight_decay},
        {"params": flat.biases(), "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return _AdamW(groups, lr=rate, fused=True, capturable=flat.vector.is_cuda)
