"""Kill a training run with SIGKILL repeatedly; check that the final model is bit-identical to that of an uninterrupted run.

The run is ``lrrn train digits --checkpoint --resume``, with a checkpoint every 50 ms, also within epochs. A quarter of the
kills happen while the process starts, a quarter at a random time of training, half while a checkpoint is being written. After
every kill the checkpoint must load, the restarted run must resume from it, and the log must be valid, except for a last line
that may be truncated. The uninterrupted run writes no checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kill_ranks import fingerprint, position

TRAIN = ["train", "digits", "--batch-size", "4", "--hidden", "128,128", "--device", "cpu", "--seed", "0", "--overwrite"]
WHILE = ("starting", "training", "writing", "writing")
PLACE = struct.Struct("4q")
"""Contents of the file shared with a worker: epoch and step at which it began, current epoch and step; -1 before that."""


def work(place: str, arguments: list[str]) -> None:
    """Run the unmodified command line with more frequent checkpoints, and report the position of training."""
    from lrrn.cli import app
    from lrrn.learning import Trainer

    with open(place, "r+b") as file:
        told = mmap.mmap(file.fileno(), PLACE.size)
    resume, note = Trainer._resume, Trainer._note_steps

    def resumed(self: Trainer, *given: Any) -> bool:
        found = resume(self, *given)
        here = self.position.epoch, self.position.step
        PLACE.pack_into(told, 0, *here, *here)
        return found

    def noted(self: Trainer, *given: Any) -> None:
        note(self, *given)
        struct.pack_into("2q", told, 16, self.position.epoch, self.position.step)

    Trainer._resume, Trainer._note_steps = resumed, noted  # type: ignore[method-assign]
    Trainer.__init__.__kwdefaults__["checkpoint_seconds"] = 0.05
    app(arguments)


def launch(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, *command]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def remains(folder: Path) -> list[int]:
    """Return the sizes of temporary checkpoint files, whose writing is in progress or was interrupted."""
    sizes = []
    for entry in os.scandir(folder):
        if entry.name.endswith(".part"):
            try:
                sizes.append(entry.stat().st_size)
            except FileNotFoundError:  # just renamed
                continue
    return sizes


def strike(process: subprocess.Popen[str], kind: str, folder: Path, chance: random.Random, start: float, epoch: float) -> None:
    """Wait for the right moment and kill the process; raise an error if it ends before."""
    checkpoint = folder / "run.ckpt"
    before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0

    def wait(until: Callable[[], bool], pause: float) -> None:
        while not until():
            if process.poll() is not None:
                raise SystemExit(f"the run ended with {process.returncode} before it was killed\n{process.communicate()[1]}")
            time.sleep(pause)

    if kind == "starting":
        delay = chance.uniform(0, start)
    else:
        # not before it wrote a checkpoint, so that the run makes progress
        wait(lambda: checkpoint.exists() and checkpoint.stat().st_mtime_ns != before, 0.002)
        delay = chance.uniform(0, 1.5 * epoch)
    end = time.monotonic() + delay
    wait(lambda: time.monotonic() > end, 0.0005)
    if kind == "writing":
        size = chance.choice([0, 0, 0.5, 0.9]) * checkpoint.stat().st_size
        wait(lambda: any(found >= size for found in remains(folder)), 0)
    os.kill(process.pid, signal.SIGKILL)


def killed(process: subprocess.Popen[str], number: int, kind: str, folder: Path, place: Path) -> dict[str, Any]:
    """Check the files of a killed run, which must be complete."""
    process.communicate()
    if process.returncode != -signal.SIGKILL:
        raise SystemExit(f"kill {number}: the run ended by itself, with {process.returncode}")
    checkpoint, log = folder / "run.ckpt", folder / "log.jsonl"
    begun, begun_step, epoch, step = PLACE.unpack(place.read_bytes())
    entry: dict[str, Any] = {"kill": number, "while": kind}
    entry["resumed_from"] = [begun, begun_step] if begun >= 0 else None
    entry["died_at"] = [epoch, step] if epoch >= 0 else None
    entry["unfinished_beside_it"] = remains(folder)
    where = position(checkpoint)  # raises unless the checkpoint is complete
    entry["checkpoint"] = None if where is None else [where["epoch"], where["step"]]
    entry["sha256"] = None if where is None else hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    if log.exists():
        lines = log.read_text().splitlines()
        whole = lines if log.read_text().endswith("\n") or not lines else lines[:-1]  # the last line may be truncated
        if [json.loads(line)["epoch"] for line in whole] != list(range(1, len(whole) + 1)):
            raise SystemExit(f"kill {number}: the log is out of order")
    return entry


def disturb(
    command: list[str], kills: int, seed: int, start: float, epoch: float, folder: Path, place: Path
) -> list[dict[str, Any]]:
    chance, table, expected = random.Random(seed), list[dict[str, Any]](), None
    print(f"{'kill':>4} {'while':9} {'resumed from':>13} {'died at':>11} {'beside it':>10} {'checkpoint':>11} sha256")
    for number in range(1, kills + 1):
        place.write_bytes(PLACE.pack(-1, -1, -1, -1))
        process = launch(command)
        kind = WHILE[(number - 1) % len(WHILE)]
        strike(process, kind, folder, chance, start, epoch)
        entry = killed(process, number, kind, folder, place)
        if entry["resumed_from"] is not None and entry["resumed_from"] != (expected or [0, 0]):
            raise SystemExit(f"kill {number}: resumed from {entry['resumed_from']}, and the checkpoint stood at {expected}")
        expected = entry["checkpoint"]
        table.append(entry)
        cells = [
            "-" if value is None else "{}/{}".format(*value) for value in (entry["resumed_from"], entry["died_at"], expected)
        ]
        half = "+".join(map(str, entry["unfinished_beside_it"])) or "-"
        print(
            f"{number:4} {kind:9} {cells[0]:>13} {cells[1]:>11} {half:>10} {cells[2]:>11} {(entry['sha256'] or '-')[:16]}",
            flush=True,
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()
    epochs = 2 * options.kills + 4
    with tempfile.TemporaryDirectory() as name:
        folder, whole, place = Path(name, "run"), Path(name, "whole.safetensors"), Path(name, "place")
        folder.mkdir()
        train = [*TRAIN, "--epochs", str(epochs)]
        began = time.monotonic()
        first = Path(name, "whole.jsonl")
        process = launch(["-m", "lrrn", *train, "-o", str(whole), "--log", str(first)])
        while not first.exists() and process.poll() is None:
            time.sleep(0.01)
        start = time.monotonic() - began
        _, errors = process.communicate()
        if process.returncode:
            raise SystemExit(errors)
        undisturbed = time.monotonic() - began
        records = [json.loads(line) for line in first.read_text().splitlines()]
        epoch = sum(record["seconds"] for record in records) / epochs
        model, log, checkpoint = folder / "model.safetensors", folder / "log.jsonl", folder / "run.ckpt"
        files = ["-o", str(model), "--log", str(log), "--checkpoint", str(checkpoint), "--resume"]
        command = [__file__, "--work", str(place), *train, *files]
        began = time.monotonic()
        table = disturb(command, options.kills, options.seed, start, epoch, folder, place)
        place.write_bytes(PLACE.pack(-1, -1, -1, -1))
        process = launch(command)
        _, errors = process.communicate()
        if process.returncode:
            raise SystemExit(f"the last restart ended with {process.returncode}\n{errors[-4000:]}")
        lines = [json.loads(line)["epoch"] for line in log.read_text().splitlines()]
        report = {
            "epochs": epochs,
            "kills": table,
            "last_restart_from": list(PLACE.unpack(place.read_bytes())[:2]),
            "undisturbed": fingerprint(whole),
            "disturbed": fingerprint(model),
            "log_complete": lines == list(range(1, epochs + 1)),
            "left_behind": sorted(path.name for path in folder.iterdir() if path not in (model, log, checkpoint)),
            "undisturbed_seconds": undisturbed,
            "disturbed_seconds": time.monotonic() - began,
        }
    # temporary files of a process that died before training belong to an earlier one
    while_writing = sum(1 for entry in table if entry["unfinished_beside_it"] and entry["died_at"])
    equal = report["undisturbed"] == report["disturbed"]
    print(f"{len(table)} kills, {while_writing} of them with an unfinished checkpoint beside the whole one")
    print(f"final parameters undisturbed  {report['undisturbed']}")
    print(f"after the kills, {'equal' if equal else 'OTHERS'}        {report['disturbed']}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if equal and report["log_complete"] and not report["left_behind"] else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
