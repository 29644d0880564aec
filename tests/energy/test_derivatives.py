"""Oracle: autograd on the energy's value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrrn.energy.derivatives import Phase, energy_gradients, slope_gradients
from oracles import random_input, random_network

SIZES = [(4, 3), (4, 5, 2), (4, 12, 2), (4, 3, 5, 2), (3, 4, 2, 5, 2)]


@st.composite
def cases(draw):
    sizes = draw(st.sampled_from(SIZES))
    return random_network(
        sizes,
        beta=tuple(draw(st.sampled_from([0.0, 0.5, 2.0])) for _ in sizes[1:]),
        gamma=draw(st.sampled_from([0.2, 1.5])),
        bias=draw(st.booleans()),
        reconstruction_bias=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def live_energy(net):
    return net.energy_of(net.flat_parameters())


def blocks(net, seed, n=5):
    return [random_input(n, d, seed=seed + k) for k, d in enumerate(net.sizes[1:])]


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@given(net=cases(), balanced=st.booleans())
@settings(max_examples=60)
def test_weighted_energies_of_two_phases(net, balanced):
    x = random_input(5, net.sizes[0])
    one, two = blocks(net, 10), blocks(net, 20)
    w1 = random_input(5, 1, seed=30)
    w2 = -w1 if balanced else random_input(5, 1, seed=31)
    energy = live_energy(net)
    total = (w1[:, 0] * energy.value(x, one)).sum() + (w2[:, 0] * energy.value(x, two)).sum()
    expected = torch.autograd.grad(total, net.flat_parameters(), materialize_grads=True, allow_unused=True)
    assert_same(energy_gradients(energy, x, [Phase(one, w1), Phase(two, w2)], balanced).flat(), expected)


@given(net=cases())
@settings(max_examples=60)
def test_a_phase_without_its_output_leaves_the_last_layer_out(net):
    x = random_input(5, net.sizes[0])
    z, weight = blocks(net, 10), random_input(5, 1, seed=30)
    energy = live_energy(net)
    hidden = z[:-1]
    z_last = energy.activations(x, torch.cat(hidden, -1))[-1] if energy.eliminated and hidden else None
    actual = energy_gradients(energy, x, [Phase(hidden, weight)]).flat()
    if z_last is None:
        return
    total = (weight[:, 0] * energy.value(x, [*hidden, z_last])).sum()
    parameters = net.flat_parameters()
    # an eliminated output's term is zero whatever the parameters, so differentiating through it gives the same
    expected = torch.autograd.grad(total, parameters, materialize_grads=True, allow_unused=True)
    assert_same(actual, expected)


@given(net=cases())
@settings(max_examples=60)
def test_slope_is_the_symmetric_difference(net):
    x = random_input(5, net.sizes[0])
    energy = live_energy(net)
    n_free = energy.n_free
    z, w = blocks(net, 10)[:n_free], blocks(net, 20)[:n_free]
    if n_free == 0:
        nothing = x[:, :0]
        assert all((g == 0).all() for g in slope_gradients(energy, x, nothing, nothing).flat())
        return

    def total(sign):
        moved = [a + sign * b for a, b in zip(z, w, strict=True)]
        return energy.value(x, energy.activations(x, torch.cat(moved, -1))).sum()

    difference = 0.5 * (total(1) - total(-1))
    expected = torch.autograd.grad(difference, net.flat_parameters(), materialize_grads=True, allow_unused=True)
    assert_same(slope_gradients(energy, x, torch.cat(z, -1), torch.cat(w, -1)).flat(), expected)


@pytest.mark.parametrize("scale", [1e-3, 1e-6])
def test_a_small_direction_does_not_cancel_in_float32(scale):
    net = random_network((20, 16, 10, 3), beta=(1.0, 1.0, 0.0), dtype=torch.float32)
    energy = net.energy_of([p.detach() for p in net.flat_parameters()])
    x = 5 * random_input(30, 20, dtype=torch.float32)
    z, w = random_input(30, 26, seed=1, dtype=torch.float32), random_input(30, 26, seed=2, dtype=torch.float32)
    small = slope_gradients(energy, x, z, w * scale).flat()
    large = slope_gradients(energy, x, z, w).flat()
    for a, b in zip(small, large, strict=True):
        torch.testing.assert_close(a / scale, b, rtol=1e-5, atol=1e-5 * float(b.abs().max() + 1e-12))
