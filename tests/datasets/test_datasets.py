"""idx files made byte by byte here, mirrors served here, scikit-learn's digits, and the real sets where they are at hand."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pooch
import pytest
from rich.console import Console
from sklearn.datasets import load_digits

from lrrn.datasets import FILES, FOLDERS, NAMES, DataError, catalogue, download, load, read_idx
from lrrn.datasets.download import MD5, MIRRORS
from lrrn.datasets.idx import MAX_BYTES

PUBLISHED = [file for pair in FILES.values() for file in pair]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    """An empty cache, no mirrors and no package: only LRRN_DATA, where it is set, is the user's own."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "MIRRORS", dict.fromkeys(FOLDERS, ()))
    monkeypatch.setattr(catalogue, "DEBIAN", home / "debian")
    return home / "lrrn"


def idx(*shape: int, content: bytes | None = None) -> bytes:
    """The bytes of an idx file: two zeros, 8 for unsigned bytes, the number of axes, the sizes, the bytes."""
    body = bytes(i % 251 for i in range(int(np.prod(shape)))) if content is None else content
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + body


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def family(root: Path, name: str = "mnist", shade: int = 0, n: int = 4, suffix: str = "") -> Path:
    """A tiny data set in torchvision's layout, with all training pixels of one shade and test pixels one brighter."""
    folder = root / FOLDERS[name] / "raw"
    folder.mkdir(parents=True)
    for bright, (images, labels) in enumerate(FILES.values()):
        write(folder / (images + suffix), idx(n, 2, 3, content=bytes([shade + bright]) * (6 * n)))
        write(folder / (labels + suffix), idx(n, content=bytes(i % 10 for i in range(n))))
    return folder


def publish(monkeypatch, folder: Path, name: str = "mnist") -> Path:
    """Make the compressed files of this folder the published ones."""
    digests = {path.stem: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.glob("*.gz")}
    monkeypatch.setitem(MD5, name, digests)
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
        (idx(MAX_BYTES, 2, content=b"x"), rf"announces {2 * MAX_BYTES} bytes, more than \d+; it is damaged"),
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
def test_each_set_is_read_from_its_own_folder(name, suffix, tmp_path, monkeypatch):
    folder = family(tmp_path, name, shade=50, n=12, suffix=suffix)
    if suffix:
        publish(monkeypatch, folder, name)
    for split, shade in (("train", 50), ("test", 51)):
        X, y = load(name, split, tmp_path)
        assert X.shape == (12, 6) and X.dtype == np.float32 and y.dtype == np.int64
        np.testing.assert_allclose(X, shade / 255, rtol=1e-6)
        assert y.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    with pytest.raises(DataError, match="there is neither"):
        load(next(other for other in FOLDERS if other != name), root=tmp_path, download=False)


def test_pixels_keep_their_order_and_the_ends_of_the_range(tmp_path):
    folder = family(tmp_path, n=2)
    pixels = bytes([0, 255, 1, 254, 2, 253, 128, 127, 3, 4, 5, 6])
    write(folder / "train-images-idx3-ubyte", idx(2, 2, 3, content=pixels))
    X, _ = load("mnist", root=tmp_path)
    np.testing.assert_allclose(X.reshape(-1) * 255, list(pixels), rtol=1e-6)
    assert X.min() == 0.0 and X.max() == 1.0


def test_a_plain_file_comes_before_a_compressed_one(tmp_path):
    folder = family(tmp_path, shade=99)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"not even looked at")
    np.testing.assert_allclose(load("mnist", root=tmp_path)[0], 99 / 255, rtol=1e-6)


def test_missing_files_are_named(tmp_path, cache, monkeypatch):
    monkeypatch.delenv("LRRN_DATA", raising=False)
    with pytest.raises(
        DataError, match=rf"in {cache}/KMNIST/raw; .* put .* \(MD5 bdb82.*\) into {cache}/KMNIST/raw, or set LRRN_DATA"
    ):
        load("kmnist", download=False)
    with pytest.raises(DataError, match=rf"in {tmp_path}/MNIST/raw or {cache}/MNIST/raw; .* into {tmp_path}/MNIST/raw"):
        load("mnist", root=tmp_path, download=False)
    folder = family(tmp_path)
    for file in PUBLISHED:
        (folder / file).rename(folder / "away")
        split = "train" if file.startswith("train") else "test"
        with pytest.raises(
            DataError,
            match=rf"neither {file} nor {file}\.gz in .*; allow the download, or put {file}\.gz \(MD5 {MD5['mnist'][file]}\)",
        ):
            load("mnist", split, tmp_path, download=False)
        (folder / "away").rename(folder / file)
        load("mnist", split, tmp_path)


@pytest.mark.parametrize("file", PUBLISHED)
def test_a_compressed_file_must_be_the_published_one(file, tmp_path, monkeypatch):
    folder = publish(monkeypatch, family(tmp_path, suffix=".gz"))
    path, split = folder / f"{file}.gz", "train" if file.startswith("train") else "test"
    whole = path.read_bytes()
    other = gzip.compress(idx(4, content=bytes(4)) if "labels" in file else idx(4, 2, 3))
    flipped = whole[:20] + bytes([whole[20] ^ 1]) + whole[21:]
    for damaged in (
        b"",
        whole[:-1],
        whole + b"x",
        flipped,
        other,
        b"<html>404</html>",
        gzip.compress(gzip.decompress(whole), mtime=1),
    ):
        path.write_bytes(damaged)
        found = hashlib.md5(damaged).hexdigest()
        with pytest.raises(
            DataError, match=rf"{path} should have MD5 {MD5['mnist'][file]} and has {found}: .* replace it, or remove it"
        ):
            load("mnist", split, tmp_path)
    path.write_bytes(whole)
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
    write(folder / "train-images-idx3-ubyte", images)
    write(folder / "train-labels-idx1-ubyte", labels)
    with pytest.raises(DataError, match=r"images of shape \(.*\) do not go with labels of shape \("):
        load("mnist", root=tmp_path)


def test_the_argument_comes_before_the_environment_and_both_before_the_cache(tmp_path, cache, monkeypatch):
    family(tmp_path / "argument", shade=10)
    family(tmp_path / "environment", shade=20)
    family(cache, shade=30)
    monkeypatch.setenv("LRRN_DATA", str(tmp_path / "environment"))
    np.testing.assert_allclose(load("mnist")[0], 20 / 255, rtol=1e-6)
    for root in (tmp_path / "argument", str(tmp_path / "argument")):
        np.testing.assert_allclose(load("mnist", root=root)[0], 10 / 255, rtol=1e-6)
    # the argument replaces the environment: what it does not hold comes from the cache
    np.testing.assert_allclose(load("mnist", root=tmp_path / "elsewhere")[0], 30 / 255, rtol=1e-6)
    monkeypatch.chdir(tmp_path / "argument")  # which an empty LRRN_DATA does not mean
    for empty in ("", str(tmp_path / "elsewhere")):
        monkeypatch.setenv("LRRN_DATA", empty)
        np.testing.assert_allclose(load("mnist")[0], 30 / 255, rtol=1e-6)


def test_each_file_is_looked_for_on_its_own(tmp_path, cache):
    folder = family(tmp_path, shade=10)
    family(cache, shade=30)
    (folder / "train-images-idx3-ubyte").unlink()
    write(folder / "train-labels-idx1-ubyte", idx(4, content=bytes([7, 7, 7, 7])))
    X, y = load("mnist", root=tmp_path)
    np.testing.assert_allclose(X, 30 / 255, rtol=1e-6)
    assert y.tolist() == [7, 7, 7, 7]


def test_the_package_of_debian_comes_last_and_is_known_by_what_it_holds(tmp_path, cache, monkeypatch):
    source = family(tmp_path, "fashion_mnist", shade=40)
    debian = tmp_path / "debian"
    debian.mkdir()
    monkeypatch.setattr(catalogue, "DEBIAN", debian)
    for file in PUBLISHED:
        content = (source / file).read_bytes()
        monkeypatch.setitem(catalogue.DEBIAN_MD5, file, hashlib.md5(content).hexdigest())
        (debian / f"{file}.gz").write_bytes(gzip.compress(content, mtime=len(file)))  # whatever the date of the package
    np.testing.assert_allclose(load("fashion_mnist", root=tmp_path / "nowhere")[0], 40 / 255, rtol=1e-6)
    with pytest.raises(DataError, match="neither"):
        load("mnist", root=tmp_path / "nowhere", download=False)
    family(cache, "fashion_mnist", shade=60)
    np.testing.assert_allclose(load("fashion_mnist", root=tmp_path / "nowhere")[0], 60 / 255, rtol=1e-6)
    images = cache / "FashionMNIST" / "raw" / "t10k-images-idx3-ubyte"
    images.unlink()
    path = debian / f"{images.name}.gz"
    whole, expected = path.read_bytes(), catalogue.DEBIAN_MD5[images.name]
    for damaged in (whole[:-9], b"", b"no gzip", gzip.compress(idx(4, 2, 3))):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{path} should have MD5 {expected} uncompressed and has .*; replace it"):
            load("fashion_mnist", "test", tmp_path / "nowhere")


def test_unknown_names_and_splits():
    with pytest.raises(
        ValueError, match=r"unknown data set 'cifar'; use one of digits, mnist, kmnist, fashion_mnist, cifar10$"
    ):
        load("cifar")
    with pytest.raises(ValueError, match=r"digits has no split 'validation'; use one of train, test$"):
        load("digits", "validation")
    with pytest.raises(ValueError, match=r"kmnist has no split 'validation'; use one of train, test, train_7011$"):
        load("kmnist", "validation")
    for name in ("digits", "mnist", "fashion_mnist"):
        with pytest.raises(ValueError, match=f"{name} has no split 'train_7011'; use one of train, test$"):
            load(name, "train_7011")
    assert set(NAMES) == {"digits", *FOLDERS, "cifar10"}


# --- the first 7,011 of KMNIST --------------------------------------------------------------------------------------------


def prefix(root: Path, n: int = 7011, suffix: str = ".gz") -> Path:
    folder = root / "KMNIST" / "train_prefix_7011"
    folder.mkdir(parents=True)
    write(folder / f"images-idx3-ubyte{suffix}", idx(n, 2, 1, content=bytes([51, 0]) * n))
    write(folder / f"labels-idx1-ubyte{suffix}", idx(n, content=bytes([3]) * n))
    return folder


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_first_of_kmnist_are_a_split_of_their_own(suffix, tmp_path, cache, mirror):
    with pytest.raises(
        DataError, match=rf"'train_7011' is never downloaded, .* not in {tmp_path}/.* or {cache}/.*; put them there"
    ):
        load("kmnist", "train_7011", tmp_path)
    folder = prefix(tmp_path, suffix=suffix)
    X, y = load("kmnist", "train_7011", tmp_path)
    assert X.shape == (7011, 2) and X.dtype == np.float32 and y.dtype == np.int64
    np.testing.assert_allclose(X, [[0.2, 0.0]] * 7011, rtol=1e-6)
    assert (y == 3).all()
    (folder / f"labels-idx1-ubyte{suffix}").unlink()
    with pytest.raises(DataError, match="is never downloaded"):
        load("kmnist", "train_7011", tmp_path)
    assert not mirror.asked


def test_the_first_of_kmnist_must_be_as_many_as_they_say(tmp_path):
    prefix(tmp_path, n=7010)
    with pytest.raises(DataError, match=r"images-idx3-ubyte\.gz should hold 7011 images and holds 7010"):
        load("kmnist", "train_7011", tmp_path)


@pytest.mark.parametrize("download", [True, False])
def test_the_first_of_kmnist_do_not_stand_in_for_all(download, tmp_path):
    for split, name, told in (
        ("train", "kmnist", False),
        ("train", "kmnist", True),
        ("test", "kmnist", False),
        ("train", "mnist", False),
    ):
        if told:
            prefix(tmp_path)
        with pytest.raises(DataError) as caught:
            load(name, split, tmp_path, download)
        assert ("split 'train_7011'" in str(caught.value)) == told


# --- downloads ------------------------------------------------------------------------------------------------------------


class Mirror(ThreadingHTTPServer):
    """Serves what is in `files`, after `delay` seconds, and remembers what it was asked for."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.delay = 0.0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def offer(self, source: Path, under: str = "good") -> str:
        self.files.update({f"/{under}/{path.name}": path.read_bytes() for path in source.glob("*.gz")})
        return f"{self.url}/{under}/"


class Answer(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self):
        self.server.asked.append(self.path)
        time.sleep(self.server.delay)
        if self.path.startswith("/silent/"):
            time.sleep(1)
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) + self.path.startswith("/cut/")))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def mirror(monkeypatch):
    """A server that every set has as its only mirror, with nothing on it."""
    with Mirror() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.delenv("LRRN_DATA", raising=False)
        monkeypatch.setattr(download, "MIRRORS", dict.fromkeys(FOLDERS, (f"{server.url}/good/",)))
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """The published files, all pixels of the training images of shade 70."""
    return publish(monkeypatch, family(tmp_path / "source", shade=70, suffix=".gz"))


def dead() -> str:
    """The address of nobody."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}/dead/"


def files_under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_real_mirrors_and_digests_are_there_for_every_file():
    assert MIRRORS.keys() == MD5.keys() == FOLDERS.keys()
    for name, digests in MD5.items():
        assert list(digests) == PUBLISHED and len(MIRRORS[name]) >= 2
        assert all(mirror.startswith(("https://", "http://")) and mirror.endswith("/") for mirror in MIRRORS[name])
    everything = [digest for digests in (*MD5.values(), catalogue.DEBIAN_MD5) for digest in digests.values()]
    assert len(set(everything)) == 16 and all(len(bytes.fromhex(digest)) == 16 for digest in everything)
    assert list(catalogue.DEBIAN_MD5) == PUBLISHED
    assert 0 < download.TIMEOUT < 60


@pytest.mark.parametrize("root", [None, "empty"])
def test_missing_files_are_downloaded_once_into_the_cache_in_the_same_layout(root, tmp_path, cache, mirror, source):
    mirror.offer(source)
    root = root and tmp_path / root
    for _ in range(2):
        X, y = load("mnist", root=root)
        np.testing.assert_allclose(X, 70 / 255, rtol=1e-6)
        assert y.tolist() == [0, 1, 2, 3]
        assert files_under(cache) == ["MNIST/raw/train-images-idx3-ubyte.gz", "MNIST/raw/train-labels-idx1-ubyte.gz"]
    np.testing.assert_allclose(load("mnist", "test", root)[0], 71 / 255, rtol=1e-6)
    assert mirror.asked == [f"/good/{file}.gz" for file in PUBLISHED]
    np.testing.assert_allclose(load("mnist", root=cache, download=False)[0], 70 / 255, rtol=1e-6)
    assert root is None or not root.exists()


def test_nothing_is_downloaded_if_not_allowed(cache, mirror, source):
    mirror.offer(source)
    with pytest.raises(DataError, match="allow the download"):
        load("mnist", download=False)
    assert not mirror.asked and not cache.exists()


@pytest.mark.parametrize("trouble", ["dead", "missing", "corrupted", "cut", "silent"])
def test_another_mirror_is_asked_when_one_fails(trouble, cache, mirror, source, monkeypatch):
    good = mirror.offer(source)
    bad = dead() if trouble == "dead" else f"{mirror.url}/{trouble}/"
    if trouble in ("corrupted", "cut", "silent"):
        mirror.offer(source, trouble)
    if trouble == "corrupted":
        for file in PUBLISHED:
            mirror.files[f"/corrupted/{file}.gz"] = mirror.files[f"/corrupted/{file}.gz"][:-1] + b"?"
    monkeypatch.setitem(download.MIRRORS, "mnist", (bad, good))
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    np.testing.assert_allclose(load("mnist")[0], 70 / 255, rtol=1e-6)
    assert files_under(cache) == ["MNIST/raw/train-images-idx3-ubyte.gz", "MNIST/raw/train-labels-idx1-ubyte.gz"]
    tried = [path for path in mirror.asked if path.startswith(f"/{trouble}/")]
    assert len(tried) == (0 if trouble == "dead" else 2)
    assert [path for path in mirror.asked if path.startswith("/good/")] == [f"/good/{file}.gz" for file in FILES["train"]]


def test_an_error_tells_what_each_mirror_did_and_leaves_nothing_behind(tmp_path, cache, mirror, source, monkeypatch):
    file = "train-images-idx3-ubyte"
    mirrors = dead(), f"{mirror.url}/missing/", f"{mirror.url}/corrupted/", f"{mirror.url}/silent/"
    mirror.files[f"/corrupted/{file}.gz"] = b"<html>Sign in to the network of this hotel</html>"
    monkeypatch.setitem(download.MIRRORS, "mnist", mirrors)
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    monkeypatch.setattr(pooch.get_logger(), "level", 5)
    with pytest.raises(DataError) as caught:
        load("mnist", root=tmp_path / "mine")
    assert str(caught.value) == (
        f"{file}.gz of mnist could not be downloaded into {cache}/MNIST/raw from {mirrors[0]} (ConnectionError), "
        f"{mirrors[1]} (404 Not Found), {mirrors[2]} (a file with another MD5), {mirrors[3]} (ReadTimeout); "
        f"put {file}.gz (MD5 {MD5['mnist'][file]}) into {tmp_path}/mine/MNIST/raw, or set LRRN_DATA to where MNIST/raw is"
    )
    assert not files_under(cache)
    assert pooch.get_logger().level == 5  # as it was


def test_a_download_goes_on_where_it_ended(cache, mirror, source):
    mirror.offer(source)
    labels = mirror.files.pop("/good/train-labels-idx1-ubyte.gz")
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz of mnist .*404 Not Found"):
        load("mnist")
    assert files_under(cache) == ["MNIST/raw/train-images-idx3-ubyte.gz"]
    mirror.files["/good/train-labels-idx1-ubyte.gz"] = labels
    mirror.asked.clear()
    load("mnist")
    assert mirror.asked == ["/good/train-labels-idx1-ubyte.gz"]


def test_a_damaged_file_in_the_cache_is_told_and_fetched_anew_once_removed(cache, mirror, source):
    mirror.offer(source)
    load("mnist")
    path = cache / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{path} should have MD5 .* remove it to have it downloaded"):
        load("mnist")
    path.unlink()
    np.testing.assert_allclose(load("mnist")[0], 70 / 255, rtol=1e-6)


def test_a_cache_that_cannot_be_written_is_told(cache, mirror, source):
    mirror.offer(source)
    cache.write_text("a file where the folder should be")
    with pytest.raises(
        DataError, match=rf"downloaded into {cache}/MNIST/raw, which cannot be written \((Not a directory|File exists)\); put"
    ):
        load("mnist")


def test_threads_may_load_at_the_same_time(cache, mirror, source):
    mirror.offer(source)
    mirror.delay = 0.2
    with ThreadPoolExecutor(4) as pool:
        for X, _ in pool.map(lambda _: load("mnist"), range(4)):
            np.testing.assert_allclose(X, 70 / 255, rtol=1e-6)
    assert mirror.asked.count("/good/train-images-idx3-ubyte.gz") > 1  # they did meet
    assert files_under(cache) == ["MNIST/raw/train-images-idx3-ubyte.gz", "MNIST/raw/train-labels-idx1-ubyte.gz"]


def test_processes_may_load_at_the_same_time_and_are_silent_in_a_pipe(cache, mirror, source):
    mirror.offer(source)
    mirror.delay = 1.0
    script = (
        "from lrrn import datasets\nfrom lrrn.datasets import download\n"
        f"download.MIRRORS['mnist'] = ('{dead()}', '{mirror.url}/good/')\n"
        f"download.MD5['mnist'] = {MD5['mnist']}\n"
        "print(datasets.load('mnist')[0].shape)"
    )
    command = [sys.executable, "-W", "error", "-c", script]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60) for process in pair] == [("(4, 6)\n", "")] * 2
    assert files_under(cache) == ["MNIST/raw/train-images-idx3-ubyte.gz", "MNIST/raw/train-labels-idx1-ubyte.gz"]


def test_a_terminal_shows_progress(cache, mirror, source, monkeypatch):
    mirror.offer(source)
    monkeypatch.setitem(download.MIRRORS, "mnist", (dead(), f"{mirror.url}/good/"))
    screen = io.StringIO()
    monkeypatch.setattr(download, "Console", partial(Console, file=screen, force_terminal=True, width=100))
    load("mnist")
    size = (source / "train-images-idx3-ubyte.gz").stat().st_size
    assert "mnist train-images-idx3-ubyte" in screen.getvalue() and f"{size}/{size} bytes" in screen.getvalue()


def test_files_in_place_need_no_pooch(tmp_path, monkeypatch):
    monkeypatch.delenv("LRRN_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "pooch", None)  # importing it fails
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        DataError, match=rf"downloading .* of mnist needs pooch: .* put .* into {tmp_path}/\.cache/lrrn/MNIST/raw"
    ):
        load("mnist")
    publish(monkeypatch, family(tmp_path / ".cache" / "lrrn", shade=80, suffix=".gz"))
    np.testing.assert_allclose(load("mnist")[0], 80 / 255, rtol=1e-6)


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


@pytest.mark.data
def test_the_first_of_kmnist_have_the_first_labels():
    root = Path(os.environ.get("LRRN_DATA") or "/nowhere")
    if not (root / catalogue.PREFIX_FOLDER).is_dir():
        pytest.skip(f"{catalogue.PREFIX_FOLDER} is not in LRRN_DATA")
    X, y = load("kmnist", "train_7011")
    assert X.shape == (7011, 784) and X.min() == 0.0 and X.max() == 1.0
    assert np.array_equal(y, read_idx(root / "KMNIST" / "raw" / "train-labels-idx1-ubyte.gz")[:7011])


@pytest.mark.data
def test_the_digests_of_debian_are_those_of_the_published_files(tmp_path, monkeypatch):
    expected, _ = real("fashion_mnist", "test")
    raw = Path(os.environ["LRRN_DATA"]) / "FashionMNIST" / "raw"
    monkeypatch.setattr(catalogue, "DEBIAN", tmp_path)
    for path in raw.glob("*.gz"):
        (tmp_path / path.name).write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=1))
    for split in FILES:
        X, _ = load("fashion_mnist", split, tmp_path / "nowhere", download=False)
    assert np.array_equal(X, expected)
