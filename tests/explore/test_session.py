"""The explorer's answers are those of the model."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

from lrrn import LRRNEnergyModel, datasets
from lrrn.explore.explorer import Explorer
from lrrn.explore.opening import Opened
from lrrn.explore.overview import describe
from lrrn.explore.session import Session
from sessions import ROUNDED, digits, fitted, session_of


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


def test_in_and_out_of_distribution_are_quantiles_of_held_out_energies(plain):
    reference = plain.reference
    energies = np.sort(reference.energies["samples"])
    X = digits()[0]
    verdicts = {plain.analyse(X[k])["energy"]["verdict"] for k in np.argsort(plain.model.energy(X))[:5]}
    assert verdicts == {"in-distribution"}
    low = dataclasses.replace(reference, energies={"samples": np.full(25, 1e-9)})
    assert Session(plain.model, (8, 8), low).analyse(X[0])["energy"]["verdict"] == "out-of-distribution"
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
        assert answer["energy"]["verdict"] == (
            "out-of-distribution" if model.predict(pixels[None])[0] == -1 else "in-distribution"
        )
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
    # scores that are quadratic have no Lipschitz constant to show
    explorer = Explorer("by energies", lambda progress: Opened(session))
    explorer._open()
    assert explorer.state()["refined"] and explorer.overview()["lipschitz"] is None


def test_wide_networks_have_no_local_radii(monkeypatch, plain):
    monkeypatch.setattr("lrrn.explore.session.LOCAL_UNITS", 20)
    with pytest.raises(ValueError, match="more than 20 hidden units"):
        plain.tighten(digits()[0][0])


def test_the_session_needs_no_server_packages():
    code = "import sys; sys.modules['starlette'] = sys.modules['uvicorn'] = None; import lrrn.explore.explorer"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
