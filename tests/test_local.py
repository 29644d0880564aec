"""Local radii: units that are said to stay do stay, constants hold in the ball, and no attack succeeds inside."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

import lrrn
from lrrn.certify import pgd
from lrrn.certify.local import LocalProblem, Part
from oracles import random_input, random_network
from test_certify import CASES, make, worst_within


def solved(net, x):
    """Activations, slack and error bound at x, and the slack's rounding."""
    energy, solution = net.energy_snapshot(torch.float64), net.infer(x, tol=1e-10)
    z = torch.cat(solution.activations[: energy.n_free], -1)
    return z, energy.free(x).gradient(z), solution.error_bound


def ball(x, radius, n, seed):
    """Points within ``radius`` of x, some of them on the sphere."""
    generator = torch.Generator().manual_seed(seed)
    step = torch.randn(n, x.shape[-1], dtype=torch.float64, generator=generator)
    length = torch.rand(n, 1, dtype=torch.float64, generator=generator).clamp(min=0.3).mul(1.5).clamp(max=1.0)
    return x + radius * length * step / step.norm(dim=1, keepdim=True)


@given(case=CASES)
@settings(max_examples=6)
def test_no_perturbation_inside_a_local_radius_changes_the_label(case):
    net = make(case)
    x = random_input(6, net.sizes[0], seed=case["seed"])
    local, wide = lrrn.certify(net, x, "local"), lrrn.certify(net, x, "multiplier")
    assert (local.radius >= wide.radius * (1 - 1e-9)).all()
    certain = (local.radius > 0) & local.radius.isfinite()
    assert not (worst_within(net, x, local.prediction, local.radius.clamp(max=1e6)) & certain).any()


@pytest.mark.parametrize("constraint", ["nonneg", "box", "free", (-0.3, 0.4)])
def test_units_that_are_said_to_stay_do_stay_and_constants_hold(constraint):
    net = random_network((6, 7, 5, 3), constraint=constraint, scale=1.5)
    problem, x = LocalProblem(net), random_input(5, 6)
    z, g, error = solved(net, x)
    seen = 0
    for k in range(5):
        for radius in (0.02, 0.2, 1.0):
            inside, fixed = problem.states(z[k], g[k], float(error[k]), 1e-12, radius)
            seen += int(inside.sum() + fixed.sum())
            near, slack, _ = solved(net, ball(x[k], radius, 60, k))
            assert (near[:, fixed] == z[k, fixed]).all()
            assert ((near > problem.lo) & (near < problem.hi))[:, inside].all()
            moved = (ball(x[k], radius, 60, k) - x[k]).norm(dim=1, keepdim=True)
            assert ((near - z[k]).abs() <= problem.activation * moved + 1e-7).all()
            assert ((slack - g[k]).abs() <= problem.slack * moved + 1e-7).all()
            reduction = problem.reduced(inside, fixed)
            part, lam = reduction.part(0, 1), problem.pair_multipliers(0, 1)[reduction.open]
            rho = part.prove(part.improve(lam, 20), 1e3)  # the ceiling, should the output not move at all
            lead = net.infer(ball(x[k], radius, 60, k), tol=1e-10).output
            lead = lead[:, 0] - lead[:, 1]
            pairs = (lead[:, None] - lead).abs()
            apart = torch.cdist(ball(x[k], radius, 60, k), ball(x[k], radius, 60, k))
            assert (pairs <= rho * apart + 1e-6).all()
    assert seen > 20


def test_a_ball_in_which_nothing_changes_has_the_constant_of_the_jacobian():
    net = random_network((6, 7, 5, 3))
    problem, x = LocalProblem(net), random_input(1, 6)
    z, g, error = solved(net, x)
    inside, fixed = problem.states(z[0], g[0], float(error[0]), 1e-12, 1e-6)
    assert (inside | fixed).all()
    at = x.clone().requires_grad_()
    y = net(at)
    (slope,) = torch.autograd.grad(y[0, 0] - y[0, 2], at)
    part = problem.reduced(inside, fixed).part(0, 2)
    assert part.prove(problem.lam[:0], math.inf) == pytest.approx(float(slope.norm()), rel=1e-6)


def test_a_read_out_of_input_and_unit_by_hand():
    """One unit with v u - 2 v^2 >= 0, so v lies between 0 and u / 2, and |c v + d u| is at most max(|d|, |d + c / 2|) |u|."""
    one = torch.ones(1, 1, dtype=torch.float64)
    for c, d in ((1.0, 0.3), (2.0, 0.0), (1.0, -0.1), (-1.0, 0.2)):
        part = Part(2 * one, one, c * one, d * one, torch.tensor([False]), (0.0, 0.0, 0.0, 0.0))
        exact = max(abs(d), abs(d + c / 2))
        scan = [part.estimate(torch.tensor([lam], dtype=torch.float64)) for lam in torch.logspace(-4, 3, 4000).tolist()]
        assert min(scan) == pytest.approx(exact, rel=2e-2) and min(scan) >= exact * (1 - 1e-9)
        for lam in torch.logspace(-4, 3, 300, dtype=torch.float64):
            assert not part.is_proven(lam[None], exact * (1 - 1e-6))
    unsure = Part(2 * one, one, one, 0 * one, torch.tensor([False]), (1.5, 0.0, 0.0, 0.0))
    assert not unsure.is_proven(torch.tensor([1.0], dtype=torch.float64), 0.6)  # H is known to 1.5 only


def test_local_radii_gain_where_there_is_something_to_gain_and_resist_a_strong_attack():
    net = random_network((12, 10, 8, 4), seed=3)
    x = random_input(30, 12, seed=4)
    local, wide = lrrn.certify(net, x, "local"), lrrn.certify(net, x, "multiplier")
    assert float((local.radius / wide.radius.clamp(min=1e-9))[wide.radius > 0].mean()) > 1.02
    attack = pgd(net, x, local.prediction, local.radius, steps=30, restarts=3, seed=0)
    assert not attack.success.any()


def test_local_without_unknowns_or_without_a_proof_is_the_global_one():
    linear, x = random_network((6, 4), beta=(0.0,)), random_input(5, 6)
    assert torch.equal(lrrn.certify(linear, x, "local").radius, lrrn.certify(linear, x, "spectral").radius)
    hopeless = random_network((10, 8, 8, 8, 3), beta=0.0, scale=2000.0, output_constraint="box")
    assert (lrrn.certify(hopeless, random_input(2, 10), "local", tol=1e-3).radius == 0).all()
