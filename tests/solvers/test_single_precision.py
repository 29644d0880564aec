"""Float64 problems whose first sweeps are corrections in float32: as exact as without, at any scale, or float64 takes over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lrrn.qp import BoxQP, Status
from lrrn.solvers import coordinate_descent, solve
from oracles import random_input, random_network
from problems import assert_solves, make_qp
from spectra import HARD, with_spectrum


@pytest.fixture
def forced(monkeypatch):
    """Correct in float32 however small the problem is; returns how many rounds did."""
    rounds: list[int] = []

    class Watched(coordinate_descent._Descent):
        def advance(self, qp, z, g, sweeps, threshold):
            if self._single is not None and self._rounds < coordinate_descent.SINGLE_ROUNDS:
                rounds.append(len(z))
            return super().advance(qp, z, g, sweeps, threshold)

    monkeypatch.setattr(coordinate_descent, "SINGLE_FROM", 0)
    monkeypatch.setattr(coordinate_descent, "_Descent", Watched)
    return rounds


def own_bounds(qp: BoxQP) -> BoxQP:
    """The same problems with bounds of each sample's own, some of them pinned."""
    generator = torch.Generator().manual_seed(3)
    lo = -torch.rand(qp.q.shape, generator=generator, dtype=torch.float64) * (torch.rand(qp.q.shape, generator=generator) < 0.7)
    width = torch.rand(qp.q.shape, generator=generator, dtype=torch.float64) * (
        torch.rand(qp.q.shape, generator=generator) < 0.8
    )
    return replace(qp, lo=lo, hi=lo + width)


@pytest.mark.parametrize("tol", [1e-4, 1e-6, 1e-10])
@pytest.mark.parametrize("constraint", ["free", "nonneg", "box", (-0.05, 0.02)], ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["shared bounds", "own bounds"])
def test_answers_satisfy_the_kkt_conditions(forced, tol, constraint, own):
    qp = make_qp((9, 8, 7, 3), 21, torch.float64, "cpu", constraint=constraint)
    qp = own_bounds(qp) if own else qp
    assert_solves(qp, solve(qp, solver="coordinate_descent", tol=tol), tol)
    assert forced[0] == 21


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_corrections_take_no_more_sweeps_than_float64(forced, monkeypatch, scale):
    qp = make_qp((9, 8, 7, 3), 21, torch.float64, "cpu", constraint=(-0.3 * scale, 0.2 * scale), output_constraint="free")
    qp = replace(qp, q=qp.q * scale)
    mixed = solve(qp, solver="coordinate_descent", tol=1e-9 * min(1.0, scale)).n_sweeps
    monkeypatch.setattr(coordinate_descent, "SINGLE_FROM", float("inf"))
    plain = solve(qp, solver="coordinate_descent", tol=1e-9 * min(1.0, scale)).n_sweeps
    assert len(forced) == 2 and (mixed - plain).max() <= 2, (mixed, plain)


@pytest.mark.parametrize("scale", [1e-140, 1e-30, 1e30, 1e140])
def test_any_scale_of_the_right_hand_sides_will_do(forced, scale):
    qp = make_qp((9, 8, 7, 3), 12, torch.float64, "cpu", constraint="nonneg", output_constraint="free")
    exact = solve(qp, solver="newton", tol=1e-13).z
    # relative to |q|, which tol is not below 1
    tol = 1e-9 * min(1.0, scale)
    z = solve(replace(qp, q=qp.q * scale), solver="coordinate_descent", tol=tol).z / scale
    np.testing.assert_allclose(z, exact, atol=1e-8)
    assert forced


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_a_hessian_that_float32_cannot_hold_is_left_to_float64(forced, size):
    qp = make_qp((9, 8, 7, 3), 12, torch.float64, "cpu")
    h = type(qp.hessian)(tuple(block * size for block in qp.hessian.diag), tuple(block * size for block in qp.hessian.sub))
    scaled = replace(qp, hessian=h, q=qp.q * size)
    assert coordinate_descent.single(h) is None
    solution = solve(scaled, solver="coordinate_descent", tol=1e-9 * min(1.0, size))
    np.testing.assert_allclose(solution.z, solve(qp, solver="newton", tol=1e-13).z, atol=1e-8)
    assert not forced


@pytest.mark.parametrize("case", HARD)
def test_ill_conditioned_weights_still_converge(forced, case):
    sizes, top, low, gamma, options = case
    net = with_spectrum(sizes, top, low, gamma, **options)
    qp = net.energy_snapshot(torch.float64).free(random_input(50, sizes[0]))
    solution = solve(qp, tol=1e-6)
    assert solution.converged.all(), Status(int(solution.status.max())).message
    assert (qp.residual(solution.z) <= 1e-6 * qp.scale).all()


def test_corrections_that_make_things_worse_are_dropped(forced, monkeypatch):
    """A Hessian that float32 rounds to an indefinite one: no sweep in float32 may leave a worse point behind."""
    net = with_spectrum((30, 24, 20, 4), 3e4, 1e-3, 1.0, beta=(0.0, 0.0, 0.0))
    qp = net.energy_snapshot(torch.float64).free(random_input(20, 30))
    monkeypatch.setattr(coordinate_descent, "SINGLE_ROUNDS", 1000)
    start = qp.residual(qp.project(torch.zeros_like(qp.q)))
    ratio = solve(qp, solver="coordinate_descent", tol=1e-9, max_sweeps=32).residual / start
    assert ratio.max() < 1.5, ratio
    assert forced


def test_it_is_used_where_it_pays(monkeypatch):
    asked: list[int] = []
    make = coordinate_descent.single
    monkeypatch.setattr(coordinate_descent, "single", lambda h: asked.append(sum(h.sizes)) or make(h))
    for sizes, n, dtype in (
        ((20, 400, 5), 9, torch.float64),
        ((20, 40, 5), 9, torch.float64),
        ((20, 400, 5), 8, torch.float64),
    ):
        solve(random_network(sizes).energy_snapshot(dtype).free(random_input(n, 20)))
    wide = random_network((20, 400, 5), dtype=torch.float32)
    solve(wide.energy_snapshot(torch.float32).free(random_input(9, 20, dtype=torch.float32)))
    assert asked == [400]


def test_wide_problems_come_out_as_without(monkeypatch):
    qp = random_network((50, 300, 200, 10)).energy_snapshot(torch.float64).free(random_input(40, 50))
    mixed = solve(qp, tol=1e-9)
    monkeypatch.setattr(coordinate_descent, "SINGLE_FROM", float("inf"))
    plain = solve(qp, tol=1e-9)
    assert mixed.converged.all() and not torch.equal(mixed.z, plain.z)
    np.testing.assert_allclose(mixed.z, plain.z, atol=1e-7)
