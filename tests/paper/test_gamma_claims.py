"""The paper's claims (Høier and Zach, 2020) on the discount gamma. Oracles: closed forms, SciPy and quadprog.

Some claims need a condition that the paper does not print, and two do not hold as printed. The tests say which, and show both
sides.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import optimize
from torch.nn import functional

from claims import energies, joint_hessian, network, orthogonal, solved, with_singular_values
from lrrn import LRRN
from lrrn.energy.constraints import Interval
from lrrn.learning import Batch, Contrastive
from oracles import PlainNetwork, PlainQP, by_quadprog, random_input, random_network

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
