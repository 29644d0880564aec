"""Oracle: H, q and the constant read off the energy's definition by evaluating it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lrrn.energy import LiftedEnergy
from oracles import PlainNetwork, full_qp, quadratic_of, random_input, random_network
from tolerances import rounding

NETWORKS = [
    pytest.param(dict(sizes=(3, 2), beta=(0.0,)), id="one layer, eliminated"),
    pytest.param(dict(sizes=(3, 2), beta=(0.7,)), id="one layer"),
    pytest.param(dict(sizes=(3, 4, 2), beta=(1.0, 0.0), output_constraint="nonneg"), id="interval output, beta 0"),
    pytest.param(dict(sizes=(3, 4, 2), beta=(1.0, 0.0)), id="eliminated"),
    pytest.param(dict(sizes=(4, 3, 5, 2), beta=(0.5, 2.0, 0.3), gamma=0.125, constraint="box"), id="three layers"),
    pytest.param(dict(sizes=(4, 3, 5, 2), beta=(0.5, 0.0, 0.0), gamma=2.0), id="mixed, gamma 2, eliminated"),
    pytest.param(dict(sizes=(2, 3, 2, 3, 2), beta=(1.0, 1.0, 1.0, 0.0), bias=False), id="four layers, no b"),
    pytest.param(dict(sizes=(2, 3, 2, 3, 2), beta=(1.0, 0.1, 1.0, 0.4), reconstruction_bias=False), id="four layers, no c"),
]


def energy_of(net) -> LiftedEnergy:
    return net.energy_snapshot(torch.float64)


def close(actual, expected, size):
    # entries are sums of a few dozen products whose absolute values add up to at most ``size``
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rounding(size, 60))


@pytest.mark.parametrize("options", NETWORKS)
def test_value_is_the_definition(options):
    net = random_network(**options)
    x = random_input(3, net.sizes[0])
    z = [random_input(3, d, seed=k) for k, d in enumerate(net.sizes[1:])]
    plain = PlainNetwork.of(net)
    expected = [plain.energy(x[i].numpy(), [block[i].numpy() for block in z]) for i in range(3)]
    close(net.energy(x, z).detach().numpy(), expected, max(expected))


@pytest.mark.parametrize("options", NETWORKS)
def test_gradients_are_products_with_the_whole_matrix(options):
    net = random_network(**options)
    qp = energy_of(net).free(random_input(3, net.sizes[0]))
    z = random_input(3, qp.dim, seed=1).abs()
    gradient = z @ qp.hessian.dense() - qp.q if qp.dim else z
    torch.testing.assert_close(qp.gradient(z), gradient, rtol=1e-12, atol=1e-12)
    assert qp.residual(z).shape == (3,)


@pytest.mark.parametrize("options", NETWORKS)
def test_free_phase(options):
    net = random_network(**options)
    energy = energy_of(net)
    x = random_input(2, net.sizes[0])
    qp = energy.free(x)
    for i in range(2):
        expected = full_qp(PlainNetwork.of(net), x[i].numpy())
        h, q = expected.h, expected.q
        if energy.eliminated:
            # minimise z_L out exactly: Schur complement of a block that is a_{L-1} I
            n = len(q) - net.sizes[-1]
            coupling = h[:n, n:] @ np.linalg.inv(h[n:, n:])
            h, q = h[:n, :n] - coupling @ h[n:, :n], q[:n] - coupling @ q[n:]
        size = np.abs(expected.h).sum()
        close(qp.hessian.dense().numpy() if qp.dim else np.zeros((0, 0)), h, size)
        close(qp.q[i].numpy(), q, size * 10)


@pytest.mark.parametrize("options", NETWORKS)
def test_clamped_phase(options):
    net = random_network(**options)
    x, y = random_input(2, net.sizes[0]), random_input(2, net.sizes[-1], seed=7).abs().clamp(max=1)
    qp = energy_of(net).clamped(x, y)
    for i in range(2):
        expected = full_qp(PlainNetwork.of(net), x[i].numpy(), y[i].numpy())
        size = np.abs(expected.h).sum() + 1
        close(qp.hessian.dense().numpy() if qp.dim else np.zeros((0, 0)), expected.h, size)
        close(qp.q[i].numpy(), expected.q, size * 10)
        np.testing.assert_array_equal(qp.lo[0].numpy(), expected.lo)
        np.testing.assert_array_equal(qp.hi[0].numpy(), expected.hi)


@pytest.mark.parametrize("options", NETWORKS)
def test_nudged_phase(options):
    net = random_network(**options)
    energy = energy_of(net)
    x, v, t = random_input(1, net.sizes[0]), random_input(1, net.sizes[-1], seed=3), 0.37
    plain, ends = PlainNetwork.of(net), np.cumsum([0, *net.sizes[1:]])

    def nudged(flat):
        blocks = [flat[ends[k] : ends[k + 1]] for k in range(len(ends) - 1)]
        return plain.energy(x[0].numpy(), blocks) + t * v[0].numpy() @ blocks[-1]

    h, q, _ = quadratic_of(nudged, int(ends[-1]))
    if energy.eliminated:
        n = len(q) - net.sizes[-1]
        coupling = h[:n, n:] @ np.linalg.inv(h[n:, n:])
        q = q[:n] - coupling @ q[n:]
    close(energy.nudged(x, v, t).q[0].numpy(), q, 10 * np.abs(h).sum())


def test_reconstruction_undoes_the_layers_one_by_one_inside_their_sets():
    net = random_network((6, 5, 4, 3), constraint="box")
    energy = energy_of(net)
    z = [random_input(7, d, seed=d) for d in (5, 4, 3)]
    # from layer 1 it is what the energy's reconstruction term compares with x
    x = random_input(7, 6)
    torch.testing.assert_close(energy.reconstruct(z[0], 1) - x, energy.mismatch(0, x, z[0])[1])
    w, c = ([p.detach().numpy() for p in group] for group in (net.W, net.c))
    by_hand = np.clip(z[1].numpy() @ w[1] - c[1], -1, 1) @ w[0] - c[0]
    np.testing.assert_allclose(energy.reconstruct(z[1], 2).numpy(), by_hand, rtol=1e-12, atol=1e-12)
    by_hand = np.clip(np.clip(z[2].numpy() @ w[2] - c[2], -1, 1) @ w[1] - c[1], -1, 1) @ w[0] - c[0]
    np.testing.assert_allclose(energy.reconstruct(z[2], 3).numpy(), by_hand, rtol=1e-12, atol=1e-12)


def test_adjoint_frees_exactly_the_units_inside_their_interval():
    net = random_network((4, 3, 2), beta=(1.0, 0.5), constraint=(0.0, 1.0), output_constraint=(-1.0, 2.0))
    z = torch.tensor([[0.0, 0.5, 1.0, -1.0, 2.0], [0.25, 1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    v = random_input(2, 5)
    qp = energy_of(net).adjoint(z, v)
    inside = torch.tensor([[0, 1, 0, 0, 0], [1, 0, 0, 1, 1]], dtype=torch.bool)
    assert torch.equal(qp.hi == torch.inf, inside) and torch.equal(qp.lo == -torch.inf, inside)
    assert torch.equal(qp.hi[~inside], torch.zeros(6, dtype=torch.float64)) and torch.equal(qp.q, v)


def test_memory_grows_with_the_blocks_not_with_the_square_of_all_units():
    def entries(depth):
        h = random_network((8,) * (depth + 1), beta=1.0).energy_snapshot(torch.float64).free_hessian
        return sum(block.numel() for block in (*h.diag, *h.sub))

    assert entries(17) - entries(9) == entries(25) - entries(17) == 8 * 2 * 64
