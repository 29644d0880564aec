"""Conjugate gradients on the dual of one wide layer.

Oracles: the KKT conditions recomputed in float64, Newton's method and linear equations in float64, and solvers on the units.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lrrn.linalg.blocks import BlockTridiagonal, Deferred, Factor, shifted_gram
from lrrn.qp import DEFAULT_TOL, BoxQP, Status
from lrrn.solvers import dual, loop, solve
from oracles import random_input, random_network
from problems import assert_solves, make_qp


@pytest.fixture
def forced(monkeypatch):
    """Solve on the dual however small the problem is; returns the number of samples of every call."""
    calls: list[int] = []
    advance = dual.Dual.advance

    def watched(self, qp, z, g, sweeps, threshold):
        calls.append(len(z))
        used = advance(self, qp, z, g, sweeps, threshold)
        assert ((z >= qp.lo) & (z <= qp.hi)).logical_or(z.isnan()).all() and int(used.max()) <= sweeps
        return used

    monkeypatch.setattr(dual, "UNITS_FROM", 0)
    monkeypatch.setattr(dual, "SAMPLES_FROM", 0)
    monkeypatch.setattr(dual.Dual, "advance", watched)
    return calls


def hard(n=150, inputs=40, lo=0.0, hi=torch.inf, size=300.0) -> BoxQP:
    """Problems of a layer that is wider than its input, with condition number 300 and half of the units at a bound."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(120, inputs, generator=generator, dtype=torch.float64)
    w *= torch.logspace(0, -1.5, inputs, dtype=torch.float64)
    w *= size**0.5 / torch.linalg.matrix_norm(w, 2)
    q = torch.randn(n, inputs, generator=generator, dtype=torch.float64) @ w.mT
    factor = Factor(0.5, 0.5, w.float())
    bounds = (torch.full((1, 120), bound) for bound in (lo, hi))
    return BoxQP(BlockTridiagonal(Deferred(factor), (), factor), q.float(), *bounds, holds_zero=lo <= 0 <= hi)


def in_double(qp: BoxQP) -> BoxQP:
    """The same problems without a factor."""
    return BoxQP(qp.hessian.to(torch.float64), qp.q.double(), qp.lo.double(), qp.hi.double())


def equations(n=150, inputs=40) -> BoxQP:
    """Linear equations on the units that are inside their bounds at the solutions of hard problems."""
    qp = hard(n, inputs)
    reach = torch.where(solve(in_double(qp), solver="newton").z > 0, torch.inf, 0.0).float()
    q = torch.randn(n, 120, generator=torch.Generator().manual_seed(1))
    return BoxQP(qp.hessian, q / q.norm(dim=1, keepdim=True), -reach, reach, linear=True, holds_zero=True)


@pytest.mark.parametrize("sizes", [(1, 3), (3, 8), (10, 40), (30, 61)], ids=str)
@pytest.mark.parametrize("constraint", ["free", "nonneg", "box", (-0.2, 0.1), (0.3, 0.4)], ids=str)
@pytest.mark.parametrize("n", [1, 5, 70])
def test_satisfies_the_kkt_conditions(forced, sizes, constraint, n):
    qp = make_qp(sizes, n, torch.float32, "cpu", output_constraint=constraint)
    assert_solves(qp, solve(qp), DEFAULT_TOL[torch.float32])
    assert forced or (n == 1 and sizes == (1, 3))  # zero, projected, may be the solution


@pytest.mark.parametrize("bounds", [(0.0, torch.inf), (-0.1, 0.2), (0.05, 0.1)], ids=str)
@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-5])
def test_finds_the_solution_of_hard_problems(forced, bounds, tol):
    qp = hard(lo=bounds[0], hi=bounds[1])
    found, exact = solve(qp, solver="accelerated", tol=tol), solve(in_double(qp), solver="newton", tol=1e-11)
    assert found.converged.all() and forced
    # |z - z*| <= |r| / mu, and mu is at least 0.5; the residual is computed in float32
    distance = (found.z.double() - exact.z).norm(dim=1)
    assert (distance <= 2 * (tol * qp.scale + 1e-5 * qp.scale)).all()


def test_linear_equations_are_solved_within_as_many_iterations_as_inputs(forced):
    qp = equations(inputs=6)
    found = solve(qp, solver="accelerated", tol=1e-5)
    # one more for rounding
    assert found.converged.all() and int(found.n_sweeps.max()) <= 7
    h = qp.hessian.dense().double()
    for i in range(0, qp.n_samples, 7):
        inside = qp.hi[i] > 0
        right = torch.linalg.solve(h[inside][:, inside], qp.q[i, inside].double())
        assert float((found.z[i, inside].double() - right).norm()) <= 2 * 2e-5
        assert (found.z[i, ~inside] == 0).all()


def test_needs_fewer_products_than_solvers_on_the_units(forced, monkeypatch):
    free, linear = hard(), equations()
    ours = [solve(qp, tol=1e-4).n_sweeps.double().mean() for qp in (free, linear)]
    monkeypatch.setattr(dual, "UNITS_FROM", 10**9)
    others = [solve(qp, tol=1e-4, solver="accelerated").n_sweeps.double().mean() for qp in (free, linear)]
    assert ours[0] < 0.5 * others[0] and ours[1] < 0.7 * others[1]


def test_what_is_expected_of_units_saves_iterations_and_changes_nothing_else(forced):
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(400, 60, generator=generator) * 0.7
    # the first half of the units is inside in all samples, the other half in none
    pull = torch.where(torch.arange(400) < 200, 9.0, -9.0) + torch.randn(100, 400, generator=generator)
    factor, z = Factor(1.0, 1.0, w), pull.clamp(min=0)
    q = pull + z @ w @ w.mT
    lo, hi = torch.zeros(1, 400), torch.full((1, 400), torch.inf)
    qp = BoxQP(BlockTridiagonal(Deferred(factor), (), factor), q, lo, hi, holds_zero=True)
    told = solve(replace(qp, expected=(z > 0).float().mean(0)), tol=1e-6)
    guessed = solve(qp, tol=1e-6)
    assert told.converged.all() and guessed.converged.all()
    assert told.n_sweeps.double().mean() < 0.8 * guessed.n_sweeps.double().mean()
    torch.testing.assert_close(told.z, z, rtol=0, atol=5e-2)
    torch.testing.assert_close(told.z, guessed.z, rtol=0, atol=5e-2)


def test_bounds_per_sample_and_units_whose_bounds_meet(forced):
    qp = hard(n=4)
    lo, hi = qp.lo.repeat(4, 1), qp.hi.repeat(4, 1)
    lo[1, 2] = hi[1, 2] = 0.25
    lo[2, :] = hi[2, :] = 0.5
    lo[3, 4:6] = -torch.inf
    qp = BoxQP(qp.hessian, qp.q, lo, hi)
    solution = solve(qp)
    assert_solves(qp, solution, DEFAULT_TOL[torch.float32])
    assert solution.z[1, 2] == 0.25 and (solution.z[2] == 0.5).all() and forced


def test_a_start_at_the_solution_costs_nothing_and_one_nearby_little(forced):
    qp = hard()
    first = solve(qp)
    again = solve(qp, start=first.z)
    assert (again.n_sweeps == 0).all() and torch.equal(again.z, first.z) and len(forced) > 0
    moved = replace(qp, q=qp.q * 1.01)
    warm = solve(moved, start=first.z)
    assert_solves(moved, warm, DEFAULT_TOL[torch.float32])
    assert warm.n_sweeps.double().mean() < 0.8 * first.n_sweeps.double().mean()


def test_samples_that_are_not_finite_leave_the_others_alone(forced):
    qp = hard()
    q = qp.q.clone()
    q[2], q[7, 5] = torch.nan, torch.inf
    found, right = solve(replace(qp, q=q)), solve(qp)
    rows = torch.tensor([i for i in range(qp.n_samples) if i not in (2, 7)])
    assert (found.status[[2, 7]] == Status.NON_FINITE).all() and found.converged[rows].all()
    torch.testing.assert_close(found.z[rows], right.z[rows], rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", [1e-6, 1e6, 1e30])
def test_weights_of_any_size_are_solved_or_flagged(forced, size):
    qp = hard(n=8, size=size)
    found = solve(qp, solver="accelerated", max_sweeps=300)
    assert torch.equal(found.converged, found.residual <= DEFAULT_TOL[torch.float32] * qp.scale)
    assert size > 1 or found.converged.all()


def test_max_sweeps_is_respected_and_reported(forced):
    qp = hard()
    solution = solve(qp, solver="accelerated", tol=1e-6, max_sweeps=1)
    assert (solution.n_sweeps == 1).all() and (solution.status == Status.MAX_SWEEPS).all()


def test_the_same_call_gives_the_same_bits_whatever_was_solved_before(forced):
    qp = hard()
    first = solve(qp)
    solve(replace(qp, expected=torch.rand(120, generator=torch.Generator().manual_seed(0))))
    solve(equations())
    assert torch.equal(solve(qp).z, first.z)


def test_inputs_are_left_alone(forced):
    qp = hard(n=5)
    start, expected = torch.full_like(qp.q, 0.1), torch.full((120,), 0.3)
    qp = replace(qp, expected=expected)
    before = [t.clone() for t in (qp.q, qp.lo, qp.hi, start, expected, qp.hessian.dense())]
    solve(qp, start=start)
    after = (qp.q, qp.lo, qp.hi, start, expected, qp.hessian.dense())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_matrix_is_not_computed_unless_it_is_used(forced):
    energy = random_network((20, 50, 3), beta=(1.0, 0.0), gamma=0.5, dtype=torch.float32).energy_snapshot(torch.float32)
    x = random_input(9, 20, dtype=torch.float32)
    found = solve(energy.free(x))
    h = energy.free_hessian
    assert found.converged.all() and h.sizes == (50,) and h.dtype == torch.float32
    assert "_blocks" not in vars(h.diag)
    assert torch.equal(h.dense(), shifted_gram(energy.weights[0], 1.0, 1.0)) and "_blocks" in vars(h.diag)


def test_auto_solves_large_batches_of_wide_layers_in_float32_on_the_dual():
    def first(inputs, units, n, dtype=torch.float32, beta=1.0):
        w = torch.zeros(units, inputs, dtype=dtype)
        factor = Factor(1.0, beta, w)
        q = torch.zeros(n, units, dtype=dtype)
        return loop.plan("auto", BoxQP(BlockTridiagonal(Deferred(factor), (), factor), q, q[:1], q[:1]))[0].name

    assert first(512, 1024, 64) == "accelerated"
    for arguments in ((513, 1024, 64), (500, 1023, 64), (512, 1024, 63), (512, 1024, 64, torch.float64)):
        assert first(*arguments) == "coordinate_descent"
    assert first(512, 1024, 64, beta=0.0) == "coordinate_descent"
