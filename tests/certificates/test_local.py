"""Local radii: the dual is one, its derivatives are right, proofs refuse what is not so, and no attack succeeds inside."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from sklearn.exceptions import ConvergenceWarning

import lrrn
from local_problems import BY_HAND, CONSTRAINTS, solved
from lrrn.attacks import minimal_perturbation, pgd
from lrrn.certificates.complementarity import LocalProblem, Sample
from lrrn.certificates.local import Dual
from oracles import best_dual, random_input, random_network
from random_certificates import CASES, make, worst_within


def dual_of(net, x, j):
    """The dual for the first row of x and output j, and its label."""
    problem, (z, g) = LocalProblem(net.energy_snapshot(torch.float64)), solved(net, x)
    y = net.infer(x, tol=1e-10).output[0]
    label = int(y.argmax())
    c, d = problem.c[label] - problem.c[j], problem.d[label] - problem.d[j]
    return Dual(
        problem, problem.sample(z[0], g[0], torch.tensor(1e-12, dtype=torch.float64)), c, d, float(y[label] - y[j])
    ), label


def begun(dual, label, j):
    scales, constants = dual.problem.scales.of(label)
    return dual.start(dual.problem.lam * scales[j], float(constants[j]))


@pytest.mark.parametrize("method", ["shared", "local"])
@given(case=CASES)
@settings(max_examples=10)
def test_no_perturbation_inside_a_local_radius_changes_the_label(method, case):
    net = make(case)
    x = random_input(6, net.sizes[0], seed=case["seed"])
    local, wide = lrrn.certify(net, x, method), lrrn.certify(net, x, "multiplier")
    assert (local.radius >= wide.radius * (1 - 1e-9)).all()
    certain = (local.radius > 0) & local.radius.isfinite()
    assert not (worst_within(net, x, local.prediction, local.radius.clamp(max=1e6)) & certain).any()


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_local_radii_lie_between_the_global_ones_and_what_an_attack_finds(constraint):
    net = random_network((6, 7, 5, 3), constraint=constraint, scale=1.5, seed=2)
    x = random_input(12, 6, seed=3)
    wide, shared, local = (lrrn.certify(net, x, method).radius for method in ("multiplier", "shared", "local"))
    label = net.infer(x).output.argmax(-1)
    assert (shared >= wide * (1 - 1e-9)).all() and (local >= shared).all()
    assert (local <= minimal_perturbation(net, x, label, seed=0).distance).all()
    assert not pgd(net, x, label, local, steps=30, restarts=3, seed=0).success.any()


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_the_dual_at_any_multipliers_is_below_every_perturbation_that_changes_the_label(constraint):
    net = random_network((6, 7, 5, 2), constraint=constraint, scale=1.5, seed=5)
    x = random_input(1, 6, seed=6)
    y = net.infer(x).output
    found = minimal_perturbation(net, x, y.argmax(-1), seed=0)
    if not bool(found.distance.isfinite()):
        pytest.skip("no perturbation changes this label")
    dual, label = dual_of(net, x, 1 - int(y.argmax()))
    start, weight = begun(dual, label, 1 - label)
    best = dual.maximised(start, weight, math.inf)
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(300):
        noise = torch.rand(len(start), dtype=torch.float64, generator=generator)
        anywhere = torch.lerp(start, best, float(noise[0])) * (1 + (noise - 0.5))
        point = dual.at(anywhere)
        values.append(-math.inf if point is None else point.value)
    assert math.isfinite(max(values))
    assert max(values) <= dual.at(best).value * (1 + 2e-2)
    assert dual.at(best).value <= float(found.distance[0]) ** 2


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_derivatives_of_dual_and_barrier_by_finite_differences(constraint):
    dual, label = dual_of(random_network((6, 7, 5, 3), constraint=constraint, scale=1.5, seed=7), random_input(1, 6, seed=8), 1)
    rival = 1 if label != 1 else 0
    dual.active = dual.active | True
    theta, _ = begun(dual, label, rival)
    n = dual.n_products
    gradient, (matrix, pull, stiffness) = derivatives(dual, theta)
    step, scale = 1e-5, theta.clamp(min=1e-3)
    for i in range(len(theta)):
        up, down = theta.clone(), theta.clone()
        up[i] += step * scale[i]
        down[i] -= step * scale[i]
        points = dual.at(up), dual.at(down)
        by_value = (points[0].value - points[1].value) / (2 * step * scale[i])
        assert float(by_value) == pytest.approx(float(gradient[i]), rel=1e-4, abs=1e-6)
        slopes = [derivatives(dual, at) for at in (up, down)]
        torch.testing.assert_close((slopes[1][0] - slopes[0][0]) / (2 * step * scale[i]), matrix[i], rtol=1e-3, atol=1e-4)
        by_barrier = (points[0].barrier - points[1].barrier) / (2 * step * scale[i])
        if 1 <= i <= n:
            assert float(by_barrier) == pytest.approx(float(pull[i - 1]), rel=1e-4, abs=1e-6)
            torch.testing.assert_close(
                (slopes[1][1][1] - slopes[0][1][1]) / (2 * step * scale[i]), stiffness[i - 1], rtol=1e-3, atol=1e-4
            )
        else:
            assert float(by_barrier) == pytest.approx(0.0, abs=1e-6)


def derivatives(dual, theta):
    point = dual.at(theta)
    return dual.gradient(point), dual.curvature(point, dual.terms(theta).lam)


def one_unit(low, slack, c, high=math.inf, error=0.0):
    """The dual of a single unit with v = clip((u - slack) / 2, -low, high) and a lead of one that changes by c v."""
    t = lambda value: torch.tensor([value], dtype=torch.float64)  # noqa: E731
    two_sided = torch.tensor([high < math.inf])
    problem = SimpleNamespace(h=2 * t([1.0]), root=t([1.0]), gram=t([1.0]), errors=(error, 0.0, 0.0, 0.0), two_sided=two_sided)
    return Dual(problem, Sample(t(low), t(high), t(slack), *(torch.zeros(3, dtype=torch.float64))), t(c), t(0.0), 1.0)


@pytest.mark.parametrize(("low", "slack", "c", "high", "nearest"), BY_HAND)
def test_one_unit_by_hand(low, slack, c, high, nearest):
    dual = one_unit(low, slack, c, high)
    lam = torch.tensor([0.3 * c * c], dtype=torch.float64)
    theta = dual.maximised(*dual.start(lam, 0.6 * abs(c)), math.inf)
    value = dual.at(theta).value
    assert nearest**2 * (1 - 2e-2) <= value <= nearest**2
    assert dual.is_proven(theta, value * (1 - 1e-6))
    assert not dual.is_proven(theta, value * (1 + 1e-6))
    assert not dual.is_proven(-theta, value * (1 - 1e-6))
    assert not one_unit(low, slack, c, high, error=1.5).is_proven(theta, value * (1 - 1e-6))  # H is known to 1.5 only


@pytest.mark.parametrize(("low", "c", "high"), [(0.5, 1.0, math.inf), (3.0, -1.0, 0.5)])
def test_a_bound_that_keeps_the_lead_open_is_made_use_of(low, c, high):
    """The unit cannot move by the one that is needed, so the dual grows without end."""
    dual = one_unit(low, 0.0, c, high)
    theta = dual.maximised(*dual.start(torch.tensor([0.3], dtype=torch.float64), 0.6), 100.0)
    assert dual.at(theta).value >= 100.0
    assert dual.is_proven(theta, 99.0)


def test_errors_of_the_data_are_inside_a_proof():
    """A form that is positive by less than an error could make of it is not proven; by much more, it is."""
    dual = one_unit(0.0, 0.5, -1.0)
    theta = dual.maximised(*dual.start(torch.tensor([0.3], dtype=torch.float64), 0.6), math.inf)
    theta = torch.lerp(theta, dual.start(torch.tensor([0.3], dtype=torch.float64), 0.6)[0], 0.1)
    square = dual.at(theta).value * 0.9
    exact = dual.sample
    for name in ("low_error", "slack_error"):
        for error, proven in ((1e-6, True), (3.0, False)):
            dual.sample = replace(exact, **{name: torch.tensor(error, dtype=torch.float64)})
            assert dual.is_proven(theta, square) is proven, (name, error)


SHAPES = [(6, 7, 5, 3), (8, 10, 4), (5, 12, 3), (12, 6, 6, 3)]


def varied(k):
    """Networks of several kinds, and inputs near and far."""
    net = random_network(
        SHAPES[k % 4], constraint=["nonneg", "box", (-0.3, 0.4)][k % 3], scale=[0.3, 1.0, 2.5][k // 4 % 3], seed=k
    )
    return net, random_input(3, net.sizes[0], seed=k) * [1, 3, 10][k // 4 % 3]


@pytest.mark.parametrize("k", range(17))
def test_local_radii_are_what_an_independent_solver_makes_of_the_same_dual(k):
    net, x = varied(k)
    problem, (z, g) = LocalProblem(net.energy_snapshot(torch.float64)), solved(net, x)
    y = net.infer(x, tol=1e-10).output
    exact = lrrn.certify(net, x, "local", guarantee="exact", tol=1e-10).radius
    for i, label in enumerate(y.argmax(-1).tolist()):
        sample = problem.sample(z[i], g[i], torch.tensor(0.0, dtype=torch.float64))
        state = [t.numpy() for t in (sample.low, sample.high, sample.slack)]
        squares = [
            best_dual(
                problem.h.numpy(),
                problem.root.numpy(),
                (problem.c[label] - problem.c[j]).numpy(),
                (problem.d[label] - problem.d[j]).numpy(),
                float(y[i, label] - y[i, j]),
                *state,
            )
            for j in range(y.shape[1])
            if j != label
        ]
        best = math.sqrt(max(min(squares), 0.0))
        assert exact[i] <= best * (1 + 1e-3)
        assert exact[i] >= 0.99 * best or math.isinf(best)


@pytest.mark.parametrize("tol", [1e-6, 1e-4])
@pytest.mark.parametrize("k", range(8))
def test_an_exact_radius_is_not_below_a_deployed_one(k, tol):
    net, x = varied(k)
    for method in ("shared", "local"):
        exact, deployed = (lrrn.certify(net, x, method, guarantee=name, tol=tol).radius for name in ("exact", "deployed"))
        assert (exact >= deployed).all()


@pytest.mark.parametrize("method", ["multiplier", "shared", "local"])
@pytest.mark.parametrize(("layer", "size"), [(0, 0.0), (0, 1e-155), (0, 1e-160), (1, 0.0), (1, 1e-155), (0, 1e155)])
def test_weights_of_any_size_give_radii_or_none(method, layer, size):
    net, x = random_network((6, 5, 3), seed=3), random_input(4, 6, seed=4)
    with torch.no_grad():
        net.W[layer].mul_(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        certificate = lrrn.certify(net, x, method)
    assert (certificate.radius >= 0).all() and certificate.radius.isfinite().all()
    # a first layer that is next to nothing moves the output by next to nothing
    if layer == 0 and size < 1:
        assert (certificate.radius[certificate.margin > 1e-6] > 1e6).all() or size == 0.0


def test_a_network_without_kinks_has_the_radius_of_its_jacobian():
    net, x = random_network((6, 7, 5, 3), constraint="free"), random_input(4, 6)
    certificate = lrrn.certify(net, x, "local")
    for k in range(4):
        at = x[k : k + 1].clone().requires_grad_()
        y = net(at)[0]
        label = int(y.argmax())
        others = [j for j in range(3) if j != label]
        slopes = [torch.autograd.grad(y[label] - y[j], at, retain_graph=True)[0].norm() for j in others]
        exact = min(float((y[label] - y[j]).detach() / slope) for j, slope in zip(others, slopes, strict=True))
        assert float(certificate.radius[k]) == pytest.approx(exact, rel=1e-2)
        assert float(certificate.radius[k]) < exact


def test_local_radii_gain_much_and_come_near_to_what_attacks_reach():
    net = random_network((12, 10, 8, 4), seed=3)
    x = random_input(30, 12, seed=4)
    local, wide = lrrn.certify(net, x, "local"), lrrn.certify(net, x, "multiplier")
    attack = minimal_perturbation(net, x, local.prediction, seed=0)
    known = (wide.radius > 0) & attack.distance.isfinite()
    gained = (local.radius / wide.radius)[known]
    assert float(gained.mean()) > 1.1
    assert float((local.radius / attack.distance)[known].median()) > 0.9


def test_where_one_size_counts_local_radii_reach_it_and_go_no_further():
    net = random_network((6, 9, 7, 4), beta=(1.0, 0.5, 0.0), seed=3)
    x = random_input(30, 6, seed=4)
    local, wide = (lrrn.certify(net, x, method).radius for method in ("local", "multiplier"))
    eps = float(wide.quantile(0.7))
    decided = lrrn.certify(net, x, "local", target_radius=eps).radius
    assert (decided >= wide * (1 - 1e-9)).all()
    assert (decided[local > 1.02 * eps] > eps).all() and (decided[local < 0.98 * eps] < eps).all()
    beyond = wide > eps
    below = ~beyond
    assert beyond.any() and below.any()
    torch.testing.assert_close(decided[beyond], wide[beyond], rtol=1e-9, atol=0)
    assert (decided[below] <= eps * (1 + 1e-5)).all()
    with pytest.raises(ValueError, match="target_radius must be a radius above 0; got 0"):
        lrrn.certify(net, x, "local", target_radius=0)


def test_a_loose_solve_is_inside_the_radius():
    """The centre's error moves nothing: what is known there is the residual, and that enters exactly."""
    net = random_network((12, 10, 8, 4), seed=3)
    x = random_input(6, 12, seed=4)
    tight, loose = (lrrn.certify(net, x, "local", tol=tol) for tol in (1e-10, 1e-3))
    assert (loose.radius <= tight.radius * (1 + 1e-2)).all()
    attack = minimal_perturbation(net, x, tight.prediction, seed=0)
    assert (loose.radius <= attack.distance).all()


def test_local_without_unknowns_or_without_a_proof_is_the_global_one():
    linear, x = random_network((6, 4), beta=(0.0,)), random_input(5, 6)
    assert torch.equal(lrrn.certify(linear, x, "local").radius, lrrn.certify(linear, x, "spectral").radius)
    hopeless = random_network((10, 8, 8, 8, 3), beta=0.0, scale=2000.0, output_constraint="box")
    assert (lrrn.certify(hopeless, random_input(2, 10), "local", tol=1e-3).radius == 0).all()


def test_multipliers_of_the_wrong_sign_prove_nothing():
    dual = one_unit(3.0, 0.0, -1.0)
    theta = dual.maximised(*dual.start(torch.tensor([0.3], dtype=torch.float64), 0.6), math.inf)
    theta[2] = -1.0  # a reward, not a price, for staying above the lower bound
    value = dual.at(theta).value
    assert value > 2.0**2  # the distance that is known
    assert not dual.is_proven(theta, value * (1 - 1e-3))
