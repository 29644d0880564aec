"""The clock of captured steps: what it announces against the epoch it was given; in torch, interpreted, or on a GPU."""

from __future__ import annotations

from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from lrrn.learning import clock as module
from lrrn.learning import cuda_graph
from lrrn.learning.clock import StepClock
from lrrn.learning.cuda_graph import BURSTS, EARLY, STREAMS, CapturedSteps, DeviceCounts, OwnStream, until_look
from lrrn.qp import QPSolution


@pytest.fixture(params=[False, True], ids=["torch", "kernel"])
def clock(request, device, monkeypatch):
    made = StepClock(7, 300, torch.device(device))
    if request.param and not module.has_kernels(made.rows):
        pytest.skip("the kernel needs Triton, and a CUDA device or TRITON_INTERPRET=1")
    monkeypatch.setattr(module, "has_kernels", lambda t: request.param)
    return made


def test_steps_are_announced_one_after_the_other(clock):
    generator = torch.Generator().manual_seed(0)
    order = torch.randint(2**40, (7, 300), generator=generator)
    rates = [0.5 / (k + 1) for k in range(7)]
    clock.begin(order, rates, 2, 2**33)
    for k in range(2, 7):
        rows, moment = clock.ahead()
        assert torch.equal(rows.cpu(), order[k]) and int(moment) == 2**33 + k - 2
        clock.tick()
        assert torch.equal(clock.rows.cpu(), order[k])
        assert float(clock.rate) == pytest.approx(rates[k]) and int(clock.moment) == 2**33 + k - 2
    # after the last one there is nothing to announce, but there are rows to try things on
    assert torch.equal(clock.ahead()[0].cpu(), order[6])
    clock.rewind()
    clock.tick()
    assert torch.equal(clock.rows.cpu(), order[0]) and int(clock.moment) == 2**33 + 5


def test_looks_become_rarer_and_graphs_fit_in_between():
    steps = [until_look(moment) for moment in (0, 255, 512, 2047, 4096, 10**9)]
    assert steps == sorted(steps) and steps[0] < steps[2] < steps[4] == steps[5]
    # an early look is as many steps as one graph has, a late one as many as several have
    assert steps[0] in BURSTS and all(count % BURSTS[1] == 0 for count in steps[2:]) and steps[-1] % BURSTS[0] == 0
    assert BURSTS[-1] == 1


def test_early_steps_take_more_sweeps_than_are_enough():
    steps = object.__new__(CapturedSteps)
    steps._suffices = lambda sweeps: sweeps >= 20
    for moment, sweeps in ((0, 24), (EARLY - 1, 24), (EARLY, 20)):
        steps._moment = moment
        steps._raise(0)
        assert steps.sweeps == sweeps
        # nor are they lowered early
        steps.sweeps = 24
        steps._climb(False, True)
        assert steps.sweeps == sweeps
    steps._suffices = lambda sweeps: False
    steps._climb(True, False)
    assert steps.exhausted


def test_counts_are_samples_sweeps_and_what_missed(device):
    residual = torch.tensor([0.0, 4e-5, 6e-5, 2e-4, float("nan")], dtype=torch.float64, device=device)
    scale = torch.tensor([1.0, 1.0, 1.0, 8.0, 1.0], dtype=torch.float64, device=device)
    spent, status = (torch.tensor(numbers, device=device) for numbers in ([7, 7, 7, 7, 7], [0, 0, 0, 1, 3]))
    counts = DeviceCounts(1e-3, residual.device)
    for _ in range(2):
        counts(QPSolution(residual, residual, residual, spent, status, ()), scale, 1e-4, "free phase")
    # the limit is half the tolerance: 6e-5 is above it, and so is what is not a number
    assert counts.take() == (10, 70, 4, 4) and counts.take() == (0, 0, 0, 0)


def test_streams_are_shared_only_when_there_is_no_other_and_then_evenly(monkeypatch):
    handles = cycle(range(100, 100 + STREAMS))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=next(handles)))
    monkeypatch.setattr(cuda_graph, "_streams", {})
    device = torch.device("cuda", 0)
    first = [OwnStream(device) for _ in range(STREAMS)]
    assert len({own.stream.cuda_stream for own in first}) == len({id(own.turn) for own in first}) == STREAMS
    second = [OwnStream(device) for _ in range(STREAMS)]
    assert len({own.stream.cuda_stream for own in second}) == STREAMS
    turns = {own.stream.cuda_stream: own.turn for own in first}
    assert all(own.turn is turns[own.stream.cuda_stream] for own in second)
    # one with fewer owners is found, wherever torch's counter stands
    freed = first.pop(7).stream.cuda_stream
    assert OwnStream(device).stream.cuda_stream == freed
