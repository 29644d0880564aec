"""The loop and ``auto``: hand-over, ill-conditioned weights, early failures."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import BoxQP, Status
from lrrn.solvers import SOLVERS, loop, solve
from oracles import random_input, random_network
from spectra import HARD, with_spectrum


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("solver", ["newton", "auto"])
def test_ill_conditioned_weights_still_converge(case, solver):
    sizes, top, low, gamma, options = case
    net = with_spectrum(sizes, top, low, gamma, **options)
    qp = net.energy_snapshot(torch.float64).free(random_input(50, sizes[0]))
    solution = solve(qp, solver=solver, tol=1e-6)
    assert solution.converged.all(), Status(int(solution.status.max())).message
    assert (qp.residual(solution.z) <= 1e-6 * qp.scale).all()


def test_auto_hands_slow_samples_to_newton_and_says_so(caplog):
    net = with_spectrum((30, 24, 20, 4), 70.0, 0.01, 1 / 8, beta=(1.0, 1.0, 0.0))
    qp = net.energy_snapshot(torch.float64).free(random_input(20, 30))
    with caplog.at_level(logging.DEBUG, logger="lrrn.solvers"):
        solution = solve(qp)
    assert solution.solvers == ("coordinate_descent", "newton")
    assert "auto: coordinate_descent then newton" in caplog.text and "over to newton" in caplog.text


def test_what_was_expected_to_be_done_in_time_and_is_not_goes_to_newton(monkeypatch):
    net = with_spectrum((30, 24, 20, 4), 70.0, 0.01, 1 / 8, beta=(1.0, 1.0, 0.0))
    qp = net.energy_snapshot(torch.float64).free(random_input(20, 30))
    monkeypatch.setattr(loop._Run, "_sweeps_to_go", lambda self, residual, *others: torch.zeros_like(residual))
    solution = solve(qp, tol=1e-9, max_sweeps=200)
    assert solution.converged.all() and solution.solvers == ("coordinate_descent", "newton")
    assert int(solution.n_sweeps.max()) <= 200


def test_auto_stays_with_coordinate_descent_when_that_is_quick():
    net = random_network((20, 16, 16, 5))
    qp = net.energy_snapshot(torch.float64).free(random_input(20, 20))
    assert solve(qp).solvers == ("coordinate_descent",)


def test_an_aim_beyond_reach_is_no_failure():
    net = random_network((20, 16, 16, 5))
    qp = net.energy_snapshot(torch.float64).free(random_input(20, 20))
    for solver in ("auto", *SOLVERS):
        solution = solve(qp, solver=solver, tol=1e-6, aim=1e-30)
        assert solution.converged.all() and (solution.residual <= 1e-12 * qp.scale).all()


def test_a_solver_that_cannot_run_says_why_before_any_work():
    qp = random_network((4, 3, 2)).energy_snapshot(torch.float64).free(random_input(2, 4))
    with pytest.raises(ValueError, match="unknown solver 'simplex'; use 'auto' or one of"):
        solve(qp, solver="simplex")
    with pytest.raises(ValueError, match="tol must be a positive number; got 0"):
        solve(qp, tol=0.0)
    with pytest.raises(ValueError, match="max_sweeps must be at least 1; got 0"):
        solve(qp, max_sweeps=0)


def test_coordinate_descent_refuses_other_devices_and_dtypes_by_name():
    qp = random_network((4, 3, 2)).energy_snapshot(torch.float64).free(random_input(2, 4))
    from dataclasses import replace

    half = replace(qp, q=qp.q.to(torch.bfloat16))
    assert "float32 or float64" in (SOLVERS["coordinate_descent"].obstacle(half) or "")
    elsewhere = replace(qp, q=qp.q.to("meta"))
    assert "use solver='accelerated'" in (SOLVERS["coordinate_descent"].obstacle(elsewhere) or "")


@pytest.mark.parametrize("sweeps", [1, 2, 5])
@pytest.mark.parametrize("constraint", ["free", "nonneg", (-0.2, 0.1)], ids=str)
def test_coordinate_descent_visits_the_units_as_the_specification_does(sweeps, constraint):
    """Sweep by sweep the kernel's iterates are the reference's, up to rounding: panels and lanes change nothing."""
    net = random_network((20, 19, 23, 9, 5), constraint=constraint, scale=2.0)
    qp = net.energy_snapshot(torch.float64).free(random_input(21, 20))
    ours = solve(qp, solver="coordinate_descent", tol=1e-30, max_sweeps=sweeps)
    reference = solve(qp, solver="reference", tol=1e-30, max_sweeps=sweeps)
    assert ours.n_sweeps.tolist() == [sweeps] * 21
    torch.testing.assert_close(ours.z, reference.z, rtol=1e-10, atol=1e-12)


def test_momentum_makes_the_iterations_grow_with_the_root_of_the_condition_number():
    """About 2 sqrt(kappa) log(1/tol) iterations with momentum and restarts; plain projected gradient needs kappa log(1/tol)."""
    net = with_spectrum((60, 50), 30.0, 0.1, 1.0, beta=(1.0,), output_constraint="free")
    qp = net.energy_snapshot(torch.float64).free(random_input(4, 60))
    h = qp.hessian.dense()
    scale = h.diagonal().rsqrt()
    eigenvalues = torch.linalg.eigvalsh(scale[:, None] * h * scale)
    kappa = float(eigenvalues[-1] / eigenvalues[0])
    assert kappa > 300
    solution = solve(qp, solver="accelerated", tol=1e-9, max_sweeps=int(2 * kappa**0.5 * math.log(1e9)))
    assert solution.converged.all()


@pytest.mark.parametrize("solver", [*SOLVERS, "auto"])
@pytest.mark.parametrize("shared", ["lo", "hi"])
def test_one_bound_may_be_shared_and_the_other_not(solver, shared):
    net = random_network((8, 6, 5, 3), output_constraint="box")
    qp = net.energy_snapshot(torch.float64).free(random_input(7, 8))
    own = {"lo": qp.lo.expand(7, -1) - random_input(7, qp.dim).abs(), "hi": qp.hi.expand(7, -1) - random_input(7, qp.dim).abs()}
    own["hi"] = torch.maximum(own["hi"].clamp(max=0.4), qp.lo)
    other = "hi" if shared == "lo" else "lo"
    bounds = {shared: getattr(qp, shared), other: own[other]}
    found = solve(BoxQP(qp.hessian, qp.q, **bounds), solver=solver, tol=1e-9)
    assert found.converged.all()
    for i in range(7):
        alone = BoxQP(qp.hessian, qp.q[i : i + 1], *(bounds[name].expand(7, -1)[i : i + 1] for name in ("lo", "hi")))
        torch.testing.assert_close(found.z[i : i + 1], solve(alone, solver="newton", tol=1e-12).z, rtol=0, atol=1e-7)


def test_newton_needs_one_iteration_on_the_right_face():
    net = random_network((20, 16, 16, 5), scale=3.0)
    qp = net.energy_snapshot(torch.float64).free(random_input(10, 20))
    exact = solve(qp, solver="newton", tol=1e-13)
    inside = (exact.z > qp.lo) & (exact.z < qp.hi)
    assert 0 < int(inside.sum()) < inside.numel()
    nearby = exact.z * torch.where(inside, 1 + 1e-3, 1.0)
    solution = solve(qp, solver="newton", tol=1e-12, start=nearby)
    assert solution.converged.all() and (solution.n_sweeps <= 1).all()


def test_newton_is_finite_in_practice():
    net = random_network((40, 30, 30, 5), scale=2.0)
    qp = net.energy_snapshot(torch.float64).free(random_input(50, 40))
    assert int(solve(qp, solver="newton", tol=1e-12).n_sweeps.max()) <= 25


def test_wide_problems_are_handed_to_newton_only_where_they_stall(monkeypatch):
    """The gain of one chunk of sweeps with momentum says little of the next, and a factorisation costs more than all sweeps."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(600, 600, dtype=torch.float64, generator=generator))[0]
    spectrum = torch.cat([torch.ones(500, dtype=torch.float64), torch.logspace(0, 2.5, 100, dtype=torch.float64)])
    h = (basis * spectrum) @ basis.mT
    q = torch.randn(40, 600, dtype=torch.float64, generator=generator) @ h
    lo, hi = torch.zeros(1, 600, dtype=torch.float64), torch.full((1, 600), math.inf, dtype=torch.float64)
    qp = BoxQP(BlockTridiagonal(((h + h.mT) / 2,), ()), q, lo, hi)
    monkeypatch.setattr(loop, "plan", lambda *_: [SOLVERS["accelerated"], SOLVERS["newton"]])
    found = solve(qp)
    assert found.solvers == ("accelerated",) and bool((found.status == Status.CONVERGED).all())
    # what does not get there within its sweeps is still handed over
    short = solve(qp, max_sweeps=120)
    assert short.solvers == ("accelerated", "newton") and bool((short.status == Status.CONVERGED).all())


def test_a_fixed_number_of_sweeps_solves_and_flags_what_it_misses():
    qp = random_network((6, 8, 3), output_constraint="box").energy_snapshot(torch.float64).free(random_input(4, 6))
    exact = solve(qp, solver="newton", tol=1e-12)
    found = loop.solve_fixed(qp, 200, tol=1e-6, aim=1e-8)
    assert found.converged.all() and (found.n_sweeps >= 200).all()
    torch.testing.assert_close(found.z, exact.z, rtol=0, atol=1e-5)
    assert (loop.solve_fixed(qp, 1, tol=1e-10, aim=1e-10).status == Status.MAX_SWEEPS).any()
    # a unit that is held by its bound hides a slope that is infinite
    q = qp.q.clone()
    q[2, 1] = -math.inf
    flagged = loop.solve_fixed(BoxQP(qp.hessian, q, qp.lo, qp.hi), 200, tol=1e-6, aim=1e-8)
    assert flagged.status.tolist() == [Status.CONVERGED, Status.CONVERGED, Status.NON_FINITE, Status.CONVERGED]
