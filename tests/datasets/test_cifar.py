"""CIFAR-10's binary version, from small files made here, an archive served here, and the real files where they are at hand."""

from __future__ import annotations

import hashlib
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cifar_files import publish_cifar, write_cifar
from lrrn import datasets
from lrrn.cli import app
from lrrn.cli.inputs import image_shape
from lrrn.datasets import DataError, cifar, download, load
from lrrn.persistence.serialization import load as load_model


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    """An empty cache and no mirror."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(download, "ARCHIVE_MIRRORS", ())
    return home / "lrrn"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LRRN_DATA", str(tmp_path))
    return publish_cifar(monkeypatch, write_cifar(tmp_path))


def test_records_are_a_label_and_the_pixels_channel_by_channel(tmp_path, monkeypatch):
    folder = write_cifar(tmp_path, n=3)
    pixels = np.arange(3072) % 256
    (folder / "test_batch.bin").write_bytes(bytes([7]) + bytes(pixels.tolist()) + bytes([9]) + bytes([255] * 3072))
    publish_cifar(monkeypatch, folder)
    X, y = load("cifar10", "test", tmp_path)
    assert X.shape == (2, 3072) and X.dtype == np.float32 and y.dtype == np.int64 and y.tolist() == [7, 9]
    assert np.array_equal(X[0], (pixels / np.float32(255)).astype(np.float32)) and (X[1] == 1).all()
    assert np.array_equal(X[0].reshape(3, 32, 32)[1].reshape(-1) * 255, pixels[1024:2048])


def test_training_files_come_in_order_and_from_either_folder(folder, tmp_path):
    X, y = load("cifar10")
    assert X.shape == (100, 3072) and y.tolist() == [*range(10)] * 10
    fourth = np.frombuffer((folder / "data_batch_4.bin").read_bytes(), np.uint8).reshape(20, -1)[:, 1:]
    np.testing.assert_allclose(X[60:80] * 255, fourth, rtol=1e-6)
    found = datasets.find()["cifar10"]
    assert found == {"train": folder / "data_batch_1.bin", "test": folder / "test_batch.bin"}
    (tmp_path / "CIFAR10").mkdir()
    folder.rename(tmp_path / "CIFAR10" / cifar.FOLDER)
    assert np.array_equal(load("cifar10")[0], X)
    assert datasets.find()["cifar10"]["test"] == tmp_path / "CIFAR10" / cifar.FOLDER / "test_batch.bin"


@pytest.mark.parametrize("file", cifar.MD5)
def test_files_must_be_the_published_ones(file, folder):
    path, split = folder / file, "test" if file.startswith("test") else "train"
    whole = path.read_bytes()
    for damaged in (b"", whole[:-3073], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        found = hashlib.md5(damaged).hexdigest()
        with pytest.raises(DataError, match=f"{path} should have MD5 {cifar.MD5[file]} and has {found}: .* replace it"):
            load("cifar10", split)
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=rf"{path} is truncated: {20 * 3073 - 1} bytes .* records of 3073; replace it"):
        load("cifar10", split)
    path.write_bytes(whole)
    load("cifar10", split)


def test_missing_files_and_unknown_splits_are_explained(folder, tmp_path, cache):
    (folder / "data_batch_3.bin").unlink()
    told = (
        rf"there is no data_batch_3.bin in {folder} or .*; allow the download, or unpack cifar-10-binary.tar.gz \(MD5 c32a1d4"
    )
    with pytest.raises(DataError, match=told):
        load("cifar10", download=False)
    with pytest.raises(
        DataError, match=f"could not be downloaded into {cache}/{cifar.FOLDER} from anywhere; unpack .* in {tmp_path}, or set"
    ):
        load("cifar10")
    assert datasets.find()["cifar10"]["train"] is None and len(load("cifar10", "test")[0]) == 20
    with pytest.raises(ValueError, match=r"cifar10 has no split 'train_7011'; use one of train, test$"):
        load("cifar10", "train_7011")


def test_the_archive_is_unpacked_into_the_cache(folder, tmp_path, cache, monkeypatch):
    expected = load("cifar10")[0]
    archive = tmp_path / download.ARCHIVE
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, cifar.FOLDER)
    place = cache / cifar.FOLDER
    place.mkdir(parents=True)
    # pooch finds the archive complete, as after an interruption before it was unpacked
    (place / download.ARCHIVE).write_bytes(archive.read_bytes())
    monkeypatch.setattr(download, "ARCHIVE_MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(download, "ARCHIVE_MIRRORS", ("http://127.0.0.1:1/",))
    monkeypatch.setenv("LRRN_DATA", str(tmp_path / "elsewhere"))
    assert np.array_equal(load("cifar10")[0], expected)
    assert sorted(path.name for path in place.iterdir()) == sorted(cifar.MD5)
    (place / "test_batch.bin").unlink()
    (place / download.ARCHIVE).write_bytes(b"no archive")
    monkeypatch.setattr(download, "ARCHIVE_MD5", hashlib.md5(b"no archive").hexdigest())
    with pytest.raises(DataError, match="could not be unpacked"):
        load("cifar10", "test")


def test_convolutions_trained_by_name_take_colour_images(folder, tmp_path):
    assert image_shape("cifar10", None, 3072) == (3, 32, 32) == datasets.image_shape("cifar10", 3072)
    command = ["train", "cifar10", "--conv", "2,8,8", "--epochs", "1", "--device", "cpu", "-o", str(tmp_path / "m.safetensors")]
    done = CliRunner().invoke(app, command, terminal_width=200)
    assert done.exit_code == 0, done.output
    model = load_model(tmp_path / "m.safetensors")
    assert model.image_shape == (3, 32, 32) == model.network_.image_shape and not model.standardize


@pytest.mark.data
@pytest.mark.parametrize(("split", "n", "first"), [("train", 50_000, [6, 9, 9, 4, 1]), ("test", 10_000, [3, 8, 8, 0, 6])])
def test_the_real_set(split, n, first):
    root = os.environ.get("LRRN_DATA")
    if not root or None in cifar.find_files(cifar.places([Path(root)]), split):
        pytest.skip("CIFAR-10 is not in LRRN_DATA")
    X, y = load("cifar10", split)
    assert X.shape == (n, 3072) and X.dtype == np.float32 and X.min() == 0 and X.max() == 1
    assert (np.bincount(y) == n // 10).all() and y[:5].tolist() == first
