"""Everything that runs on the CPU runs on a CUDA device, through the same code; the other tests show it on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import lrrn
from lrrn import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.certify import pgd

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
