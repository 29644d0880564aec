"""Training steps as CUDA graphs, so that nothing waits for Python.

The solves of a captured step take a fixed number of sweeps and count on the device what they miss. Every so many steps the
counts are looked at, and the number of sweeps goes up or down a ladder; graphs are kept for each rung. Before a rung is taken,
it is tried on a batch without learning from it.
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

LADDER = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
"""Sweeps a phase may take; where the last are not enough, steps go the general way."""
LOOKS = ((0, 8), (256, 64), (4096, 512))
"""From which step of training on, and how many steps lie between two looks at the counts: weights change fast at first."""
BURSTS = (64, 8, 1)
"""Steps of a graph, the most that are wanted first: a launch is not free, least of all where many networks train at once."""
SHORT = 2e-3
"""Share of samples above the aim from which on sweeps are too few."""
SAFETY = 0.25
"""The aim is at most this share of the tolerance, so that sweeps are added before anything misses it."""
WARM_UP = 3
"""Steps taken as they are before the first graph is captured: libraries allocate and kernels compile in them."""

STREAMS = 32
"""Size of torch's stream pool."""

_capturing = threading.Lock()
_handing_out = threading.Lock()
_streams: dict[tuple[int | None, int], tuple[threading.Lock, WeakSet[OwnStream]]] = {}
"""The lock and the owners of every stream that was handed out, by device and handle."""


def until_look(moment: int) -> int:
    """Return how many steps to take from a moment of training before the next look at the counts."""
    return next(steps for since, steps in reversed(LOOKS) if moment >= since)


@final
class OwnStream:
    """A stream that no other network trains on, or, once all are in use, as few as possible.

    What one thread puts on a stream that another captures would become part of the other's graph.

    Parameters
    ----------
    device : torch.device

    Attributes
    ----------
    stream : torch.cuda.Stream
    turn : Lock
        To be held while anything is put on the stream: it keeps owners apart where there are several.
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
    """Adds up what solves report without waiting for it; an observer for :class:`SolvePolicy`.

    Parameters
    ----------
    aim : float
        Relative residual that nearly all should reach.
    device : torch.device

    Attributes
    ----------
    table : int64 Tensor of shape (4,)
        Samples, sweeps, those that missed the tolerance and those above the aim.
    """

    def __init__(self, aim: float, device: torch.device) -> None:
        self.aim = aim
        self.table = torch.zeros(4, dtype=torch.int64, device=device)

    def __call__(self, solution: QPSolution, scale: Tensor, tol: float, what: str) -> None:
        """Count one solve."""
        relative, spent = solution.residual / scale, solution.n_sweeps
        limit = min(self.aim, SAFETY * tol)
        self.table += torch.stack([torch.ones_like(spent), spent, solution.status != 0, ~(relative <= limit)]).sum(1)

    def take(self) -> tuple[int, int, int, int]:
        """Return the counts since the last call; waits for the device."""
        samples, sweeps, missed, short = self.table.tolist()
        self.table.zero_()
        return samples, sweeps, missed, short


@final
class CapturedSteps:
    """Runs of training steps on a CUDA device, some steps a launch.

    Parameters
    ----------
    policy : SolvePolicy
        How solves are done outside of graphs; here they take a fixed number of sweeps.
    device : torch.device
    slopes : callable
        Computes the gradients of a batch, given by two tensors, the row numbers and the number of the step, under a policy, and
        returns the mean of losses.
    update : callable
        Changes the parameters, at the learning rate :attr:`rate`. Neither of the two may wait for the device.
    batch_size, steps : int
        Rows of a step, and steps of an epoch.
    aim : float
        Relative residual that nearly all solves should reach.
    sweeps : int, default=0
        :attr:`sweeps` of a run to be continued.

    Attributes
    ----------
    rate : Tensor of shape ()
        The learning rate of the present step.
    sweeps : int
        Sweeps of a solve; 0 as long as they have not been chosen.
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
    ) -> None:
        self._slopes, self._update, self._device = slopes, update, device
        self._clock = StepClock(steps, batch_size, device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._counts = DeviceCounts(aim, device)
        self._policy = replace(policy, observer=self._counts)
        self._own = OwnStream(device)
        self._stream = self._own.stream
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._warm = 0
        self.rate = self._clock.rate
        self.sweeps = sweeps

    @property
    def exhausted(self) -> bool:
        """Whether the ladder has ended; what is missed then is missed for good."""
        return self.sweeps == LADDER[-1]

    def begin(self, order: Tensor, rates: list[float], first: int, moment: int) -> None:
        """Set out an epoch, as in :meth:`StepClock.begin`."""
        self._clock.begin(order, rates, first, moment)

    def run(self, steps: int) -> tuple[float, tuple[int, int, int]]:
        """Take some steps; return the sum of losses, and samples, sweeps and missed solves."""
        with self._side_stream():
            if not self.sweeps:
                self.sweeps = next((rung for rung in LADDER if self._suffices(rung)), LADDER[-1])
            left = steps
            while left and self._warm < WARM_UP:
                self._step()
                self._warm, left = self._warm + 1, left - 1
            for size in BURSTS:
                for _ in range(left // size):
                    self.graph(size).replay()
                left %= size
            loss = float(self._loss)
            self._loss.zero_()
            samples, spent, missed, short = self._counts.take()
            self._climb(short > SHORT * samples)
        return loss, (samples, spent, missed)

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Work on a stream of our own, as capturing asks for, with solves that are counted on the device."""
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
        """Return the graph of so many steps at the present number of sweeps."""
        if (self.sweeps, steps) not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            others = next(iter(self._graphs.values()), None)
            pool = None if others is None else others.pool()
            # other threads may be training other networks meanwhile, but not capturing; torch.cuda.graph would have them wait
            # until the device is idle and all garbage is collected
            with _capturing:
                if others is None:
                    torch.cuda.empty_cache()  # what dead graphs still hold cannot be had while one is captured
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    for _ in range(steps):
                        self._step()
                finally:
                    graph.capture_end()
            self._graphs[self.sweeps, steps] = graph
        return self._graphs[self.sweeps, steps]

    def _suffices(self, sweeps: int) -> bool:
        """Try a number of sweeps on a batch of this epoch."""
        self._slopes(*self._clock.ahead(), replace(self._policy, fixed_sweeps=sweeps))
        samples, _, _, short = self._counts.take()
        return short <= 0.5 * SHORT * samples

    def _climb(self, too_few: bool) -> None:
        at = LADDER.index(self.sweeps)
        if too_few:
            self.sweeps = next((rung for rung in LADDER[at + 1 :] if self._suffices(rung)), LADDER[-1])
        elif at > 0 and self._suffices(LADDER[at - 1]):
            self.sweeps = LADDER[at - 1]
