"""Full disks, read-only folders, caches that cannot be written, files that vanish or are cut off: told, and nothing lost."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numba.core import caching
from typer.testing import CliRunner

import lrrn
from faults import as_ordinary_user, device, full_disk, read_only
from lrrn import LRRNClassifier, datasets
from lrrn.cli import app
from lrrn.datasets.rows import ArrayRows
from lrrn.kernels.cpu import compiled
from lrrn.learning import Contrastive, Data, Settings, Trainer, checkpoint
from lrrn.reports.scoring import Parts, over_rows
from lrrn.runtime import storage
from lrrn.runtime.storage import FileFormatError, WriteError
from oracles import random_network

QUICK = dict(hidden_sizes=(6,), epochs=6, batch_size=8, device="cpu", random_state=0)


def blobs(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = np.arange(n) % 3
    return np.eye(3)[y] @ rng.normal(size=(3, 5)) + 0.3 * rng.normal(size=(n, 5)), y


def classifier(**options) -> LRRNClassifier:
    return LRRNClassifier(**{**QUICK, **options})


def weights(model: LRRNClassifier) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.network_.parameters()])


@pytest.fixture(scope="module")
def undisturbed() -> torch.Tensor:
    return weights(classifier().fit(*blobs()))


@pytest.fixture
def run(tmp_path):
    """A folder for the files of a run."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def after(epoch: int, what):
    """A callback that does something after an epoch."""

    def callback(trainer, record):
        if record["epoch"] == epoch:
            what()

    return callback


def told(error: pytest.ExceptionInfo, path, *words: str) -> None:
    message = str(error.value)
    assert all(word in message for word in (str(path), *words)), message


# --- full disk ------------------------------------------------------------------------------------------------------------


def test_saving_to_a_full_disk_names_the_file_and_keeps_the_old_one(tmp_path):
    path = tmp_path / "model.safetensors"
    lrrn.save(random_network((5, 4, 3), seed=1), path)
    before = path.read_bytes()
    with pytest.raises(WriteError) as error, full_disk(100):
        lrrn.save(random_network((5, 4, 3), seed=2), path)
    told(
        error, path, "File too large", "free some space there, or choose another folder", "what the file held before is intact"
    )
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_no_space_left(run):
    full = device(run, "full")
    with pytest.raises(WriteError) as error:
        lrrn.save(random_network((5, 4, 3)), full)
    told(error, full, "No space left on device", "free some space there")
    assert error.value.errno == errno.ENOSPC and not full.is_file()


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_disk_that_fills_during_training_stops_it_and_the_last_checkpoint_resumes_to_the_same_bits(epoch, run, undisturbed):
    path = run / "run.ckpt"
    disk = full_disk(200)
    model = classifier(checkpoint=path, callbacks=(after(epoch + 1, disk.__enter__),))
    try:
        with pytest.raises(WriteError) as error:
            model.fit(*blobs())
    finally:
        disk.__exit__(None, None, None)
    told(error, path, "free some space", "intact")
    assert os.listdir(run) == ["run.ckpt"]
    _, _, header = storage.read(path, checkpoint.KIND)
    assert header["position"]["epoch"] == epoch
    assert torch.equal(weights(classifier(checkpoint=path, resume=True).fit(*blobs())), undisturbed)


def test_a_log_on_a_full_disk_is_named(run):
    log = device(run, "full")
    with pytest.raises(WriteError) as error:
        classifier(log=log, checkpoint=run / "run.ckpt").fit(*blobs())
    told(error, log, "No space left on device", "free some space")
    assert not log.is_file()  # nothing was put in the place of a device


def test_devices_and_streams_are_written_to_and_never_replaced(tmp_path):
    null, link, fifo = device(tmp_path, "null"), tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(null)
    os.mkfifo(fifo)
    for path in (null, link):
        storage.check_writable(path)
        storage.write_bytes(path, b"nothing")
    assert link.is_symlink() and not null.is_file()
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    storage.write_bytes(fifo, b"through")
    assert os.read(reader, 100) == b"through" and not fifo.is_file()
    os.close(reader)


def test_a_link_stays_a_link_and_what_it_points_to_is_replaced(tmp_path):
    """On another disk, say, where a temporary neighbour of the link could not be renamed to."""
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (here / "run.ckpt").symlink_to(there / "data")
    for content in (b"one", b"two"):
        storage.write_bytes(here / "run.ckpt", content)
        assert (there / "data").read_bytes() == content and (here / "run.ckpt").is_symlink()
    (there / ".data.killed.part").write_bytes(b"half")
    storage.clear_remains(here / "run.ckpt")
    assert os.listdir(there) == ["data"]


def test_names_that_are_long_or_odd(tmp_path):
    for name in ("a" * 255, "é" * 120, "run[1]*?.ckpt", " ", "-", "new\nline"):
        path = tmp_path / name
        storage.check_writable(path)
        storage.write_bytes(path, b"content")
        assert path.read_bytes() == b"content"
        other = tmp_path / ".run1x.ckpt.other.part"
        other.write_bytes(b"of another file, whose name a pattern could match")
        storage.clear_remains(path)
        assert other.exists()
    for bad, words in (("a" * 256, "shorter name"), ("nul\0", "no file can have this name"), ("x/" * 3000, "does not exist")):
        with pytest.raises(OSError, match=words):
            storage.check_writable(tmp_path / bad)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="cannot write"):
        storage.check_writable(loop / "model")


TMPFS = """
import os, sys
import numpy as np
from typer.testing import CliRunner
from lrrn.cli import app
folder = sys.argv[1]
data = sys.argv[2]
files = ["-o", f"{folder}/m.safetensors", "--checkpoint", f"{folder}/run.ckpt"]
arguments = ["train", data, "--epochs", "3", "--hidden", "6", *files]
run = lambda *more: CliRunner().invoke(app, [*arguments, *more])
print(run().exit_code, sorted(os.listdir(folder)))
before = open(f"{folder}/run.ckpt", "rb").read()
with open(f"{folder}/filler", "wb", buffering=0) as filler:
    try:
        while True:
            filler.write(bytes(4096))
    except OSError as error:
        print(error.strerror)
done = run("--overwrite")
print(done.exit_code, done.output.count("Error: cannot write"), "No space left on device" in done.output)
print(open(f"{folder}/run.ckpt", "rb").read() == before)
os.remove(f"{folder}/filler")
print(run("--resume").exit_code)
"""


def test_a_disk_that_is_really_full(tmp_path):
    """A small file system of its own, where the system lets us make one."""
    make = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    folder, data = tmp_path / "disk", tmp_path / "data.npz"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=200k tmpfs {folder}"
    if shutil.which("unshare") is None or subprocess.run([*make, mount], capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    X, y = blobs()
    np.savez(data, X=X, y=y)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = f'{mount} && exec "{sys.executable}" -c "$SCRIPT" {folder} {data}'
    done = subprocess.run(
        [*make, command], capture_output=True, text=True, timeout=240, env={**environment, "SCRIPT": TMPFS}, check=False
    )
    expected = ["0 ['m.safetensors', 'run.ckpt']", "No space left on device", "1 1 True", "True", "0"]
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr


# --- folders that cannot be written ---------------------------------------------------------------------------------------


def test_a_read_only_folder_is_refused_before_any_work(run):
    X, y = blobs()

    def attempts():
        for option in ("checkpoint", "log"):
            with pytest.raises(PermissionError) as error:
                classifier(**{option: run / "file"}).fit(X, y)
            told(error, run / "file", "is read-only; choose another")
        with pytest.raises(PermissionError, match="is read-only; choose another"):
            lrrn.save(random_network((5, 4, 3)), run / "model")

    with read_only(run):
        as_ordinary_user(attempts)
    assert os.listdir(run) == []


def test_a_folder_that_becomes_read_only_during_training(run, undisturbed):
    path = run / "run.ckpt"
    model = classifier(checkpoint=path, callbacks=(after(3, lambda: os.chmod(run, 0o555)),))

    def attempt():
        with pytest.raises(WriteError) as error:
            model.fit(*blobs())
        told(error, path, "Permission denied", "choose a folder that can be written", "intact")

    as_ordinary_user(attempt)
    os.chmod(run, 0o755)
    assert os.listdir(run) == ["run.ckpt"]
    assert torch.equal(weights(classifier(checkpoint=path, resume=True).fit(*blobs())), undisturbed)


def test_remains_that_cannot_be_removed_are_in_the_way_of_nothing(run):
    path = run / "run.ckpt"
    (run / ".run.ckpt.killed.part").write_bytes(b"half a checkpoint")
    with read_only(run):
        as_ordinary_user(lambda: storage.clear_remains(path))
    classifier(checkpoint=path).fit(*blobs())
    assert os.listdir(run) == ["run.ckpt"]


def test_a_file_that_may_not_be_read(tmp_path):
    path, table = tmp_path / "model", tmp_path / "table.csv"
    lrrn.save(random_network((5, 4, 3)), path)
    table.write_text("1,2\n")
    for file in (path, table):
        file.chmod(0)

    def attempts():
        with pytest.raises(PermissionError):
            lrrn.load(path)
        with pytest.raises(datasets.DataError, match=r"table\.csv cannot be read \(Permission denied\)"):
            datasets.read_table(table)

    as_ordinary_user(attempts)


# --- caches ---------------------------------------------------------------------------------------------------------------

TINY = """
from lrrn.kernels.cpu.compiled import kernel

@kernel
def double(x):
    return 2 * x
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch, caplog):
    """A function that loads a module with a kernel from a folder, as another process would."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    monkeypatch.setattr(compiled, "_told", set())
    caplog.set_level(logging.WARNING, logger="lrrn.kernels.cpu.compiled")
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "tiny.py").write_text(TINY)

    def load():
        spec = importlib.util.spec_from_file_location("tiny", folder / "tiny.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.double

    return load


def warned(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "set NUMBA_CACHE_DIR" in record.getMessage()]


def test_a_kernel_is_kept_and_found_again(tiny, caplog):
    assert tiny()(3) == 6
    again = tiny()
    assert again(3) == 6 and sum(again.stats.cache_hits.values()) == 1 and warned(caplog) == []


def test_kernels_work_where_no_folder_can_be_written(tiny, caplog, tmp_path):
    with read_only(tmp_path / "package"):
        assert as_ordinary_user(lambda: tiny()(3)) == 6
        assert as_ordinary_user(lambda: tiny()(4)) == 8
    assert len(warned(caplog)) == 1 and "cannot cache function 'double'" in warned(caplog)[0]


def test_kernels_work_where_the_disk_is_full(tiny, caplog):
    with full_disk():
        assert tiny()(3) == 6
    assert len(warned(caplog)) == 1 and "File too large" in warned(caplog)[0]


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"junk", None])
def test_a_damaged_cache_is_made_anew(suffix, content, tiny, caplog, tmp_path):
    assert tiny()(3) == 6
    (file,) = (tmp_path / "package" / "__pycache__").rglob(f"*.{suffix}")
    file.write_bytes(file.read_bytes()[:-20] if content is None else content)
    assert tiny()(3) == 6
    if suffix == "nbi":
        again = tiny()
        assert again(3) == 6 and sum(again.stats.cache_hits.values()) == 1


def test_machine_code_of_one_type_is_not_taken_for_another(tiny, monkeypatch, tmp_path):
    """The index is damaged, and the disk is full when the code of another type is written."""
    assert tiny()(3) == 6
    (index,) = (tmp_path / "package" / "__pycache__").rglob("*.nbi")
    index.write_bytes(b"junk")

    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(caching.IndexDataCacheFile, "_save_data", fails)
        assert tiny()(3.5) == 7
    assert tiny()(3.5) == 7 and tiny()(3) == 6


def test_a_cache_that_can_only_be_read_is_read(tiny, caplog, tmp_path):
    assert tiny()(3) == 6

    def again():
        double = tiny()
        return double(3), sum(double.stats.cache_hits.values())

    with contextlib.ExitStack() as stack:
        folder = tmp_path / "package"
        for each in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            stack.enter_context(read_only(each))
        assert as_ordinary_user(again) == (6, 1)
    assert warned(caplog) == []


def test_a_cache_of_data_that_cannot_be_written_is_told_by_library_and_command(tmp_path, monkeypatch):
    """The download itself is not the point here: making the folder for it fails first."""
    monkeypatch.delenv("LRRN_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()

    def attempts():
        with pytest.raises(datasets.DataError) as error:
            datasets.load("mnist")
        told(error, tmp_path / "cache" / "lrrn" / "MNIST", "Permission denied", "put train-images", "or set LRRN_DATA")
        done = CliRunner().invoke(app, ["train", "mnist", "-o", str(tmp_path / "m.safetensors")])
        assert done.exit_code == 1 and "Permission denied" in done.output and "or set LRRN_DATA" in done.output

    with read_only(tmp_path / "cache"):
        as_ordinary_user(attempts)


# --- files that vanish or are cut off -------------------------------------------------------------------------------------


def test_files_that_vanish_between_finding_and_reading(tmp_path, monkeypatch):
    gone = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    monkeypatch.setattr(datasets.catalogue, "_existing", lambda *_: gone)
    with pytest.raises(datasets.DataError, match=f"there is no file {gone}"):
        datasets.load("mnist", root=tmp_path)
    for module in (datasets.idx, datasets.tables):
        monkeypatch.setattr(module, "check_there", lambda _: None)
    for read, name in ((datasets.read_table, "t.csv"), (datasets.read_table, "t.npz"), (datasets.read_idx, "t")):
        with pytest.raises(
            datasets.DataError, match=rf"{name} cannot be read \(No such file or directory\); see that it is there"
        ):
            read(tmp_path / name)
    monkeypatch.setattr(storage, "check_readable", lambda _: None)
    with pytest.raises(FileNotFoundError):
        lrrn.load(tmp_path / "model")


def as_table(path: Path, n: int = 60) -> tuple[Path, str | None]:
    """Write a table in the way its suffix says; return what ``target`` should be."""
    X, y = blobs(n)
    if path.suffix == ".npz":
        np.savez(path, X=X, y=y)
    elif path.suffix == ".npy":
        np.save(path, X)
        np.save(path.with_name("y.npy"), y)
        return path, str(path.with_name("y.npy"))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        columns = {f"f{j}": np.ascontiguousarray(column) for j, column in enumerate(X.T)}
        parquet.write_table(pyarrow.table({**columns, "y": y}), path, row_group_size=10)
    return path, None


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".parquet"])
def test_a_table_that_vanishes_or_shrinks_while_it_is_read(suffix, tmp_path):
    path, target = as_table(tmp_path / f"t{suffix}")
    content, pieces = path.read_bytes(), datasets.open_table(path, target).pieces(0, 60, 7)
    assert len(next(pieces)[0]) == 7
    rows = datasets.open_table(path, target)
    path.unlink()
    with pytest.raises(
        datasets.DataError, match=rf"t{suffix} cannot be read .*No such file or directory\); see that it is there"
    ):
        list(rows.pieces(0, 60, 7))
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(datasets.DataError, match=rf"t{suffix} (is damaged|has changed)"):
        list(rows.pieces(0, 60, 7))


def test_results_of_samples_on_a_full_disk_are_kept_part_by_part_and_damaged_parts_are_told(run, tmp_path, monkeypatch):
    monkeypatch.setattr("lrrn.reports.scoring.PART_CHUNKS", 2)
    rows, out = ArrayRows(np.arange(100.0)[:, None], name="numbers"), run / "out.npz"
    whole = over_rows(rows, 10, lambda X, y, chunk: {"twice": 2 * X[:, 0]})
    disk, worked = full_disk(100), []

    def work(X, y, chunk):
        worked.append(chunk)
        if worked == list(range(6)):
            disk.__enter__()
        return {"twice": 2 * X[:, 0]}

    try:
        with pytest.raises(WriteError) as error:
            over_rows(rows, 10, work, Parts(out, {}))
    finally:
        disk.__exit__(None, None, None)
    folder = run / "out.npz.parts"
    told(error, folder, "free some space")
    parts = sorted(path.name for path in folder.iterdir())
    assert parts == ["part-000000000-000000002.npz", "part-000000002-000000004.npz", "run.json"] and worked == list(range(6))
    for name in parts:
        content = (folder / name).read_bytes()
        for damaged in (b"", content[: len(content) // 2], b"junk" + content[4:]):
            (folder / name).write_bytes(damaged)
            with pytest.raises(FileFormatError, match=rf"{name} is damaged .*; remove it, and the same command recomputes it"):
                over_rows(rows, 10, work, Parts(out, {}))
        (folder / name).write_bytes(content)
    (folder / "part-1.npz").write_bytes(b"")
    with pytest.raises(FileFormatError, match=r"part-1\.npz is damaged \(parts have other names\)"):
        over_rows(rows, 10, work, Parts(out, {}))
    (folder / "part-1.npz").unlink()
    np.testing.assert_array_equal(over_rows(rows, 10, work, Parts(out, {}))["twice"], whole["twice"])
    assert os.listdir(run) == ["out.npz"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, bytes]:
    """A checkpoint after two of three epochs."""
    path = tmp_path_factory.mktemp("trained") / "run.ckpt"
    classifier(checkpoint=path, epochs=2).fit(*blobs())
    return path, path.read_bytes()


def test_a_truncated_checkpoint_is_told_and_left_as_it_is(trained, run):
    path, content = run / "run.ckpt", trained[1]
    for length in (0, 1, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(FileFormatError) as error:
            classifier(checkpoint=path, epochs=2, resume=True).fit(*blobs())
        told(error, path, "is damaged", "restore it from a copy, or remove it")
        assert path.read_bytes() == content[:length] and os.listdir(run) == ["run.ckpt"]


def edited(content: bytes, path: Path, change) -> None:
    """Write a checkpoint with a change made to its tensors and its header."""
    path.write_bytes(content)
    _, tensors, header = storage.read(path, checkpoint.KIND)
    change(tensors, header)
    storage.write(path, checkpoint.KIND, tensors, header)


DAMAGES = {
    "no position": lambda t, h: h.pop("position"),
    "no settings": lambda t, h: h.pop("settings"),
    "settings of a list": lambda t, h: h.update(settings=[1]),
    "a negative epoch": lambda t, h: h["position"].update(epoch=-1),
    "an epoch in words": lambda t, h: h["position"].update(epoch="two"),
    "a true step": lambda t, h: h["position"].update(step=True),
    "no sum": lambda t, h: h["position"].pop("loss_sum"),
    "an extra entry": lambda t, h: h["position"].update(extra=1),
    "a history of numbers": lambda t, h: h["position"].update(history=[1, 2]),
    "a record without a loss": lambda t, h: h["position"]["history"][0].pop("loss"),
    "a missing parameter": lambda t, h: t.pop("parameter/0"),
    "a parameter of another shape": lambda t, h: t.update({"parameter/1": torch.zeros(1)}),
    "a parameter of another type": lambda t, h: t.update({"parameter/0": t["parameter/0"].double()}),
    "a state that broadcasts": lambda t, h: t.update({"optimizer/0/exp_avg": torch.zeros(1)}),
    "a state of integers": lambda t, h: t.update({"optimizer/0/step": torch.tensor(3)}),
    "half a state": lambda t, h: t.pop("optimizer/0/exp_avg"),
    "a state too many": lambda t, h: t.update({"optimizer/99/exp_avg": torch.zeros(1)}),
    "a state without a number": lambda t, h: t.update({"optimizer/x/exp_avg": torch.zeros(1)}),
    "a state without a name": lambda t, h: t.update({"optimizer/": torch.zeros(1)}),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_checkpoint_with_something_wrong_inside_is_refused_whole(name, trained, run):
    """Nothing of it reaches the network, and nothing but FileFormatError the user."""
    path = run / "run.ckpt"
    edited(trained[1], path, DAMAGES[name])
    content = path.read_bytes()
    net = lrrn.LRRN((5, 6, 3), generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    X, y = blobs()
    target = torch.nn.functional.one_hot(torch.as_tensor(y), 3).float()
    data = Data(torch.as_tensor(X, dtype=torch.float32), target, torch.as_tensor(y))
    settings = Settings(optimizer="adam", epochs=2, batch_size=8)
    trainer = Trainer(net, Contrastive(), settings, checkpoint=path)
    before = [p.detach().clone() for p in net.parameters()]
    # the settings of the run that wrote it, for those of this one would be refused first
    identity = storage.read(path, checkpoint.KIND)[2].get("settings", {})
    with pytest.raises(FileFormatError, match=r"run\.ckpt is damaged: .*Remove it to start again, or restore it from a copy"):
        checkpoint.restore(path, identity, trainer._carried(), trainer.optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert not trainer.optimizer.state_dict()["state"] and path.read_bytes() == content and len(data) == len(X)


# --- the same by the command line -----------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path) -> Path:
    X, y = blobs()
    np.savez(tmp_path / "data.npz", X=X, y=y)
    return tmp_path / "data.npz"


def command(*arguments) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "250"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def test_commands_refuse_places_that_cannot_be_written_before_any_work(run, table):
    def attempts():
        for option in ("--output", "--checkpoint", "--log", "--json", "--page"):
            code, output = command("train", table, "--epochs", 1, option, run / "file")
            assert code == 2 and f"cannot write {run / 'file'}" in output and "is read-only; choose another" in output, output

    with read_only(run):
        as_ordinary_user(attempts)
    assert os.listdir(run) == []
    code, output = command("train", table, "--json", run)
    assert code == 2 and "name a file, not a folder" in output


def test_a_command_on_a_full_disk_tells_the_file_and_keeps_what_was_there(run, table):
    model = run / "m.safetensors"
    options = ["train", table, "--epochs", 1, "--hidden", 6, "-o", model]
    assert command(*options)[0] == 0
    before = model.read_bytes()
    with full_disk(500):
        code, output = command(*options, "--overwrite")
    assert code == 1 and f"Error: cannot write {model}" in output and "free some space" in output
    assert model.read_bytes() == before and os.listdir(run) == ["m.safetensors"]
    # room for the model, not for the page
    with full_disk(len(before) + 2000):
        code, output = command(*options, "--overwrite", "--page", run / "page.html")
    assert code == 1 and f"Error: cannot write {run / 'page.html'}" in output
    assert sorted(os.listdir(run)) == ["m.safetensors"] and lrrn.load(model).n_features_in_ == 5


def test_a_command_that_resumes_from_a_truncated_checkpoint(run, table):
    path = run / "run.ckpt"
    options = ["train", table, "--epochs", 2, "--hidden", 6, "-o", run / "m.safetensors", "--checkpoint", path]
    assert command(*options)[0] == 0
    path.write_bytes(path.read_bytes()[:1000])
    code, output = command(*options, "--resume")
    assert code == 1 and f"Error: {path} is damaged" in output and "or remove it and make it again" in output
    assert path.stat().st_size == 1000
    path.unlink()
    assert command(*options, "--resume")[0] == 0


def test_results_may_go_to_standard_output(run, table):
    arguments = ["train", str(table), "--epochs", "1", "--hidden", "4", "-o", f"{run}/m", "--json", "/dev/stdout"]
    script = f"from lrrn.cli import app; app({arguments!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, env=environment, check=True
    )
    start = done.stdout.index("{\n")
    assert json.JSONDecoder().raw_decode(done.stdout[start:])[0]["models"][0]["n_samples"] == 15
