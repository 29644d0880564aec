"""The one training loop: batches, optimiser, schedule, callbacks, checkpoints, divergence, progress."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor

from lrrn import ranks, storage
from lrrn.learning import checkpoint
from lrrn.learning.augment import image_side, shifted
from lrrn.learning.captured import CapturedSteps, until_look
from lrrn.learning.checkpoint import Position
from lrrn.learning.flat import FlatParameters
from lrrn.learning.fused import SWEEPS, FusedStep
from lrrn.learning.monitor import SolveCounts, check_health, condition_number, layer_norms, start_vectors, weight_norms
from lrrn.learning.objectives import Batch, EnergyObjective, Objective, total, total_gradients
from lrrn.learning.progress import JsonLines, ProgressBar
from lrrn.learning.schedules import schedule
from lrrn.learning.together import Together
from lrrn.network import LRRN
from lrrn.qp import DEFAULT_TOL
from lrrn.threads import one_thread

logger = logging.getLogger("lrrn.learning")

AIM = {torch.float64: 1e-8, torch.float32: 4e-6}
"""How far the solves of energy objectives go while they make progress, unless ``tol`` is set. The two phases of contrastive
learning differ by little, and by less as training goes on: at the tolerance of a prediction their difference drowns in the
error of the solves. A loss of the prediction has no such difference, and its solves are content with that tolerance."""

Callback = Callable[["Trainer", dict[str, Any]], bool | None]
"""Called after each epoch with the trainer and the epoch's record; returning True ends training."""


@final
@dataclass(frozen=True)
class Data:
    """What to learn from, all on one device.

    Parameters
    ----------
    x : Tensor of shape (n, d_0)
    target : Tensor of shape (n, d_L), optional
        One-hot labels or values to regress.
    label : int64 Tensor of shape (n,), optional
        Class numbers, -1 for "not labelled".
    weight : Tensor of shape (n,), optional
        Sample weights; they are used as given, so let them average one.
    """

    x: Tensor
    target: Tensor | None = None
    label: Tensor | None = None
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)


@final
@dataclass(frozen=True)
class Settings:
    """How to train.

    Parameters
    ----------
    optimizer : {"sgd", "adam", "adamw"}, default="sgd"
    learning_rate : float, default=0.4
    schedule : {None, "one_cycle", "cosine"}, default=None
    batch_size : int, default=10
    epochs : int, default=100
    weight_decay : float, default=0.0
        lambda of the paper: the loss has lambda * |W_{L-1}|_F^2 added.
    decoupled_weight_decay : float, default=0.0
        AdamW's, on all weights (not on biases).
    max_weight_norm : float, optional
        Cap on the spectral norm of the hidden weights, which keeps H well conditioned.
    tol : float, optional
        Tolerance of the solves; by default that of the dtype, and on towards a much tighter one while that is cheap.
    max_sweeps : int, default=1000
    shifts : int, default=0
        Move every image, a square one, by up to so many pixels each way, at random in every step.
    reuse_activations : bool, default=False
        Start every solve from the sample's activations in the previous epoch.
    patience : int, optional
        With a validation score: stop after this many epochs without a new best, and return to the best.
    max_unconverged : float, default=0.01
        Share of an epoch's solves that may miss the tolerance before training stops with an error.
    seed : int, default=0
        Seeds the order of the samples.
    """

    optimizer: str = "sgd"
    learning_rate: float = 0.4
    schedule: str | None = None
    batch_size: int = 10
    epochs: int = 100
    weight_decay: float = 0.0
    decoupled_weight_decay: float = 0.0
    max_weight_norm: float | None = None
    tol: float | None = None
    max_sweeps: int = 1000
    shifts: int = 0
    reuse_activations: bool = False
    patience: int | None = None
    max_unconverged: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        positive = {"learning_rate": self.learning_rate, "batch_size": self.batch_size, "epochs": self.epochs}
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name} must be positive; got {value}")
        for name in ("weight_decay", "decoupled_weight_decay", "shifts"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}")
        if self.max_weight_norm is not None and not self.max_weight_norm > 0:
            raise ValueError(f"max_weight_norm must be positive or None; got {self.max_weight_norm}")
        if self.optimizer not in ("sgd", "adam", "adamw"):
            raise ValueError(f"unknown optimizer {self.optimizer!r}; use 'sgd', 'adam' or 'adamw'")
        if self.decoupled_weight_decay and self.optimizer != "adamw":
            raise ValueError(
                f"decoupled_weight_decay belongs to optimizer='adamw'; got optimizer={self.optimizer!r}. "
                "Use 'adamw', or weight_decay for the paper's penalty"
            )
        schedule(self.schedule)


@final
class Trainer:
    """Trains a network in place.

    Parameters
    ----------
    net : LRRN
        The network.
    objective : Objective
        What to minimise.
    settings : Settings
        How.
    stage : str, default="train"
        Name of this run within a longer fit; checkpoints carry it.
    callbacks : sequence of callables
        Called after each epoch with the trainer and the epoch's record; one that returns True ends training.
    checkpoint : path-like, optional
        Where to keep the state of the run: after every epoch, every ``checkpoint_seconds`` and on Ctrl-C.
    checkpoint_seconds : float, default=60
        Time between checkpoints within an epoch.
    log : path-like, optional
        File for one JSON record an epoch.
    verbose : bool, default=False
        Show progress, if standard error is a terminal.
    history : sequence of dict
        Records of an earlier stage, to be continued.

    Notes
    -----
    Inside :func:`lrrn.ranks.joined` every rank takes a part of each batch and their gradients are added up, so that all hold
    the same parameters. Rank 0 alone validates, calls the callbacks and writes; the others hear the outcome.
    """

    def __init__(
        self,
        net: LRRN,
        objective: Objective,
        settings: Settings,
        *,
        stage: str = "train",
        callbacks: Sequence[Callback] = (),
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_seconds: float = 60.0,
        log: str | os.PathLike[str] | None = None,
        verbose: bool = False,
        history: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.net, self.objective, self.settings = net, objective, settings
        self.callbacks, self.log, self.verbose = callbacks, log, verbose
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.checkpoint_seconds = checkpoint_seconds
        self.position = Position(stage=stage, history=list(history))
        self._flat = FlatParameters(net)
        self.optimizer = _optimizer(self._flat, settings)
        self._fused: FusedStep | None = None
        self._captured: CapturedSteps | None = None
        self._last = self._flat.last_weights()
        self._rate = schedule(settings.schedule)
        self._vectors = start_vectors(net)
        self._best = [p.detach().clone() for p in net.parameters()]
        self._activations: Tensor | None = None
        self._interrupted = False
        self._ranks = ranks.current()
        self._together = Together(self._ranks, self._flat)
        for path in (self.checkpoint, log):
            if path is not None and self._ranks.is_main:
                storage.check_writable(path)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record an epoch."""
        return self.position.history

    def fit(self, data: Data, validate: Callable[[LRRN], float] | None = None, resume: bool = False) -> list[dict[str, Any]]:
        """Train to the last epoch, or until a callback or early stopping ends it.

        Parameters
        ----------
        data : Data
            What to learn from.
        validate : callable, optional
            From the network to a score, higher is better; called after each epoch.
        resume : bool, default=False
            Continue from the checkpoint if there is one.

        Returns
        -------
        list of dict
            The history: loss, learning rate, seconds, sweeps, condition number and weight norms of each epoch.
        """
        if len(data) == 0:
            raise ValueError("there are no samples to learn from")
        if self.settings.shifts:
            image_side(data.x.shape[1])
        if self.settings.reuse_activations:
            self._activations = data.x.new_zeros((len(data), sum(self.net.energy_now().free_sizes)))
        identity = self._identity(data)
        self._ranks.check_same("settings or data", identity)
        if self.checkpoint is not None and self._ranks.is_main:
            storage.clear_remains(self.checkpoint)
        with one_thread(), self._flat.attached(), self._observed() as counts, self._interruptible():
            if not (resume and self._resume(identity)):
                self._ranks.copy_main(self._flat.vector)
                self._project()
            if FusedStep.applies(self.net, self.objective) and self.settings.max_sweeps >= SWEEPS:
                self._fused = FusedStep(self.net, cast(EnergyObjective, self.objective), self._flat, self._aim)
            if self._capturable(data):
                self._captured = self._capture(data)
            total = self.settings.epochs * len(data)
            done = self.position.epoch * len(data) + self.position.step * self.settings.batch_size
            lines = JsonLines(self.log if self._ranks.is_main else None, self.history)
            with ProgressBar(self.verbose and self._ranks.is_main, self.position.stage, total, done) as bar:
                while self.position.epoch < self.settings.epochs and not self._out_of_patience:
                    self._epoch(data, counts, bar, identity)
                    if self._finish_epoch(data, counts, validate, bar, lines, identity):
                        break
        if validate is not None and self.settings.patience is not None:
            self._return_to_best()
        return self.history

    # --- an epoch -----------------------------------------------------------------------------------------------------

    def _epoch(self, data: Data, counts: SolveCounts, bar: ProgressBar, identity: dict[str, Any]) -> None:
        position, settings = self.position, self.settings
        self._began = time.perf_counter()
        order = self._order(len(data))
        batches = order.split(settings.batch_size)
        n_steps = len(batches)
        counts.samples = counts.sweeps = counts.missed = 0
        self._shared, self._saved = position.step, time.monotonic()
        if self._captured is not None:
            self._captured_epoch(self._captured, batches, counts, bar, identity)
        for rows in batches[position.step :]:
            moment = position.epoch * n_steps + position.step
            self._set_rate(settings.learning_rate * self._rate(moment / (settings.epochs * n_steps)))
            loss, stop, due = self._step(data, rows.to(data.x.device), moment, settings.epochs * n_steps, counts)
            self._note_steps(1, loss * len(rows), len(rows), counts, bar)
            if stop or due:
                self._keep(batches, counts, identity, stop)
        self._together.add_counts(counts, position)
        self._together.complete(self._activations, batches[self._shared :])

    def _captured_epoch(
        self,
        captured: CapturedSteps,
        batches: Sequence[Tensor],
        counts: SolveCounts,
        bar: ProgressBar,
        identity: dict[str, Any],
    ) -> None:
        """Take the steps of an epoch that have a full batch, until the graph's sweeps are not enough."""
        position, settings, n_steps = self.position, self.settings, len(batches)
        whole = n_steps if len(batches[-1]) == settings.batch_size else n_steps - 1
        before = position.epoch * n_steps
        moments = range(before, before + whole)
        rates = [settings.learning_rate * self._rate(moment / (settings.epochs * n_steps)) for moment in moments]
        captured.begin(torch.stack(list(batches[:whole])), rates, position.step, before + position.step)
        self._set_rate(captured.rate)
        while position.step < whole:
            steps = min(until_look(before + position.step), whole - position.step)
            loss, (samples, sweeps, missed) = captured.run(steps)
            counts.samples += samples
            counts.sweeps += sweeps
            counts.missed += missed
            counts.missed_phase = "captured step" if missed else counts.missed_phase
            position.captured_sweeps = captured.sweeps
            self._note_steps(steps, loss, steps * settings.batch_size, counts, bar)
            if self._interrupted or self._due:
                self._keep(batches, counts, identity, self._interrupted)
            if captured.exhausted and missed > settings.max_unconverged * samples:
                logger.info("%d of %d solves of captured steps do not converge: over to single steps", missed, samples)
                self._captured = None
                break
        self._set_rate(rates[-1])

    def _set_rate(self, rate: float | Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _note_steps(self, steps: int, loss: float, n: int, counts: SolveCounts, bar: ProgressBar) -> None:
        """Account for some steps with this sum of losses over ``n`` samples."""
        position = self.position
        position.loss_sum += loss
        position.weight_sum += n
        position.step += steps
        if loss != loss or loss in (float("inf"), float("-inf")):
            norms = weight_norms(self.net, self._vectors, 20)
            check_health(self.net, position.epoch + 1, loss, counts, 1.0, norms, self.settings.max_unconverged)
        bar.advance(n)

    @property
    def _due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self.checkpoint is not None and time.monotonic() - self._saved > self.checkpoint_seconds

    def _keep(self, batches: Sequence[Tensor], counts: SolveCounts, identity: dict[str, Any], stop: bool) -> None:
        """Write a checkpoint in the middle of an epoch, and end there if asked to."""
        self._together.add_counts(counts, self.position)
        self._together.complete(self._activations, batches[self._shared : self.position.step])
        self._shared = self.position.step
        self._save(identity)
        self._saved = time.monotonic()
        if stop:
            raise KeyboardInterrupt

    def _step(self, data: Data, rows: Tensor, moment: int, total: int, counts: SolveCounts) -> tuple[float, bool, bool]:
        """Take one optimiser step, number ``moment`` of ``total``.

        Return the batch's mean loss, whether to stop and whether to save: the same on all ranks.
        """
        n, due = len(rows), self._due
        rows = rows[self._ranks.part(n)]
        batch, weight = self._batch(data, rows, moment, total)
        loss = float(self._descend(batch, weight, n, counts))
        loss, stop, due = self._together.add_gradients(loss, self._interrupted, due)
        self._update()
        if self._activations is not None and batch.activations is not None:
            self._activations[rows] = batch.activations
        return loss, stop, due

    def _batch(self, data: Data, rows: Tensor, moment: int | Tensor, total: int) -> tuple[Batch, Tensor | None]:
        # the compiled step reads no labels
        label = data.label if self._fused is None else None
        x, target, label, start, weight = (
            None if part is None else part.index_select(0, rows)
            for part in (data.x, data.target, label, self._activations, data.weight)
        )
        assert x is not None
        if self.settings.shifts:
            x = shifted(x, rows, moment, self.settings.seed, self.settings.shifts)
        return Batch(x, target, label, start, progress=moment / total), weight

    def _update(self) -> None:
        """Change the parameters by their gradients."""
        if self.settings.weight_decay:
            # lambda |W_{L-1}|_F^2
            weights, slope = self._last
            slope.add_(weights, alpha=2 * self.settings.weight_decay)
        if self.settings.optimizer == "sgd":
            # what torch's step does, without what it does around it: a tenth of a small step
            rate = self.optimizer.param_groups[0]["lr"]
            for stretch in self.optimizer.param_groups[0]["params"]:
                if isinstance(rate, Tensor):
                    stretch.addcmul_(stretch.grad, rate, value=-1)
                else:
                    stretch.add_(stretch.grad, alpha=-rate)
        else:
            self.optimizer.step()
        self._project()

    def _descend(self, batch: Batch, weight: Tensor | None, n: int, counts: SolveCounts) -> float | Tensor:
        """Set the gradients of this rank's part of the mean over ``n`` samples, and return that part of the loss."""
        here = len(batch.x)
        if here == 0:
            self._flat.gradient.zero_()
            return 0.0
        if isinstance(self.objective, EnergyObjective):
            with torch.no_grad():
                share = batch.x.new_full((here,), 1 / n) if weight is None else weight.div_(n)
                loss = None if self._fused is None else self._fused(batch, share, counts)
                if loss is None:
                    terms = self.objective.terms(self.net, batch)
                    self._flat.set_gradient(total_gradients(terms, share))
                    return torch.dot(total(terms, here), share)
                return loss
        losses = self.objective(self.net, batch)
        mean = (losses if weight is None else losses * weight).sum() / n
        self._flat.gradient.zero_()
        mean.backward()
        return mean.detach()

    def _capturable(self, data: Data) -> bool:
        """Whether steps can be captured in a graph: on a CUDA device, with solves and an objective that never wait for it."""
        return (
            data.x.is_cuda
            and not self._ranks.connected
            and bool(getattr(self.objective, "capturable", False))
            and self.net.energy_now().n_free > 0
            and self.net.solver in ("auto", "accelerated")
            and len(data) >= self.settings.batch_size
        )

    def _capture(self, data: Data) -> CapturedSteps:
        size = self.settings.batch_size
        total, nobody = self.settings.epochs * -(-len(data) // size), SolveCounts()

        def slopes(rows: Tensor, moment: Tensor) -> Tensor:
            batch, weight = self._batch(data, rows, moment, total)
            loss = cast(Tensor, self._descend(batch, weight, size, nobody))
            if self._activations is not None and batch.activations is not None:
                self._activations[rows] = batch.activations
            return loss * size

        captured = self.position.captured_sweeps
        return CapturedSteps(self.net, slopes, self._update, size, len(data) // size, self._aim, captured)

    def _project(self) -> None:
        """Keep what must hold after every step: the objective's own constraint, and the cap on weight norms."""
        project = getattr(self.objective, "project", None)
        if project is not None:
            project(self.net)
        cap = self.settings.max_weight_norm
        if cap is not None:
            with torch.no_grad():
                for w, norm in zip(self.net.W[:-1], layer_norms(self.net, self._vectors, 1)[:-1], strict=True):
                    w.mul_((cap / norm).clamp(max=1))

    def _finish_epoch(
        self,
        data: Data,
        counts: SolveCounts,
        validate: Callable[[LRRN], float] | None,
        bar: ProgressBar,
        lines: JsonLines,
        identity: dict[str, Any],
    ) -> bool:
        """Record the epoch, look after its health, and say whether training should end."""
        position = self.position
        loss = position.loss_sum / position.weight_sum
        counts.samples, counts.sweeps, counts.missed = position.samples, position.sweeps, position.missed
        norms, condition = weight_norms(self.net, self._vectors, 20), condition_number(self.net)
        check_health(self.net, position.epoch + 1, loss, counts, condition, norms, self.settings.max_unconverged)
        self._together.check_equal(position.epoch + 1)
        seconds = self._ranks.on_main(lambda: time.perf_counter() - self._began)
        record: dict[str, Any] = {
            "stage": position.stage,
            "epoch": position.epoch + 1,
            "loss": loss,
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "seconds": seconds,
            "samples_per_second": len(data) / seconds,
            "sweeps": counts.sweeps / max(counts.samples, 1),
            "unconverged": counts.missed,
            "condition_number": condition,
            "weight_norms": norms,
        }
        if validate is not None:
            score = self._ranks.on_main(lambda: float(validate(self.net)))
            record["validation_score"] = score
            if position.best_score is None or score > position.best_score:
                position.best_score, position.best_epoch = score, position.epoch + 1
                with torch.no_grad():
                    for best, p in zip(self._best, self.net.parameters(), strict=True):
                        best.copy_(p)
        position.history.append(record)
        position.epoch, position.step = position.epoch + 1, 0
        position.loss_sum = position.weight_sum = 0.0
        position.samples = position.sweeps = position.missed = 0
        lines.append(record)
        bar.note(f"epoch {position.epoch}, loss {loss:.4g}, {record['samples_per_second']:.0f} samples/s")
        logger.debug("epoch %d: loss %.4g, condition number %.3g", position.epoch, loss, condition)
        stop = self._ranks.on_main(lambda: self._call_back(record))
        self._save(identity)
        return stop

    def _call_back(self, record: dict[str, Any]) -> bool:
        stop = False
        for callback in self.callbacks:
            stop = bool(callback(self, record)) or stop
        return stop

    # --- state --------------------------------------------------------------------------------------------------------

    def _order(self, n: int) -> Tensor:
        """Return the samples' order in the present epoch, a function of seed, stage and epoch only."""
        stage = sum(ord(letter) for letter in self.position.stage)
        seed = (self.settings.seed * 1_000_003 + self.position.epoch) * 1_000_003 + stage
        return torch.randperm(n, generator=torch.Generator().manual_seed(seed % 2**63))

    def _identity(self, data: Data) -> dict[str, Any]:
        settings = {key: value for key, value in vars(self.settings).items() if key not in ("patience", "max_unconverged")}
        return {
            **settings,
            "stage": self.position.stage,
            "objective": repr(self.objective)
            if hasattr(self.objective, "__dataclass_fields__")
            else type(self.objective).__name__,
            "network": self.net.extra_repr(),
            "data": checkpoint.fingerprint(data.x, data.target, data.label, data.weight),
        }

    def _carried(self) -> dict[str, Sequence[Tensor]]:
        return {
            "parameter": [p.detach() for p in self.net.parameters()],
            "best": self._best,
            "vector": self._vectors,
            "activations": [] if self._activations is None else [self._activations],
        }

    def _save(self, identity: dict[str, Any]) -> None:
        path = self.checkpoint
        if path is not None:
            # a full disk stops all ranks, not the one that writes
            self._ranks.on_main(lambda: checkpoint.save(path, identity, self.position, self._carried(), self.optimizer))

    def _resume(self, identity: dict[str, Any]) -> bool:
        """Continue from the checkpoint, which rank 0 reads for all; return whether there is one."""
        path = self.checkpoint

        def read() -> Position | None:
            there = path is not None and path.is_file()
            return checkpoint.restore(path, identity, self._carried(), self.optimizer) if path is not None and there else None

        position = self._ranks.on_main(read)
        if position is None:
            return False
        self.position = position
        if self._ranks.connected:
            for group in self._carried().values():
                for tensor in group:
                    self._ranks.copy_main(tensor)
            self.optimizer.load_state_dict(self._ranks.on_main(self.optimizer.state_dict))
        logger.info("resumed from %s after epoch %d, step %d", path, position.epoch, position.step)
        return True

    @torch.no_grad()
    def _return_to_best(self) -> None:
        for p, best in zip(self.net.parameters(), self._best, strict=True):
            p.copy_(best)

    @property
    def _out_of_patience(self) -> bool:
        """Whether early stopping has ended the run; a resumed one then stays ended."""
        position, patience = self.position, self.settings.patience
        if patience is None or position.best_score is None or position.step > 0:
            return False
        return position.epoch - position.best_epoch >= patience

    @property
    def _aim(self) -> float:
        if self.settings.tol is not None:
            return self.settings.tol
        return (AIM if isinstance(self.objective, EnergyObjective) else DEFAULT_TOL)[self.net.W[0].dtype]

    @contextmanager
    def _observed(self) -> Iterator[SolveCounts]:
        """Let the network's solves report to a counter, at the tolerance of the settings."""
        net, counts = self.net, SolveCounts()
        before = net.report, net.tol, net.aim, net.max_sweeps
        net.report, net.max_sweeps = counts, self.settings.max_sweeps
        net.tol, net.aim = self.settings.tol, self._aim
        try:
            yield counts
        finally:
            net.report, net.tol, net.aim, net.max_sweeps = before

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Turn the first Ctrl-C into a stop at the next step's end, after a checkpoint; the second one is immediate."""
        if self.checkpoint is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def stop(*_: Any) -> None:
            self._interrupted = True
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


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
