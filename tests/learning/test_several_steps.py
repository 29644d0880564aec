"""Several steps in one compiled call against steps one by one: the same bits, whatever the optimiser and the objective."""

from __future__ import annotations

import pytest
import torch

import lrrn.learning.trainer
from lrrn.learning import ClassEnergy, Contrastive, CrossEntropy, Data, FreeEnergy, Margin, Settings, SquaredError, Trainer
from lrrn.learning.step import Step
from lrrn.learning.steps.compiled_cpu import CompiledCpu
from lrrn.learning.steps.prediction import CompiledPrediction
from small_training import blobs, small_net, weights
from varied_networks import NETWORKS, network

OBJECTIVES = {
    "contrastive": Contrastive(),
    "free energy": FreeEnergy(),
    "class energy": ClassEnergy(),
    "squared error": SquaredError(),
    "cross-entropy": CrossEntropy(),
    "margin": Margin((0.1, 0.4), (1.0, 0.3)),
    "adversarial": Margin(0.2, 0.5, (0.0, 0.3)),
}
OPTIMIZERS = {
    "sgd": dict(optimizer="sgd", learning_rate=0.1, weight_decay=0.01),
    "adam": dict(optimizer="adam", learning_rate=0.02, schedule="cosine", reuse_activations=True),
    "adamw": dict(optimizer="adamw", learning_rate=0.02, schedule="one_cycle", decoupled_weight_decay=0.1),
}


def run(monkeypatch, burst, objective, settings, data=None, net=None, **options):
    """Train; return weights, losses and sweeps. Without a burst, step by step."""
    net = net or small_net()
    with monkeypatch.context() as patch:
        patch.setattr(lrrn.learning.trainer, "BURST", burst)
        if burst == 0:
            patch.setattr(Step, "takes_several", lambda *given: False)
        history = Trainer(net, objective, settings, **options).fit(data or blobs(n=64))
    return weights(net), [record["loss"] for record in history], [record["sweeps"] for record in history]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_bits_are_those_of_single_steps(objective, optimizer, monkeypatch):
    """Sixty-four samples in batches of ten: the last batch of an epoch is smaller."""
    settings = Settings(epochs=3, **OPTIMIZERS[optimizer])
    one_by_one, losses, sweeps = run(monkeypatch, 0, OBJECTIVES[objective], settings)
    assert float((one_by_one - weights(small_net())).norm()) > 0.01
    found = [run(monkeypatch, burst, OBJECTIVES[objective], settings) for burst in (1, 3, 32)]
    for several, curve, counts in found:
        assert torch.equal(several, one_by_one)
        assert curve == pytest.approx(losses, rel=1e-6, abs=1e-7) and counts == sweeps
        assert curve == found[0][1]


@pytest.mark.parametrize("objective", ["contrastive", "squared error"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_structure_of_networks(name, objective, monkeypatch):
    results = []
    for burst in (0, 32):
        net = network(name)
        x = torch.rand((40, net.sizes[0]), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        target = torch.rand((40, net.sizes[-1]), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        settings = Settings(optimizer="adam", learning_rate=0.001, epochs=2)
        results.append(run(monkeypatch, burst, OBJECTIVES[objective], settings, Data(x, target), net))
    assert torch.equal(results[0][0], results[1][0]) and results[0][2] == results[1][2]


@pytest.mark.parametrize("objective", ["contrastive", "margin"])
def test_sample_weights_and_frozen_parameters(objective, monkeypatch):
    data = blobs()
    data = Data(data.x, data.target, data.label, torch.rand(60, generator=torch.Generator().manual_seed(0)))
    results = []
    for burst in (0, 32):
        net = small_net()
        net.W[1].requires_grad_(False)
        settings = Settings(optimizer="adamw", learning_rate=0.02, epochs=2, decoupled_weight_decay=0.1)
        results.append(run(monkeypatch, burst, OBJECTIVES[objective], settings, data, net)[0])
        assert torch.equal(net.W[1], small_net().W[1])
    assert torch.equal(*results)


@pytest.mark.parametrize("objective", ["contrastive", "squared error"])
def test_a_slow_batch_is_left_to_the_general_way(objective, monkeypatch):
    """Large weights need more sweeps than compiled steps allow themselves."""
    results = []
    for burst in (0, 32):
        net = small_net(dtype=torch.float64)
        with torch.no_grad():
            net.W[1].mul_(30)
        settings = Settings(batch_size=10, epochs=2, learning_rate=1e-4, tol=1e-10)
        results.append(run(monkeypatch, burst, OBJECTIVES[objective], settings, blobs(dtype=torch.float64), net)[:2])
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == pytest.approx(results[1][1])


@pytest.mark.parametrize("backend", [CompiledCpu, CompiledPrediction])
def test_the_trainer_takes_several_steps_where_it_can(backend, monkeypatch):
    calls, real = [], backend.several

    def several(*given):
        calls.append(real(*given))
        return calls[-1]

    monkeypatch.setattr(backend, "several", several)
    objective = Contrastive() if backend is CompiledCpu else SquaredError()
    Trainer(small_net(), objective, Settings(epochs=2)).fit(blobs())
    assert calls == [6, 6]
    calls.clear()
    Trainer(small_net(), objective, Settings(epochs=1, max_weight_norm=5.0)).fit(blobs())
    assert not calls


def test_a_run_stopped_between_calls_resumes_to_the_same_bits(tmp_path, monkeypatch):
    settings, path = Settings(epochs=3, optimizer="adam", learning_rate=0.01), tmp_path / "run.ckpt"
    whole, losses, _ = run(monkeypatch, 32, Contrastive(), settings)
    net = small_net()
    trainer = Trainer(net, Contrastive(), settings, checkpoint=path)
    monkeypatch.setattr(lrrn.learning.trainer, "BURST", 4)
    real = trainer._step.several

    def several(*given):
        trainer.interrupt()
        return real(*given)

    trainer._step.several = several
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(blobs(n=64))
    assert trainer.position.step == 4
    resumed = small_net(seed=5)
    history = Trainer(resumed, Contrastive(), settings, checkpoint=path).fit(blobs(n=64), resume=True)
    assert torch.equal(weights(resumed), whole) and [record["loss"] for record in history] == losses
