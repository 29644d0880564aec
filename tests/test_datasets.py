"""idx files made byte by byte here, the digits against scikit-learn's own, and the real sets where they are at hand."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from lrrn.datasets import FILES, FOLDERS, MAX_BYTES, NAMES, DataError, load, read_idx


def idx(*shape: int, content: bytes | None = None) -> bytes:
    """The bytes of an idx file: two zeros, 8 for unsigned bytes, the number of axes, the sizes, the bytes."""
    body = bytes(i % 251 for i in range(int(np.prod(shape)))) if content is None else content
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + body


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def family(root: Path, name: str = "mnist", shade: int = 0, n: int = 4, suffix: str = ".gz") -> Path:
    """A tiny data set in torchvision's layout, with all training pixels of one shade and test pixels one brighter."""
    folder = root / FOLDERS[name] / "raw"
    folder.mkdir(parents=True)
    for bright, (images, labels) in enumerate(FILES.values()):
        write(folder / (images + suffix), idx(n, 2, 3, content=bytes([shade + bright]) * (6 * n)))
        write(folder / (labels + suffix), idx(n, content=bytes(i % 10 for i in range(n))))
    return folder


# --- one file -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 3, 2), (2, 3, 2, 2), (1, 1, 1), (0, 3)])
def test_an_idx_file_is_read_in_row_order(shape, suffix, tmp_path):
    array = read_idx(write(tmp_path / f"file{suffix}", idx(*shape)))
    assert array.dtype == np.uint8
    expected = np.array([i % 251 for i in range(int(np.prod(shape)))], dtype=np.uint8).reshape(shape)
    assert np.array_equal(array, expected) and array.shape == shape


def test_paths_may_be_strings_and_values_reach_255(tmp_path):
    content = bytes(range(256))
    assert read_idx(str(write(tmp_path / "file", idx(256, content=content)))).tolist() == list(range(256))


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is not an idx file of bytes: it begins with b''"),
        (b"\0\0\x08", "is not an idx file"),
        (b"\x01\0\x08\x01" + bytes(8), "is not an idx file"),
        (b"\0\x01\x08\x01" + bytes(8), "is not an idx file"),
        (b"\0\0\x0d\x01" + bytes(8), "is not an idx file"),  # floats
        (b"\0\0\x08\x00" + bytes(8), "is not an idx file"),  # no axes
        (b"\0\0\x08\x05" + bytes(30), "is not an idx file"),  # five axes
        (b"<html>404</html>", "is not an idx file of bytes: it begins with b'<htm'"),
        (idx(2, 3)[:4], "is truncated: its header ends after 4 bytes"),
        (idx(2, 3)[:11], "is truncated: its header ends after 11 bytes"),
        (idx(2, 3)[:12], "should hold 6 bytes after its header and holds only 0"),
        (idx(2, 3)[:-1], "should hold 6 bytes after its header and holds only 5"),
        (idx(2, 3) + b"x", "should hold 6 bytes after its header and holds more; fetch it again"),
        (idx(2, 3) + b"x" * 100, "holds more"),
        (idx(MAX_BYTES, 2, content=b"x"), rf"announces {2 * MAX_BYTES} bytes, more than {MAX_BYTES}"),
        (idx(*[2**32 - 1] * 4, content=b"x"), rf"announces {(2**32 - 1) ** 4} bytes"),
    ],
)
def test_files_that_are_no_idx_files_are_refused(content, message, suffix, tmp_path):
    path = write(tmp_path / f"file{suffix}", content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_damaged_gzip_is_refused(tmp_path):
    """Cut off anywhere, or with a bit flipped anywhere: the checksum tells, unless the flip changes nothing."""
    path = tmp_path / "file.gz"
    whole = gzip.compress(idx(40, 30), mtime=0)
    right, refused = np.frombuffer(idx(40, 30)[12:], np.uint8).reshape(40, 30), 0
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"file\.gz is (damaged .*fetch it again|not an idx file)"):
            read_idx(path)
    for at in range(10, len(whole)):  # after gzip's own header
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            assert np.array_equal(read_idx(path), right)
        except DataError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 0.9 * len(whole)
    for foreign in (b"not gzip at all", idx(3), whole + b"tail"):
        path.write_bytes(foreign)
        with pytest.raises(DataError, match="is damaged"):
            read_idx(path)


def test_gzip_without_its_suffix_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(idx(3)))
    with pytest.raises(DataError, match="is not an idx file"):
        read_idx(path)


# --- a folder -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", FOLDERS)
def test_each_set_is_read_from_its_own_folder(name, suffix, tmp_path):
    family(tmp_path, name, shade=50, n=12, suffix=suffix)
    for split, shade in (("train", 50), ("test", 51)):
        X, y = load(name, split, tmp_path)
        assert X.shape == (12, 6) and X.dtype == np.float32 and y.dtype == np.int64
        np.testing.assert_allclose(X, shade / 255, rtol=1e-6)
        assert y.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    with pytest.raises(DataError, match="there is no folder"):
        load(next(other for other in FOLDERS if other != name), root=tmp_path)


def test_pixels_keep_their_order_and_the_ends_of_the_range(tmp_path):
    folder = family(tmp_path, n=2)
    pixels = bytes([0, 255, 1, 254, 2, 253, 128, 127, 3, 4, 5, 6])
    write(folder / "train-images-idx3-ubyte.gz", idx(2, 2, 3, content=pixels))
    X, _ = load("mnist", root=tmp_path)
    np.testing.assert_allclose(X.reshape(-1) * 255, list(pixels), rtol=1e-6)
    assert X.min() == 0.0 and X.max() == 1.0


def test_a_plain_file_comes_before_a_compressed_one(tmp_path):
    folder = family(tmp_path, shade=10)
    write(folder / "train-images-idx3-ubyte", idx(4, 2, 3, content=bytes([99]) * 24))
    np.testing.assert_allclose(load("mnist", root=tmp_path)[0], 99 / 255, rtol=1e-6)


def test_missing_files_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("LRRN_DATA", raising=False)
    with pytest.raises(DataError, match=r"kmnist is read from files: give root=\.\.\., or set LRRN_DATA .* KMNIST/raw"):
        load("kmnist")
    with pytest.raises(DataError, match=r"there is no folder .*MNIST/raw; put the idx files of mnist there"):
        load("mnist", root=tmp_path)
    folder = family(tmp_path)
    for file in (name for names in FILES.values() for name in names):
        (folder / f"{file}.gz").rename(folder / "away")
        split = "train" if file.startswith("train") else "test"
        with pytest.raises(DataError, match=rf"neither {file} nor {file}\.gz in .*MNIST/raw"):
            load("mnist", split, tmp_path)
        (folder / "away").rename(folder / f"{file}.gz")
        load("mnist", split, tmp_path)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (idx(4, 2, 3), idx(5)),
        (idx(5, 2, 3), idx(4)),
        (idx(4, 6), idx(4)),
        (idx(4), idx(4)),
        (idx(4, 2, 3, 1), idx(4)),
        (idx(4, 2, 3), idx(4, 1)),
        (idx(4, 2, 3), idx(4, 2, 3)),
    ],
)
def test_images_and_labels_must_go_together(images, labels, tmp_path):
    folder = family(tmp_path)
    write(folder / "train-images-idx3-ubyte.gz", images)
    write(folder / "train-labels-idx1-ubyte.gz", labels)
    with pytest.raises(DataError, match=r"images of shape \(.*\) do not go with labels of shape \("):
        load("mnist", root=tmp_path)


def test_the_argument_comes_before_the_environment(tmp_path, monkeypatch):
    family(tmp_path / "argument", shade=10)
    family(tmp_path / "environment", shade=20)
    monkeypatch.setenv("LRRN_DATA", str(tmp_path / "environment"))
    np.testing.assert_allclose(load("mnist")[0], 20 / 255, rtol=1e-6)
    for root in (tmp_path / "argument", str(tmp_path / "argument")):
        np.testing.assert_allclose(load("mnist", root=root)[0], 10 / 255, rtol=1e-6)
    with pytest.raises(DataError, match=r"there is no folder .*elsewhere"):
        load("mnist", root=tmp_path / "elsewhere")
    monkeypatch.setenv("LRRN_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(DataError, match=r"there is no folder .*elsewhere"):
        load("mnist")


def test_unknown_names_and_splits():
    with pytest.raises(ValueError, match="unknown data set 'cifar'; use one of digits, mnist, kmnist, fashion_mnist"):
        load("cifar")
    with pytest.raises(ValueError, match="unknown split 'validation'; use one of train, test"):
        load("digits", "validation")
    assert set(NAMES) == {"digits", *FOLDERS}


# --- digits ---------------------------------------------------------------------------------------------------------------


def test_digits_splits_are_the_whole_set_cut_in_two():
    train, test = load("digits", "train"), load("digits", "test")
    whole, label = load_digits(return_X_y=True)
    for X, y in (train, test):
        assert X.dtype == np.float32 and y.dtype == np.int64 and X.shape == (len(y), 64)
        assert X.min() == 0.0 and X.max() == 1.0

    def rows(X, y):
        return sorted(map(tuple, np.column_stack([np.asarray(X, dtype=np.float64) * 16, y])))

    # no two of scikit-learn's digits are equal, so the parts have no sample in common if together they are the whole
    assert len(set(rows(whole / 16, label))) == len(whole)
    assert sorted(rows(*train) + rows(*test)) == rows(whole / 16, label)


def test_digits_splits_are_stratified_and_always_the_same():
    (_, train), (X, test) = load("digits"), load("digits", "test")
    assert len(test) == 450  # a quarter of 1797, rounded up
    counts = np.bincount(train, minlength=10), np.bincount(test, minlength=10)
    assert (np.abs(counts[1] - sum(counts) / 4) <= 1).all()
    again, _ = load("digits", "test")
    assert np.array_equal(X, again)


def test_digits_need_no_folder(monkeypatch):
    monkeypatch.setenv("LRRN_DATA", "/nowhere")
    assert len(load("digits", root="/nowhere")[0]) == 1347


# --- the real sets --------------------------------------------------------------------------------------------------------


def real(name: str, split: str):
    """Load a real set, or skip where it is not at hand."""
    root = os.environ.get("LRRN_DATA")
    if not root:
        pytest.skip("LRRN_DATA is not set")
    for file in FILES[split]:
        if not any((Path(root) / FOLDERS[name] / "raw" / f"{file}{suffix}").is_file() for suffix in ("", ".gz")):
            pytest.skip(f"{file} of {name} is not in LRRN_DATA")
    return load(name, split)


@pytest.mark.data
@pytest.mark.parametrize("split", FILES)
@pytest.mark.parametrize("name", FOLDERS)
def test_the_real_sets(name, split):
    X, y = real(name, split)
    n = {"train": 60000, "test": 10000}[split]
    assert X.shape == (n, 784) and X.dtype == np.float32 and y.shape == (n,) and y.dtype == np.int64
    assert X.min() == 0.0 and X.max() == 1.0
    counts = np.bincount(y)
    assert len(counts) == 10
    # MNIST's digits were collected, the other two were made with as many of each class
    assert (counts == n // 10).all() if name != "mnist" else (np.abs(counts - n / 10) < 0.15 * n / 10).all()


@pytest.mark.data
def test_mnist_begins_with_the_digits_everyone_knows():
    assert real("mnist", "train")[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert real("mnist", "test")[1][:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
