"""Solvers of the shared dual: the maximum of a quadratic function with bounds, compared with another solver and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize

from lrrn.certificates.dual_solvers import Splitting

N_OUTPUTS = 4


def problem(d=9, rank=7, n=6, seed=0):
    """A singular Hessian of the outputs' multipliers and d others, and samples with two-sided, one-sided and no bounds."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    columns = draw(rank, N_OUTPUTS + d)
    whole = columns.mT @ columns
    parts = whole[N_OUTPUTS:, N_OUTPUTS:], whole[:N_OUTPUTS, N_OUTPUTS:], whole[:N_OUTPUTS, :N_OUTPUTS]
    label = torch.arange(n) % N_OUTPUTS
    rival = (label + 1 + torch.arange(n) // N_OUTPUTS) % N_OUTPUTS
    lo, hi = -draw(n, d).abs(), draw(n, d).abs()
    lo[:, : d // 3] = -math.inf
    # as in a dual: y = 0 is optimal for s = 0, since an unknown has a linear term only where zero is its upper bound
    held = draw(n, d) > 0
    q, hi = torch.where(held, draw(n, d).abs(), 0.0), torch.where(held, 0.0, hi)
    return parts, (label, rival, draw(n).abs(), q, lo, hi)


def value(parts, sample, s, y):
    hessian, cross, gram = parts
    label, rival, lead, q = sample[:4]
    pair = torch.eye(N_OUTPUTS, dtype=torch.float64)[label] - torch.eye(N_OUTPUTS, dtype=torch.float64)[rival]
    square = ((pair @ gram) * pair).sum(1) * s**2 + 2 * s * ((pair @ cross) * y).sum(1) + ((y @ hessian) * y).sum(1)
    return s * lead + (q * y).sum(1) - square / 2


def best_value(parts, sample, i):
    """The maximum for sample i, by L-BFGS with bounds."""
    one = [t[i : i + 1] for t in sample]

    def objective(theta):
        t = torch.tensor(theta, requires_grad=True)
        loss = -value(parts, one, t[:1], t[None, 1:])[0]
        loss.backward()
        return loss.item(), t.grad.numpy()

    bounds = [(0, None), *zip(one[4][0].tolist(), one[5][0].tolist(), strict=True)]
    start = torch.zeros(len(bounds), dtype=torch.float64).numpy()
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-10}
    return -minimize(objective, start, jac=True, bounds=bounds, method="L-BFGS-B", options=options).fun


@pytest.mark.parametrize("seed", range(4))
def test_the_maximum_is_that_of_another_solver(seed):
    parts, sample = problem(seed=seed)
    s, y = Splitting(*parts).maximised(*sample, torch.full((6,), math.inf, dtype=torch.float64))
    reached = value(parts, sample, s, y)
    for i in range(6):
        expected = best_value(parts, sample, i)
        assert expected * (1 - 1e-3) - 1e-9 <= float(reached[i]) <= expected * (1 + 1e-6) + 1e-9
    slack = 1e-9 * (1 + y.abs())
    assert (s >= 0).all() and (y >= sample[4] - slack).all() and (y <= sample[5] + slack).all()


def test_one_unknown_by_hand():
    """s m - (k s^2 + 2 s h y + g y^2) / 2 with y <= 0.5, h = -1 and k = g = 2: y is at its bound where m > 1."""
    one = torch.ones(1, dtype=torch.float64)
    hessian, cross = 2 * one[None], torch.tensor([[-1.0], [0.0]], dtype=torch.float64)
    gram = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    solver = Splitting(hessian, cross, gram)
    for lead, s, y in ((0.6, 0.4, 0.2), (3.0, 1.75, 0.5)):
        bounds = torch.tensor([[-math.inf]], dtype=torch.float64), torch.tensor([[0.5]], dtype=torch.float64)
        which = torch.tensor([0]), torch.tensor([1])
        found = solver.maximised(*which, lead * one, 0 * one[None], *bounds, math.inf * one)
        assert float(found[0]) == pytest.approx(s, rel=1e-2) and float(found[1]) == pytest.approx(y, rel=1e-2)


def test_samples_stop_at_their_goal_and_do_not_depend_on_each_other():
    parts, sample = problem(n=8)
    solver, never = Splitting(*parts), torch.full((8,), math.inf, dtype=torch.float64)
    s, y = solver.maximised(*sample, never)
    full = value(parts, sample, s, y)
    goal = torch.where(torch.arange(8) % 2 == 0, 0.3 * full, never)
    early = value(parts, sample, *solver.maximised(*sample, goal))
    assert (early >= torch.minimum(goal, full * (1 - 1e-9))).all()
    torch.testing.assert_close(early[1::2], full[1::2], rtol=1e-9, atol=0)
    for i in range(8):
        alone = solver.maximised(*(t[i : i + 1] for t in sample), never[i : i + 1])
        torch.testing.assert_close(alone[1][0], y[i], rtol=1e-6, atol=1e-9)


def test_a_dual_without_a_maximum_ends_at_the_goal():
    parts, sample = problem()
    unbounded = [*sample[:3], sample[3] * 0, sample[4] * math.inf, torch.full_like(sample[5], math.inf)]
    s, y = Splitting(*parts).maximised(*unbounded, torch.full((6,), 10.0, dtype=torch.float64))
    assert s.isfinite().all() and y.isfinite().all()


def test_data_that_are_not_finite_give_the_multipliers_of_nothing():
    parts, sample = problem()
    nan = torch.full_like(sample[3], math.nan)
    s, y = Splitting(*parts).maximised(*sample[:3], nan, *sample[4:], torch.full((6,), math.inf, dtype=torch.float64))
    assert (s == 0).all() and (y == 0).all()
