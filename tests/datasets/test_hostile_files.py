"""What ``scripts/gates/fuzz.py`` found stays mended: files that announce more than they hold, errors that were no message."""

from __future__ import annotations

import io
import os
import struct
import zipfile

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lrrn import datasets
from lrrn.cli import app
from lrrn.runtime import storage


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

    monkeypatch.setattr("lrrn.cli.demo.run", fails)
    monkeypatch.setattr("lrrn.cli.info.gather", fails)
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
    path, stream = tmp_path / "t.npz", io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": True, "shape": shape})
    content = stream.getvalue() + bytes(4000)
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


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads Linux's account of open files")
def test_a_damaged_archive_is_closed_when_it_is_refused(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, X=np.random.default_rng(0).random((50, 4)))
    content = bytearray(path.read_bytes())
    content[600] ^= 1
    path.write_bytes(content)
    with pytest.raises(datasets.DataError, match="is damaged") as error:
        datasets.read_table(path)
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    assert str(path) not in [os.readlink(link) for link in links if os.path.islink(link)], error  # whose traceback is alive
