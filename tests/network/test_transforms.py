"""Oracles: plain loops over samples and networks, the passes without transforms, finite differences."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap

import convolutions
from lrrn import LRRN
from lrrn.energy.derivatives import activation_gradient, hessian_product
from lrrn.linalg import operators
from lrrn.network import SolvePolicy
from lrrn.network.solution import raise_if_not_converged
from oracles import random_input, random_network

NETWORKS = {
    "eliminated": dict(sizes=(4, 5, 3, 2), beta=(1.0, 0.5, 0.0)),
    "interval": dict(sizes=(4, 5, 3, 2), beta=(1.0, 0.5, 0.7), output_constraint=(-0.4, 0.4)),
    "feed-forward": dict(sizes=(4, 5, 2), beta=(0.0, 0.0), constraint="box"),
    "no biases": dict(sizes=(4, 5, 2), bias=False, reconstruction_bias=False),
    "linear": dict(sizes=(4, 2)),
}
CLOSE = dict(rtol=1e-8, atol=1e-9)


@pytest.fixture(params=NETWORKS)
def net(request):
    return random_network(**NETWORKS[request.param], tol=1e-13)


@pytest.fixture
def x():
    return random_input(6, 4)


def loss_of(net):
    return lambda parameters, x: functional_call(net, parameters, (x,)).square().sum()


def test_the_gradient_in_the_activations_is_that_of_the_programme(net, x):
    energy = net.energy_snapshot(torch.float64)
    z = random_input(6, sum(energy.free_sizes), seed=1)
    torch.testing.assert_close(activation_gradient(energy, x, z), energy.free(x).gradient(z) if energy.n_free else z)
    if energy.n_free:
        torch.testing.assert_close(hessian_product(energy, z), z @ energy.free_hessian.dense())


def test_jacobians_of_samples(net, x):
    torch.testing.assert_close(vmap(net)(x), net(x))
    loop = torch.stack([torch.autograd.functional.jacobian(lambda one: net(one[None])[0], row) for row in x])
    torch.testing.assert_close(vmap(jacrev(net))(x), loop, **CLOSE)
    torch.testing.assert_close(vmap(jacfwd(net))(x), loop, **CLOSE)


def test_jacobians_in_the_parameters(net, x):
    parameters = dict(net.named_parameters())

    def output(parameters):
        return functional_call(net, parameters, (x,))

    reverse, forward = jacrev(output)(parameters), jacfwd(output)(parameters)
    for name, parameter in parameters.items():
        torch.testing.assert_close(reverse[name], forward[name], **CLOSE)
        for i in range(2):
            (one,) = torch.autograd.grad(net(x)[3, i], parameter, allow_unused=True)
            torch.testing.assert_close(reverse[name][3, i], torch.zeros_like(parameter) if one is None else one, **CLOSE)


def test_gradients_per_sample(net, x):
    parameters = dict(net.named_parameters())
    each = vmap(grad(loss_of(net)), in_dims=(None, 0))(parameters, x)
    for i in range(len(x)):
        alone = torch.autograd.grad(net(x[i : i + 1]).square().sum(), list(parameters.values()), allow_unused=True)
        for (name, parameter), one in zip(parameters.items(), alone, strict=True):
            torch.testing.assert_close(each[name][i], torch.zeros_like(parameter) if one is None else one, **CLOSE)


def test_ensembles_of_networks(x):
    nets = [random_network((4, 5, 3, 2), seed=seed, tol=1e-13) for seed in range(3)]
    parameters, buffers = stack_module_state(nets)
    mapped = vmap(lambda p, b: functional_call(nets[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(mapped, torch.stack([net(x) for net in nets]), **CLOSE)


def test_second_derivatives_against_differences_of_first_ones(net, x):
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    w, step = parameters["W.0"], 1e-5

    def slope(w):
        return grad(lambda w: loss_of(net)({**parameters, "W.0": w}, x))(w)

    found = hessian(lambda w: loss_of(net)({**parameters, "W.0": w}, x))(w)
    torch.testing.assert_close(jacrev(slope)(w), found, **CLOSE)
    for i in range(w.shape[0]):
        move = torch.zeros_like(w)
        move[i, 1] = step
        difference = (slope(w + move) - slope(w - move)) / (2 * step)
        torch.testing.assert_close(found[:, :, i, 1], difference, rtol=1e-5, atol=1e-7)


def test_forward_mode(net, x):
    direction = random_input(6, 4, seed=2)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(net(forward_ad.make_dual(x, direction))).tangent
    torch.testing.assert_close(tangent, torch.einsum("nij,nj->ni", vmap(jacrev(net))(x), direction), **CLOSE)


def test_minimisers_are_mapped_too(x):
    net = random_network((4, 5, 3, 2), tol=1e-13)
    torch.testing.assert_close(vmap(lambda one: net.minimise(one[None])[0])(x), net.minimise(x), **CLOSE)


def test_bad_values_are_found_in_what_is_mapped(x):
    x[4, 1] = torch.nan
    with pytest.raises(ValueError, match=r"x has a non-finite value.*row 4"):
        vmap(random_network((4, 5, 2)))(x)


def test_batched_derivatives_outside_of_torch_func_say_what_to_use(x):
    net = random_network((4, 5, 2))
    with pytest.raises(NotImplementedError, match=r"use torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(net, x, vectorize=True)


@pytest.mark.parametrize("kind", ["eliminated", "interval", "no biases", "linear"])
def test_compiled_in_one_graph(kind, x):
    torch._dynamo.reset()
    net = random_network(**NETWORKS[kind])
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    inputs = [x.clone().requires_grad_(), *net.parameters()]
    here, there = (torch.autograd.grad(f(inputs[0]).square().sum(), inputs, allow_unused=True) for f in (net, compiled))
    torch.testing.assert_close(compiled(x), net(x))
    for a, b in zip(here, there, strict=True):
        assert (a is None or not a.any()) if b is None else torch.equal(torch.zeros_like(b) if a is None else a, b)
    if kind != "linear":
        with pytest.raises(ValueError, match="non-finite"):
            compiled(x * torch.nan)


def test_a_graph_holds_the_operator_for_any_number_of_samples(x):
    net = LRRN((4, 5, 3, 2), generator=torch.Generator().manual_seed(0), solver="newton", tol=1e-12, dtype=torch.float64)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert any("lrrn.prediction" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x[:2]), net(x[:2]))


def test_what_a_graph_cannot_hold_is_refused(x):
    net = random_network((4, 5, 2))
    policy = SolvePolicy(observer=raise_if_not_converged)
    with pytest.raises(Exception, match="may set solver, tol and max_sweeps only"):
        torch.compile(net, fullgraph=True, backend="eager")(x, policy)
    with pytest.raises(Exception, match="transform LRRN outside of it"):
        torch.compile(lambda x: vmap(jacrev(net))(x), fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize("unfolded", [False, True], ids=["products", "matrices"])
@pytest.mark.parametrize("name", ["two", "then dense"])
def test_convolutions_in_one_graph(name, unfolded, monkeypatch):
    torch._dynamo.reset()
    net = convolutions.network(name, monkeypatch, unfolded)
    images = convolutions.images(net, 3)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    inputs = [images.clone().requires_grad_(), *net.parameters()]
    here, there = (torch.autograd.grad(f(inputs[0]).square().sum(), inputs, allow_unused=True) for f in (net, compiled))
    torch.testing.assert_close(compiled(images), net(images))
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(torch.zeros_like(b) if a is None else a, torch.zeros_like(a) if b is None else b)


@pytest.mark.parametrize("unfolded", [False, True], ids=["products", "matrices"])
def test_tracing_convolutions_leaves_nothing_behind(unfolded, monkeypatch):
    operators._kept_places.cache_clear()  # traced before any use
    net = convolutions.network("pooled", monkeypatch, unfolded)
    images = convolutions.images(net, 4)
    program = torch.export.export(net, (images,), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert any("lrrn.prediction" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(images[:2]), net(images[:2]))
    torch.testing.assert_close(program.module()(images[:3]), convolutions.dense_twin(net)(images[:3].flatten(1)))
