"""The explorer's answers are those of the model; its server answers this machine, reads the model file and writes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from importlib.resources import files

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lrrn
from lrrn import LRRNClassifier, LRRNEnergyModel, LRRNRegressor, datasets
from lrrn.cli import app
from lrrn.explore import opening
from lrrn.explore.explorer import Explorer
from lrrn.explore.opening import Opened, open_file, train_digits
from lrrn.explore.overview import compared, describe
from lrrn.explore.session import Session
from lrrn.reports.evaluation import energies_of, reference_of

pytest.importorskip("starlette", reason="the explorer's server needs the extra explore")

from lrrn.explore.launch import address, bind, prepared
from lrrn.explore.server import Guard

ROUNDED = 6e-5
"""Numbers are sent with four digits after the point."""


def digits(n=200):
    X, y = datasets.load("digits", "test")
    return X[:n].astype(np.float64), y[:n]


def fitted(**options):
    X, y = datasets.load("digits", "train")
    common = dict(hidden_sizes=(16, 12), epochs=4, random_state=0, device="cpu")
    scale = options.pop("scale", 1.0)
    return LRRNClassifier(**{**common, **options}).fit(scale * X, y)


def session_of(model, scale=1.0, keep=20):
    X, y = digits()
    X = scale * X
    radii = None
    if isinstance(model, LRRNClassifier):
        radii = np.where(
            model.predict(X) == y, model.certified_radius(X, *(["spectral"] if model.objective != "class_energy" else [])), 0
        )
    energies = energies_of(model, X, (8, 8))
    return Session(model, (8, 8), reference_of(model, X, y, (8, 8), "digits, held out", keep, 0.9, radii, energies))


@pytest.fixture(scope="module", autouse=True)
def hurry():
    """Bounds are as good as their budget; their quality is tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lrrn.network.BUDGET, "auto", 0.5)
        yield


@pytest.fixture(scope="module")
def plain():
    return session_of(fitted())


@pytest.fixture(scope="module")
def scaled():
    """A model of features from 0 to 16 that are centred and scaled inside."""
    return session_of(fitted(scale=16.0, standardize=True), 16.0)


@pytest.fixture(params=["plain", "scaled"])
def session(request):
    return request.getfixturevalue(request.param)


# --- one image --------------------------------------------------------------------------------------------------------


def test_the_answer_is_the_model_s(session):
    pixels = digits()[0][5]
    model, X = session.model, (pixels * session.high)[None]
    answer = session.analyse(pixels)
    np.testing.assert_allclose(answer["scores"], model.decision_function(X)[0], atol=ROUNDED)
    top = np.sort(model.decision_function(X)[0])
    assert session.classes[answer["prediction"]] == str(model.predict(X)[0])
    assert answer["margin"] == pytest.approx(top[-1] - top[-2], rel=1e-9)
    assert answer["radius"] == pytest.approx(model.certified_radius(X, "spectral")[0], rel=1e-9)
    energy = float(model.energy(X)[0])
    assert answer["energy"]["value"] == pytest.approx(energy, rel=1e-9)
    assert answer["energy"]["share"] == np.mean(session.reference.energies["samples"] < energy)
    net = model.network_
    x = torch.as_tensor((X - model.offset_in_) / model.scale_in_)
    free = net.infer(x)
    assert answer["solve"]["sweeps"] == int(free.n_sweeps) and answer["solve"]["converged"]
    assert (
        answer["solve"]["residual"] == pytest.approx(float(free.residual))
        and answer["solve"]["residual"] <= answer["solve"]["allowed"]
    )
    assert answer["solve"]["error"] == pytest.approx(float(free.error_bound))
    for found, z in zip(answer["activations"], free.activations, strict=True):
        np.testing.assert_allclose(found, z[0], atol=ROUNDED)
    for label, gap in enumerate(answer["gaps"]):
        target = torch.zeros((1, 10), dtype=torch.float64)
        target[0, label] = 1
        expected = float((net.infer(x, target).energy - free.energy)[0])
        assert gap == pytest.approx(expected, abs=1e-6) and gap >= 0
    # what layer 1 stands for, from the definition: W_0^T z_1 - c_0, in grey values
    w, c = (p[0].detach().double().numpy() for p in (net.W, net.c))
    seen = (free.activations[0][0].numpy() @ w - c) * model.scale_in_ + model.offset_in_
    np.testing.assert_allclose(answer["reconstructions"][0], seen / session.high, atol=ROUNDED)
    assert len(answer["reconstructions"]) == 3 and answer["reconstructions"][2] is None  # an output with beta 0 does not


def test_familiar_and_strange_are_quantiles_of_held_out_energies(plain):
    reference = plain.reference
    energies = np.sort(reference.energies["samples"])
    X = digits()[0]
    verdicts = {plain.analyse(X[k])["energy"]["verdict"] for k in np.argsort(plain.model.energy(X))[:5]}
    assert verdicts == {"familiar"}
    low = dataclasses.replace(reference, energies={"samples": np.array([1e-9])})
    assert Session(plain.model, (8, 8), low).analyse(X[0])["energy"]["verdict"] == "strange"
    nothing = Session(plain.model, (8, 8), None).analyse(X[0])["energy"]
    assert nothing["verdict"] is None and nothing["share"] is None and nothing["value"] > 0
    assert len(energies) == 200


def test_the_tight_radius_lies_between_the_quick_one_and_the_attack(session):
    for pixels in digits()[0][:2]:
        quick, tight = session.analyse(pixels)["radius"], session.tighten(pixels)["radius"]
        local = float(session.model.certified_radius((pixels * session.high)[None], "local", 1.0)[0])
        assert tight == pytest.approx(max(quick, local), rel=1e-6)
        assert quick <= tight <= session.attack(pixels, False)["distance"]


def test_attacks_grow_with_the_norm_and_none_breaks_the_guarantee(session):
    for pixels in digits()[0][3:5]:
        found, radius = session.attack(pixels, False), session.tighten(pixels)["radius"]
        norms, images, scores = (np.array(found[key]) for key in ("norms", "images", "scores"))
        predictions, label = np.array(found["predictions"]), found["label"]
        assert label == session.analyse(pixels)["prediction"]
        assert norms[0] == 0 and norms[-1] == pytest.approx(1.6 * found["distance"], rel=1e-3)
        sizes = np.linalg.norm(images - pixels, axis=1) * session.high
        assert (sizes <= norms + 8 * ROUNDED * session.high).all()
        assert (predictions[norms < radius] == label).all()
        assert (predictions[norms > found["distance"] * 1.001] != label).all()
        rest = np.delete(scores, label, axis=1).max(axis=1) - scores[:, label]
        assert (np.diff(rest) >= -2 * ROUNDED).all()  # more is allowed, so no less is done
        np.testing.assert_allclose(scores[[0, -1]], session.model.decision_function(images[[0, -1]] * session.high), atol=5e-3)


def test_an_attack_that_keeps_an_image_an_image_is_no_stronger(session):
    pixels = digits()[0][7]
    kept, free = session.attack(pixels, True), session.attack(pixels, False)
    images = np.array(kept["images"])
    assert images.min() >= -ROUNDED and images.max() <= 1 + ROUNDED
    assert kept["distance"] >= 0.999 * free["distance"]


def test_where_no_attack_succeeds_the_slider_still_has_a_scale():
    model = fitted(epochs=1)
    for parameter in model.network_.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        model.network_.b[-1][3] = 1.0  # says 3, whatever it sees
    constant = session_of(model)
    found = constant.attack(digits()[0][0], False)
    assert found["distance"] is None and found["norms"][-1] > 0 and set(found["predictions"]) == {3}
    assert constant.attack(np.zeros(64), False)["norms"][-1] > 0


def test_clamping_costs_the_energy_between_the_phases(session):
    pixels = digits()[0][2]
    model, answer = session.model, session.analyse(pixels)
    x = torch.as_tensor(((pixels * session.high)[None] - model.offset_in_) / model.scale_in_)
    for label in (0, 7):
        held = session.clamp(pixels, label)
        target = torch.zeros((1, 10), dtype=torch.float64)
        target[0, label] = 1
        clamped = model.network_.infer(x, target)
        assert held["gap"] == pytest.approx(answer["gaps"][label], abs=1e-6)
        assert held["energy"] == pytest.approx(float(clamped.energy), rel=1e-9)
        np.testing.assert_allclose(held["activations"][-1], target[0])
        assert held["free"] == answer["reconstructions"] and held["reconstructions"][1] != held["free"][1]
    with pytest.raises(ValueError, match="a number from 0 to 9; got 10"):
        session.clamp(pixels, 10)


def test_an_energy_model_shows_what_applies_to_it():
    X = datasets.load("digits", "train")[0]
    model = LRRNEnergyModel(hidden_sizes=(12, 8), epochs=3, random_state=0, device="cpu").fit(X)
    session = session_of(model)
    test = digits()[0]
    for pixels in (test[0], 1 - test[0]):
        answer = session.analyse(pixels)
        assert answer["energy"]["verdict"] == ("strange" if model.predict(pixels[None])[0] == -1 else "familiar")
        assert answer["energy"]["threshold"] == -model.offset_ and "scores" not in answer
        assert answer["radius"] == pytest.approx(model.certified_radius(pixels[None])[0], rel=1e-9)
        assert all(image is not None for image in answer["reconstructions"])
    for ask in (session.tighten, lambda x: session.attack(x, False), lambda x: session.clamp(x, 0)):
        with pytest.raises(ValueError, match="no labels"):
            ask(test[0])
    overview = describe(session, "em")
    assert overview["kind"] == "energy model" and overview["classes"] == [] and overview["reference"]["curve"] is None


def test_a_classifier_by_energies_is_certified_by_them_and_not_attacked():
    model = fitted(objective="class_energy", epochs=2)
    session = session_of(model)
    pixels = digits()[0][0]
    answer = session.analyse(pixels)
    assert answer["scores"] == pytest.approx(model.decision_function(pixels[None])[0], abs=ROUNDED)
    assert answer["radius"] == pytest.approx(model.certified_radius(pixels[None])[0], rel=1e-9)
    with pytest.raises(ValueError, match="least energy"):
        session.attack(pixels, False)
    assert session.clamp(pixels, 3)["gap"] > 0


def test_wide_networks_have_no_local_radii(monkeypatch, plain):
    monkeypatch.setattr("lrrn.explore.session.LOCAL_UNITS", 20)
    with pytest.raises(ValueError, match="more than 20 hidden units"):
        plain.tighten(digits()[0][0])


# --- the overview -----------------------------------------------------------------------------------------------------


def test_the_overview_shows_filters_samples_curve_and_histograms(plain):
    overview = json.loads(json.dumps(describe(plain, "a model")))
    assert overview["sizes"] == [64, 16, 12, 10] and overview["classes"] == list("0123456789") and overview["shape"] == [8, 8]
    w = [p.detach().double().numpy() for p in plain.model.network_.W]
    for shown, product in zip(overview["filters"], (w[0], w[1] @ w[0], w[2] @ w[1] @ w[0]), strict=True):
        expected = 100 * product / np.abs(product).max(axis=1, keepdims=True)
        np.testing.assert_allclose(shown["images"], expected, atol=0.51)
    X, y = digits()
    assert [sample["label"] for sample in overview["samples"]] == [*range(10), *range(10)]
    first = overview["samples"][4]
    np.testing.assert_allclose(first["pixels"], X[np.flatnonzero(y == 4)[0]], atol=ROUNDED)
    curve, radii = overview["reference"]["curve"], plain.reference.radii
    assert curve["shares"][0] == 0.9  # the accuracy
    for norm, share in list(zip(curve["norms"], curve["shares"], strict=True))[1::20]:
        assert share == pytest.approx(np.mean(radii > norm), abs=0.01)
    assert curve["median"] == np.median(radii)
    for shares in overview["reference"]["energies"]["shares"].values():
        assert sum(shares) == pytest.approx(1, abs=1e-3)


def test_a_histogram_counts_what_lies_beyond_its_end(plain):
    far = dataclasses.replace(plain.reference, energies={"samples": np.ones(100), "odd": np.array([*np.full(99, 0.5), 1e6])})
    shares = compared(far)["energies"]["shares"]["odd"]
    assert sum(shares) == pytest.approx(1) and shares[-1] == pytest.approx(0.01)


# --- opening ----------------------------------------------------------------------------------------------------------


def test_digits_are_trained_on_the_spot_and_told_of(monkeypatch):
    monkeypatch.setattr(opening, "EPOCHS", 6)
    told = []
    opened = train_digits(0, "cpu", lambda done, total: told.append((done, total)))
    assert told == [(k, 6) for k in range(7)]
    session = opened.session
    assert session.reference.score > 0.9 and len(session.reference.samples) == 240
    # its energy tells strange inputs, which a classifier's does not unless it is trained to
    scrambled = digits()[0][:, np.random.default_rng(0).permutation(64)]
    assert np.mean(session.model.energy(scrambled) > np.quantile(session.reference.energies["samples"], 0.9)) > 0.8
    better = opened.refine()
    assert better.score == session.reference.score and (better.radii >= session.reference.radii * (1 - 1e-9)).all()
    assert better.radii.sum() > session.reference.radii.sum()


def test_models_are_opened_with_what_their_file_holds(tmp_path, plain):
    path = tmp_path / "m.safetensors"
    lrrn.save(plain.model, path)
    bare = open_file(path, "cpu", None, None).session
    assert bare.image_shape == (8, 8) and bare.reference is None and (bare.low, bare.high) == (0.0, 1.0)
    assert "nothing of held-out samples" in describe(bare, "m")["reference"]
    lrrn.save(plain.model, path, plain.reference)
    assert open_file(path, "cpu", None, None).session.reference.source == "digits, held out"
    assert open_file(path, "cpu", (4, 16), None).session.image_shape == (4, 16)
    X, y = digits(50)
    named = open_file(path, "cpu", None, ("some digits", X, y)).session.reference
    assert named.source == "some digits" and len(named.radii) == 50
    unlabelled = open_file(path, "cpu", None, ("some digits", X, None)).session.reference
    assert unlabelled.radii is None and (unlabelled.labels == -1).all()


def test_what_cannot_be_explored_is_refused_with_a_reason(tmp_path):
    path = tmp_path / "m.safetensors"
    X, y = np.random.default_rng(0).random((30, 4)), np.arange(30) % 2
    lrrn.save(LRRNClassifier(hidden_sizes=(3,), epochs=1, random_state=0).fit(X, y), path)
    for shape, data, message in (
        (None, None, "takes 4 features, which make no square image"),
        ((3, 2), None, "images of 3x2 have 6 pixels"),
        ((2, 2), ("t.csv", np.zeros((3, 5)), None), "t.csv has 5 features"),
    ):
        with pytest.raises(ValueError, match=message):
            open_file(path, "cpu", shape, data)
    assert open_file(path, "cpu", (2, 2), None).session.n_pixels == 4
    lrrn.save(LRRNRegressor(hidden_sizes=(3,), epochs=1, random_state=0).fit(X, y), path)
    with pytest.raises(ValueError, match="holds a LRRNRegressor, which predicts numbers"):
        open_file(path, "cpu", None, None)
    lrrn.save(lrrn.LRRN((25, 2)), path)
    with pytest.raises(ValueError, match="holds a bare network"):
        open_file(path, "cpu", None, None)


# --- the server -------------------------------------------------------------------------------------------------------


class Served:
    """An explorer on a port of its own, and a way to ask it that leaves every header to the test."""

    def __init__(self, explorer):
        self.listener = bind("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.server = prepared(explorer, "127.0.0.1", self.listener)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        explorer.start()
        self.thread.start()

    def ask(self, method, path, body=None, **headers):
        given = {"Host": f"127.0.0.1:{self.port}", **({"Content-Type": "application/json"} if body is not None else {})}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        if content is not None:
            given.setdefault("Content-Length", str(len(content)))
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.putrequest(method, path, skip_host=True)
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(content)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    def end(self):
        self.server.should_exit = True
        self.thread.join(10)
        self.listener.close()


@pytest.fixture(scope="module")
def served(plain):
    explorer = Explorer("a model", lambda progress: Opened(plain))
    running = Served(explorer)
    while explorer.state()["phase"] == "opening":
        time.sleep(0.02)
    yield running
    running.end()


def test_the_page_asks_nobody_else(served):
    status, headers, page = served.ask("GET", "/")
    assert status == 200 and headers["content-type"].startswith("text/html") and b"lrrn explorer" in page
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    names = re.findall(rb'(?:src|href)="([^"]+)"', page)
    assert {b"app.js", b"style.css", b"favicon.svg"} <= set(names)
    for file in files("lrrn.explore").joinpath("page").iterdir():
        content = file.read_text()
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", re.sub(r"(?m)^\s*//.*$", "", content)))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name
        path = "/" if file.name == "index.html" else f"/{file.name}"
        assert served.ask("GET", path)[2].decode() == content


def test_questions_are_answered_as_the_session_answers(served, plain):
    pixels = digits()[0][1].round(4)
    status, _, body = served.ask("POST", "/api/analyse", {"pixels": pixels.tolist()})
    assert status == 200 and json.loads(body) == json.loads(json.dumps(plain.analyse(pixels)))
    assert json.loads(served.ask("POST", "/api/clamp", {"pixels": pixels.tolist(), "label": 2})[2])["label"] == 2
    assert len(json.loads(served.ask("POST", "/api/attack", {"pixels": pixels.tolist(), "keep": True})[2])["images"]) == 41
    assert json.loads(served.ask("POST", "/api/tighten", {"pixels": pixels.tolist()})[2])["radius"] > 0
    state = json.loads(served.ask("GET", "/api/state")[2])
    assert state["phase"] == "ready" and state["version"] >= 1
    assert json.loads(served.ask("GET", "/api/model")[2])["name"] == "a model"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"not json", 400, "cannot be read"),
        (b"[1, 2]", 400, "it is a list"),
        (b"[" * 2000, 400, "cannot be read"),
        ({}, 400, "should be 8 x 8 grey values from 0 to 1, row by row; got NoneType"),
        ({"pixels": [0.5] * 63}, 400, "got 63 values"),
        ({"pixels": ["0.5"] * 64}, 400, "no such numbers"),
        ({"pixels": [True] * 64}, 400, "no such numbers"),
        ({"pixels": [1.5] * 64}, 400, "no such numbers"),
        (b'{"pixels": [' + b", ".join([b"NaN"] * 64) + b"]}", 400, "no such numbers"),
        ({"pixels": [0.123456789] * 4000}, 413, "takes no more than 2560 bytes"),
    ],
)
def test_malformed_and_oversized_images_get_a_clear_message(served, body, status, message):
    found, _, answer = served.ask("POST", "/api/analyse", body)
    assert found == status and message in json.loads(answer)["error"]


def test_a_body_larger_than_it_says_is_cut_off(served):
    found, _, answer = served.ask("POST", "/api/analyse", b"x" * 9, Content_Length="99999999999")
    assert found == 413 and "takes no more" in json.loads(answer)["error"]
    chunks = iter([b"x" * 1000] * 50)
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)) as connection:
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        connection.request("POST", "/api/analyse", body=chunks, headers=headers, encode_chunked=True)
        assert connection.getresponse().status == 413


def test_other_questions_and_paths_are_refused(served):
    pixels = [0.0] * 64
    for path, body, status, message in (
        ("/api/clamp", {"pixels": pixels, "label": "3"}, 400, "number of a class"),
        ("/api/clamp", {"pixels": pixels, "label": -1}, 400, "from 0 to 9"),
        ("/api/attack", {"pixels": pixels, "keep": 1}, 400, "true or false"),
        ("/api/nothing", {}, 404, "nothing at /api/nothing"),
        ("/api/state", {}, 405, "POST is not for"),
    ):
        found, headers, answer = served.ask("POST", path, body)
        assert found == status and message in json.loads(answer)["error"], path
        assert "content-security-policy" in headers
    assert served.ask("GET", "/../pyproject.toml")[0] == 404
    assert served.ask("GET", "/api/analyse")[0] == 405


def test_strangers_are_refused(served):
    here = f"127.0.0.1:{served.port}"
    image = {"pixels": [0.0] * 64}
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"evil.example:{served.port}"},  # its DNS points here
        {"Host": f"127.0.0.1.evil.example:{served.port}"},
        {"Host": "127.0.0.1:1"},
        {"Host": f"192.168.1.5:{served.port}"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://localhost:{served.port}"},  # ours, but not the one that was asked
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Content_Type": "text/plain"},  # what a form of a stranger's page can send without asking
        {"Content_Type": None},
    ):
        status, sent, answer = served.ask("POST", "/api/analyse", image, **headers)
        assert status in (400, 403) and b"scores" not in answer, headers
        assert status == 400 or "content-security-policy" in sent
    assert served.ask("POST", "/api/analyse", image, Origin=f"http://{here}", Sec_Fetch_Site="same-origin")[0] == 200
    assert served.ask("GET", "/", Host=f"localhost:{served.port}")[0] == 200
    assert served.ask("GET", "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
    assert served.ask("GET", "/api/model", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")[0] == 403


@pytest.mark.parametrize(
    ("bound", "host", "fine"),
    [
        ("127.0.0.1", "127.0.0.1:8137", True),
        ("127.0.0.1", "LOCALHOST:8137", True),
        ("127.0.0.1", "[::1]:8137", True),
        ("127.0.0.1", "10.0.0.7:8137", False),
        ("127.0.0.1", "localhost:80", False),
        ("127.0.0.1", "localhost", False),
        ("127.0.0.1", "user@localhost:8137", False),
        ("127.0.0.1", "localhost:8137/x", False),
        ("127.0.0.1", "[::1:8137", False),
        ("127.0.0.1", "localhost:x", False),
        ("0.0.0.0", "10.0.0.7:8137", True),
        ("0.0.0.0", "evil.example:8137", False),
        ("lab.example", "lab.example:8137", True),
        ("lab.example", "evil.example:8137", False),
    ],
)
def test_hosts(bound, host, fine):
    assert (Guard(None, bound, 8137).objection("GET", [(b"host", host.encode())]) is None) == fine


def test_a_request_for_two_hosts_or_none_is_refused():
    guard = Guard(None, "127.0.0.1", 8137)
    assert guard.objection("GET", []) is not None
    assert guard.objection("GET", [(b"host", b"localhost:8137"), (b"host", b"evil.example")]) is not None


def test_before_the_model_is_there_and_if_it_never_comes():
    go = threading.Event()

    def opener(progress):
        progress(3, 30)
        go.wait(30)
        raise ValueError("no such luck")

    running = Served(Explorer("late", opener))
    try:
        while json.loads(running.ask("GET", "/api/state")[2])["total"] == 0:
            time.sleep(0.01)
        assert json.loads(running.ask("GET", "/api/state")[2]) == {
            "phase": "opening",
            "done": 3,
            "total": 30,
            "error": None,
            "version": 0,
            "refined": False,
        }
        for method, path, body in (("GET", "/api/model", None), ("POST", "/api/analyse", {"pixels": []})):
            status, _, answer = running.ask(method, path, body)
            assert status == 503 and "still being trained" in json.loads(answer)["error"]
        go.set()
        while (state := json.loads(running.ask("GET", "/api/state")[2]))["phase"] == "opening":
            time.sleep(0.01)
        assert state["phase"] == "failed" and "no such luck" in state["error"]
    finally:
        running.end()


def test_an_error_of_ours_is_logged_and_not_shown_to_the_page(plain, monkeypatch, caplog):
    running = Served(Explorer("a model", lambda progress: Opened(plain)))
    try:
        while json.loads(running.ask("GET", "/api/state")[2])["phase"] == "opening":
            time.sleep(0.01)
        monkeypatch.setattr(Session, "analyse", lambda self, pixels: 1 / 0)
        status, _, answer = running.ask("POST", "/api/analyse", {"pixels": [0.0] * 64})
        assert status == 500 and "terminal" in json.loads(answer)["error"] and b"division" not in answer
        assert "/api/analyse failed" in caplog.text and "ZeroDivisionError" in caplog.text
    finally:
        running.end()


# --- the command ------------------------------------------------------------------------------------------------------

WATCHED = """
import json, sys
log = open(sys.argv[1], "a", buffering=1)
def watch(event, arguments):
    if event in ("open", "socket.bind", "socket.connect", "os.remove", "os.rename", "os.mkdir"):
        log.write(json.dumps([event, [str(argument) for argument in arguments]]) + "\\n")
sys.addaudithook(watch)
from lrrn.cli import app
app(sys.argv[2:])
"""


def test_the_command_serves_until_interrupted_reads_the_model_alone_and_writes_nothing(tmp_path, plain):
    model, told, log = tmp_path / "m.safetensors", tmp_path / "told.json", tmp_path / "log"
    lrrn.save(plain.model, model, plain.reference)
    private = tmp_path / "data"
    private.mkdir()
    command = [
        sys.executable,
        "-B",
        "-c",
        WATCHED,
        str(log),
        "explore",
        str(model),
        "--port",
        "0",
        "--no-open",
        "--json",
        str(told),
    ]
    environment = {**os.environ, "LRRN_DATA": str(private)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    )
    try:
        end = time.monotonic() + 180
        while not told.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.1)
        found = json.loads(told.read_text())
        host, port = re.fullmatch(r"http://([\d.]+):(\d+)/", found["address"]).groups()
        assert host == "127.0.0.1" and found["model"] == "m.safetensors" and found["process"] == process.pid

        def ask(path, body=None):
            headers = {"Content-Type": "application/json"}
            with closing(http.client.HTTPConnection(host, int(port), timeout=120)) as connection:
                connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
                return json.loads(connection.getresponse().read())

        while ask("/api/state")["phase"] == "opening":
            time.sleep(0.2)
        start = len(log.read_text().splitlines())
        pixels = digits()[0][0].tolist()
        assert "scores" in ask("/api/analyse", {"pixels": pixels})
        assert "images" in ask("/api/attack", {"pixels": pixels})
        assert "radius" in ask("/api/tighten", {"pixels": pixels})
        assert "gap" in ask("/api/clamp", {"pixels": pixels, "label": 1})
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, errors
    assert "until you press Ctrl-C" in output and errors == ""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    opened = [arguments for event, arguments in events if event == "open"]
    written = {path for path, mode, flags in opened if int(flags) & (os.O_WRONLY | os.O_RDWR) and path != "/dev/null"}
    # what --json asked for, by way of a neighbour (and its descriptor); Numba sees whether it could keep compiled kernels
    # beside their sources
    asked = re.compile(rf"{re.escape(str(tmp_path))}(/told\.json|/\.told\.json\.\w+\.part)?|[0-9]+")
    assert not [path for path in written if not (path.endswith("__pycache__") or asked.fullmatch(path))]
    changed = [arguments[0] for event, arguments in events if event in ("os.remove", "os.rename", "os.mkdir")]
    assert not [path for path in changed if not (path.endswith("__pycache__") or asked.fullmatch(path))]
    below = {path for path, _, _ in opened if path.startswith(str(tmp_path))}
    # safetensors reads the file without Python, so it may not be among them
    assert {path for path in below if not asked.fullmatch(path)} <= {str(model)}
    bound = {arguments[1] for event, arguments in events if event == "socket.bind"}
    assert bound == {"('127.0.0.1', 0)"}
    assert not [arguments for event, arguments in events if event == "socket.connect"]
    later = {path for event, (path, *_) in events[start:] if event == "open"}
    code = (".py", ".pyc", ".so", ".nbc", ".nbi")  # modules that are imported, kernels that are loaded when first needed
    assert not {path for path in later if not path.endswith(code) and "/proc/" not in path}


def test_without_its_packages_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr("lrrn.explore.find_spec", lambda name: None if name == "uvicorn" else name)
    done = CliRunner().invoke(app, ["explore"], terminal_width=200)
    assert done.exit_code == 1 and "needs uvicorn: pip install 'lrrn[explore]'" in done.output


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--image", "8by8"], 2, "HEIGHTxWIDTH, such as 28x28; got '8by8'"),
        (["--image", "8x8"], 1, "--samples and --image are for a model of yours"),
        (["--port", "70000"], 2, "--port"),
        (["no.safetensors"], 1, "no file no.safetensors"),
        (["--samples", "cats"], 2, "unknown data 'cats'"),
        (["--device", "tpu"], 2, "unknown device 'tpu'"),
        (["--json", "/no/such/folder/x.json"], 2, "folder does not exist; make it first"),
        (["--host", "203.0.113.1", "--port", "0"], 1, "give a --host that is an address of this machine"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(arguments, status, message):
    done = CliRunner().invoke(app, ["explore", *arguments], terminal_width=200)
    assert done.exit_code == status and message in " ".join(done.output.replace("│", " ").split()), done.output


def test_ports():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert address(first) == f"http://127.0.0.1:{port}/"
        with pytest.raises(OSError, match=rf"port {port}: .*try --port 0"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", None) as usual, bind("127.0.0.1", None) as other:
        assert usual.getsockname()[1] != other.getsockname()[1]


def test_answers_are_sent_at_once():
    """Small packets do not wait for receipts, which systems delay by 40 ms: asyncio sees to that for sockets known as TCP."""

    async def accepted(listener) -> int:
        found = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda _, writer: found.set_result(writer), sock=listener)
        async with server:
            _, client = await asyncio.open_connection(*listener.getsockname())
            writer = await found
            at_once = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            client.close()
        return at_once

    assert asyncio.run(accepted(bind("127.0.0.1", 0)))


def test_the_session_needs_no_server_packages():
    code = "import sys; sys.modules['starlette'] = sys.modules['uvicorn'] = None; import lrrn.explore.explorer"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
