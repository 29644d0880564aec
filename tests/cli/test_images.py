"""Models of images on the command line: convolutions, colours, and shapes that need not be given twice."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import lrrn
from lrrn.cli.inputs import image_shape, sides_of
from lrrn.cli.main import app
from lrrn.persistence.serialization import load_reference
from sessions import colours

runner = CliRunner()
QUICK = ("--epochs", "2", "--device", "cpu", "--seed", "0")


def run(*arguments):
    done = runner.invoke(app, [str(argument) for argument in arguments], terminal_width=200)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Colour images in a file, and a convolutional classifier of them, by the command line."""
    folder = tmp_path_factory.mktemp("colours")
    X, y = colours(90)
    np.savez(folder / "colours.npz", X=X.astype(np.float32), y=y)
    options = ("--image-shape", "3,8,8", "--conv", "5,3", "-o", folder / "m.safetensors", "--page", folder / "train.html")
    run("train", folder / "colours.npz", *options, *QUICK)
    return folder


def test_a_model_of_colours_is_trained_and_evaluated_without_naming_their_shape(data):
    model = lrrn.load(data / "m.safetensors")
    assert model.image_shape == (3, 8, 8) and model.standardize is False  # images within [0, 1] are left as they are
    reference = load_reference(data / "m.safetensors")
    assert reference.image_shape == (3, 8, 8) and len(reference.samples) == 0 and "mirrored" in reference.energies
    run("evaluate", data / "m.safetensors", data / "colours.npz", "--json", data / "e.json", "--page", data / "e.html")
    found = json.loads((data / "e.json").read_text())["models"][0]
    X, _ = colours(90)
    X = X.astype(np.float32)
    own, other = model.energy(X), model.energy(X.reshape(-1, 3, 8, 8)[..., ::-1].reshape(len(X), -1))
    pairs = other[:, None] - own[None]
    assert found["auroc"]["mirrored"] == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2)
    for name in ("train.html", "e.html"):
        assert "Kernels of the first layer" in (data / name).read_text()


def test_image_gives_convolutions_their_shape(data, tmp_path):
    options = ("--conv", "4,3", "-o", tmp_path / "m.safetensors")
    run("train", data / "colours.npz", "--model", "energy", "--image", "3x8x8", *options, "--hidden-sizes", "6", *QUICK)
    assert lrrn.load(tmp_path / "m.safetensors").image_shape == (3, 8, 8)
    run("train", "digits", *options, "--overwrite", *QUICK)
    assert lrrn.load(tmp_path / "m.safetensors").image_shape == (1, 8, 8)
    assert load_reference(tmp_path / "m.safetensors").image_shape == (8, 8)


def test_another_shape_than_the_model_s_is_refused(data):
    done = runner.invoke(
        app, ["evaluate", f"{data}/m.safetensors", f"{data}/colours.npz", "--image", "12x16"], terminal_width=200
    )
    assert done.exit_code == 2 and "takes images of 3x8x8" in done.output


@pytest.mark.parametrize(
    ("text", "shape"), [("28x20", (28, 20)), ("1x28x20", (28, 20)), ("3x28x20", (3, 28, 20)), ("3x5", (3, 5))]
)
def test_shapes(text, shape):
    assert sides_of(text) == shape and image_shape("t.npz", text, int(np.prod(shape))) == shape


def test_the_model_s_shape_is_the_default():
    assert image_shape("t.npz", None, 64, (1, 8, 8)) == (8, 8) and image_shape("digits", None, 64) == (8, 8)
    assert image_shape("t.npz", None, 192, (3, 8, 8)) == (3, 8, 8) == image_shape("t.npz", "3x8x8", 192, (3, 8, 8))
    assert image_shape("t.npz", None, 128, (2, 8, 8)) is None and image_shape("t.npz", None, 64) is None
