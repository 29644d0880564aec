"""Solves with convolutions in half precision: products against the Hessian, and the kernels (on a GPU, or interpreted)."""

from __future__ import annotations

import pytest
import torch

import lrrn
from convolutions import ARCHITECTURES, images, network
from lrrn.linalg.half_products import HalfHessian
from lrrn.runtime.devices import has_kernels
from lrrn.solvers import solve, solve_fixed
from lrrn.solvers.base import recompute
from tolerances import UNIT

HALF = 2.0**-11
NAMES = list(ARCHITECTURES)


@pytest.fixture
def kernels(device):
    """Skip unless kernels run."""
    if not has_kernels(torch.zeros(1, device=device)):
        pytest.skip("the kernels need Triton, and a CUDA device or TRITON_INTERPRET=1")
    return device


def energy_of(name, monkeypatch, dtype, device="cpu"):
    return network(name, monkeypatch, dtype=dtype).to(device).energy_snapshot(dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("phase", ["free", "clamped"])
def test_products_are_those_of_the_hessian(name, phase, monkeypatch, device):
    energy = energy_of(name, monkeypatch, torch.float64, device)
    hessian = energy.free_hessian if phase == "free" else energy.clamped_hessian
    scale = 7.0
    half = HalfHessian(hessian, torch.tensor(scale, dtype=torch.float32, device=device))
    v = torch.randn((4, hessian.dim), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    parts = [block.reshape(4, c, p) for block, (c, p) in zip(hessian.split(v), half.channels_and_pixels, strict=True)]
    given = [part.mT.reshape(4, *shape).half() for part, shape in zip(parts, half.shapes, strict=True)]
    found = [product.double().reshape(part.mT.shape).mT for product, part in zip(half.products(given), parts, strict=True)]
    whole = [scale * p + d * part for p, d, part in zip(found, half.identity, parts, strict=True)]
    gap = torch.cat([block.flatten(1) for block in whole], 1) - hessian.matmul(v)
    # rounded to half precision: v, the weights twice, the intermediate image, pooled, and the sums
    assert (gap.norm(dim=1) <= 12 * HALF * hessian.size * v.norm(dim=1)).all()
    assert (gap.norm(dim=1) <= 0.01 * hessian.matmul(v).norm(dim=1)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype, tol, near", [(torch.float32, 1e-5, 1e-4), (torch.float64, 1e-10, 1e-8)], ids=["32", "64"])
def test_solutions_and_adjoints_are_those_of_newton(name, dtype, tol, near, monkeypatch, kernels):
    if kernels == "cpu" and name not in ("one", "two", "bounded"):
        pytest.skip("interpreted kernels are slow")
    net = network(name, monkeypatch, dtype=dtype).to(kernels)
    energy, x = net.energy_snapshot(dtype), images(net.cpu(), 5).flatten(1).to(kernels, dtype)
    exact = energy.to(torch.float64, "cpu").unfolded
    qp, twin = energy.free(x), exact.free(x.cpu().double())
    mine, theirs = solve(qp, solver="accelerated", tol=tol), solve(twin, solver="newton", tol=1e-12)
    assert mine.converged.all()
    # recomputed with other samples in the batch, so not to the bit
    assert (mine.residual - recompute(qp, mine.z)[1]).abs().max() <= 64 * UNIT[dtype] * energy.free_hessian.size * mine.z.norm()
    assert (mine.z >= qp.lo).all() and (mine.z <= qp.hi).all()
    assert (mine.z.cpu() - theirs.z).norm() <= near * theirs.z.norm()
    v = torch.randn(theirs.z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = solve(energy.adjoint(mine.z, v.to(kernels, dtype)), solver="accelerated", tol=tol)
    theirs = solve(exact.adjoint(theirs.z.to(dtype).double(), v), solver="newton", tol=1e-12)
    assert mine.converged.all()
    assert (mine.z.cpu() - theirs.z).norm() <= near * theirs.z.norm()
    assert (mine.z[theirs.z.to(kernels) == 0] == 0).all()


def test_a_fixed_number_of_sweeps(monkeypatch, kernels):
    energy = energy_of("two", monkeypatch, torch.float32, kernels)
    x = torch.rand((6, 64), generator=torch.Generator().manual_seed(0)).to(kernels)
    qp = energy.free(x)
    best = solve(qp, solver="accelerated", tol=1e-6, max_sweeps=5000)
    for start in (None, best.z * 1.01):
        found = solve_fixed(qp, 48, tol=1e-3, aim=1e-3, start=start)
        # from a warm start, convolutions take 0.6 of the sweeps
        assert found.converged.all() and (found.n_sweeps == (48 if start is None else 29)).all()
    few = solve_fixed(qp, 2, tol=1e-6, aim=1e-6)
    assert not few.converged.any()
    assert torch.allclose(few.residual, recompute(qp, few.z)[1])


@pytest.mark.parametrize("interval, holds", [((0.5, 9.0), False), ((-0.5, 0.5), True)])
def test_a_cold_start_needs_no_product_only_if_zero_is_feasible(interval, holds, monkeypatch, kernels):
    net = network("one", monkeypatch, dtype=torch.float32)
    twin = lrrn.LRRN(((2, 7, 6), lrrn.Conv(4, 3, 2, 1), 5), constraint=interval, dtype=torch.float32)
    twin.load_state_dict(net.state_dict())
    energy = twin.to(kernels).energy_snapshot(torch.float32)
    qp = energy.free(torch.rand((4, 84), generator=torch.Generator().manual_seed(0)).to(kernels))
    assert qp.holds_zero == holds
    exact = solve(qp, solver="accelerated", tol=1e-6, max_sweeps=5000)
    found = solve_fixed(qp, 48, tol=1e-3, aim=1e-3)
    assert found.converged.all() and (found.z - exact.z).norm() <= 1e-2 * exact.z.norm()
    # one round: the correction is right only if it begins from the gradient of the point that it begins from
    once = solve_fixed(qp, 32, tol=0.5, aim=0.5)
    assert (once.z - exact.z).norm() <= 0.02 * exact.z.norm()


def test_samples_of_very_different_sizes(monkeypatch, kernels):
    energy = energy_of("one", monkeypatch, torch.float64, kernels)
    x = torch.rand((1, energy.sizes[0]), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(kernels)
    together = solve(energy.free(torch.cat([x * 1e-6, x, x * 1e6])), solver="accelerated", tol=1e-9)
    alone = [solve(energy.free(x * size), solver="accelerated", tol=1e-9).z for size in (1e-6, 1.0, 1e6)]
    assert together.converged.all()
    for mine, theirs in zip(together.z, alone, strict=True):
        assert (mine - theirs[0]).norm() <= 1e-7 * max(1.0, float(theirs.norm()))


def test_tolerances_beyond_single_precision(monkeypatch, kernels):
    energy = energy_of("pooled", monkeypatch, torch.float64, kernels)
    x = torch.rand((3, energy.sizes[0]), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(kernels)
    found = solve(energy.free(x), solver="accelerated", tol=1e-13)
    assert found.converged.all() and found.residual.max() <= 1e-13 * energy.free(x).scale.max()


def test_a_sample_without_anything_to_solve(monkeypatch, kernels):
    energy = energy_of("one", monkeypatch, torch.float64, kernels)
    v = torch.randn((2, sum(energy.free_sizes)), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(kernels)
    v[1] = 0
    found = solve_fixed(energy.adjoint(torch.ones_like(v), v), 48, tol=1e-4, aim=1e-6)
    assert found.converged.all() and (found.z[1] == 0).all()
