"""The module: what it accepts, what it refuses, and that it behaves as torch users expect."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import nn

import lrrn
from oracles import random_input, random_network


def test_shapes_and_names_of_parameters():
    net = lrrn.LRRN(sizes=(7, 5, 4, 3), beta=(1, 1, 0), gamma=1 / 8, constraint="nonneg", output_constraint="free")
    assert [tuple(w.shape) for w in net.W] == [(5, 7), (4, 5), (3, 4)]
    assert [tuple(b.shape) for b in net.b] == [(5,), (4,), (3,)]
    assert [tuple(c.shape) for c in net.c] == [(7,), (5,), (4,)]
    assert "sizes=(7, 5, 4, 3)" in repr(net) and "constraints=(nonneg, nonneg, free)" in repr(net)
    assert set(net.state_dict()) == {f"{group}.{k}" for group in "Wbc" for k in range(3)}


def test_biases_can_be_switched_off():
    net = lrrn.LRRN((4, 3, 2), bias=False, reconstruction_bias=False)
    assert list(net.state_dict()) == ["W.0", "W.1"] and net.b[0] is None and net.c[1] is None
    assert net(torch.zeros(1, 4)).abs().max() == 0


def test_a_single_beta_leaves_the_output_a_pure_regression():
    assert lrrn.LRRN((4, 3, 2, 2), beta=0.5).beta == (0.5, 0.5, 0.0)


def test_constraints_one_for_all_or_one_a_layer():
    assert [str(i) for i in lrrn.LRRN((4, 3, 2, 2), constraint=(0, 1)).intervals] == ["[0, 1]", "[0, 1]", "free"]
    net = lrrn.LRRN((4, 3, 2, 2), constraint=["box", (0.0, 2.0)], output_constraint="nonneg")
    assert [str(i) for i in net.intervals] == ["box", "[0, 2]", "nonneg"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(sizes=(4,)), "at least an input and an output width"),
        (dict(sizes=(4, 0)), "all positive integers"),
        (dict(sizes=(4, 2.5)), "all positive integers"),
        (dict(sizes=(4, 3, 2), beta=(1,)), "one finite number >= 0 for each of 2 layers"),
        (dict(sizes=(4, 3, 2), beta=(-1, 0)), "one finite number >= 0"),
        (dict(sizes=(4, 3, 2), gamma=0), "gamma must be a positive number; got 0"),
        (dict(sizes=(4, 3, 2), gamma=1e-200), "beyond what floating point can hold"),
        (dict(sizes=(4, 3, 2), constraint="relu"), "unknown constraint 'relu'; use one of free, nonneg, box"),
        (dict(sizes=(4, 3, 2), constraint=(1, 0)), "two numbers lo <= hi"),
        (dict(sizes=(4, 3, 2), constraint=["box", "box", "box"]), "one entry for each of 1 hidden layers"),
        (dict(sizes=(4, 3, 2), output_constraint=(0, 1, 2)), "or a pair"),
        (dict(sizes=(4, 3, 2), init="zeros"), "unknown init 'zeros'; use 'glorot', 'orthogonal' or 'uniform'"),
        (dict(sizes=(4, 3, 2), dtype=torch.int64), "floating-point dtype"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        lrrn.LRRN(**arguments)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(3, 5), ValueError, r"shape \(n_samples, 4\); got \(3, 5\)"),
        (torch.zeros(3, 4, dtype=torch.int64), TypeError, "must be floating point; got torch.int64"),
        (torch.tensor([[0.0] * 4, [0.0, float("nan"), 0, 0]]), ValueError, "non-finite value .* first in row 1"),
        (torch.tensor([[float("inf")] * 4]), ValueError, "first in row 0"),
    ],
)
def test_bad_inputs_are_refused_before_any_work(x, error, message):
    net = lrrn.LRRN((4, 3, 2))
    for call in (net, net.infer, net.energy):
        with pytest.raises(error, match=message):
            call(x)


def test_infer_wants_a_batch_and_tensors():
    net = lrrn.LRRN((4, 3, 2))
    with pytest.raises(ValueError, match=r"\(n_samples, 4\); got \(4,\)"):
        net.infer(torch.zeros(4))
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor; got list"):
        net.infer([[0.0] * 4])


def test_bad_targets_are_refused():
    net = lrrn.LRRN((4, 3, 2), output_constraint="box")
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"target vectors of shape \(3, 2\), not of labels; got \(3,\)"):
        net.infer(x, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="row 1 of y leaves the output's constraint set box"):
        net.infer(x, torch.tensor([[0.0, 0.0], [0.0, 2.0], [3.0, 0.0]]))
    with pytest.raises(ValueError, match="y has a non-finite value"):
        net.infer(x, torch.full((3, 2), torch.nan))
    with pytest.raises(ValueError, match="either activations z or a target y"):
        net.energy(x, z=[x[:, :3], x[:, :2]], y=x[:, :2])


def test_bad_starts_are_refused():
    net = lrrn.LRRN((4, 3, 2))
    with pytest.raises(ValueError, match="start must hold activations of shapes"):
        net.infer(torch.zeros(3, 4), start=[torch.zeros(2, 3)])


def test_empty_batch():
    net = lrrn.LRRN((4, 3, 2))
    x = torch.zeros(0, 4, requires_grad=True)
    y = net(x)
    y.sum().backward()
    assert y.shape == (0, 2) and x.grad.shape == (0, 4)
    solution = net.infer(x.detach())
    assert solution.output.shape == (0, 2) and solution.error_bound.shape == solution.energy.shape == (0,)


def test_leading_dimensions_are_kept_as_in_linear():
    net = lrrn.LRRN((4, 3, 2))
    x = torch.rand(2, 3, 4)
    y = net(x)
    assert y.shape == (2, 3, 2) and net(x[0, 0]).shape == (2,)
    torch.testing.assert_close(y[1, 2], net(x[1, 2]))


def test_non_contiguous_input():
    net = random_network((4, 3, 2))
    x = random_input(4, 6).mT[::2].mT.mT
    strided = random_input(8, 4).mT.contiguous().mT[::2]
    assert not strided.is_contiguous()
    torch.testing.assert_close(net(strided), net(strided.contiguous()), rtol=0, atol=0)
    assert x.shape[1] == 4 and torch.equal(net.infer(x).output, net.infer(x.contiguous()).output)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_solved_in_float32_and_returned_as_given(dtype):
    net = random_network((4, 3, 2), dtype=torch.float32)
    x = random_input(5, 4).to(dtype)
    assert net(x).dtype == dtype and net.infer(x).output.dtype == dtype
    assert torch.equal(net(x), net(x.float()).to(dtype))
    half = copy.deepcopy(net).to(dtype)
    assert half(x).dtype == dtype and half.infer(x).converged.all()
    half(x).sum().backward()
    assert half.W[0].grad.dtype == dtype


def test_float64_input_raises_the_precision_of_a_float32_network():
    net = random_network((4, 3, 2), dtype=torch.float32)
    x = random_input(5, 4)
    exact = copy.deepcopy(net).double()
    assert torch.equal(net(x), exact(x)) and net(x).dtype == torch.float64


def test_autocast_is_off_inside_the_solve():
    net = random_network((4, 30, 30, 2), dtype=torch.float32)
    x = random_input(5, 4, dtype=torch.float32).requires_grad_()
    plain = net(x)
    (plain_grad,) = torch.autograd.grad(plain.sum(), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = net(x)
    (cast_grad,) = torch.autograd.grad(cast.sum(), x)
    assert torch.equal(plain, cast) and torch.equal(plain_grad, cast_grad)


def test_a_tolerance_beyond_float32_raises_the_working_precision():
    net = random_network((4, 8, 8, 2), dtype=torch.float32)
    solution = net.infer(random_input(5, 4, dtype=torch.float32), tol=1e-10)
    assert solution.output.dtype == torch.float64 and solution.converged.all() and (solution.error_bound < 1e-6).all()


def test_a_tolerance_beyond_float64_is_reported():
    net = random_network((4, 8, 8, 2))
    with pytest.warns(
        ConvergenceWarning, match="of 5 samples did not converge; largest relative residual .* against tol 1e-30"
    ):
        solution = net.infer(random_input(5, 4), tol=1e-30)
    assert not solution.converged.any()


def test_non_convergence_is_never_silent():
    net = random_network((30, 40, 40, 5), scale=4.0, max_sweeps=1, tol=1e-9, solver="accelerated")
    x = random_input(8, 30)
    with pytest.warns(ConvergenceWarning, match="free phase: .* stopped at max_sweeps before reaching tol"):
        net.infer(x, max_sweeps=1, tol=1e-9, solver="accelerated")
    with pytest.warns(ConvergenceWarning, match="forward pass: "):
        net(x)
    with pytest.warns(ConvergenceWarning, match="clamped phase: "):
        net.infer(x, torch.zeros(8, 5, dtype=torch.float64), max_sweeps=1, tol=1e-9, solver="accelerated")


def test_warm_start_from_a_solution():
    net = random_network((20, 16, 16, 5))
    x = random_input(10, 20)
    cold = net.infer(x)
    warm = net.infer(x, start=cold)
    assert (warm.n_sweeps == 0).all() and torch.equal(warm.output, cold.output)
    nearby = net.infer(x + 1e-4, start=cold)
    assert nearby.n_sweeps.sum() < cold.n_sweeps.sum()
    clamped = net.infer(x, cold.output, start=cold)
    assert clamped.n_sweeps.sum() < net.infer(x, cold.output).n_sweeps.sum()


def test_solution_reports_its_solvers_and_status():
    net = random_network((6, 5, 2))
    solution = net.infer(random_input(3, 6))
    assert solution.solvers == ("coordinate_descent",) and solution.status.tolist() == [lrrn.Status.CONVERGED] * 3
    assert all("converged" in lrrn.Status(code).message for code in solution.status.tolist())
    assert len(solution.activations) == 2 and solution.output is solution.activations[-1]


@pytest.mark.parametrize("init", ["glorot", "orthogonal", "uniform"])
def test_initialisation_is_seeded_and_leaves_the_global_generator_alone(init):
    def make(seed, **options):
        return lrrn.LRRN((9, 6, 3), init=init, generator=torch.Generator().manual_seed(seed), **options)

    before = torch.get_rng_state()
    a, b, c = make(0), make(0), make(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(a.W[0], b.W[0]) and not torch.equal(a.W[0], c.W[0])
    assert torch.equal(make(0, dtype=torch.float64).W[1].float(), a.W[1])


def test_initial_weights_are_what_they_say():
    glorot = lrrn.LRRN((300, 200, 3), generator=torch.Generator().manual_seed(0)).W[0].detach()
    limit = (6 / 500) ** 0.5
    assert glorot.abs().max() <= limit and glorot.std() == pytest.approx(limit / 3**0.5, rel=0.02)
    orthogonal = lrrn.LRRN((30, 20, 3), init="orthogonal", dtype=torch.float64).W[0].detach()
    torch.testing.assert_close(orthogonal @ orthogonal.mT, torch.eye(20, dtype=torch.float64))
    uniform = lrrn.LRRN((400, 200, 3), init="uniform", dtype=torch.float64).W[0].detach()
    assert float(uniform.abs().max()) <= 1 / 20
    assert float(uniform.std()) == pytest.approx(1 / 20 / 3**0.5, rel=0.02)


def test_copies_pickles_and_state_dicts():
    net = random_network((5, 4, 2))
    x = random_input(3, 5)
    expected = net.infer(x).output
    for clone in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(clone.infer(x).output, expected)
    other = random_network((5, 4, 2), seed=9)
    assert not torch.equal(other.infer(x).output, expected)
    other.load_state_dict(net.state_dict())
    assert torch.equal(other.infer(x).output, expected)


def test_every_way_of_changing_a_parameter_is_noticed():
    net = random_network((5, 4, 2))
    x = random_input(3, 5)
    changes = [
        lambda: net.W[0].data.mul_(1.5),
        lambda: torch.nn.init.constant_(net.b[1], 0.7),
        lambda: net.W.__setitem__(1, nn.Parameter(net.W[1].detach() * 2)),
        lambda: net.load_state_dict(random_network((5, 4, 2), seed=4).state_dict()),
        lambda: setattr(net.c[0], "data", net.c[0].data + 0.2),
    ]
    for change in changes:
        before = net.infer(x)
        change()
        after = net.infer(x)
        fresh = copy.deepcopy(net).infer(x)
        assert torch.equal(after.output, fresh.output) and torch.equal(after.error_bound, fresh.error_bound)
        assert not torch.equal(torch.cat(before.activations, 1), torch.cat(after.activations, 1))


def test_moves_between_dtypes():
    net = random_network((5, 4, 2))
    x = random_input(3, 5)
    single = copy.deepcopy(net).to(torch.float32)
    assert single.infer(x.float()).output.dtype == torch.float32
    torch.testing.assert_close(single.infer(x.float()).output.double(), net.infer(x).output, rtol=1e-3, atol=1e-3)


def test_works_in_sequential_with_an_optimiser_and_no_warnings():
    net = nn.Sequential(nn.Flatten(), random_network((12, 8, 3), dtype=torch.float32))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.rand(6, 3, 4, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = float(net(x).detach().square().sum())
        for _ in range(5):
            optimiser.zero_grad()
            net(x).square().sum().backward()
            optimiser.step()
    assert float(net(x).detach().square().sum()) < before


def test_input_of_exact_zeros():
    net = lrrn.LRRN((4, 3, 2))
    assert net.infer(torch.zeros(2, 4)).converged.all()


@pytest.mark.parametrize("name", ["beta", "gamma", "intervals", "sizes"])
def test_the_structure_cannot_be_changed_under_what_rests_on_it(name):
    """A radius made of one energy and a label of another would be wrong."""
    net, x = random_network((6, 5, 4, 3)), random_input(3, 6)
    before = net.infer(x).output
    with pytest.raises(AttributeError, match=f"{name} is part of the network's structure.*load_state_dict"):
        setattr(net, name, getattr(random_network((6, 5, 4, 3), beta=0.2, gamma=0.9, constraint="box"), name))
    assert torch.equal(net.infer(x).output, before)
    # copies and pickles are networks like any other
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert getattr(twin, name) == getattr(net, name)
        with pytest.raises(AttributeError):
            setattr(twin, name, None)


def test_a_solve_that_fails_can_be_an_error():
    net, x = random_network((6, 5, 4, 3)), random_input(3, 6)
    with pytest.raises(lrrn.ConvergenceError, match=r"3 of 3 samples did not converge.*raise max_sweeps"):
        net.infer(x, tol=1e-12, max_sweeps=1, solver="accelerated", on_failure="raise")
    with pytest.warns(ConvergenceWarning, match="3 of 3"):
        net.infer(x, tol=1e-12, max_sweeps=1, solver="accelerated")
    assert net.infer(x, on_failure="raise").converged.all()
    with pytest.raises(ValueError, match="on_failure must be one of 'warn', 'raise', 'ignore'; got 'hope'"):
        net.infer(x, on_failure="hope")
