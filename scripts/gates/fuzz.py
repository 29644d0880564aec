"""Fuzz all readers of untrusted input: only documented errors, no code execution, bounded memory and time.

Targets are ``lrrn.load``, checkpoints, the idx, .npy, .npz, .parquet and .csv readers, the results of a record, and the
arguments of the command line. Hypothesis draws the inputs, which are mutated valid files, in blocks determined by the seed, the
target and a block number. A failing input is shrunk and printed with the command that reproduces it. Each target runs in a
separate process with a memory limit and an audit hook: unpickling, starting programs, opening sockets or writing files is a
failure.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz_cli import Arguments
from fuzz_targets import Checkpoint, Cifar, Csv, Earlier, Idx, Load, Npy, Npz, Parquet, Radii, Target, Undocumented
from lrrn.runtime import threads

BLOCK = 250
ROOM = 2**30
"""Limit on the additional address space of a target, relative to its start."""
SECONDS = 20
"""Time limit of one input."""


def targets() -> list[type[Target]]:
    """Return the targets that are available on this machine: Parquet needs pyarrow."""
    known: list[type[Target]] = [Idx, Cifar, Npy, Npz, Parquet, Csv, Load, Checkpoint, Earlier, Radii, Arguments]
    return [kind for kind in known if kind is not Parquet or importlib.util.find_spec("pyarrow")]


def too_slow(*_: Any) -> None:
    raise Undocumented(f"took longer than {SECONDS} s")


def megabytes(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


def bound_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))


def run_block(target: Target, seed: int, number: int, n: int, counts: Counter[str]) -> str | None:
    """Test one block of inputs; return the error of the smallest failing input."""
    digest = hashlib.sha256(f"{seed}/{target.name}/{number}".encode()).digest()

    def check(chance: Any) -> None:
        began = time.monotonic()
        if Path(target.canary).exists():
            os.rmdir(target.canary)
        signal.alarm(SECONDS)
        try:
            outcome = target(chance)
        finally:
            signal.alarm(0)
        if Path(target.canary).exists():
            raise Undocumented("the input made the library run a pickle")
        counts[outcome] += 1
        counts["slowest_ms"] = max(counts["slowest_ms"], round(1000 * (time.monotonic() - began)))

    options = settings(
        max_examples=n,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    test = hypothesis.seed(int.from_bytes(digest[:8], "big"))(options(given(st.randoms(use_true_random=False))(check)))
    try:
        test()
    except Undocumented as error:
        return f"{error}\ninput: {target.last!r:.2000}"
    return None


def work(kind: type[Target], seed: int, blocks: list[int], n: int, pipe: int) -> None:
    """Run blocks of a target in this process and report through a pipe."""
    with tempfile.TemporaryDirectory() as name, threads.one_thread():
        folder = Path(name, "files")
        folder.mkdir()
        os.chdir(folder)
        target, counts = kind(folder, Path(name, "canary")), Counter[str]()
        counts.update({"accepted": 0, "refused": 0, "slowest_ms": 0})
        signal.signal(signal.SIGALRM, too_slow)
        run_block(target, seed, -1, 20, Counter())  # trigger lazy imports before memory is limited
        bound_memory()
        report: dict[str, Any] = {"failures": []}
        began, resident = time.monotonic(), megabytes("VmRSS")
        for block in blocks:
            wrong = run_block(target, seed, block, n, counts)
            if wrong is not None:
                report["failures"].append({"block": block, "what": wrong})
        report |= dict(counts)
        report |= {"seconds": round(time.monotonic() - began, 1), "memory_mib": round(max(megabytes("VmHWM") - resident, 0))}
    os.write(pipe, json.dumps(report).encode())


def in_a_process(kind: type[Target], seed: int, blocks: list[int], n: int) -> dict[str, Any]:
    """Fork, so that a crash affects only the target; no threads have been started yet."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", RuntimeWarning)
            work(kind, seed, blocks, n, writing)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        content = file.read()
    _, status = os.waitpid(child, 0)
    if status or not content:
        what = f"the process ended with {os.waitstatus_to_exitcode(status)}"
        return {"failures": [{"block": blocks[0] if len(blocks) == 1 else None, "what": what}]}
    found: dict[str, Any] = json.loads(content)
    return found


def main() -> int:
    names = [kind.name for kind in targets()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="how many in all, shared by the targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=names, help="this one alone")
    parser.add_argument("--block", type=int, help="with --target: this block alone")
    parser.add_argument("--json", type=Path, help="also write the report here")
    options = parser.parse_args()
    if options.block is not None and options.target is None:
        parser.error("--block needs --target")
    report: dict[str, Any] = {"seed": options.seed, "block": BLOCK, "targets": {}}
    columns = "inputs", "accepted", "refused", "failures", "slowest_ms", "memory_mib", "seconds"
    print(f"{'target':10}", *(f"{column:>10}" for column in columns))
    shares = sum(kind.share for kind in targets())
    for kind in targets():
        if options.target not in (None, kind.name):
            continue
        # every target gets its share, rounded up to whole blocks; a small total makes the blocks smaller
        wanted = -(-options.inputs * kind.share // shares)
        n = min(BLOCK, wanted)
        blocks = list(range(-(-wanted // n))) if options.block is None else [options.block]
        found = in_a_process(kind, options.seed, blocks, BLOCK if options.block is not None else n)
        found["inputs"] = found.get("accepted", 0) + found.get("refused", 0) + len(found["failures"])
        report["targets"][kind.name] = found
        cells = {**found, "failures": len(found["failures"])}
        print(f"{kind.name:10}", *(f"{cells.get(column, '-'):>10}" for column in columns), flush=True)
        for failure in found["failures"]:
            print(f"  {failure['what']}")
            print(
                f"  repeat: python scripts/gates/fuzz.py --seed {options.seed} --target {kind.name} --block {failure['block']}",
                flush=True,
            )
    report["inputs"] = sum(found["inputs"] for found in report["targets"].values())
    report["failures"] = sum(len(found["failures"]) for found in report["targets"].values())
    print(f"{report['inputs']} inputs, {report['failures']} undocumented errors")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
