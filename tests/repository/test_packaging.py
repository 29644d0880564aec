"""The files around the package agree with each other, and the gate of the wheel notices what is missing."""

from __future__ import annotations

import re
import tomllib
import zipfile

import pytest

import lrrn
import wheel
from repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:])
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_pre_commit_has_the_ruff_of_make_lint():
    pinned = re.findall(r"ruff==([\d.]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert pinned == [PINS["ruff"]] * 2


def test_the_workflow_covers_what_the_metadata_claims():
    (listed,) = re.findall(r"python: \[(.*)\]", WORKFLOW)
    tried = re.findall(r'"([\d.]+)"', listed)
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert claimed and set(claimed) <= set(tried)
    assert PROJECT["requires-python"] == f">={tried[0]}" == f">={claimed[0]}"
    for file in re.findall(r"[\w./]+\.py\b", WORKFLOW):
        assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("file", [".github/workflows/ci.yml", ".pre-commit-config.yaml"])
def test_configurations_are_yaml(file):
    yaml = pytest.importorskip("yaml", reason="reading YAML needs PyYAML, of the extra test")
    assert isinstance(yaml.safe_load((ROOT / file).read_text()), dict)


def test_the_version_is_the_same_everywhere():
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [lrrn.__version__]


def made(path, name, **fields):
    """Write a wheel with some metadata, and with py.typed and a licence unless told otherwise."""
    folder = "lrrn-1.dist-info"
    known = {"Description-Content-Type": "text/markdown", "License-Expression": "MIT", "Requires-Python": ">=3.11"}
    known |= dict.fromkeys(("Summary", "Keywords", "Classifier", "Provides-Extra"), "some")
    lines = [f"{key}: {value}" for key, value in (known | fields).items() if value]
    with zipfile.ZipFile(path / name, "w") as content:
        content.writestr(f"{folder}/METADATA", "\n".join(lines) + "\n\ntext\n")
        content.writestr(f"{folder}/licenses/LICENSE", "MIT")
        content.writestr("lrrn/py.typed", "")
    return path / name


def test_two_wheels_are_compared_by_name_and_content(tmp_path):
    a, b = made(tmp_path, "a.whl"), made(tmp_path, "b.whl")
    assert wheel.differences(a, b) == []
    with zipfile.ZipFile(b, "a") as content:
        content.writestr("lrrn/more.py", "")
    assert wheel.differences(a, b) == ["lrrn/more.py differs"] == wheel.differences(b, a)
    assert wheel.differences(a, made(tmp_path, "c.whl", Summary="other")) == ["lrrn-1.dist-info/METADATA differs"]


def test_missing_metadata_is_noticed(tmp_path):
    assert wheel.faults_of_metadata(made(tmp_path, "a.whl")) == []
    plain = made(tmp_path, "b.whl", Summary=None, **{"Description-Content-Type": "text/plain"})
    assert wheel.faults_of_metadata(plain) == ["Description-Content-Type is 'text/plain', not 'text/markdown'", "no Summary"]
    with zipfile.ZipFile(tmp_path / "c.whl", "w") as content, zipfile.ZipFile(plain) as other:
        content.writestr("lrrn-1.dist-info/METADATA", other.read("lrrn-1.dist-info/METADATA"))
    assert "no lrrn/py.typed" in wheel.faults_of_metadata(tmp_path / "c.whl")


def test_what_cannot_be_used_ends_the_gate(tmp_path):
    with pytest.raises(SystemExit, match=r"files: a is missing; b is missing"):
        wheel.check(["a is missing", "b is missing"], "files")
    with pytest.raises(SystemExit, match="ended with status 3"):
        wheel.run([wheel.sys.executable, "-c", "raise SystemExit(3)"], tmp_path)
