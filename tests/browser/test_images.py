"""The explorer's page with convolutions and with images in colour, in a real browser."""

from __future__ import annotations

import json
import re
import struct
import zlib

import numpy as np
import pytest
from explorer_page import draw, explorer, find, strokes, until

import lrrn
from browsing import ARTEFACTS, WAIT, says, settled
from lrrn import Conv, LRRNEnergyModel, datasets
from lrrn.persistence.published import read_radii
from sessions import colours, convolutional, in_colour, session_of
from shipped_folder import NAME, own_folder

pytest.importorskip("starlette", reason="the explorer's server needs the extra explore")
pytest.importorskip("playwright", reason="driving a browser needs playwright, of the extra test")
pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium here: apt-get install chromium, or set CHROMIUM to one")

BLUE, GREY = "#2040ff", (127.5, 127.5, 127.5)


@pytest.fixture(scope="module")
def page_of(opened, tmp_path_factory):
    """Opens the page of a session's model, saved with its reference."""

    def opens(session):
        path = tmp_path_factory.mktemp("saved") / "model.safetensors"
        lrrn.save(session.model, path, session.reference)
        with explorer(str(path), seconds=WAIT) as url, opened(url) as page:
            yield page

    return opens


@pytest.fixture(scope="module")
def convolutions(page_of):
    layers = (Conv(8, kernel=3, pool=2), Conv(6, kernel=2))
    yield from page_of(session_of(convolutional(hidden_sizes=layers, epochs=8)))


@pytest.fixture(scope="module")
def coloured(page_of):
    yield from page_of(session_of(in_colour(), data=lambda: colours(30, seed=1), shape=(3, 8, 8)))


@pytest.fixture
def empty(coloured):
    coloured.evaluate("document.getElementById('pen').click()")
    choose(coloured, "#ffffff")
    coloured.click("#clear")
    settled(coloured)
    return coloured


def bytes_of(page, selector):
    """Return a canvas as an array of shape (height, width, 3)."""
    found = page.evaluate(
        f"""((canvas) => {{
          const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {{ willReadFrequently: true }});
          copy.drawImage(canvas, 0, 0);
          return [canvas.height, canvas.width, Array.from(copy.getImageData(0, 0, canvas.width, canvas.height).data)];
        }})(document.querySelector({json.dumps(selector)}))"""
    )
    height, width, data = found
    return np.array(data).reshape(height, width, 4)[..., :3]


def choose(page, colour):
    """Choose the colour of the pen, as the browser's own dialog does."""
    page.evaluate(
        f"""((input) => {{ input.value = "{colour}"; input.dispatchEvent(new Event("input", {{ bubbles: true }})); }})(
        document.getElementById("colour"))"""
    )


def png(colour):
    """Return a PNG file of an array of bytes of shape (height, width, 3)."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", colour.shape[1], colour.shape[0], 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in colour)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


# --- convolutions -----------------------------------------------------------------------------------------------------


def test_a_convolutional_classifier_answers_strokes_and_shows_maps_and_kernels(convolutions, problems):
    page = convolutions
    assert "1x8x8 - 8 kernels of 3x3, pool 2 - 6 kernels of 2x2 - 10" in page.inner_text("#model-line")
    assert page.evaluate("document.getElementById('colour-part').hidden")
    page.click("#clear")
    for line in strokes(0):
        draw(page, "#pad", line)
    says(page, "#prediction", "0")
    assert "8 channels of 6 \u00d7 6" in page.inner_text("#activations")
    # eight maps side by side; the last cell of the last map is a unit of channel 8
    box = page.locator("#activations canvas").first.bounding_box()
    page.mouse.move(box["x"] + 0.995 * box["width"], box["y"] + 0.97 * box["height"])
    says(page, "#unit-text", "Layer 1, channel 8, row 6, column 6:")
    assert "its kernel" in page.inner_text("#unit-text") and bytes_of(page, "#unit-filter").shape == (3, 3, 3)
    until(page, "!document.getElementById('norm').disabled", WAIT)
    assert page.evaluate("document.getElementById('local-obstacle').hidden")
    assert "Kernels of the first layer: what raises a unit in red" in page.inner_text("#filters-text")
    page.screenshot(path=ARTEFACTS / "convolutions.png", full_page=True)
    page.evaluate("document.querySelectorAll('input[name=filter-layer]')[1].click()")
    says(page, "#filters-text", "Receptive fields of layer 2")
    # 6 fields of 6 x 6 pixels, in room for 8, with a pixel between them
    assert bytes_of(page, "#filters").shape == (6, 8 * 7 - 1, 3)
    page.evaluate("document.querySelectorAll('input[name=filter-layer]')[2].click()")
    says(page, "#filters-text", "Rows of the product of the first 3 weights")
    assert problems == []


def test_a_large_convolution_says_why_it_has_no_local_radius(opened, tmp_path, problems):
    model = convolutional(hidden_sizes=(Conv(90, kernel=3, padding=1),), epochs=1)
    lrrn.save(model, tmp_path / "large.safetensors")
    with explorer(str(tmp_path / "large.safetensors"), seconds=WAIT) as url, opened(url) as page:
        reason = page.inner_text("#local-obstacle")
        assert "needs a matrix of the size of all hidden units" in reason and "5,760" in reason
        assert "90 channels of 8 \u00d7 8, the first 64 shown" in page.inner_text("#activations")
        assert page.inner_text("#radius-note") == "proven" and problems == []


# --- images of shipped models -------------------------------------------------------------------------------------------


def test_a_test_image_of_a_shipped_model_stands_beside_its_attack(opened, tmp_path, monkeypatch, problems):
    known = read_radii(own_folder(tmp_path, monkeypatch).radii_path)
    _, y = datasets.load("digits", "test")
    with explorer(NAME, seconds=WAIT) as url, opened(url) as page:
        page.fill("#gallery-number", "17")
        page.keyboard.press("Tab")
        says(page, "#image-facts", "17 of digits")
        settled(page)
        np.testing.assert_allclose(
            bytes_of(page, "#attack-before")[..., 0], bytes_of(page, "#reconstructions canvas")[..., 0], atol=1
        )
        says(page, "#image-facts", "times the certified radius")
        facts = " ".join(page.inner_text("#image-facts").split())
        found = dict(re.findall(r"(true label|published radius|certified radius|nearest attack found) ([0-9.]+)", facts))
        assert int(found["true label"]) == y[17] and page.inner_text("#prediction") == str(known.predicted[17])
        assert float(found["published radius"]) == pytest.approx(float(known.radius[17]), abs=6e-4)
        assert (
            0.999 * float(found["published radius"]) <= float(found["certified radius"]) <= float(found["nearest attack found"])
        )
        page.screenshot(path=ARTEFACTS / "test-image.png", full_page=True)
        draw(page, "#pad", [(0.1, 0.1), (0.3, 0.1)])  # now it is another image
        settled(page)
        assert "published" not in page.inner_text("#image-facts") and "of digits" not in page.inner_text("#image-facts")
        page.fill("#gallery-number", "450")
        page.keyboard.press("Tab")
        until(page, "document.getElementById('message').innerText.includes('images from 0 to 449; got 450')", WAIT)
        # the browser itself notes the refusal
        assert len(problems) == 1 and "400" in problems.pop()


def test_in_a_large_convolution_proof_and_attack_are_on_request(opened, tmp_path, problems):
    model = convolutional(hidden_sizes=(Conv(90, kernel=3, padding=1),), epochs=1)
    lrrn.save(model, tmp_path / "large.safetensors")
    with explorer(str(tmp_path / "large.safetensors"), seconds=WAIT) as url, opened(url) as page:
        draw(page, "#pad", [(0.3, 0.2), (0.6, 0.2), (0.4, 0.8)])
        until(page, "!document.getElementById('search-part').hidden", WAIT)
        assert page.evaluate("document.getElementById('norm').disabled")
        assert "energy gaps of all labels take seconds" in page.inner_text("#clamp-obstacle").lower()
        page.click("#search")
        assert page.evaluate("document.getElementById('search').disabled && !document.getElementById('searching').hidden")
        until(page, "!document.getElementById('norm').disabled", WAIT)
        says(page, "#image-facts", "times the certified radius")
        assert page.inner_text("#radius-note") == "proven, shared"
        assert page.evaluate("!document.getElementById('search').disabled && document.getElementById('searching').hidden")
        page.screenshot(path=ARTEFACTS / "large-convolution.png", full_page=True)
        page.click("#clear")
        until(page, "document.getElementById('search-part').hidden", WAIT)
        assert problems == []


# --- colour -----------------------------------------------------------------------------------------------------------


def test_the_pen_draws_in_a_colour_and_the_eraser_takes_it_away(empty):
    page = empty
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    control = [node for node in nodes if not node["ignored"] and node["role"]["value"] == "ColorWell"]
    assert [node["name"]["value"] for node in control] == ["Colour"]
    box = page.locator("#colour").bounding_box()
    assert min(box["width"], box["height"]) >= 24
    draw(page, "#pad", [(0.2, 0.2), (0.8, 0.2)])
    until(page, "!document.getElementById('norm').disabled", WAIT)
    white = bytes_of(page, "#reconstructions canvas")
    assert (white[1, 2:6] > 200).all() and (white[4:] == 0).all()
    page.evaluate("document.querySelector('input[value=eraser]').click()")
    choose(page, BLUE)  # takes the pen again
    assert page.evaluate("document.getElementById('pen').checked")
    draw(page, "#pad", [(0.2, 0.8), (0.8, 0.8)])
    settled(page)
    until(page, "document.getElementById('prediction').innerText !== ''", WAIT)
    seen = bytes_of(page, "#reconstructions canvas")
    np.testing.assert_allclose(seen[6, 3], [0x20, 0x40, 0xFF], atol=3)
    np.testing.assert_array_equal(seen[1], white[1])
    page.evaluate("document.querySelector('input[value=eraser]').click()")
    draw(page, "#pad", [(0.0, 0.8), (1.0, 0.8)])
    settled(page)
    assert (bytes_of(page, "#reconstructions canvas")[6, 3] == 0).all()


def test_the_keyboard_draws_in_colour(empty):
    choose(empty, BLUE)
    empty.evaluate("document.getElementById('pad').focus()")
    empty.keyboard.press("ArrowRight")
    empty.keyboard.press("Space")
    settled(empty)
    np.testing.assert_allclose(bytes_of(empty, "#reconstructions canvas")[4, 4], [0x20, 0x40, 0xFF], atol=1)


def test_samples_attacks_and_filters_are_in_colour(empty, problems):
    page = empty
    X, labels = colours(30, seed=1)
    first = "document.querySelector('#samples-grid button')"
    name = page.evaluate(f"{first}.ariaLabel").rsplit(" ", 1)[1]
    sample = X[np.flatnonzero(labels == name)[0]].reshape(3, 8, 8).transpose(1, 2, 0)
    shown = (sample - X.min()) / (X.max() - X.min())
    page.evaluate(f"{first}.click()")
    settled(page)
    says(page, "#prediction", name)
    np.testing.assert_allclose(bytes_of(page, "#reconstructions canvas"), 255 * shown, atol=1.5)
    np.testing.assert_allclose(bytes_of(page, "#samples-sheet")[:8, :8], 255 * shown, atol=1.5)
    assert "Keep the attacked image within the range of colours" in page.inner_text("#attack-body")
    until(page, "!document.getElementById('norm').disabled", WAIT)
    page.evaluate("document.getElementById('norm').focus()")
    page.keyboard.press("Home")
    np.testing.assert_allclose(bytes_of(page, "#attack-delta"), np.broadcast_to(GREY, (8, 8, 3)), atol=1)
    page.keyboard.press("End")
    says(page, "#attack-text", "Broken.")
    before, delta, after = (bytes_of(page, f"#attack-{part}") / 255 for part in ("before", "delta", "after"))
    inside = (after > 0.01) & (after < 0.99)
    step = (after - before)[inside]
    assert np.corrcoef((delta - 0.5)[inside], step)[0, 1] > 0.99  # the perturbation, around grey
    assert "grey is zero" in page.inner_text("#filters-text")
    page.screenshot(path=ARTEFACTS / "colour.png", full_page=True)
    assert problems == []


def upload(page, file):
    page.click("#clear")
    settled(page)
    page.set_input_files("#upload", file)
    until(page, "document.getElementById('pad-hint').hidden", WAIT)  # decoded
    settled(page)


def test_uploads_keep_their_colours(empty, tmp_path):
    page, picture = empty, np.zeros((60, 120, 3), np.uint8)
    picture[:, 30:60], picture[:, 60:90], picture[:, :30] = (250, 20, 10), (10, 240, 30), (255, 255, 255)
    file = tmp_path / "halves.png"
    file.write_bytes(png(picture))
    upload(page, file)
    halves = np.empty((8, 8, 3))
    halves[:, :4], halves[:, 4:] = (250, 20, 10), (10, 240, 30)
    np.testing.assert_allclose(bytes_of(page, "#reconstructions canvas"), halves, atol=2)
    page.click("#fit")  # all of it, with black above and below
    upload(page, file)
    seen = bytes_of(page, "#reconstructions canvas")
    assert (seen[:2] == 0).all() and (seen[6:] == 0).all()
    np.testing.assert_allclose(seen[3, [0, 2, 4]], [(255, 255, 255), (250, 20, 10), (10, 240, 30)], atol=2)
    page.click("#fit")


def test_an_energy_model_of_colours(page_of, problems):
    session = session_of(in_colour(LRRNEnergyModel), data=lambda: colours(30, seed=1), shape=(3, 8, 8))
    for page in page_of(session):
        says(page, "#prediction", "distribution")
        page.evaluate("document.querySelector('#samples-grid button').click()")
        settled(page)
        assert len(page.query_selector_all("#reconstructions canvas")) == 3
        rebuilt = bytes_of(page, "#reconstructions figure:nth-child(2) canvas")
        assert np.ptp(rebuilt, axis=2).max() > 30  # not grey
        page.evaluate("document.querySelectorAll('input[name=filter-layer]')[1].click()")
        says(page, "#filters-text", "Receptive fields of layer 2")
        page.click("#theme")
        page.screenshot(path=ARTEFACTS / "colour-energy.png", full_page=True)
        assert problems == []
