"""Users' own tables: what is read from .csv and .npz files, and what is said of bad ones."""

from __future__ import annotations

import numpy as np
import pytest

from lrrn.datasets import DataError, read_table


def csv_file(tmp_path, text, name="t.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "target", "X", "y"),
    [
        ("1,2,0\n3,4,1\n", None, [[1, 2], [3, 4]], [0, 1]),
        ("a,b,c\n1,2,0\n3,4,1\n", None, [[1, 2], [3, 4]], [0, 1]),
        ("a,b,c\n1,2,0\n3,4,1\n", "a", [[2, 0], [4, 1]], [1, 3]),
        ("1,2,0\n3,4,1\n", "1", [[1, 0], [3, 1]], [2, 4]),
        ("1,2\n3,4\n", "none", [[1, 2], [3, 4]], None),
        ("a,kind\n1.5,cat\n-2e3,dog\n", "kind", [[1.5], [-2000]], ["cat", "dog"]),
        ("1.5,cat\n2,dog\n", None, [[1.5], [2]], ["cat", "dog"]),
        ("x,y\r\n1,0.5\r\n\r\n2,1\r\n", None, [[1], [2]], [0.5, 1.0]),
        (b"\xef\xbb\xbfa,b\n1,2\n", None, [[1]], [2]),
        ('a,"b, c"\n1,2\n', "b, c", [[1]], [2]),
    ],
)
def test_csv(tmp_path, text, target, X, y):
    features, targets = read_table(csv_file(tmp_path, text), target)
    np.testing.assert_array_equal(features, X)
    assert targets is None if y is None else targets.tolist() == y
    if y is not None:
        assert targets.dtype.kind == np.array(y).dtype.kind


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("", None, "is empty"),
        ("a,b\n1,2\n3\n", None, "line 3: 1 columns where line 1 has 2"),
        ("a,b\n1,2\nx,3\n", None, "line 3: column 'a' holds 'x', which is no number"),
        ("1,2\nx,3\n", None, "line 2: column 0 holds 'x'"),
        ("a,b\n1,2\n", "c", "no column 'c'; its first line is a, b"),
        ("a,b\nnan,2\n", None, "feature 0 of sample 0 is nan"),
        ("a,b\n", None, "got an array of shape"),
        (b"\xff\xfe\x00", None, r"is not a \.csv file"),
    ],
)
def test_bad_csv(tmp_path, text, target, message):
    with pytest.raises(DataError, match=message):
        read_table(csv_file(tmp_path, text), target)


def test_npz(tmp_path):
    X, y = np.arange(6, dtype=np.float32).reshape(3, 2), np.array(["a", "b", "a"])
    np.savez(tmp_path / "t.npz", X=X, y=y)
    features, targets = read_table(tmp_path / "t.npz")
    assert features.dtype == np.float32 and targets.tolist() == y.tolist()
    np.testing.assert_array_equal(features, X)
    np.savez_compressed(tmp_path / "x.npz", X=X.astype(np.int16))
    features, targets = read_table(tmp_path / "x.npz")
    assert features.dtype == np.float64 and targets is None
    assert read_table(tmp_path / "t.npz", "none")[1] is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 2))}, "should hold arrays X and y; it holds x"),
        ({"X": np.zeros(3)}, r"array of shape \(3,\)"),
        ({"X": np.array([["a"]])}, "X must be numeric"),
        ({"X": np.zeros((2, 2)), "y": np.zeros(3)}, "2 samples do not go with 3 targets"),
        ({"X": np.array([[1.0, np.inf]])}, "feature 1 of sample 0 is inf"),
        ({"X": np.array([[object()]])}, "holds Python objects, which are not loaded"),
    ],
)
def test_bad_npz(tmp_path, arrays, message):
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(DataError, match=message):
        read_table(tmp_path / "t.npz")


def test_damaged_missing_and_foreign_files(tmp_path):
    np.savez(tmp_path / "t.npz", X=np.random.default_rng(0).random((50, 4)))
    whole = (tmp_path / "t.npz").read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 3):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"is damaged or no \.npz file"):
            read_table(tmp_path / "cut.npz")
    with pytest.raises(DataError, match="there is no file"):
        read_table(tmp_path / "no.csv")
    with pytest.raises(DataError, match=r"from \.npz, \.npy, \.parquet or \.csv files, not from '\.txt'"):
        read_table(csv_file(tmp_path, "1,2\n", "t.txt"))
