"""The captured step's kernels against the general way: losses, derivatives, activations, counts; interpreted, or on a GPU."""

from __future__ import annotations

import pytest
import torch

from lrrn.learning import (
    ClassEnergy,
    Contrastive,
    CrossEntropy,
    Data,
    FreeEnergy,
    Margin,
    SemiSupervised,
    Settings,
    SquaredError,
)
from lrrn.learning.cuda_graph import DeviceCounts
from lrrn.learning.flat import FlatParameters
from lrrn.learning.objectives import Batch
from lrrn.learning.step import Step
from lrrn.learning.steps.autograd import Autograd
from lrrn.learning.steps.triton import TritonKernels
from lrrn.network.policy import SolvePolicy
from oracles import random_input, random_network

OBJECTIVES = {
    "contrastive": Contrastive(),
    "free energy": FreeEnergy(),
    "class energy": ClassEnergy(),
    "margin": Margin((0.3, 0.7), (0.1, 0.5)),
    "adversarial margin": Margin(0.4, 0.3, (0.05, 0.15)),
    "cross-entropy": CrossEntropy(),
    "squared error": SquaredError(),
}
SOLVES = {"contrastive": 2, "free energy": 1, "class energy": 1, "adversarial margin": 4}
"""Solves per sample; two of the others."""
NETWORKS = {
    "one hidden layer": ((7, 5, 3), {}),
    "two": ((20, 9, 6, 4), {"beta": (0.7, 1.3, 0.0), "gamma": 0.4}),
    "three, of which one does not reconstruct": ((5, 17, 6, 9, 3), {"beta": (0.0, 0.5, 1.5, 0.0), "gamma": 0.6}),
    "boxes": ((6, 8, 5, 2), {"constraint": (-0.1, 0.3)}),
    "wider than the input": ((70, 30, 20, 10), {}),
    "more inputs than have a part each": ((600, 9, 3), {}),
    "as wide as the chip takes": ((40, 128, 10), {}),
    "more outputs than hidden units": ((20, 10, 20), {}),
}


@pytest.fixture
def kernels(device):
    if not TritonKernels.applies(network("one hidden layer", torch.float32, device), Contrastive(), Settings()):
        pytest.skip("the kernels need Triton, and a CUDA device or TRITON_INTERPRET=1")
    return device


def network(name, dtype, device, **more):
    sizes, options = NETWORKS[name]
    options = {"beta": (1.0,) * (len(sizes) - 2) + (0.0,), "output_constraint": "free", **options, **more}
    return random_network(sizes, dtype=dtype, device=device, **options)


def exact(net, objective, batch, weight):
    """Loss and derivatives by autograd in float64, solved tightly."""
    batch.policy = SolvePolicy(tol=1e-12)
    flat = FlatParameters(net)
    with flat.attached():
        loss = Autograd(net, objective, flat, 1e-12).gradients(batch, weight, 1, None)
        return loss, flat.gradient.clone()


def found(net, objective, batch, weight, sweeps=128, rows=None):
    counts = DeviceCounts(4e-6, net.W[0].device)
    flat = FlatParameters(net)
    with torch.no_grad(), flat.attached():
        batch.policy = SolvePolicy(fixed_sweeps=sweeps, observer=counts)
        flat.gradient.fill_(7.0)
        loss = TritonKernels(net, objective, flat, 4e-6).gradients(batch, weight, 1, rows)
        return loss, flat.gradient.clone(), counts.take()


@pytest.mark.parametrize("n", [1, 18, 70])  # one tile of each kernel and several
@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_and_derivatives_are_those_of_the_general_way(kernels, name, kind, n):
    objective, solves = OBJECTIVES[kind], SOLVES.get(kind, 2)
    nets = [network(name, dtype, kernels) for dtype in (torch.float32, torch.float64)]
    sizes = nets[0].sizes
    x = random_input(n, sizes[0], device=kernels)
    label = torch.arange(n, device=kernels) % sizes[-1]
    y = torch.eye(sizes[-1], dtype=torch.float64, device=kernels)[label]
    weight = 0.1 + torch.rand(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(kernels)
    batches = [Batch(x.to(dtype), y.to(dtype), label, progress=0.25) for dtype in (torch.float32, torch.float64)]
    loss, gradient, (samples, sweeps, missed, _) = found(nets[0], objective, batches[0], weight.float())
    right, slopes = exact(nets[1], objective, batches[1], weight)
    assert (samples, sweeps, missed) == (solves * n, solves * n * 128, 0)
    scale = float(slopes.abs().max())
    torch.testing.assert_close(gradient.double(), slopes, rtol=0, atol=2e-4 * scale)
    assert abs(float(loss) - float(right)) <= 1e-4 * max(1.0, abs(float(right)))
    if kind != "class energy":
        z = nets[1].infer(batches[1].x, tol=1e-12).activations[:-1]
        torch.testing.assert_close(batches[0].activations.double(), torch.cat(z, 1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_hessians_are_those_of_the_energy(kernels, name):
    net, exact = (network(name, dtype, kernels) for dtype in (torch.float32, torch.float64))
    flat = FlatParameters(net)
    with torch.no_grad(), flat.attached():
        policy = SolvePolicy(fixed_sweeps=1, observer=DeviceCounts(4e-6, kernels))
        step = TritonKernels(net, Contrastive(), flat, 4e-6)
        x, y = (torch.ones((1, size), device=kernels) for size in (net.sizes[0], net.sizes[-1]))
        step.gradients(Batch(x, y, policy=policy), None, 1, None)
        energy = exact.energy_now()
        for h, right in zip(step._h.double(), (energy.free_hessian.dense(), energy.clamped_hessian.dense()), strict=True):
            scale = float(right.abs().max())
            torch.testing.assert_close(h[: len(right), : len(right)], right, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("kind", ["contrastive", "adversarial margin"])
def test_biases_may_be_missing(kernels, kind):
    nets = [network("two", dtype, kernels, bias=False, reconstruction_bias=False) for dtype in (torch.float32, torch.float64)]
    label = torch.tensor([0, 1, 2, 3, 0], device=kernels)
    x, y = random_input(5, 20, device=kernels), torch.eye(4, dtype=torch.float64, device=kernels)[label]
    weight = torch.full((5,), 0.2, dtype=torch.float64, device=kernels)
    _, gradient, _ = found(nets[0], OBJECTIVES[kind], Batch(x.float(), y.float(), label), weight.float())
    _, slopes = exact(nets[1], OBJECTIVES[kind], Batch(x, y, label), weight)
    torch.testing.assert_close(gradient.double(), slopes, rtol=0, atol=2e-4 * float(slopes.abs().max()))


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_rows_are_picked_as_if_they_had_been_copied(kernels, kind):
    objective = OBJECTIVES[kind]
    x, y = random_input(30, 20, device=kernels, dtype=torch.float32), torch.eye(4, device=kernels).repeat(8, 1)[:30]
    rows = torch.randperm(30, generator=torch.Generator().manual_seed(0))[:18].to(kernels)
    weight = torch.full((18,), 1 / 18, device=kernels)
    batches = Batch(x[rows], y[rows]), Batch(x, y)
    ways = [
        found(network("two", torch.float32, kernels), objective, batch, weight, rows=given)
        for batch, given in zip(batches, (None, rows), strict=True)
    ]
    assert torch.equal(ways[0][0], ways[1][0]) and torch.equal(ways[0][1], ways[1][1]) and ways[0][2] == ways[1][2]


def test_steps_on_rows_of_the_data_are_those_on_copies(kernels):
    x, y = (random_input(30, size, device=kernels, dtype=torch.float32) for size in (20, 4))
    rows = torch.arange(29, 11, -1, device=kernels)
    policy = SolvePolicy(fixed_sweeps=16, observer=DeviceCounts(4e-6, kernels))

    def slopes(x):
        net = network("two", torch.float32, kernels)
        flat = FlatParameters(net)
        step = Step(net, Contrastive(), Settings(reuse_activations=True), flat)
        data = Data(x, y, weight=torch.linspace(0.5, 1.5, 30, device=kernels))
        step.check(data)
        with flat.attached():
            step._backends = [TritonKernels(net, Contrastive(), flat, 4e-6)]
            for moment in range(2):
                loss = step.gradients(data, rows, moment, 2, 18, policy)
        return loss, flat.gradient, step.activations

    # what is not contiguous is copied
    for a, b in zip(slopes(x), slopes(x.mT.contiguous().mT), strict=True):
        assert torch.equal(a, b) and bool(a.any())


def test_too_few_sweeps_are_counted(kernels):
    net = network("two", torch.float32, kernels)
    x, y = (random_input(5, size, device=kernels, dtype=torch.float32) for size in (20, 4))
    weight = torch.full((5,), 0.2, device=kernels)
    _, _, (samples, sweeps, missed, short) = found(net, Contrastive(), Batch(x, y, None, None), weight, sweeps=1)
    assert (samples, sweeps) == (10, 10) and missed == short == 10


def test_a_start_at_the_answer_needs_no_sweeps(kernels):
    net = network("two", torch.float32, kernels)
    x, y = (random_input(5, size, device=kernels, dtype=torch.float32) for size in (20, 4))
    weight = torch.full((5,), 0.2, device=kernels)
    batch = Batch(x, y, None, None)
    found(net, FreeEnergy(), batch, weight)
    again = Batch(x, y, None, batch.activations.clone())
    _, _, (_, _, missed, _) = found(net, FreeEnergy(), again, weight, sweeps=2)
    assert missed == 0
    torch.testing.assert_close(again.activations, batch.activations, rtol=0, atol=1e-5)


def test_an_attack_begins_from_the_solves_at_the_inputs(kernels):
    net, label = network("two", torch.float32, kernels), torch.arange(12, device=kernels) % 4
    x, y = random_input(12, 20, device=kernels, dtype=torch.float32), torch.eye(4, device=kernels)[label]
    weight = torch.full((12,), 0.2, device=kernels)
    batch = Batch(x, y)
    found(net, Margin(), batch, weight)
    plain, still, far = (
        found(net, Margin(adversarial_eps=eps), Batch(x, y, start=batch.activations.clone()), weight, sweeps=16)[2][2]
        for eps in (0.0, 1e-30, 5.0)
    )
    # too few sweeps for the adjoint; an attack of no size solves the same one twice, and the second solve goes on
    assert 0 < plain <= still < 1.5 * plain < far


def test_an_attack_has_a_direction_where_the_loss_vanishes(kernels):
    nets = [network("two", dtype, kernels) for dtype in (torch.float32, torch.float64)]
    x = random_input(8, 20, device=kernels)
    label = nets[1](x).detach().argmax(1)
    y, weight = torch.eye(4, dtype=torch.float64, device=kernels)[label], torch.ones(8, dtype=torch.float64, device=kernels)
    batches = [Batch(x.to(dtype), y.to(dtype), label) for dtype in (torch.float32, torch.float64)]
    # leads of hundreds of temperatures, whose exponentials are zero in float32
    assert float(found(nets[0], Margin(0.0, 1e-4), batches[0], weight.float())[0]) == 0
    attack = Margin(0.0, 1e-4, 8.0)
    loss, right = found(nets[0], attack, batches[0], weight.float())[0], exact(nets[1], attack, batches[1], weight)[0]
    assert float(right) > 0.1 and abs(float(loss) - float(right)) <= 1e-3 * float(right)


def test_batches_outside_of_a_graph_have_labels(kernels):
    x, label = random_input(30, 20, device=kernels, dtype=torch.float32), torch.arange(30, device=kernels) % 4
    data, rows = Data(x, torch.eye(4, device=kernels)[label], label), torch.arange(29, 11, -1, device=kernels)
    net = network("two", torch.float32, kernels)
    flat = FlatParameters(net)
    step = Step(net, Margin(), Settings(), flat)
    with flat.attached():
        step._backends = [kind(net, Margin(), flat, 1e-5) for kind in (TritonKernels, Autograd)]
        loss = step.gradients(data, rows, 0, 1, 18, SolvePolicy())
        right = Margin()(net, Batch(x[rows], data.target[rows], label[rows])).mean().detach()
    assert step.backend == "autograd"
    torch.testing.assert_close(loss, right)


def test_what_the_kernels_do_not_take_is_left_to_others(kernels):
    small = network("two", torch.float32, kernels)
    assert not TritonKernels.applies(small, SemiSupervised(), Settings())
    assert not TritonKernels.applies(network("two", torch.float64, kernels), Contrastive(), Settings())
    assert not TritonKernels.applies(network("two", torch.float32, kernels, output_constraint="box"), Contrastive(), Settings())
    assert not TritonKernels.applies(
        random_network((4, 100, 40, 3), dtype=torch.float32, device=kernels), Contrastive(), Settings()
    )
    assert not TritonKernels.applies(
        random_network((4, 20, 100), dtype=torch.float32, device=kernels), Contrastive(), Settings()
    )
