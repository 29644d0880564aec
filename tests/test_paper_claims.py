"""The paper's claims (Høier and Zach, 2020), one by one. Oracles: closed forms, NumPy, SciPy and quadprog.

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
from scipy import optimize
from torch.nn import functional

from lrrn import LRRN
from lrrn.attacks import empirical_lipschitz
from lrrn.energy.constraints import Interval
from lrrn.learning import Batch, Contrastive, FreeEnergy
from oracles import PlainNetwork, PlainQP, by_quadprog, random_input, random_network
from tolerances import rounding

CONSTRAINTS = ["free", "nonneg", "box", (-0.3, 0.5)]
CASES = st.fixed_dictionaries(
    dict(
        seed=st.integers(0, 10_000),
        sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple),
        gamma=st.sampled_from([0.1, 1.0, 2.0]),
        scale=st.sampled_from([0.5, 1.0, 4.0]),
        constraint=st.sampled_from(CONSTRAINTS),
        output_constraint=st.sampled_from(CONSTRAINTS),
    )
)


def network(weights, beta, gamma=1.0, constraint="free", output="free", b=None, c=None) -> LRRN:
    """A float64 network with the given weights, and biases of zero unless given."""
    sizes = (weights[0].shape[1], *(w.shape[0] for w in weights))
    net = LRRN(sizes, beta=beta, gamma=gamma, constraint=constraint, output_constraint=output, dtype=torch.float64)
    with torch.no_grad():
        for group, values in ((net.W, weights), (net.b, b), (net.c, c)):
            for parameter, value in zip(group, values, strict=True) if values is not None else ():
                parameter.copy_(torch.as_tensor(value))
    return net


def solved(net: LRRN, x, y=None):
    return net.infer(torch.as_tensor(x), y, solver="newton", tol=1e-10)


def energies(net: LRRN, x, y=None) -> np.ndarray:
    return solved(net, x, y).energy.numpy()


def orthogonal(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Orthonormal rows, or columns where there are more rows."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(max(rows, columns), min(rows, columns))))
    return q if rows >= columns else q.T


def with_singular_values(values, columns: int, seed: int = 0) -> np.ndarray:
    return orthogonal(len(values), len(values), seed) @ np.diag(values) @ orthogonal(len(values), columns, seed + 1)


def f(beta: float, s):
    """The paper's f_beta: what a linear layer does to a singular direction."""
    return (1 + beta) * s / (1 + beta * s**2)


def left_over(beta: float, s):
    """2 E of one linear layer at a unit vector along a singular direction.

    s^2 + beta - (1 + beta)^2 s^2 / (1 + beta s^2), and the numerator is a square.
    """
    return beta * (1 - s**2) ** 2 / (1 + beta * s**2)


def mismatches(net: PlainNetwork) -> tuple[np.ndarray, np.ndarray]:
    """R and r with 2 E(z; x) = |R (x, z) - r|^2."""
    ends = np.cumsum([0, *net.sizes])
    pieces, shifts = [], []
    for k, w in enumerate(net.weights):
        rows = np.zeros((w.shape[0] + w.shape[1], ends[-1]))
        below, above = slice(ends[k], ends[k + 1]), slice(ends[k + 1], ends[k + 2])
        rows[: w.shape[0], below], rows[: w.shape[0], above] = -w, np.eye(w.shape[0])
        rows[w.shape[0] :, below], rows[w.shape[0] :, above] = -np.eye(w.shape[1]), w.T
        weight = np.sqrt(net.gamma**k * np.repeat([1.0, net.beta[k]], w.shape))
        pieces.append(weight[:, None] * rows)
        shifts.append(weight * np.concatenate([net.b[k], net.c[k]]))
    return np.vstack(pieces), np.concatenate(shifts)


def joint_hessian(weights, beta, gamma) -> np.ndarray:
    """Second derivatives of E in (x, z) together."""
    b, c = ([np.zeros(w.shape[axis]) for w in weights] for axis in (0, 1))
    r = mismatches(PlainNetwork(weights, b, c, beta, gamma, [], []))[0]
    return r.T @ r


# --- unsupervised learning and PCA ----------------------------------------------------------------------------------------


def minimise_free_energy(net: LRRN, x: torch.Tensor) -> float:
    """Train by SciPy's BFGS on the free energy; return the mean energy reached."""

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.no_grad():
            net.W[0].copy_(torch.as_tensor(flat).reshape(net.W[0].shape))
        loss = FreeEnergy()(net, Batch(x)).mean()
        return loss.item(), torch.autograd.grad(loss, net.W[0])[0].numpy().ravel()

    result = optimize.minimize(objective, net.W[0].detach().numpy().ravel(), jac=True, method="BFGS", options=dict(gtol=1e-9))
    return objective(result.x)[0]


@pytest.mark.parametrize("beta", [1.0, 0.3, 4.0])
def test_one_linear_layer_is_an_eigen_decomposition_of_the_scatter_matrix(beta):
    """Section 4.1, G_1 = 0: the least mean energy is beta / 2 times the trailing eigenvalues, on the leading eigenspace.

    2 E(x) = beta |x|^2 - sum_i (beta - left_over(s_i)) (v_i x)^2, and the brackets are at most beta, so no W does better
    (Ky Fan). Only the subspace is found: rotating the units changes no energy.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 6)) @ with_singular_values([3.0, 2.5, 2.0, 1.0, 0.7, 0.4], 6)
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    least, leading = beta / 2 * values[:3].sum(), vectors[:, 3:] @ vectors[:, 3:].T
    net = network([0.3 * rng.normal(size=(3, 6))], (beta,))
    assert minimise_free_energy(net, torch.as_tensor(x)) == pytest.approx(least, rel=1e-9)
    w = net.W[0].detach().numpy()
    np.testing.assert_allclose(w @ w.T, np.eye(3), atol=1e-4)
    np.testing.assert_allclose(w.T @ w, leading, atol=1e-4)
    turned = network([orthogonal(3, 3) @ w], (beta,))
    np.testing.assert_allclose(energies(turned, x), energies(net, x), rtol=1e-9, atol=1e-12)
    for scale in (0.1, 0.5, 2.0):
        assert energies(network([scale * rng.normal(size=(3, 6))], (beta,)), x).mean() > least * (1 + 1e-6)


def test_data_in_a_subspace_of_the_layers_dimension_gives_orthonormal_weights_and_zero_energy():
    """Section 4.1: W_0 W_0^T = I, and E = 0 at *every* point of the subspace; outside, beta / 2 times the squared distance."""
    rng = np.random.default_rng(1)
    basis = orthogonal(3, 8)
    net = network([0.3 * rng.normal(size=(3, 8))], (1.0,))
    assert minimise_free_energy(net, torch.as_tensor(rng.normal(size=(40, 3)) @ basis)) < 1e-12
    w = net.W[0].detach().numpy()
    np.testing.assert_allclose(w @ w.T, np.eye(3), atol=1e-5)
    unseen = 10 * rng.normal(size=(100, 3)) @ basis
    assert energies(net, unseen).max() < 1e-7
    away = rng.normal(size=(100, 8))
    away -= away @ basis.T @ basis
    np.testing.assert_allclose(energies(net, unseen + away), (away**2).sum(1) / 2, rtol=1e-3)


def test_orthonormal_weights_need_a_layer_no_wider_than_the_subspace():
    """The same claim without dim(z_1) = r: a spare unit that looks away from the data may be of any size."""
    basis = orthogonal(4, 8)
    w = basis * np.array([[1.0], [1.0], [1.0], [5.0]])
    points = np.random.default_rng(2).normal(size=(20, 3)) @ basis[:3]
    assert energies(network([w], (1.0,)), points).max() < 1e-24
    # and with dim(z_1) < r no weights reach zero: the least mean energy is half the eigenvalue that is left out
    net = network([0.3 * w[:2]], (1.0,))
    assert minimise_free_energy(net, torch.as_tensor(points)) == pytest.approx(
        np.linalg.eigvalsh(points.T @ points / len(points))[-3] / 2, rel=1e-6
    )


# --- coercivity and strong convexity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [(), (4,), (4, 2)], ids=["one layer", "two layers", "three layers"])
def test_a_coercive_prior_makes_the_energy_coercive(later):
    """Section 4.1: G_1 coercive implies E coercive.

    A box bounds z_1, so |W_0^T z_1 - x - c_0| >= |x + c_0| - |W_0|_2 sqrt(d_1).
    """
    sizes = (6, 3, *later)
    beta = 0.7
    net = random_network(sizes, (beta,) + (1.0,) * len(later), constraint="box", output_constraint="box", gamma=0.5, scale=2.0)
    w, c = net.W[0].detach().numpy(), net.c[0].detach().numpy()
    x = np.concatenate([t * random_input(50, 6, seed=1).numpy() for t in (1, 10, 1000)])
    # the null space of W_0 is where the energy grows least
    x = np.concatenate([x, x @ np.linalg.svd(w)[2][3:].T @ np.linalg.svd(w)[2][3:]])
    reach = np.linalg.norm(x + c, axis=1) - np.linalg.norm(w, 2) * math.sqrt(3)
    assert (energies(net, x) >= beta / 2 * np.maximum(reach, 0) ** 2).all() and (reach > 0).mean() > 0.5
    # far out z_1 does not count any more: E / t^2 -> (|W_0 u|^2 + beta |u|^2) / 2
    u = random_input(20, 6, seed=2).numpy()
    growth = ((u @ w.T) ** 2).sum(1) / 2 + beta / 2 * (u**2).sum(1)
    np.testing.assert_allclose(energies(net, 1e6 * u) / 1e12, growth, rtol=1e-4)


@pytest.mark.parametrize("beta_1", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("s", [0.0, 0.5, 1.0, 2.0])
def test_the_energy_is_coercive_exactly_if_the_prior_of_a_second_layer_is(s, beta_1):
    """Section 4.1, all free, W_0 with orthonormal rows and W_1 = s Q.

    G_1 = g/2 |z_1|^2 with g = gamma left_over(s), which is 0 if beta_1 = 0 or s = 1. Then
    E(x) = 1/2 (1 + beta_0) g / (1 + beta_0 + g) |W_0 x|^2 + beta_0 / 2 |x - W_0^T W_0 x|^2: flat on the row space if g = 0.
    """
    beta_0, gamma = 1.5, 0.5
    w = orthogonal(3, 5)
    net = network([w, s * orthogonal(3, 3, 1)], (beta_0, beta_1), gamma)
    g = gamma * left_over(beta_1, s)
    assert (g == 0) == (beta_1 == 0 or s == 1)
    x = random_input(30, 5).numpy()
    seen = x @ w.T
    hidden = (x**2).sum(1) - (seen**2).sum(1)
    expected = (1 + beta_0) * g / (1 + beta_0 + g) * (seen**2).sum(1) / 2 + beta_0 / 2 * hidden
    np.testing.assert_allclose(energies(net, x), expected, rtol=1e-9)
    along = 1e4 * seen @ w
    if g == 0:
        assert energies(net, along).max() < 1e-9
    else:
        assert energies(net, along).min() > 1e3


def test_without_a_coercive_prior_the_energy_is_flat_along_a_ray():
    """Section 4.1 with C_1 the nonnegative orthant: E = 0 at x = t W^T z for z >= 0, and (1 + beta) / 2 |x|^2 the other way."""
    w, z = orthogonal(3, 5), np.abs(random_input(10, 3).numpy())
    net = network([w], (1.0,), output="nonneg")
    for t in (1.0, 1e4):
        assert energies(net, t * z @ w).max() < 1e-24 * t**2
        np.testing.assert_allclose(energies(net, -t * z @ w), t**2 * (z**2).sum(1), rtol=1e-12)


def test_without_a_reconstruction_term_a_coercive_prior_is_not_enough():
    """Section 4.1 needs the reconstruction term of eq. unsupervised1: with beta_0 = 0, E is flat on the null space of W_0."""
    w = orthogonal(3, 5)
    null = np.linalg.svd(w)[2][3:]
    rays = random_input(10, 2).numpy() @ null
    for beta in (0.0, 1e-3):
        net = network([w], (beta,), output="box", b=[np.full(3, 2.0)])
        # z = (1, 1, 1), as near to b = (2, 2, 2) as the box allows, and of squared length 3
        at_zero = 1.5 + 1.5 * beta
        np.testing.assert_allclose(energies(net, 1e4 * rays), at_zero + beta / 2 * 1e8 * (rays**2).sum(1), rtol=1e-9)


@given(case=CASES, beta=st.sampled_from([0.0, 0.5, 2.0]))
@settings(max_examples=30)
def test_a_small_energy_gap_means_a_prediction_near_the_target(case, beta):
    """Section 4.2: E is strongly convex in z, so E(zhat) = E(z*) implies z_L* = y.

    Precisely E(zhat) - E(z*) >= 1/2 d^T S d with d = y - z_L* and S the inverse of H^-1's output block; equal without sets.
    """
    net = random_network(beta=(beta,) * (len(case["sizes"]) - 1), **case)
    plain = PlainNetwork.of(net)
    r = mismatches(plain)[0][:, net.sizes[0] :]
    h = r.T @ r
    assert np.linalg.eigvalsh(h)[0] > 0
    s = np.linalg.inv(np.linalg.inv(h)[-net.sizes[-1] :, -net.sizes[-1] :])
    x = random_input(10, net.sizes[0], seed=case["seed"])
    y = (0.5 * random_input(10, net.sizes[-1], seed=case["seed"] + 1)).clamp(net.intervals[-1].lo, net.intervals[-1].hi)
    free = solved(net, x)
    gap = energies(net, x, y) - free.energy.numpy()
    d = (y - free.output).numpy()
    least = np.einsum("ni,ij,nj->n", d, s, d) / 2
    slack = 1e-9 * (1 + free.energy.numpy() + least)
    assert (gap >= least - slack).all()
    if case["constraint"] == case["output_constraint"] == "free":
        np.testing.assert_array_less(np.abs(gap - least), slack)


# --- Lipschitz constants --------------------------------------------------------------------------------------------------


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


# --- gamma -> 0 -----------------------------------------------------------------------------------------------------------


def layer_by_layer(net: LRRN, x: torch.Tensor) -> np.ndarray:
    """Each layer minimising its own terms over its set, by quadprog: what gamma -> 0 leaves."""
    plain = PlainNetwork.of(net)
    rows = []
    for z in x.numpy():
        for w, b, c, beta, lo, hi in zip(plain.weights, plain.b, plain.c, plain.beta, plain.lo, plain.hi, strict=True):
            h, q = np.eye(len(w)) + beta * w @ w.T, (1 + beta) * w @ z + b + beta * w @ c
            z = by_quadprog(PlainQP(h, q, np.full(len(w), lo), np.full(len(w), hi), 0.0))
        rows.append(z)
    return np.array(rows)


def pointwise(net: LRRN, x: torch.Tensor) -> torch.Tensor:
    """The feed-forward network of each layer's linear solution, clipped unit by unit."""
    z = x
    for w, b, c, beta, interval in zip(net.W, net.b, net.c, net.beta, net.intervals, strict=True):
        a = torch.eye(len(w), dtype=torch.float64) + beta * w @ w.mT
        z = torch.linalg.solve(a, ((1 + beta) * z @ w.mT + b + beta * w @ c).mT).mT.clamp(interval.lo, interval.hi)
    return z


def shrinks_with(gammas, error) -> bool:
    """Whether the error is of order gamma: it falls by about the factor that gamma falls by."""
    errors = [error(gamma) for gamma in gammas]
    rates = [b / a / (h / g) for a, b, g, h in zip(errors, errors[1:], gammas, gammas[1:], strict=False)]
    return errors[0] > 0 and all(0.5 < rate < 2 for rate in rates)


@pytest.mark.parametrize(("constraint", "activation"), [("nonneg", torch.relu), ("box", functional.hardtanh)])
def test_with_beta_zero_a_vanishing_gamma_leaves_the_feed_forward_network(constraint, activation):
    """Remark 2: the activation is the projection onto C_k, ReLU for the orthant and hard tanh for the box; error O(gamma)."""

    def error(gamma: float) -> float:
        net = random_network((5, 6, 6, 3), (0.0, 0.0, 0.0), gamma, constraint, scale=2.0)
        z = x = random_input(20, 5)
        for w, b in zip(net.W[:-1], net.b[:-1], strict=True):
            z = activation(functional.linear(z, w, b))
        return float((solved(net, x).output - functional.linear(z, net.W[-1], net.b[-1])).detach().norm())

    assert shrinks_with([1e-3, 1e-4, 1e-5], error)
    # feedback is at work before that
    assert error(1.0) > 0.1


def test_with_beta_zero_and_free_units_every_gamma_gives_the_linear_network():
    """Remark 2, the case without a limit: the forward pass leaves no mismatch, so E = 0 there and gamma does not matter."""
    for gamma in (1e-2, 1.0, 3.0):
        net = random_network((5, 6, 4, 3), (0.0, 0.0, 0.0), gamma, "free")
        x = random_input(10, 5)
        torch.testing.assert_close(solved(net, x).output, pointwise(net, x).detach(), rtol=1e-9, atol=1e-9)
        assert energies(net, x).max() < 1e-18


@pytest.mark.parametrize("beta", [(1.0, 0.5, 0.0), (2.0, 1.0, 0.7)], ids=str)
def test_with_beta_positive_the_limit_projects_in_the_metric_of_the_layer(beta):
    """Remark 2: with beta_k > 0 layer k becomes the projection of its linear solution in the metric I + beta_k W_k W_k^T.

    That is a unit-by-unit activation only if the rows of W_k are orthogonal; otherwise clipping the linear solution is wrong.
    """

    def make(gamma: float, orthogonal_rows: bool) -> LRRN:
        net = random_network((6, 5, 4, 3), beta, gamma, "nonneg", scale=1.5)
        if orthogonal_rows:
            with torch.no_grad():
                for k, w in enumerate(net.W):
                    w.copy_(torch.as_tensor(np.diag(0.5 + np.arange(len(w)) / 2) @ orthogonal(*w.shape, seed=k)))
        return net

    x = random_input(20, 6)
    for orthogonal_rows in (True, False):
        limit = layer_by_layer(make(1.0, orthogonal_rows), x)
        clipped = pointwise(make(1.0, orthogonal_rows), x).detach().numpy()
        assert shrinks_with(
            [1e-3, 1e-4, 1e-5],
            lambda g, rows=orthogonal_rows, at=limit: float(np.linalg.norm(solved(make(g, rows), x).output.numpy() - at)),
        )
        if orthogonal_rows:
            np.testing.assert_allclose(clipped, limit, atol=1e-9)
        else:
            assert np.abs(clipped - limit).max() > 0.1


@pytest.mark.parametrize("beta", [0.0, 0.6])
def test_contrastive_loss_tends_to_gamma_power_times_a_squared_error(beta):
    """Remark 2: gamma^(1-L) (E(zhat) - E(z*)) -> 1/2 (y - f)^T M (y - f) with f the limit network and M = I + beta W W^T.

    So it is the squared error, whose gradient back-propagation takes, if the output has beta_{L-1} = 0, and another one if not.
    """
    x, y = random_input(10, 5), random_input(10, 3, seed=1)

    def error(gamma: float) -> float:
        net = random_network((5, 6, 4, 3), (0.0, 0.0, beta), gamma)
        miss = (y - pointwise(net, x)).detach().numpy()
        w = net.W[-1].detach().numpy()
        expected = np.einsum("ni,ij,nj->n", miss, np.eye(3) + beta * w @ w.T, miss) / 2
        loss = Contrastive()(net, Batch(x, y)).detach().numpy()
        return float(np.linalg.norm(loss / gamma**2 - expected) / np.linalg.norm(expected))

    assert error(1e-4) < 1e-2 and shrinks_with([1e-2, 1e-3, 1e-4], error)


def test_contrastive_gradients_tend_to_those_of_back_propagation_in_size_too():
    """Remark 2: gamma^(1-L) times the contrastive gradient is that of 1/2 |y - f(x)|^2 up to O(gamma), layer by layer."""
    x, y = random_input(10, 5), random_input(10, 3, seed=1)

    def errors(gamma: float) -> np.ndarray:
        net = random_network((5, 6, 4, 3), (0.0, 0.0, 0.0), gamma, solver="newton", tol=1e-14)
        parameters = [*net.W, *net.b]
        ours = torch.autograd.grad(Contrastive()(net, Batch(x, y)).sum(), parameters)
        z = x
        for k, (w, b) in enumerate(zip(net.W, net.b, strict=True)):
            z = functional.linear(z if k == 0 else torch.relu(z), w, b)
        theirs = torch.autograd.grad(0.5 * (z - y).square().sum(), parameters)
        assert all(float(g.norm()) > 0.1 for g in theirs)
        return np.array([float((a / gamma**2 - g).norm() / g.norm()) for a, g in zip(ours, theirs, strict=True)])

    coarse, fine = errors(1e-2), errors(1e-3)
    assert (fine < 0.02).all() and (fine < 0.2 * coarse).all()


# --- gamma absorbed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.125, 3.0])
@pytest.mark.parametrize("constraint", ["free", "nonneg", "box"])
@pytest.mark.parametrize("beta_0", [0.0, 1.0])
def test_without_later_reconstruction_gamma_is_absorbed_by_rescaling(gamma, constraint, beta_0):
    """Remark 2 holds if beta_k = 0 for k >= 1.

    With g = sqrt(gamma) take z_k' = g^(k-1) z_k, W_k' = g W_k (but W_0' = W_0) and b_k' = g^k b_k.
    Then gamma^k |z_{k+1} - W_k z_k - b_k|^2 = |z_{k+1}' - W_k' z_k' - b_k'|^2. The sets scale too: C_k' = g^(k-1) C_k.
    """
    g = math.sqrt(gamma)
    net = random_network((4, 5, 6, 3), (beta_0, 0.0, 0.0), gamma, constraint, constraint)
    sets = [Interval(g**k * i.lo, g**k * i.hi) for k, i in enumerate(net.intervals)]
    weights = [w.detach() * (g if k else 1) for k, w in enumerate(net.W)]
    b = [g**k * p.detach() for k, p in enumerate(net.b)]
    absorbed = network(weights, net.beta, 1.0, sets[:-1], sets[-1], b, [p.detach() for p in net.c])
    x = random_input(20, 4)
    z = [random_input(20, d, seed=d) for d in net.sizes[1:]]
    scaled = [g**k * block for k, block in enumerate(z)]
    torch.testing.assert_close(absorbed.energy(x, scaled), net.energy(x, z), rtol=1e-12, atol=0)
    ours, theirs = solved(net, x), solved(absorbed, x)
    torch.testing.assert_close(theirs.energy, ours.energy, rtol=1e-9, atol=1e-12)
    for k, (a, c) in enumerate(zip(theirs.activations, ours.activations, strict=True)):
        torch.testing.assert_close(a, g**k * c, rtol=1e-8, atol=1e-8)


BETA = (1.0, 1.0)
FIRST, SECOND = with_singular_values([1.5, 0.7], 2), with_singular_values([2.0, 0.5], 2, seed=3)


def best_reparametrisation(beta, gamma: float, weights=(FIRST, SECOND), starts: int = 6):
    """Least squares over all t_1, t_2, W_0', W_1': make E'(t_1 z_1, t_2 z_2; x), without discount, the energy with gamma."""
    shapes, n = [w.shape for w in weights], weights[0].size
    goal = joint_hessian(list(weights), beta, gamma)

    def parts(p: np.ndarray):
        return p[:2], [p[2 : 2 + n].reshape(shapes[0]), p[2 + n :].reshape(shapes[1])]

    def difference(p: np.ndarray) -> np.ndarray:
        t, given = parts(p)
        scale = np.repeat([1.0, *t], [shapes[0][1], shapes[0][0], shapes[1][0]])
        return scale[:, None] * joint_hessian(given, beta, 1.0) * scale - goal

    rng = np.random.default_rng(0)
    root = math.sqrt(gamma)
    plain = np.concatenate([[1.0, root], weights[0].ravel(), root * weights[1].ravel()])
    guesses = [plain, *(plain * rng.uniform(0.3, 3, size=plain.shape) for _ in range(starts - 1))]
    found = [
        optimize.least_squares(lambda p: difference(p).ravel(), guess, xtol=1e-15, ftol=1e-15, gtol=1e-15) for guess in guesses
    ]
    best = min(found, key=lambda result: result.cost).x
    return *parts(best), difference(best)


def proven_gap(gamma: float) -> float:
    """Lower bound on |difference|_2 over all t_1, t_2, W_0', W_1', for gamma < 1.

    If it were eps, the singular values of the blocks would agree to eps (Weyl). Blocks xx and x1 then say t_1^2 >= low(eps),
    which is 1 at eps = 0. Blocks 12 and 22, at the largest and the smallest singular value of W_1, say t_1^2 <= high(eps),
    which is gamma at eps = 0. So eps is at least where the two meet.
    """
    top, (large, small) = np.linalg.norm(FIRST, 2), np.linalg.svd(SECOND, compute_uv=False)

    def low(eps: float) -> float:
        return (top - eps / (1 + BETA[0])) ** 2 / (top**2 + eps)

    def high(eps: float) -> float:
        delta = eps / (1 + BETA[1])
        spread = (gamma * large + delta) ** 2 - max(gamma * small - delta, 0.0) ** 2
        return BETA[1] * spread / (gamma * BETA[1] * (large**2 - small**2) - 2 * eps)

    assert low(0.0) == pytest.approx(1) and high(0.0) == pytest.approx(gamma)
    pole = gamma * BETA[1] * (large**2 - small**2) / 2
    return optimize.brentq(lambda eps: low(eps) - high(eps), 0.0, min(pole, top) * (1 - 1e-9))


@pytest.mark.parametrize("gamma", [0.125, 0.5])
def test_with_tied_weights_and_later_reconstruction_gamma_is_not_absorbed(gamma):
    """Remark 2 fails for beta_1 > 0: no t_1, t_2 and no weights whatever give E'(t_1 z_1, t_2 z_2; x) = E(z; x).

    The terms in x x and x z_1 give W_0'^T W_0' = W_0^T W_0 and t_1^2 W_0'^T W_0' = W_0^T W_0, so t_1^2 = 1. Those in z_1 z_2
    and z_2 z_2 give t_1^2 t_2^2 s'^2 = gamma^2 s^2 and t_2^2 (1 + beta s'^2) = gamma (1 + beta s^2) for each singular value s
    of W_1. Two different ones, subtracted: t_1^2 = gamma. So gamma = 1.
    """
    t, weights, difference = best_reparametrisation(BETA, gamma)
    values, vectors = np.linalg.eigh(difference)
    worst = vectors[:, [np.abs(values).argmax()]].T
    # the package's energies at the unit vector where the two differ most: half the norm of the difference
    x, z1, z2 = (torch.as_tensor(worst[:, 2 * k : 2 * k + 2]) for k in range(3))
    given = network([FIRST, SECOND], BETA, gamma).energy(x, [z1, z2])
    other = network(weights, BETA, 1.0).energy(x, [t[0] * z1, t[1] * z2])
    gap = 2 * abs((given - other).item())
    assert gap == pytest.approx(np.abs(values).max(), rel=1e-9)
    assert gap >= proven_gap(gamma) > 0.1


def test_the_search_for_a_reparametrisation_finds_one_where_there_is_one():
    """The search of the test above, where beta_1 = 0 or gamma = 1: it ends at zero, so its failure means something."""
    for beta, gamma in [((1.0, 0.0), 0.125), ((1.0, 1.0), 1.0)]:
        assert np.abs(best_reparametrisation(beta, gamma)[2]).max() < 1e-9


def test_one_singular_value_can_be_absorbed_and_only_at_one_size():
    """Why two different singular values: for scalars there is a solution exactly if gamma w^4 - (1 - gamma) beta w^2 = 1."""
    gamma, beta = 0.25, 1.0
    root = math.sqrt(((1 - gamma) * beta + math.sqrt((1 - gamma) ** 2 * beta**2 + 4 * gamma)) / (2 * gamma))
    gaps = {}
    for size in (0.7, 1.0, 1.3):
        weights = (np.full((1, 1), 0.8), np.full((1, 1), size * root))
        gaps[size] = np.abs(best_reparametrisation((1.0, beta), gamma, weights)[2]).max()
    assert gaps[1.0] < 1e-9 and min(gaps[0.7], gaps[1.3]) > 1e-2


# --- the energy as a distance ---------------------------------------------------------------------------------------------


@given(case=CASES, beta=st.sampled_from([0.0, 0.5, 2.0]), clamped=st.booleans())
@settings(max_examples=30)
def test_the_energy_is_the_squared_distance_to_a_convex_set_and_convex(case, beta, clamped):
    """Remark 3: E is jointly convex, so x -> min_z E(z; x) is convex; and 2 E is the squared distance of an affine image of x.

    The set is the image of the box of activations under a linear map; SciPy's bounded least squares finds the distance.
    """
    net = random_network(beta=(beta,) * (len(case["sizes"]) - 1), **case)
    x = 2 * random_input(12, net.sizes[0], seed=case["seed"])
    y = None
    if clamped:
        y = (0.5 * random_input(1, net.sizes[-1])).clamp(net.intervals[-1].lo, net.intervals[-1].hi).expand(6, -1)
    left, right = x[:6], x[6:]
    at = {share: energies(net, (1 - share) * left + share * right, y) for share in (0.0, 0.3, 0.5, 1.0)}
    for share in (0.3, 0.5):
        assert (at[share] <= ((1 - share) * at[0.0] + share * at[1.0]) * (1 + 1e-9) + 1e-12).all()
    r, shift = mismatches(PlainNetwork.of(net))
    if not clamped:
        lo, hi = (np.repeat([getattr(i, end) for i in net.intervals], net.sizes[1:]) for end in ("lo", "hi"))
        for point, energy in zip(left.numpy(), at[0.0], strict=True):
            image = shift - r[:, : net.sizes[0]] @ point
            distance = optimize.lsq_linear(r[:, net.sizes[0] :], image, (lo, hi), method="bvls", tol=1e-14)
            assert energy == pytest.approx(distance.cost, rel=1e-7, abs=1e-10)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, 3.0])
def test_the_energy_of_one_free_layer_in_closed_form(beta):
    """Remark 3, one layer: 2 E(x) = sum_i beta (1 - s_i^2)^2 / (1 + beta s_i^2) (v_i x)^2 + beta |x off the row space|^2.

    Zero exactly where s_i = 1. So G_1 coercive is enough for a coercive E, and not needed.
    """
    values = np.array([2.0, 1.0, 0.3])
    w = with_singular_values(values, 5)
    v = np.linalg.svd(w)[2]
    x = random_input(20, 5).numpy()
    weights = np.array([*left_over(beta, values), beta, beta])
    np.testing.assert_allclose(energies(network([w], (beta,)), x), (x @ v.T) ** 2 @ weights / 2, rtol=1e-9, atol=1e-14)
    # deeper and free: the Schur complement of the joint Hessian
    net = random_network((5, 4, 6, 2), (beta, 1.0, 0.5), bias_scale=0.0, constraint="free")
    h = joint_hessian([p.detach().numpy() for p in net.W], net.beta, net.gamma)
    schur = h[:5, :5] - h[:5, 5:] @ np.linalg.solve(h[5:, 5:], h[5:, :5])
    np.testing.assert_allclose(energies(net, x), np.einsum("ni,ij,nj->n", x, schur, x) / 2, rtol=1e-8, atol=1e-12)
    assert np.linalg.eigvalsh(h)[0] > -1e-12


@pytest.mark.parametrize(("output", "lo", "hi"), [("nonneg", 0, np.inf), ("box", -1, 1)])
def test_orthonormal_weights_weigh_the_distance_inside_and_off_their_subspace(output, lo, hi):
    """Remark 3: W W^T = I gives 2 E = (1 + beta) dist(W x, C)^2 + beta dist(x, row space)^2: a generalised squared distance."""
    w, x = orthogonal(3, 5), 2 * random_input(30, 5).numpy()
    for beta in (0.0, 1.0, 2.5):
        seen = x @ w.T
        outside = ((seen - np.clip(seen, lo, hi)) ** 2).sum(1)
        off = ((x - seen @ w) ** 2).sum(1)
        expected = ((1 + beta) * outside + beta * off) / 2
        np.testing.assert_allclose(energies(network([w], (beta,), output=output), x), expected, rtol=1e-9, atol=1e-12)


def test_class_specific_energies_represent_what_one_energy_cannot():
    """Remark 3, eq. class_specific: min_y E(zhat(x, y)) need not be convex. W = 1, beta = 1: least (y - x)^2 over y = -1, 1."""
    net = network([np.eye(1)], (1.0,))
    x = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
    least = np.minimum(*(energies(net, x, torch.full_like(x, y)) for y in (-1.0, 1.0)))
    np.testing.assert_allclose(least, [0, 1, 0], atol=1e-15)
