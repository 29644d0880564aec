"""The training loop: batches, optimiser, schedule, callbacks, checkpoints, divergence, progress."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from lrrn.learning import checkpoint
from lrrn.learning.checkpoint import Position
from lrrn.learning.cuda_graph import CapturedSteps, until_look
from lrrn.learning.data_parallel import DataParallel
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
from lrrn.runtime.threads import one_thread

logger = logging.getLogger("lrrn.learning")

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
        self._best = [p.detach().clone() for p in net.parameters()]
        self._interrupted = False
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
        """Train to the last epoch, or until a callback or early stopping ends it.

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
            The history: loss, learning rate, seconds, sweeps, condition number, weight norms and backend of each epoch.
        """
        self._step.check(data)
        identity = self._identity(data)
        self._ranks.check_same("settings or data", identity)
        if self.checkpoint is not None and self._ranks.is_main:
            storage.clear_remains(self.checkpoint)
        with one_thread(), self._flat.attached(), self._interruptible():
            if not (resume and self._resume(identity)):
                self._ranks.copy_main(self._flat.vector)
                self._step.project()
            self._step.begin()
            self._run, self._counts = identity, SolveCounts()
            self._policy = self._step.policy(self._counts)
            total = self.settings.epochs * len(data)
            done = self.position.epoch * len(data) + self.position.step * self.settings.batch_size
            lines = JsonLines(self.log if self._ranks.is_main else None, self.history)
            visible = self.verbose and self._ranks.is_main
            with self._captures(data), ProgressBar(visible, self.position.stage, total, done) as self._bar:
                while self.position.epoch < self.settings.epochs and not self._out_of_patience:
                    self._epoch(data)
                    if self._finish_epoch(data, validate, lines):
                        break
        if validate is not None and self.settings.patience is not None:
            self._return_to_best()
        return self.history

    def interrupt(self) -> None:
        """Stop a fit that runs in another thread after its current step or captured steps, as Ctrl-C does."""
        self._interrupted = True

    @contextmanager
    def _captures(self, data: Data) -> Iterator[None]:
        """Use captured steps where possible; release their graphs, memory and stream at the end."""
        if self._step.capturable(data) and not self._ranks.connected:
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
        while position.step < n_steps:
            rows = order[position.step * size : (position.step + 1) * size]
            moment = position.epoch * n_steps + position.step
            self._step.set_rate(settings.learning_rate * self._rate(moment / (settings.epochs * n_steps)))
            loss, stop, due = self._take(data, rows.to(data.x.device), moment, settings.epochs * n_steps)
            self._note_steps(1, loss * rows.shape[0], rows.shape[0])
            if stop or due:
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
            self._note_steps(steps, loss, steps * settings.batch_size)
            if self._interrupted or self._due:
                self._keep(order, self._interrupted)
            if captured.exhausted and missed > settings.max_unconverged * samples:
                logger.info("%d of %d solves of captured steps do not converge: over to single steps", missed, samples)
                self._captured = None
                break
        self._step.set_rate(rates[-1])

    def _note_steps(self, steps: int, loss: float, n: int) -> None:
        """Update position and progress bar after some steps with this sum of losses over ``n`` samples."""
        position = self.position
        position.loss_sum += loss
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
        loss, stop, due = self._parallel.add_gradients(loss, self._interrupted, due)
        self._step.update()
        return loss, stop, due

    def _finish_epoch(self, data: Data, validate: Callable[[LRRN], float] | None, lines: JsonLines) -> bool:
        """Record the epoch, check for divergence, and return whether training should end."""
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
            "samples_per_second": len(data) / seconds,
            "sweeps": counts.sweeps / max(counts.samples, 1),
            "unconverged": counts.missed,
            "backend": self._step.backend,
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
        self._bar.note(f"epoch {position.epoch}, loss {loss:.4g}, {record['samples_per_second']:.0f} samples/s")
        logger.debug("epoch %d: loss %.4g, condition number %.3g", position.epoch, loss, condition)
        # every callback is called, also after one that ends training
        stop = self._ranks.on_main(lambda: True in [bool(callback(self, record)) for callback in self.callbacks])
        self._save()
        return stop

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
            "best": self._best,
            "vector": self._step.vectors,
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

    @torch.no_grad()
    def _return_to_best(self) -> None:
        for p, best in zip(self.net.parameters(), self._best, strict=True):
            p.copy_(best)

    @property
    def _out_of_patience(self) -> bool:
        """Whether early stopping has ended the run; a resumed run then ends at once."""
        position, patience = self.position, self.settings.patience
        if patience is None or position.best_score is None or position.step > 0:
            return False
        return position.epoch - position.best_epoch >= patience

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Handle Ctrl-C: the first stops after the current step and a checkpoint, the second stops immediately."""
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
