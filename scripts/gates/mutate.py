"""Mutation testing: inject one defect at a time and check that a test fails; exit with status 1 if a mutant survives.

Each mutant is one exact replacement in one file. ``mutants.toml`` in a folder of tests lists the mutants of the folder of the
same name in the package. A mutant runs only the tests that should catch it, in a copy of the tree and in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "lrrn"
LIMIT = 300
"""Seconds after which a mutant is stopped; it counts as caught."""
PRELOADED = (
    "torch",
    "numba",
    "scipy.optimize",
    "sklearn.utils.estimator_checks",
    "sklearn.model_selection",
    "sklearn.datasets",
)
"""Packages to import once, before the processes of the mutants are forked."""


@dataclass(frozen=True)
class Mutant:
    """One defect and the tests that must fail with it.

    ``file`` is relative to the package. Each of ``tests`` is relative to the folder of tests: a file, or one test in it as
    ``file.py::test_name``.
    """

    name: str
    file: str
    before: str
    after: str
    tests: list[str]


def mutants() -> list[Mutant]:
    """Read all mutants, folder by folder; raise an error if a replacement does not apply or a test does not exist."""
    found = []
    for path in sorted((ROOT / "tests").glob("*/mutants.toml")):
        found += [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]
    for mutant in found:
        count = (PACKAGE / mutant.file).read_text().count(mutant.before)
        if count != 1:
            raise SystemExit(f"mutant {mutant.name!r}: its text stands {count} times in {mutant.file}")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            place = ROOT / "tests" / file
            if not place.exists() or f"def {name.partition('[')[0]}" not in (place.read_text() if name else "def "):
                raise SystemExit(f"mutant {mutant.name!r}: there is no test {test}")
    return found


def run(mutant: Mutant, results: Connection) -> None:
    """Apply one mutant in a copy of the tree and run its tests, in a process of its own; send pytest's status and output.

    The process is a fork, so that it need not import again what does not depend on the mutant.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        copy = Path(folder)
        for name in ("src", "tests", "checker", "models", "scripts/gates"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.pyc"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / "src" / "lrrn" / mutant.file
        target.write_text(target.read_text().replace(mutant.before, mutant.after))
        os.chdir(copy)
        sys.path.insert(0, str(copy / "src"))
        os.environ |= {"PYTHONPATH": str(copy / "src"), "HYPOTHESIS_PROFILE": "first"}
        if mutant.file.startswith("kernels/"):  # its machine code is of no use to anybody else
            os.environ["XDG_CACHE_HOME"] = str(copy / "cache")
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", *(f"tests/{name}" for name in mutant.tests)])
        sys.stdout.flush()
        output.seek(0)
        results.send((int(status), output.read()))


def outcome(mutant: Mutant, status: int, output: str) -> tuple[bool, str]:
    """Return whether a mutant survived, and pytest's line on it; raise an error if pytest could not run."""
    if status not in (0, 1):
        raise SystemExit(f"mutant {mutant.name!r}: pytest could not run\n{output}")
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))] or output.splitlines()
    return status == 0, lines[0] if lines else ""


def outcomes(chosen: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, bool, str, float]]:
    """Run mutants, ``jobs`` at a time; yield each with whether it survived, a line of output and the seconds, as they end."""
    fork = multiprocessing.get_context("fork")
    waiting, running = chosen[::-1], {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant, (receiver, sender) = waiting.pop(), fork.Pipe(duplex=False)
            process = fork.Process(target=run, args=(mutant, sender))
            process.start()
            sender.close()
            running[receiver] = mutant, process, time.monotonic()
        ready = wait(list(running), timeout=1.0)
        for receiver, (mutant, process, start) in list(running.items()):
            seconds = time.monotonic() - start
            if receiver not in ready and seconds < LIMIT:
                continue
            del running[receiver]
            if receiver in ready:
                try:
                    alive, line = outcome(mutant, *receiver.recv())
                except EOFError:
                    alive, line = False, "the process died"
            else:
                process.kill()
                alive, line = False, "ran past its time"
            process.join()
            yield mutant, alive, line, seconds


def main() -> int:
    """Run all mutants, or those whose name or file contains one of the given words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", default=[""], help="only mutants whose name or file contains one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many to run at once")
    options = parser.parse_args()
    chosen = [mutant for mutant in mutants() if any(word in f"{mutant.name} {mutant.file}" for word in options.words)]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOADED:
        importlib.import_module(name)
    start = time.monotonic()
    survivors = []
    for mutant, alive, line, seconds in outcomes(chosen, options.jobs):
        print(f"{'SURVIVED' if alive else 'caught':9}{seconds:4.0f} s  {mutant.name}: {line[:150]}", flush=True)
        survivors += [mutant.name] * alive
    print(f"{len(chosen)} mutants, {len(survivors)} survived, {time.monotonic() - start:.0f} s", *survivors, sep="\nSURVIVED ")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
