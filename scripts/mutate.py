"""Inject defects one at a time and see that the oracle tests notice; exit with 1 if a mutant survives.

Each mutant is one exact replacement in one file. It runs only the tests that should catch it, in a copy of the tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """One defect and the tests that must fail with it."""

    name: str
    file: str
    before: str
    after: str
    tests: str


MUTANTS = [
    Mutant("drop the 1/2", "energy.py", "total + 0.5 * a * regression", "total + a * regression", "test_energy.py"),
    Mutant("drop beta", "energy.py", "0.5 * a * self.beta[k] * rec", "0.5 * a * rec", "test_energy.py"),
    Mutant(
        "flip the sign of the coupling",
        "energy.py",
        "self.weights[k].detach() * (-self.discounts[k]",
        "self.weights[k].detach() * (self.discounts[k]",
        "test_energy.py",
    ),
    Mutant(
        "forget the pull of the layer above",
        "energy.py",
        "block = torch.addmm(self._own_block(k), above.mT, above, alpha=a)",
        "block = self._own_block(k).clone()",
        "test_energy.py",
    ),
    Mutant(
        "keep the eliminated output in H",
        "energy.py",
        "return self._hessian(self.n_free, False)",
        "return self._hessian(self.n_free, self.eliminated)",
        "test_energy.py",
    ),
    Mutant("wrong discount", "energy.py", "self.gamma**k for k", "self.gamma ** max(k - 1, 0) for k", "test_energy.py"),
    Mutant(
        "skip the last unit",
        "solvers/_cd_numba.py",
        "for j in range(place.shape[0]):",
        "for j in range(place.shape[0] - 1):",
        "test_solver_contract.py",
    ),
    Mutant(
        "skip the clip",
        "solvers/_cd_vector.py",
        "after = v.smaller(v.larger(after, v.load(v.address(lo.data, place))), v.load(v.address(hi.data, place)))",
        "after = v.larger(after, v.load(v.address(lo.data, place)))",
        "test_solver_contract.py",
    ),
    Mutant(
        "wrong neighbour block",
        "solvers/_cd_numba.py",
        "= below[j0 + i, m]",
        "= below[(j0 + i + 1) % below.shape[0], m]",
        "test_solver_contract.py",
    ),
    Mutant(
        "stale gradient inside a panel",
        "solvers/_cd_vector.py",
        "local[k] = v.multiply_add(entry, step, local[k])",
        "local[k] = v.multiply_add(entry, v.zero, local[k])",
        "test_solver_choice.py",
    ),
    Mutant(
        "trust the kernel's residual",
        "solvers/loop.py",
        "g, residual = stepper.check(qp, z)",
        "residual = 0.5 * want",
        "test_solver_contract.py",
    ),
    Mutant(
        "one-sided residual",
        "qp.py",
        "((z <= lo) & (g > 0)).logical_or_((z >= hi) & (g < 0))",
        "((z <= lo) & (g > 0)).logical_or_(z >= hi)",
        "test_solver_contract.py",
    ),
    Mutant(
        "call non-finite samples converged",
        "solvers/loop.py",
        "missed = ~(self.residual <= self.must)",
        "missed = (self.residual > self.must) & self.residual.isfinite()",
        "test_solver_contract.py",
    ),
    Mutant(
        "momentum in the wrong direction",
        "solvers/accelerated.py",
        "torch.addcmul(new, weight, move)",
        "torch.addcmul(new, weight, move, value=-1)",
        "test_solver_choice.py test_solver_contract.py test_oracle.py",
    ),
    Mutant(
        "Newton forgets the binding units",
        "solvers/newton.py",
        "self._h.restricted(~binding)",
        "self._h.restricted(torch.ones_like(binding))",
        "test_solver_choice.py",
    ),
    Mutant(
        "adjoint frees units on a bound",
        "energy.py",
        "(z <= lo) | (z >= hi), 0)",
        "(z < lo) | (z > hi), 0)",
        "test_gradients.py",
    ),
    Mutant("gradient of the wrong sign", "implicit.py", "slope.neg_()", "slope", "test_gradients.py"),
    Mutant("unscaled adjoint", "implicit.py", "unit = v / torch.where(size > 0, size, 1)", "unit = v", "test_gradients.py"),
    Mutant(
        "singular values of an expanding layer from a thin SVD",
        "bounds.py",
        "    if rows > columns:\n        return 0.0, highest\n",
        "    if rows > columns:\n        w, columns = w.mT, rows\n",
        "test_bounds.py",
    ),
    Mutant(
        "estimate sold as a bound", "verified.py", "* EPS * trace + error", "* 0 * trace - 1e-3 * error", "test_verified.py"
    ),
    Mutant(
        "claim without proof", "verified.py", "if is_positive_definite(h, -candidate, error):", "if True:", "test_verified.py"
    ),
    Mutant(
        "ignore that float32 rounds the bounds",
        "qp.py",
        "feasible = torch.where(z == self.lo.to(z.dtype), self.lo, given)",
        "feasible = given",
        "test_error_bound.py",
    ),
    Mutant(
        "error bound without the residual",
        "qp.py",
        "(self.residual(feasible) + slack) / mu",
        "slack / mu",
        "test_error_bound.py",
    ),
    Mutant("reuse a stale Hessian", "network.py", "not _same(self._frozen[0], now)", "False", "test_network.py"),
]


def survives(mutant: Mutant) -> tuple[bool, str]:
    """Apply one mutant in a copy of the tree and run its tests; return whether all passed, and their last line."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / "src" / "lrrn" / mutant.file
        text = target.read_text()
        if text.count(mutant.before) != 1:
            raise SystemExit(f"mutant {mutant.name!r}: its text stands {text.count(mutant.before)} times in {mutant.file}")
        target.write_text(text.replace(mutant.before, mutant.after))
        tests = [f"tests/{name}" for name in mutant.tests.split()]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            return False, "ran past its time"
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))] or done.stdout.splitlines()
        if done.returncode not in (0, 1):
            raise SystemExit(f"mutant {mutant.name!r}: pytest could not run\n{done.stdout}\n{done.stderr}")
        return done.returncode == 0, lines[0] if lines else ""


def main() -> int:
    """Run all mutants, or those whose name contains a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="only mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many to run at once")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.word in mutant.name]
    start = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(survives, chosen))
    for mutant, (alive, line) in zip(chosen, results, strict=True):
        print(f"{'SURVIVED' if alive else 'caught':9}{mutant.name}: {line[:150]}")
    survivors = sum(alive for alive, _ in results)
    print(f"{len(chosen)} mutants, {survivors} survived, {time.monotonic() - start:.0f} s")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
