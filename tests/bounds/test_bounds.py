"""Oracles: closed forms, and the largest slope found by looking for one."""

from __future__ import annotations

import copy
import math
import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrrn import LipschitzBound, bounds
from lrrn.bounds import layerwise
from lrrn.linalg.operators import Dense
from oracles import random_input, random_network


def largest_slope(net, n: int = 200, seed: int = 0) -> float:
    """Largest spectral norm of the Jacobian over sampled inputs: a lower bound on the Lipschitz constant."""
    x = 2 * random_input(n, net.sizes[0], seed=seed)
    jacobian = torch.stack(
        [torch.autograd.grad(net(points := x.clone().requires_grad_())[:, j].sum(), points)[0] for j in range(net.sizes[-1])], 1
    )
    return float(torch.linalg.matrix_norm(jacobian, ord=2).max())


@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(1, 7), min_size=2, max_size=5).map(tuple),
    beta=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
    last_beta=st.sampled_from([0.0, 0.5, 1.0]),
    gamma=st.sampled_from([0.1, 1.0, 2.0]),
    scale=st.sampled_from([0.2, 1.0, 4.0]),
    constraint=st.sampled_from(["free", "nonneg", "box", (-0.3, 0.5)]),
    output=st.sampled_from(["free", "nonneg", (-0.3, 0.5)]),
)
@settings(max_examples=100)
def test_no_slope_exceeds_the_bounds_and_they_are_ordered(seed, sizes, beta, last_beta, gamma, scale, constraint, output):
    net = random_network(
        sizes,
        beta=(beta,) * (len(sizes) - 2) + (last_beta,),
        gamma=gamma,
        scale=scale,
        constraint=constraint,
        output_constraint=output,
        seed=seed,
    )
    slope, spectral, paper = largest_slope(net, n=40, seed=seed), net.lipschitz("spectral"), net.lipschitz("paper")
    assert slope <= spectral * (1 + 1e-9)
    assert spectral <= paper * (1 + 1e-9)


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 1.0), (4.0, 1.25), (0.25, 1.25)])
def test_the_papers_constant(beta, expected):
    net = random_network((3, 4), beta=(beta,))
    assert net.lipschitz("paper") == pytest.approx(expected, rel=1e-12)


def test_beta_zero_layers_contribute_their_spectral_norm():
    net = random_network((3, 4, 2), beta=(1.0, 0.0))
    with torch.no_grad():
        net.W[1].copy_(torch.diag(torch.tensor([3.0, 2.0])) @ torch.eye(2, 4))
    for method in ("paper", "spectral"):
        assert net.lipschitz(method).per_layer[1] == pytest.approx(3.0, rel=1e-5) and net.lipschitz(method) >= 3.0 * 0.999
    assert net.lipschitz("paper") >= 3.0


@pytest.mark.parametrize("singular", [(0.1, 0.3), (5.0, 9.0), (0.5, 2.0)], ids=str)
def test_spectral_bound_of_one_linear_layer_is_remark_1(singular):
    """For a free layer the constant is max_i f(sigma_i); an interval of singular values is between f's ends and its peak."""
    w = torch.diag(torch.tensor(singular, dtype=torch.float64)) @ torch.eye(2, 3, dtype=torch.float64)
    f = [2 * s / (1 + s * s) for s in singular]
    expected = 1.0 if min(singular) < 1 < max(singular) else max(f)
    assert float(bounds.spectral([Dense(w)], [1.0])) == pytest.approx(expected, rel=1e-5)
    assert float(bounds.spectral([Dense(w)], [1.0])) >= max(f)


def test_an_expanding_layer_has_a_null_space():
    w = torch.full((2, 1), 5.0, dtype=torch.float64)
    assert bounds.singular_range(Dense(w))[0] == 0.0
    assert float(bounds.spectral([Dense(w)], [1.0])) == pytest.approx(1.0, rel=1e-9)


def test_the_bound_is_a_float_that_knows_its_origin():
    bound = LipschitzBound([2.0, 0.5], "paper")
    assert isinstance(bound, float) and bound.value == float(bound) == pytest.approx(1.0) and bound.value >= 1.0
    assert f"{bound:.2f}" == "1.00" and "paper" in repr(bound) and not math.isnan(bound * 2)
    for clone in (pickle.loads(pickle.dumps(bound)), copy.deepcopy(bound)):
        assert clone == bound and clone.per_layer == (2.0, 0.5) and clone.method == "paper"


def test_unknown_method():
    with pytest.raises(ValueError, match="unknown method 'magic'; use one of auto, paper, spectral, multiplier"):
        random_network((3, 2)).lipschitz("magic")


@pytest.mark.parametrize("beta", [1e-4, 1.0, 1e4, 1e300])
@pytest.mark.parametrize("size", [1e-307, 1e-290, 1e-160, 1e-3, 1.0, 1e40, 1e153, 1e160])
def test_layers_of_any_size_have_the_constant_of_the_closed_form(beta, size):
    """f(s) = (1 + beta) s / (1 + beta s^2) of one unit, in exact arithmetic."""
    s = Fraction(size)
    exact = (1 + Fraction(beta)) * s / (1 + Fraction(beta) * s * s)
    found = Fraction(layerwise._layer_constant(size, size, beta))
    assert exact <= found
    if 1e-300 < math.sqrt(beta) * size < 1e300:  # beyond, the bound is not tight
        assert found <= exact * (1 + Fraction(1, 10**12))
    assert exact <= Fraction(float(bounds.spectral([Dense(torch.tensor([[size]], dtype=torch.float64))], [beta])))


def test_weights_whose_squares_overflow_leave_the_global_constant():
    """The Gram matrix has entries inf - inf; the last unit, of norm one, has the constant one."""
    w = torch.tensor([[1e160, 1e160, 0.0], [1e160, -1e160, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    assert bounds.spectral([Dense(w)], [1.0]) == pytest.approx(1.0, rel=1e-9) and Dense(w).norm() == math.inf
    assert bounds.spectral([Dense(w)], [0.0]) == math.inf


@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(2, 6), min_size=2, max_size=4).map(tuple),
    last_beta=st.sampled_from([0.0, 0.5, 1.0]),
    output=st.sampled_from(["free", "nonneg", (-0.3, 0.5)]),
)
@settings(max_examples=30)
def test_no_difference_of_two_outputs_moves_faster_than_its_bound(seed, sizes, last_beta, output):
    net = random_network(sizes, beta=(1.0,) * (len(sizes) - 2) + (last_beta,), output_constraint=output, seed=seed)
    x = 2 * random_input(60, sizes[0], seed=seed)
    pair = (sizes[-1] - 1, 0)
    points = x.clone().requires_grad_()
    y = net(points)
    slope = torch.autograd.grad((y[:, pair[0]] - y[:, pair[1]]).sum(), points)[0]
    found = [net.lipschitz(method, 0.1, pair) for method in ("auto", "multiplier", "spectral", "paper")]
    assert float(slope.norm(dim=1).max()) <= min(found) * (1 + 1e-9)
    assert found[0] <= found[2] * (1 + 1e-9) and found[2] <= found[3] * (1 + 1e-9)
    assert found[3] == pytest.approx(math.sqrt(2) * net.lipschitz("paper")) and found[3].method == "paper"
    assert found[2] == net.lipschitz("spectral", pair=pair[::-1])


def test_of_a_linear_network_the_bound_of_a_pair_is_the_distance_of_its_rows():
    net = random_network((5, 3), beta=(0.0,))
    w = net.W[0].detach()
    for i, j in ((0, 1), (2, 0)):
        assert net.lipschitz("spectral", pair=(i, j)) == pytest.approx(float((w[i] - w[j]).norm()), rel=1e-9)


@pytest.mark.parametrize("pair", [(0, 0), (0, 3), (-1, 0), (0,), (0, 1, 2), (0.0, 1)])
def test_a_pair_is_two_different_outputs(pair):
    with pytest.raises(ValueError, match=r"pair must be two different indices of outputs, from 0 to 2; got"):
        random_network((4, 3)).lipschitz(pair=pair)
