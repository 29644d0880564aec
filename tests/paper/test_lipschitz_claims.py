"""The paper's claims (Høier and Zach, 2020) on Lipschitz constants. Oracles: closed forms and NumPy.

Some claims need a condition that the paper does not print, and two do not hold as printed. The tests say which, and show both
sides.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from claims import CASES, energies, left_over, network, orthogonal, solved, with_singular_values
from lrrn import LRRN
from lrrn.attacks import empirical_lipschitz
from oracles import random_input, random_network
from tolerances import rounding


def f(beta: float, s):
    """The paper's f_beta: what a linear layer does to a singular direction."""
    return (1 + beta) * s / (1 + beta * s**2)


def rho(net: LRRN, k: int) -> float:
    beta = net.beta[k]
    return (math.sqrt(beta) + 1 / math.sqrt(beta)) / 2 if beta > 0 else float(np.linalg.norm(net.W[k].detach().numpy(), 2))


def layer_moves(net: LRRN, x: torch.Tensor, other: torch.Tensor) -> tuple[list[np.ndarray], np.ndarray]:
    """|z_k*(x) - z_k*(x')| for k = 0, ..., L, and how far these may be off."""
    a, b = solved(net, x), solved(net, other)
    layers = [[x, *a.activations], [other, *b.activations]]
    moves = [(p - q).norm(dim=1).numpy() for p, q in zip(*layers, strict=True)]
    # an eliminated output multiplies the error of its features, and rounds on its own
    size = max(float(p.norm(dim=1).max()) for p in itertools.chain(*layers))
    error = (a.error_bound + b.error_bound).numpy() + rounding(size, max(net.sizes))
    return moves, error * (1 + float(net.W[-1].detach().norm()))


def pairs(d: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and others near and far."""
    x, step = 2 * random_input(40, d, seed=seed), random_input(40, d, seed=seed + 1)
    return x, x + step * torch.logspace(-3, 1, 40, dtype=torch.float64)[:, None]


@given(case=CASES)
@settings(max_examples=40)
def test_with_beta_one_in_all_layers_every_layer_is_non_expansive(case):
    """Corollary 1 and Theorem 1: P_{1,W,G} is 1-Lipschitz, so x -> z_k*(x) is for every k, whatever weights, sets and gamma."""
    net = random_network(beta=(1.0,) * (len(case["sizes"]) - 1), **case)
    moves, slack = layer_moves(net, *pairs(net.sizes[0], case["seed"]))
    for below, above in itertools.pairwise(moves):
        assert (above <= below * (1 + 1e-12) + 2 * slack).all()
    # the slopes are solved to 1e-6 at worst
    assert empirical_lipschitz(net, random_input(5, net.sizes[0], seed=case["seed"]), steps=3) <= 1 + 1e-5


@given(case=CASES, beta=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 20.0]), min_size=3, max_size=3))
@settings(max_examples=40)
def test_every_layer_moves_at_most_rho_times_as_far_as_the_one_below(case, beta):
    """Lemma 1, Lemma 2 and Theorem 1: z_{k+1}*(z_k*) is rho_k-Lipschitz, and the network has the product."""
    net = random_network(beta=tuple(beta[: len(case["sizes"]) - 1]), **case)
    moves, slack = layer_moves(net, *pairs(net.sizes[0], case["seed"]))
    for k, (below, above) in enumerate(itertools.pairwise(moves)):
        assert (above <= rho(net, k) * (below + slack) * (1 + 1e-12) + slack).all()


@pytest.mark.parametrize("gamma", [0.1, 1.0])
def test_the_constant_one_is_attained_by_orthogonal_weights(gamma):
    """Corollary 1 is tight: beta = 1 and orthogonal weights fit every input exactly, and the network is an isometry."""
    weights = [orthogonal(4, 4, seed) for seed in range(3)]
    net = network(weights, (1.0, 1.0, 1.0), gamma)
    x, other = pairs(4, 0)
    assert energies(net, x).max() < 1e-24
    moves, _ = layer_moves(net, x, other)
    for move in moves:
        np.testing.assert_allclose(move, moves[0], rtol=1e-9)
    assert float(empirical_lipschitz(net, x[:3], steps=1)) == pytest.approx(1, rel=1e-6)
    # with sets too: permutations pass nonnegative inputs on, and stop the others
    net = network([np.eye(4)[[1, 2, 3, 0]], np.eye(4)[[2, 0, 1, 3]]], (1.0, 1.0), gamma, "nonneg", "nonneg")
    moves, _ = layer_moves(net, x.abs(), other.abs())
    np.testing.assert_allclose(moves[-1], moves[0], rtol=1e-9)
    assert float(solved(net, -x.abs()).output.abs().max()) == 0


@pytest.mark.parametrize("beta", [0.1, 0.25, 4.0])
def test_the_constant_of_lemma_1_is_attained_at_one_over_the_root_of_beta(beta):
    """W_0 = Q / sqrt(beta): every distance grows by (sqrt(beta) + 1/sqrt(beta)) / 2, and later layers may keep it."""
    expected = (math.sqrt(beta) + 1 / math.sqrt(beta)) / 2
    assert expected > 1.2
    for betas in [(beta,), (beta, 1.0, 1.0)]:
        weights = [orthogonal(4, 4) / math.sqrt(beta), orthogonal(4, 4, 1), orthogonal(4, 4, 2)]
        net = network(weights[: len(betas)], betas, 0.5)
        moves, _ = layer_moves(net, *pairs(4, 0))
        np.testing.assert_allclose(moves[-1], expected * moves[0], rtol=1e-9)
        assert float(empirical_lipschitz(net, random_input(3, 4), steps=1)) == pytest.approx(expected, rel=1e-6)
        assert net.lipschitz("paper") == pytest.approx(expected, rel=1e-9)


def test_the_product_of_theorem_1_is_approached_as_gamma_vanishes_and_not_before():
    """Two layers at their peaks: the second presses on the first with g = gamma left_over, so z_1 falls short of rho_0 |x|."""
    beta, w = (4.0, 0.25), (0.5, 2.0)
    product = 1.25**2
    slopes = []
    for gamma in (1.0, 1e-2, 1e-4):
        net = network([np.full((1, 1), v) for v in w], beta, gamma)
        g = gamma * left_over(beta[1], w[1])
        expected = 1.25 * (1 + beta[0]) * w[0] / (1 + beta[0] * w[0] ** 2 + g)
        slopes.append(float(solved(net, torch.ones(1, 1, dtype=torch.float64)).output))
        assert slopes[-1] == pytest.approx(expected, rel=1e-9)
    assert net.lipschitz("paper") == pytest.approx(product, rel=1e-9)
    assert slopes[0] < 0.8 * product and slopes[2] < product and slopes[2] == pytest.approx(product, rel=1e-3)


def test_with_a_regression_output_the_constant_is_the_norm_of_the_last_weights_and_attained():
    """Corollary 2, beta = (1, ..., 1, 0); and Lemma 2 says why the first layers need beta > 0: alone they would expand."""
    last = with_singular_values([3.0, 0.5], 4)
    net = network([orthogonal(4, 4), orthogonal(4, 4, 1), last], (1.0, 1.0, 0.0))
    assert float(empirical_lipschitz(net, random_input(3, 4), steps=1)) == pytest.approx(3.0, rel=1e-6)
    hidden = [7.0 * orthogonal(4, 4), 7.0 * orthogonal(4, 4, 1)]
    bounded, unbounded = (network([*hidden, last], (beta, beta, 0.0)) for beta in (1.0, 0.0))
    assert empirical_lipschitz(bounded, random_input(3, 4), steps=1) <= 3.0
    assert float(empirical_lipschitz(unbounded, random_input(3, 4), steps=1)) == pytest.approx(7 * 7 * 3, rel=1e-6)


@pytest.mark.parametrize("beta", [0.5, 1.0, 3.0])
def test_with_identity_weights_a_layer_is_a_proximal_operator(beta):
    """Section 3.2: P_{beta,I,G} = prox_{G/(1+beta)}, which minimises (1 + beta)/2 |z - x|^2 + G (printed without the 1/2).

    G = g/2 z^2 on a box has the prox clip((1 + beta) x / (1 + beta + g)). Any prox is firmly non-expansive.
    """
    s, beta_1, gamma = 2.0, 0.7, 0.5
    x, other = pairs(3, 0)
    net = network([np.eye(3), s * np.eye(3)], (beta, beta_1), gamma, "box")
    g = gamma * left_over(beta_1, s)
    expected = np.clip((1 + beta) * x.numpy() / (1 + beta + g), -1, 1)
    np.testing.assert_allclose(solved(net, x).activations[0].numpy(), expected, atol=1e-10)
    net = random_network((3, 3, 5, 2), (beta, 0.5, 0.0), scale=2.0)
    with torch.no_grad():
        net.W[0].copy_(torch.eye(3))
    dz = (solved(net, x).activations[0] - solved(net, other).activations[0]).numpy()
    assert ((dz**2).sum(1) <= (dz * (x - other).numpy()).sum(1) + 1e-9).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [((0.25, 0.6), 3.0 / 2.44), ((0.2, 0.9), 4.5 / 4.24), ((0.4, 2.0), 2.0 / 1.64)],
    ids=["1/beta is wrong", "nearest by ratio, not by difference", "below the peak"],
)
def test_remark_1_the_norm_is_at_the_singular_value_closest_to_one_over_the_root_of_beta(values, expected):
    """Remark 1 prints 1/beta. With beta = 4 that is 0.25, yet the norm belongs to 0.6: the peak is at 1/sqrt(beta) = 0.5.

    "Closest in a certain sense" is by ratio, as f(s) = f(1 / (beta s)): 0.9 beats 0.2, though 0.2 is nearer to 0.5.
    """
    beta = 4.0
    w = with_singular_values(values, 3)
    a = (1 + beta) * np.linalg.solve(np.eye(2) + beta * w @ w.T, w)
    assert (
        np.linalg.norm(a, 2) == pytest.approx(expected, rel=1e-12) == pytest.approx(max(f(beta, s) for s in values), rel=1e-12)
    )
    net = network([w], (beta,))
    assert float(empirical_lipschitz(net, random_input(2, 3), steps=1)) == pytest.approx(expected, rel=1e-6)
    winner = min(values, key=lambda s: abs(math.log(s * math.sqrt(beta))))
    for s, v in zip(sorted(values, reverse=True), np.linalg.svd(w)[2], strict=False):
        stretched = float(solved(net, v[None]).output.norm())
        assert stretched == pytest.approx(f(beta, s), rel=1e-9)
        assert (s == winner) == (abs(stretched - expected) < 1e-6)


def test_remark_1_with_beta_zero_the_largest_singular_value_decides():
    """Remark 1: as beta -> 0 the operator norm tends to the largest singular value."""
    w = with_singular_values([0.5, 3.0], 3)
    slopes = [float(empirical_lipschitz(network([w], (b,)), random_input(2, 3), steps=1)) for b in (1e-2, 1e-4, 0.0)]
    assert slopes == pytest.approx([f(1e-2, 3.0), f(1e-4, 3.0), 3.0], rel=1e-6)
    assert 3.0 - slopes[1] < 0.02 * (3.0 - slopes[0])
