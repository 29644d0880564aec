"""The multiplier bound: its proof, its optimiser and its place among the other bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

import lrrn
from lrrn.bounds.multiplier import MultiplierProblem
from oracles import pair_bounds, random_input, random_network
from random_certificates import CASES, make


def problem(net) -> MultiplierProblem:
    return MultiplierProblem(net.energy_snapshot(torch.float64))


@given(case=CASES)
@settings(max_examples=20)
def test_no_slope_exceeds_it_and_it_is_never_worse_than_spectral(case):
    net = make(case)
    x = (2 * random_input(30, net.sizes[0], seed=case["seed"])).requires_grad_()
    y = net(x)
    jacobian = torch.stack([torch.autograd.grad(y[:, j].sum(), x, retain_graph=True)[0] for j in range(net.sizes[-1])], 1)
    bound, spectral = net.lipschitz("multiplier"), net.lipschitz("spectral")
    assert bound <= spectral <= net.lipschitz("paper") * (1 + 1e-12)
    assert float(torch.linalg.matrix_norm(jacobian, ord=2).max()) <= bound * (1 + 1e-7)
    far = net.infer(x.detach() + 3 * random_input(30, net.sizes[0], seed=1)).output
    moved = (3 * random_input(30, net.sizes[0], seed=1)).norm(dim=1)
    assert ((far - y.detach()).norm(dim=1) <= bound * moved * (1 + 1e-5) + 1e-5).all()


@pytest.mark.parametrize("w", [0.2, 1.0, 3.0])
def test_one_unit_by_hand(w):
    """H = 1 + beta w^2 and B = (1 + beta) w: the constant is B / H, and no multiplier proves less."""
    net = lrrn.LRRN((1, 1), beta=(0.5,), output_constraint="nonneg", bias=False, reconstruction_bias=False, dtype=torch.float64)
    with torch.no_grad():
        net.W[0].fill_(w)
    p, exact, c = problem(net), 1.5 * w / (1 + 0.5 * w * w), torch.ones(1, 1, dtype=torch.float64)
    best = (1 + 0.5 * w * w) * exact**2 / (1.5 * w) ** 2
    assert p._is_proven(torch.tensor([best], dtype=torch.float64), c, exact * (1 + 1e-9))
    for lam in torch.logspace(-3, 3, 200, dtype=torch.float64):
        assert not p._is_proven(lam[None], c, exact * (1 - 1e-9))
    assert exact <= p.network(math.inf, 1.0).rho <= exact * (1 + 1e-6)


def test_a_diagonal_network_gets_its_exact_constant():
    net = lrrn.LRRN((3, 3), beta=(1.0,), output_constraint="nonneg", dtype=torch.float64)
    with torch.no_grad():
        net.W[0].copy_(torch.diag(torch.tensor([0.1, 0.5, 4.0])))
    exact = max(2 * s / (1 + s * s) for s in (0.1, 0.5, 4.0))
    assert exact <= net.lipschitz("multiplier") <= exact * (1 + 1e-5)
    assert net.lipschitz("spectral") > 1.2 * exact  # its range of s covers the peak at 1


def test_what_it_computes_is_what_the_definition_says():
    net = random_network((6, 5, 4, 3), beta=(1.0, 0.5, 0.0), constraint=["nonneg", "free"])
    p, h = problem(net), net.energy_snapshot(torch.float64).free_hessian.dense()
    lam, w = p.start() * torch.linspace(1.0, 1.5, 9, dtype=torch.float64), net.W[-1].detach()
    b = torch.cat([2.0 * net.W[0].detach(), torch.zeros(4, 6, dtype=torch.float64)])
    c = torch.cat([torch.zeros(3, 5, dtype=torch.float64), w], 1)
    s = torch.diag(lam) @ h + h @ torch.diag(lam) - c.mT @ c
    gain = b.mT @ torch.diag(lam) @ torch.linalg.inv(s) @ torch.diag(lam) @ b
    assert p.estimate(lam, w) == pytest.approx(math.sqrt(float(torch.linalg.eigvalsh(gain)[-1])), rel=1e-10)


@pytest.mark.parametrize("sizes", [(6, 5, 4, 3), (3, 6, 4, 3)])
def test_gradient_by_finite_differences(sizes):
    p = problem(random_network(sizes, constraint=["nonneg", "free"]))
    c, lam = p.read_out, p.start() * 1.3
    for sharpness in (10.0, 1000.0):
        _, gradient = p._value(lam, c, sharpness)
        for i in range(len(lam)):
            step = torch.zeros_like(lam)
            step[i] = 1e-6 * lam[i]
            ends = [p._value(lam + sign * step, c, sharpness)[0] for sign in (1, -1)]
            assert (ends[0] - ends[1]) / (2 * float(step[i])) == pytest.approx(float(gradient[i]), rel=1e-4, abs=1e-7)


def test_the_best_scale_of_given_multipliers():
    """The formula for updates of rank one against trying scales one by one."""
    net = random_network((8, 6, 5, 4))
    p = problem(net)
    lam, rows = p.start(), p.read_out[:3]
    scales, estimates = p.scales(lam, rows)
    for i in range(3):
        assert p.estimate(lam * scales[i], rows[i : i + 1]) == pytest.approx(float(estimates[i]), rel=1e-8)
        others = [p.estimate(lam * scales[i] * f, rows[i : i + 1]) for f in (0.5, 0.8, 1.25, 2.0)]
        assert float(estimates[i]) <= min(others) * (1 + 1e-3)


def test_optimising_gains_and_a_budget_of_nothing_changes_nothing():
    net = random_network((12, 10, 8, 4))
    assert net.lipschitz("multiplier") < 0.97 * net.lipschitz("spectral")
    assert net.lipschitz("multiplier").method == "multiplier"
    none = net.lipschitz("auto", seconds=0.0)
    assert none == net.lipschitz("spectral") and none.method == "spectral"
    pairs = pair_bounds(net, "multiplier") / pair_bounds(net, "spectral")
    off = ~torch.eye(4, dtype=torch.bool)
    assert (pairs[off] <= 1).all() and float(pairs[off].mean()) < 0.97


def test_multipliers_that_prove_nothing_are_not_believed():
    net = random_network((6, 5, 4, 3))
    p = problem(net)
    lam, c = p.start(), p.read_out
    estimate = p.estimate(lam, c)
    assert p._is_proven(lam, c, estimate * 1.001) and not p._is_proven(lam, c, estimate * 0.999)
    assert p.prove(-lam, c, 7.0) == 7.0  # a negative multiplier of a constrained unit
    assert p.prove(lam * 1e-6, c, 7.0) == 7.0  # S is not positive definite
    assert p.prove(lam, c, estimate / 2) == estimate / 2
    # a claim of the optimiser that is too good to be true
    assert p.prove(lam, c, 7.0, estimate=0.9 * estimate) == 7.0


def test_free_units_may_have_multipliers_of_either_sign():
    net = random_network((4, 3, 3, 2), constraint="free", beta=(1.0, 1.0, 0.0))
    x = random_input(1, 4).requires_grad_()
    jacobian = torch.stack([torch.autograd.grad(net(x)[0, j], x)[0][0] for j in range(2)])
    exact = float(torch.linalg.matrix_norm(jacobian, ord=2))  # the network is linear
    assert exact * (1 - 1e-9) <= net.lipschitz("multiplier") < net.lipschitz("spectral")


def test_results_are_reproducible_and_remembered():
    net, again = random_network((8, 6, 5, 4)), random_network((8, 6, 5, 4))
    assert net.lipschitz("multiplier").value == again.lipschitz("multiplier").value
    first = pair_bounds(net, "auto")
    assert torch.equal(pair_bounds(net, "auto"), first)
    with torch.no_grad():
        net.W[0].mul_(0.5)
    assert not torch.equal(pair_bounds(net, "auto"), first)


def test_bad_requests():
    with pytest.raises(TypeError, match="proven in float64"):
        MultiplierProblem(random_network((4, 3, 2)).energy_snapshot(torch.float32))
    with pytest.raises(ValueError, match="no unknowns"):
        problem(random_network((4, 2), beta=(0.0,)))
    with pytest.raises(ValueError, match="unknown method 'sdp'; use one of auto, paper, spectral, multiplier"):
        random_network((4, 3, 2)).lipschitz("sdp")
