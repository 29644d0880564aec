"""The fuzzer notices what it looks for; ``make fuzz`` and ``make faults`` run it."""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import signal
import zipfile
from collections import Counter

import numpy as np
import pytest

import fuzz
import fuzz_inputs
import fuzz_targets
from lrrn import datasets


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
    wrong, _ = block(npz, 4000)  # ends at the first; which one that is depends on the length of the path that is planted
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
