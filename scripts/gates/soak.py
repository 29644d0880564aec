"""Soak test: millions of inferences with random networks and inputs. Every solution must be within tolerance or flagged.

Networks have one to four layers, Hessians of every condition number, 1e9 and more included, weights, biases and inputs from
denormal to huge, and every kind of constraint. Solves are in float32 and float64, of free and clamped phases. Solutions that
the library reports as converged are checked with plain NumPy in float64 from the definition of the energy, and in exact
rational arithmetic where float64 is inconclusive: |r| <= tol max(1, |q|), feasible, finite. A solution that fails this check
and was not flagged is a silent failure. A single silent failure makes the script exit with status 1.

A case is a network and a batch, determined by the seed and its number. So any case can be repeated (``--case``), and an
interrupted run can resume (``--state``).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lrrn
from lrrn.linalg import verified
from lrrn.qp import DEFAULT_TOL, Status
from lrrn.runtime.storage import write_bytes
from lrrn.solvers import coordinate_descent

Array = np.ndarray
INF = math.inf
SETS = ("free", "nonneg", "box", (-0.25, 0.5), (0.0, 1e-3), (-INF, 0.75), (0.1, INF), (1 / 3, 1 / 3), (-1e6, 1e6))
SIZES = {
    "wide": {torch.float64: ((-10, 6), (-40, 40)), torch.float32: ((-10, 4), (-30, 15))},
    "extreme": {torch.float64: ((-320, 170), (-322, 306)), torch.float32: ((-45, 21), (-45, 37))},
}
"""Ranges of the decimal exponents of weights and vectors: far from 0, and up to the limits of the dtype."""
SOLVERS = ("auto",) * 12 + ("coordinate_descent", "accelerated", "newton")


# --- cases ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A network, a batch and the settings of the solve."""

    number: int
    net: lrrn.LRRN
    x: torch.Tensor
    y: torch.Tensor | None
    solver: str
    tol: float | None
    kind: str
    corrected: bool
    """Whether coordinate descent in float64 begins with corrections in float32, as is the default only for wider networks."""


def draw(seed: int, number: int, batch: int) -> Case:
    """Draw a case from the seed and its number."""
    rng = np.random.default_rng([seed, number])
    dtype = torch.float64 if rng.random() < 0.5 else torch.float32
    depth = int(rng.integers(1, 5))
    sizes = tuple(int(d) for d in rng.integers(1, 13 if rng.random() < 0.9 else 41, depth + 1))
    sets = [SETS[int(i)] for i in rng.integers(len(SETS), size=depth)]
    beta = [float(b) for b in 10 ** rng.uniform(-2, 1, depth)]
    if rng.random() < 0.5:
        beta[-1] = 0.0
        sets[-1] = "free"
    if rng.random() < 0.1:
        beta = [0.0] * depth
    net = lrrn.LRRN(
        sizes,
        beta=beta,
        gamma=float(10 ** rng.uniform(-2, 0.3)),
        constraint=sets[:-1],
        output_constraint=sets[-1],
        bias=bool(rng.random() < 0.8),
        reconstruction_bias=bool(rng.random() < 0.8),
        generator=torch.Generator().manual_seed(0),
        dtype=dtype,
    )
    kind = str(rng.choice(["plain", "ill conditioned", "ill conditioned", "wide", "extreme"]))
    with torch.no_grad():
        for w in net.W:
            w.copy_(torch.from_numpy(_weights(rng, tuple(w.shape), kind, dtype)))
        for p in (*net.b, *net.c):
            if p is not None:
                p.copy_(torch.from_numpy(_vectors(rng, 1, len(p), kind, dtype)[0]))
    x = torch.from_numpy(_vectors(rng, batch, sizes[0], kind, dtype)).to(dtype)
    y = None
    if rng.random() < 0.25:
        y = torch.from_numpy(_vectors(rng, batch, sizes[-1], kind, dtype)).to(dtype)
        y = y.clamp(net.intervals[-1].lo, net.intervals[-1].hi)
        # a bound that the dtype cannot represent may have been rounded out of the interval
        inside = ((y.double() >= net.intervals[-1].lo) & (y.double() <= net.intervals[-1].hi)).all()
        y = y if bool(inside) else None
    tol = None
    if rng.random() < 0.2:
        tol = float(10 ** rng.uniform(-11, -2))
    return Case(number, net, x, y, str(rng.choice(SOLVERS)), tol, kind, number % 2 == 1)


def _weights(rng: np.random.Generator, shape: tuple[int, int], kind: str, dtype: torch.dtype) -> Array:
    """Draw a matrix: Gaussian; with singular values over four decades, whose squares are in H; of any scale; or zero."""
    w = rng.standard_normal(shape) / math.sqrt(shape[1])
    if kind == "plain":
        return w
    u, s, v = np.linalg.svd(w, full_matrices=False)
    top = rng.uniform(0, 4)
    w = (u * 10 ** rng.uniform(top - 4, top, len(s))) @ v
    if kind in SIZES:
        choice = rng.random()
        if choice < 0.1:
            return np.zeros(shape)
        if choice < 0.6:
            w = w * 10 ** rng.uniform(*SIZES[kind][dtype][0])
        w[rng.random(shape) < 0.2] = 0.0
    return w


def _vectors(rng: np.random.Generator, n: int, size: int, kind: str, dtype: torch.dtype) -> Array:
    """Draw rows, each with its own scale."""
    v = rng.standard_normal((n, size))
    scale = rng.uniform(-3, 3, (n, 1))
    if kind in SIZES:
        scale = np.where(rng.random((n, 1)) < 0.5, rng.uniform(*SIZES[kind][dtype][1], (n, 1)), scale)
    v *= 10.0**scale
    v[rng.random((n, size)) < 0.05] = 0.0
    # entries of very different magnitudes in one row
    if kind != "plain" and rng.random() < 0.3:
        v *= 10.0 ** rng.uniform(-6, 0, (n, size))
    limit = float(torch.finfo(dtype).max)
    return np.clip(v, -limit, limit)


# --- the independent check ------------------------------------------------------------------------------------------------


def gradient(case: Case, layers: list[Array], number: Callable[[Array], Array], absolute: bool = False) -> tuple[Array, Array]:
    """Return dE/dz and dE/dz at z = 0, which is -q, from the definition of E; one row per sample, unknown layers concatenated.

    Parameters
    ----------
    case : Case
    layers : list of float64 arrays
        x, z_1, ..., z_L.
    number : callable
        Converts arrays to the number type of the computation.
    absolute : bool
        Sum absolute values instead, since rounding errors are relative to these sums.
    """
    net, n_unknown = case.net, _n_unknown(case)
    sign = 1 if absolute else -1

    def numbers(t: Any) -> Array:
        values = t.detach().to(torch.float64).numpy() if isinstance(t, torch.Tensor) else np.asarray(t, dtype=np.float64)
        return number(np.abs(values) if absolute else values)

    weights = [numbers(w) for w in net.W]
    b, c = ([0 if p is None else numbers(p) for p in group] for group in (net.b, net.c))
    depth = len(weights)
    a, beta = numbers([net.gamma**k for k in range(depth)]), numbers(net.beta)
    layers = [numbers(layer) for layer in layers]
    results = []
    for z in (layers, [0 * layer if 1 <= k <= n_unknown else layer for k, layer in enumerate(layers)]):
        total: list[Any] = [0] * (depth + 1)
        # an output that the free phase eliminates contributes nothing
        for k in range(depth if case.y is not None else n_unknown):
            regression = z[k + 1] + sign * (z[k] @ weights[k].T) + sign * b[k]
            reconstruction = z[k + 1] @ weights[k] + sign * z[k] + sign * c[k]
            total[k + 1] = total[k + 1] + a[k] * (regression + beta[k] * (reconstruction @ weights[k].T))
            total[k] = total[k] + sign * a[k] * (regression @ weights[k] + beta[k] * reconstruction)
        results.append(np.concatenate(total[1 : n_unknown + 1], axis=1))
    return results[0], results[1]


def norms(rows: Array) -> Array:
    """Return Euclidean norms, computed without overflow or underflow."""
    size = np.abs(rows).max(axis=1, initial=0)
    safe = np.where((size > 0) & np.isfinite(size), size, 1)
    return safe * np.sqrt(((rows / safe[:, None]) ** 2).sum(axis=1))


def ratios(case: Case, layers: list[Array], limits: tuple[Array, Array], tol: float, kind: type) -> tuple[Array, Array]:
    """Return |r| / (tol max(1, |q|)) of every row in a float type, and an upper bound that includes rounding errors."""
    g, minus_q = gradient(case, layers, lambda array: array.astype(kind))
    sums, sums_q = gradient(case, layers, lambda array: array.astype(kind), absolute=True)
    rounding = 8 * (max(case.net.sizes) + 8) * np.finfo(kind).eps
    z, (lo, hi) = np.concatenate(layers[1 : 1 + _n_unknown(case)], axis=1), limits
    r = np.where(((z <= lo) & (g > 0)) | ((z >= hi) & (g < 0)), 0, g)
    size = np.maximum(1, norms(minus_q))
    least = np.maximum(1, norms(minus_q) - rounding * norms(sums_q))
    return norms(r) / (tol * size), (norms(r) + rounding * norms(sums)) / (tol * least)


def exact_ratio(case: Case, layers: list[Array], limits: tuple[Array, Array], tol: float) -> float:
    """Return the same ratio for a single row, in rational arithmetic up to the final square root."""
    g, minus_q = (part[0] for part in gradient(case, layers, np.vectorize(Fraction, otypes=[object])))
    z, (lo, hi) = np.concatenate(layers[1 : 1 + _n_unknown(case)], axis=1)[0], limits
    r2 = sum(
        (s * s for s, at, low, high in zip(g, z, lo[0], hi[0], strict=True) if not _blocked(s, at, low, high)), Fraction(0)
    )
    share = r2 / (Fraction(tol) ** 2 * max(Fraction(1), sum((s * s for s in minus_q), Fraction(0))))
    return math.sqrt(share) if share < 10**300 else INF


def _blocked(g: Fraction, z: float, lo: float, hi: float) -> bool:
    return bool((z <= lo and g > 0) or (z >= hi and g < 0))


def _n_unknown(case: Case) -> int:
    net = case.net
    eliminated = net.intervals[-1].is_free and net.beta[-1] == 0
    return len(net.W) - 1 if case.y is not None or eliminated else len(net.W)


def _bounds(case: Case, dtype: torch.dtype) -> tuple[Array, Array]:
    """Return the bounds of the unknowns, rounded to the dtype of the solve."""
    n = _n_unknown(case)
    ends = []
    for side in ("lo", "hi"):
        values = [getattr(i, side) for i in case.net.intervals[:n]]
        ends.append(np.repeat(torch.tensor(values, dtype=dtype).double().numpy(), case.net.sizes[1 : 1 + n])[None])
    return ends[0], ends[1]


# --- one case -------------------------------------------------------------------------------------------------------------


def run(case: Case) -> dict[str, Any]:
    """Solve a case and check every solution; return counts."""
    coordinate_descent.SINGLE_FROM = 0 if case.corrected else math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # only the flags matter here
        solution = case.net.infer(case.x, case.y, solver=case.solver, tol=case.tol)
    dtype = solution.activations[0].dtype
    converged = solution.converged.numpy()
    wrong = converged & ~_finite_and_feasible(case, solution.activations)
    rows = np.flatnonzero(converged & ~wrong)
    counts = Counter({"float64 could not tell": 0, "nor could extended precision": 0})
    worst = 0.0
    if _n_unknown(case) and len(rows):
        tol = DEFAULT_TOL[dtype] if case.tol is None else case.tol
        layers = [t.double().numpy()[rows] for t in (case.x, *solution.activations)]
        with np.errstate(all="ignore"):
            ratio = judge(case, layers, _bounds(case, dtype), tol, counts)
        wrong[rows[~(ratio <= 1)]] = True
        worst = float(ratio.max())
    statuses = Counter(Status(code).name for code in solution.status.tolist())
    return {
        "counts": {"solves": len(converged), **statuses, **counts, "silent failures": int(wrong.sum())},
        "first silent row": int(np.flatnonzero(wrong)[0]) if wrong.any() else None,
        "worst": worst,
    }


def judge(case: Case, layers: list[Array], limits: tuple[Array, Array], tol: float, counts: Counter[str]) -> Array:
    """Return |r| / (tol max(1, |q|)) of every row, in sufficient precision to decide whether it exceeds one."""
    ratio, at_most = ratios(case, layers, limits, tol, np.float64)
    for i in np.flatnonzero(~(at_most <= 1)):
        one = [layer[i : i + 1] for layer in layers]
        counts["float64 could not tell"] += 1
        ratio[i], most = (float(value[0]) for value in ratios(case, one, limits, tol, np.longdouble))
        if not most <= 1:
            counts["nor could extended precision"] += 1
            ratio[i] = exact_ratio(case, one, limits, tol)
    return ratio


def _finite_and_feasible(case: Case, activations: list[torch.Tensor]) -> Array:
    fine = np.ones(len(case.x), dtype=bool)
    for z, allowed in zip(activations, case.net.intervals, strict=True):
        lo, hi = torch.tensor([allowed.lo, allowed.hi], dtype=z.dtype)
        fine &= (z.isfinite() & (z >= lo) & (z <= hi)).all(-1).numpy()
    return fine


def conditioning(case: Case) -> str:
    """Return the decade of the condition number of H, estimated."""
    if _n_unknown(case) == 0:
        return "no unknowns"
    energy = case.net.energy_snapshot(torch.float64)
    h = energy.free_hessian if case.y is None else energy.clamped_hessian
    smallest, largest = verified.estimate_smallest(h), verified.estimate_largest(h)
    if not 0 < smallest <= largest < INF or largest / smallest >= 1e9:
        return "1e9 or more"
    return f"1e{int(math.log10(largest / smallest))}"


# --- the whole run --------------------------------------------------------------------------------------------------------


def tally(report: dict[str, Any], case: Case, result: dict[str, Any]) -> None:
    """Add a case to the report."""
    dtype = str(case.net.W[0].dtype).removeprefix("torch.")
    groups = {
        "by kind and type": f"{case.kind}, {dtype}",
        "by solver": case.solver,
        "by depth": str(len(case.net.W)),
        "by first sweeps in float64": "corrections in float32" if case.corrected else "float64",
        "by phase": "free" if case.y is None else "clamped",
        "by tolerance": "default" if case.tol is None else "1e-11 to 1e-2",
        "by condition number of H": conditioning(case),
    }
    for total in (report["all"], *(report[name].setdefault(key, {}) for name, key in groups.items())):
        for name, count in result["counts"].items():
            total[name] = total.get(name, 0) + count
    report["networks"] += 1
    report["largest |r| / (tol max(1, |q|)) of a converged answer"] = max(
        report["largest |r| / (tol max(1, |q|)) of a converged answer"], result["worst"]
    )
    if result["counts"]["silent failures"]:
        report["silent failures"].append({"case": case.number, "row": result["first silent row"], "ratio": result["worst"]})


def fresh(seed: int, batch: int) -> dict[str, Any]:
    return {
        "command": "scripts/gates/soak.py",
        "seed": seed,
        "batch": batch,
        "versions": {"lrrn": lrrn.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "networks": 0,
        "seconds": 0.0,
        "all": {},
        "by kind and type": {},
        "by solver": {},
        "by depth": {},
        "by first sweeps in float64": {},
        "by phase": {},
        "by tolerance": {},
        "by condition number of H": {},
        "largest |r| / (tol max(1, |q|)) of a converged answer": 0.0,
        "silent failures": [],
    }


def soak(report: dict[str, Any], solves: int, state: Path | None) -> None:
    """Run cases, resuming after those in the report, until it contains enough solves."""
    begun, before, saved = time.monotonic(), report["seconds"], time.monotonic()
    while report["all"].get("solves", 0) < solves:
        case = draw(report["seed"], report["networks"], report["batch"])
        tally(report, case, run(case))
        report["seconds"] = round(before + time.monotonic() - begun, 1)
        if time.monotonic() - saved > 20:
            saved = time.monotonic()
            logging.info("%d of %d solves, %d silent failures", report["all"]["solves"], solves, len(report["silent failures"]))
            if state is not None:
                write_bytes(state, json.dumps(report).encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--solves", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=1000, help="samples a network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="keep the run's state here, and continue from it if it is there")
    parser.add_argument("--case", type=int, help="run this case alone and show it")
    parser.add_argument("--json", type=Path, help="also write the report here")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("lrrn").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    if options.case is not None:
        case = draw(options.seed, options.case, options.batch)
        print(case.net, case.solver, case.tol, json.dumps(run(case), indent=2), sep="\n")
        return 0
    report = fresh(options.seed, options.batch)
    if options.state is not None and options.state.is_file():
        report = json.loads(options.state.read_text())
        if (report["seed"], report["batch"]) != (options.seed, options.batch):
            parser.error(f"{options.state} is of seed {report['seed']} and batch {report['batch']}; remove it, or give those")
    soak(report, options.solves, options.state)
    print(json.dumps(report, indent=2))
    if options.json is not None:
        write_bytes(options.json, (json.dumps(report, indent=2) + "\n").encode())
    return 1 if report["silent failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
