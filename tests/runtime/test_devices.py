"""Everything that runs on the CPU runs on a CUDA device, through the same code; the other tests show it on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import lrrn
from lrrn import LRRN, LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.attacks import pgd
from lrrn.learning import Contrastive, CrossEntropy, Data, FreeEnergy, Margin, Settings, SquaredError, Trainer, fit_many
from lrrn.learning.cuda_graph import LADDER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
SMALL = dict(epochs=3, batch_size=128, random_state=0)


@pytest.mark.parametrize(
    "objective", ["contrastive", "margin", "cross_entropy", "squared_error", "class_energy", "semi_supervised"]
)
def test_classifiers_train_predict_and_certify_on_the_device(objective, tmp_path):
    device = "cuda"
    X, y = load_digits(return_X_y=True)
    X = X / 16
    model = LRRNClassifier((24, 16), objective=objective, device=device, **SMALL).fit(X[:600], y[:600])
    assert model.network_.W[0].device.type == device and np.isfinite(model.loss_curve_).all()
    assert model.loss_curve_[-1] < model.loss_curve_[0]
    lrrn.save(model, tmp_path / "m.safetensors")
    here = lrrn.load(tmp_path / "m.safetensors", device="cpu")
    np.testing.assert_allclose(model.decision_function(X[:50]), here.decision_function(X[:50]), atol=1e-4)
    np.testing.assert_allclose(model.certified_radius(X[:20]), here.certified_radius(X[:20]), rtol=1e-2, atol=1e-4)


def test_regressor_energy_model_and_attacks_on_the_device():
    device = "cuda"
    X, y = load_digits(return_X_y=True)
    X = X / 16
    regressor = LRRNRegressor((16,), device=device, **SMALL).fit(X[:300], y[:300])
    lower, upper = regressor.predict_interval(X[:20], 0.1)
    assert (lower < regressor.predict(X[:20])).all() and (regressor.predict(X[:20]) < upper).all()
    model = LRRNEnergyModel((16,), device=device, max_weight_norm=3.0, **SMALL).fit(X[:300])
    lower, upper = model.energy_interval(X[:20], 0.1)
    assert (lower < model.energy(X[:20])).all() and (model.energy(X[:20]) < upper).all()
    net = LRRNClassifier((16, 8), device=device, **SMALL).fit(X[:300], y[:300]).network_
    x = torch.tensor(X[:10], device=device)
    certificate = lrrn.certify(net, x, "local")
    assert certificate.radius.device.type == device
    assert not pgd(net, x, certificate.prediction, certificate.radius, steps=5, restarts=1, seed=0).success.any()


def test_shared_radii_on_the_device_are_those_of_the_cpu():
    X, y = load_digits(return_X_y=True)
    net = LRRNClassifier((24, 16), device="cuda", **SMALL).fit(X[:500] / 16, y[:500]).network_
    x = torch.tensor(X[500:700] / 16)
    there = lrrn.certify(net, x.to("cuda"), "shared", tol=1e-9).radius
    here, wide = (lrrn.certify(net.to("cpu"), x, method, tol=1e-9).radius for method in ("shared", "multiplier"))
    assert there.device.type == "cuda"
    torch.testing.assert_close(there.cpu(), here, rtol=1e-2, atol=1e-4)
    assert float((there.cpu() / wide)[wide > 0].median()) > 1.05


def digits_data(dtype=torch.float32) -> Data:
    X, y = load_digits(return_X_y=True)
    x, label = torch.tensor(X[:1000] / 16, dtype=dtype, device="cuda"), torch.tensor(y[:1000], device="cuda")
    return Data(x, torch.nn.functional.one_hot(label).to(dtype), label)


def trained(objective, sizes=(64, 40, 24, 10), dtype=torch.float32, **settings) -> tuple[LRRN, Trainer]:
    net = LRRN(sizes, init="uniform", generator=torch.Generator().manual_seed(0), device="cuda", dtype=dtype)
    options = {"optimizer": "adamw", "learning_rate": 3e-3, "batch_size": 96, "epochs": 3, "schedule": "one_cycle"}
    trainer = Trainer(net, objective, Settings(**{**options, **settings}))
    trainer.fit(digits_data(dtype))
    return net, trainer


class Eager:
    """An objective of the same values that does not claim to be capturable."""

    def __init__(self, objective):
        self._objective = objective

    def __call__(self, net, batch):
        return self._objective(net, batch)

    def project(self, net):
        if hasattr(self._objective, "project"):
            self._objective.project(net)


@pytest.mark.parametrize(
    "objective",
    [Margin((0.1, 0.3), 0.1), Margin(0.3, 0.1, (0.0, 0.2)), Contrastive(), CrossEntropy(), SquaredError(), FreeEnergy()],
)
@pytest.mark.parametrize(
    "options", [{}, {"optimizer": "sgd", "learning_rate": 0.05, "shifts": 1, "flips": True, "max_weight_norm": 2.0}]
)
def test_captured_steps_learn_what_single_steps_learn(objective, options):
    captured, trainer = trained(objective, tol=1e-9, dtype=torch.float64, **options)
    single, other = trained(Eager(objective), tol=1e-9, dtype=torch.float64, **options)
    assert trainer.position.captured_sweeps > 0 and other.position.captured_sweeps == 0
    for a, b in zip(captured.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    for a, b in zip(trainer.history, other.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4, abs=1e-7) and a["unconverged"] == 0


def test_captured_steps_give_the_same_bits_again_and_go_up_the_ladder():
    nets = [trained(Margin(0.3, 0.1), sizes=(64, 300, 10), epochs=6) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(nets[0][0].parameters(), nets[1][0].parameters(), strict=True))
    sweeps = [record["sweeps"] for record in nets[0][1].history]
    assert max(sweeps) > LADDER[0] and nets[0][1].history[-1]["unconverged"] == 0


def test_long_runs_take_large_graphs_and_learn_the_same():
    options = {"tol": 1e-9, "dtype": torch.float64, "optimizer": "sgd", "learning_rate": 0.05, "batch_size": 2, "epochs": 1}
    (captured, trainer), (single, _) = (trained(kind, **options) for kind in (Contrastive(), Eager(Contrastive())))
    assert trainer.position.captured_sweeps > 0
    for a, b in zip(captured.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    # past the step from which on looks are rarest
    longer = [trained(Contrastive(), **{**options, "dtype": torch.float32, "tol": None, "epochs": 10}) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(longer[0][0].parameters(), longer[1][0].parameters(), strict=True))
    assert all(record["unconverged"] == 0 for record in longer[0][1].history)


def test_more_networks_than_streams_end_as_if_trained_alone():
    def trainer(seed):
        net = LRRN((64, 12, 10), generator=torch.Generator().manual_seed(seed), device="cuda")
        return Trainer(net, Contrastive(), Settings(batch_size=10, epochs=2, learning_rate=0.1, seed=seed))

    trainers, data = [trainer(seed) for seed in range(40)], digits_data()
    fit_many(trainers, data, at_once=40)
    assert all(one._captured is None for one in trainers)
    for seed in (0, 7, 20, 39):
        alone = trainer(seed)
        alone.fit(data)
        for a, b in zip(alone.net.parameters(), trainers[seed].net.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_captured_run_is_resumed(tmp_path):
    class Halt(Exception):
        pass

    def halt(trainer, record):
        if record["epoch"] == 2:
            raise Halt

    def run(resume, *callbacks):
        net = LRRN((64, 40, 10), generator=torch.Generator().manual_seed(0), device="cuda")
        settings = Settings(optimizer="adam", learning_rate=3e-3, batch_size=96, epochs=4)
        trainer = Trainer(net, Margin(0.3, 0.1), settings, checkpoint=tmp_path / f"{resume}.ckpt", callbacks=callbacks)
        trainer.fit(digits_data(), resume=True)
        return net

    whole = run("whole")
    with pytest.raises(Halt):
        run("parts", halt)
    for a, b in zip(whole.parameters(), run("parts").parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
