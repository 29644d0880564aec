"""The kernels of Adam's steps against torch's own optimisers: on the CPU, interpreted, or on a GPU."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
import torch

from lrrn.kernels.cpu.several_steps import update
from lrrn.learning import Contrastive, Settings
from lrrn.learning.flat import FlatParameters
from lrrn.learning.flat_adam import FlatAdam
from lrrn.learning.step import Step
from oracles import random_network

CASES = {"adam": {"optimizer": "adam"}, "adamw": {"optimizer": "adamw", "decoupled_weight_decay": 0.3}}


def begin(case, frozen, device, dtype=torch.float32):
    """Return a vector of parameters, of which some may have to stay as they are, and the optimiser that training would use."""
    net = random_network((40, 30, 12, 4), dtype=dtype, device=device)
    for parameter in (net.W[1], net.b[1]) if frozen else ():
        parameter.requires_grad_(False)
    flat = FlatParameters(net)
    return flat, Step(net, Contrastive(), Settings(learning_rate=0.01, **CASES[case]), flat).optimizer


@pytest.fixture
def kernels(device):
    flat, optimizer = begin("adam", False, device)
    if not FlatAdam.applies(optimizer, flat):
        pytest.skip("the kernel needs Triton, and a CUDA device or TRITON_INTERPRET=1")
    return device


def slopes(steps, flat):
    """Gradients of all sizes, some of them zero."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        g = torch.randn(len(flat.vector), generator=generator, dtype=torch.float64) * 10.0 ** (step % 5 - 3)
        yield torch.where(g.abs() < 1e-4, 0, g)


def take(adam, flat, rate):
    """Take a step on the device of the parameters."""
    if flat.vector.is_cuda or os.environ.get("TRITON_INTERPRET"):
        adam()
    else:
        update(flat.vector.numpy(), flat.gradient.numpy(), 0, 1, 1, rate, adam.rule(0.0, np.empty((0, 2))))


def assert_near(found, exact):
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("frozen", [False, True], ids=["all learn", "some do not"])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_torchs(kernels, case, frozen):
    (flat, optimizer), (exact, torchs) = (begin(case, frozen, kernels, dtype) for dtype in (torch.float32, torch.float64))
    groups = [len(group["params"]) for group in optimizer.param_groups]
    assert (
        groups == {("adam", False): [1], ("adam", True): [3], ("adamw", False): [1, 1], ("adamw", True): [2, 2]}[case, frozen]
    )
    adam, before = FlatAdam(optimizer, flat), flat.vector.clone()
    for step, slope in enumerate(slopes(20, flat)):
        flat.gradient.copy_(slope)
        exact.gradient.copy_(slope)
        rate = 0.01 * (step + 1)
        optimizer.param_groups[0]["lr"] = torch.tensor(rate, device=kernels)
        for group in torchs.param_groups:
            group["lr"] = rate
        take(adam, flat, rate)
        torchs.step()
        if step == 9:  # as a checkpoint does
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            adam = FlatAdam(optimizer, flat)
    assert_near(flat.vector, exact.vector)
    learnt = torch.zeros_like(flat.vector, dtype=torch.bool)
    found, right = (o.state_dict()["state"] for o in (optimizer, torchs))
    assert found.keys() == right.keys()
    for index, state in found.items():
        assert state.keys() == right[index].keys() and float(state["step"]) == 20
        for name in ("exp_avg", "exp_avg_sq"):
            assert_near(state[name], right[index][name])
    for group in optimizer.param_groups:
        for stretch in group["params"]:
            learnt[stretch.storage_offset() :][: len(stretch)] = True
    assert torch.equal(flat.vector[~learnt], before[~learnt]) and bool((~learnt).any()) == frozen


def test_torchs_own_step_goes_on_from_there(kernels):
    (flat, optimizer), (exact, torchs) = (begin("adamw", True, kernels, dtype) for dtype in (torch.float32, torch.float64))
    adam = FlatAdam(optimizer, flat)
    for step, slope in enumerate(slopes(6, flat)):
        flat.gradient.copy_(slope)
        exact.gradient.copy_(slope)
        if step % 2:
            optimizer.step()
        else:
            take(adam, flat, 0.01)
        torchs.step()
    assert_near(flat.vector, exact.vector)


def test_other_optimisers_are_left_to_torch(kernels):
    flat, optimizer = begin("adam", False, kernels)
    assert not FlatAdam.applies(torch.optim.SGD(flat.everything(), lr=0.1), flat)
    assert FlatAdam.applies(optimizer, begin("adam", False, kernels, torch.float64)[0]) == (str(kernels) == "cpu")
