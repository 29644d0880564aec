"""Run the numerical tests under the arithmetic of other machines, emulated on this one; exit with status 1 if any test fails.

Each row is a setting that changes the last bits of BLAS, torch's kernels, compiled code or threads, or the oldest versions that
pyproject.toml allows. A setting that this processor does not support is skipped, and the table says why.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lrrn.runtime.machine import cpu_flags, processor

ROOT = Path(__file__).resolve().parents[2]
OLDEST = ROOT / ".venv-oldest"
OLD = ("numpy", "scipy", "scikit-learn", "numba")
"""Packages tested in their lowest version."""
NUMERICAL = (
    "verified bounds energy error_bound oracle solver_contract solver_choice accelerated small_batch compiled_step gradients "
    "derivatives certify local shared multiplier energies single_precision precision objectives network trainer portable "
    "linear_layer_claims lipschitz_claims gamma_claims energy_claims products dual"
).split()
"""The tests whose outcome depends on arithmetic, by name."""
STORED = ["scoring", "rows", "hostile_files", "failed_saves"]
"""Tests of files, whose outcome depends on versions too."""
QUICK = "verified energy error_bound oracle small_batch compiled_step gradients derivatives multiplier portable".split()


@dataclass(frozen=True)
class Setting:
    """Environment variables, and the processor features they require."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    flag: str | None = None
    oldest: bool = False


def _threads(n: int) -> Setting:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return Setting(f"threads: {n}", dict.fromkeys(names, str(n)))


SETTINGS = (
    Setting("torch kernels: default", {"ATEN_CPU_CAPABILITY": "default"}),
    Setting("torch kernels: avx2", {"ATEN_CPU_CAPABILITY": "avx2"}, "avx2"),
    Setting("MKL: AVX2", {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, "avx2"),
    Setting("MKL: SSE4.2", {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, "sse4_2"),
    Setting("MKL: compatible", {"MKL_CBWR": "COMPATIBLE"}),
    Setting("oneDNN: AVX2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx512f"),
    Setting("OpenBLAS: Haswell", {"OPENBLAS_CORETYPE": "Haswell"}, "avx2"),
    Setting("OpenBLAS: Zen", {"OPENBLAS_CORETYPE": "Zen"}, "avx2"),
    Setting("OpenBLAS: SkylakeX", {"OPENBLAS_CORETYPE": "SkylakeX"}, "avx512f"),
    Setting("OpenBLAS: Sandybridge", {"OPENBLAS_CORETYPE": "Sandybridge"}, "avx"),
    Setting("Numba: generic", {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}),
    _threads(1),
    _threads(2),
    _threads(8),
    Setting("oldest versions", oldest=True),
)
LOWEST = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OPENBLAS_CORETYPE": "Sandybridge"}
QUICK_SETTINGS = (
    Setting("torch, MKL, OpenBLAS: lowest", LOWEST, "avx"),
    *(setting for setting in SETTINGS if setting.name in ("MKL: SSE4.2", "Numba: generic")),
)
"""Few settings: the independent ones at once."""


def oldest_python() -> str:
    """Create a virtual environment with the lowest allowed versions, and return its interpreter."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", text).groups() for text in project["dependencies"])  # type: ignore[union-attr]
    pins = [f"{name}=={stated[name]}" for name in OLD]
    python = OLDEST / "bin" / "python"
    done = OLDEST / ".oldest"
    if done.is_file() and done.read_text() == "\n".join(pins):
        return str(python)
    tests = ("clarabel", "hypothesis", "osqp", "pytest", "pytest-xdist", "quadprog")
    moving = {*OLD, "llvmlite", "pandas", "osqp", "quadprog", "clarabel", "joblib", "threadpoolctl"}
    kept = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.partition("==")[0].lower() not in moving
    ]
    subprocess.run([sys.executable, "-m", "venv", OLDEST], check=True)
    constraints = OLDEST / "constraints.txt"
    constraints.write_text("\n".join(kept) + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    subprocess.run([*install, "--editable", ROOT, *tests, *pins], check=True)
    done.write_text("\n".join(pins))
    return str(python)


def run(setting: Setting, names: list[str], jobs: int) -> dict[str, Any]:
    """Run the tests under a setting and return the outcome."""
    if setting.flag is not None and setting.flag not in cpu_flags():
        return {"setting": setting.name, "outcome": f"skipped: this processor has no {setting.flag}"}
    start = time.perf_counter()
    try:
        python = oldest_python() if setting.oldest else sys.executable
    except subprocess.CalledProcessError as error:
        return {"setting": setting.name, "outcome": f"failed: could not be installed ({error})"}
    files = [str(file) for name in names for file in (ROOT / "tests").rglob(f"test_{name}.py")]
    if len(files) != len(names):
        raise SystemExit(f"not every one of {', '.join(names)} is a file of tests")
    command = [python, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "worksteal", *files]
    environment = {**os.environ, **setting.variables, "HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis")}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    last = result.stdout.strip().splitlines()[-1] if result.stdout.strip() else result.stderr[-300:]
    if result.returncode:
        print(result.stdout[-6000:], result.stderr[-2000:], flush=True)
    outcome = ("passed" if result.returncode == 0 else "failed") + f": {last}"
    return {"setting": setting.name, "outcome": outcome, "seconds": round(time.perf_counter() - start)}


def main() -> None:
    """Run the requested rows, print the table, and exit with status 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few settings and the shortest of the tests")
    parser.add_argument("--only", action="append", metavar="TEXT", help="settings whose name contains this; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="processes that tests are spread over")
    parser.add_argument("--json", type=Path, help="where to write the table")
    options = parser.parse_args()
    wanted = list(QUICK_SETTINGS if options.quick else SETTINGS)
    if options.only:
        wanted = [s for s in SETTINGS if any(text.lower() in s.name.lower() for text in options.only)]
    rows = []
    for setting in wanted:
        names = QUICK if options.quick else NUMERICAL + STORED * setting.oldest
        rows.append(run(setting, names, options.jobs))
        print(f"{rows[-1]['setting']:<28} {rows[-1].get('seconds', '-'):>5} s  {rows[-1]['outcome']}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"processor": processor(), "rows": rows}, indent=1) + "\n")
    sys.exit(any(row["outcome"].startswith("failed") for row in rows) or not wanted)


if __name__ == "__main__":
    main()
