"""Bounds on the margins of all labels hold wherever a perturbation leads, and prove labels out that cannot be meant."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning

import lrrn
from lrrn.certificates.class_energies import energy_margins
from lrrn.certificates.margins import margin_bounds, ruled_out
from oracles import random_input, random_network
from random_certificates import CASES, make


def margins(scores):
    """Each score minus the largest other one."""
    return torch.stack([scores[:, k] - scores[:, others(k, scores)].amax(1) for k in range(scores.shape[1])], 1)


def others(k, scores):
    return [j for j in range(scores.shape[1]) if j != k]


def moved(net, x, eps, seed):
    """Inputs at distance eps: in random directions, and along the gradient of every output."""
    generator = torch.Generator().manual_seed(seed)
    steps = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(4)]
    leaf = x.clone().requires_grad_()
    output = net(leaf)
    for k in range(output.shape[1]):
        (slope,) = torch.autograd.grad(output[:, k].sum(), leaf, retain_graph=True)
        steps += [slope, -slope]
    return [x + eps * step / step.norm(dim=1, keepdim=True).clamp(min=1e-300) for step in steps]


@given(case=CASES, eps=st.sampled_from([0.0, 1e-3, 0.1, 1.0]), threshold=st.sampled_from([-0.5, -0.01, 0.0, 0.1]))
@settings(max_examples=40)
def test_exact_margins_stay_within_their_bounds_and_below_the_threshold_where_ruled_out(case, eps, threshold):
    net = make(case)
    x = random_input(8, net.sizes[0], seed=case["seed"])
    solution = net.infer(x)
    lower, upper = margin_bounds(net, x, solution, eps)
    out = ruled_out(net, x, solution, eps, threshold)
    assert (out | (upper >= threshold)).all()  # a bound below the threshold is enough
    for there in moved(net, x, eps * (1 - 1e-9), case["seed"]):
        exact = margins(net.infer(there, solver="newton", tol=1e-11).output)
        slack = 1e-9 * (1 + exact.abs())
        assert (lower <= exact + slack).all() and (exact <= upper + slack).all()
        assert (exact[out] < threshold + slack[out]).all()


def test_bounds_of_a_linear_network_by_hand():
    net = random_network((5, 3), beta=(0.0,))
    w, b, x, eps = net.W[0].detach(), net.b[0].detach(), random_input(7, 5), 0.3
    y = x @ w.mT + b
    lower, upper = margin_bounds(net, x, net.infer(x), eps)
    for k in range(3):
        pairs = [(y[:, k] - y[:, j], eps * (w[k] - w[j]).norm()) for j in others(k, y)]
        low, high = ([lead + sign * reach for lead, reach in pairs] for sign in (-1, 1))
        torch.testing.assert_close(lower[:, k], torch.minimum(*low), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(upper[:, k], torch.minimum(*high), rtol=1e-9, atol=1e-9)


def test_a_dual_per_sample_rules_out_more_than_constants_do():
    net, x = random_network((6, 12, 10, 4), scale=1.5, seed=2), random_input(60, 6, seed=3)
    solution, eps = net.infer(x), 0.15
    out = ruled_out(net, x, solution, eps, -0.05)
    by_constants = margin_bounds(net, x, solution, eps)[1] < -0.05
    assert (out | ~by_constants).all() and out.sum() > by_constants.sum() > 0


def test_nothing_is_ruled_out_where_the_solve_did_not_converge():
    net, x = random_network((8, 10, 10, 4), seed=1), random_input(20, 8)
    with pytest.warns(ConvergenceWarning):
        solution = net.infer(x, solver="coordinate_descent", tol=1e-30, max_sweeps=30)
    lower, upper = margin_bounds(net, x, solution, 0.1)
    assert (lower == -math.inf).all() and (upper == math.inf).all()
    assert not ruled_out(net, x, solution, 0.1, 5.0).any()


@given(case=CASES, eps=st.sampled_from([0.0, 0.1, 1.0]))
@settings(max_examples=20)
def test_margins_of_energies_stay_within_their_bounds(case, eps):
    net = make(case | {"last_beta": 0.0, "output": "free"})
    x = random_input(6, net.sizes[0], seed=case["seed"])
    lower, upper = energy_margins(net, x, eps)
    for there in moved(net, x, eps * (1 - 1e-9), case["seed"]):
        roots = []
        for target in torch.eye(net.sizes[-1], dtype=torch.float64):
            energy = net.infer(there, target.expand(len(x), -1), solver="newton", tol=1e-11).energy
            roots.append((2 * energy).sqrt())
        exact = margins(-torch.stack(roots, 1))
        slack = 1e-7 * (1 + exact.abs())
        assert (lower <= exact + slack).all() and (exact <= upper + slack).all()


@pytest.mark.parametrize("still", [True, False])
def test_outputs_that_do_not_move_are_not_lost_in_perturbations_without_limit(still):
    net, x = random_network((4, 5, 2)), random_input(3, 4)
    with torch.no_grad():
        net.W[0].mul_(0.0 if still else 1.0)
    for lower, upper in (margin_bounds(net, x, net.infer(x), math.inf), lrrn.output_interval(net, x, math.inf)):
        assert (lower == -math.inf).all() and (upper == math.inf).all()
