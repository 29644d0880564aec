"""Filters are what the layers compute, whether the weights are matrices or convolutions; colour images are shown in colour."""

from __future__ import annotations

import base64
import re
import struct
import zlib

import numpy as np
import pytest
import torch

import lrrn
from lrrn import Conv, LRRNClassifier, LRRNEnergyModel
from lrrn.persistence.reference import picture_shape
from lrrn.reports import audit
from lrrn.reports.evaluation import as_page, evaluate
from lrrn.reports.images import filters_of, image_shape_of, mirrored, own_images
from lrrn.reports.page import Page, png, sheet
from lrrn.reports.pipelines import PipelineModel
from sessions import colours, in_colour


def network(*layers, shape=(3, 8, 8)):
    return lrrn.LRRN((shape, *layers), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def products(net):
    """The matrices W_k ... W_0, from the matrix of every layer."""
    found, product = [], None
    for layer, w in zip(net.layers, net.W, strict=True):
        matrix = layer.operator(w.detach()).dense().numpy()
        product = matrix if product is None else matrix @ product
        found.append(product)
    return found


def test_filters_of_a_dense_network_are_rows_of_products():
    net = lrrn.LRRN((192, 7, 5), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for layer, product in enumerate(products(net)):
        found = filters_of(net, (3, 8, 8), layer, 4)
        assert (found.kind, found.n) == ("rows", len(product))
        np.testing.assert_allclose(found.images, product[:4].reshape(4, 3, 8, 8), rtol=1e-12, atol=1e-14)
    assert len(filters_of(net, (3, 8, 8), 0).images) == 7


@pytest.mark.parametrize("wide", [1, 40], ids=["as matrices", "as operators"])
def test_filters_of_convolutions_are_kernels_and_receptive_fields(wide):
    net = network(Conv(6 * wide, 3, padding=1, pool=2), Conv(5, 2), 4)
    kernels, fields, rows = (filters_of(net, (3, 8, 8), layer) for layer in range(3))
    assert (kernels.kind, fields.kind, rows.kind) == ("kernels", "fields", "rows")
    assert (kernels.n, fields.n, rows.n) == (6 * wide, 5, 4)
    np.testing.assert_array_equal(kernels.images, net.W[0].detach().numpy())
    _, second, third = products(net)
    np.testing.assert_allclose(rows.images, third.reshape(4, 3, 8, 8), rtol=1e-9, atol=1e-12)
    # maps of the second convolution have 3 x 3 units; the middle one, of windows 1 and 2, sees pixels 1, ..., 6
    assert net.layers[1].out_shape == (5, 3, 3)
    middle = second.reshape(5, 3, 3, 3, 8, 8)[:, 1, 1]
    assert not middle[..., [0, 7], :].any() and not middle[..., [0, 7]].any()
    np.testing.assert_allclose(fields.images, middle[..., 1:7, 1:7], rtol=1e-9, atol=1e-12)


def test_kernels_of_grey_images_are_grey_and_few_are_shown_if_asked():
    net = network(Conv(6, 3), Conv(9, 3), shape=(1, 8, 8))
    assert filters_of(net, (8, 8), 0, 4).images.shape == (4, 3, 3)
    assert filters_of(net, (8, 8), 1, 4).images.shape == (4, 5, 5) and filters_of(net, (8, 8), 1, 4).n == 9
    with torch.no_grad():
        net.W[1].zero_()
    assert filters_of(net, (8, 8), 1).images.shape == (9, 8, 8)  # nothing to crop to


def test_mirrored_images_exchange_left_and_right_in_every_channel():
    images = np.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4)
    found = mirrored(images.reshape(2, -1), (3, 2, 4)).reshape(images.shape)
    for n, channel, row, column in np.ndindex(*images.shape):
        assert found[n, channel, row, column] == images[n, channel, row, 3 - column]


def test_shapes_that_can_be_shown():
    assert picture_shape((1, 5, 7)) == (5, 7) and picture_shape([3, 5, 7]) == (3, 5, 7) and picture_shape((3, 5)) == (3, 5)
    for wrong, message in (
        ((2, 5, 7), "1 or 3 channels"),
        ((5,), "cannot be shown"),
        ((0, 5), "positive"),
        ((True, 5), "positive"),
    ):
        with pytest.raises(ValueError, match=message):
            picture_shape(wrong)


def test_a_model_of_images_knows_their_shape():
    model = in_colour(epochs=1)
    assert image_shape_of(model) == (3, 8, 8) == image_shape_of(model, (3, 8, 8)) == own_images(model)
    with pytest.raises(ValueError, match="images of 12 x 16 were asked for, and this model takes images of 3 x 8 x 8"):
        image_shape_of(model, (12, 16))
    X = np.random.default_rng(0).random((20, 32))
    odd = LRRNEnergyModel((4,), image_shape=(2, 4, 4), epochs=1, random_state=0).fit(X)
    assert image_shape_of(odd) is None and own_images(odd) == (2, 4, 4)
    plain = LRRNEnergyModel((4,), epochs=1, random_state=0).fit(X)
    assert image_shape_of(plain) is None and image_shape_of(plain, (1, 4, 8)) == (4, 8)


def test_a_pipeline_shows_images_unless_its_steps_mix_pixels():
    from sklearn.decomposition import PCA
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    X, y = colours()
    options = dict(epochs=1, random_state=0, device="cpu")
    scaled = make_pipeline(StandardScaler(), LRRNClassifier((Conv(2, 3),), image_shape=(3, 8, 8), **options)).fit(X, y)
    mixed = make_pipeline(PCA(27), LRRNClassifier((4,), image_shape=(3, 3, 3), **options)).fit(X, y)
    assert image_shape_of(PipelineModel(scaled)) == (3, 8, 8) and image_shape_of(PipelineModel(mixed)) is None
    result = evaluate("mixed", PipelineModel(mixed), X, y, (0.1,), (3, 8, 8))
    assert "mirrored" in result.auroc and "ilters" not in as_page("t", [result], (3, 8, 8)).split("</table>")[1]


def test_an_evaluation_of_colour_images_needs_no_shape():
    model = in_colour(LRRNEnergyModel)
    X, _ = colours(60, seed=1)
    result = evaluate("colours", model, X)
    turned = X.reshape(-1, 3, 8, 8)[..., ::-1].reshape(len(X), -1)
    np.testing.assert_allclose(result.energies["mirrored"], model.energy(turned), rtol=1e-12)
    html = as_page("t", [result])
    assert "<h2>Filters</h2>" in html and "Kernels of the first layer: colours" in html
    assert "Receptive fields of the channels of layer 2: colours" in html
    assert "First-layer filters" not in html and "mirrored" in html


def decoded(content):
    """Return the header of a PNG of one image chunk, and its bytes without the filter types."""
    at, chunks = 8, {}
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        chunks[content[at + 4 : at + 8]] = content[at + 8 : at + 8 + length]
        at += 12 + length
    header = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(header[1], -1)
    assert (rows[:, 0] == 0).all()
    return header, chunks, rows[:, 1:]


def test_colours_are_around_grey():
    image = np.zeros((1, 3, 1, 2))
    image[0, :, 0, 0] = 2.0, -2.0, 1.0  # the largest has the full colour
    pixels = sheet(image, 16)
    assert pixels.shape == (2, 3, 3)
    np.testing.assert_array_equal(pixels[0], [[255, 0, 191], [128, 128, 128], [255, 255, 255]])
    header, chunks, rows = decoded(png(pixels))
    assert header == (3, 2, 8, 2, 0, 0, 0) and b"PLTE" not in chunks
    np.testing.assert_array_equal(rows.reshape(pixels.shape), pixels)
    page = Page("t")
    page.images("c", image)
    encoded = re.search(r"base64,([^\"]+)", page.html()).group(1)
    np.testing.assert_array_equal(decoded(base64.b64decode(encoded))[2], rows)


def test_methods_that_need_matrices_are_refused_for_large_convolutions_before_any_work(monkeypatch):
    model = in_colour(hidden_sizes=(Conv(20, 3),), epochs=1)
    X, y = colours(9)
    monkeypatch.setattr("lrrn.energy.lifted.UNFOLDED_UNITS", 700)
    monkeypatch.setattr(LRRNClassifier, "certificate", lambda *_: pytest.fail("it was solved first"))
    for method in ("local", "multiplier"):
        with pytest.raises(ValueError, match=f"method '{method}' needs a matrix .* convolutions has 720; use 'auto'"):
            audit.certify("m", model, X, y, method=method)
    monkeypatch.undo()
    assert audit.certify("m", model, X, y, (0.01,), "spectral").method == "spectral"
