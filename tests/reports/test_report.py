"""The page is one well-formed file, and its charts show what they were given."""

from __future__ import annotations

import base64
import re
import struct
import xml.etree.ElementTree as ET
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from sklearn.datasets import load_digits

from lrrn import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
from lrrn.reports.evaluation import as_page, as_table, evaluate
from lrrn.reports.page import BOTTOM, HEIGHT, LEFT, RIGHT, SHADES, TOP, WIDTH, Page, line_chart, png


class Checker(HTMLParser):
    void = ("meta", "img")

    def __init__(self):
        super().__init__()
        self.open, self.addresses = [], []

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(html):
    checker = Checker()
    checker.feed(html)
    assert checker.open == [] and all(address.startswith("data:") for address in checker.addresses)
    return html


def points(html, index=0):
    svg = ET.fromstring(re.findall(r"<svg.*?</svg>", html, re.DOTALL)[0])
    lines = svg.findall("polyline")
    return np.array([[float(v) for v in pair.split(",")] for pair in lines[index].get("points").split()])


def test_lines_are_where_they_belong():
    page = Page("t")
    page.lines("c", "x", "y", {"one": ([0, 1, 4], [0, 2, 1]), "two": ([0, 4], [2, 2])})
    drawn = points(checked(page.html()))
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    expected = [[LEFT, TOP + down], [LEFT + across / 4, TOP], [LEFT + across, TOP + down / 2]]
    np.testing.assert_allclose(drawn, expected, atol=0.06)


def test_logarithmic_lines_leave_out_what_is_not_positive():
    page = Page("t")
    page.lines("c", "x", "y", {"one": ([1, 2, 3, 4], [100.0, 10.0, 0.0, 1.0])}, log_y=True)
    drawn = points(checked(page.html()))
    assert len(drawn) == 3 and drawn[1, 1] == pytest.approx((drawn[0, 1] + drawn[2, 1]) / 2, abs=0.1)


def test_histograms_hold_every_sample_within_the_bins():
    page = Page("t")
    page.histograms("c", "x", {"one": [0.0, 0.0, 1.0, 1.0], "same": [0.5] * 4}, bins=2)
    drawn = points(checked(page.html()))
    heights = (HEIGHT - BOTTOM - drawn[::2, 1]) / (HEIGHT - TOP - BOTTOM)
    np.testing.assert_allclose(heights, [0.5, 0.5], atol=0.01)  # half of the samples in either bin, of a tallest bar of 1


def test_constant_and_empty_curves_do_no_harm():
    page = Page("t")
    page.lines("c", "x", "y", {"flat": ([1, 2], [3, 3]), "none": ([], [])})
    page.lines("c", "x", "y", {"none": ([], [])})
    page.histograms("c", "x", {"same": [1.0, 1.0]})
    assert "nan" not in checked(page.html())


def test_text_cannot_become_markup():
    page = Page("<script>alert(1)</script>")
    page.table(["<b>"], [["<img src=x>"]])
    page.text("a < b & c")
    assert "<script>" not in checked(page.html()) and "<b>" not in page.html() and "<img" not in page.html()


def decoded(data):
    """The chunks of a PNG file, their checksums checked."""
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + content)
        chunks[kind], at = content, at + 12 + length
    return chunks


def test_png_decodes_to_the_shades_it_was_made_of():
    shades = np.random.default_rng(0).integers(0, 2 * SHADES + 1, (5, 7)).astype(np.uint8)
    chunks = decoded(png(shades))
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (7, 5, 8, 3, 0, 0, 0)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(5, 8)
    assert (rows[:, 0] == 0).all() and (rows[:, 1:] == shades).all()
    palette = np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)
    assert len(palette) == 2 * SHADES + 1
    assert palette[0].tolist() == [0, 0, 255] and palette[SHADES].tolist() == [255, 255, 255]
    assert palette[-1].tolist() == [255, 0, 0]


def test_images_are_red_where_positive_and_blue_where_negative():
    page = Page("t")
    page.images("c", np.array([[[1.0, -2.0, 0.0]]]))
    encoded = re.search(r"base64,([^\"]+)", checked(page.html())).group(1)
    chunks = decoded(base64.b64decode(encoded))
    palette = np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)
    row = palette[list(zlib.decompress(chunks[b"IDAT"])[1:4])].tolist()
    assert row == [[255, 128, 128], [0, 0, 255], [255, 255, 255]]


def test_a_chart_can_be_a_file_of_its_own():
    from xml.etree import ElementTree

    drawn = line_chart("epoch", "a < b", {"one": ([1, 2, 3], [0.90, 0.95, 0.97])}, zero=False)
    tree = ElementTree.fromstring(drawn)
    assert tree.tag == "{http://www.w3.org/2000/svg}svg"
    labels = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert "0" not in labels and "0.92" in labels and "a < b" in labels
    page = Page("t")
    page.picture("c", drawn)
    assert "data:image/svg+xml;base64," in checked(page.html())


def test_an_evaluation_is_what_the_model_says():
    X, y = load_digits(return_X_y=True)
    X = X / 16
    model = LRRNClassifier(epochs=3, random_state=0).fit(X[:1000], y[:1000])
    result = evaluate("mine", model, X[1000:], y[1000:], eps=[0.05], image_shape=(8, 8), in_distribution=X[:1000])
    radii = model.certified_radius(X[1000:])
    right = model.predict(X[1000:]) == y[1000:]
    assert result.score == right.mean() and result.lipschitz == model.lipschitz_
    assert result.certified == {0.05: model.certified_score(X[1000:], y[1000:], 0.05)}
    assert result.median_radius == np.median(radii * right)
    mirrored = X[1000:].reshape(-1, 8, 8)[:, :, ::-1].reshape(-1, 64)
    # the chance that a mirrored digit has the higher energy, counted pair by pair
    pairs = model.energy(mirrored)[:, None] - model.energy(X[1000:])[None]
    assert result.auroc["mirrored"] == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2)
    columns, rows = as_table([result])
    assert columns == ["797 samples", "mine"] and rows[0] == ["accuracy", f"{right.mean():.1%}"]
    checked(as_page("t", [result], (8, 8)))


def test_the_gaussian_has_the_data_s_mean_and_covariance():
    from lrrn.datasets.rows import ArrayRows
    from lrrn.reports.evaluation import _moments

    rng = np.random.default_rng(1)
    samples = rng.standard_normal((50, 3)) @ np.array([[2.0, 0, 0], [1, 1, 0], [0, 0, 0]]) + [1, 2, 3]
    mean, root = _moments(ArrayRows(samples), 7)
    np.testing.assert_allclose(mean, samples.mean(0), rtol=1e-12)
    np.testing.assert_allclose(root.T @ root, np.cov(samples.T, bias=True), atol=1e-12)


def test_class_energies_are_certified_and_images_must_fit():
    X, y = load_digits(return_X_y=True)
    model = LRRNClassifier(objective="class_energy", epochs=5, random_state=0).fit(X[:500] / 16, y[:500])
    result = evaluate("ce", model, X[:50] / 16, y[:50])
    assert result.median_radius == np.median(model.certified_radius(X[:50] / 16) * (model.predict(X[:50] / 16) == y[:50]))
    with pytest.raises(ValueError, match="images of 5 x 5 do not fit 64 features"):
        evaluate("ce", model, X[:20] / 16, image_shape=(5, 5))


def test_a_page_explains_its_rows_and_shows_energies_that_tell_something():
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(60, 4)), np.arange(60) % 2
    labels = evaluate("labels", LRRNClassifier(epochs=2, random_state=0).fit(X, y), X, y, image_shape=(2, 2))
    model = evaluate("energies", LRRNEnergyModel(epochs=2, random_state=0).fit(X), X, image_shape=(2, 2))
    targets = evaluate("targets", LRRNRegressor(epochs=2, random_state=0).fit(X, X[:, 0]), X, X[:, 0])
    labels, targets = replace(labels, auroc={"mirrored": 0.59}), replace(targets, auroc={"Gaussian": 0.41}, seconds=1.0)
    for evaluations in ([labels, model], [targets]):
        html = checked(as_page("t", evaluations, (2, 2)))
        assert html.count("<td class=meaning>") == len(as_table(evaluations)[1]) and "<td class=meaning></td>" not in html
    both = checked(as_page("t", [labels, model]))
    assert "Energies: energies" in both and "Energies: labels" not in both
    assert "Low energy" not in checked(as_page("t", [labels])) and "Low energy" not in checked(as_page("t", [targets]))
    assert "Energies: labels" in checked(as_page("t", [replace(labels, auroc={"mirrored": 0.6})]))


def test_figures_that_follow_each_other_stand_side_by_side():
    page = Page("t")
    for _ in range(2):
        page.lines("c", "x", "y", {"one": ([0, 1], [0, 1])})
    page.text("between")
    page.lines("c", "x", "y", {"one": ([0, 1], [0, 1])})
    groups = re.findall(r"<div class=figures>(.*?)</div>", checked(page.html()), re.DOTALL)
    assert [group.count("<figure>") for group in groups] == [2, 1]
