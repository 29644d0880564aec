"""Training steps as CUDA graphs, which avoid the overhead of Python and of launches.

The solves of a captured step take a fixed number of sweeps. The device counts the solves that miss the tolerance. At intervals
the counts are read, and the number of sweeps is raised or lowered along the list ``LADDER``. Graphs are cached for each entry.
Before a new number of sweeps is used, it is tested on a batch without an update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import final
from weakref import WeakSet

import torch
from torch import Tensor

from lrrn.learning.clock import StepClock
from lrrn.network.policy import SolvePolicy
from lrrn.qp import QPSolution
from lrrn.runtime.devices import has_kernels

LADDER = (8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64, 80, 96, 128, 192, 256, 384)
"""Possible numbers of sweeps per phase. If the largest does not suffice, training falls back to steps without graphs."""
LOOKS = ((0, 1), (32, 4), (128, 8), (512, 16), (2048, 64), (4096, 512))
"""Pairs of a step of training and the interval, in steps, at which counts are read from there on. Weights change fast at
first."""
EASE = 4
"""A smaller number of sweeps is tested once in this many intervals: the test costs as much as several steps of a graph."""
BURSTS = (64, 8, 1)
"""Numbers of steps per graph, largest first. Larger graphs reduce launch overhead, above all where many networks train at
once. Steps of wide networks and of convolutions take a millisecond or more, and capturing 64 of them takes a good part of a
second: they do without the largest."""
EARLY = 256
"""In fewer steps than this, the next larger entry of ``LADDER`` than needed is used: condition numbers grow fast."""
SHORT = 2e-3
"""Share of samples with a residual above the aim from which on the number of sweeps is raised."""
SAFETY = 0.5
"""The aim is at most this fraction of the tolerance, so that sweeps are added before a solve misses the tolerance."""
WARM_UP = 3
"""Steps without a graph before the first capture, in which libraries allocate memory and kernels are compiled."""

STREAMS = 32
"""Size of torch's stream pool."""

_capturing = threading.Lock()
_handing_out = threading.Lock()
_streams: dict[tuple[int | None, int], tuple[threading.Lock, WeakSet[OwnStream]]] = {}
"""The lock and the owners of every stream in use, by device and handle."""


def until_look(moment: int) -> int:
    """Return the number of steps from step ``moment`` of training until the counts are read next."""
    return next(steps for since, steps in reversed(LOOKS) if moment >= since)


@final
class OwnStream:
    """A CUDA stream that no other network uses, or, once all are in use, that as few as possible use.

    Work that one thread submits to a stream while another captures it would become part of the other's graph. The lock
    ``turn`` must be held while work is submitted to ``stream``. It separates the owners of a shared stream.
    """

    def __init__(self, device: torch.device) -> None:
        with _handing_out:
            drawn = {}
            for _ in range(STREAMS):
                stream = torch.cuda.Stream(device)
                turn, owners = _streams.setdefault((device.index, stream.cuda_stream), (threading.Lock(), WeakSet()))
                drawn[len(owners)] = stream, turn, owners
                if not owners:
                    break
            self.stream, self.turn, owners = drawn[min(drawn)]
            owners.add(self)


@final
class DeviceCounts:
    """Accumulates the results of solves on the device, without synchronisation; an observer for :class:`SolvePolicy`.

    ``table`` counts samples, sweeps, samples that missed the tolerance and samples with a relative residual above ``aim``,
    which nearly all should reach.
    """

    def __init__(self, aim: float, device: torch.device) -> None:
        self.aim = aim
        self.table = torch.zeros(4, dtype=torch.int64, device=device)

    def __call__(self, solution: QPSolution, scale: Tensor, tol: float, what: str) -> None:
        """Count one solve."""
        residual, spent, status, limit = solution.residual, solution.n_sweeps, solution.status, min(self.aim, SAFETY * tol)
        if has_kernels(self.table):
            from lrrn.kernels.cuda.counts import count

            count[(1,)](residual, scale, spent, status, self.table, len(scale), limit, BLOCK=1024, num_warps=4)
            return
        self.table += torch.stack([torch.ones_like(spent), spent, status != 0, ~(residual / scale <= limit)]).sum(1)

    def take(self) -> tuple[int, int, int, int]:
        """Return the counts since the last call; synchronises with the device."""
        samples, sweeps, missed, short = self.table.tolist()
        self.table.zero_()
        return samples, sweeps, missed, short


@final
class CapturedSteps:
    """Training steps on a CUDA device, several per launch.

    Parameters
    ----------
    policy : SolvePolicy
        Policy of solves outside of graphs. In graphs, solves take a fixed number of sweeps.
    device : torch.device
    slopes : callable
        Computes the gradients of a batch under a policy, and returns the mean loss. The batch is given by two tensors: the row
        indices and the index of the step.
    update : callable
        Updates the parameters, at the learning rate ``rate``. Neither callable may synchronise with the device.
    batch_size, steps : int
        Rows of a step, and steps of an epoch.
    aim : float
        Relative residual that nearly all solves should reach.
    sweeps : int, default=0
        Sweeps per solve, of a run that is resumed; 0 before they are chosen.
    bursts : tuple of int
        Numbers of steps per graph, largest first; the last is 1.
    """

    def __init__(
        self,
        policy: SolvePolicy,
        device: torch.device,
        slopes: Callable[[Tensor, Tensor, SolvePolicy], Tensor],
        update: Callable[[], None],
        batch_size: int,
        steps: int,
        aim: float,
        sweeps: int = 0,
        bursts: tuple[int, ...] = BURSTS,
    ) -> None:
        self._slopes, self._update, self._device, self._bursts = slopes, update, device, bursts
        self._clock = StepClock(steps, batch_size, device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._counts = DeviceCounts(aim, device)
        self._policy = replace(policy, observer=self._counts)
        self._own = OwnStream(device)
        self._stream = self._own.stream
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._warm = self._moment = 0
        self.rate = self._clock.rate
        self.sweeps = sweeps

    @property
    def exhausted(self) -> bool:
        """Whether the number of sweeps cannot be raised further."""
        return self.sweeps == LADDER[-1]

    def begin(self, order: Tensor, rates: list[float], first: int, moment: int) -> None:
        """Begin an epoch, as in :meth:`StepClock.begin`."""
        self._clock.begin(order, rates, first, moment)
        self._moment = moment

    def run(self, steps: int) -> tuple[float, tuple[int, int, int]]:
        """Take some steps; return the sum of losses, and the counts of samples, sweeps and missed solves."""
        with self._side_stream():
            if not self.sweeps:
                self._raise(0)
            left = steps
            while left and self._warm < WARM_UP:
                self._step()
                self._warm, left = self._warm + 1, left - 1
            for size in self._bursts:
                for _ in range(left // size):
                    self.graph(size).replay()
                left %= size
            loss = float(self._loss)
            self._loss.zero_()
            samples, spent, missed, short = self._counts.take()
            period, self._moment = EASE * until_look(self._moment), self._moment + steps
            self._climb(short > SHORT * samples, self._moment // period > (self._moment - steps) // period)
        return loss, (samples, spent, missed)

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Switch to a separate stream, as capture requires, and count solves on the device."""
        outer = torch.cuda.current_stream(self._device)
        with self._own.turn:
            self._stream.wait_stream(outer)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                outer.wait_stream(self._stream)

    def _step(self) -> None:
        clock = self._clock
        clock.tick()
        policy = replace(self._policy, fixed_sweeps=self.sweeps)
        self._loss.add_(self._slopes(clock.rows, clock.moment, policy), alpha=len(clock.rows))
        self._update()

    def graph(self, steps: int) -> torch.cuda.CUDAGraph:
        """Return the graph of this number of steps at the current number of sweeps."""
        if (self.sweeps, steps) not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            others = next(iter(self._graphs.values()), None)
            pool = None if others is None else others.pool()
            # other threads may train other networks meanwhile, but must not capture. torch.cuda.graph is not used, since it
            # synchronises the device and collects garbage, which would block those threads
            with _capturing:
                if others is None:
                    torch.cuda.empty_cache()  # memory of deleted graphs cannot be reused during capture
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    for _ in range(steps):
                        self._step()
                finally:
                    graph.capture_end()
            self._graphs[self.sweeps, steps] = graph
        return self._graphs[self.sweeps, steps]

    def _suffices(self, sweeps: int) -> bool:
        """Test whether a number of sweeps suffices on a batch of this epoch, without an update."""
        self._slopes(*self._clock.ahead(), replace(self._policy, fixed_sweeps=sweeps))
        samples, _, _, short = self._counts.take()
        return short <= 0.5 * SHORT * samples

    def _climb(self, too_few: bool, ease: bool) -> None:
        """Raise the number of sweeps if there were too few; otherwise lower it, if it is time to test that it suffices."""
        at = LADDER.index(self.sweeps)
        if too_few:
            self._raise(at + 1)
        elif ease and at > 0 and self._moment >= EARLY and self._suffices(LADDER[at - 1]):
            self.sweeps = LADDER[at - 1]

    def _raise(self, first: int) -> None:
        """Set the number of sweeps to the first entry of the ladder, from ``first`` on, that suffices."""
        at = next((at for at in range(first, len(LADDER)) if self._suffices(LADDER[at])), len(LADDER) - 1)
        self.sweeps = LADDER[min(at + (self._moment < EARLY), len(LADDER) - 1)]
