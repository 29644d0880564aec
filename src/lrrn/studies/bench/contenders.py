"""Contenders of the suite ``solve``: our solvers, straightforward torch code, and other libraries, with one interface.

``prepare`` takes a problem and returns a function from a tolerance to a solution. Work that is needed once per Hessian (such as
factorisation or compilation) is done in ``prepare`` or in the first, untimed call. A missing library is reported by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import Tensor

from lrrn.linalg.blocks import BlockTridiagonal
from lrrn.qp import BoxQP
from lrrn.runtime.threads import blas_threads
from lrrn.solvers import solve
from lrrn.studies.bench import peers
from lrrn.studies.bench.problems import Problem

Solve = Callable[[float], Tensor]
NOT_TIMED: dict[str, Any] = {"seconds": None, "spread": None, "threads": None}
"""Entries of a record that has no time yet."""


def missing(packages: tuple[str, ...]) -> str | None:
    """Name a package that is not installed, or return None."""
    return next((package for package in packages if find_spec(package.partition(".")[0]) is None), None)


def absent(package: str) -> str:
    """Return the note in tables for a contender whose package is missing."""
    return f"skipped: {package} is not installed (make .venv-bench/.bench)"


@final
@dataclass(frozen=True)
class Contender:
    """A solver of a :class:`~lrrn.studies.bench.problems.Problem`.

    Parameters
    ----------
    name : str
        Name in tables.
    prepare : callable
        Problem -> (tolerance -> solution of shape (n, dim)).
    needs : tuple of str
        Packages it imports.
    ours : bool
        Whether it is one of this package's solvers.
    threads : tuple of int, optional
        Numbers of threads to try; one and all if not given, (0,) for a contender that manages its own threads.
    largest : int
        Largest number of unknowns to try; larger problems take minutes each, or more memory than available.
    alone : bool
        Whether single samples take no longer per sample than a batch, so that the time of many can be extrapolated from few.
    """

    name: str
    prepare: Callable[[Problem], Solve]
    needs: tuple[str, ...] = ()
    ours: bool = False
    threads: tuple[int, ...] | None = None
    largest: int = 2**31
    alone: bool = False


def _our(name: str) -> Callable[[Problem], Solve]:
    def prepare(problem: Problem) -> Solve:
        def run(tol: float) -> Tensor:
            # a new Hessian object, so that the timing includes what is cached per matrix
            qp = problem.qp
            fresh = BoxQP(BlockTridiagonal(qp.matrix.diag, qp.matrix.sub), qp.q, qp.lo, qp.hi)
            with blas_threads(1):
                return solve(fresh, solver=name, tol=tol, max_sweeps=10_000).z

        return run

    return prepare


def _fista(momentum: str) -> Callable[[Problem], Solve]:
    """Projected gradient with momentum on a dense Hessian; the stopping test, every ten iterations, is for the whole batch."""

    def prepare(problem: Problem) -> Solve:
        h, q, lo, hi = problem.qp.matrix.dense(), problem.qp.q, problem.qp.lo, problem.qp.hi
        smallest, largest = problem.spectrum
        step, root = 1 / largest, (smallest / largest) ** 0.5

        def run(tol: float) -> Tensor:
            z = ahead = torch.zeros_like(q).clamp(lo, hi)
            t = 1.0
            for k in range(100_000):
                new = (ahead - step * (ahead @ h - q)).clamp(lo, hi)
                if k % 10 == 9 and float((new - ahead).abs().max()) <= tol * step:
                    return new
                t_new = 0.5 * (1 + (1 + 4 * t * t) ** 0.5)
                weight = (t - 1) / t_new if momentum == "increasing" else (1 - root) / (1 + root)
                z, ahead, t = new, new + weight * (new - z), t_new
            return z

        return run

    return prepare


def _naive_descent(problem: Problem) -> Solve:
    """Coordinate descent as in the paper: a Python loop over units; each update covers the whole batch."""
    h, q, lo, hi = problem.qp.matrix.dense(), problem.qp.q, problem.qp.lo, problem.qp.hi
    diagonal = h.diagonal().tolist()

    def run(tol: float) -> Tensor:
        z = torch.zeros_like(q).clamp(lo, hi)
        g = z @ h - q
        for _ in range(10_000):
            largest = torch.zeros(())
            for j, scale in enumerate(diagonal):
                step = (z[:, j] - g[:, j] / scale).clamp(lo[0, j], hi[0, j]) - z[:, j]
                z[:, j] += step
                g.addr_(step, h[j])
                largest = torch.maximum(largest, step.abs().max())
            if float(largest) <= tol:
                break
        return z

    return run


CONTENDERS = (
    Contender("coordinate_descent", _our("coordinate_descent"), ours=True),
    Contender("accelerated", _our("accelerated"), ours=True),
    Contender("newton", _our("newton"), ours=True, largest=512),
    Contender("auto", _our("auto"), ours=True),
    Contender("torch FISTA", _fista("increasing")),
    Contender("torch FISTA, momentum from mu and L", _fista("constant")),
    Contender("torch coordinate descent", _naive_descent, largest=2048),
    Contender("jaxopt BoxCDQP, jit + vmap", peers.box_cdqp, ("jax", "jaxopt"), threads=(0,)),
    Contender("jaxopt BoxOSQP, jit + vmap", peers.box_osqp, ("jax", "jaxopt"), threads=(0,), largest=512, alone=True),
    Contender("osqp, in a loop", peers.osqp, ("osqp", "scipy"), threads=(1,), largest=2048, alone=True),
    Contender("proxsuite", peers.proxsuite, ("proxsuite",), largest=2048, alone=True),
    Contender("quadprog, in a loop", peers.quadprog, ("quadprog",), largest=2048, alone=True),
    Contender("qpth", peers.qpth, ("qpth",), largest=256, alone=True),
    Contender("cvxpylayers", peers.cvxpylayers, ("cvxpylayers", "cvxpy"), largest=1024, alone=True),
)
