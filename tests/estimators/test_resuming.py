"""Fits that are stopped: resumed to the same bits, and told of by logs and callbacks."""

from __future__ import annotations

import json

import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from lrrn.learning import checkpoint
from small_estimators import blobs, classifier, curve, energy_model, regressor, weights


class InterruptAt:
    """A callback that presses Ctrl-C after an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, trainer, record) -> None:
        if record["epoch"] == self.epoch:
            raise KeyboardInterrupt


def data_for(make):
    return blobs() if make is not regressor else curve()


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
@pytest.mark.parametrize("epoch", [1, 3])
def test_an_interrupted_fit_resumes_to_the_same_bits(make, epoch, tmp_path):
    X, y = data_for(make)
    whole = make(standardize=True).fit(X, y)
    options = dict(standardize=True, checkpoint=tmp_path / "run.ckpt", resume=True)
    with pytest.raises(KeyboardInterrupt):
        make(**options, callbacks=(InterruptAt(epoch),)).fit(X, y)
    epochs = []
    resumed = make(**options, callbacks=(lambda trainer, record: epochs.append(record["epoch"]),)).fit(X, y)
    assert torch.equal(weights(resumed), weights(whole)) and resumed.loss_curve_ == whole.loss_curve_
    # the checkpoint of an epoch is written after its callbacks
    assert epochs == list(range(epoch, 7))
    again = make(**options, callbacks=(InterruptAt(1),)).fit(X, y)
    assert torch.equal(weights(again), weights(whole)) and again.n_iter_ == 6


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_pretrained_fit_resumes_to_the_same_bits(epoch, tmp_path):
    X, y = blobs()
    whole = classifier(pretrain_epochs=3).fit(X, y)
    options = dict(pretrain_epochs=3, checkpoint=tmp_path / "run.ckpt", resume=True)
    with pytest.raises(KeyboardInterrupt):
        classifier(**options, callbacks=(InterruptAt(epoch),)).fit(X, y)
    resumed = classifier(**options).fit(X, y)
    assert torch.equal(weights(resumed), weights(whole)) and resumed.loss_curve_ == whole.loss_curve_


@pytest.mark.parametrize("early_stopping", [False, True])
def test_a_fit_stopped_after_any_checkpoint_resumes_to_the_same_bits(early_stopping, tmp_path, monkeypatch):
    """Three epochs of pretraining and three of training, interrupted after each of their checkpoints, in turn."""
    X, y = blobs()
    options = dict(pretrain_epochs=3, epochs=3, early_stopping=early_stopping)
    whole = classifier(**options).fit(X, y)
    path, write, stages = tmp_path / "run.ckpt", checkpoint.save, []

    def write_and_stop(place, settings, position, *rest):
        write(place, settings, position, *rest)
        stages.append(position.stage)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", write_and_stop)
        for _ in range(6):
            with pytest.raises(KeyboardInterrupt):
                classifier(**options, checkpoint=path, resume=True).fit(X, y)
    assert stages == ["pretrain"] * 3 + ["train"] * 3
    resumed = classifier(**options, checkpoint=path, resume=True).fit(X, y)
    assert torch.equal(weights(resumed), weights(whole)) and resumed.loss_curve_ == whole.loss_curve_


def test_pretraining_has_its_own_stage():
    X, y = blobs()
    model = classifier(pretrain_epochs=2, pretrain_learning_rate=0.01).fit(X, y)
    assert [record["stage"] for record in model.history_] == ["pretrain"] * 2 + ["train"] * 6
    assert model.n_iter_ == len(model.loss_curve_) == 6
    assert model.history_[1]["loss"] < model.history_[0]["loss"] and model.history_[0]["learning_rate"] <= 0.01
    plain = classifier().fit(X, y)
    assert {record["stage"] for record in plain.history_} == {"train"} and not torch.equal(weights(plain), weights(model))


def test_a_resumed_fit_remembers_its_pretraining(tmp_path):
    X, y = blobs()
    options = dict(pretrain_epochs=2, checkpoint=tmp_path / "run.ckpt", resume=True)
    with pytest.raises(KeyboardInterrupt):
        classifier(**options, callbacks=(InterruptAt(3),)).fit(X, y)
    stages = [record["stage"] for record in classifier(**options).fit(X, y).history_]
    assert stages == ["pretrain"] * 2 + ["train"] * 6


@pytest.mark.parametrize("schedule", [None, "cosine", "one_cycle"])
def test_another_pretraining_is_another_run(schedule, tmp_path):
    X, y = blobs()
    options = dict(schedule=schedule, checkpoint=tmp_path / "run.ckpt", resume=True, pretrain_learning_rate=0.004)
    with pytest.raises(KeyboardInterrupt):
        classifier(**options, pretrain_epochs=2, callbacks=(InterruptAt(3),)).fit(X, y)
    assert checkpoint.peek(tmp_path / "run.ckpt")[0] == "train"
    for changed in (0, 1, 3):
        with pytest.raises(ValueError, match=rf"run.ckpt belongs to another run \(pretrain_epochs: 2 there, {changed} here\)"):
            classifier(**options, pretrain_epochs=changed).fit(X, y)
    with pytest.raises(ValueError, match=r"belongs to another run \(learning rate at the end of epoch 1 of pretraining: "):
        classifier(**{**options, "pretrain_learning_rate": 0.005}, pretrain_epochs=2).fit(X, y)
    with pytest.raises(ValueError, match=r"belongs to another run \(batch_size: 16 there, 10 here\)"):
        classifier(**options, pretrain_epochs=2, batch_size=10).fit(X, y)
    resumed = classifier(**options, pretrain_epochs=2).fit(X, y)
    whole = classifier(schedule=schedule, pretrain_epochs=2, pretrain_learning_rate=0.004).fit(X, y)
    assert torch.equal(weights(resumed), weights(whole))


def test_a_run_without_pretraining_is_not_continued_with_one(tmp_path):
    X, y = blobs()
    options = dict(checkpoint=tmp_path / "run.ckpt", resume=True)
    with pytest.raises(KeyboardInterrupt):
        classifier(**options, callbacks=(InterruptAt(3),)).fit(X, y)
    with pytest.raises(ValueError, match=r"belongs to another run \(pretrain_epochs: 0 there, 2 here\)"):
        classifier(**options, pretrain_epochs=2).fit(X, y)


def test_a_pretraining_that_a_callback_ended_is_resumed(tmp_path):
    X, y = blobs()
    options = dict(pretrain_epochs=4, checkpoint=tmp_path / "run.ckpt")

    def ends(trainer, record):
        return record["stage"] == "pretrain" and record["epoch"] == 2

    model = classifier(**options, callbacks=(ends,)).fit(X, y)
    again = classifier(**options, resume=True, callbacks=(ends,)).fit(X, y)
    assert [record["stage"] for record in again.history_] == ["pretrain"] * 2 + ["train"] * 6
    assert torch.equal(weights(again), weights(model))
    with pytest.raises(ValueError, match="belongs to another run"):  # the rate would have decreased more slowly
        classifier(**{**options, "pretrain_epochs": 6}, resume=True, callbacks=(ends,)).fit(X, y)


def test_a_pretraining_that_the_time_ended_is_resumed(tmp_path):
    X, y = blobs()
    options = dict(pretrain_epochs=4, checkpoint=tmp_path / "run.ckpt", batch_size=10)
    with pytest.warns(ConvergenceWarning, match="max_seconds"):
        first = classifier(**options, max_seconds=1e-9).fit(X, y)
    assert first.history_[0]["stopped_by"] == "max_seconds" and first.history_[0]["stage"] == "pretrain"
    # one step of training was made, of which there may be no checkpoint
    assert classifier(**options, resume=True).fit(X, y).n_iter_ == 6


def logged_and_seen(path, **options):
    seen = []
    callbacks = (lambda trainer, record: seen.append(record),)
    model = classifier(log=path, callbacks=callbacks, **options).fit(*blobs())
    return model.history_, [json.loads(line) for line in path.read_text().splitlines()], seen


def test_the_log_and_the_callbacks_see_every_epoch(tmp_path):
    history, logged, seen = logged_and_seen(tmp_path / "log.jsonl")
    assert logged == history == seen and len(history) == 6


def test_the_log_keeps_the_pretraining(tmp_path):
    history, logged, _ = logged_and_seen(tmp_path / "log.jsonl", pretrain_epochs=2)
    assert len(history) == 8 and logged == history


def test_callbacks_see_the_pretraining(tmp_path):
    history, _, seen = logged_and_seen(tmp_path / "log.jsonl", pretrain_epochs=2)
    assert len(history) == 8 and seen == history


def test_resuming_a_fit_that_early_stopping_ended_changes_nothing(tmp_path):
    X, y = blobs(noise=0.8)
    options = dict(early_stopping=True, validation_fraction=0.3, n_iter_no_change=2, epochs=300, schedule=None)
    model = classifier(**options, checkpoint=tmp_path / "run.ckpt").fit(X, y)
    again = classifier(**options, checkpoint=tmp_path / "run.ckpt", resume=True).fit(X, y)
    assert again.n_iter_ == model.n_iter_ < 300 and torch.equal(weights(again), weights(model))


def test_checkpoints_that_are_refused(tmp_path):
    X, y = blobs()
    for make in (classifier, regressor, energy_model):
        with pytest.raises(ValueError, match="resume=True needs checkpoint"):
            make(resume=True).fit(X, y)
    path = tmp_path / "run.ckpt"
    classifier(checkpoint=path).fit(X, y)
    with pytest.raises(ValueError, match=r"belongs to another run .*seed"):
        classifier(checkpoint=path, resume=True, random_state=1).fit(X, y)
    assert torch.equal(
        weights(classifier(checkpoint=path, random_state=1).fit(X, y)), weights(classifier(random_state=1).fit(X, y))
    )


def test_a_callback_ends_training():
    X, y = blobs()
    assert classifier(callbacks=(lambda trainer, record: record["epoch"] == 2,)).fit(X, y).n_iter_ == 2


def test_a_fit_without_a_random_state_resumes_with_the_seed_of_its_checkpoint(tmp_path):
    X, y = blobs()
    options = dict(random_state=None, checkpoint=tmp_path / "run.ckpt", resume=True)
    with pytest.raises(KeyboardInterrupt):
        classifier(**options, callbacks=(InterruptAt(3),)).fit(X, y)
    seed = checkpoint.peek(tmp_path / "run.ckpt")[1]
    resumed = classifier(**options).fit(X, y)
    again = classifier(**{**options, "checkpoint": tmp_path / "run.ckpt"}).fit(X, y)
    assert resumed.n_iter_ == 6 and resumed._seed == seed and torch.equal(weights(resumed), weights(again))
    other = classifier(**{**options, "checkpoint": tmp_path / "other.ckpt"}).fit(X, y)
    assert not torch.equal(weights(resumed), weights(other))
