"""The battery every solver passes by registering itself, on every device and dtype it takes.

Oracle: the KKT conditions, recomputed in float64 by independent code.
"""

from __future__ import annotations

import pytest
import torch

from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import DEFAULT_TOL, BoxQP, Status
from lrrn.solvers import SOLVERS, solve
from problems import assert_solves, make_qp

DTYPES = [torch.float64, torch.float32]


@pytest.fixture(params=sorted(SOLVERS))
def name(request, device):
    probe = make_qp((3, 2), 1, torch.float64, device)
    obstacle = SOLVERS[request.param].obstacle(probe)
    if obstacle is not None:
        pytest.skip(f"{request.param}: {obstacle}")
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("sizes", [(5, 1), (3, 8), (6, 7, 3), (4, 9, 17, 5), (3, 2, 3, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("constraint", ["free", "nonneg", "box", (-0.2, 0.1)], ids=str)
def test_satisfies_the_kkt_conditions(name, dtype, device, sizes, constraint):
    qp = make_qp(sizes, 5, dtype, device, constraint=constraint)
    assert_solves(qp, solve(qp, solver=name), DEFAULT_TOL[dtype])


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 33, 70])
def test_any_batch_size(name, dtype, device, n):
    qp = make_qp((4, 5, 3), n, dtype, device)
    solution = solve(qp, solver=name)
    assert_solves(qp, solution, DEFAULT_TOL[dtype])
    assert solution.z.shape == (n, 8) and solution.n_sweeps.shape == solution.residual.shape == solution.status.shape == (n,)


def test_empty_batch_and_no_unknowns(name, dtype, device):
    assert solve(make_qp((4, 5, 3), 0, dtype, device), solver=name).z.shape == (0, 8)
    nothing = torch.zeros((3, 0), dtype=dtype, device=device)
    empty = solve(BoxQP(BlockTridiagonal((), ()), nothing, nothing[:1], nothing[:1]), solver=name)
    assert empty.z.shape == (3, 0) and empty.converged.all()


def test_bounds_per_sample_and_units_whose_bounds_meet(name, dtype, device):
    qp = make_qp((4, 6, 3), 4, dtype, device)
    lo, hi = qp.lo.repeat(4, 1), qp.hi.repeat(4, 1)
    lo[1, 2] = hi[1, 2] = 0.25
    lo[2, :] = hi[2, :] = 0.5
    lo[3, 4:6], hi[3, 4:6] = -torch.inf, torch.inf
    qp = BoxQP(qp.hessian, qp.q, lo, hi)
    solution = solve(qp, solver=name)
    assert_solves(qp, solution, DEFAULT_TOL[dtype])
    assert solution.z[1, 2] == 0.25 and (solution.z[2] == 0.5).all()


def test_a_warm_start_at_the_solution_costs_nothing(name, dtype, device):
    qp = make_qp((4, 6, 3), 5, dtype, device)
    first = solve(qp, solver=name)
    again = solve(qp, solver=name, start=first.z)
    assert (again.n_sweeps == 0).all() and torch.equal(again.z, first.z)


def test_an_infeasible_start_is_projected(name, dtype, device):
    qp = make_qp((4, 6, 3), 5, dtype, device)
    assert_solves(qp, solve(qp, solver=name, start=torch.full_like(qp.q, -7.0)), DEFAULT_TOL[dtype])


def test_a_tighter_tolerance_is_met(name, device):
    qp = make_qp((4, 6, 3), 5, torch.float64, device)
    assert_solves(qp, solve(qp, solver=name, tol=1e-11), 1e-11)


@pytest.mark.parametrize("tol", [1e-18, 1e-30])
def test_a_tolerance_below_the_floor_is_never_passed_silently(name, dtype, device, tol):
    qp = make_qp((6, 9, 7), 4, dtype, device, scale=3.0)
    solution = solve(qp, solver=name, tol=tol)
    honest = qp.residual(solution.z) <= tol * qp.scale
    assert torch.equal(solution.converged, honest)
    assert set(solution.status[~honest].tolist()) <= {Status.MAX_SWEEPS, Status.STALLED}


def test_max_sweeps_is_respected_and_reported(name, dtype, device):
    qp = make_qp((8, 20, 20, 20), 6, dtype, device, constraint="nonneg", scale=3.0)
    solution = solve(qp, solver=name, tol=1e-12, max_sweeps=1)
    assert (solution.n_sweeps <= 1).all()
    missed = solution.residual > 1e-12 * qp.scale
    assert missed.any() and (solution.status[missed] == Status.MAX_SWEEPS).all()


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_non_finite_problems_are_flagged(name, dtype, device, value):
    qp = make_qp((4, 6, 3), 3, dtype, device, constraint="free", output_constraint="free")
    q = qp.q.clone()
    q[1, 0] = value
    solution = solve(BoxQP(qp.hessian, q, qp.lo, qp.hi), solver=name)
    assert solution.status.tolist() == [Status.CONVERGED, Status.NON_FINITE, Status.CONVERGED]


def test_an_answer_does_not_depend_on_the_batch_around_it(name, device):
    qp = make_qp((4, 6, 3), 40, torch.float64, device)
    together = solve(qp, solver=name, tol=1e-9)
    alone = solve(qp.take(torch.tensor([37], device=device)), solver=name, tol=1e-9)
    h = qp.hessian.dense()
    mu = float(torch.linalg.eigvalsh(h)[0])
    assert float((together.z[37] - alone.z[0]).norm()) <= float(together.residual[37] + alone.residual[0]) / mu + 1e-14
    if name == "coordinate_descent":
        assert torch.equal(together.z[37], alone.z[0])


def test_the_same_call_gives_the_same_bits(name, dtype, device):
    qp = make_qp((4, 6, 3), 40, dtype, device)
    assert torch.equal(solve(qp, solver=name).z, solve(qp, solver=name).z)


def test_inputs_are_left_alone(name, dtype, device):
    qp = make_qp((4, 6, 3), 5, dtype, device)
    start = torch.full_like(qp.q, 0.1)
    before = [t.clone() for t in (qp.q, qp.lo, qp.hi, start, qp.hessian.dense())]
    solve(qp, solver=name, start=start)
    after = (qp.q, qp.lo, qp.hi, start, qp.hessian.dense())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
