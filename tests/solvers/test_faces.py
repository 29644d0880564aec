"""Coordinate descent that alternates with conjugate gradients on the faces of the box, as wide layers are solved.

Oracles: the KKT conditions recomputed in float64, energies, and sweeps alone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from lrrn import LRRN
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import DEFAULT_TOL, BoxQP, Status
from lrrn.solvers import conjugate_gradients, coordinate_descent, solve
from problems import assert_solves, make_qp


@pytest.fixture
def forced(monkeypatch):
    """Correct on faces however small the problem is; returns the energies before and after every correction."""
    energies: list[tuple[torch.Tensor, torch.Tensor]] = []
    corrected = conjugate_gradients.OnFaces._correct

    def energy(qp, z):
        z = z.double()
        return (z * (0.5 * z @ qp.hessian.dense().double() - qp.q.double())).sum(-1)

    def watched(self, qp, z, g, iterations, threshold):
        before = energy(qp, z)
        used = corrected(self, qp, z, g, iterations, threshold)
        assert ((z >= qp.lo) & (z <= qp.hi)).all()
        energies.append((before, energy(qp, z)))
        return used

    monkeypatch.setattr(coordinate_descent, "FACES_FROM", 0)
    monkeypatch.setattr(conjugate_gradients.OnFaces, "_correct", watched)
    return energies


def hard(dtype=torch.float64, n=19, scale=1.0) -> BoxQP:
    """Problems of a layer that is wider than its input, with condition number 300 and half of the units at their bound, 0."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(120, 40, generator=generator, dtype=torch.float64)
    w *= 300**0.5 / torch.linalg.matrix_norm(w, 2)
    h = torch.eye(120, dtype=torch.float64) + w @ w.mT
    q = scale * torch.randn(n, 40, generator=generator, dtype=torch.float64) @ w.mT
    lo, hi = torch.zeros((1, 120), dtype=dtype), torch.full((1, 120), torch.inf, dtype=dtype)
    return BoxQP(BlockTridiagonal((h.to(dtype),), ()), q.to(dtype), lo, hi)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("constraint", ["free", "nonneg", "box", (-0.05, 0.02)], ids=str)
def test_answers_satisfy_the_kkt_conditions(forced, dtype, constraint):
    qp = make_qp((9, 8, 7, 3), 21, dtype, "cpu", constraint=constraint)
    assert_solves(qp, solve(qp, solver="coordinate_descent"), DEFAULT_TOL[dtype])
    worse = hard(dtype)
    assert_solves(worse, solve(worse, solver="coordinate_descent"), DEFAULT_TOL[dtype])
    assert forced


def test_bounds_of_each_sample_and_units_that_cannot_move(forced):
    qp = hard(n=4)
    lo, hi = qp.lo.repeat(4, 1), qp.hi.repeat(4, 1)
    lo[1, 2] = hi[1, 2] = 0.25
    lo[2, :] = hi[2, :] = 0.5
    lo[3, 4:20], hi[3, 4:20] = -torch.inf, torch.inf
    qp = replace(qp, lo=lo, hi=hi)
    solution = solve(qp, solver="coordinate_descent", tol=1e-9)
    assert_solves(qp, solution, 1e-9)
    assert solution.z[1, 2] == 0.25 and (solution.z[2] == 0.5).all() and forced


def test_no_correction_raises_the_energy(forced):
    qp = hard()
    solve(qp, solver="coordinate_descent", tol=1e-10)
    assert len(forced) > 2
    for before, after in forced:
        # rounding of energies of this size, in float32 corrections
        assert (after <= before + 1e-12 * before.abs()).all()


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_faces_take_fewer_products_than_sweeps_alone(forced, monkeypatch, scale):
    qp = hard(scale=scale)
    tol = 1e-8 * min(1.0, scale)
    faces = solve(qp, solver="coordinate_descent", tol=tol)
    assert_solves(qp, faces, tol)
    monkeypatch.setattr(coordinate_descent, "FACES_FROM", float("inf"))
    sweeps = solve(qp, solver="coordinate_descent", tol=tol)
    assert faces.n_sweeps.double().mean() < 0.6 * sweeps.n_sweeps.double().mean()


def test_a_hessian_beyond_float32_has_sweeps_only(forced):
    qp = hard()
    far = replace(qp, hessian=BlockTridiagonal((qp.matrix.diag[0] * 1e40,), ()), q=qp.q * 1e40)
    assert solve(far, solver="coordinate_descent", tol=1e-10 * 1e-3).status.max() <= Status.STALLED
    assert not forced


def test_samples_that_are_not_finite_leave_the_others_alone(forced):
    qp = hard(n=6)
    q = qp.q.clone()
    q[2] = torch.nan
    found = solve(replace(qp, q=q), solver="coordinate_descent", tol=1e-8, max_sweeps=400)
    alone = solve(qp, solver="coordinate_descent", tol=1e-8)
    assert found.status[2] == Status.NON_FINITE
    others = [0, 1, 3, 4, 5]
    assert found.converged[others].all()
    assert torch.allclose(found.z[others], alone.z[others], atol=1e-6)


@pytest.mark.parametrize("beta", [(1.0, 0.0), (0.3, 0.0)], ids=str)
def test_products_by_the_factor_are_those_of_the_block(beta):
    net = LRRN((20, 50, 3), beta=beta, gamma=0.5, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    h, z = net.energy_snapshot(torch.float32).free_hessian, torch.randn(7, 50, generator=torch.Generator().manual_seed(1))
    assert h.factor is not None
    assert h.factor.saves_time
    torch.testing.assert_close(h.matmul(z), (z.double() @ h.diag[0].double()).float(), rtol=1e-5, atol=1e-5)


def test_only_products_of_wide_layers_in_float32_use_the_factor():
    """Proofs bound the rounding of products with the block, in float64."""
    for sizes, dtype in (((20, 50, 3), torch.float64), ((30, 50, 3), torch.float32), ((20, 50, 50, 3), torch.float32)):
        net = LRRN(sizes, dtype=dtype, generator=torch.Generator().manual_seed(0))
        energy = net.energy_snapshot(dtype)
        hessians = energy.free_hessian, energy.clamped_hessian
        assert not any(h.factor is not None and h.factor.saves_time for h in hessians)


@pytest.mark.parametrize(("sizes", "faces"), [((2048,), True), ((1024,), False), ((64,) * 32, False)], ids=str)
def test_wide_layers_have_faces_and_deep_networks_of_as_many_units_have_none(sizes, faces):
    diag = tuple(2 * torch.eye(size) for size in sizes)
    sub = tuple(torch.zeros(above, below) for below, above in itertools.pairwise(sizes))
    bound = torch.ones((1, sum(sizes)))
    qp = BoxQP(BlockTridiagonal(diag, sub), torch.ones((3, sum(sizes))), -bound, bound)
    assert isinstance(coordinate_descent.CoordinateDescent().begin(qp), conjugate_gradients.OnFaces) == faces
