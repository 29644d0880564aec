"""Mutation testing: inject one defect at a time and check that a test fails; exit with status 1 if a mutant survives.

Each mutant is one exact replacement in one file. ``mutants.toml`` in a folder of tests lists the mutants of the folder of the
same name in the package. A mutant runs only the tests that should catch it, in a copy of the tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "lrrn"


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


def stale(file: str) -> list[str]:
    """Return patterns of cached compiled kernels that a change of a file invalidates: its own, and those that contain a copy.

    All other cache files are copied with the tree, which saves their compilation.
    """
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in (PACKAGE / "kernels").rglob("*.py")}
    changed = [file]
    for one in changed:
        line = f"\nfrom lrrn.{one.removesuffix('.py').replace('/', '.')} import "
        changed += [path for path, text in texts.items() if line in text and path not in changed]
    return [f"{Path(path).stem}.*.nb?" for path in changed if path in texts]


def survives(mutant: Mutant) -> tuple[bool, str, float]:
    """Apply one mutant in a copy of the tree and run its tests; return whether all passed, their last line and the seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.pyc", *stale(mutant.file)))
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / "src" / "lrrn" / mutant.file
        target.write_text(target.read_text().replace(mutant.before, mutant.after))
        tests = [f"tests/{name}" for name in mutant.tests]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "first"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            return False, "ran past its time", time.monotonic() - start
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))] or done.stdout.splitlines()
        if done.returncode not in (0, 1):
            raise SystemExit(f"mutant {mutant.name!r}: pytest could not run\n{done.stdout}\n{done.stderr}")
        return done.returncode == 0, lines[0] if lines else "", time.monotonic() - start


def main() -> int:
    """Run all mutants, or those whose name or file contains one of the given words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", default=[""], help="only mutants whose name or file contains one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many to run at once")
    options = parser.parse_args()
    chosen = [mutant for mutant in mutants() if any(word in f"{mutant.name} {mutant.file}" for word in options.words)]
    start = time.monotonic()
    survivors = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, (alive, line, seconds) in zip(chosen, pool.map(survives, chosen), strict=True):
            print(f"{'SURVIVED' if alive else 'caught':9}{seconds:4.0f} s  {mutant.name}: {line[:150]}", flush=True)
            survivors += [mutant.name] * alive
    print(f"{len(chosen)} mutants, {len(survivors)} survived, {time.monotonic() - start:.0f} s", *survivors, sep="\nSURVIVED ")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
