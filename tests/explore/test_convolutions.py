"""Networks with convolutions, and images in colour, are explored as dense networks of grey images are."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional

import lrrn
from lrrn import Conv, LRRNClassifier, LRRNEnergyModel
from lrrn.explore import session as sessions_module
from lrrn.explore.explorer import Explorer
from lrrn.explore.gallery import Gallery
from lrrn.explore.opening import Opened, open_file
from lrrn.explore.overview import architecture, describe
from lrrn.explore.session import Session
from sessions import ROUNDED, colours, convolutional, digits, in_colour, session_of


@pytest.fixture(scope="module")
def grey():
    return session_of(convolutional())


@pytest.fixture(scope="module")
def coloured():
    return session_of(in_colour(), data=lambda: colours(30, seed=1), shape=(3, 8, 8))


@pytest.fixture(scope="module")
def unlabelled():
    return session_of(in_colour(LRRNEnergyModel), data=lambda: colours(30, seed=1), shape=(3, 8, 8))


@pytest.mark.parametrize("name", ["grey", "coloured"])
def test_the_answer_is_the_model_s(name, request):
    session = request.getfixturevalue(name)
    pixels = (digits() if name == "grey" else colours(30, seed=1))[0][4]
    model, answer = session.model, session.analyse(pixels)
    X = pixels * (session.high - session.low) + session.low
    assert session.classes[answer["prediction"]] == str(model.predict(X[None])[0])
    np.testing.assert_allclose(answer["scores"], model.decision_function(X[None])[0], atol=ROUNDED)
    assert answer["radius"] == pytest.approx(model.certified_radius(X[None], "spectral")[0], rel=1e-9)
    free = model.network_.infer(torch.as_tensor(X[None]))
    assert answer["active"] == [int(np.count_nonzero(np.round(z[0].numpy(), 4))) for z in free.activations]
    for found, z in zip(answer["activations"], free.activations, strict=True):
        np.testing.assert_allclose(found, z[0], atol=ROUNDED)
    # what the first layer stands for, from the definition: the transposed convolution of its maps, minus c_0 in every channel
    net, layer = model.network_, model.network_.layers[0]
    w, c = net.W[0].detach().double(), net.c[0].detach().double()
    seen = functional.conv_transpose2d(free.activations[0].view(1, *layer.out_shape), w) - c[:, None, None]
    expected = (seen.flatten().numpy() - session.low) / (session.high - session.low)
    np.testing.assert_allclose(answer["reconstructions"][0], expected, atol=ROUNDED)


def test_attacks_on_colour_images_change_labels_beyond_the_certificate(coloured):
    pixels = colours(30, seed=1)[0][1]
    found, radius = coloured.attack(pixels, True), coloured.tighten(pixels)["radius"]
    images = np.array(found["images"])
    assert images.shape == (41, 192) and images.min() >= -ROUNDED and images.max() <= 1 + ROUNDED
    assert 0 < radius <= found["distance"] and found["predictions"][-1] != found["label"]
    held = coloured.clamp(pixels, 2)
    assert held["gap"] >= 0 and len(held["reconstructions"][1]) == 192


def test_the_overview_shows_kernels_and_receptive_fields(grey, coloured):
    for session, channels, fields in ((grey, 1, [6, 6]), (coloured, 3, [5, 5])):
        overview = json.loads(json.dumps(describe(session, "m")))
        assert overview["shape"] == [8, 8] and overview["channels"] == channels
        kernels, second = overview["filters"][:2]
        w = session.model.network_.W[0].detach().double().numpy().reshape(6, -1)
        assert (kernels["kind"], kernels["units"], kernels["shape"]) == ("kernels", 6, [3, 3])
        np.testing.assert_allclose(kernels["images"], 100 * w / np.abs(w).max(axis=1, keepdims=True), atol=0.51)
        assert (second["kind"], second["shape"]) == ("fields", fields)
        assert np.abs(second["images"]).max(axis=1).tolist() == [100] * second["units"]
        last = overview["filters"][-1]
        assert (last["kind"], last["shape"], len(last["images"][0])) == ("rows", [8, 8], 64 * channels)
        assert len(overview["samples"][0]["pixels"]) == 64 * channels
    assert describe(grey, "m")["layers"][:3] == [
        {"maps": [6, 6, 6], "shown": 6},
        {"maps": [5, 2, 2], "shown": 5},
        {"maps": None, "shown": 8},
    ]


def test_architectures_are_told_in_one_line(plain, grey, coloured):
    assert architecture(plain.model.network_) == "64-16-12-10"
    assert architecture(grey.model.network_) == "1x8x8 - 6 kernels of 3x3, pool 2 - 5 kernels of 2x2 - 8 - 10"
    assert architecture(coloured.model.network_) == "3x8x8 - 6 kernels of 3x3 - 4 kernels of 3x3, stride 2 - 3"


def test_of_many_activations_the_first_channels_are_sent(grey, monkeypatch):
    pixels = digits()[0][3]
    whole = grey.analyse(pixels)
    monkeypatch.setattr(sessions_module, "SHOWN_UNITS", 80)
    cut = grey.analyse(pixels)
    assert [len(values) for values in cut["activations"]] == [2 * 36, 5 * 4, 8, 10]
    assert cut["activations"][0] == whole["activations"][0][:72] and cut["active"] == whole["active"]
    assert describe(grey, "m")["layers"][0] == {"maps": [6, 6, 6], "shown": 2}
    monkeypatch.setattr(sessions_module, "SHOWN_UNITS", 5)
    assert len(grey.analyse(pixels)["activations"][0]) == 36


def test_large_convolutions_have_no_local_radii_and_say_why_before_any_work(monkeypatch):
    model = convolutional(hidden_sizes=(Conv(20, 3),), epochs=1)
    X, _ = digits(20)
    monkeypatch.setattr("lrrn.energy.lifted.UNFOLDED_UNITS", 700)
    monkeypatch.setattr(LRRNClassifier, "certified_radius", _only_without_matrices(LRRNClassifier.certified_radius))
    session = Session(model, (8, 8), None)
    reason = session.obstacles()["local"]
    assert "needs a matrix of the size of all hidden units" in reason and "has 720." in reason
    with pytest.raises(ValueError, match="needs a matrix"):
        session.tighten(X[0])
    explorer = Explorer("m", lambda progress: Opened(session))
    explorer._open()
    assert explorer.state()["phase"] == "ready" and explorer.state()["refined"]
    assert explorer.overview()["lipschitz"] > 0 and explorer.overview()["obstacles"]["local"] == reason
    assert session.attack(X[0], False)["norms"][-1] > 0


def _only_without_matrices(certified_radius):
    def checked(self, X, method="auto", *rest):
        assert method in ("auto", "spectral"), "a local radius was begun"
        return certified_radius(self, X, method, *rest)

    return checked


def test_saved_models_open_in_the_shape_that_they_were_built_for(tmp_path, grey, coloured, unlabelled):
    path = tmp_path / "m.safetensors"
    for session, shape in ((grey, (8, 8)), (coloured, (3, 8, 8)), (unlabelled, (3, 8, 8))):
        lrrn.save(session.model, path)
        assert open_file(path, "cpu", None, None).session.image_shape == shape
        lrrn.save(session.model, path, session.reference)
        opened = open_file(path, "cpu", shape, None).session
        assert opened.image_shape == shape and opened.reference.image_shape == shape
        with pytest.raises(ValueError, match="leave the shape out"):
            open_file(path, "cpu", (4, 16) if len(shape) == 2 else (12, 16), None)
    X, y = colours(12, seed=2)
    lrrn.save(coloured.model, path)
    compared = open_file(path, "cpu", None, Gallery("colours", X, y)).session.reference
    turned = X.reshape(-1, 3, 8, 8)[..., ::-1].reshape(len(X), -1)
    np.testing.assert_allclose(compared.energies["mirrored"], coloured.model.energy(turned), rtol=1e-12)
    dense = LRRNClassifier((5,), epochs=1, random_state=0, device="cpu").fit(X, y)
    lrrn.save(dense, path)
    with pytest.raises(ValueError, match=r"no square image.*3xHEIGHTxWIDTH"):
        open_file(path, "cpu", None, None)
    assert open_file(path, "cpu", (3, 8, 8), None).session.n_pixels == 192


def test_images_of_other_channels_are_refused(tmp_path):
    X = np.random.default_rng(0).random((20, 50))
    model = LRRNEnergyModel((Conv(2, 3), 4), image_shape=(2, 5, 5), epochs=1, random_state=0, device="cpu").fit(X)
    lrrn.save(model, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="images of 2 channels; the explorer draws grey or colour images"):
        open_file(tmp_path / "m.safetensors", "cpu", None, None)


def test_an_energy_model_of_colours_is_explored(unlabelled):
    pixels = colours(30, seed=1)[0][0]
    answer = unlabelled.analyse(pixels)
    assert all(len(image) == 192 for image in answer["reconstructions"]) and "scores" not in answer
    assert [found["kind"] for found in describe(unlabelled, "m")["filters"]] == ["kernels", "fields"]


def test_the_server_asks_for_three_values_a_pixel(coloured):
    pytest.importorskip("starlette", reason="the explorer's server needs the extra explore")
    from lrrn.explore.server import Refusal, _pixels

    assert _pixels([0.5] * 192, coloured).shape == (192,)
    with pytest.raises(
        Refusal, match="8 x 8 red, green and blue values from 0 to 1, channel by channel and row by row; got 64"
    ):
        _pixels([0.5] * 64, coloured)
    with pytest.raises(Refusal, match="no such numbers"):
        _pixels([1.5] * 192, coloured)
