"""Tables read a few rows at a time: the same rows whatever the file, and no more memory than a piece takes."""

from __future__ import annotations

import json
import mmap
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from lrrn import LRRNClassifier, LRRNRegressor
from lrrn.datasets import DataError, open_table, read_table
from lrrn.datasets.rows import ArrayRows, mapped, release
from lrrn.datasets.rows.base import regrouped
from lrrn.reports.audit import attack, certify
from lrrn.reports.evaluation import evaluate
from lrrn.reports.scoring import Parts, over_rows
from lrrn.runtime import memory

N, D = 103, 5


def table(dtype=np.float32):
    rng = np.random.default_rng(0)
    return (100 * rng.random((N, D))).astype(dtype), rng.integers(0, 3, N)


def write(path: Path, X, y, row_group_size: int = 40) -> str | None:
    """Write a table in the way its suffix says; return what ``target`` should be."""
    if path.suffix == ".npy":
        np.save(path, X)
        np.save(path.with_name("y.npy"), y)
        return str(path.with_name("y.npy"))
    if path.suffix == ".npz":
        (np.savez_compressed if "packed" in path.name else np.savez)(path, X=X, y=y)
    elif path.suffix == ".csv":
        lines = [",".join([*map(repr, map(float, x)), str(label)]) for x, label in zip(X, y, strict=True)]
        path.write_text("\n".join(lines) + "\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        columns = {f"f{j}": np.ascontiguousarray(X[:, j]) for j in range(X.shape[1])}
        parquet.write_table(pyarrow.table({**columns, "y": y}), path, row_group_size=row_group_size)
    return None


FILES = ["t.npy", "t.npz", "packed.npz", "t.parquet", "t.csv"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16, ">f4"])
def test_every_file_gives_the_same_rows_in_any_pieces(tmp_path, name, dtype):
    if name == "t.parquet" and dtype == ">f4":
        pytest.skip("Arrow knows the machine's own byte order only")
    X, y = table(dtype)
    rows = open_table(tmp_path / name, write(tmp_path / name, X, y))
    assert (rows.n_samples, rows.n_features, rows.has_targets) == (N, D, True)
    for start, stop, size in [(0, N, 10), (0, N, 1000), (0, N, 1), (37, 91, 20), (40, 80, 40), (N - 1, N, 3), (99, 100, 7)]:
        pieces = list(rows.pieces(start, stop, size))
        assert [len(part) for part, _ in pieces[:-1]] == [size] * (len(pieces) - 1) and 0 < len(pieces[-1][0]) <= size
        np.testing.assert_array_equal(np.concatenate([part for part, _ in pieces]), X[start:stop])
        np.testing.assert_array_equal(np.concatenate([labels for _, labels in pieces]), y[start:stop])
        assert all(part.dtype == (np.float32 if dtype == np.float32 and name != "t.csv" else np.float64) for part, _ in pieces)
    first = rows.first(17)
    assert first.n_samples == 17 and rows.first(None) is rows and rows.first(N + 5) is rows
    np.testing.assert_array_equal(np.concatenate([part for part, _ in first.pieces(0, 17, 5)]), X[:17])
    whole, labels = read_table(tmp_path / name, str(tmp_path / "y.npy") if name == "t.npy" else None)
    np.testing.assert_array_equal(whole, X)
    np.testing.assert_array_equal(labels, y)


@pytest.mark.parametrize("name", FILES)
def test_text_labels_and_no_labels(tmp_path, name):
    X, y = table()
    text = np.array(["low", "middle", "much higher"])[y]
    target = write(tmp_path / name, X, text)
    np.testing.assert_array_equal(
        np.concatenate([part for _, part in open_table(tmp_path / name, target).pieces(0, N, 9)]), text
    )
    if name == "t.npy":
        assert not open_table(tmp_path / name).has_targets
    write(tmp_path / name, X, y)
    bare = open_table(tmp_path / name, "none")
    assert not bare.has_targets and next(bare.pieces(0, 4, 4))[1] is None
    # a .npz file keeps X and y apart; in the others the target is a column like any other
    assert bare.n_features == (D + 1 if name in ("t.parquet", "t.csv") else D)


@pytest.mark.parametrize("name", ["t.npy", "t.npz"])
def test_columns_that_lie_together_in_the_file(tmp_path, name):
    X, y = table()
    rows = open_table(tmp_path / name, write(tmp_path / name, np.asfortranarray(X), y))
    np.testing.assert_array_equal(np.concatenate([part for part, _ in rows.pieces(5, 80, 13)]), X[5:80])


@pytest.mark.parametrize("name", FILES)
def test_a_missing_value_is_named_by_its_place(tmp_path, name):
    X, y = table()
    X[61, 3] = np.nan
    rows = open_table(tmp_path / name, write(tmp_path / name, X, y))
    assert len(list(rows.checked(0, 60, 7))) == 9
    with pytest.raises(DataError, match=r"feature (3|'f3') of sample 61 is nan: a missing value; fill it in"):
        list(rows.checked(40, N, 7))
    with pytest.raises(DataError, match=r"feature (3|'f3') of sample 61"):
        read_table(tmp_path / name, str(tmp_path / "y.npy") if name == "t.npy" else None)


def test_regrouping_by_hand():
    def pieces():
        at = 0
        for n in (3, 1, 6, 2, 2):
            yield np.arange(at, at + n)[:, None], np.arange(at, at + n)
            at += n

    assert [labels.tolist() for _, labels in regrouped(pieces(), 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]


# --- bad files ----------------------------------------------------------------------------------------------------------


def npy_bytes(header: str, content: bytes = b"") -> bytes:
    padded = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged or no .npy file"),
        (b"\x93NUMPY\x09\x00" + bytes(60), "in a version of the .npy format that is not read"),
        (
            npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2)}", bytes(15)),
            "16 bytes after its header and holds 15",
        ),
        (
            npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 999)}"),
            "bytes after its header and holds 0",
        ),
        (npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, 2)}", bytes(16)), r"an array of shape \(-2, 2\)"),
        (npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}", bytes(16)), r"an array of shape \(4,\)"),
        (npy_bytes("{'descr': '|O', 'fortran_order': False, 'shape': (2, 2)}", bytes(32)), "holds Python objects"),
        (npy_bytes("{'descr': '<U2', 'fortran_order': False, 'shape': (2, 1)}", bytes(16)), "X must be numeric"),
        (npy_bytes("{'descr': __import__('os'), 'shape': (2, 1)}"), "is damaged or no .npy file"),
        (npy_bytes("{" * 500), "is damaged or no .npy file"),
    ],
)
def test_bad_npy(tmp_path, content, message):
    (tmp_path / "t.npy").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_table(tmp_path / "t.npy")


def test_targets_that_do_not_go_with_a_npy_file(tmp_path):
    np.save(tmp_path / "t.npy", np.zeros((4, 2)))
    np.save(tmp_path / "short.npy", np.zeros(3))
    np.save(tmp_path / "odd.npy", np.zeros(4, dtype="M8[s]"))
    for target, message in (
        ("species", "is another .npy file with as many rows; there is no species"),
        (str(tmp_path / "short.npy"), "4 samples do not go with 3 targets"),
        (str(tmp_path / "odd.npy"), "targets must be numbers or text"),
    ):
        with pytest.raises(DataError, match=message):
            open_table(tmp_path / "t.npy", target)


def test_an_archive_whose_header_promises_more_than_there_is(tmp_path):
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 8)}"
    with zipfile.ZipFile(tmp_path / "t.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", npy_bytes(header, bytes(64)))
    with pytest.raises(DataError, match=r"is damaged or no \.npz file"):
        open_table(tmp_path / "t.npz")


def test_a_flipped_bit_in_an_archive_is_noticed(tmp_path):
    X, y = table()
    np.savez(tmp_path / "t.npz", X=X, y=y)
    content = bytearray((tmp_path / "t.npz").read_bytes())
    content[600] ^= 1
    (tmp_path / "t.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged or no \.npz file"):
        read_table(tmp_path / "t.npz")


def test_bad_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1 no table")
    with pytest.raises(DataError, match="is damaged or no Parquet file"):
        open_table(path)
    for columns, target, message in (
        ({"a": [1.0, 2.0], "b": ["x", "y"], "c": [1, 2]}, None, "column 'b' is of type string, which is no number"),
        ({"a": [1.0, 2.0], "c": [1, 2]}, "d", "has no column 'd'; it has a, c"),
        ({"c": [1, 2]}, None, r"an array of shape \(2, 0\)"),
        ({"a": [1.0], "c": [1]}, None, None),
    ):
        parquet.write_table(pyarrow.table(columns), path)
        if message is None:
            assert open_table(path).n_samples == 1
        else:
            with pytest.raises(DataError, match=message):
                open_table(path, target)
    parquet.write_table(pyarrow.table({"a": [1.0, 2.0, 3.0], "c": [1, None, 2]}), path)
    with pytest.raises(DataError, match="sample 1 has no target"):
        list(open_table(path).pieces(0, 3, 2))
    whole = path.read_bytes()
    path.write_bytes(whole[:40] + bytes(20) + whole[60:])
    with pytest.raises(DataError, match="is damaged"):
        read_table(path, "none")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'lrrn\[parquet\]'"):
        open_table(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"pip install 'lrrn\[parquet\]'"):
        Parts(tmp_path / "out.parquet", {})


# --- memory maps --------------------------------------------------------------------------------------------------------


def resident_bytes(array) -> int:
    """How much of an array's own mapping is in memory, by the kernel's account."""
    address = array.__array_interface__["data"][0]
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        span = line.split(" ", 1)[0].split("-")
        if len(span) == 2 and line[0] in "0123456789abcdef" and int(span[0], 16) <= address < int(span[1], 16):
            return next(1024 * int(other.split()[1]) for other in lines if other.startswith("Rss:"))
    raise AssertionError("the array is not mapped")


needs_smaps = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's account of memory")


@needs_smaps
def test_releasing_pages_gives_memory_back_and_keeps_the_values(tmp_path):
    X = np.random.default_rng(0).random((4000, 64))
    np.save(tmp_path / "t.npy", X)
    for mode in ("r", "r+"):
        found = np.load(tmp_path / "t.npy", mmap_mode=mode)
        assert found.sum() == X.sum() and resident_bytes(found) >= X.nbytes
        release(found[5:7])
        assert resident_bytes(found) < 0.1 * X.nbytes
        np.testing.assert_array_equal(found, X)
    found[7, 7] = -1.0  # a change in a shared map survives
    release(found)
    assert found[7, 7] == -1.0


def test_what_cannot_be_released_is_left_alone(tmp_path):
    np.save(tmp_path / "t.npy", np.ones((3000, 64)))
    private = np.load(tmp_path / "t.npy", mmap_mode="c")
    private[:] = 5.0  # changes that are nowhere but in memory
    assert mapped(private) is None and mapped(private[3:]) is None and mapped(np.ones(3)) is None and mapped([1]) is None
    release(private)
    assert (private == 5.0).all()
    shared = np.load(tmp_path / "t.npy", mmap_mode="r")
    assert isinstance(mapped(shared), mmap.mmap) and isinstance(mapped(np.asarray(shared)[3:]), mmap.mmap)
    release(shared[:, ::2])
    release(shared[:0])
    release(np.ones(5))


def big_map(tmp_path, n=12_000, d=64):
    np.save(tmp_path / "big.npy", np.random.default_rng(1).random((n, d), np.float32))
    return np.load(tmp_path / "big.npy", mmap_mode="r")


@pytest.fixture(scope="module")
def classifier():
    rng = np.random.default_rng(0)
    return LRRNClassifier(hidden_sizes=(8,), epochs=1, random_state=0).fit(rng.random((60, 64)), np.arange(60) % 3)


@needs_smaps
def test_an_estimator_does_not_pull_a_map_into_memory(tmp_path, monkeypatch):
    monkeypatch.setitem(memory.NUMBERS, "cpu", 2**9 * 263)  # inputs and units
    X = big_map(tmp_path, 16_000, 256)  # 16 MB, in chunks of half a MB; the system may map 2 MB around a page
    classifier = LRRNClassifier(hidden_sizes=(4,), epochs=1, random_state=0).fit(np.array(X[:30]), np.arange(30) % 3)
    seen = []
    infer = type(classifier)._infer
    monkeypatch.setattr(type(classifier), "_infer", lambda self, x, y=None: seen.append(resident_bytes(X)) or infer(self, x, y))
    energy, radius = classifier.energy(X), classifier.certified_radius(X, "spectral")
    assert len(seen) == 64 and max([*seen, resident_bytes(X)]) <= 5 * 2**20
    there = np.array(X)
    np.testing.assert_array_equal(radius, classifier.certified_radius(there, "spectral"))
    np.testing.assert_array_equal(energy, classifier.energy(there))


def test_a_map_is_checked_before_any_work(tmp_path, classifier, monkeypatch):
    monkeypatch.setitem(memory.NUMBERS, "cpu", 2**12)
    np.save(tmp_path / "t.npy", np.ones((1000, 64)))
    data = np.load(tmp_path / "t.npy", mmap_mode="r+")
    data[990, 3] = np.nan

    def never(*_):
        raise AssertionError("worked before all was checked")

    monkeypatch.setattr(type(classifier), "_infer", never)
    with pytest.raises(ValueError, match="contains NaN"):
        classifier.predict(data)
    with pytest.raises(ValueError, match="2 features"):
        classifier.predict(data[:, :2])
    with pytest.raises(ValueError, match="minimum of 1"):
        classifier.predict(data[:0])


# --- scoring ------------------------------------------------------------------------------------------------------------


def test_scores_of_a_table_are_those_of_its_array(tmp_path, classifier, monkeypatch):
    monkeypatch.setitem(memory.NUMBERS, "cpu", 75 * 100)
    X = np.array(big_map(tmp_path, 950))
    y = np.arange(950) % 3
    np.savez(tmp_path / "t.npz", X=X, y=y)
    audit = certify("m", classifier, open_table(tmp_path / "t.npz"), samples=tmp_path / "s.npz")
    np.testing.assert_array_equal(audit.radii, classifier.certified_radius(X))
    np.testing.assert_array_equal(audit.right, classifier.predict(X) == y)
    with np.load(tmp_path / "s.npz") as file:
        assert sorted(file.files) == ["prediction", "radius", "right"]
        np.testing.assert_array_equal(file["radius"], audit.radii)
        np.testing.assert_array_equal(file["prediction"], classifier.predict(X))
    result = evaluate("m", classifier, open_table(tmp_path / "t.npz"), eps=(0.01,))
    assert result.score == classifier.score(X, y) and result.certified[0.01] == classifier.certified_score(X, y, 0.01)
    np.testing.assert_array_equal(result.energies["samples"], classifier.energy(X))
    assert as_figures(result) == as_figures(evaluate("m", classifier, X, y, eps=(0.01,)))
    assert len(result.energies["Gaussian"]) == 950


def as_figures(evaluation):
    return json.dumps(evaluation.as_json())


def test_the_gaussian_has_the_moments_of_the_samples(tmp_path, classifier, monkeypatch):
    monkeypatch.setitem(memory.NUMBERS, "cpu", 75 * 500)
    rng = np.random.default_rng(2)
    X = rng.random((4000, 64)) @ rng.standard_normal((64, 64)) + 3
    drawn = []
    energy = LRRNClassifier.energy
    monkeypatch.setattr(LRRNClassifier, "energy", lambda self, X: drawn.append(X) or energy(self, X))
    evaluate("m", classifier, X)
    draws = np.concatenate(drawn[-8:])  # eight chunks of 500, after those of the samples
    spread = np.sqrt(np.linalg.eigvalsh(np.cov(X.T)).max() / 4000)
    assert np.abs(draws.mean(0) - X.mean(0)).max() < 6 * spread
    assert np.linalg.norm(np.cov(draws.T) - np.cov(X.T)) < 0.2 * np.linalg.norm(np.cov(X.T))
    assert len(np.unique(draws[:, 0])) == 4000  # no chunk repeats another's draws


def test_a_regressor_with_two_targets_goes_to_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rng = np.random.default_rng(0)
    X = rng.random((90, 3))
    y = np.stack([X.sum(1), X[:, 0] - X[:, 1]], axis=1)
    model = LRRNRegressor(hidden_sizes=(6,), epochs=3, random_state=0).fit(X, y)
    result = evaluate("m", model, X, y, eps=(0.1,), samples=tmp_path / "s.parquet")
    assert result.score == pytest.approx(model.score(X, y), rel=1e-12)
    written = parquet.read_table(tmp_path / "s.parquet")
    np.testing.assert_array_equal(written["prediction 1"].to_numpy(), model.predict(X)[:, 1])
    lower, upper = model.predict_interval(X, 0.1)
    np.testing.assert_array_equal(written["lower 0.1 0"].to_numpy(), lower[:, 0])
    assert result.half_width[0.1] == np.mean(upper - lower) / 2 and result.certified == {}


def test_labels_of_another_kind_are_refused(tmp_path, classifier):
    X = np.ones((4, 64))
    for run in (evaluate, certify):
        with pytest.raises(ValueError, match="labels such as 'a' and the model's are such as 0;"):
            run("m", classifier, X, np.array(list("abca")))
    with pytest.raises(ValueError, match="has no labels to compare predictions with"):
        attack("m", classifier, X, None)


# --- parts --------------------------------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for the end of a process."""


def test_an_interrupted_run_continues_with_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("lrrn.reports.scoring.PART_CHUNKS", 3)
    rows = ArrayRows(np.arange(200.0)[:, None], name="numbers")
    worked: list[int] = []

    def work(X, y, chunk, fatal=None):
        if chunk == fatal:
            raise Killed
        worked.append(chunk)
        return {"twice": 2 * X[:, 0], "name": np.array([f"{chunk}"] * len(X))}

    def parts(**changes):
        return Parts(tmp_path / "out.npz", {"model": 1, **changes})

    with pytest.raises(Killed):
        over_rows(rows, 10, lambda X, y, chunk: work(X, y, chunk, fatal=13), parts())
    assert worked == list(range(13)) and not (tmp_path / "out.npz").exists()
    names = sorted(path.name for path in (tmp_path / "out.npz.parts").glob("*.npz"))
    assert names == [f"part-{first:09d}-{first + 3:09d}.npz" for first in (0, 3, 6, 9)]
    with pytest.raises(ValueError, match="holds parts of another run"):
        over_rows(rows, 10, work, parts(model=2))
    (tmp_path / "out.npz.parts" / names[1]).unlink()
    worked.clear()
    columns = over_rows(rows, 10, work, parts())
    assert worked == [3, 4, 5, *range(12, 20)]
    np.testing.assert_array_equal(columns["twice"], 2 * np.arange(200.0))
    assert columns["name"].tolist() == [str(i // 10) for i in range(200)]
    with np.load(tmp_path / "out.npz") as file:
        np.testing.assert_array_equal(file["twice"], columns["twice"])
    assert not (tmp_path / "out.npz.parts").exists()


def test_results_go_to_places_and_kinds_of_files_that_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"written as \.npz or \.parquet"):
        Parts(tmp_path / "out.txt", {})
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Parts(tmp_path / "no" / "out.npz", {})
