"""Quadratic problems of networks, and the check that one is solved."""

from __future__ import annotations

import numpy as np

from lrrn.qp import BoxQP
from oracles import PlainQP, kkt_norm, random_input, random_network
from tolerances import rounding


def make_qp(sizes, n, dtype, device, **options) -> BoxQP:
    options.setdefault("output_constraint", (-0.5, 0.5))
    options.setdefault("beta", tuple(0.5 + 0.5 * (k % 2) for k in range(len(sizes) - 1)))
    net = random_network(sizes, dtype=dtype, device=device, **options)
    return net.energy_snapshot(dtype).free(random_input(n, sizes[0], dtype=dtype, device=device))


def plain(qp: BoxQP, i: int) -> PlainQP:
    def row(bound):
        return bound[i if bound.shape[0] > 1 else 0].double().cpu().numpy()

    h = qp.hessian.dense().double().cpu().numpy()
    return PlainQP(h, qp.q[i].double().cpu().numpy(), row(qp.lo), row(qp.hi), 0.0)


def assert_solves(qp: BoxQP, solution, tol: float) -> None:
    """Every sample says it converged, lies in the box and satisfies the KKT conditions to tol, recomputed in float64."""
    assert solution.converged.all(), (solution.status, solution.residual)
    assert solution.z.dtype == qp.q.dtype and solution.z.device == qp.q.device
    for i in range(qp.n_samples):
        problem, z = plain(qp, i), solution.z[i].double().cpu().numpy()
        size = np.abs(problem.h).sum() * max(1, np.abs(z).max(initial=0)) + np.abs(problem.q).sum()
        slack = rounding(size, 3, qp.q.dtype)
        assert kkt_norm(problem, z) <= tol * max(1.0, float(np.linalg.norm(problem.q))) + slack
