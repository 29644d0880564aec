"""What this installation consists of and what it can do here: versions, devices, solvers, data, threads."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch

import lrrn
from lrrn import datasets
from lrrn.linalg.products import onednn_is_faster
from lrrn.network import LRRN
from lrrn.runtime.machine import cores, processor
from lrrn.runtime.threads import workers
from lrrn.solvers import SOLVERS

EXTRAS = ("attacks", "explore")
"""Optional parts of the package that users, not developers, install."""
VARIABLES = ("LRRN_DATA", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
ARITHMETIC = (
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "NUMBA_CPU_NAME",
    "NUMBA_CPU_FEATURES",
)
"""Variables that make one machine compute as another would."""
POLICY = (
    "A fit or a command holds BLAS to one thread and restores it afterwards; solvers spread samples over the worker threads, "
    "as many as torch's own number. OMP_NUM_THREADS or torch.set_num_threads sets that number."
)


def gather(root: str | os.PathLike[str] | None = None, device: str = "auto") -> dict[str, Any]:
    """Look around: nothing is downloaded, and every solver is tried on a small problem.

    Parameters
    ----------
    root : path-like, optional
        Folder of the MNIST family and of CIFAR-10; LRRN_DATA if not given.
    device : {"auto", "cpu", "cuda"}, default="auto"
        Where to try the solvers; "auto" tries all there are.

    Returns
    -------
    dict
        Sections by name, of what JSON can hold.
    """
    asked = ("cpu", "cuda") if device == "auto" else (device,)
    wanted = [name for name in asked if name == "cpu" or torch.cuda.is_available()]
    return {
        "versions": _versions(),
        "extras": {extra: _missing(extra) for extra in EXTRAS},
        "devices": _devices(),
        "solvers": {name: {solver: _trial(solver, name) for solver in ("auto", *SOLVERS)} for name in wanted},
        "data": {
            "digits": {"train": "embedded in scikit-learn", "test": "embedded in scikit-learn"},
            **{name: {split: _text(path) for split, path in found.items()} for name, found in datasets.find(root).items()},
        },
        "arithmetic": _arithmetic(),
        "threads": _threads(),
    }


def _versions() -> dict[str, str | None]:
    """Return the versions of everything the package depends on; None for what is not installed."""
    packages = [*sorted(_requirements(None)), "triton"]
    return {
        "lrrn": lrrn.__version__,
        "python": platform.python_version(),
        "platform": ", ".join([f"{platform.system()} {platform.machine()}", " ".join(platform.libc_ver())]).rstrip(", "),
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _requirements(extra: str | None) -> list[str]:
    """Return the names of the packages that are needed always or, if an extra is named, for that."""
    try:
        stated = requires("lrrn") or []
    except PackageNotFoundError:  # a source tree that was never installed
        return []
    found = []
    for text in stated:
        name, condition = re.match(r"[\w.-]+", text), re.search(r"extra == ['\"](.+?)['\"]", text)
        if name is not None and (condition.group(1) if condition else None) == extra:
            found.append(name.group())
    return found


def _missing(extra: str) -> str:
    needed = _requirements(extra)
    if not needed:
        return "unknown to this installation; install the package again"
    missing = [name for name in needed if _version(name) is None]
    return "installed" if not missing else f"needs {', '.join(missing)}: pip install 'lrrn[{extra}]'"


def _devices() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    found = {"cpu": f"{processor()}, {cores()} cores usable, {memory / 2**30:.0f} GiB"}
    for k in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(k)
        found[f"cuda:{k}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return found


def _arithmetic() -> dict[str, Any]:
    """Return what decides the last bits of a result on this machine, and so differs from machine to machine."""
    import numba
    import scipy.linalg.cython_blas  # noqa: F401  # loaded first, or its BLAS would not be listed
    from llvmlite import binding
    from threadpoolctl import threadpool_info

    blas = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    own = numba.config.CPU_NAME or binding.get_host_cpu_name()
    wide = ", oneDNN for wide layers in float32" if onednn_is_faster() else ""
    return {
        "processor": processor(),
        "torch kernels": torch.backends.cpu.get_cpu_capability(),
        "torch BLAS": ("MKL" if torch.backends.mkl.is_available() else "no MKL") + wide,
        "NumPy and SciPy BLAS": [f"{pool['internal_api']} {pool.get('architecture') or ''}".strip() for pool in blas],
        "compiled kernels for": own,
        "threads": workers(),
        "environment": {name: os.environ[name] for name in ARITHMETIC if os.environ.get(name)},
    }


def _trial(solver: str, device: str) -> str:
    """Solve a small problem and say how that went."""
    net = LRRN((6, 5, 4, 3), generator=torch.Generator().manual_seed(0), device=device)
    x = torch.rand((4, 6), generator=torch.Generator().manual_seed(1)).to(device)
    try:
        solution = net.infer(x, solver=solver)
    except ValueError as error:
        return str(error).removeprefix(f"solver {solver!r} cannot run: ")
    good = "works" if bool(solution.converged.all()) else "did not converge on a small problem"
    return f"{good}, by {', then '.join(solution.solvers)}" if solver == "auto" else good


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _threads() -> dict[str, Any]:
    import scipy.linalg.cython_blas  # noqa: F401  # loaded first, or its BLAS would not be listed
    from threadpoolctl import threadpool_info

    pools = [
        f"{pool['internal_api']} {pool.get('version') or ''}".strip() + f": {pool['num_threads']}" for pool in threadpool_info()
    ]
    return {
        "policy": POLICY,
        "workers": workers(),
        "torch": torch.get_num_threads(),
        "libraries": pools,
        "environment": {name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
    }


def as_rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the report as rows of a table: section, name, value; the section is named in its first row only."""
    rows: list[tuple[str, str, str]] = []
    for section, content in report.items():
        title = section
        for name, value in _flat(content):
            rows.append((title, name, value))
            title = ""
    return rows


def _flat(content: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(content, dict):
        inside = [pair for key, value in content.items() for pair in _flat(value, f"{name} {key}".strip())]
        return inside or [(name, "-")]
    if isinstance(content, list):
        return [(name, ", ".join(map(str, content)) or "-")]
    return [(name, "not found" if content is None else str(content))]
