"""Build the wheel and the source distribution, install the wheel in an empty environment and use it there.

The checks run outside the checkout: files of the wheel and its metadata, that the source distribution builds the same wheel,
then import, training, certificates, model files, the command line and the explorer's page. Exits with status 1 at the first
check that fails, and prints the seconds of each step. Needs the package ``build``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
PAGE = Path("src/lrrn/explore/page")
SHIPPED = "src/lrrn/shipped_models/"
"""Where a wheel has copies of some files of models/."""
LIMIT = 300.0
"""Seconds that one command may take."""
SESSION = """
import csv
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_wine

import lrrn

assert Path(lrrn.__file__).is_relative_to(sys.prefix), f"imported from {lrrn.__file__}, not from the environment"
data = load_wine()
X, y = (data.data - data.data.mean(0)) / data.data.std(0), data.target
clf = lrrn.LRRNClassifier(random_state=0, epochs=20).fit(X[::2], y[::2])
accuracy, radius = clf.score(X[1::2], y[1::2]), clf.certified_radius(X[1::2])
assert accuracy > 0.9 and np.median(radius) > 0.1, (accuracy, np.median(radius))
lrrn.save(clf, "classifier.safetensors")
again = lrrn.load("classifier.safetensors")
assert np.array_equal(again.predict(X), clf.predict(X)) and np.array_equal(again.certified_radius(X[1::2]), radius)
with open("wine.csv", "w", newline="") as file:
    csv.writer(file).writerows([[*data.feature_names, "wine"], *([*row, f"wine {label}"] for row, label in zip(X, y))])
assert lrrn.load("mnist-paper-a").network_.sizes == (784, 64, 64, 10)
print(f"{accuracy:.1%} right, median certified radius {np.median(radius):.2f}")
"""


def main() -> None:
    """Run all steps in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the empty environment")
    parser.add_argument(
        "--no-constraints", action="store_true", help="install the newest versions, not those of constraints.txt"
    )
    options = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="lrrn-wheel-") as folder:
        with timed("build"):
            wheel, archive = build(Path(folder))
        check(files_missing(wheel, archive), "files")
        check(faults_of_metadata(wheel), "metadata")
        with timed("install"):
            scripts = install(wheel, Path(folder) / "venv", options.python, not options.no_constraints)
        empty = Path(folder) / "empty"
        empty.mkdir()
        with timed("import, train, certify, save, load"):
            print(run([scripts / "python", "-c", SESSION], empty).strip())
        with timed("command line"):
            use_commands(scripts, empty)
        with timed("explorer"):
            pip_install(scripts, f"{wheel}[explore]", not options.no_constraints)
            check(page_faults(scripts, empty), "explorer")
    print(f"{wheel.name} works; {time.perf_counter() - start:.0f} s in all")


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Print the seconds that a step takes."""
    start = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


def check(faults: list[str], name: str) -> None:
    """Exit with the faults of a step if there are any."""
    if faults:
        raise SystemExit(f"{name}: " + "; ".join(faults))


def run(command: list[object], folder: Path | None = None, status: int = 0, variables: dict[str, str] | None = None) -> str:
    """Run a command, without this checkout on Python's path, and return what it prints; exit if its status is another."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=kept | (variables or {}), capture_output=True, text=True, timeout=LIMIT)
    if done.returncode != status:
        raise SystemExit(
            f"{' '.join(words)[:200]} ended with status {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return done.stdout + done.stderr


# --- the files --------------------------------------------------------------------------------------------------------


def build(folder: Path) -> tuple[Path, Path]:
    """Build the source distribution, a wheel from it and a wheel from the checkout; return the first wheel and the archive.

    Exits if the two wheels differ in any file.
    """
    command = [sys.executable, "-m", "build", "--outdir"]
    pinned = {"PIP_CONSTRAINT": str(CONSTRAINTS)}
    run([*command, folder / "sdist", ROOT], variables=pinned)
    run([*command, folder / "checkout", "--wheel", ROOT], variables=pinned)
    (wheel,), (other,) = ((folder / name).glob("*.whl") for name in ("sdist", "checkout"))
    (archive,) = (folder / "sdist").glob("*.tar.gz")
    check(differences(wheel, other), "wheels of source distribution and checkout")
    return wheel, archive


def differences(wheel: Path, other: Path) -> list[str]:
    """Name the files that are in one wheel only, or not the same in both."""
    with zipfile.ZipFile(wheel) as a, zipfile.ZipFile(other) as b:
        ours, theirs = ({info.filename: info.CRC for info in archive.infolist()} for archive in (a, b))
    return [f"{name} differs" for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]


def files_missing(wheel: Path, archive: Path) -> list[str]:
    """Name the tracked files of the package that the wheel lacks or has in excess, and what the source distribution lacks."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    tracked = {name for name in listed if (ROOT / name).is_file()}
    with zipfile.ZipFile(wheel) as content:
        names = {f"src/{name}" for name in content.namelist() if ".dist-info/" not in name}
    shipped = {name for name in names if name.startswith(SHIPPED)}
    packed = names - shipped
    with tarfile.open(archive) as content:
        sources = {name.partition("/")[2] for name in content.getnames()}
    package = {name for name in tracked if name.startswith("src/")}
    faults = [f"{name} is not in the wheel" for name in sorted(package - packed)]
    faults += [f"{name} is in the wheel and not tracked" for name in sorted(packed - package)]
    copied = {name.replace(SHIPPED, "models/") for name in shipped}
    faults += [f"{name} is in the wheel and not tracked" for name in sorted(copied - tracked)]
    faults += [] if copied else ["no shipped model is in the wheel"]
    return faults + [f"{name} is not in the source distribution" for name in sorted(tracked - sources)]


def faults_of_metadata(wheel: Path) -> list[str]:
    """Name what installers, type checkers and index pages would miss."""
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = message_from_bytes(content.read(metadata))
    faults = [f"no {name}" for name in ("lrrn/py.typed", metadata.replace("METADATA", "licenses/LICENSE")) if name not in names]
    expected = {
        "Description-Content-Type": "text/markdown",
        "License-Expression": "MIT",
        "Requires-Python": ">=3.11",
    }
    faults += [f"{key} is {fields[key]!r}, not {value!r}" for key, value in expected.items() if fields[key] != value]
    return faults + [f"no {key}" for key in ("Summary", "Keywords", "Classifier", "Provides-Extra") if not fields[key]]


# --- the environment --------------------------------------------------------------------------------------------------


def install(wheel: Path, folder: Path, python: str, constrained: bool) -> Path:
    """Install the wheel without extras in a new environment; return the folder of its programs."""
    run([python, "-m", "venv", folder])
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    pip_install(scripts, str(wheel), constrained)
    run([scripts / "python", "-m", "pip", "check"])
    return scripts


def pip_install(scripts: Path, what: str, constrained: bool) -> None:
    """Install a wheel and its dependencies; bytecode is compiled on import, of what is imported."""
    versions = ["--constraint", CONSTRAINTS] if constrained else []
    run([scripts / "python", "-m", "pip", "install", "--quiet", "--no-compile", *versions, what])


def use_commands(scripts: Path, folder: Path) -> None:
    """Ask for help, train on the table and certify; without its extra, the explorer says what to install."""
    lrrn = scripts / "lrrn"
    help_text = run([lrrn, "--help"], folder)
    check([f"{name} is not listed" for name in ("train", "certify", "explore") if name not in help_text], "lrrn --help")
    check([] if "mnist-paper-a" in run([lrrn, "models"], folder) else ["mnist-paper-a is not listed"], "lrrn models")
    run([lrrn, "train", "wine.csv", "--epochs", "10", "--output", "wine.safetensors", "--page", "wine.html"], folder)
    run([lrrn, "certify", "wine.safetensors", "wine.csv", "--json", "certified.json"], folder)
    written = ("wine.safetensors", "wine.html", "certified.json")
    check([f"{name} is empty" for name in written if (folder / name).stat().st_size < 200], "command line")
    refusal = " ".join(run([lrrn, "explore", "--no-open"], folder, status=1).split())
    check([] if "lrrn[explore]" in refusal else [f"does not name the extra: {refusal}"], "lrrn explore")


def page_faults(scripts: Path, folder: Path) -> list[str]:
    """Start the explorer and name the page's files that it does not serve as they are in the checkout."""
    told = folder / "told.json"
    command = [scripts / "lrrn", "explore", "--no-open", "--port", "0", "--json", told]
    with subprocess.Popen([str(word) for word in command], cwd=folder, stdout=subprocess.DEVNULL) as server:
        try:
            url = address(told, server)
            files = {file: "" if file.name == "index.html" else file.name for file in sorted((ROOT / PAGE).iterdir())}
            return [f"{file.name} is not served" for file, path in files.items() if fetched(url + path) != file.read_bytes()]
        finally:
            server.terminate()


def address(told: Path, server: subprocess.Popen[bytes]) -> str:
    """Wait until the explorer has written its address, and return it."""
    end = time.monotonic() + LIMIT
    while server.poll() is None and time.monotonic() < end:
        if told.is_file() and (text := told.read_text()):
            return str(json.loads(text)["address"])
        time.sleep(0.1)
    raise SystemExit("explorer: it did not start")


def fetched(url: str) -> bytes | None:
    """Return the content at an address of this machine, without a proxy; None if there is none."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
            return bytes(answer.read())
    except OSError:
        return None


if __name__ == "__main__":
    main()
