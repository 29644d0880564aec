"""Estimators on images: convolutions, shapes of X, saving."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from sklearn.base import clone

import lrrn
from lrrn import Conv, LRRNClassifier, LRRNEnergyModel, LRRNRegressor, datasets
from repository import ROOT


@pytest.fixture(scope="module")
def digits():
    X, y = datasets.load("digits", split="train")
    return X[:400], y[:400]


QUICK = {"image_shape": (1, 8, 8), "epochs": 4, "random_state": 0, "device": "cpu"}
MODELS = {
    "classifier": LRRNClassifier(hidden_sizes=(Conv(6, 3, pool=2), 16), **QUICK),
    "margin": LRRNClassifier(hidden_sizes=Conv(6, 3), objective="margin", adversarial_eps=0.1, max_condition=30, **QUICK),
    "class energy": LRRNClassifier(hidden_sizes=(Conv(4, 3),), objective="class_energy", **QUICK),
    "by products": LRRNClassifier(hidden_sizes=(Conv(16, 3),), batch_size=64, **{**QUICK, "epochs": 2}),
    "regressor": LRRNRegressor(hidden_sizes=(Conv(6, 3),), **QUICK),
    "energy model": LRRNEnergyModel(hidden_sizes=(Conv(6, 3, 2), Conv(4, 2)), **QUICK),
}


@pytest.mark.parametrize("name", MODELS)
def test_images_and_their_rows_are_the_same_samples(name, digits, tmp_path):
    X, y = digits
    images = X.reshape(-1, 1, 8, 8)
    model, other = clone(MODELS[name]).fit(images, y), clone(MODELS[name]).fit(X, y)
    assert np.array_equal(model.predict(images), other.predict(X))
    assert model.n_features_in_ == 64 and np.array_equal(model.energy(images[:9]), model.energy(X[:9]))
    lrrn.save(model, tmp_path / "model.safetensors")
    loaded = lrrn.load(tmp_path / "model.safetensors")
    assert loaded.get_params()["hidden_sizes"] == model.hidden_sizes and loaded.image_shape == (1, 8, 8)
    assert np.array_equal(loaded.predict(images), model.predict(images))
    assert repr(loaded.network_) == repr(model.network_)


def test_a_convolutional_classifier_learns_and_certifies(digits):
    X, y = digits
    model = clone(MODELS["classifier"]).set_params(hidden_sizes=(Conv(8, 3),), epochs=20).fit(X, y)
    certificate = model.certificate(X[:50].reshape(-1, 1, 8, 8))
    assert model.score(X, y) > 0.9 and (certificate.radius > 0).mean() > 0.8
    assert np.array_equal(certificate.prediction, model.predict(X[:50]))
    lower, upper = (model.energy(X[:5]) - 1e-6, model.energy(X[:5]) + 1e-6)
    assert ((lower <= certificate.energy[:5]) & (certificate.energy[:5] <= upper)).all()


def test_an_energy_model_transforms_and_reconstructs(digits):
    X, _ = digits
    model = clone(MODELS["energy model"]).fit(X)
    codes = model.transform(X[:7])
    assert codes.shape == (7, model.network_.sizes[-1]) == (7, 16) and model.inverse_transform(codes).shape == (7, 64)


@pytest.mark.parametrize(
    ("change", "shape", "message"),
    [
        ({"image_shape": (1, 4, 4)}, (-1, 64), r"image_shape=\(1, 4, 4\) has 16 pixels, and X has 64 features"),
        ({"image_shape": (1, 4, 16)}, (-1, 1, 8, 8), r"X has images of shape \(1, 8, 8\), and image_shape is \(1, 4, 16\)"),
        ({"image_shape": None}, (-1, 1, 8, 8), r"give the estimator image_shape=\(1, 8, 8\)"),
        ({"image_shape": None}, (-1, 64), r"need image_shape=\(channels, height, width\)"),
        ({"image_shape": (8, 8)}, (-1, 64), r"\(channels, height, width\)"),
        ({"hidden_sizes": (Conv(4, 9),)}, (-1, 64), "a kernel of 9 x 9 is larger than its images of 8 x 8"),
        ({"hidden_sizes": (16, Conv(4, 3))}, (-1, 64), "put convolutions before dense layers"),
        ({"hidden_sizes": ("conv",)}, (-1, 64), r"positive integers or lrrn.Conv\(channels, kernel\)"),
        ({"max_condition": 0.5}, (-1, 64), "max_condition must be above 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(change, shape, message, digits):
    X, y = digits
    model = clone(MODELS["classifier"]).set_params(**change)
    with pytest.raises(ValueError, match=message):
        model.fit(X.reshape(shape), y)
    assert not hasattr(model, "network_")


LARGE = """
import resource, sys, torch, lrrn
torch.set_num_threads(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
net = lrrn.LRRN(((3, 32, 32), lrrn.Conv(100, 5, 1, 2), 10), generator=torch.Generator().manual_seed(0))
assert net.sizes[1] == 102400
x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
assert net.infer(x).converged.all()
net(x).sum().backward()
with torch.no_grad():
    net.W[0].mul_(3)  # to a norm of about five, as of a trained network
pairs = lrrn.certify(net, x[:1].flatten(1), "spectral").radius.item()
dual = lrrn.certify(net, x[:1].flatten(1), "shared", target_radius=2 * pairs)
assert pairs > 0 and dual.method == "shared" and dual.radius.item() > 1.5 * pairs
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_proportional_to_the_batch_not_to_units_squared():
    result = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    # the matrix of the first layer alone has 1.2 GB, and the Hessian 42 GB in float32; ru_maxrss is in KiB here
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(result.stdout) * unit < 1e9


def test_the_example_of_mnist_reports_its_figures(monkeypatch):
    spec = importlib.util.spec_from_file_location("mnist_convolution", ROOT / "examples" / "mnist_convolution.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    x = np.random.default_rng(0).random((60, 784), dtype=np.float32)
    monkeypatch.setattr(example.datasets, "load", lambda name, split="train": (x, np.arange(60) % 3))
    found = example.figures(epochs=1, limit=40, certified=5)
    assert found["units"] == 490 and found["training images"] == 40 and 0 <= found["accuracy"] <= 1
    assert 0 <= found["certified at 1.0"] <= found["certified at 0.5"] <= 1
