"""The paper's claims (Høier and Zach, 2020) on the energy. Oracles: closed forms, NumPy and SciPy.

Some claims need a condition that the paper does not print, and two do not hold as printed. The tests say which, and show both
sides.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from claims import CASES, energies, joint_hessian, left_over, mismatches, network, orthogonal, solved, with_singular_values
from oracles import PlainNetwork, random_input, random_network

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
