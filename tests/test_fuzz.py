"""The fuzzer notices what it looks for, and what it found stays mended. ``make fuzz`` and ``make faults`` run it."""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import signal
import struct
import sys
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lrrn import datasets, storage
from lrrn.cli import app

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))
import fuzz
import fuzz_inputs
import fuzz_targets


@pytest.fixture
def npz(tmp_path):
    return fuzz_targets.Npz(tmp_path, tmp_path / "canary")


def block(target, n=60):
    counts = Counter()
    return fuzz.run_block(target, 0, 0, n, counts), counts


def test_a_block_counts_its_inputs_and_repeats_itself(npz):
    """Over the .npz reader as it is: every input is read or refused as documented."""
    seen = []
    original = npz.write

    def write(name, content):
        seen.append(content)
        return original(name, content)

    npz.write = write
    wrong, counts = block(npz)
    assert wrong is None and counts["accepted"] + counts["refused"] == 60 and min(counts["accepted"], counts["refused"]) > 0
    first, seen[:] = list(seen), []
    block(npz)
    assert seen == first


def unpickles(path, target=None):
    try:
        with open(path, "rb") as raw:
            return np.load(raw, allow_pickle=True)["X"]
    except Exception as error:
        raise datasets.DataError(f"{path} is damaged") from error


def names_nothing(path, target=None):
    raise datasets.DataError("bad file")


def believes(path, target=None):
    """Take memory for what a directory announces, and fail as documented."""
    try:
        np.empty(2**50)
    except MemoryError as error:
        raise datasets.DataError(f"{path} is damaged") from error


DEFECTS = {
    "a pickle": (unpickles, r"do this: \[.pickle\.find_class"),
    "an error of another kind": (lambda path, target: {}["X"], "KeyError: 'X'"),
    "an error that names no file": (names_nothing, "does not name the file"),
    "memory for what is announced": (believes, "made the library run out of memory"),
    "a file that is written": (lambda path, target: open(f"{path}.out", "w").close(), "open '.*' for writing"),
    "a program that is started": (lambda path, target: os.system("true"), "do this: .*os.system"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_noticed(name, npz, monkeypatch):
    defect, message = DEFECTS[name]
    monkeypatch.setattr(datasets, "read_table", lambda path, target=None: defect(path, target))
    wrong, _ = block(npz, 250)
    assert wrong is not None and re.search(message, wrong) and "input: " in wrong


def test_a_planted_pickle_does_what_it_is_planted_for(tmp_path, npz, monkeypatch):
    """Otherwise that nothing happened would mean nothing."""
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(fuzz_inputs.Planted(str(canary))))
    assert canary.exists()
    canary.rmdir()
    stream = io.BytesIO()
    np.save(stream, np.array([[fuzz_inputs.Planted(str(canary))]], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("X.npy", stream.getvalue())
    with pytest.raises(datasets.DataError, match="holds Python objects, which are not loaded"):
        datasets.read_table(tmp_path / "t.npz")
    assert not canary.exists()


def test_an_input_that_takes_too_long_is_noticed(npz, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    before = signal.signal(signal.SIGALRM, fuzz.too_slow)
    try:
        monkeypatch.setattr(datasets, "read_table", lambda path, target=None: signal.pause())
        chance = random.Random(0)
        signal.alarm(1)
        with pytest.raises(fuzz_targets.Undocumented, match="took longer than 1 s"):
            npz(chance)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- what was found -------------------------------------------------------------------------------------------------------


def test_tensors_do_not_go_with_the_file_they_were_read_from(tmp_path):
    """They were views of it: cutting it off ended the process with SIGBUS."""
    path = tmp_path / "file"
    storage.write(path, "network", {"W": torch.arange(5000.0)}, {})
    tensors = storage.read(path, "network")[1]
    with open(path, "r+b") as file:
        file.write(b"\xff" * 21_000)
    assert torch.equal(tensors["W"], torch.arange(5000.0))


@pytest.mark.parametrize("command", ["demo", "info"])
def test_commands_tell_errors_in_a_line(command, monkeypatch):
    def fails(*_, **__):
        raise ValueError("this is what is wrong")

    monkeypatch.setattr("lrrn.demo.run", fails)
    monkeypatch.setattr("lrrn.info.gather", fails)
    done = CliRunner().invoke(app, [command])
    assert (
        done.exit_code == 1 and done.output.strip() == "Error: this is what is wrong" and isinstance(done.exception, SystemExit)
    )


def test_an_idx_file_of_nothing_in_too_many_places(tmp_path):
    (tmp_path / "t").write_bytes(b"\0\0\x08\3" + struct.pack(">3I", 0, 2**32 - 1, 2**32 - 1))
    with pytest.raises(datasets.DataError, match="announces 18446744065119617025 bytes, more than"):
        datasets.read_idx(tmp_path / "t")
    (tmp_path / "t").write_bytes(b"\0\0\x08\3" + struct.pack(">3I", 0, 28, 28))
    assert datasets.read_idx(tmp_path / "t").shape == (0, 28, 28)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_that_announces_more_than_its_bytes_can_hold(compression, tmp_path):
    """Both the array's header and the archive's directory lie, and agree with each other."""
    shape = (10_000_000, 20)
    header = f"{{'descr': '<f8', 'fortran_order': True, 'shape': {shape}}}"
    path, content = tmp_path / "t.npz", fuzz_inputs.npy_bytes(header, bytes(4000))
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("X.npy", content)
    packed = bytearray(path.read_bytes())
    announced = len(content) - 4000 + 8 * shape[0] * shape[1]
    for mark, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        at = packed.index(mark) + offset
        packed[at : at + 4] = struct.pack("<I", announced)
    path.write_bytes(packed)
    with pytest.raises(datasets.DataError, match=rf"X\.npy announces {announced} bytes, packed into"):
        datasets.read_table(path)
