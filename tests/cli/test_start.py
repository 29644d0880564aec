"""Answers that need no model come at once: nothing that takes seconds to import is imported for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lrrn

HEAVY = ("torch", "sklearn", "numba", "scipy")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--version"], 0, f"lrrn {lrrn.__version__}"),
        (["--help"], 0, "predict"),
        (["train", "--help"], 0, "--hidden-sizes"),
        (["train", "digits", "--no-such-option"], 2, "--no-such-option"),
        (["train", "digits", "--eps", "foo"], 2, "--eps should be numbers"),
        (["train", "digits", "--eps=-1"], 2, "--eps needs finite sizes of at least 0"),
        (["train", "digits", "--model", "energy", "--margin", "0.5"], 2, "--margin does not apply to --model energy"),
        (["train", "digits", "--objective", "hinge"], 2, "--objective should be one of"),
        (["train", "missing.csv"], 1, "there is no file missing.csv"),
        (["evaluate", "missing.safetensors", "digits"], 1, "no file missing.safetensors"),
        (["certify", "m", "digits", "--method", "magic"], 2, "--method should be one of"),
        (["export", "m", "m.onnx", "--lower", "0", "--upper", "inf"], 2, "--upper needs finite numbers"),
        (["demo", "--device", "tpu"], 2, "unknown device 'tpu'"),
        (["demo", "--json", "/no/such/folder/x"], 2, "the folder /no/such/folder does not exist"),
    ],
)
def test_nothing_heavy_is_imported_before_arguments_are_checked(tmp_path, arguments, status, message):
    code = f"""
import sys
from lrrn.cli import app
try:
    app({arguments!r})
finally:
    print("imported:", sorted({HEAVY!r} & sys.modules.keys()))
""".replace(repr(HEAVY), repr(set(HEAVY)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    told = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert done.returncode == status and message in told and "imported: []" in told, told
