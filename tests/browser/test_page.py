"""The explorer's page in a real browser: what people do with it, and what it asks of whom."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from explorer_page import chromium, draw, explorer, find, new_page, strokes, until

import lrrn
from lrrn import LRRNClassifier, datasets
from lrrn.reports.evaluation import energies_of, reference_of

pytest.importorskip("starlette", reason="the explorer's server needs the extra explore")
pytest.importorskip("playwright", reason="driving a browser needs playwright, of the extra test")
pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium here: apt-get install chromium, or set CHROMIUM to one")

ARTEFACTS = Path(__file__).resolve().parents[2] / "out" / "browser"
WAIT = float(os.environ.get("LRRN_BROWSER_WAIT", "60"))
"""Seconds to wait for anything to happen; machines that are busy need more."""
SEEN = """((canvas) => {
  const copy = new OffscreenCanvas(8, 8).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return Array.from(copy.getImageData(0, 0, 8, 8).data);
})(document.querySelector("#reconstructions canvas"))"""
"""The image as the network sees it, in bytes of red, green, blue and alpha."""


@pytest.fixture(scope="module")
def server():
    with explorer(seconds=WAIT) as url:
        yield url


@pytest.fixture(scope="module")
def requests():
    """Everything any page of these tests asked for, kept as an artefact."""
    urls: list[str] = []
    yield urls
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    (ARTEFACTS / "requests.json").write_text(json.dumps(urls, indent=1) + "\n")


@pytest.fixture(scope="module")
def problems():
    """Errors and warnings of all pages: there should be none."""
    found: list[str] = []
    yield found
    assert found == []


@pytest.fixture(scope="module")
def opened(requests, problems):
    """How to open the explorer."""
    with chromium() as browser:

        def page_at(url, **options):
            page = new_page(browser, requests, problems, WAIT, **options)
            page.goto(url)
            until(page, "!document.getElementById('main').hidden", WAIT)
            until(page, "/[0-9a-z]/.test(document.getElementById('prediction').innerText)", WAIT)
            return page

        yield page_at


@pytest.fixture(scope="module")
def shared(server, opened):
    with opened(server) as page:
        yield page


@pytest.fixture
def page(shared):
    """The page, empty."""
    shared.evaluate("document.querySelector('input[value=pen]').click()")
    shared.click("#clear")
    settled(shared)  # until the answer to the empty page is there, what is shown belongs to the last test
    return shared


def settled(page, card="answer-card"):
    """Wait until what a card shows is the answer to the image as it is now."""
    until(page, f"document.getElementById('{card}').ariaBusy === 'false'", WAIT)


def write(page, digit, **options):
    for line in strokes(digit):
        draw(page, "#pad", line, **options)


def says(page, selector, text):
    until(page, f"document.querySelector({json.dumps(selector)}).innerText.includes({json.dumps(text)})", WAIT)


def pick(page, label):
    """Choose the first sample of a class and wait for everything that follows."""
    page.evaluate(f"document.querySelector('#samples-grid button[aria-label$=\"a {label}\"]').click()")
    settled(page)
    says(page, "#radius-note", "tight")
    until(page, "!document.getElementById('norm').disabled && !document.getElementById('mark-attack').hidden", WAIT)


# --- drawing ----------------------------------------------------------------------------------------------------------


def test_drawing_a_digit_shows_its_class_and_another_changes_it(page):
    write(page, 1)
    says(page, "#prediction", "1")
    page.click("#clear")
    write(page, 0)
    settled(page)
    assert page.inner_text("#prediction") == "0"
    assert page.inner_text(".bar.best .name") == "0" and float(page.inner_text("#margin")) > 0
    assert page.inner_text("#distribution") in ("in-distribution", "unusual")
    assert "sweeps of coordinate descent" in page.inner_text("#solve")
    quick = float(page.inner_text("#radius"))
    says(page, "#radius-note", "tight")
    assert float(page.inner_text("#radius")) >= quick > 0
    page.screenshot(path=ARTEFACTS / "drawn.png", full_page=True)


HELD_ANSWERS = """(() => {
  const { fetch } = window;
  window.held = { asked: 0 };
  const released = new Promise((done) => { window.held.release = done; });
  window.fetch = async (path, options) => {
    if (!String(path).endsWith("api/analyse")) return fetch(path, options);
    window.held.asked += 1;
    await released;
    return fetch(path, options);
  };
  window.held.restore = () => { window.fetch = fetch; };
})()"""
"""Hold back every answer until ``held.release()``, and count questions, so that nothing depends on the machine's speed."""


def test_while_the_pen_moves_questions_do_not_pile_up(page):
    page.evaluate(HELD_ANSWERS)
    write(page, 8, pause=0.0)
    page.evaluate(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
    )  # the last stroke is in
    while_waiting = page.evaluate("held.asked")
    page.evaluate("held.release()")
    settled(page)
    says(page, "#prediction", "8")
    page.evaluate("held.restore()")
    # one question under way while the pen moved, and then one about the image as it is at the end
    assert while_waiting == 1 and page.evaluate("held.asked") == 2
    assert page.evaluate("performance.getEntriesByName('stroke to answer').length") > 0
    assert "ms after the stroke" in page.inner_text("#timing")


def test_the_eraser_takes_away(page):
    write(page, 8)
    says(page, "#prediction", "8")
    inked = f"{SEEN}.filter((value, at) => at % 4 === 0 && value < 128).length"
    before = page.evaluate(inked)
    page.evaluate("document.querySelector('input[value=eraser]').click()")
    draw(page, "#pad", [(0.2, 0.7), (0.8, 0.7), (0.8, 0.85), (0.2, 0.85)])
    until(page, f"{inked} < {before}", WAIT)


def test_the_keyboard_draws(page):
    page.evaluate("document.getElementById('fit').checked || document.getElementById('fit').click()")
    page.evaluate("document.getElementById('pad').focus()")
    page.keyboard.press("ArrowRight")
    for _ in range(3):
        page.keyboard.press("Space")
        page.keyboard.press("ArrowDown")
    column = until(page, f"((d) => d.filter((v, at) => at % 4 === 0 && v < 60).length === 3 && d)({SEEN})", WAIT)
    dark = [at // 4 for at in range(0, 256, 4) if column[at] < 60]
    assert dark == [4 * 8 + 4, 5 * 8 + 4, 6 * 8 + 4]


def test_clearing_leaves_nothing(page):
    assert page.evaluate("!document.getElementById('pad-hint').hidden")
    assert page.evaluate("document.getElementById('norm').disabled")
    assert "Draw something" in page.inner_text("#attack-text")


# --- attack and clamp -------------------------------------------------------------------------------------------------


def test_the_slider_holds_inside_the_proof_and_breaks_beyond_the_attack(page):
    pick(page, 5)
    label = page.inner_text("#prediction")
    radius = float(page.inner_text("#mark-radius").split()[-1])
    distance = float(page.inner_text("#mark-attack").split()[-1])
    assert 0 < radius <= distance
    page.evaluate("document.getElementById('norm').focus()")
    page.keyboard.press("Home")
    assert "Untouched." in page.inner_text("#attack-text")
    seen = []
    for _ in range(40):
        page.keyboard.press("ArrowRight")
        norm = float(page.inner_text("#attack-norm").removeprefix("norm "))
        now, text = page.inner_text("#attack-label").removeprefix("seen as "), page.inner_text("#attack-text")
        seen.append(text.split()[0])
        if norm < 0.999 * radius:
            assert now == label and "Guaranteed." in text
        elif norm > 1.001 * distance:
            assert now != label and "Broken." in text and f"turns {label} into {now}" in text
        if len(seen) == 20:
            page.screenshot(path=ARTEFACTS / "attack.png")
    assert seen[0] == "Guaranteed." and seen[-1] == "Broken."
    assert "Broken" in page.evaluate("document.getElementById('norm').getAttribute('aria-valuetext')")
    page.keyboard.press("Home")
    page.keyboard.press("End")
    assert "Broken." in page.inner_text("#attack-text")


def test_until_attacks_are_found_the_scores_are_those_of_the_input(server, opened):
    widths = """Array.from(document.querySelectorAll("#attack-scores .fill"), (fill) => fill.getBoundingClientRect().width /
        fill.parentElement.getBoundingClientRect().width)"""
    values = "Array.from(document.querySelectorAll('{} .value'), (value) => value.innerText)"
    with opened(server) as page:
        page.route("**/api/attack", lambda route: None)  # is never answered
        for label in (3, 8):
            page.evaluate(f"document.querySelector('#samples-grid button[aria-label$=\"a {label}\"]').click()")
            settled(page)
            says(page, "#attack-text", "Looking for attacks")
            says(page, "#attack-label", f"seen as {page.inner_text('#prediction')}")
            shown = page.evaluate(values.format("#attack-scores"))
            assert shown == page.evaluate(values.format("#scores")) and len(shown) == 10
            scores = np.array([float(text.replace("\u2212", "-")) for text in shown])
            low, high = min(0.0, scores.min()), max(1.0, scores.max())
            np.testing.assert_allclose(page.evaluate(widths), np.maximum(np.abs(scores) / (high - low), 0.004), atol=0.01)


def test_an_attack_may_be_held_to_images(page):
    pick(page, 2)
    free = float(page.inner_text("#mark-attack").split()[-1])
    page.click("#keep")
    settled(page, "attack-card")
    assert float(page.inner_text("#mark-attack").split()[-1]) >= 0.999 * free
    page.click("#keep")


def test_clamping_a_label_shows_its_gap_and_what_it_does(page):
    pick(page, 7)
    page.click("#labels button:nth-child(4)")
    says(page, "#clamp-text", "Holding the output at 3 costs an energy of")
    assert page.evaluate("document.querySelector('#labels button:nth-child(4)').ariaPressed") == "true"
    gaps = page.evaluate("[...document.querySelectorAll('#labels .value')].map((e) => e.innerText)")
    assert len(gaps) == 10 and "7 would cost" in page.inner_text("#clamp-text")
    assert page.evaluate("document.querySelector('#clamp-figures figcaption:last-child') !== null")
    assert "up to 0.0" in page.inner_text("#clamp-figures")
    page.screenshot(path=ARTEFACTS / "clamp.png", full_page=True)
    page.click("#labels button:nth-child(4)")
    says(page, "#clamp-text", "Choose a label")


# --- uploads ----------------------------------------------------------------------------------------------------------


def png(path, grey):
    """Write a grey image of bytes as a PNG file."""
    rows = b"".join(b"\0" + row.tobytes() for row in grey)

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
    return path


def test_bad_uploads_get_a_clear_message_and_change_nothing(page, tmp_path):
    write(page, 0)
    says(page, "#prediction", "0")
    notes = tmp_path / "notes.png"
    notes.write_text("this is no picture")
    page.set_input_files("#upload", notes)
    says(page, "#message", "“notes.png” cannot be read as an image. Choose a PNG")
    large = tmp_path / "large.png"
    large.write_bytes(b"\x89PNG" + bytes(9 * 2**20))
    page.set_input_files("#upload", large)
    says(page, "#message", "“large.png” has 9.0 MB; choose an image of at most 8.0 MB")
    wide = png(tmp_path / "wide.png", np.zeros((4200, 8000), np.uint8))
    page.set_input_files("#upload", wide)
    says(page, "#message", "“wide.png” has 8000 by 4200 pixels; choose an image of at most 32 million")
    page.screenshot(path=ARTEFACTS / "bad-upload.png")
    assert page.inner_text("#prediction") == "0"
    assert page.evaluate("document.getElementById('message').getAttribute('role')") == "alert"
    page.click("#clear")
    assert page.evaluate("document.getElementById('message').hidden")


@pytest.mark.parametrize("inverted", [False, True], ids=["light on dark", "dark on light"])
def test_a_picture_is_cropped_shrunk_and_recognised(page, tmp_path, inverted):
    X, y = datasets.load("digits", "test")
    image = X[np.flatnonzero(y == 6)[0]].reshape(8, 8)
    canvas = np.zeros((400, 600))
    canvas[40:360, 100:420] = np.kron(image, np.ones((40, 40)))
    grey = (255 * (1 - canvas if inverted else canvas)).astype(np.uint8)
    page.set_input_files("#upload", png(tmp_path / "six.png", grey))
    says(page, "#prediction", "6")
    assert page.evaluate("document.getElementById('message').hidden")


# --- the rest of the page ---------------------------------------------------------------------------------------------


def test_everything_has_a_name_and_the_page_is_calm_about_colours(page):
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "slider", "checkbox", "radio", "combobox", "image", "application")
    controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
    nameless = [node["role"]["value"] for node in controls if not node.get("name", {}).get("value")]
    assert len(controls) > 250 and nameless == []
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.click("#theme")


@pytest.mark.parametrize("layer", [1, 2])
def test_filters_of_every_layer(page, layer):
    page.evaluate(f"document.querySelectorAll('input[name=filter-layer]')[{layer}].click()")
    says(page, "#filters-text", f"product of the first {layer + 1} weights")
    page.evaluate("document.querySelectorAll('input[name=filter-layer]')[0].click()")


def test_curve_and_histogram_mark_this_input(page):
    pick(page, 3)
    for chart in ("curve", "energies"):
        mark = f"document.querySelector('#{chart} .here')"
        assert page.evaluate(f"{mark}.getAttribute('visibility')") == "visible"
    assert "Median radius" in page.inner_text("#curve-text") and "AUROC" in page.inner_text("#energies-text")


def test_a_server_that_does_not_answer_is_said_to(page, problems):
    page.context.set_offline(True)
    write(page, 1)
    says(page, "#message", "does not answer. Is lrrn explore still running?")
    page.context.set_offline(False)
    page.click("#clear")
    until(page, "document.getElementById('message').hidden", WAIT)
    page.wait_for_timeout(200)
    problems[:] = [problem for problem in problems if "ERR_INTERNET_DISCONNECTED" not in problem]


def test_a_phone_draws_with_a_finger_and_never_scrolls_sideways(server, opened, problems):
    finger = {"device_scale_factor": 2, "is_mobile": True, "has_touch": True}
    with opened(server, viewport={"width": 390, "height": 844}, **finger) as phone:
        for digit in (1, 0):
            phone.click("#clear")
            write(phone, digit, touch=True)
            says(phone, "#prediction", str(digit))
        assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth")
        controls = "[...document.querySelectorAll('button, select, .segmented span')]"
        small = phone.evaluate(f"{controls}.filter((e) => e.offsetHeight && e.offsetHeight < 24).length")
        assert small == 0  # nothing too small for a finger
        says(phone, "#radius-note", "tight")
        phone.screenshot(path=ARTEFACTS / "phone.png", full_page=True)
        assert problems == []


def test_dark_colours_are_followed(server, opened, problems):
    with opened(server, color_scheme="dark") as night:
        assert night.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 22)"
        says(night, "#radius-note", "tight")
        night.screenshot(path=ARTEFACTS / "dark.png", full_page=True)
        assert problems == []


def test_a_saved_model_of_larger_images(tmp_path, opened, problems):
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
    with explorer(str(path), seconds=WAIT) as url, opened(url) as page:
        assert "larger.safetensors · 784-24-16-10" in page.inner_text("#model-line")
        page.click("#clear")
        write(page, 0)
        says(page, "#prediction", "0")
        until(page, "!document.getElementById('norm').disabled", WAIT)
        page.screenshot(path=ARTEFACTS / "larger.png", full_page=True)
        assert problems == []


def test_nothing_but_this_machine_was_asked(shared, requests):
    assert len(requests) > 20 and requests[0].endswith("/") and any(url.endswith("/api/analyse") for url in requests)
    assert {urlsplit(url).hostname for url in requests} == {"127.0.0.1"}
    assert {urlsplit(url).scheme for url in requests} == {"http"}
