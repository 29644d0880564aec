"""Kill random ranks of a training run repeatedly; check that the final model is bit-identical to that of an uninterrupted run.

``torchrun --max-restarts`` restarts all ranks after every kill, and ``lrrn train --checkpoint --resume`` resumes. Half of the
kills happen while the ranks start up, half within a few epochs after they wrote a checkpoint. After every kill the checkpoint
is read: it must be complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lrrn
from lrrn.runtime import storage

TRAIN = ["-m", "--", "lrrn", "train", "digits", "--batch-size", "8", "--hidden", "32,32", "--device", "cpu"]


def launch(ranks: int, restarts: int, arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", *TRAIN, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def workers(launcher: int) -> dict[int, int]:
    """Return the running ranks and their process ids."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent != launcher:
                    continue
                variables = dict(v.split("=", 1) for v in (folder / "environ").read_text().split("\0") if "=" in v)
                found[int(variables["RANK"])] = int(folder.name)
            except (OSError, KeyError, ValueError):
                continue  # the process has just ended, or is not a rank yet
    return found


def fingerprint(model: Path) -> str:
    parameters = lrrn.load(model).network_.parameters()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest()


def position(checkpoint: Path) -> dict[str, Any] | None:
    """Read a checkpoint, which must be complete if it exists, and return the position of the run."""
    if not checkpoint.is_file():
        return None
    where = storage.read(checkpoint, "checkpoint")[2]["position"]
    return {"epoch": where["epoch"], "step": where["step"]}


def disturb(process: subprocess.Popen[str], checkpoint: Path, kills: int, ranks: int, epoch: float, start: float) -> list[dict]:
    """Kill one rank after the other; return the time, the rank and the position of the run for each kill."""
    chance, table, known = random.Random(0), list[dict[str, Any]](), set[int]()
    while len(table) < kills:
        began, written = time.monotonic(), checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        while len(running := workers(process.pid)) < ranks or known & {*running.values()}:
            if process.poll() is not None:
                return table
            time.sleep(0.02)
        known |= {*running.values()}
        early = len(table) % 2 == 0
        # the uninterrupted run may have started slowly, to compile code: the start-up ends with the first checkpoint
        until = time.monotonic() + chance.uniform(0, start) if early else math.inf
        while time.monotonic() < until and (not checkpoint.exists() or checkpoint.stat().st_mtime_ns == written):
            if process.poll() is not None:
                return table
            time.sleep(0.005)
        if not early:
            time.sleep(chance.uniform(0, 3 * epoch))
        victim = chance.randrange(ranks)
        try:
            os.kill(running[victim], signal.SIGKILL)
        except ProcessLookupError:
            continue
        found = {"kill": len(table) + 1, "rank": victim, "while": "starting" if early else "training"}
        table.append({**found, "seconds": time.monotonic() - began, "checkpoint": position(checkpoint)})
        print(json.dumps(table[-1]), flush=True)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()
    epochs = 8 * options.kills + 8
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        arguments = ["--epochs", str(epochs), "--overwrite"]
        whole, model, checkpoint = here / "whole.safetensors", here / "model.safetensors", here / "run.ckpt"
        began = time.monotonic()
        log = here / "whole.jsonl"
        process = launch(
            options.ranks, 0, [*arguments, "-o", str(whole), "--checkpoint", str(here / "whole.ckpt"), "--log", str(log)]
        )
        while not log.exists() and process.poll() is None:
            time.sleep(0.02)
        start = time.monotonic() - began
        _, errors = process.communicate()
        if process.returncode:
            raise SystemExit(errors)
        undisturbed = time.monotonic() - began
        records = [json.loads(line) for line in log.read_text().splitlines()]
        epoch = sum(record["seconds"] for record in records) / len(records)
        began = time.monotonic()
        process = launch(
            options.ranks, options.kills + 1, [*arguments, "-o", str(model), "--checkpoint", str(checkpoint), "--resume"]
        )
        table = disturb(process, checkpoint, options.kills, options.ranks, epoch, start)
        _, errors = process.communicate()
        if process.returncode or len(table) < options.kills:
            raise SystemExit(f"{len(table)} kills, ended with {process.returncode}\n{errors[-4000:]}")
        report = {
            "ranks": options.ranks,
            "epochs": epochs,
            "kills": table,
            "undisturbed": fingerprint(whole),
            "disturbed": fingerprint(model),
            "undisturbed_seconds": undisturbed,
            "disturbed_seconds": time.monotonic() - began,
            "left_behind": sorted(path.name for path in here.iterdir() if path.name.endswith(".part")),
        }
    equal = report["undisturbed"] == report["disturbed"]
    print(f"{len(table)} kills; final parameters {'equal' if equal else 'DIFFER'}: {report['disturbed'][:16]}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if equal and not report["left_behind"] else 1


if __name__ == "__main__":
    sys.exit(main())
