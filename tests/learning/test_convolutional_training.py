"""Training of networks with convolutions: gradients of every objective, control of the condition number, augmentation."""

from __future__ import annotations

import math

import pytest
import torch

import lrrn
from convolutions import dense_twin, images, network
from lrrn.learning import Data, Settings, Trainer
from lrrn.learning.augment import shifted
from lrrn.learning.losses import CrossEntropy, Margin, SquaredError
from lrrn.learning.monitor import ConditionLimit, condition_number
from lrrn.learning.objectives import Batch, ClassEnergy, Contrastive, FreeEnergy, SemiSupervised
from lrrn.network import SolvePolicy

OBJECTIVES = {
    "contrastive": Contrastive(),
    "free energy": FreeEnergy(),
    "class energy": ClassEnergy(),
    "semi-supervised": SemiSupervised(),
    "margin": Margin(adversarial_eps=0.1),
    "cross-entropy": CrossEntropy(),
    "squared error": SquaredError(),
}


def batch_of(net, n=6):
    label = torch.arange(n) % net.sizes[-1]
    target = torch.nn.functional.one_hot(label, net.sizes[-1]).double()
    return Batch(images(net, n).flatten(1), target, label, policy=SolvePolicy(tol=1e-11))


@pytest.mark.parametrize("unfolded", [False, True], ids=["products", "matrices"])
@pytest.mark.parametrize("name", ["two", "then dense"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_and_gradients_are_those_of_the_dense_twin(objective, name, unfolded, monkeypatch):
    net = network(name, monkeypatch, unfolded)
    twin, loss = dense_twin(net), OBJECTIVES[objective]
    values = [loss(each, batch_of(each if each.image_shape else net)) for each in (net, twin)]
    assert torch.allclose(*values, atol=1e-8)
    mine = torch.autograd.grad(values[0].sum(), [net.W[0], net.b[0]], allow_unused=True)
    theirs = torch.autograd.grad(values[1].sum(), [twin.W[0], twin.b[0]], allow_unused=True)
    weight = net.W[0].detach().requires_grad_()
    (expected,) = torch.autograd.grad((net.layers[0].operator(weight).dense() * theirs[0]).sum(), weight)
    assert torch.allclose(mine[0], expected, atol=1e-5)
    assert torch.allclose(mine[1], theirs[1].view(len(net.b[0]), -1).sum(1), atol=1e-5)


def test_training_learns_and_repeats_its_bits(monkeypatch):
    x, y = lrrn.datasets.load("digits", split="train")
    x, y = torch.as_tensor(x[:300]), torch.as_tensor(y[:300])
    target = torch.nn.functional.one_hot(y, 10).float()
    losses, weights = [], []
    for _ in range(2):
        net = lrrn.LRRN(((1, 8, 8), lrrn.Conv(8, 3), 10), generator=torch.Generator().manual_seed(0))
        history = Trainer(net, Contrastive(), Settings("adam", 0.01, batch_size=30, epochs=3)).fit(Data(x, target, y))
        losses.append([record["loss"] for record in history])
        weights.append(net.W[0].detach().clone())
        assert history[-1]["backend"] == "autograd" and math.isfinite(history[-1]["condition_number"])
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert losses[0] == losses[1] and torch.equal(*weights)


@pytest.mark.parametrize("sizes", [((1, 8, 8), lrrn.Conv(6, 3), 4), (12, 20, 4), (12, 20, 8, 4)], ids=str)
def test_the_condition_number_is_held_below_a_bound(sizes):
    net = lrrn.LRRN(sizes, gamma=0.5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for w in net.W:
            w.mul_(30)
    limit = ConditionLimit(net, 20.0)
    for _ in range(30):
        limit.enforce()
    assert condition_number(net) <= 20 * 1.05
    before = [w.clone() for w in net.W]
    ConditionLimit(net, 1e6).enforce()
    assert all(torch.equal(a, b) for a, b in zip(before, net.W, strict=True))


def test_a_trained_network_keeps_to_max_condition():
    x = torch.rand(200, 12, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0.5).long()
    net = lrrn.LRRN((12, 30, 2), generator=torch.Generator().manual_seed(0))
    settings = Settings("adam", 0.05, batch_size=20, epochs=4, max_condition=3.0)
    history = Trainer(net, Margin(margin=2.0), settings).fit(Data(x, torch.nn.functional.one_hot(y, 2).float(), y))
    free = Settings("adam", 0.05, batch_size=20, epochs=4)
    other = lrrn.LRRN((12, 30, 2), generator=torch.Generator().manual_seed(0))
    unlimited = Trainer(other, Margin(margin=2.0), free).fit(Data(x, torch.nn.functional.one_hot(y, 2).float(), y))
    assert history[-1]["condition_number"] <= 3.2 < unlimited[-1]["condition_number"]
    with pytest.raises(ValueError, match="max_condition must be above 1"):
        Settings(max_condition=1.0)


def test_a_bound_that_only_weights_of_zero_would_hold_is_refused():
    net = lrrn.LRRN(((1, 8, 8), lrrn.Conv(4, 3), 6, 3), gamma=0.125)
    x, y = torch.rand(20, 64), torch.arange(20) % 3
    with pytest.raises(
        ValueError, match=r"max_condition=9 cannot be held: with gamma=0\.125.* at least 10 whatever the weights"
    ):
        Trainer(net, Contrastive(), Settings(max_condition=9.0)).fit(Data(x, torch.nn.functional.one_hot(y, 3).float(), y))
    assert all(w.detach().any() for w in net.W)


def test_all_channels_of_an_image_are_shifted_together():
    one = torch.rand(50, 1, 4, 6, generator=torch.Generator().manual_seed(0))
    colour = torch.cat([one, 2 * one, 3 * one], 1)
    rows = torch.arange(50)
    alone = shifted(one.flatten(1), rows, 3, 0, 1, (1, 4, 6)).view(one.shape)
    moved = shifted(colour.flatten(1), rows, 3, 0, 1, (3, 4, 6)).view(colour.shape)
    assert torch.equal(moved, torch.cat([alone, 2 * alone, 3 * alone], 1)) and not torch.equal(moved, colour)
    # every image is one of the nine shifts of itself
    padded = torch.nn.functional.pad(one, (1, 1, 1, 1))
    shifts = torch.stack([padded[:, :, i : i + 4, j : j + 6] for i in range(3) for j in range(3)])
    assert ((shifts == alone).flatten(2).all(2).sum(0) >= 1).all()
