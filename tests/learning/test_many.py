"""Networks trained side by side: the bits of training alone, failures and interrupts that leave the others be."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import pytest
import torch

import convolutions
from lrrn.learning import Contrastive, CrossEntropy, DivergenceError, Margin, Settings, Trainer, fit_many
from small_training import blobs, small_net, weights

PLAIN = Settings(epochs=4, batch_size=7, learning_rate=0.1)


def trained_alone(seed: int, objective, settings, data) -> torch.Tensor:
    net = small_net(seed)
    Trainer(net, objective, settings).fit(data)
    return weights(net)


@pytest.mark.parametrize("at_once", [None, 1, 2, 5])
def test_each_ends_as_if_trained_alone(at_once):
    data = blobs()
    cases = [(seed, Contrastive(), replace(PLAIN, seed=seed)) for seed in range(3)]
    cases += [(3, CrossEntropy(), replace(PLAIN, optimizer="adam", learning_rate=1e-3)), (4, Margin(), PLAIN)]
    nets = [small_net(seed) for seed, _, _ in cases]
    trainers = [Trainer(net, objective, settings) for net, (_, objective, settings) in zip(nets, cases, strict=True)]
    histories = fit_many(trainers, data, at_once=at_once)
    for net, case, history, trainer in zip(nets, cases, histories, trainers, strict=True):
        assert torch.equal(weights(net), trained_alone(*case, data))
        assert history is trainer.history and len(history) == 4


@pytest.mark.parametrize("unfolded", [False, True], ids=["products", "matrices"])
def test_convolutions_end_as_if_trained_alone(unfolded, monkeypatch):
    data = blobs(n=40, d=64, k=4)
    cases = [(Contrastive(), "sgd", 0.05), (Margin(adversarial_eps=0.1), "adam", 1e-2)]

    def trainers() -> list[Trainer]:
        return [
            Trainer(
                convolutions.network("pooled", monkeypatch, unfolded, torch.float32, scale=1.0),
                objective,
                replace(PLAIN, optimizer=optimizer, learning_rate=rate, max_condition=3.0, seed=seed),
            )
            for seed, (objective, optimizer, rate) in enumerate(cases)
        ]

    together, alone = trainers(), trainers()
    fit_many(together, data, at_once=2)
    for one, other in zip(alone, together, strict=True):
        start = weights(one.net)
        one.fit(data)
        assert torch.equal(weights(other.net), weights(one.net)) and not torch.equal(weights(one.net), start)


def test_each_may_have_data_and_a_score_of_its_own():
    parts = [blobs(seed=seed) for seed in range(2)]
    nets = [small_net(seed) for seed in range(2)]
    histories = fit_many(
        [Trainer(net, Contrastive(), PLAIN) for net in nets], parts, lambda net: float(net.W[0].detach().sum())
    )
    for seed, (net, history) in enumerate(zip(nets, histories, strict=True)):
        assert torch.equal(weights(net), trained_alone(seed, Contrastive(), PLAIN, parts[seed]))
        assert history[-1]["validation_score"] == pytest.approx(float(net.W[0].detach().sum()))


def test_one_that_fails_does_not_stop_the_others():
    data, nets = blobs(), [small_net(seed) for seed in range(3)]
    wild = replace(PLAIN, learning_rate=1e6)
    trainers = [Trainer(net, Contrastive(), wild if k < 2 else PLAIN) for k, net in enumerate(nets)]
    with pytest.raises(DivergenceError) as raised:
        fit_many(trainers, data)
    assert "2 of 3 trainings failed" in raised.value.__notes__[0]
    assert torch.equal(weights(nets[2]), trained_alone(2, Contrastive(), PLAIN, data))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda net: fit_many([Trainer(net, Contrastive(), PLAIN)], [blobs(), blobs()]), "each of 1 trainers; got 2 parts"),
        (lambda net: fit_many([Trainer(net, Contrastive(), PLAIN)] * 2, blobs()), "2 trainers share 1"),
        (lambda net: fit_many([Trainer(net, Contrastive(), PLAIN)], blobs(), at_once=0), "at_once must be at least 1; got 0"),
    ],
)
def test_what_cannot_be_trained_is_told(make, message):
    with pytest.raises(ValueError, match=message):
        make(small_net())
    assert fit_many([], blobs()) == []


@pytest.fixture
def interruptible():
    """Let SIGINT interrupt, whatever the test runner makes of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_stops_all_and_they_resume(tmp_path, interruptible):
    data, settings = blobs(), replace(PLAIN, epochs=30)
    begun = threading.Barrier(2)

    def trainers(interrupting: bool) -> list[Trainer]:
        def once(trainer, record):
            if interrupting and record["epoch"] == 3:
                begun.wait(60)
                if trainer is made[0]:
                    os.kill(os.getpid(), signal.SIGINT)
                # the main thread tells both before they go on
                assert stopped.wait(60)

        stopped = threading.Event()

        made = [
            Trainer(small_net(seed), Contrastive(), settings, checkpoint=tmp_path / f"{seed}.ckpt", callbacks=[once])
            for seed in range(2)
        ]
        for trainer in made:
            plain = trainer.interrupt
            trainer.interrupt = lambda plain=plain: (plain(), all(t._interrupted for t in made) and stopped.set())
        return made

    with pytest.raises(KeyboardInterrupt):
        fit_many(trainers(True), data, at_once=2)
    again = trainers(False)
    fit_many(again, data, resume=True)
    for seed, trainer in enumerate(again):
        assert trainer.history[0]["epoch"] == 1 and len(trainer.history) == 30
        assert torch.equal(weights(trainer.net), trained_alone(seed, Contrastive(), settings, data))
