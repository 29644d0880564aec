"""Users' own tables: what is read from .csv and .npz files, and what is said of bad ones."""

from __future__ import annotations

import numpy as np
import pytest

from lrrn.datasets import DataError, open_table, read_table
from lrrn.datasets.tables import with_labels


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
        ("a,b\n1,2\n", "c", "no column 'c'; it has a, b"),
        ("1,2\n", "c", "no column 'c'; its first line is 1, 2"),
        ("a,b\nnan,2\n", None, "feature 'a' of sample 0 is nan: a missing value; fill it in"),
        ("a,b\ninf,2\n", None, "feature 'a' of sample 0 is inf: no finite number"),
        (
            "a,b\n1,2\n,3\n",
            None,
            "line 3: column 'a' is empty: a missing value; fill it in, or leave out the row or the column",
        ),
        ("a,b\nNA,2\n", None, "line 2: column 'a' holds 'NA': a missing value"),
        ("1,,0\n2,3,1\n", None, "line 1: column 1 is empty: a missing value"),
        ("a,b\n1,2\n2,\n", None, "line 3: the target 'b' is empty; fill it in, or leave out the row"),
        ("a;b\n1,5;0\n", None, "line 2: column 'a' holds '1,5'; write numbers with a decimal point"),
        ("a,a,b\n1,2,3\n", None, "two columns of one name, 'a'; give each its own"),
        ("a,b\n", None, "has a header line and no rows"),
        ("a|b|c\n1|2|3\n", None, r"has no features: of its 1 column, a\|b\|c, none is left .* give its --delimiter"),
        (b"\xff\xfe\x00", None, r"is not a \.csv file"),
    ],
)
def test_bad_csv(tmp_path, text, target, message):
    with pytest.raises(DataError, match=message):
        read_table(csv_file(tmp_path, text), target)


@pytest.mark.parametrize(
    ("name", "text", "delimiter", "X"),
    [
        ("t.csv", "a;b;c\n1.5;2;0\n", None, [[1.5, 2]]),
        ("t.csv", "a\tb\tc\n1\t2\t0\n", None, [[1, 2]]),
        ("t.csv", "\n\n1;2;0\n", None, [[1, 2]]),
        ("t.csv", 'a;"b, c, d, e";c\n1;2;0\n', None, [[1, 2]]),
        ("t.tsv", "a, b; c\tb\tc\n1\t2\t0\n", None, [[1, 2]]),
        ("t.tsv", "a,b,c\n1,2,0\n", ",", [[1, 2]]),
        ("t.csv", "a|b|c\n1|2|0\n", "|", [[1, 2]]),
        ("t.csv", "a b c\n1 2 0\n", " ", [[1, 2]]),
    ],
)
def test_delimiters(tmp_path, name, text, delimiter, X):
    features, targets = read_table(csv_file(tmp_path, text, name), delimiter=delimiter)
    np.testing.assert_array_equal(features, X)
    assert targets.tolist() == [0]


@pytest.mark.parametrize("delimiter", ["", ",,", "1", '"', ".", "\n", "\0"])
def test_what_is_no_delimiter_is_refused(tmp_path, delimiter):
    with pytest.raises(DataError, match="a delimiter is one character that no number contains"):
        read_table(csv_file(tmp_path, "1,2\n"), delimiter=delimiter)


def test_only_text_has_delimiters_and_only_names_are_dropped(tmp_path):
    np.savez(tmp_path / "t.npz", X=np.ones((2, 2)))
    with pytest.raises(DataError, match=r"only \.csv and \.tsv files have a delimiter"):
        read_table(tmp_path / "t.npz", delimiter=",")
    with pytest.raises(DataError, match=r"the columns of \.npz files have no names to drop them by"):
        read_table(tmp_path / "t.npz", drop=["a"])


def written(tmp_path, kind, columns):
    """A table of these columns, and its path."""
    pandas = pytest.importorskip("pandas")
    path = tmp_path / f"t.{kind}"
    frame = pandas.DataFrame(columns)
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path, index=False)
    return path


TABLE = {"id": ["x", "y"], "a": [1.0, 2.0], "kind": ["cat", "dog"], "b": [3.0, 4.0]}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_are_chosen_by_name(tmp_path, kind):
    path = written(tmp_path, kind, TABLE)
    rows = open_table(path, "kind", drop=["id"])
    assert rows.feature_names == ["a", "b"] == rows.first(1).feature_names
    X, y = rows.everything()
    assert X.tolist() == [[1, 3], [2, 4]] and y.tolist() == ["cat", "dog"]
    # in the order of a model, with the one column that it does not know as the target
    rows = open_table(path, features=["b", "a"], drop=["id"])
    assert rows.feature_names == ["b", "a"] and rows.everything()[0].tolist() == [[3, 1], [4, 2]]
    assert rows.everything()[1].tolist() == ["cat", "dog"]
    # columns that are neither features nor the target need not be numbers, and no target is needed
    assert not open_table(path, "none", features=["b", "a"], drop=["id"]).has_targets
    assert not open_table(path, features=["b", "a"], drop=["id", "kind"]).has_targets
    assert open_table(path, features=2, drop=["id", "kind"]).feature_names == ["a", "b"]
    assert open_table(path, features=1, drop=["id", "kind"]).feature_names == ["a"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("target", "features", "drop", "message"),
    [
        (None, ["a", "c"], (), "lacks the column 'c', .* and has the columns 'id', 'kind', 'b', which it does not know"),
        (
            None,
            ["a", "b"],
            (),
            "has the columns 'id', 'kind', which the model was not trained on; name the target",
        ),
        ("kind", ["a", "b"], (), r"has the column 'id', which the model was not trained on; leave them out \(--drop\)"),
        ("a", ["a", "b"], ("id", "kind"), "'a' cannot be the target, since the model was trained on it"),
        ("a", None, ("a",), "'a' cannot be both the target and dropped"),
        (None, None, ("c",), "has no column 'c'; it has id, a, kind, b"),
        (None, [f"f{j}" for j in range(10)], ("id", "kind", "a", "b"), "'f7' and 2 more, which the model was trained on;"),
    ],
)
def test_columns_that_are_missing_or_too_many(tmp_path, kind, target, features, drop, message):
    with pytest.raises(DataError, match=message):
        open_table(written(tmp_path, kind, TABLE), target, features=features, drop=drop)


def test_tables_without_names_go_by_the_number_of_features(tmp_path):
    path = csv_file(tmp_path, "1,2\n3,4\n")
    assert open_table(path).feature_names is None and open_table(path).has_targets
    for features in (2, ["a", "b"]):
        rows = open_table(path, features=features)
        assert rows.n_features == 2 and not rows.has_targets and rows.feature_names is None
    assert open_table(csv_file(tmp_path, "1,x,2\n3,y,4\n"), "2", drop=["1"]).everything()[0].tolist() == [[1], [3]]
    # one column alone has a name too, if the model says that it is a feature
    assert open_table(csv_file(tmp_path, "a\n1\n2\n"), features=1).feature_names == ["a"]
    # names that look like numbers are names if the model or the target says so
    path = csv_file(tmp_path, "1,0,kind\n5,6,7\n")
    assert open_table(path, features=["0", "1"]).everything()[0].tolist() == [[6, 5]]
    assert open_table(path, "kind").everything()[0].tolist() == [[5, 6]]


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
        (
            {"data": np.ones(2), "format": np.array(b"csr"), "shape": np.array([2, 2])},
            "holds a sparse matrix; save",
        ),
        ({"x": np.zeros((2, 2))}, "should hold arrays X and y; it holds x"),
        ({"X": np.zeros(3)}, r"array of shape \(3,\)"),
        ({"X": np.zeros((0, 3))}, "has no samples"),
        ({"X": np.zeros((3, 0))}, "has no features"),
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


@pytest.mark.parametrize("name", ["UP.CSV", "Up.Csv", "UP.TSV"])
def test_names_of_files_may_be_in_upper_case(tmp_path, name):
    text = "a\tb\n1\t0\n" if name == "UP.TSV" else "a,b\n1,0\n"
    X, y = read_table(csv_file(tmp_path, text, name))
    assert X.tolist() == [[1]] and y.tolist() == [0]


def test_names_of_archives_may_be_in_upper_case(tmp_path):
    with (tmp_path / "UP.NPZ").open("wb") as file:
        np.savez(file, X=np.eye(3), y=np.arange(3))
    X, y = read_table(tmp_path / "UP.NPZ")
    assert X.tolist() == np.eye(3).tolist() and y.tolist() == [0, 1, 2]


def test_names_of_arrays_may_be_in_upper_case(tmp_path):
    for name, array in (("X.NPY", np.eye(3)), ("Y.NPY", np.arange(3))):
        with (tmp_path / name).open("wb") as file:
            np.save(file, array)
    X, y = read_table(tmp_path / "X.NPY", target=str(tmp_path / "Y.NPY"))
    assert X.tolist() == np.eye(3).tolist() and y.tolist() == [0, 1, 2]


def test_a_column_of_labels_is_a_vector(tmp_path):
    X, y = np.eye(5), np.array(list("abbaa"))
    for name, targets in (("column", y[:, None]), ("vector", y)):
        np.savez(tmp_path / f"{name}.npz", X=X, y=targets)
        rows = with_labels(open_table(tmp_path / f"{name}.npz"))
        assert rows.has_targets and (rows.n_samples, rows.n_features) == (5, 5)
        assert [part.tolist() for _, part in rows.pieces(1, 5, 3)] == [["b", "b", "a"], ["a"]]
        assert rows.first(2).everything()[1].tolist() == ["a", "b"]
    np.savez(tmp_path / "none.npz", X=X)
    assert not with_labels(open_table(tmp_path / "none.npz")).has_targets
    np.savez(tmp_path / "pair.npz", X=X, y=np.stack([y, y], 1))
    with pytest.raises(
        DataError, match=r"pair.npz: targets have shape \(5, 2\), and a classifier needs one label for each of 5"
    ):
        with_labels(open_table(tmp_path / "pair.npz"))


def test_damaged_missing_and_foreign_files(tmp_path):
    np.savez(tmp_path / "t.npz", X=np.random.default_rng(0).random((50, 4)))
    whole = (tmp_path / "t.npz").read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 3):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"is damaged or no \.npz file"):
            read_table(tmp_path / "cut.npz")
    with pytest.raises(DataError, match="there is no file"):
        read_table(tmp_path / "no.csv")
    with pytest.raises(DataError, match=r"from \.npz, \.npy, \.parquet, \.csv or \.tsv files, not from '\.txt'"):
        read_table(csv_file(tmp_path, "1,2\n", "t.txt"))
