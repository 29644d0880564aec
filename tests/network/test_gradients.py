"""Oracle: float64 finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from oracles import random_input, random_network

CONSTRAINTS = ["free", "nonneg", "box", (-0.2, 0.3), (0.1, float("inf"))]
DEPTHS = [(4, 3), (4, 5, 2), (4, 3, 5, 2), (3, 4, 2, 5, 2)]


@pytest.mark.parametrize("sizes", DEPTHS, ids=str)
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=str)
@pytest.mark.parametrize("output", ["eliminated", "free", "interval, beta 0", "interval"])
def test_implicit_gradients(sizes, constraint, output, device):
    beta = tuple(0.5 + 0.5 * (k % 2) for k in range(len(sizes) - 2)) + (
        (0.0,) if "0" in output or output == "eliminated" else (0.8,)
    )
    net = random_network(
        sizes,
        beta=beta,
        constraint=constraint,
        output_constraint="free" if output in ("eliminated", "free") else (-0.4, 0.4),
        device=device,
        scale=1.3,
        seed=3,
    )
    x = random_input(3, sizes[0], device=device).requires_grad_()
    # parameters are passed for gradcheck to perturb in place; the network reads them itself. A solve of so few samples takes a
    # GPU milliseconds: there all entries are perturbed at once, in a random direction
    assert gradcheck(lambda x, *_: net(x), (x, *net.parameters()), fast_mode=device != "cpu")


@pytest.mark.parametrize("solver", ["auto", "newton"], ids=["compiled passes", "general way"])
def test_gradients_in_x_of_a_network_whose_parameters_are_frozen(solver):
    net = random_network((4, 5, 3, 2), solver=solver, tol=1e-13).requires_grad_(False)
    x = random_input(3, 4).requires_grad_()
    assert gradcheck(net, (x,))
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("call", [lambda net, x: net(x), lambda net, x: net.minimise(x)], ids=["prediction", "minimiser"])
def test_a_pass_and_its_adjoint_share_one_hessian(call, monkeypatch):
    net, made = random_network((4, 5, 3, 2), solver="newton"), []
    build = type(net).energy_of
    monkeypatch.setattr(type(net), "energy_of", lambda self, parameters: made.append(build(self, parameters)) or made[-1])
    call(net, random_input(3, 4)).sum().backward()
    assert sum("free_hessian" in vars(energy) for energy in made) == 1


def test_gradients_of_energies_are_exact_by_the_envelope_theorem():
    net = random_network((4, 5, 3, 2), beta=(1.0, 0.5, 0.7), tol=1e-13)
    x = random_input(3, 4).requires_grad_()
    y = random_input(3, 2, seed=1)
    assert gradcheck(lambda x, *_: net.energy(x), (x, *net.parameters()))
    assert gradcheck(lambda x, *_: net.energy(x, y=y), (x, *net.parameters()))


def test_energy_at_given_activations_is_differentiable_in_them():
    net = random_network((4, 5, 2), beta=(1.0, 0.5))
    x = random_input(3, 4).requires_grad_()
    z = [random_input(3, d, seed=d).requires_grad_() for d in (5, 2)]
    assert gradcheck(lambda x, *z: net.energy(x, z), (x, *z))


def test_the_symmetric_contrastive_difference_is_the_implicit_gradient():
    """dloss/dtheta = -grad_theta 1/2 [E(z* + w) - E(z* - w)], with w the adjoint, on a network without elimination."""
    net = random_network((4, 5, 3), beta=(1.0, 0.6), constraint="nonneg")
    x, v = random_input(6, 4), random_input(6, 3, seed=2)
    implicit = torch.autograd.grad((net(x) * v).sum(), list(net.parameters()))
    z = torch.cat(net.infer(x, tol=1e-13).activations, dim=-1)
    energy = net.energy_snapshot(torch.float64)
    h = energy.free_hessian.dense()
    w = torch.zeros_like(z)
    for i in range(6):
        free = z[i] > energy.free(x).lo[0]
        full_v = torch.cat([torch.zeros(5, dtype=torch.float64), v[i]])
        w[i, free] = torch.linalg.solve(h[free][:, free], full_v[free])
    difference = 0.5 * (net.energy(x, (z + w).split((5, 3), 1)) - net.energy(x, (z - w).split((5, 3), 1)))
    contrastive = torch.autograd.grad(-difference.sum(), list(net.parameters()))
    for a, b in zip(implicit, contrastive, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_tiny_gradients_keep_their_relative_accuracy():
    net = random_network((4, 5, 3, 2), dtype=torch.float32)
    x = random_input(6, 4, dtype=torch.float32)
    big = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    small = torch.autograd.grad(net(x).sum() * 1e-12, list(net.parameters()))
    for a, b in zip(big, small, strict=True):
        torch.testing.assert_close(b * 1e12, a, rtol=1e-4, atol=1e-4 * float(a.abs().max()))


def test_second_derivatives_raise_a_clear_error():
    net = random_network((4, 5, 2))
    x = random_input(3, 4).requires_grad_()
    (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="LRRN has first derivatives only"):
        grad.square().sum().backward()


def test_memory_of_a_training_step_does_not_grow_with_sweeps():
    def saved_for_backward(tol):
        net = random_network((30, 40, 40, 5), scale=3.0, solver="accelerated", tol=tol)
        x = random_input(50, 30)
        assert int(net.infer(x, solver="accelerated", tol=tol).n_sweeps.max()) > (100 if tol < 1e-6 else 0)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            net(x)
        return sum(saved)

    assert saved_for_backward(1e-1) == saved_for_backward(1e-12)


def test_parameters_that_do_not_enter_get_zero_gradients():
    net = random_network((4, 5, 2), beta=(0.0, 0.0))
    grads = torch.autograd.grad(net(random_input(3, 4)).sum(), list(net.c))
    assert all((grad == 0).all() for grad in grads)


def test_trains_inside_ordinary_torch_code():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator)
    target = (x[:, :1] * x[:, 1:2] > 0).float()
    net = nn.Sequential(nn.Linear(6, 16), random_network((16, 24, 1), beta=(1.0, 0.0), dtype=torch.float32), nn.Sigmoid())
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    losses = []
    for _ in range(150):
        optimiser.zero_grad()
        loss = nn.functional.binary_cross_entropy(net(x), target)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


def test_changing_a_parameter_between_forward_and_backward_is_an_error():
    net = random_network((4, 5, 2))
    loss = net(random_input(3, 4)).sum()
    with torch.no_grad():
        net.W[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_grad_and_inference_mode():
    net = random_network((4, 5, 2))
    x = random_input(3, 4)
    with torch.no_grad():
        assert not net(x).requires_grad
    with torch.inference_mode():
        plain = net(x)
    torch.testing.assert_close(plain.clone(), net(x).detach(), rtol=0, atol=0)
