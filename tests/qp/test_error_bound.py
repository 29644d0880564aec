"""Oracle: the minimiser in 50-digit arithmetic. The proven error bound must hold for the answer actually returned."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning

from lrrn.qp import RoundingCoefficients
from oracles import PlainNetwork, exact, random_input, random_network, stacked

# 0.1 and 0.3 are not representable: a float32 answer on such a bound is not on the float64 one
CONSTRAINTS = ["free", "nonneg", (-0.3, 0.1), (0.1, float("inf"))]


def distances(net, solution, x, y=None) -> list:
    """Exact distance of each sample's stacked unknowns from the exact minimiser."""
    plain = PlainNetwork.of(net)
    clamped = None if y is None else y.double()
    reference = net.energy_snapshot(torch.float64)
    n_unknown = reference.n_free if y is None else reference.n_layers - 1
    width = sum(net.sizes[1 : 1 + n_unknown])
    double = random_like(net)
    guess = stacked(double.infer(x.double(), clamped, solver="newton", tol=1e-12))
    result = []
    for i in range(x.shape[0]):
        target = None if y is None else y[i].double().numpy()
        hidden = guess[i] if y is None else guess[i, :width]
        answer = exact(plain, x[i].double().numpy(), hidden, target)
        actual = stacked(solution)[i, :width]
        squares = sum((mpmath.mpf(float(a)) - b) ** 2 for a, b in zip(actual, answer[:width], strict=True))
        result.append(mpmath.sqrt(squares))
    return result


def random_like(net):
    import copy

    return copy.deepcopy(net).double()


@given(
    seed=st.integers(0, 10_000),
    sizes=st.sampled_from([(4, 3), (4, 5, 2), (3, 4, 3, 2)]),
    constraint=st.sampled_from(CONSTRAINTS),
    output=st.sampled_from(CONSTRAINTS),
    last_beta=st.sampled_from([0.0, 0.7]),
    gamma=st.sampled_from([0.05, 1.0]),
    scale=st.sampled_from([0.5, 1.0, 5.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    tol=st.sampled_from([None, 1e-1, 1e-3]),
)
@settings(max_examples=120)
def test_error_bound_holds(seed, sizes, constraint, output, last_beta, gamma, scale, dtype, tol):
    beta = (1.0,) * (len(sizes) - 2) + (last_beta,)
    net = random_network(
        sizes,
        beta=beta,
        gamma=gamma,
        scale=scale,
        constraint=constraint,
        output_constraint=output,
        seed=seed,
        dtype=torch.float32,
    )
    x = random_input(3, sizes[0], seed=seed, dtype=dtype)
    solution = net.infer(x, tol=tol)
    with mpmath.workdps(50):
        for distance, bound in zip(distances(net, solution, x), solution.error_bound.tolist(), strict=True):
            assert distance <= bound


def test_error_bound_of_the_clamped_phase_holds():
    net = random_network((4, 5, 3, 2), beta=(1.0, 0.5, 0.0), gamma=0.2, scale=2.0, dtype=torch.float32)
    x, y = random_input(4, 4, dtype=torch.float32), random_input(4, 2, seed=3, dtype=torch.float32)
    solution = net.infer(x, y, tol=1e-2)
    with mpmath.workdps(50):
        for distance, bound in zip(distances(net, solution, x, y), solution.error_bound.tolist(), strict=True):
            assert distance <= bound


def test_error_bound_is_tight_where_the_solve_is():
    net = random_network((20, 16, 16, 5))
    solution = net.infer(random_input(10, 20), solver="newton", tol=1e-12)
    assert (solution.error_bound < 1e-9).all()


def test_an_unfinished_solve_has_an_honest_bound():
    net = random_network((20, 16, 16, 5), scale=4.0)
    x = random_input(10, 20)
    with pytest.warns(ConvergenceWarning):
        rough = net.infer(x, solver="coordinate_descent", max_sweeps=1)
    fine = net.infer(x, solver="newton", tol=1e-13)
    z1, z2 = (torch.cat(s.activations[:-1], dim=-1) for s in (rough, fine))
    assert not rough.converged.any() and ((z1 - z2).norm(dim=-1) <= rough.error_bound + fine.error_bound).all()
    assert (rough.error_bound > 1e-6).all()


def test_no_certificate_without_a_proven_eigenvalue():
    net = random_network((10, 8, 8, 8, 2), beta=(0.0, 0.0, 0.0, 0.0), scale=2000.0, output_constraint="box")
    assert net.energy_snapshot(torch.float64).free_mu == 0.0
    solution = net.infer(random_input(2, 10), tol=1e-3)
    assert torch.isinf(solution.error_bound).all()


def test_energy_brackets_the_minimum():
    """E(z) - |r|^2 / (2 mu) <= E* <= E(z)."""
    net = random_network((8, 6, 4, 3), beta=(1.0, 0.5, 0.4))
    x = random_input(5, 8)
    rough, fine = net.infer(x, tol=1e-2), net.infer(x, solver="newton", tol=1e-13)
    mu = net.energy_snapshot(torch.float64).free_mu
    slack = 1e-13 * (1 + fine.energy)
    assert (fine.energy <= rough.energy + slack).all()
    assert (rough.energy - rough.residual**2 / (2 * mu) <= fine.energy + slack).all()


def test_distance_bound_wants_float64():
    net = random_network((4, 3, 2), dtype=torch.float32)
    qp = net.energy_snapshot(torch.float32).free(random_input(1, 4, dtype=torch.float32))
    with pytest.raises(TypeError, match="computed on a float64 problem"):
        qp.distance_bound(qp.q, 1.0, RoundingCoefficients(0.0, 0.0, 0.0, 0.0), torch.zeros(1))


def test_no_unknowns_no_error():
    net = random_network((4, 3), beta=(0.0,))
    solution = net.infer(random_input(2, 4))
    np.testing.assert_array_equal(solution.error_bound, 0.0)


@pytest.mark.parametrize("constraint", [(0.1, float("inf")), (-0.3, 0.1)], ids=str)
def test_units_on_a_bound_that_float32_cannot_hold_count_as_on_it(constraint):
    net = random_network((20, 16, 16, 5), constraint=constraint, dtype=torch.float32)
    solution = net.infer(random_input(10, 20, dtype=torch.float32), tol=1e-5)
    hidden = torch.cat(solution.activations[:-1], dim=-1)
    on_bound = (hidden == np.float32(constraint[0])) | (hidden == np.float32(constraint[1]))
    assert on_bound.any(dim=-1).all() and (solution.error_bound < 1e-2).all()
