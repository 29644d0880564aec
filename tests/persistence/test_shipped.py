"""Models by name, their digests, and published radii."""

from __future__ import annotations

import json
import tomllib
from fractions import Fraction

import numpy as np
import pytest

import lrrn
from lrrn.persistence import shipped
from lrrn.persistence.published import Published, publish, read_radii, rounded_down, rounded_up, write_radii
from lrrn.persistence.serialization import load_reference
from lrrn.runtime.storage import FileFormatError
from repository import ROOT
from shipped_folder import NAME, flip_bit, own_folder


@pytest.fixture
def entry(tmp_path, monkeypatch):
    return own_folder(tmp_path, monkeypatch)


def test_a_name_stands_for_a_file_and_a_file_of_that_name_wins(entry, tmp_path):
    named = lrrn.load(NAME)
    assert named.network_.sizes == (64, 12, 10)
    assert load_reference(NAME) is None
    other = lrrn.LRRN((3, 4, 2))
    lrrn.save(other, tmp_path / NAME)
    assert lrrn.load(NAME).sizes == (3, 4, 2)


def test_a_folder_of_that_name_does_not_hide_a_shipped_model(entry, tmp_path):
    (tmp_path / NAME).mkdir()
    assert lrrn.load(NAME).network_.sizes == (64, 12, 10)


def test_what_is_neither_a_file_nor_a_name_gives_the_names(entry, monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"no file digits; models by name: {NAME}"):
        lrrn.load("digits")
    with pytest.raises(ValueError, match=rf"no shipped model is called 'digits'; models by name: {NAME}"):
        shipped.shipped_model("digits")
    monkeypatch.setenv("LRRN_MODELS", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="no models are shipped here"):
        lrrn.load(NAME)


@pytest.mark.parametrize("place", [100, -1])
def test_one_flipped_bit_is_an_error_with_both_digests(entry, place):
    flip_bit(entry.weights_path, place)
    found = shipped.digest(entry.weights_path)
    assert found != entry.sha256
    with pytest.raises(FileFormatError, match=f"has SHA-256 {found} and {entry.sha256} was published"):
        lrrn.load(NAME)


def test_a_model_that_is_listed_but_not_here_says_where_to_find_it(entry):
    entry.weights_path.unlink()
    with pytest.raises(FileFormatError, match="set LRRN_MODELS"):
        lrrn.load(NAME)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"name": "a"}]', "null"])
def test_a_damaged_index_is_reported(entry, content):
    (entry.folder / "index.json").write_text(content)
    if content == "{}":  # an empty list of models
        assert shipped.shipped_models() == {}
        return
    with pytest.raises(FileFormatError, match=r"index\.json is damaged"):
        lrrn.load(NAME)


def test_rounding_never_claims_more():
    values = np.concatenate([np.random.default_rng(0).exponential(size=2000), [0.0, 1.0, 0.1, np.inf, np.nan, 1e-300]])
    down, up = rounded_down(values), rounded_up(values)
    assert down.dtype == up.dtype == np.float32
    known = ~np.isnan(values)
    assert (down[known].astype(float) <= values[known]).all() and (up[known].astype(float) >= values[known]).all()
    finite = np.isfinite(values)
    assert np.allclose(down[finite], values[finite], rtol=2**-22) and np.allclose(up[finite], values[finite], rtol=2**-22)
    assert (down[finite] < up[finite]).sum() > 1900  # equal only where float32 holds the value
    assert down[2000] == 0 and np.isinf(up[2003]) and np.isnan(up[2004])


def test_published_radii_survive_a_file_and_damage_is_noticed(tmp_path):
    results = publish(np.array([1, 2, 2]), np.array([1, 2, 3]), np.array([0.1, 0.7, 0.9]), np.array([np.nan, 0.8, np.inf]))
    path, again = tmp_path / "r.npz", tmp_path / "s.npz"
    write_radii(path, results)
    write_radii(again, results)
    assert path.read_bytes() == again.read_bytes()
    read = read_radii(path)
    for name in ("predicted", "true", "radius", "attack"):
        assert np.array_equal(getattr(read, name), getattr(results, name), equal_nan=name == "attack")
    assert [read.certified(eps) for eps in (0, 0.5, 0.8)] == [2 / 3, 1 / 3, 0]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(FileFormatError, match="damaged"):
        read_radii(path)
    np.savez(path, predicted=results.predicted)
    with pytest.raises(FileFormatError, match="not a file of published radii"):
        read_radii(path)
    with pytest.raises(ValueError, match="negative or not a number"):
        Published(results.predicted, results.true, -results.radius, results.attack)
    with pytest.raises(ValueError, match="radius is of shape"):
        Published(results.predicted, results.true, results.radius.astype(np.float64), results.attack)


# --- the models of this repository -------------------------------------------------------------------------------------


def test_the_files_in_the_repository_are_those_of_its_index():
    known = shipped.shipped_models(ROOT / "models")
    assert "mnist-paper-a" in known
    for model in known.values():
        shipped.check_digest(model.weights_path, model.sha256)
        shipped.check_digest(model.radii_path, model.radii_sha256)
        card = (model.folder / f"{model.name}.md").read_text()
        assert all(text in card for text in (model.sha256, model.radii_sha256, "## Limits", f"{model.accuracy:.2%}"))
        radii = read_radii(model.radii_path)
        assert model.certified == {size: radii.certified(float(Fraction(size))) for size in model.certified}
        assert model.accuracy == radii.certified(0) and not (radii.attack < radii.radius).any()
    sizes = [path.stat().st_size for path in (ROOT / "models").iterdir()]
    assert max(sizes) <= 8_000_000 and sum(sizes) <= 25_000_000


def test_the_wheel_has_the_index_and_both_files_of_each_model_in_it():
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = tables["force-include"]
    assert all((ROOT / source).is_file() and target == f"lrrn/shipped_models/{source[7:]}" for source, target in copied.items())
    assert "models/index.json" in copied
    for model in json.loads((ROOT / "models" / "index.json").read_text()):
        files = {f"models/{model['file']}", f"models/{model['radii']}"}
        assert files <= copied.keys() or not files & copied.keys()
    assert str(shipped._WHEEL).endswith("lrrn/shipped_models")
