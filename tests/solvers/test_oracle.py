"""Oracles: exhaustive active sets, independent QP solvers, the closed form of a linear layer, solvers against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrrn.solvers import SOLVERS
from oracles import (
    PlainNetwork,
    by_osqp,
    by_quadprog,
    exhaustive,
    full_qp,
    kkt_norm,
    random_input,
    random_network,
    stacked,
)
from tolerances import oracle_noise, two_solves

CONSTRAINTS = ["free", "nonneg", "box", (-0.3, 0.4), (0.1, np.inf), (-np.inf, 0.2)]


@st.composite
def networks(draw, max_units: int):
    """Any depth, widths, betas, gamma and intervals with at most ``max_units`` unknowns."""
    sizes = [draw(st.integers(1, 5))]
    while sum(sizes[1:]) < max_units and (len(sizes) < 2 or draw(st.booleans())):
        sizes.append(draw(st.integers(1, min(5, max_units - sum(sizes[1:])))))
    n_layers = len(sizes) - 1
    return random_network(
        tuple(sizes),
        beta=tuple(draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0])) for _ in range(n_layers)),
        gamma=draw(st.sampled_from([0.05, 0.125, 1.0, 2.0])),
        constraint=[draw(st.sampled_from(CONSTRAINTS)) for _ in range(n_layers - 1)],
        output_constraint=draw(st.sampled_from(CONSTRAINTS)),
        bias=draw(st.booleans()),
        reconstruction_bias=draw(st.booleans()),
        scale=draw(st.sampled_from([0.3, 1.0, 3.0])),
        seed=draw(st.integers(0, 10_000)),
    )


TOL = 1e-9


def assert_matches(net, solution, x, oracle, y=None):
    """The activations are as near to the oracle's as tol promises, and the energies agree to second order."""
    plain = PlainNetwork.of(net)
    for i in range(x.shape[0]):
        qp = full_qp(plain, x[i].numpy(), None if y is None else y[i].numpy())
        expected = oracle(qp)
        actual = stacked(solution)[i, : len(expected)]
        mu = np.linalg.eigvalsh(qp.h)[0]
        # an eliminated output multiplies q and the error by at most 1 + |W_{L-1}|, and mu does not shrink
        reach = (1 + np.linalg.norm(plain.weights[-1], 2)) ** 2
        promised = two_solves(TOL * max(1.0, np.linalg.norm(qp.q)) * reach, 0.0, mu)
        assert np.linalg.norm(actual - expected) <= promised + oracle_noise(qp.h, expected)
        assert kkt_norm(qp, actual) <= TOL * max(1.0, np.linalg.norm(qp.q)) * reach
        assert abs(float(solution.energy[i]) - qp.value(expected)) <= 1e-9 * (1 + abs(qp.value(expected)))


@pytest.mark.parametrize("solver", ["auto", *sorted(SOLVERS)])
@given(net=networks(max_units=6), seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_free_phase_against_exhaustive_active_sets(solver, net, seed):
    x = random_input(2, net.sizes[0], seed=seed)
    assert_matches(net, net.infer(x, solver=solver, tol=TOL), x, exhaustive)


@given(net=networks(max_units=7), seed=st.integers(0, 1000))
@settings(max_examples=40)
def test_clamped_phase_against_exhaustive_active_sets(net, seed):
    x = random_input(2, net.sizes[0], seed=seed)
    target = net.intervals[-1]
    y = random_input(2, net.sizes[-1], seed=seed + 1).clamp(target.lo, target.hi)
    solution = net.infer(x, y, tol=TOL)
    assert torch.equal(solution.output, y)
    if len(net.sizes) > 2:
        assert_matches(net, solution, x, exhaustive, y)
    free = net.infer(x, tol=TOL)
    assert (solution.energy >= free.energy - 1e-9 * (1 + free.energy)).all()


def test_eight_units_exhaustively():
    net = random_network((5, 4, 4), beta=(1.0, 0.5), constraint="box", output_constraint=(-0.1, 0.2), gamma=0.5, scale=2.0)
    x = 2 * random_input(2, 5)
    assert_matches(net, net.infer(x, tol=TOL), x, exhaustive)


@pytest.mark.parametrize("oracle", [by_quadprog, by_osqp])
@pytest.mark.parametrize("constraint", ["nonneg", "box", (-0.3, 0.4)], ids=str)
def test_against_independent_solvers(oracle, constraint):
    net = random_network(
        (12, 10, 8, 6, 4), beta=(1.0, 0.5, 0.0, 1.0), constraint=constraint, output_constraint="box", scale=2.0
    )
    x = random_input(5, 12)
    solution = net.infer(x, tol=TOL)
    plain = PlainNetwork.of(net)
    for i in range(5):
        qp = full_qp(plain, x[i].numpy())
        theirs = np.clip(oracle(qp), qp.lo, qp.hi)
        # the other solver's own distance from optimality, by the energy gap: mu / 2 |z - z*|^2 <= E(z) - E*
        mu = np.linalg.eigvalsh(qp.h)[0]
        lower = qp.value(stacked(solution)[i]) - float(solution.residual[i]) ** 2 / (2 * mu)
        their_gap = np.sqrt(2 * max(qp.value(theirs) - lower, 0.0) / mu + 1e-13)
        ours = two_solves(float(solution.residual[i]), 0.0, mu)
        assert np.linalg.norm(stacked(solution)[i] - theirs) <= their_gap + ours
        assert their_gap < 1e-3


@pytest.mark.parametrize("beta", [0.25, 1.0, 4.0])
def test_one_linear_layer_has_the_closed_form_of_section_3_1(beta):
    net = random_network((6, 4), beta=(beta,), output_constraint="free")
    x = random_input(7, 6)
    w, b, c = (p.detach() for p in (net.W[0], net.b[0], net.c[0]))
    system = torch.eye(4, dtype=torch.float64) + beta * w @ w.mT
    expected = torch.linalg.solve(system, ((1 + beta) * x @ w.mT + b + beta * (w @ c)).mT).mT
    torch.testing.assert_close(net(x), expected, rtol=1e-12, atol=1e-12)


def test_beta_zero_one_layer_is_a_projection_of_the_affine_map():
    net = random_network((6, 4), beta=(0.0,), output_constraint="nonneg")
    x = random_input(7, 6)
    torch.testing.assert_close(net(x), torch.relu(x @ net.W[0].mT + net.b[0]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@given(net=networks(max_units=30), seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_all_solvers_agree_within_their_error_bounds(dtype, net, seed):
    net = net.to(dtype)
    x = random_input(3, net.sizes[0], seed=seed, dtype=dtype)
    solutions = [net.infer(x, solver=name) for name in sorted(SOLVERS)]
    n_unknown = net.energy_snapshot(dtype).n_free
    if n_unknown == 0:
        return
    for one in solutions:
        for other in solutions:
            z1, z2 = (torch.cat([z.double() for z in s.activations[:n_unknown]], dim=-1) for s in (one, other))
            assert ((z1 - z2).norm(dim=-1) <= one.error_bound + other.error_bound).all()
