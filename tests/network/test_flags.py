"""No answer passes silently: what is called converged is so in float64, and what cannot be trusted is flagged.

``scripts/gates/soak.py`` looks for exceptions among millions of random problems; these are the ones it found, and their
neighbours.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import lrrn
from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import DEFAULT_TOL, BoxQP, Status, row_norms
from lrrn.solvers import SOLVERS, solve
from oracles import PlainNetwork, random_input, random_network

INF = math.inf


def quietly(net, *arguments, **options) -> lrrn.Solution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return net.infer(*arguments, **options)


def stretched(seed: int, **options) -> lrrn.LRRN:
    """A network whose weights have singular values from 0.1 to 100."""
    net = random_network((4, 12, 7, 3), beta=(1.0, 0.5, 0.7), seed=seed, **options)
    with torch.no_grad():
        for w in net.W:
            u, s, v = torch.linalg.svd(w, full_matrices=False)
            w.copy_((u * torch.logspace(-1, 2, len(s), dtype=torch.float64)) @ v)
    return net


def cancelling(size: float, dtype: torch.dtype, constraint="free") -> tuple[lrrn.LRRN, torch.Tensor]:
    """A network with weights of some size, and inputs that they all but annihilate: what is left of W x is rounding."""
    net = random_network((8, 4), beta=(1.5,), output_constraint=constraint, scale=size, bias_scale=0.0, dtype=dtype)
    weights = net.W[0].detach().double()
    x = random_input(50, 8)
    along = x @ weights.mT @ torch.linalg.pinv(weights).mT  # the part of x that W sees
    return net, (x - along).to(dtype)


def gradients(net: lrrn.LRRN, x: torch.Tensor, z: list[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """dE/dz and |q| of a batch in extended precision, from the definition of the energy."""

    def more_digits(arrays):
        return [np.asarray(a, dtype=np.longdouble) for a in arrays]

    plain = PlainNetwork.of(net)
    plain = replace(plain, weights=more_digits(plain.weights), b=more_digits(plain.b), c=more_digits(plain.c))
    layers = more_digits(t.double().numpy() for t in (x, *z))
    q = plain.gradient(layers[0], [np.zeros_like(layer) for layer in layers[1:]])
    return plain.gradient(layers[0], layers[1:]), np.sqrt((q**2).sum(axis=1))


def excess(net: lrrn.LRRN, x: torch.Tensor, solution: lrrn.Solution, tol: float) -> np.ndarray:
    """|r| / (tol max(1, |q|)), the bounds being those that the dtype can hold."""
    g, size = gradients(net, x, solution.activations)
    z = np.concatenate([block.double().numpy() for block in solution.activations], axis=1)
    ends = torch.tensor([[i.lo, i.hi] for i in net.intervals], dtype=solution.output.dtype).double().numpy()
    lo, hi = (np.repeat(ends[:, side], net.sizes[1:]) for side in (0, 1))
    r = np.where(((z <= lo) & (g > 0)) | ((z >= hi) & (g < 0)), 0, g)
    return np.sqrt((r**2).sum(axis=1)) / (tol * np.maximum(1, size))


@pytest.mark.parametrize("solver", ["auto", "accelerated", "newton"])
@pytest.mark.parametrize("constraint", ["free", "nonneg"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e5), (torch.float64, 1e14)], ids=str)
def test_answers_that_only_look_converged_are_flagged(dtype, size, constraint, solver):
    """The residual computed in this dtype is below the tolerance; the true one, rounding of W x included, is far above."""
    net, x = cancelling(size, dtype, constraint)
    tol = DEFAULT_TOL[dtype]
    naive = solve(net.energy_snapshot(dtype).free(x), solver=solver)
    solution = quietly(net, x, solver=solver)
    wrong = excess(net, x, solution, tol) > 1
    assert (naive.converged.numpy() & wrong).sum() > 20
    assert not (solution.converged.numpy() & wrong).any()
    assert set(solution.status[torch.from_numpy(naive.converged.numpy() & wrong)].tolist()) == {int(Status.STALLED)}


@pytest.mark.parametrize("solver", ["auto", "newton"])
def test_a_clamped_phase_is_judged_as_a_free_one_is(solver):
    net, x = cancelling(1e5, torch.float32)
    deep = lrrn.LRRN((8, 4, 2), beta=(1.5, 0.0), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    with torch.no_grad():
        deep.W[0].copy_(net.W[0])
    solution = quietly(deep, x, torch.zeros(50, 2), solver=solver)
    assert (solution.status == int(Status.STALLED)).sum() > 20


def test_float32_answers_to_ordinary_problems_are_not_flagged():
    for seed in range(5):
        net = random_network((30, 20, 20, 5), beta=(1.0, 1.0, 0.5), seed=seed, dtype=torch.float32, output_constraint="box")
        x = random_input(200, 30, seed=seed, dtype=torch.float32)
        solution = net.infer(x)
        assert solution.converged.all() and excess(net, x, solution, DEFAULT_TOL[torch.float32]).max() <= 1


def test_bounds_that_float32_cannot_hold_do_not_count_against_an_answer():
    """Its 0.1 is 1.5e-9 above the true one, and no unit may count as free for that."""
    net = random_network((3, 4), beta=(1.0,), output_constraint=(0.1, INF), bias_scale=0.0, dtype=torch.float32)
    with torch.no_grad():
        net.W[0].fill_(1e3)
    solution = net.infer(torch.full((5, 3), 1e-4))
    assert bool((solution.output == torch.tensor(0.1)).all()) and solution.converged.all() and solution.residual.max() == 0


def test_where_float32_cannot_tell_the_residual_reported_is_that_of_float64():
    net, x = cancelling(1e5, torch.float32)
    solution = quietly(net, x)
    g, _ = gradients(net, x, solution.activations)
    assert np.allclose(solution.residual.numpy(), np.sqrt((g**2).sum(axis=1)).astype(float), rtol=1e-6)


# --- overflow -------------------------------------------------------------------------------------------------------------


def test_norms_do_not_overflow():
    """|q| = inf would have let any residual pass."""
    big = torch.tensor([[3e200, 4e200], [3.0, 4.0], [3e-5, 4e-5]], dtype=torch.float64)
    assert torch.allclose(row_norms(big), torch.tensor([5e200, 5.0, 5e-5], dtype=torch.float64), rtol=1e-12)
    assert row_norms(torch.tensor([[math.inf, 1.0]], dtype=torch.float64)).item() == math.inf
    assert math.isnan(row_norms(torch.tensor([[math.nan, 1e200]], dtype=torch.float64)).item())
    identity = BlockTridiagonal((torch.eye(2, dtype=torch.float64),), ())
    unbounded = torch.full((1, 2), INF, dtype=torch.float64)
    assert BoxQP(identity, big, -unbounded, unbounded).scale[0] == pytest.approx(5e200)


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_an_overflow_behind_a_bound_is_flagged(name):
    """A gradient of +inf at a lower bound has no residual, but its sign may be that of the overflow alone."""
    h = BlockTridiagonal((torch.eye(2, dtype=torch.float64),), ())
    zero, inf = torch.zeros(1, 2, dtype=torch.float64), torch.full((1, 2), INF, dtype=torch.float64)
    solution = solve(BoxQP(h, torch.tensor([[-math.inf, 1.0], [-1.0, 1.0]], dtype=torch.float64), zero, inf), solver=name)
    assert solution.status.tolist() == [int(Status.NON_FINITE), int(Status.CONVERGED)]


@pytest.mark.parametrize("name", [*sorted(SOLVERS), "auto"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_weights_whose_squares_overflow_are_flagged(name, dtype):
    net = random_network((3, 5, 4), output_constraint="box", beta=1.0, dtype=dtype)
    with torch.no_grad():
        net.W[0].mul_(1e170 if dtype == torch.float64 else 1e25)
    solution = quietly(net, random_input(4, 3, dtype=dtype), solver=name)
    assert solution.status.tolist() == [int(Status.NON_FINITE)] * 4


@pytest.mark.parametrize("sizes", [(3, 4), (3, 5, 4)], ids=str)
def test_an_output_that_overflows_is_flagged_though_it_is_no_unknown(sizes):
    net = random_network(sizes)
    with torch.no_grad():
        net.W[-1].fill_(1e300)
    x = torch.cat([random_input(2, 3), torch.full((1, 3), 1e9, dtype=torch.float64)])
    with torch.no_grad():
        net.W[0].abs_()
    solution = quietly(net, x)
    assert not solution.output[2].isfinite().all() and solution.status[2] == int(Status.NON_FINITE)
    assert solution.output[0].isfinite().all() and solution.converged[0]


def test_activations_too_large_for_the_type_they_are_returned_in_are_flagged():
    net = random_network((3, 5, 4), dtype=torch.float32)
    with torch.no_grad():
        net.W[0].abs_()
        net.W[-1].fill_(1e4)
    solution = quietly(net, torch.tensor([[0.01, 0.01, 0.01], [100.0, 100.0, 100.0]], dtype=torch.float16))
    assert not solution.output[1].isfinite().all()
    assert solution.status.tolist() == [int(Status.CONVERGED), int(Status.NON_FINITE)]


# --- scales ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["newton", "auto"])
@pytest.mark.parametrize("size", [1.0, 1e-9, 1e-150, 5e-324])
def test_a_box_that_keeps_away_from_zero_is_solved_whatever_the_input(solver, size):
    """Scaled to a q of norm one, the activations would be as large as q is small."""
    for seed in range(6):
        net = stretched(seed, constraint=[(1 / 3, 1 / 3), "nonneg"], output_constraint=(-1.0, INF), bias_scale=0.0)
        x = size * random_input(10, 4)
        solution = net.infer(x, solver=solver)
        assert solution.converged.all() and excess(net, x, solution, DEFAULT_TOL[torch.float64]).max() <= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_denormal_inputs_are_solved(dtype):
    tiny = torch.finfo(dtype).smallest_normal / 8
    net = random_network((4, 6, 3), bias_scale=0.0, dtype=dtype)
    solution = net.infer(tiny * random_input(10, 4, dtype=dtype))
    assert solution.converged.all() and solution.output.abs().max() < 100 * tiny
