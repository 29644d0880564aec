"""The clock of captured steps: what it announces against the epoch it was given; in torch, interpreted, or on a GPU."""

from __future__ import annotations

from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from lrrn.learning import clock as module
from lrrn.learning import cuda_graph
from lrrn.learning.clock import StepClock
from lrrn.learning.cuda_graph import BURSTS, STREAMS, OwnStream, until_look


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
    steps = [until_look(moment) for moment in (0, 255, 256, 4095, 4096, 10**9)]
    assert steps == sorted(steps) and steps[0] < steps[2] < steps[4] == steps[5]
    # an early look is as many steps as one graph has, a late one as many as several of the largest have
    assert steps[0] in BURSTS and all(count % BURSTS[0] == 0 for count in steps[2:]) and BURSTS[-1] == 1


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
