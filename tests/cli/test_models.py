"""Commands about shipped models, and names of models in the place of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from doc_pages import commands, examples
from lrrn.cli import app
from lrrn.persistence.published import read_radii, write_radii
from repository import ROOT
from shipped_folder import NAME, flip_bit, own_folder

runner = CliRunner()


@pytest.fixture
def entry(tmp_path, monkeypatch):
    return own_folder(tmp_path, monkeypatch)


def run(*arguments, status=0):
    done = runner.invoke(app, [str(argument) for argument in arguments], terminal_width=200)
    assert done.exit_code == status, done.output
    return " ".join(done.output.replace("│", " ").split())


def test_models_are_listed(entry, tmp_path):
    text = run("models", "--json", tmp_path / "m.json")
    assert NAME in text and f"{entry.accuracy:.2%}" in text and "digits" in text
    (listed,) = json.loads((tmp_path / "m.json").read_text())["models"]
    assert listed["path"] == str(entry.weights_path) and listed["certified"] == entry.certified


def test_the_page_lists_the_models_as_they_are():
    """To the last digit; the comparison of all commands on the pages leaves this one out, for the folder in its last line."""
    page = (ROOT / "docs" / "command-line.md").read_text()
    (shown,) = (
        text for block in examples(page, "console") for line, text in commands(block.block.text) if line == "lrrn models"
    )
    environment = {**os.environ, "LRRN_MODELS": str(ROOT / "models"), "COLUMNS": "100"}
    command = [sys.executable, "-m", "lrrn", "models"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    printed = [line.strip() for line in done.stdout.splitlines()]
    assert [line.strip() for line in shown.splitlines()][:-1] == printed[:-1]


def test_commands_take_a_name_where_they_take_a_file(entry, tmp_path):
    run("evaluate", NAME, "digits", "--json", tmp_path / "e.json")
    (found,) = json.loads((tmp_path / "e.json").read_text())["models"]
    assert found["score"] == pytest.approx(entry.accuracy)
    run("certify", NAME, "digits", "--eps", "0.5", "--method", "shared", "--json", tmp_path / "c.json")
    assert json.loads((tmp_path / "c.json").read_text())["certified"]["0.5"] == pytest.approx(entry.certified["0.5"])
    assert "attack" in run("attack", NAME, "digits", "--limit", 5, "--steps", 3)
    run("predict", NAME, "digits", "--limit", 3, "-o", tmp_path / "p.csv")
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 4
    assert f"no file nothing; models by name: {NAME}" in run("evaluate", "nothing", "digits", status=1)
    flip_bit(entry.weights_path, -1)
    assert "was published" in run("predict", NAME, "digits", status=1)


def test_verify_says_in_one_line_whether_the_record_stands(entry, tmp_path):
    text = run("verify", NAME, "--images", 20, "--json", tmp_path / "v.json")
    assert f"{NAME}: the record stands: files as published; 20 images" in text
    assert json.loads((tmp_path / "v.json").read_text())["mathematics"] == []
    published = read_radii(entry.radii_path)
    published.radius[:] = (published.radius * 1.01).astype(np.float32)
    write_radii(entry.radii_path, published)
    text = run("verify", NAME, "--images", 20, status=1)
    assert "was published" in text and "fresh radii are below" in text
    text = run("verify", NAME, "--images", 20, "--ignore-digests", status=1)
    assert "was published" not in text and "fresh radii are below" in text
    assert f"models by name: {NAME}" in run("verify", "nothing", status=1)
    assert "verified on the CPU" in run("verify", NAME, "--device", "cuda", status=2)


def test_verify_needs_the_data(tmp_path, monkeypatch):
    monkeypatch.delenv("LRRN_DATA", raising=False)
    text = run("verify", "mnist-paper-a", "--data", tmp_path, status=1)
    assert "mnist" in text.lower() and str(tmp_path) in text.replace(" ", "")


def test_exported_certificates_pass_the_checker(entry, tmp_path):
    text = run("certify", NAME, "digits", "--limit", 6, "--export-proof", tmp_path / "proof.json")
    count = len(json.loads((tmp_path / "proof.json").read_text())["certificates"])
    assert count >= 4 and f"{count} certificates" in text
    command = [sys.executable, "-S", ROOT / "checker" / "check_certificate.py", tmp_path / "proof.json", entry.weights_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"{count} of {count} certificates accepted" in done.stdout
    flip_bit(entry.weights_path, -1)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and entry.sha256 in done.stdout
