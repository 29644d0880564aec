"""The accelerated solver's parts: its bound on the spectrum, and the kernel (on a GPU, or interpreted) against a reference."""

from __future__ import annotations

import math

import pytest
import torch

from lrrn.solvers import solve
from lrrn.solvers.accelerated import ON_CHIP, fits_on_chip, largest_by_squaring
from oracles import random_input, random_network


@pytest.mark.parametrize("n", [1, 3, 40])
@pytest.mark.parametrize("times", [0, 3, 8])
def test_powers_bound_the_largest_eigenvalue_from_above(n, times):
    generator = torch.Generator().manual_seed(n)
    root = torch.randn(n, n, dtype=torch.float64, generator=generator)
    for scale in (1e-20, 1.0, 1e20):
        a = scale * root @ root.mT
        exact = float(torch.linalg.eigvalsh(a)[-1])
        bound = float(largest_by_squaring(a, times))
        assert exact * (1 - 1e-12) <= bound <= exact * n ** (1 / 2 ** (times + 1)) * (1 + 1e-12)
    assert float(largest_by_squaring(torch.zeros(n, n), times)) < 1e-30


def problem(sizes, n, dtype, device, **options):
    options.setdefault("output_constraint", "box")
    net = random_network(sizes, dtype=dtype, device=device, **options)
    return net.energy_snapshot(dtype).free(random_input(n, sizes[0], dtype=dtype, device=device))


@pytest.fixture
def on_chip(device):
    """Skip unless the kernel is what runs."""
    if not fits_on_chip(problem((4, 3), 1, torch.float32, device)):
        pytest.skip("the kernel needs Triton, and a CUDA device or TRITON_INTERPRET=1")
    return device


@pytest.mark.parametrize("n", [1, 16, 17, 33])
@pytest.mark.parametrize("sizes", [(5, 3), (6, 16, 3), (9, 20, 17, 4)])
def test_the_kernel_fills_tiles_and_widths_of_any_size(on_chip, n, sizes):
    for dtype, tol, near in ((torch.float32, 1e-5, 1e-4), (torch.float64, 1e-10, 1e-8)):
        qp = problem(sizes, n, dtype, on_chip)
        found = solve(qp, solver="accelerated", tol=tol)
        exact = solve(problem(sizes, n, torch.float64, on_chip), solver="newton", tol=1e-12)
        assert found.converged.all()
        torch.testing.assert_close(found.z.double(), exact.z, rtol=0, atol=near * float(exact.z.abs().max()))


def test_the_kernel_leaves_what_is_not_finite_alone(on_chip):
    qp = problem((6, 8, 3), 5, torch.float32, on_chip)
    spoiled = qp.q.clone()
    spoiled[2, 1] = math.inf
    bad = type(qp)(qp.hessian, spoiled, qp.lo, qp.hi)
    found, clean = (solve(p, solver="accelerated") for p in (bad, qp))
    others = [0, 1, 3, 4]
    assert not bool(found.converged[2]) and found.converged[others].all()
    assert torch.equal(found.z[others], clean.z[others])


def test_wide_problems_do_not_go_through_the_kernel(device):
    assert not fits_on_chip(problem((4, ON_CHIP, 1), 1, torch.float32, device))
