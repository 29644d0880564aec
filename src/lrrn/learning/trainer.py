"""The training loop: batches, optimiser, schedule, callbacks, checkpoints, divergence, progress."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from lrrn.learning import checkpoint
from lrrn.learning.budget import Budget
from lrrn.learning.checkpoint import Position
from lrrn.learning.cuda_graph import CapturedSteps, until_look
from lrrn.learning.data_parallel import DataParallel
from lrrn.learning.early_stopping import EarlyStopping
from lrrn.learning.flat import FlatParameters
from lrrn.learning.identity import identity
from lrrn.learning.monitor import SolveCounts, check_health, condition_number, weight_norms
from lrrn.learning.objectives import Objective
from lrrn.learning.progress import JsonLines, ProgressBar
from lrrn.learning.schedules import schedule
from lrrn.learning.settings import Data, Settings
from lrrn.learning.step import Step
from lrrn.network import LRRN
from lrrn.runtime import ranks, storage
from lrrn.runtime.interrupts import first_interrupt
from lrrn.runtime.threads import one_thread

logger = logging.getLogger("lrrn.learning")

BURST = 32
"""Largest number of steps of a compiled call, a fraction of a second. Time limit and Ctrl-C are checked between calls."""

Callback = Callable[["Trainer", dict[str, Any]], bool | None]
"""Called after each epoch with the trainer and the epoch's record; returning True ends training."""


@final
class Trainer:
    """Trains a network in place.

    Parameters
    ----------
    net : LRRN
        The network.
    objective : Objective
        Loss to minimise.
    settings : Settings
        Training settings.
    stage : str, default="train"
        Name of this run within a longer fit; stored in checkpoints.
    callbacks : sequence of callables
        Called after each epoch with the trainer and the epoch's record; one that returns True ends training.
    checkpoint : path-like, optional
        File for the state of the run, written after every epoch, every ``checkpoint_seconds`` and on Ctrl-C.
    checkpoint_seconds : float, default=60
        Time between checkpoints within an epoch.
    log : path-like, optional
        File for one JSON record per epoch.
    verbose : bool, default=False
        Show progress, if standard error is a terminal.
    history : sequence of dict
        Records of an earlier stage, to which this run appends.

    Notes
    -----
    Inside :func:`lrrn.runtime.ranks.joined`, training is data parallel: every rank processes a part of each batch, and an
    all-reduce sums their gradients, so that all hold the same parameters. Only rank 0 validates, calls the callbacks and writes
    files; it broadcasts the outcome.
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
        self._step = Step(net, objective, settings, self._flat)
        self._captured: CapturedSteps | None = None
        self._rate = schedule(settings.schedule)
        self._early = EarlyStopping(net, settings.patience)
        self._interrupted = self._over = False
        self._budget = Budget(None)
        self._ranks = ranks.current()
        self._parallel = DataParallel(self._ranks, self._flat)
        for path in (self.checkpoint, log):
            if path is not None and self._ranks.is_main:
                storage.check_writable(path)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser of the run."""
        return self._step.optimizer

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record per epoch."""
        return self.position.history

    def fit(self, data: Data, validate: Callable[[LRRN], float] | None = None, resume: bool = False) -> list[dict[str, Any]]:
        """Train to the last epoch, or until a callback, early stopping or ``max_seconds`` ends it.

        Parameters
        ----------
        data : Data
            Training data.
        validate : callable, optional
            From the network to a validation score, higher is better; called after each epoch.
        resume : bool, default=False
            Resume from the checkpoint if there is one.

        Returns
        -------
        list of dict
            The history: loss, learning rate, seconds, sweeps, condition number, weight norms and backend of each epoch. If
            ``max_seconds`` ended training, the last record says so under ``stopped_by``; it may be of a part of an epoch.
        """
        self._budget, self._over = Budget(self.settings.max_seconds), False
        self._step.check(data)
        # hashing the data takes as long as many steps, and serves checkpoints and ranks only
        identity = self._identity(data) if self.checkpoint is not None or self._ranks.connected else {}
        self._ranks.check_same("settings or data", identity)
        if self.checkpoint is not None and self._ranks.is_main:
            storage.clear_remains(self.checkpoint)
        # Ctrl-C stops after the current step and a checkpoint
        interruptible = nullcontext() if self.checkpoint is None else first_interrupt(self.interrupt)
        with one_thread(), self._flat.attached(), interruptible:
            if not (resume and self._resume(identity)):
                self._ranks.copy_main(self._flat.vector)
                self._step.project(first=True)
            self._step.begin()
            self._run, self._counts = identity, SolveCounts()
            self._policy = self._step.policy(self._counts)
            total = self.settings.epochs * len(data)
            done = self.position.epoch * len(data) + self.position.step * self.settings.batch_size
            lines = JsonLines(self.log if self._ranks.is_main else None, self.history)
            visible = self.verbose and self._ranks.is_main
            with self._captures(data), ProgressBar(visible, self.position.stage, total, done) as self._bar:
                while self.position.epoch < self.settings.epochs and not self._early.ends(self.position):
                    self._epoch(data)
                    if self._finish_epoch(data, validate, lines):
                        break
        if validate is not None and self.settings.patience is not None:
            self._early.restore()
        return self.history

    def interrupt(self) -> None:
        """Stop a fit that runs in another thread after its current step or captured steps, as Ctrl-C does."""
        self._interrupted = True

    @contextmanager
    def _captures(self, data: Data) -> Iterator[None]:
        """Use captured steps where possible; release their graphs, memory and stream at the end."""
        if self._step.capturable(data) and not self._ranks.connected and not self.position.single_steps:
            self._captured = self._step.captured(data, self.position.captured_sweeps)
        try:
            yield
        finally:
            self._captured = None

    def _epoch(self, data: Data) -> None:
        position, settings, size = self.position, self.settings, self.settings.batch_size
        self._began = time.perf_counter()
        order = self._order(len(data))
        n_steps = -(-len(order) // size)
        self._counts.samples = self._counts.sweeps = self._counts.missed = 0
        self._shared, self._saved = position.step, time.monotonic()
        if self._captured is not None:
            self._captured_epoch(self._captured, order, n_steps)
        several = not self._ranks.connected and self._step.takes_several(data, self._policy)
        while position.step < n_steps and not self._over:
            if several and self._take_several(data, order, n_steps):
                continue
            rows = order[position.step * size : (position.step + 1) * size]
            moment = position.epoch * n_steps + position.step
            self._step.set_rate(settings.learning_rate * self._rate(moment / (settings.epochs * n_steps)))
            loss, stop, due = self._take(data, rows.to(data.x.device), moment, settings.epochs * n_steps)
            position.loss_sum += loss * rows.shape[0]
            self._note_steps(1, loss, rows.shape[0])
            if stop or due or self._over:
                self._keep(order, stop)
        self._share(order)

    def _captured_epoch(self, captured: CapturedSteps, order: Tensor, n_steps: int) -> None:
        """Take the steps of an epoch that have a full batch, as long as the sweeps of the graphs suffice."""
        position, settings, counts = self.position, self.settings, self._counts
        whole = len(order) // settings.batch_size
        before = position.epoch * n_steps
        moments = range(before, before + whole)
        rates = [settings.learning_rate * self._rate(moment / (settings.epochs * n_steps)) for moment in moments]
        full = order[: whole * settings.batch_size].view(whole, settings.batch_size)
        captured.begin(full, rates, position.step, before + position.step)
        self._step.set_rate(captured.rate)
        while position.step < whole:
            steps = min(until_look(before + position.step), whole - position.step)
            loss, (samples, sweeps, missed) = captured.run(steps)
            counts.samples += samples
            counts.sweeps += sweeps
            counts.missed += missed
            counts.missed_phase = "captured step" if missed else counts.missed_phase
            position.captured_sweeps = captured.sweeps
            position.loss_sum += loss
            self._note_steps(steps, loss, steps * settings.batch_size)
            self._look_around(order)
            if self._over:
                break
            if captured.exhausted and missed > settings.max_unconverged * samples:
                logger.info("%d of %d solves of captured steps do not converge: over to single steps", missed, samples)
                self._captured, position.single_steps = None, True
                break
        self._step.set_rate(rates[-1])

    def _take_several(self, data: Data, order: Tensor, n_steps: int) -> bool:
        """Take some steps in one compiled call; return whether there were any."""
        position, settings = self.position, self.settings
        total, before = settings.epochs * n_steps, position.epoch * n_steps
        progress = [(before + step) / total for step in range(position.step, min(position.step + BURST, n_steps))]
        rates = [settings.learning_rate * self._rate(share) for share in progress]
        steps, loss_sum = self._step.several(data, order, position.step, rates, progress, self._policy, position.loss_sum)
        if steps:
            begin, end = (min(step * settings.batch_size, len(order)) for step in (position.step, position.step + steps))
            position.loss_sum = loss_sum
            self._note_steps(steps, loss_sum, end - begin)
            self._look_around(order)
        return steps > 0

    def _look_around(self, order: Tensor) -> None:
        """After some steps in a single process: see whether the time is over, a checkpoint is due, or Ctrl-C was pressed."""
        self._over = self._budget.spent
        if self._interrupted or self._due or self._over:
            self._keep(order, self._interrupted)

    def _note_steps(self, steps: int, loss: float, n: int) -> None:
        """Update position and progress bar after some steps with ``n`` samples; raise if the loss is not finite."""
        position = self.position
        position.weight_sum += n
        position.step += steps
        if loss != loss or loss in (float("inf"), float("-inf")):
            norms = weight_norms(self.net, self._step.vectors, 20)
            check_health(self.net, position.epoch + 1, loss, self._counts, 1.0, norms, self.settings.max_unconverged)
        self._bar.advance(n)

    @property
    def _due(self) -> bool:
        """Whether a checkpoint is due."""
        return self.checkpoint is not None and time.monotonic() - self._saved > self.checkpoint_seconds

    def _share(self, order: Tensor) -> None:
        """Add up the counts of all ranks and exchange the activations, of the steps since the last call."""
        self._parallel.add_counts(self._counts, self.position)
        self._parallel.complete(
            self._step.activations, order, self.settings.batch_size, range(self._shared, self.position.step)
        )
        self._shared = self.position.step

    def _keep(self, order: Tensor, stop: bool) -> None:
        """Write a checkpoint within an epoch, and stop there if ``stop`` is set."""
        self._share(order)
        self._save()
        self._saved = time.monotonic()
        if stop:
            raise KeyboardInterrupt

    def _take(self, data: Data, rows: Tensor, moment: int, total_steps: int) -> tuple[float, bool, bool]:
        """Take a step; return the batch's mean loss, whether to stop and whether to save: the same on all ranks."""
        due, n = self._due, rows.shape[0]
        mine = rows[self._ranks.part(n)] if self._ranks.connected else rows
        loss = float(self._step.gradients(data, mine, moment, total_steps, n, self._policy))
        flags = (self._interrupted, due, self._budget.spent)
        loss, stop, due, self._over = self._parallel.add_gradients(loss, *flags)
        self._step.update()
        return loss, stop, due

    def _finish_epoch(self, data: Data, validate: Callable[[LRRN], float] | None, lines: JsonLines) -> bool:
        """Record the epoch or the part of it that was made, check for divergence, and return whether training should end."""
        position, counts = self.position, self._counts
        loss = position.loss_sum / position.weight_sum
        counts.samples, counts.sweeps, counts.missed = position.samples, position.sweeps, position.missed
        norms, condition = weight_norms(self.net, self._step.vectors, 20), condition_number(self.net)
        check_health(self.net, position.epoch + 1, loss, counts, condition, norms, self.settings.max_unconverged)
        self._parallel.check_equal(position.epoch + 1)
        seconds = self._ranks.on_main(lambda: time.perf_counter() - self._began)
        record: dict[str, Any] = {
            "stage": position.stage,
            "epoch": position.epoch + 1,
            "loss": loss,
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "seconds": seconds,
            "samples_per_second": position.weight_sum / seconds,
            "sweeps": counts.sweeps / max(counts.samples, 1),
            "unconverged": counts.missed,
            "backend": self._step.backend,
            "condition_number": condition,
            "weight_norms": norms,
        }
        if validate is not None:
            score = record["validation_score"] = self._ranks.on_main(lambda: float(validate(self.net)))
            self._early.note(position, score)
        whole = position.weight_sum == len(data)
        self._over = self._over and not (whole and position.epoch + 1 == self.settings.epochs)
        if self._over:
            record["stopped_by"] = "max_seconds"
            self._warn_of_time(len(data))
        position.history.append(record)
        position.epoch, position.step = position.epoch + 1, 0
        position.loss_sum = position.weight_sum = 0.0
        position.samples = position.sweeps = position.missed = 0
        lines.append(record)
        self._bar.note(f"epoch {position.epoch}, loss {loss:.4g}, {record['samples_per_second']:.0f} samples/s")
        logger.debug("epoch %d: loss %.4g, condition number %.3g", position.epoch, loss, condition)
        # every callback is called, also after one that ends training
        stop = self._ranks.on_main(lambda: True in [bool(callback(self, record)) for callback in self.callbacks])
        if whole:  # the checkpoint within an epoch was written before
            self._save()
        return stop or self._over

    def _warn_of_time(self, n: int) -> None:
        """Issue scikit-learn's ConvergenceWarning: how far training came does now depend on the machine."""
        from sklearn.exceptions import ConvergenceWarning

        position, settings = self.position, self.settings
        warnings.warn(
            f"max_seconds={settings.max_seconds:g} ended training in epoch {position.epoch + 1} of {settings.epochs}, after "
            f"{position.weight_sum:.0f} of its {n} samples. Raise max_seconds, or lower epochs so that the learning rate "
            "decreases in time",
            ConvergenceWarning,
            stacklevel=3,
        )

    def _order(self, n: int) -> Tensor:
        """Return the order of samples in the current epoch, a function of seed, stage and epoch only."""
        stage = sum(ord(letter) for letter in self.position.stage)
        seed = (self.settings.seed * 1_000_003 + self.position.epoch) * 1_000_003 + stage
        return torch.randperm(n, generator=torch.Generator().manual_seed(seed % 2**63))

    def _identity(self, data: Data) -> dict[str, Any]:
        return identity(self.net, self.objective, self.settings, data, self.position.stage)

    def _carried(self) -> dict[str, Sequence[Tensor]]:
        return {
            "parameter": [p.detach() for p in self.net.parameters()],
            "best": self._early.best,
            "vector": self._step.vectors,
            "condition": [] if self._step.condition is None else [self._step.condition.vector],
            "activations": [] if self._step.activations is None else [self._step.activations],
        }

    def _save(self) -> None:
        path = self.checkpoint
        if path is not None:
            # an error such as a full disk must stop all ranks, not only the one that writes
            self._ranks.on_main(lambda: checkpoint.save(path, self._run, self.position, self._carried(), self.optimizer))

    def _resume(self, identity: dict[str, Any]) -> bool:
        """Resume from the checkpoint, which rank 0 reads for all ranks; return whether there is one."""
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
