"""The explorer's page in a real browser: what people do with it, and what it asks of whom."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

import chromium
import lrrn
from lrrn import LRRNClassifier, datasets
from lrrn.reports.evaluation import energies_of, reference_of

pytest.importorskip("starlette", reason="the explorer's server needs the extra explore")
pytestmark = pytest.mark.skipif(
    chromium.find() is None, reason="no Chromium here: apt-get install chromium, or set CHROMIUM to one"
)

ARTEFACTS = Path(__file__).resolve().parents[2] / "out" / "browser"
WAIT = float(os.environ.get("LRRN_BROWSER_WAIT", "60"))
"""Seconds to wait for anything to happen; machines that are busy need more."""
SEEN = """((canvas) => {
  const copy = new OffscreenCanvas(8, 8).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return Array.from(copy.getImageData(0, 0, 8, 8).data);
})(document.querySelector("#reconstructions canvas"))"""
"""The image as the network sees it, in bytes of red, green, blue and alpha."""
HOME, END, RIGHT, DOWN = ("Home", 36), ("End", 35), ("ArrowRight", 39), ("ArrowDown", 40)


class Server:
    """``lrrn explore`` as people start it."""

    def __init__(self, folder, *arguments):
        told = folder / "told.json"
        command = [sys.executable, "-m", "lrrn", "explore", *arguments, "--port", "0", "--no-open", "--json", str(told)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.url = chromium.wait_for(told, self.process, WAIT)["address"]

    def end(self):
        self.process.send_signal(signal.SIGINT)
        errors = self.process.communicate(timeout=30)[1]
        assert self.process.returncode == 0 and errors == "", errors


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = Server(tmp_path_factory.mktemp("server"))
    yield running
    running.end()


@pytest.fixture(scope="module")
def requests():
    """Everything any page of these tests asked for, kept as an artefact."""
    urls: list[str] = []
    yield urls
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    (ARTEFACTS / "requests.json").write_text(json.dumps(urls, indent=1) + "\n")


def opened(server, requests, **options):
    browser = chromium.Browser(chromium.find(), **options)
    browser.requests = requests
    browser.open(server.url)
    browser.until("!document.getElementById('main').hidden", WAIT)
    browser.until("/[0-9a-z]/.test(document.getElementById('prediction').innerText)", WAIT)
    return browser


@pytest.fixture(scope="module")
def shared(server, requests):
    with opened(server, requests) as browser:
        yield browser
        assert browser.problems == []


@pytest.fixture
def browser(shared):
    """The page, empty."""
    shared.run("document.querySelector('input[value=pen]').click()")
    shared.click("#clear")
    settled(shared)  # until the answer to the empty page is there, what is shown belongs to the last test
    return shared


def settled(browser, card="answer-card"):
    """Wait until what a card shows is the answer to the image as it is now."""
    browser.until(f"document.getElementById('{card}').ariaBusy === 'false'", WAIT)


def write(browser, digit, **options):
    for line in chromium.strokes(digit):
        browser.draw("#pad", line, **options)


def says(browser, selector, text):
    browser.until(f"document.querySelector({json.dumps(selector)}).innerText.includes({json.dumps(text)})", WAIT)


def pick(browser, label):
    """Choose the first sample of a class and wait for everything that follows."""
    browser.run(f"document.querySelector('#samples-grid button[aria-label$=\"a {label}\"]').click()")
    settled(browser)
    says(browser, "#radius-note", "tight")
    browser.until("!document.getElementById('norm').disabled && !document.getElementById('mark-attack').hidden", WAIT)


# --- drawing ----------------------------------------------------------------------------------------------------------


def test_drawing_a_digit_shows_its_class_and_another_changes_it(browser):
    write(browser, 1)
    says(browser, "#prediction", "1")
    browser.click("#clear")
    write(browser, 0)
    settled(browser)
    assert browser.text("#prediction") == "0"
    assert browser.text(".bar.best .name") == "0" and float(browser.text("#margin")) > 0
    assert browser.text("#familiarity") in ("familiar", "unusual")
    assert "sweeps of coordinate descent" in browser.text("#solve")
    quick = float(browser.text("#radius"))
    says(browser, "#radius-note", "tight")
    assert float(browser.text("#radius")) >= quick > 0
    browser.screenshot(ARTEFACTS / "drawn.png", whole=True)


def test_while_the_pen_moves_questions_do_not_pile_up(browser, requests):
    before = sum(url.endswith("/api/analyse") for url in requests)
    moves = sum(len(line) for line in chromium.strokes(8))
    write(browser, 8, pause=0.0)
    says(browser, "#prediction", "8")
    asked = sum(url.endswith("/api/analyse") for url in requests) - before
    assert 1 <= asked < moves
    assert browser.run("performance.getEntriesByName('stroke to answer').length") > 0
    assert "ms after the stroke" in browser.text("#timing")


def test_the_eraser_takes_away(browser):
    write(browser, 8)
    says(browser, "#prediction", "8")
    inked = f"{SEEN}.filter((value, at) => at % 4 === 0 && value < 128).length"
    before = browser.run(inked)
    browser.run("document.querySelector('input[value=eraser]').click()")
    browser.draw("#pad", [(0.2, 0.7), (0.8, 0.7), (0.8, 0.85), (0.2, 0.85)])
    browser.until(f"{inked} < {before}", WAIT)


def test_the_keyboard_draws(browser):
    browser.run("document.getElementById('fit').checked || document.getElementById('fit').click()")
    browser.run("document.getElementById('pad').focus()")
    browser.key(*RIGHT)
    for _ in range(3):
        browser.key(" ", 32, " ")
        browser.key(*DOWN)
    column = browser.until(f"((d) => d.filter((v, at) => at % 4 === 0 && v < 60).length === 3 && d)({SEEN})", WAIT)
    dark = [at // 4 for at in range(0, 256, 4) if column[at] < 60]
    assert dark == [4 * 8 + 4, 5 * 8 + 4, 6 * 8 + 4]


def test_clearing_leaves_nothing(browser):
    assert browser.run("!document.getElementById('pad-hint').hidden")
    assert browser.run("document.getElementById('norm').disabled")
    assert "Draw something" in browser.text("#attack-text")


# --- attack and clamp -------------------------------------------------------------------------------------------------


def test_the_slider_holds_inside_the_proof_and_breaks_beyond_the_attack(browser):
    pick(browser, 5)
    label = browser.text("#prediction")
    radius = float(browser.text("#mark-radius").split()[-1])
    distance = float(browser.text("#mark-attack").split()[-1])
    assert 0 < radius <= distance
    browser.run("document.getElementById('norm').focus()")
    browser.key(*HOME)
    assert "Untouched." in browser.text("#attack-text")
    seen = []
    for _ in range(40):
        browser.key(*RIGHT)
        norm = float(browser.text("#attack-norm").removeprefix("norm "))
        now, text = browser.text("#attack-label").removeprefix("seen as "), browser.text("#attack-text")
        seen.append(text.split()[0])
        if norm < 0.999 * radius:
            assert now == label and "Guaranteed." in text
        elif norm > 1.001 * distance:
            assert now != label and "Broken." in text and f"turns {label} into {now}" in text
        if len(seen) == 20:
            browser.screenshot(ARTEFACTS / "attack.png")
            browser.run("document.getElementById('norm').focus()")
    assert seen[0] == "Guaranteed." and seen[-1] == "Broken."
    assert "Broken" in browser.run("document.getElementById('norm').getAttribute('aria-valuetext')")
    browser.key(*HOME)
    browser.key(*END)
    assert "Broken." in browser.text("#attack-text")


def test_an_attack_may_be_held_to_images(browser):
    pick(browser, 2)
    free = float(browser.text("#mark-attack").split()[-1])
    browser.click("#keep")
    settled(browser, "attack-card")
    assert float(browser.text("#mark-attack").split()[-1]) >= 0.999 * free
    browser.click("#keep")


def test_clamping_a_label_shows_its_gap_and_what_it_does(browser):
    pick(browser, 7)
    browser.click("#labels button:nth-child(4)")
    says(browser, "#clamp-text", "Holding the output at 3 costs an energy of")
    assert browser.run("document.querySelector('#labels button:nth-child(4)').ariaPressed") == "true"
    gaps = browser.run("[...document.querySelectorAll('#labels .value')].map((e) => e.innerText)")
    assert len(gaps) == 10 and "7 would cost" in browser.text("#clamp-text")
    assert browser.run("document.querySelector('#clamp-figures figcaption:last-child') !== null")
    assert "up to 0.0" in browser.text("#clamp-figures")
    browser.screenshot(ARTEFACTS / "clamp.png", whole=True)
    browser.click("#labels button:nth-child(4)")
    says(browser, "#clamp-text", "Choose a label")


# --- uploads ----------------------------------------------------------------------------------------------------------


def png(path, grey):
    """Write a grey image of bytes as a PNG file."""
    rows = b"".join(b"\0" + row.tobytes() for row in grey)

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
    return path


def test_bad_uploads_get_a_clear_message_and_change_nothing(browser, tmp_path):
    write(browser, 0)
    says(browser, "#prediction", "0")
    notes = tmp_path / "notes.png"
    notes.write_text("this is no picture")
    browser.choose_file("#upload", notes)
    says(browser, "#message", "“notes.png” cannot be read as an image. Choose a PNG")
    large = tmp_path / "large.png"
    large.write_bytes(b"\x89PNG" + bytes(9 * 2**20))
    browser.choose_file("#upload", large)
    says(browser, "#message", "“large.png” has 9.0 MB; choose an image of at most 8.0 MB")
    wide = png(tmp_path / "wide.png", np.zeros((4200, 8000), np.uint8))
    browser.choose_file("#upload", wide)
    says(browser, "#message", "“wide.png” has 8000 by 4200 pixels; choose an image of at most 32 million")
    browser.screenshot(ARTEFACTS / "bad-upload.png")
    assert browser.text("#prediction") == "0"
    assert browser.run("document.getElementById('message').getAttribute('role')") == "alert"
    browser.click("#clear")
    assert browser.run("document.getElementById('message').hidden")


@pytest.mark.parametrize("inverted", [False, True], ids=["light on dark", "dark on light"])
def test_a_picture_is_cropped_shrunk_and_recognised(browser, tmp_path, inverted):
    X, y = datasets.load("digits", "test")
    image = X[np.flatnonzero(y == 6)[0]].reshape(8, 8)
    canvas = np.zeros((400, 600))
    canvas[40:360, 100:420] = np.kron(image, np.ones((40, 40)))
    grey = (255 * (1 - canvas if inverted else canvas)).astype(np.uint8)
    browser.choose_file("#upload", png(tmp_path / "six.png", grey))
    says(browser, "#prediction", "6")
    assert browser.run("document.getElementById('message').hidden")


# --- the rest of the page ---------------------------------------------------------------------------------------------


def test_everything_has_a_name_and_the_page_is_calm_about_colours(browser):
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "slider", "checkbox", "radio", "combobox", "image", "application")
    controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
    nameless = [node["role"]["value"] for node in controls if not node.get("name", {}).get("value")]
    assert len(controls) > 250 and nameless == []
    assert browser.run("document.documentElement.dataset.theme") == "light"
    browser.click("#theme")
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    browser.click("#theme")


@pytest.mark.parametrize("layer", [1, 2])
def test_filters_of_every_layer(browser, layer):
    browser.run(f"document.querySelectorAll('input[name=filter-layer]')[{layer}].click()")
    says(browser, "#filters-text", f"product of the first {layer + 1} weights")
    browser.run("document.querySelectorAll('input[name=filter-layer]')[0].click()")


def test_curve_and_histogram_mark_this_input(browser):
    pick(browser, 3)
    for chart in ("curve", "energies"):
        mark = f"document.querySelector('#{chart} .here')"
        assert browser.run(f"{mark}.getAttribute('visibility')") == "visible"
    assert "Median radius" in browser.text("#curve-text") and "AUROC" in browser.text("#energies-text")


def test_a_server_that_does_not_answer_is_said_to(browser):
    browser.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    write(browser, 1)
    says(browser, "#message", "does not answer. Is lrrn explore still running?")
    browser.call("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    browser.click("#clear")
    browser.until("document.getElementById('message').hidden", WAIT)
    time.sleep(0.2)
    browser.problems[:] = [problem for problem in browser.problems if "ERR_INTERNET_DISCONNECTED" not in problem]


def test_a_phone_draws_with_a_finger_and_never_scrolls_sideways(server, requests):
    with opened(server, requests, width=390, height=844, scale=2, mobile=True) as phone:
        for digit in (1, 0):
            phone.click("#clear")
            write(phone, digit, touch=True)
            says(phone, "#prediction", str(digit))
        assert phone.run("document.documentElement.scrollWidth <= innerWidth")
        controls = "[...document.querySelectorAll('button, select, .segmented span')]"
        small = phone.run(f"{controls}.filter((e) => e.offsetHeight && e.offsetHeight < 24).length")
        assert small == 0  # nothing too small for a finger
        says(phone, "#radius-note", "tight")
        phone.screenshot(ARTEFACTS / "phone.png", whole=True)
        assert phone.problems == []


def test_dark_colours_are_followed(server, requests):
    with opened(server, requests, dark=True) as night:
        assert night.run("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 22)"
        says(night, "#radius-note", "tight")
        night.screenshot(ARTEFACTS / "dark.png", whole=True)
        assert night.problems == []


def test_a_saved_model_of_larger_images(tmp_path, requests):
    X, y = datasets.load("digits", "train")
    larger = np.kron(X[:600].reshape(-1, 8, 8), np.ones((1, 3, 3)))
    larger = np.pad(larger, ((0, 0), (2, 2), (2, 2))).reshape(len(larger), -1).astype(np.float32)
    model = LRRNClassifier(hidden_sizes=(24, 16), epochs=5, random_state=0, device="cpu").fit(larger[:500], y[:500])
    held, labels = larger[500:], y[500:600]
    right = model.predict(held) == labels
    radii = np.where(right, model.certified_radius(held, "spectral"), 0.0)
    kept = reference_of(
        model, held, labels, (28, 28), "held out", 20, float(right.mean()), radii, energies_of(model, held, (28, 28))
    )
    path = tmp_path / "larger.safetensors"
    lrrn.save(model, path, kept)
    running = Server(tmp_path, str(path))
    try:
        with opened(running, requests) as browser:
            assert "larger.safetensors · 784-24-16-10" in browser.text("#model-line")
            browser.click("#clear")
            write(browser, 0)
            says(browser, "#prediction", "0")
            browser.until("!document.getElementById('norm').disabled", WAIT)
            browser.screenshot(ARTEFACTS / "larger.png", whole=True)
            assert browser.problems == []
    finally:
        running.end()


def test_nothing_but_this_machine_was_asked(shared, requests):
    assert len(requests) > 20 and requests[0].endswith("/") and any(url.endswith("/api/analyse") for url in requests)
    assert {urlsplit(url).hostname for url in requests} == {"127.0.0.1"}
    assert {urlsplit(url).scheme for url in requests} == {"http"}
