"""Gradients of losses of the prediction of wide layers on the CPU, which are solved on the dual.

Oracles: autograd with solves to 1e-12 in float64, and the tolerances that a step reports.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lrrn.learning.flat import FlatParameters
from lrrn.learning.losses import CrossEntropy, Margin, SquaredError
from lrrn.learning.objectives import Batch
from lrrn.learning.settings import Settings
from lrrn.learning.steps import direct_prediction
from lrrn.learning.steps.autograd import Autograd
from lrrn.learning.steps.direct_prediction import DirectPrediction
from lrrn.network.policy import SolvePolicy
from lrrn.solvers import dual
from oracles import random_input, random_network

LOSSES = [Margin(0.7, 0.4), Margin(0.7, 0.4, 0.3), CrossEntropy(), SquaredError()]


def gradients(backend, net, objective, batch, weight):
    flat = FlatParameters(net)
    with flat.attached():
        loss = backend(net, objective, flat, 1e-5).gradients(batch, weight, 2 * len(batch.x), None)
        return float(loss), flat.gradient.clone()


def batch_of(net, n, dtype, **policy) -> Batch:
    label = torch.arange(n) % net.sizes[-1]
    x, target = random_input(n, net.sizes[0], dtype=dtype), torch.eye(net.sizes[-1], dtype=dtype)[label]
    return Batch(x, target, label, policy=SolvePolicy(**policy))


@pytest.mark.parametrize("objective", LOSSES, ids=["margin", "adversarial", "cross entropy", "squared error"])
def test_derivatives_of_wide_layers_in_float32_are_those_of_exact_solves(monkeypatch, objective):
    monkeypatch.setattr(dual, "UNITS_FROM", 0)
    monkeypatch.setattr(dual, "SAMPLES_FROM", 0)
    exact = random_network((20, 150, 4), beta=(1.0, 0.0), scale=2.0)
    net = random_network((20, 150, 4), beta=(1.0, 0.0), scale=2.0, dtype=torch.float32)
    with torch.no_grad():
        for p, rounded in zip(exact.parameters(), net.parameters(), strict=True):
            p.copy_(rounded)
    seen: list[tuple[str, ...]] = []
    policy = dict(tol=1e-5, observer=lambda solved, *_: seen.append(solved.solvers))
    loss, found = gradients(DirectPrediction, net, objective, batch_of(net, 80, torch.float32, **policy), None)
    assert set(seen) == {("accelerated",)}
    right_loss, right = gradients(Autograd, exact, objective, batch_of(net, 80, torch.float64, tol=1e-12), None)
    assert loss == pytest.approx(right_loss, rel=1e-3)
    # the direction of an attack is exact to some 1e-3 of its length
    assert float((found.double() - right).norm()) <= 1e-2 * float(right.norm())


def test_solves_before_an_attack_stop_earlier_only_on_the_dual(monkeypatch):
    net = random_network((20, 150, 4), beta=(1.0, 0.0), scale=2.0, dtype=torch.float32)
    seen: list[tuple[str, float]] = []
    given = batch_of(net, 80, torch.float32)
    policy = SolvePolicy(tol=1e-3, observer=lambda *of: seen.append((of[3], of[2])))

    def tolerances():
        seen.clear()
        gradients(DirectPrediction, net, Margin(0.7, 0.4, 0.3), replace(given, policy=policy), None)
        return [(phase, pytest.approx(tol)) for phase, tol in seen]

    last = [("forward pass", 1e-3), ("adjoint", 1e-3)]
    assert tolerances() == [("forward pass", 1e-3), ("adjoint", 0.03), *last]
    monkeypatch.setattr(dual, "UNITS_FROM", 0)
    assert tolerances() == [("forward pass", 0.03), ("adjoint", 0.03), *last]


def test_the_last_adjoint_starts_from_that_of_the_attack(monkeypatch):
    monkeypatch.setattr(dual, "UNITS_FROM", 0)
    net = random_network((20, 150, 4), beta=(1.0, 0.0), scale=2.0, dtype=torch.float32)
    given, iterations = batch_of(net, 80, torch.float32), []
    policy = SolvePolicy(tol=1e-3, observer=lambda solved, *_: iterations.append(float(solved.n_sweeps.double().mean())))

    def spent(start):
        iterations.clear()
        asked = direct_prediction.Asked
        with monkeypatch.context() as patch:
            patch.setattr(direct_prediction, "Asked", lambda *of: asked(*of[:3], of[3] if start else None))
            _, found = gradients(DirectPrediction, net, Margin(2.0, 0.4, 0.05), replace(given, policy=policy), None)
        return iterations[-1], found

    (warm, found), (cold, right) = spent(True), spent(False)
    assert warm <= 0.8 * cold
    assert float((found - right).norm()) <= 5e-3 * float(right.norm())


def test_it_takes_dense_networks_with_hidden_units():
    assert DirectPrediction.applies(random_network((9, 8, 4), beta=(1.0, 0.0)), CrossEntropy(), Settings())
    alone = random_network((9, 4), beta=(0.0,), output_constraint="free")
    assert not DirectPrediction.applies(alone, CrossEntropy(), Settings())
