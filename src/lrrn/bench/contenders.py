"""Who solves it: our solvers and their peers, each behind the same two calls.

``prepare`` takes a problem and returns a function from a tolerance to a solution; whatever a contender can do once per Hessian
(factor, compile) it does in ``prepare`` or in the first, untimed call. A peer that is not installed says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from lrrn.bench.problems import Problem
from lrrn.blocks import BlockTridiagonal
from lrrn.qp import BoxQP
from lrrn.solvers import solve

Solve = Callable[[float], Tensor]


@final
@dataclass(frozen=True)
class Contender:
    """A way of solving a :class:`~lrrn.bench.problems.Problem`.

    Parameters
    ----------
    name : str
        For tables.
    prepare : callable
        Problem -> (tolerance -> solution of shape (n, dim)).
    needs : tuple of str
        Packages it imports.
    slow : bool
        Whether one repetition is enough.
    ours : bool
        Whether it is one of this package's solvers.
    """

    name: str
    prepare: Callable[[Problem], Solve]
    needs: tuple[str, ...] = ()
    slow: bool = False
    ours: bool = False

    def missing(self) -> str | None:
        """Name a package that is not installed, or return None."""
        return next((package for package in self.needs if find_spec(package) is None), None)


def _our(name: str) -> Callable[[Problem], Solve]:
    def prepare(problem: Problem) -> Solve:
        def run(tol: float) -> Tensor:
            # a fresh Hessian object, so that what is remembered per matrix is prepared inside the clock
            qp = problem.qp
            fresh = BoxQP(BlockTridiagonal(qp.hessian.diag, qp.hessian.sub), qp.q, qp.lo, qp.hi)
            return solve(fresh, solver=name, tol=tol, max_sweeps=10_000).z

        return run

    return prepare


def _fista(momentum: str) -> Callable[[Problem], Solve]:
    """Projected gradient with momentum on a dense Hessian, stopped for the whole batch every ten iterations."""

    def prepare(problem: Problem) -> Solve:
        h, q, lo, hi = problem.qp.hessian.dense(), problem.qp.q, problem.qp.lo, problem.qp.hi
        eigenvalues = torch.linalg.eigvalsh(h)
        step, root = 1 / float(eigenvalues[-1]), float(eigenvalues[0] / eigenvalues[-1]) ** 0.5

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


def _osqp(problem: Problem) -> Solve:
    import osqp
    from scipy import sparse

    h, q, lo, hi = _numpy(problem)
    n = q.shape[1]

    def run(tol: float) -> Tensor:
        solver = osqp.OSQP()
        matrix = sparse.csc_matrix(np.triu(h))
        options = {"eps_abs": tol, "eps_rel": tol, "max_iter": 100_000, "verbose": False}
        solver.setup(matrix, -q[0], sparse.identity(n, format="csc"), lo[0], hi[0], **options)
        out = np.empty_like(q)
        for i in range(len(q)):
            solver.update(q=-q[i])
            out[i] = solver.solve(raise_error=False).x
        return torch.from_numpy(out)

    return run


def _box_cdqp(problem: Problem) -> Solve:
    import jax
    from jaxopt import BoxCDQP

    jax.config.update("jax_enable_x64", True)
    h, q, lo, hi = (jax.numpy.asarray(a) for a in _numpy(problem))
    compiled: dict[float, Any] = {}

    def run(tol: float) -> Tensor:
        if tol not in compiled:
            solver = BoxCDQP(maxiter=10_000, tol=tol)
            start = jax.numpy.zeros(q.shape[1])
            compiled[tol] = jax.jit(jax.vmap(lambda c: solver.run(start, params_obj=(h, c), params_ineq=(lo[0], hi[0])).params))
        return torch.from_numpy(np.array(compiled[tol](-q).block_until_ready()))

    return run


def _cvxpylayers(problem: Problem) -> Solve:
    import cvxpy
    from cvxpylayers.torch import CvxpyLayer

    h, q, lo, hi = _numpy(problem)
    n = q.shape[1]
    z, c = cvxpy.Variable(n), cvxpy.Parameter(n)
    root = np.linalg.cholesky(h).T
    limits = [z[np.isfinite(lo[0])] >= lo[0][np.isfinite(lo[0])]] if np.isfinite(lo).any() else []
    limits += [z[np.isfinite(hi[0])] <= hi[0][np.isfinite(hi[0])]] if np.isfinite(hi).any() else []
    layer = CvxpyLayer(
        cvxpy.Problem(cvxpy.Minimize(0.5 * cvxpy.sum_squares(root @ z) - c @ z), limits), parameters=[c], variables=[z]
    )

    def run(tol: float) -> Tensor:
        (answer,) = layer(torch.from_numpy(q), solver_args={"eps": tol, "max_iters": 100_000})
        return answer.detach()

    return run


def _numpy(problem: Problem) -> tuple[np.ndarray, ...]:
    qp = problem.qp
    return tuple(t.double().numpy() for t in (qp.hessian.dense(), qp.q, qp.lo, qp.hi))


CONTENDERS = (
    Contender("coordinate_descent", _our("coordinate_descent"), ours=True),
    Contender("accelerated", _our("accelerated"), ours=True),
    Contender("newton", _our("newton"), ours=True, slow=True),
    Contender("auto", _our("auto"), ours=True),
    Contender("torch FISTA", _fista("increasing")),
    Contender("torch FISTA, momentum from mu and L", _fista("constant")),
    Contender("osqp, in a loop", _osqp, ("osqp", "scipy"), slow=True),
    Contender("jaxopt BoxCDQP, jit + vmap", _box_cdqp, ("jax", "jaxopt")),
    Contender("cvxpylayers", _cvxpylayers, ("cvxpylayers", "cvxpy"), slow=True),
)


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Give torch ``n`` threads for the contenders that use its own parallelism."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
