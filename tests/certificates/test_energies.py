"""Certified energies: no perturbation inside a ball leaves the interval or changes a decision made by energy."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning

import lrrn
from lrrn import LRRNEnergyModel
from lrrn.certificates import certified_auroc, certify_energies, decision_radius, energy_interval
from lrrn.certificates.energies import energy_constant
from oracles import random_input, random_network
from random_certificates import CASES, make


def directions(net, x, y, sign, seed):
    """Random directions, and the one in which the energy grows or shrinks fastest."""
    generator = torch.Generator().manual_seed(seed)
    z = net.infer(x, y).activations
    at = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net.energy(at, z).sum(), at)
    for step in [sign * slope, *(torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(8))]:
        yield step / step.norm(dim=1, keepdim=True).clamp(min=1e-300)


@given(case=CASES, eps=st.sampled_from([0.0, 1e-3, 0.1, 2.0]), clamped=st.booleans())
@settings(max_examples=40)
def test_energies_stay_in_their_intervals(case, eps, clamped):
    net = make(case)
    x = random_input(8, net.sizes[0], seed=case["seed"])
    y = None
    if clamped:
        y = torch.zeros(8, net.sizes[-1], dtype=torch.float64)
        y[:, 0] = 0.5
    lower, upper = energy_interval(net, x, eps, y)
    exact = energy_interval(net, x, eps, y, guarantee="exact")
    assert (lower <= exact[0]).all() and (exact[1] <= upper).all()
    for sign in (1, -1):
        for step in directions(net, x, y, sign, case["seed"]):
            energy = net.infer(x + eps * step, y).energy
            assert (lower <= energy).all() and (energy <= upper).all()
            tight = net.infer(x + eps * step, y, solver="newton", tol=1e-11).energy
            slack = 1e-9 * (1 + tight)
            assert (exact[0] <= tight + slack).all() and (tight <= exact[1] + slack).all()


def test_the_constant_is_reached_by_a_feed_forward_energy_of_a_wall():
    """One clamped layer, beta 0: sqrt(2E) = |y - W x - b|, whose slope along the first right singular vector is |W|_2."""
    net = random_network((5, 3), beta=(0.0,))
    w = net.W[0].detach()
    u, s, v = torch.linalg.svd(w)
    x, y = torch.zeros(1, 5, dtype=torch.float64), (net.b[0].detach() + 10 * u[:, 0])[None]
    assert energy_constant(net) == pytest.approx(float(s[0]), rel=1e-5)
    before, after = (float((2 * net.infer(x + t * v[:1], y).energy).sqrt()) for t in (0.0, 1.0))
    assert abs(after - before) == pytest.approx(float(s[0]), rel=1e-9)
    lower, upper = energy_interval(net, x, 1.0, y)
    assert float(upper) == pytest.approx((10 + energy_constant(net)) ** 2 / 2, rel=1e-9)
    assert float(lower) == pytest.approx((10 - energy_constant(net)) ** 2 / 2, rel=1e-9)


@given(case=CASES)
@settings(max_examples=20)
def test_no_perturbation_inside_the_radius_changes_the_label_of_least_energy(case):
    assume(case["output"] != (-0.6, 0.7))  # targets are unit vectors
    net = make(case)
    x = random_input(10, net.sizes[0], seed=case["seed"])
    certificate = certify_energies(net, x)
    n_classes, radius = net.sizes[-1], certificate.radius.clamp(max=1e6)
    targets = torch.eye(n_classes, dtype=torch.float64)

    def table(inputs):
        return torch.stack([net.infer(inputs, targets[[k] * len(inputs)]).energy for k in range(n_classes)], 1)

    assert torch.equal(table(x).argmin(1), certificate.prediction)
    mine = targets[certificate.prediction]
    for rival in range(n_classes):
        theirs = targets[[rival] * len(x)]
        for up, down in zip(
            directions(net, x, mine, 1, case["seed"]), directions(net, x, theirs, -1, case["seed"]), strict=True
        ):
            step = up + down
            step = step / step.norm(dim=1, keepdim=True).clamp(min=1e-300)
            moved = table(x + 0.9999 * radius[:, None] * step).argmin(1)
            assert (moved == certificate.prediction)[radius > 0].all()


@given(case=CASES, share=st.sampled_from([0.3, 0.9, 1.1, 2.0]))
@settings(max_examples=20)
def test_no_perturbation_inside_the_radius_crosses_the_threshold(case, share):
    net = make(case)
    x = random_input(10, net.sizes[0], seed=case["seed"])
    energy = net.infer(x).energy
    threshold = share * float(energy.median())
    radius = decision_radius(net, x, threshold).clamp(max=1e6)
    for sign in (1, -1):
        for step in directions(net, x, None, sign, case["seed"]):
            moved = net.infer(x + 0.9999 * radius[:, None] * step).energy
            assert ((moved > threshold) == (energy > threshold))[radius > 0].all()


def test_a_loose_or_failed_solve_certifies_less():
    net = random_network((8, 10, 10, 4), scale=2.0)
    x = random_input(20, 8)
    tight, loose = (certify_energies(net, x, tol=tol).radius for tol in (1e-10, 1e-2))
    assert (loose <= tight + 1e-12).all() and (loose < tight).any()
    with pytest.warns(ConvergenceWarning):
        lower, upper = energy_interval(net, x, 0.1, tol=1e-12, max_sweeps=1)
    assert (lower == 0).all() and (upper == math.inf).all()
    hopeless = random_network((10, 8, 8, 8, 3), beta=0.0, scale=2000.0, output_constraint="box")
    assert (decision_radius(hopeless, random_input(3, 10), 1.0, tol=1e-3) == 0).all()


def test_certified_auroc_counts_pairs():
    generator = torch.Generator().manual_seed(0)
    inside, outside = (torch.randint(0, 6, (n,), generator=generator).double() for n in (31, 17))
    pairs = outside[:, None] - inside
    expected = float(((pairs > 0).double() + 0.5 * (pairs == 0)).mean())
    assert certified_auroc(inside, outside) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("standardize", [False, True])
def test_the_energy_model_in_the_units_of_its_data(standardize):
    rng = np.random.default_rng(0)
    X = 50 * (rng.standard_normal((200, 3)) @ rng.standard_normal((3, 6))) + (100 if standardize else 0)
    X = X if standardize else X / 100
    model = LRRNEnergyModel(hidden_sizes=(4,), epochs=10, standardize=standardize, random_state=0).fit(X)
    probe = np.concatenate([X[:20], X[:20] + X.std() * rng.standard_normal((20, 6))])
    radius, decision = model.certified_radius(probe), model.predict(probe)
    assert {-1, 1} <= set(decision) and (radius > 0).any()
    eps = 0.1 * X.std()
    lower, upper = model.energy_interval(probe, eps)
    for _ in range(20):
        step = rng.standard_normal(probe.shape)
        step /= np.linalg.norm(step, axis=1, keepdims=True)
        np.testing.assert_array_equal(model.predict(probe + 0.9999 * radius[:, None] * step), decision)
        energy = model.energy(probe + eps * step)
        assert (lower <= energy).all() and (energy <= upper).all()
    with pytest.raises(ValueError, match="eps must be at least 0; got -1"):
        model.energy_interval(probe, -1)


def test_bad_requests():
    net, x = random_network((6, 5, 4)), random_input(2, 6)
    with pytest.raises(ValueError, match="unknown guarantee 'maybe'"):
        certify_energies(net, x, guarantee="maybe")
    with pytest.raises(ValueError, match="this network has one output"):
        certify_energies(random_network((6, 5, 1)), x)
    with pytest.raises(ValueError, match="eps must be at least 0"):
        energy_interval(net, x, -0.1)
    assert (decision_radius(net, x, -1.0) == math.inf).all()
    assert lrrn.certify(net, x).prediction.shape == (2,)


def test_thresholds_and_energies_that_are_not_numbers_are_refused():
    net, x = random_network((5, 4, 3)), random_input(2, 5)
    with pytest.raises(ValueError, match="threshold must be an energy; got NaN"):
        decision_radius(net, x, math.nan)
    good, bad, none = torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan]), torch.tensor([])
    for inside, outside, name in (
        (bad, good, "in_distribution"),
        (good, bad, "out_of_distribution"),
        (none, good, "in_distribution"),
        (good, none, "out_of_distribution"),
    ):
        with pytest.raises(ValueError, match=f"{name} must hold ends of energy intervals"):
            certified_auroc(inside, outside)
    assert certified_auroc(good, torch.tensor([math.inf, 1.5])) == 0.75


@pytest.mark.parametrize("seed", range(6))
def test_the_error_of_a_margin_of_energies_covers_both_sides(seed):
    net, x = random_network((6, 5, 4), scale=1.5, seed=seed), random_input(5, 6, seed=seed)
    exact = certify_energies(net, x, tol=1e-12).margin
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for tol in (1e-2, 0.3):
            loose = certify_energies(net, x, tol=tol)
            assert ((loose.margin - exact).abs() <= loose.error_bound * (1 + 1e-9) + 1e-9).all()


def test_a_threshold_near_the_largest_float_is_above_every_finite_energy():
    """Twice the threshold overflows; the root is 1.8e154, and the radius is at most that over the constant of the root."""
    net = random_network((3, 4, 2))
    radius = decision_radius(net, random_input(2, 3), 1.7e308)
    assert (radius * energy_constant(net)).tolist() == pytest.approx([math.sqrt(2) * math.sqrt(1.7e308)] * 2, rel=1e-5)


def test_an_energy_that_overflows_proves_nothing():
    """One squared mismatch is beyond float64, although the residual of the solve is not."""
    net = lrrn.LRRN((2, 1), beta=(1.0,), gamma=1.0, output_constraint="nonneg", bias=False, reconstruction_bias=False)
    net = net.double()
    with torch.no_grad():
        net.W[0].copy_(torch.tensor([[1.0, 0.0]]))
    x = torch.tensor([[1e150, 1e156]], dtype=torch.float64)
    assert bool(net.infer(x).converged[0])
    assert decision_radius(net, x, 1.0).tolist() == [0.0]  # at 0, within 2e156, the energy is 0
    lower, upper = energy_interval(net, x, 2e156)
    assert lower.tolist() == [0.0] and upper.tolist() == [math.inf]


def test_energies_whose_squares_underflow_prove_nothing_beyond_their_size():
    """784 entries of 1.4e-162 have an energy of 8e-322, whose squares are all zero in float64, above the threshold."""
    sizes, options = (784, 2), {"beta": (1.0,), "output_constraint": "nonneg", "bias": False, "reconstruction_bias": False}
    net = lrrn.LRRN(sizes, generator=torch.Generator().manual_seed(0), **options).double()
    x = torch.full((1, 784), 1.4e-162, dtype=torch.float64)
    assert decision_radius(net, x, 5e-324, guarantee="exact").tolist() == [0.0]
