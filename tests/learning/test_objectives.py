"""Oracles: finite differences, autograd on energies at fixed activations, and the limits the theory promises."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch.autograd import gradcheck
from torch.nn import functional

from lrrn import LRRN, LRRNClassifier
from lrrn.attacks import pgd
from lrrn.learning import (
    Batch,
    ClassEnergy,
    Contrastive,
    CrossEntropy,
    Data,
    FreeEnergy,
    Margin,
    SemiSupervised,
    Settings,
    SquaredError,
    Trainer,
)
from lrrn.learning.objectives import EnergyObjective, total, total_gradients
from lrrn.network.policy import SolvePolicy
from lrrn.solvers import solve
from oracles import random_input, random_network

SHAPES = [
    dict(sizes=(4, 3), beta=(0.0,)),
    dict(sizes=(4, 3), beta=(0.7,)),
    dict(sizes=(4, 5, 3), beta=(1.0, 0.0)),
    dict(sizes=(4, 5, 3), beta=(1.0, 0.6)),
    dict(sizes=(4, 5, 4, 3), beta=(1.0, 0.5, 0.0), bias=False),
    dict(sizes=(4, 5, 4, 3), beta=(0.0, 2.0, 0.3), reconstruction_bias=False),
]


def gradients(loss: torch.Tensor, net: LRRN) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, net.flat_parameters(), materialize_grads=True, allow_unused=True)


def make_batch(net: LRRN, n: int = 5, seed: int = 0) -> Batch:
    label = torch.arange(n) % net.sizes[-1]
    return Batch(random_input(n, net.sizes[0], seed=seed), functional.one_hot(label, net.sizes[-1]).double(), label)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['sizes']} {s['beta']}")
@pytest.mark.parametrize(
    "objective",
    [
        FreeEnergy(),
        ClassEnergy(),
        Contrastive(),
        SemiSupervised(0.3),
        SemiSupervised(0.3, 0.5, -1.0),
        Margin(0.7, 0.4),
        CrossEntropy(),
        SquaredError(),
    ],
    ids=lambda o: type(o).__name__,
)
def test_gradients_by_finite_differences(shape, objective):
    net = random_network(**shape, tol=1e-13)
    batch = make_batch(net)
    if isinstance(objective, SemiSupervised):
        batch.label = torch.tensor([0, -1, 2, -1, 1])
        batch.target = batch.target * (batch.label >= 0)[:, None]
    # parameters are passed for gradcheck to perturb in place; the objective reads them from the network
    assert gradcheck(lambda *_: objective(net, batch), tuple(net.parameters()), atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['sizes']} {s['beta']}")
def test_values_are_energies(shape):
    net = random_network(**shape, tol=1e-12)
    batch = make_batch(net)
    free, clamped = net.energy(batch.x), net.energy(batch.x, y=batch.target)
    close = dict(rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(FreeEnergy()(net, batch), free, **close)
    torch.testing.assert_close(ClassEnergy()(net, batch), clamped, **close)
    torch.testing.assert_close(Contrastive()(net, batch), clamped - free, **close)
    assert (clamped >= free).all()
    batch.label = torch.tensor([0, -1, 2, -1, 1])
    known = (batch.label >= 0).double()
    torch.testing.assert_close(SemiSupervised(0.3)(net, batch), known * (clamped - free) + 0.3 * free, **close)


@pytest.mark.parametrize("objective", [FreeEnergy(), ClassEnergy(), Contrastive(), SemiSupervised(0.2)])
def test_the_trainers_short_cut_is_the_objective_itself(objective: EnergyObjective):
    net = random_network((6, 5, 4, 3))
    batch, weight = make_batch(net), torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    terms = objective.terms(net, batch)
    losses = objective(net, batch)
    torch.testing.assert_close(total(terms, 5), losses)
    expected = torch.autograd.grad((losses * weight).sum(), net.flat_parameters())
    for a, b in zip(total_gradients(terms, weight), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_self_training_counts_confident_samples_only():
    net = random_network((6, 5, 3), tol=1e-12)
    batch = make_batch(net)
    batch.label = torch.full((5,), -1)
    output = net.infer(batch.x, tol=1e-12).output
    top = output.topk(2).values
    lead = top[:, 0] - top[:, 1]
    threshold = float(lead.median())
    guess = functional.one_hot(output.argmax(-1), 3).double()
    gap = net.energy(batch.x, y=guess) - net.energy(batch.x)
    expected = 0.1 * net.energy(batch.x) + 2.0 * gap * (lead > threshold)
    torch.testing.assert_close(SemiSupervised(0.1, 2.0, threshold)(net, batch), expected, rtol=1e-9, atol=1e-10)


def test_margin_loss_and_its_unit_rows():
    net = random_network((6, 5, 3))
    objective = Margin(margin=0.8, temperature=0.25)
    objective.project(net)
    torch.testing.assert_close(net.W[-1].detach().norm(dim=1), torch.ones(3, dtype=torch.float64))
    batch = make_batch(net)
    y = net(batch.x)
    shifted = (y - 0.8 * batch.target) / 0.25
    expected = 0.25 * (torch.logsumexp(shifted, 1) - shifted[torch.arange(5), batch.label])
    torch.testing.assert_close(objective(net, batch), expected)


def test_a_margin_and_a_temperature_can_change_as_training_goes_on():
    net = random_network((5, 6, 3))
    x, label = random_input(7, 5), torch.arange(7) % 3
    target = functional.one_hot(label).to(x)
    for progress in (0.0, 0.25, torch.tensor(1.0)):
        at = float(progress)
        moving = Margin((0.2, 1.0), (0.5, 0.1))(net, Batch(x, target, label, progress=progress))
        fixed = Margin(0.2 + 0.8 * at, 0.5 - 0.4 * at)(net, Batch(x, target, label))
        torch.testing.assert_close(moving, fixed, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['sizes']} {s['beta']}")
def test_adversarial_margin_loss_is_that_of_inputs_moved_uphill(shape):
    """The slope by central differences of the plain loss; the derivatives those of the plain loss at the moved inputs."""
    net, plain, eps, h = random_network(**shape, tol=1e-13), Margin(0.7, 0.4), 0.3, 1e-6
    batch = make_batch(net)
    x = batch.x.clone()
    slope = torch.empty_like(x)
    with torch.no_grad():
        for j in range(x.shape[1]):
            step = h * functional.one_hot(torch.tensor(j), x.shape[1]).double()
            up, down = (plain(net, Batch(x + sign * step, batch.target, batch.label)) for sign in (1, -1))
            slope[:, j] = (up - down) / (2 * h)
    steep = slope.norm(dim=1, keepdim=True)
    moved = torch.where(steep > 1e-9, x + eps * slope / steep, x)
    losses = Margin(0.7, 0.4, eps)(net, batch)
    expected = plain(net, Batch(moved, batch.target, batch.label))
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-8)
    assert ((losses > plain(net, make_batch(net))) == (steep[:, 0] > 1e-9)).all() and (steep > 1e-9).sum() >= 3
    assert torch.equal(batch.x, x) and batch.start is None and batch.activations is not None
    for a, b in zip(*(gradients(of.sum(), net) for of in (losses, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_adversarial_moves_grow_with_progress_and_stay_where_the_loss_is_flat():
    net = random_network((6, 5, 3))
    batch = make_batch(net)
    for progress in (0.0, 0.5, torch.tensor(1.0)):
        batch.progress = progress
        growing, fixed = (Margin(0.7, 0.4, eps)(net, batch) for eps in ((0.0, 0.4), 0.4 * float(progress)))
        torch.testing.assert_close(growing, fixed, rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        net.W[0].zero_()
    torch.testing.assert_close(Margin(0.7, 0.4, 0.3)(net, batch), Margin(0.7, 0.4)(net, batch), rtol=0, atol=0)


def test_attacks_stop_their_adjoint_early_and_keep_their_direction():
    """Against the direction by solves to 1e-12; the adjoint alone is less exact, and the gradient of the loss is not."""
    net, seen = random_network((60, 300, 5), scale=3.0, beta=(1.0, 0.0)), []
    objective, given = Margin(0.7, 0.4, 0.3), make_batch(net)

    def attacked(policy):
        batch = replace(given, policy=policy)
        parameters = [p.detach() for p in net.energy_parameters(batch.x.dtype)]
        return objective._attacked(net, parameters, net.energy_of(parameters), batch).x - given.x

    exact = attacked(SolvePolicy(tol=1e-12))
    quick = attacked(SolvePolicy(tol=1e-3, observer=lambda *of: seen.append((of[3], of[2]))))
    assert (functional.cosine_similarity(quick, exact) > 0.99).all()
    assert seen == [("forward pass", 1e-3), ("adjoint", 0.03)]
    seen.clear()
    policy = SolvePolicy(tol=1e-3, observer=lambda *of: seen.append(of[2]))
    objective(net, replace(given, policy=policy)).sum().backward()
    assert seen == [1e-3, 0.03, 1e-3, 1e-3]
    assert SolvePolicy(tol=1e-12).direction_tolerances(torch.float64).must == pytest.approx(3e-11)
    assert SolvePolicy(fixed_sweeps=9).for_direction() == SolvePolicy(fixed_sweeps=9)


def test_adversaries_move_inputs_that_are_far_on_the_right_side():
    """In float32 the slope of a small loss drowns: one minus a softmax is 0, and then the whole is."""
    net = random_network((20, 30, 5), scale=3.0)
    x = random_input(40, 20)
    label = net(x).argmax(-1)
    batch = Batch(x, functional.one_hot(label, 5).double(), label)
    exact = Margin(0.0, 0.01, 1.5)(net, batch)
    plain = Margin(0.0, 0.01)(net, batch)
    assert ((plain < 1e-9) & (exact > 0.01)).any()
    found = Margin(0.0, 0.01, 1.5)(net.float(), Batch(x.float(), batch.target.float(), label))
    torch.testing.assert_close(found.double(), exact.detach(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("adversarial_eps", value) for value in (-0.3, (0.3, -0.3), float("nan"), float("inf"), [0, 0.3], "0.3", None)),
        *(("adversarial_eps", value) for value in ((0.1,) * 3, ())),
        *(("temperature", value) for value in (0, -1.0, (0.1, 0.0))),
        ("margin", float("nan")),
    ],
    ids=str,
)
def test_numbers_of_the_margin_loss_that_make_no_sense_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number, or a pair .* got {re.escape(repr(value))}"):
        Margin(**{name: value})
    if value is None:  # which means the default in an estimator
        return
    X, y = load_digits(return_X_y=True)
    model = LRRNClassifier(objective="margin", epochs=1, **{name: value})
    with pytest.raises(ValueError, match=f"{name} must be"):
        model.fit(X, y)
    assert not hasattr(model, "network_")
    with pytest.raises(ValueError, match=f"{name}=.* needs objective 'margin'; got 'contrastive'"):
        model.set_params(objective="contrastive").fit(X[:50], y[:50])  # where it plays no part


def test_adversarial_training_makes_a_network_more_robust():
    X, y = load_digits(return_X_y=True)
    x, label = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
    data = Data(x[:1200], functional.one_hot(label[:1200]).float(), label[:1200])
    settings = Settings(optimizer="adam", learning_rate=4e-3, batch_size=64, epochs=8)
    robust = {}
    for eps in (0.0, 0.5):
        net = LRRN((64, 32, 10), gamma=1.0, generator=torch.Generator().manual_seed(0))
        Trainer(net, Margin(0.3, 0.1, eps), settings).fit(data)
        robust[eps] = 1 - float(pgd(net, x[1200:], label[1200:], 0.8, steps=10, restarts=1).success.double().mean())
    assert robust[0.5] > robust[0.0] + 0.05


def test_objectives_that_need_targets_say_so():
    net = random_network((6, 5, 3))
    for objective in (
        Contrastive(),
        ClassEnergy(),
        Margin(),
        Margin(adversarial_eps=0.1),
        CrossEntropy(),
        SquaredError(),
        SemiSupervised(),
    ):
        with pytest.raises(ValueError, match="needs targets"):
            objective(net, Batch(random_input(2, 6)))


# --- limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [(1.0, 0.5, 0.0), (1.0, 0.5, 0.4)], ids=["eliminated output", "full output"])
def test_the_nudged_phase_tends_to_the_implicit_gradient(beta):
    """grad_theta [E + t v.z_L at z_t minus E at z_0] / t -> implicit gradient for v = dloss/dz_L, with an error of order t."""
    net = random_network((5, 6, 4, 3), beta=beta, tol=1e-14)
    x = random_input(4, 5)
    target = random_input(4, 3, seed=9)
    y = net(x)
    v = (y - target).detach()
    implicit = torch.autograd.grad(0.5 * (y - target).square().sum(), net.flat_parameters())
    energy = net.energy_snapshot(torch.float64)

    def at(t: float) -> list[torch.Tensor]:
        z = energy.activations(x, solve(energy.nudged(x, v, t), solver="newton", tol=1e-14, aim=1e-30).z)
        if energy.eliminated:
            z[-1] = z[-1] - t * v / energy.discounts[-1]
        value = net.energy(x, [block.detach() for block in z])
        return torch.autograd.grad(value.sum(), net.flat_parameters(), materialize_grads=True, allow_unused=True)

    start = at(0.0)
    size = torch.cat([g.reshape(-1) for g in implicit]).norm()
    errors = []
    for t in (1e-2, 1e-3, 1e-4):
        difference = [(a - b) / t for a, b in zip(at(t), start, strict=True)]
        errors.append(float(torch.cat([(d - g).reshape(-1) for d, g in zip(difference, implicit, strict=True)]).norm() / size))
    assert errors[0] < 0.2 and errors[1] < 0.2 * errors[0] and errors[2] < 0.2 * errors[1]


def feed_forward(net: LRRN, x: torch.Tensor) -> torch.Tensor:
    """The network that gamma -> 0 leaves: layer by layer, each minimising its own terms."""
    z = x
    for k, (w, beta, interval) in enumerate(zip(net.W, net.beta, net.intervals, strict=True)):
        if beta == 0:
            z = (z @ w.mT + net.b[k]).clamp(interval.lo, interval.hi)
        else:
            layer = LRRN((w.shape[1], w.shape[0]), beta=(beta,), output_constraint=interval, dtype=torch.float64)
            del layer.W, layer.b, layer.c
            layer.W, layer.b, layer.c = [w], [net.b[k]], [net.c[k]]
            layer._groups = lambda w=w, k=k: ((w,), (net.b[k],), (net.c[k],))
            z = layer(z)
    return z


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_contrastive_gradients_tend_to_back_propagation_as_gamma_vanishes(beta):
    """beta 0: through the ReLU network with the same weights; beta 1: through the composition of one-layer networks."""
    gamma = 1e-4
    net = random_network((6, 8, 7, 4), beta=(beta, beta, 0.0), gamma=gamma, seed=2, solver="newton", tol=1e-14)
    batch = make_batch(net, n=8)
    losses = Contrastive()(net, batch)
    contrastive = torch.autograd.grad(losses.sum(), net.flat_parameters())
    error = 0.5 * (feed_forward(net, batch.x) - batch.target).square().sum()
    back_propagation = torch.autograd.grad(error, net.flat_parameters(), allow_unused=True)
    for a, b in zip(contrastive, back_propagation, strict=True):
        if b is None or float(b.norm()) == 0:
            continue
        cosine = float(functional.cosine_similarity(a.reshape(-1), b.reshape(-1), dim=0))
        assert cosine > 0.999, (a.shape, cosine)


def train_linear(x: torch.Tensor, r: int, epochs: int) -> LRRN:
    net = LRRN(
        (x.shape[1], r),
        beta=(1.0,),
        output_constraint="free",
        bias=False,
        reconstruction_bias=False,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
    )
    settings = Settings(optimizer="adam", learning_rate=0.01, schedule="cosine", batch_size=200, epochs=epochs)
    Trainer(net, FreeEnergy(), settings).fit(Data(x))
    return net


def test_one_linear_layer_learns_an_orthonormal_basis_of_a_subspace():
    generator = torch.Generator().manual_seed(1)
    basis = torch.randn(4, 12, dtype=torch.float64, generator=generator)
    x = torch.randn(400, 4, dtype=torch.float64, generator=generator) @ basis
    net = train_linear(x, 4, epochs=400)
    w = net.W[0].detach()
    assert float((w @ w.mT - torch.eye(4, dtype=torch.float64)).abs().max()) < 1e-3
    assert float(net.energy(x).detach().mean()) < 1e-5 * float(x.square().sum(1).mean())


def test_on_digits_one_linear_layer_finds_the_principal_subspace():
    data = load_digits().data / 16
    x = torch.as_tensor(data - data.mean(0))
    r = 10
    w = train_linear(x, r, epochs=150).W[0].detach().numpy()
    ours, _ = np.linalg.qr(w.T)
    theirs = PCA(r).fit(x.numpy()).components_.T
    cosines = np.linalg.svd(ours.T @ theirs, compute_uv=False)
    largest_angle = np.degrees(np.arccos(np.clip(cosines.min(), -1, 1)))
    assert largest_angle < 5, largest_angle


def test_a_batch_is_restricted_to_rows_with_their_targets_and_labels():
    x, label, rows = torch.arange(12.0).view(4, 3), torch.tensor([2, 0, 1, 2]), torch.tensor([3, 2])
    batch = Batch(x, torch.eye(3)[label], label)
    batch.select(rows)
    assert torch.equal(batch.x, x[rows]) and torch.equal(batch.label, label[rows])
    assert torch.equal(batch.target, torch.eye(3)[[2, 1]])
