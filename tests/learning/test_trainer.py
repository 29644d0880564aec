"""The loop: updates by hand, resuming to the same bits, kills, interrupts, divergence."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from lrrn import LRRN
from lrrn.learning import Batch, Contrastive, CrossEntropy, Data, DivergenceError, FreeEnergy, Margin, Settings, Trainer
from lrrn.learning.schedules import cosine, one_cycle, schedule
from lrrn.runtime.storage import FileFormatError
from oracles import random_input, random_network
from repository import SUPPORT
from small_training import blobs, small_net, weights


def test_a_step_of_sgd_by_hand():
    """W <- W - eta (grad + 2 lambda W on the last weights)."""
    net, data = random_network((8, 7, 3), tol=1e-13), blobs(n=6, dtype=torch.float64)
    by_hand = random_network((8, 7, 3), tol=1e-13)
    objective = Contrastive()
    loss = objective(by_hand, Batch(data.x, data.target, data.label)).mean() + 0.01 * by_hand.W[-1].square().sum()
    gradients = torch.autograd.grad(loss, list(by_hand.parameters()))
    expected = [p.detach() - 0.3 * g for p, g in zip(by_hand.parameters(), gradients, strict=True)]
    settings = Settings(learning_rate=0.3, batch_size=6, epochs=1, weight_decay=0.01, tol=1e-13)
    Trainer(net, objective, settings).fit(data)
    for p, e in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), e, rtol=1e-9, atol=1e-11)


def test_sample_weights_scale_the_losses():
    data = blobs(n=6, dtype=torch.float64)
    weight = torch.tensor([0.0, 2.0, 1.0, 3.0, 0.0, 0.0], dtype=torch.float64)
    for objective in (Contrastive(), CrossEntropy()):
        net, by_hand = random_network((8, 7, 3), tol=1e-13), random_network((8, 7, 3), tol=1e-13)
        loss = (weight * objective(by_hand, Batch(data.x, data.target, data.label))).mean()
        gradients = torch.autograd.grad(loss, list(by_hand.parameters()))
        settings = Settings(learning_rate=0.1, batch_size=6, epochs=1, tol=1e-13)
        Trainer(net, objective, settings).fit(Data(data.x, data.target, data.label, weight))
        for p, q, g in zip(net.parameters(), by_hand.parameters(), gradients, strict=True):
            torch.testing.assert_close(p.detach(), q.detach() - 0.1 * g, rtol=1e-9, atol=1e-11)


def test_decoupled_decay_shrinks_weights_and_not_biases():
    net, data = random_network((8, 7, 3), bias_scale=0.3), blobs(n=6, dtype=torch.float64)
    before = [p.detach().clone() for p in (*net.W, *net.b)]

    def nothing(net, batch):
        return 0 * net.energy(batch.x, [batch.x[:, :7] * 0, batch.x[:, :3] * 0])

    settings = Settings(optimizer="adamw", learning_rate=0.1, decoupled_weight_decay=0.5, batch_size=6, epochs=1)
    Trainer(net, nothing, settings).fit(data)
    for k in range(2):
        torch.testing.assert_close(net.W[k].detach(), before[k] * (1 - 0.1 * 0.5))
        torch.testing.assert_close(net.b[k].detach(), before[2 + k])


@pytest.mark.parametrize("objective", [FreeEnergy(), Contrastive(), Margin(), CrossEntropy()], ids=lambda o: type(o).__name__)
def test_training_lowers_the_loss_and_reports_it(objective, tmp_path):
    net, data = small_net(), blobs()
    log = tmp_path / "log.jsonl"
    history = Trainer(net, objective, Settings(optimizer="adam", learning_rate=0.01, epochs=15), log=log).fit(data)
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    assert [json.loads(line) for line in log.read_text().splitlines()] == history
    record = history[-1]
    assert record["epoch"] == 15 and record["samples_per_second"] > 0 and record["unconverged"] == 0
    assert record["condition_number"] > 1 and len(record["weight_norms"]) == 3 and record["sweeps"] > 0


def test_reusing_activations_saves_sweeps_and_reaches_the_same_place():
    results = {}
    for reuse in (False, True):
        net = small_net(dtype=torch.float64)
        settings = Settings(optimizer="adam", learning_rate=0.002, epochs=10, reuse_activations=reuse, tol=1e-10)
        history = Trainer(net, Contrastive(), settings).fit(blobs(dtype=torch.float64))
        results[reuse] = (weights(net), history[-1]["sweeps"])
    assert results[True][1] < results[False][1]
    torch.testing.assert_close(results[True][0], results[False][0], rtol=1e-5, atol=1e-7)


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    def run(seed):
        net = small_net()
        Trainer(net, Contrastive(), Settings(epochs=2, seed=seed)).fit(blobs())
        return weights(net)

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


# --- resuming -------------------------------------------------------------------------------------------------------------


CONFIGURATIONS = [
    dict(optimizer="sgd", learning_rate=0.1),
    dict(optimizer="adam", learning_rate=0.01, schedule="one_cycle", reuse_activations=True),
    dict(optimizer="adamw", learning_rate=0.01, decoupled_weight_decay=0.1, max_weight_norm=1.2, schedule="cosine"),
    dict(optimizer="adam", learning_rate=0.01, max_condition=20.0),
]


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=lambda o: o["optimizer"])
@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_resumed_run_ends_with_the_same_bits(options, stop_after, tmp_path):
    data, settings = blobs(), Settings(epochs=5, weight_decay=1e-4, **options)
    whole = small_net()
    expected = Trainer(whole, Contrastive(), settings).fit(data)
    path = tmp_path / "run.ckpt"
    first = small_net()
    Trainer(first, Contrastive(), settings, checkpoint=path, callbacks=[lambda t, r: r["epoch"] == stop_after]).fit(data)
    second = small_net(seed=99)
    history = Trainer(second, Contrastive(), settings, checkpoint=path).fit(data, resume=True)
    assert torch.equal(weights(second), weights(whole))
    assert [r["loss"] for r in history] == [r["loss"] for r in expected]


@pytest.mark.parametrize("augmentation", [{"shifts": 1}, {"flips": True}, {"shifts": 1, "flips": True}])
def test_augmented_images_are_the_same_in_a_resumed_run_and_differ_by_seed(augmentation, tmp_path):
    data = blobs(d=9)

    def run(name, seed=0, stop_after=9, **settings):
        net = LRRN((9, 7, 3), generator=torch.Generator().manual_seed(0))
        trainer = Trainer(
            net,
            Margin((0.1, 0.5), 0.2),
            Settings(optimizer="adam", learning_rate=0.01, epochs=3, seed=seed, **settings),
            checkpoint=tmp_path / name,
            callbacks=[lambda t, r: r["epoch"] == stop_after],
        )
        trainer.fit(data, resume=True)
        return weights(net)

    whole = run("whole", **augmentation)
    run("parts", **augmentation, stop_after=1)
    with pytest.raises(ValueError, match="belongs to another run"):
        run("parts", **{**augmentation, "flips": not augmentation.get("flips", False)})
    assert torch.equal(run("parts", **augmentation), whole)
    assert not torch.equal(run("plain"), whole) and not torch.equal(run("seed", seed=1, **augmentation), whole)


class Interrupt:
    """Raises Ctrl-C's signal in the middle of an epoch."""

    def __init__(self, objective, at: int) -> None:
        self.objective, self.left = objective, at
        self.of_prediction = getattr(objective, "of_prediction", False)

    def __call__(self, net, batch):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return self.objective(net, batch)


def test_ctrl_c_leaves_a_checkpoint_that_resumes_to_the_same_bits(tmp_path):
    data, settings, path = blobs(), Settings(epochs=3, learning_rate=0.1), tmp_path / "run.ckpt"
    whole = small_net()
    never = Interrupt(CrossEntropy(), at=0)  # any objective has the bits of its own backend
    Trainer(whole, never, settings).fit(data)
    before = signal.getsignal(signal.SIGINT)
    interrupted = Trainer(small_net(), Interrupt(CrossEntropy(), at=9), settings, checkpoint=path)
    interrupted._identity = Trainer(small_net(), never, settings)._identity
    with pytest.raises(KeyboardInterrupt):
        interrupted.fit(data)
    assert signal.getsignal(signal.SIGINT) == before
    assert (interrupted.position.epoch, interrupted.position.step) == (1, 3)
    second = small_net(seed=99)
    Trainer(second, never, settings, checkpoint=path).fit(data, resume=True)
    assert torch.equal(weights(second), weights(whole))


JOB = """
import sys, torch
sys.path[:0] = sys.argv[3:]
from small_training import blobs, small_net, weights
from lrrn.learning import Contrastive, Settings, Trainer
net = small_net()
settings = Settings(optimizer="adam", learning_rate=0.01, epochs=300, batch_size=2)
Trainer(net, Contrastive(), settings, checkpoint=sys.argv[1], checkpoint_seconds=0.02).fit(blobs(n=400), resume=True)
torch.save(weights(net), sys.argv[2])
"""


def test_kill_minus_nine_in_the_middle_of_an_epoch(tmp_path):
    whole = small_net()
    settings = Settings(optimizer="adam", learning_rate=0.01, epochs=300, batch_size=2)
    Trainer(whole, Contrastive(), settings).fit(blobs(n=400))
    checkpoint, result = tmp_path / "run.ckpt", tmp_path / "weights.pt"
    command = [sys.executable, "-c", JOB, str(checkpoint), str(result), str(SUPPORT)]
    rng, kills = random.Random(0), 0
    for _ in range(3):
        child = subprocess.Popen(command)
        deadline = time.monotonic() + 60
        started = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        while child.poll() is None and time.monotonic() < deadline:
            if checkpoint.exists() and checkpoint.stat().st_mtime_ns != started:
                time.sleep(rng.uniform(0.01, 0.1))
                break
            time.sleep(0.002)
        if child.poll() is None:
            child.kill()
            kills += 1
        child.wait()
    assert kills >= 2 and not result.exists()
    subprocess.run(command, check=True, timeout=120)
    assert torch.equal(torch.load(result), weights(whole))
    assert {p.name for p in tmp_path.iterdir()} == {"run.ckpt", "weights.pt"}


def test_a_checkpoint_of_another_run_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "run.ckpt"
    Trainer(small_net(), Contrastive(), Settings(epochs=1), checkpoint=path).fit(blobs())
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"belongs to another run .*learning_rate: 0\.4 there, 0\.1 here"):
        Trainer(small_net(), Contrastive(), Settings(epochs=1, learning_rate=0.1), checkpoint=path).fit(blobs(), resume=True)
    with pytest.raises(ValueError, match=r"belongs to another run .*data:"):
        Trainer(small_net(), Contrastive(), Settings(epochs=1), checkpoint=path).fit(blobs(seed=5), resume=True)
    assert path.read_bytes() == content
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(FileFormatError, match="is damaged"):
        Trainer(small_net(), Contrastive(), Settings(epochs=1), checkpoint=path).fit(blobs(), resume=True)


def test_places_that_cannot_be_written_are_refused_before_any_work(tmp_path):
    for option in ("checkpoint", "log"):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            Trainer(small_net(), Contrastive(), Settings(), **{option: tmp_path / "no" / "file"})


# --- health ---------------------------------------------------------------------------------------------------------------


def test_divergence_names_the_epoch_the_layer_and_what_to_change():
    with pytest.raises(DivergenceError, match=r"in epoch 1; layer \d has weights of spectral norm .* Lower learning_rate"):
        Trainer(small_net(), Contrastive(), Settings(learning_rate=1e6, epochs=3)).fit(blobs())


def test_an_exploding_condition_number_stops_training():
    net = small_net()
    with torch.no_grad():
        net.W[1].mul_(1e5)
    with pytest.raises(DivergenceError, match=r"condition number reached .* in epoch 1, .*layer 1 .* Set max_weight_norm"):
        Trainer(net, FreeEnergy(), Settings(learning_rate=1e-12, epochs=1, max_unconverged=1.0)).fit(blobs())


def test_solves_that_do_not_converge_stop_training():
    settings = Settings(learning_rate=1e-3, epochs=2, tol=1e-6, max_sweeps=1)
    with pytest.raises(DivergenceError, match=r"in epoch 1, \d+ of \d+ solves did not converge .*raise max_sweeps"):
        Trainer(small_net(), Contrastive(), settings).fit(blobs())


def test_the_network_is_left_as_it_was_set():
    net = small_net()
    net.tol, net.max_sweeps = 1e-3, 77
    Trainer(net, Contrastive(), Settings(epochs=1)).fit(blobs())
    assert (net.tol, net.max_sweeps) == (1e-3, 77)


def test_the_cap_on_weight_norms_holds():
    net = small_net()
    with torch.no_grad():
        net.W[0].mul_(20)
    settings = Settings(optimizer="adam", learning_rate=0.05, epochs=10, max_weight_norm=0.8)
    history = Trainer(net, CrossEntropy(), settings).fit(blobs())
    norms = [float(torch.linalg.matrix_norm(w.detach(), ord=2)) for w in net.W]
    assert all(norm <= 0.8 * 1.05 for norm in norms[:-1])
    assert history[-1]["weight_norms"] == pytest.approx(norms, rel=1e-2)


def test_early_stopping_returns_to_the_best_epoch():
    net, scores, states = small_net(), iter([0.1, 0.9, 0.5, 0.4, 0.3, 0.2]), []

    def validate(net):
        states.append(weights(net).clone())
        return next(scores)

    history = Trainer(net, Contrastive(), Settings(epochs=20, patience=2)).fit(blobs(), validate)
    assert [r["validation_score"] for r in history] == [0.1, 0.9, 0.5, 0.4]
    assert torch.equal(weights(net), states[1])


@pytest.mark.parametrize(
    ("scores", "epochs", "kept"),
    [
        ([0.5, 0.5, 0.5, 0.5, 0.5, 0.7, 0.6, 0.6, 0.6], 8, 5),  # a plateau at the beginning is none of the end
        ([0.5, 0.9, 0.9, 0.2, 0.9], 4, 2),  # of equal scores the latest, trained longest
        ([0.9, 0.5, 0.5, 0.5], 3, 0),
        ([0.5] * 9, 9, 8),
    ],
)
def test_which_epoch_early_stopping_keeps(scores, epochs, kept):
    net, left, states = small_net(), iter(scores), []

    def validate(net):
        states.append(weights(net).clone())
        return next(left)

    assert len(Trainer(net, Contrastive(), Settings(epochs=9, patience=2)).fit(blobs(), validate)) == epochs
    assert torch.equal(weights(net), states[kept])


@pytest.mark.parametrize("settings", [Settings(shifts=1), Settings(flips=True)])
def test_augmentation_needs_images(settings):
    with pytest.raises(ValueError, match=r"8 features make no square image\. Give image_shape, or shifts=0 and flips=False"):
        Trainer(small_net(), Contrastive(), settings).fit(blobs())


@pytest.mark.parametrize("objective", [Contrastive(), Margin(0.5, 0.2)], ids=["energies", "margin"])
def test_flips_reach_every_path_of_training(objective):
    """Images that are their own mirror images are left alone; others are not, by compiled steps of any kind."""
    data = blobs(d=9)
    image = data.x.view(-1, 3, 3)
    symmetric = replace(data, x=((image + image.flip(-1)) / 2).flatten(1))

    def trained(some, flips):
        net = LRRN((9, 7, 3), generator=torch.Generator().manual_seed(0))
        Trainer(net, objective, Settings(learning_rate=0.01, epochs=2, flips=flips)).fit(some)
        return weights(net)

    torch.testing.assert_close(trained(symmetric, True), trained(symmetric, False), rtol=1e-4, atol=1e-5)
    assert (trained(data, True) - trained(data, False)).abs().max() > 1e-4


def test_bad_settings_are_refused_at_once():
    for options, message in [
        (dict(learning_rate=0.0), "learning_rate must be positive; got 0"),
        (dict(batch_size=0), "batch_size must be positive"),
        (dict(epochs=-1), "epochs must be positive"),
        (dict(weight_decay=-1.0), "weight_decay must be at least 0"),
        (dict(optimizer="lbfgs"), "unknown optimizer 'lbfgs'"),
        (dict(schedule="steps"), "unknown schedule 'steps'"),
        (dict(decoupled_weight_decay=0.1), "belongs to optimizer='adamw'"),
        (dict(max_weight_norm=0.0), "max_weight_norm must be positive"),
        (dict(max_seconds=0), "max_seconds must be positive or None; got 0"),
        (dict(max_seconds=-1.0), "max_seconds must be positive or None; got -1.0"),
        (dict(max_seconds=math.nan), "max_seconds must be positive or None; got nan"),
        (dict(max_seconds="5"), "max_seconds must be positive or None; got '5'"),
        (dict(patience=0), "patience must be positive or None; got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            Settings(**options)
    with pytest.raises(ValueError, match="no samples"):
        Trainer(small_net(), Contrastive(), Settings()).fit(Data(torch.zeros(0, 8)))


def test_schedules():
    assert [schedule(None)(p) for p in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]
    assert cosine(0.0) == 1.0 and cosine(0.5) == pytest.approx(0.5) and cosine(1.0) == pytest.approx(0.0, abs=1e-12)
    assert one_cycle(0.0) == pytest.approx(0.04) and one_cycle(0.3) == pytest.approx(1.0)
    assert one_cycle(1.0) == pytest.approx(4e-6) and one_cycle(0.15) == pytest.approx(0.52)
    rates = [one_cycle(p / 100) for p in range(101)]
    assert max(rates) <= 1.0 and min(rates) > 0 and not any(math.isnan(rate) for rate in rates)


def test_a_sixth_objective_in_ten_lines():
    """Huber loss on the output plus a little free energy, as the docs show it."""

    class Huber:
        def __call__(self, net, batch):
            error = functional.huber_loss(net(batch.x), batch.target, reduction="none").sum(-1)
            return error + 0.01 * net.energy(batch.x)

    net = small_net()
    history = Trainer(net, Huber(), Settings(optimizer="adam", learning_rate=0.01, epochs=15)).fit(blobs())
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]


def test_every_epoch_sees_all_samples_in_an_order_of_its_own():
    seen = []

    class Recorder:
        def __call__(self, net, batch):
            seen.append(batch.label.tolist())
            return CrossEntropy()(net, batch)

    n = 30
    net, x = random_network((5, 4, n), dtype=torch.float32), random_input(n, 5, dtype=torch.float32)
    Trainer(net, Recorder(), Settings(epochs=4, batch_size=8, learning_rate=1e-6)).fit(Data(x, None, torch.arange(n)))
    assert [len(batch) for batch in seen] == [8, 8, 8, 6] * 4
    epochs = [[row for batch in seen[4 * i : 4 * i + 4] for row in batch] for i in range(4)]
    assert all(sorted(order) == list(range(n)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 4 and list(range(n)) not in epochs
