"""Training within a budget of time: where it ends by a clock of our own, what it keeps, and how it goes on."""

from __future__ import annotations

import itertools
import json
import math
import warnings

import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

import lrrn.learning.trainer
from lrrn.learning import Contrastive, Settings, Trainer, budget
from lrrn.learning.data_parallel import DataParallel
from lrrn.learning.flat import FlatParameters
from small_estimators import blobs as table
from small_estimators import classifier, energy_model, regressor
from small_estimators import weights as weights_of
from small_training import blobs, small_net, weights


@pytest.fixture
def second_by_second(monkeypatch):
    """A clock that is one second later at each look: at the beginning of a fit, and after every step."""
    monkeypatch.setattr(budget, "monotonic", itertools.count().__next__)
    monkeypatch.setattr(lrrn.learning.trainer, "BURST", 1)


@pytest.mark.parametrize(("seconds", "steps"), [(1e-9, 1), (0.5, 1), (3.5, 4), (5.5, 6), (7.5, 8)])
def test_training_ends_with_the_first_step_beyond_the_budget(second_by_second, seconds, steps):
    """Sixty samples in batches of ten: six steps an epoch."""
    trainer = Trainer(small_net(), Contrastive(), Settings(optimizer="adam", epochs=5, max_seconds=seconds))
    epoch, samples = (steps - 1) // 6 + 1, 10 * ((steps - 1) % 6 + 1)
    message = f"max_seconds={seconds:g} ended training in epoch {epoch} of 5, after {samples} of its 60 samples"
    with pytest.warns(ConvergenceWarning, match=message):
        history = trainer.fit(blobs())
    (state,) = trainer.optimizer.state.values()
    assert int(state["step"]) == steps
    assert [record.get("stopped_by") for record in history] == [None] * (epoch - 1) + ["max_seconds"]
    assert all(math.isfinite(record["loss"]) for record in history)


def test_where_a_call_takes_several_steps_it_ends_after_them(monkeypatch):
    """A look at the clock after four steps, and one after the last two of each epoch."""
    monkeypatch.setattr(budget, "monotonic", itertools.count().__next__)
    monkeypatch.setattr(lrrn.learning.trainer, "BURST", 4)
    with pytest.warns(ConvergenceWarning, match="in epoch 2 of 5, after 40 of its 60 samples"):
        Trainer(small_net(), Contrastive(), Settings(epochs=5, max_seconds=2.5)).fit(blobs())


@pytest.mark.parametrize("seconds", [None, math.inf, 30.5])
def test_a_budget_that_suffices_changes_nothing(second_by_second, seconds):
    """Thirty steps in five epochs; the last ends at second thirty."""
    net, free = small_net(), small_net()
    with warnings.catch_warnings(action="error"):
        history = Trainer(net, Contrastive(), Settings(epochs=5, max_seconds=seconds)).fit(blobs())
        Trainer(free, Contrastive(), Settings(epochs=5)).fit(blobs())
    assert torch.equal(weights(net), weights(free)) and not any("stopped_by" in record for record in history)


def test_the_end_of_the_last_epoch_is_no_end_of_time(second_by_second):
    with warnings.catch_warnings(action="error"):
        history = Trainer(small_net(), Contrastive(), Settings(epochs=2, max_seconds=11.5)).fit(blobs())
    assert len(history) == 2 and "stopped_by" not in history[-1]


@pytest.mark.parametrize("seconds", [3.5, 5.5, 8.5])
def test_what_a_budget_ended_resumes_to_the_same_bits(second_by_second, seconds, tmp_path):
    whole, net, log = small_net(), small_net(), tmp_path / "log.jsonl"
    expected = Trainer(whole, Contrastive(), Settings(epochs=5)).fit(blobs())
    options = dict(checkpoint=tmp_path / "run.ckpt", log=log)
    with pytest.warns(ConvergenceWarning, match="max_seconds"):
        Trainer(net, Contrastive(), Settings(epochs=5, max_seconds=seconds), **options).fit(blobs())
    assert json.loads(log.read_text().splitlines()[-1])["stopped_by"] == "max_seconds"
    again = small_net(seed=9)
    history = Trainer(again, Contrastive(), Settings(epochs=5), **options).fit(blobs(), resume=True)
    assert torch.equal(weights(again), weights(whole))
    assert [record["loss"] for record in history] == [record["loss"] for record in expected]
    assert (
        [record["epoch"] for record in history]
        == [1, 2, 3, 4, 5]
        == [json.loads(line)["epoch"] for line in log.read_text().splitlines()]
    )


def test_early_stopping_keeps_the_best_weights_when_the_time_is_over(second_by_second):
    scores, states, net = iter([0.1, 0.9, 0.5]), [], small_net()

    def validate(net):
        states.append(weights(net).clone())
        return next(scores)

    with pytest.warns(ConvergenceWarning, match="epoch 3 of 20"):
        history = Trainer(net, Contrastive(), Settings(epochs=20, patience=9, max_seconds=13.5)).fit(blobs(), validate)
    assert [record["validation_score"] for record in history] == [0.1, 0.9, 0.5]
    assert torch.equal(weights(net), states[1])


def test_rank_zero_decides_for_all():
    """A rank whose clock is ahead does not end training; one whose main rank says so does."""

    class Two:
        connected = True

        def __init__(self, is_main, other):
            self.is_main, self.other = is_main, other

        def add_up(self, buffer):
            buffer[-4:] += torch.tensor(self.other)

    for is_main, other, over in ((False, (1.0, 0.0, 0.0, 0.0), False), (False, (1.0, 0.0, 0.0, 1.0), True)):
        parallel = DataParallel(Two(is_main, other), FlatParameters(small_net()))
        assert parallel.add_gradients(2.0, False, True, True) == (3.0, False, False, over)


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_the_estimators_have_a_budget(second_by_second, make):
    X, y = table()
    with pytest.warns(ConvergenceWarning, match=r"max_seconds=7.5 ended training in epoch 2 of 6"):
        model = make(max_seconds=7.5).fit(X, y)
    assert model.n_iter_ == 2 and model.history_[-1]["stopped_by"] == "max_seconds"
    assert model.predict(X).shape == (90,)


@pytest.mark.parametrize("make", [classifier, regressor])
def test_what_eps_compares_takes_from_the_same_budget(second_by_second, make):
    """The first candidate spends it all: those after it, and the network if it has hidden units, take one step each."""
    X, y = table()
    with pytest.warns(ConvergenceWarning, match="max_seconds"):
        model = make(hidden_sizes=None, objective="squared_error" if make is regressor else None, eps=0.1, max_seconds=7.5)
        model.fit(X, y)
    assert budget.monotonic() < 21  # 23 looks at the clock and more if every candidate had 7.5 seconds
    assert model.predict(X).shape == (90,)
    with pytest.raises(ValueError, match="max_seconds must be positive"):
        make(hidden_sizes=None, objective=model.objective, eps=0.1, max_seconds="7.5").fit(X, y)


def test_pretraining_takes_from_the_same_budget(second_by_second):
    """Six steps an epoch: two looks at the clock before the first, three more before training."""
    X, y = table()
    with pytest.warns(ConvergenceWarning, match="max_seconds"):
        model = classifier(max_seconds=20, pretrain_epochs=2).fit(X, y)
    stages = [record["stage"] for record in model.history_]
    assert stages.count("pretrain") == 2 and 1 <= model.n_iter_ <= 2
    with pytest.warns(ConvergenceWarning, match="max_seconds"):
        spent = classifier(max_seconds=2, pretrain_epochs=2).fit(X, y)
    assert [record["stage"] for record in spent.history_] == ["pretrain", "train"]
    assert torch.isfinite(weights_of(spent)).all()
