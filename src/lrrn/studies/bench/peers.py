"""Adapters of other libraries for the suite ``solve``: from a :class:`~lrrn.studies.bench.problems.Problem` to a ``Solve``.

The libraries are imported lazily, so that this module can be imported without any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrrn.studies.bench.problems import Problem

Solve = Callable[[float], Tensor]
INFINITY = 1e20
"""Replaces infinite bounds for solvers that do not support them."""


def osqp(problem: Problem) -> Solve:
    """Set up once, then solve for one linear term after the other, each warm-started from the previous solution."""
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


def proxsuite(problem: Problem) -> Solve:
    """Solve one sample after the other with one factorisation; with more threads, a batch of problems in parallel."""
    from proxsuite import proxqp

    h, q, lo, hi = _numpy(problem)
    n = q.shape[1]
    lower, upper = lo[0].clip(min=-INFINITY), hi[0].clip(max=INFINITY)

    def one_thread(tol: float) -> list[np.ndarray]:
        qp = proxqp.dense.QP(n, 0, 0, True)  # a box and no other constraint
        qp.settings.eps_abs, qp.settings.eps_rel, qp.settings.max_iter = tol, 0.0, 10_000
        qp.init(H=h, g=-q[0], l_box=lower, u_box=upper)
        answers = []
        for linear in q:
            qp.update(g=-linear)
            qp.solve()
            answers.append(qp.results.x.copy())
        return answers

    def more_threads(tol: float) -> list[np.ndarray]:
        batch = proxqp.dense.BatchQP()  # it does not support boxes
        for linear in q:
            qp = batch.init_qp_in_place(n, 0, n)
            qp.settings.eps_abs, qp.settings.eps_rel, qp.settings.max_iter = tol, 0.0, 10_000
            qp.init(H=h, g=-linear, C=np.eye(n), l=lower, u=upper)
        proxqp.dense.solve_in_parallel(qps=batch, num_threads=torch.get_num_threads())
        return [batch.get(i).results.x.copy() for i in range(len(q))]

    def run(tol: float) -> Tensor:
        return torch.from_numpy(np.stack((one_thread if torch.get_num_threads() == 1 else more_threads)(tol)))

    return run


def quadprog(problem: Problem) -> Solve:
    """Goldfarb and Idnani's method with H factored once; exact up to rounding, so it has no tolerance."""
    import quadprog
    from scipy.linalg import solve_triangular

    h, q, lo, hi = _numpy(problem)
    n = q.shape[1]
    below, above = np.isfinite(lo[0]), np.isfinite(hi[0])
    constraints = np.ascontiguousarray(np.concatenate([np.eye(n)[:, below], -np.eye(n)[:, above]], axis=1))
    limits = np.concatenate([lo[0][below], -hi[0][above]])
    # with factorized=True it takes R^-1 where H = R^T R
    root = solve_triangular(np.linalg.cholesky(h).T, np.eye(n))

    def run(tol: float) -> Tensor:
        out = np.empty_like(q)
        for i in range(len(q)):
            out[i] = quadprog.solve_qp(root, q[i], constraints, limits, factorized=True)[0]
        return torch.from_numpy(out)

    return run


def box_cdqp(problem: Problem) -> Solve:
    """Coordinate descent, compiled and vectorised over the batch."""
    import jax
    from jaxopt import BoxCDQP

    def one(h: Any, c: Any, ends: Any, tol: Any) -> Any:
        return BoxCDQP(maxiter=10_000, tol=tol).run(jax.numpy.zeros_like(c), params_obj=(h, c), params_ineq=ends).params

    return _compiled(problem, one)


def box_osqp(problem: Problem) -> Solve:
    """ADMM with a factored system, compiled and vectorised over the batch."""
    import jax
    from jaxopt import BoxOSQP

    def one(h: Any, c: Any, ends: Any, tol: Any) -> Any:
        solver = BoxOSQP(eq_qp_solve="lu", maxiter=4000, tol=tol)
        return solver.run(params_obj=(h, c), params_eq=jax.numpy.eye(len(c)), params_ineq=ends).params.primal[0]

    return _compiled(problem, one)


def _compiled(problem: Problem, one: Callable[..., Any]) -> Solve:
    """Compile and vectorise a one-sample solver; H and tolerance are arguments, or XLA would constant-fold them for minutes."""
    import jax

    jax.config.update("jax_enable_x64", True)
    h, q, lo, hi = (jax.numpy.asarray(a) for a in _numpy(problem))
    solve = jax.jit(jax.vmap(one, in_axes=(None, 0, None, None)))
    return lambda tol: torch.from_numpy(np.array(solve(h, -q, (lo[0], hi[0]), tol).block_until_ready()))


def qpth(problem: Problem) -> Solve:
    """Solve by a batched interior-point method, which accepts finite bounds only."""
    from qpth.qp import QPFunction

    h, q, g, limits = as_inequalities(problem)
    nothing = torch.empty(0, dtype=torch.float64)

    def run(tol: float) -> Tensor:
        layer = QPFunction(eps=tol, maxIter=50, check_Q_spd=False, verbose=-1)
        return layer(h, -q, g, limits, nothing, nothing)

    return run


def cvxpylayers(problem: Problem) -> Solve:
    """Solve one cone programme per sample with diffcp."""
    h, q, _, _ = _numpy(problem)
    layer = cvxpy_layer(problem, np.linalg.cholesky(h).T)

    def run(tol: float) -> Tensor:
        (answer,) = layer(torch.from_numpy(q), solver_args={"eps": tol, "max_iters": 100_000})
        return answer.detach()

    return run


def cvxpy_layer(problem: Problem, root: Any = None) -> Any:
    """Return the layer argmin |R z|^2 / 2 - q^T z over the box; q is a parameter, and so is R unless it is given."""
    import cvxpy
    from cvxpylayers.torch import CvxpyLayer

    _, q, lo, hi = _numpy(problem)
    n = q.shape[1]
    z, c = cvxpy.Variable(n), cvxpy.Parameter(n)
    parameters = [c] if root is not None else [cvxpy.Parameter((n, n)), c]
    below, above = np.isfinite(lo[0]), np.isfinite(hi[0])
    limits = [z[below] >= lo[0][below]] if below.any() else []
    limits += [z[above] <= hi[0][above]] if above.any() else []
    objective = 0.5 * cvxpy.sum_squares((parameters[0] if root is None else root) @ z) - c @ z
    return CvxpyLayer(cvxpy.Problem(cvxpy.Minimize(objective), limits), parameters=parameters, variables=[z])


def as_inequalities(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return H, q and the finite bounds as G z <= h, in float64."""
    h, q, lo, hi = (torch.from_numpy(a) for a in _numpy(problem))
    below, above = lo[0].isfinite(), hi[0].isfinite()
    unit = torch.eye(q.shape[1], dtype=torch.float64)
    return h, q, torch.cat([-unit[below], unit[above]]), torch.cat([-lo[0][below], hi[0][above]])


def _numpy(problem: Problem) -> tuple[np.ndarray, ...]:
    qp = problem.qp
    return tuple(t.double().numpy() for t in (qp.matrix.dense(), qp.q, qp.lo, qp.hi))
