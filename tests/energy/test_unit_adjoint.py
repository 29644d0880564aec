"""The adjoint for gradients of length one: by torch, and by its kernel, on a GPU or interpreted."""

from __future__ import annotations

import math

import pytest
import torch

from lrrn.energy import adjoint
from lrrn.energy.adjoint import unit_adjoint
from oracles import random_input, random_network


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", [False, True])
def test_directions_lengths_and_free_units_of_the_kernel_are_those_by_hand(device, dtype, kernel, monkeypatch):
    if kernel and not adjoint.has_kernels(torch.zeros(1, device=device)):
        pytest.skip("the kernel needs Triton, and a CUDA device or TRITON_INTERPRET=1")
    monkeypatch.setattr(adjoint, "WIDEST", 8192 if kernel else 0)
    net = random_network((5, 9, 3), (1.0, 0.0), constraint=(-0.5, 0.5), dtype=dtype, device=device)
    energy = net.energy_snapshot(dtype)
    z = random_input(4, 9, dtype=dtype, device=device).clamp_(-0.5, 0.5)
    v = random_input(4, 9, seed=1, dtype=dtype, device=device)
    v *= torch.tensor([1.0, 0.0, 1e-30, 1e30], device=device, dtype=dtype)[:, None]  # squares leave the range of float32
    qp, size = unit_adjoint(energy, z, v)
    exact = v.double().norm(dim=1)
    torch.testing.assert_close(size[:, 0].double(), exact, rtol=1e-6, atol=0)
    lengths = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64, device=device)
    torch.testing.assert_close(qp.q.double().norm(dim=1), lengths, rtol=1e-6, atol=0)
    torch.testing.assert_close(qp.q * size, v, rtol=1e-6, atol=0)
    free = z.abs() < 0.5
    assert free.any() and not free.all() and qp.linear and qp.holds_zero
    assert torch.equal(qp.hi, torch.where(free, math.inf, 0.0).to(dtype)) and torch.equal(qp.lo, -qp.hi)
    assert qp.hessian is energy.free_hessian


def test_rows_below_the_mean_length_are_divided_by_it_if_only_their_sum_counts(monkeypatch):
    monkeypatch.setattr(adjoint, "WIDEST", 0)
    energy = random_network((5, 9, 3), (1.0, 0.0)).energy_snapshot(torch.float64)
    z, v = random_input(3, 9), random_input(3, 9, seed=1)
    v *= (torch.tensor([0.0, 1.0, 5.0]) / v.norm(dim=1))[:, None]
    qp, size = unit_adjoint(energy, z, v, summed=True)
    torch.testing.assert_close(size[:, 0], torch.tensor([2.0, 2.0, 5.0], dtype=torch.float64))
    torch.testing.assert_close(qp.q.norm(dim=1), torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))
    torch.testing.assert_close(qp.q * size, v)
