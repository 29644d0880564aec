"""The clock of captured steps: what it announces against the epoch it was given; in torch, interpreted, or on a GPU."""

from __future__ import annotations

import pytest
import torch

from lrrn.learning import clock as module
from lrrn.learning.captured import BURST, until_look
from lrrn.learning.clock import StepClock


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
    assert all(count % BURST == 0 for count in steps)
