"""Suite ``grad``: forward and backward of the layer, against differentiable QP layers on the same H and q.

All contenders start from the network's parameters and compute the gradient of one scalar with respect to all of them. Peers get
H(W) and q(W, x) built in torch, and backpropagate through them. The reference is independent: it differentiates
z = H_AA^-1 q_A on the active set of the float64 solution.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lrrn.network import LRRN
from lrrn.runtime.threads import blas_threads, one_thread
from lrrn.studies.bench import peers
from lrrn.studies.bench.clock import Settings, best_of_threads, threads
from lrrn.studies.bench.contenders import NOT_TIMED, absent, missing
from lrrn.studies.bench.contest import loosest
from lrrn.studies.bench.journal import Journal
from lrrn.studies.bench.problems import Problem, free_phase, images, name_of, random_network
from lrrn.studies.bench.tables import Part, contest_table

logger = logging.getLogger("lrrn.studies.bench")

TARGET = 1e-3
"""Largest error of an accepted gradient, relative to its largest entry; proxsuite's gradients are float32."""

RUNGS = (1e-4, 1e-6, 1e-8, 1e-10, 1e-12)
"""Tolerances tried for every contender, from loose to tight, until its gradient is accurate enough."""

Layer = Callable[[Tensor, Tensor, float], Tensor]
Gradient = Callable[[float], list[Tensor]]


def run(settings: Settings, journal: Journal) -> list[dict[str, Any]]:
    """Time forward and backward of every contender, by size and batch."""
    cases = ((8, 5),) if settings.quick else ((64, 10), (64, 100), (256, 10))
    records = []
    for hidden, n in cases:
        records += journal.once(f"{hidden} units a layer, batch {n}", _case, (784, hidden, hidden, 10), n, settings)
    return records


def _case(sizes: Sequence[int], n: int, settings: Settings) -> list[dict[str, Any]]:
    net = random_network(sizes, settings.seed, torch.float64)
    x = images(n, sizes[0], settings.seed + 1, torch.float64)
    direction = torch.randn(n, sizes[-1], generator=torch.Generator().manual_seed(settings.seed), dtype=torch.float64)
    problem = free_phase(net, x, name_of(net))
    reference = _through(net, x, direction, _active_set(problem))(0.0)
    records = []
    for name, needs, prepare, options in CONTENDERS:
        head = {"kind": "grad", "case": f"{problem.name}, batch {n}", "dim": problem.qp.dim, "batch": n}
        blank = {"contender": name, "ours": not needs, **NOT_TIMED, "error": None}
        package = missing(needs)
        if package is not None:
            records.append({**head, **blank, "note": absent(package)})
            continue
        logger.info("%s: %s", head["case"], name)
        layer = prepare(problem)
        gradient = _ours(net, x, direction) if layer is None else _through(net, x, direction, layer)
        with warnings.catch_warnings(), one_thread() if layer is None else nullcontext():
            warnings.simplefilter("ignore")
            records.append({**head, **blank, **timed(gradient, reference, settings.repeats, options)})
    return records


def timed(gradient: Gradient, reference: list[Tensor], repeats: int, options: Sequence[int] | None) -> dict[str, Any]:
    """Compare a gradient with the reference and, if it is accurate enough, time it."""
    with threads((options or (1,))[0]):
        tol, error = loosest(gradient, lambda parts: gradient_error(parts, reference), RUNGS, TARGET)
    if tol is None:
        return {"error": error, "note": "misses the required error"}
    tolerance = tol
    timing = best_of_threads(lambda: gradient(tolerance), repeats, options)
    return {**timing._asdict(), "error": error, "tol": tol, "note": ""}


def gradient_error(gradient: list[Tensor], reference: list[Tensor]) -> float:
    """Return the largest deviation of any entry, relative to the largest entry of all."""
    size = max(float(part.abs().max()) for part in reference)
    worst = max(float((part.double() - right).abs().max()) for part, right in zip(gradient, reference, strict=True))
    return worst / size if worst == worst else float("inf")


def _ours(net: LRRN, x: Tensor, direction: Tensor) -> Gradient:
    def run(tol: float) -> list[Tensor]:
        net.tol = tol
        with blas_threads(1):
            return _used(torch.autograd.grad((net(x) * direction).sum(), net.flat_parameters(), allow_unused=True), net)

    return run


def _through(net: LRRN, x: Tensor, direction: Tensor, layer: Layer) -> Gradient:
    """Differentiate the output of a layer from H and q to z with respect to the network's parameters."""

    def run(tol: float) -> list[Tensor]:
        z = layer(*quadratic(net, x), tol)
        y = z[:, -net.sizes[-2] :].double() @ net.W[-1].mT + net.b[-1]
        return _used(torch.autograd.grad((y * direction).sum(), net.flat_parameters(), allow_unused=True), net)

    return run


def _used(gradients: Sequence[Tensor | None], net: LRRN) -> list[Tensor]:
    return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, net.flat_parameters(), strict=True)]


def quadratic(net: LRRN, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return H and q of the free phase with an eliminated output, dense and differentiable in the parameters."""
    n_free, a, beta = len(net.sizes) - 2, [net.gamma**k for k in range(len(net.sizes) - 1)], net.beta
    rows, q = [], []
    for k in range(n_free):
        w, b, c = net.W[k], net.b[k], net.c[k]
        diagonal = a[k] * (torch.eye(len(w), dtype=w.dtype) + beta[k] * w @ w.mT)
        linear = (a[k] * (b + beta[k] * w @ c)).expand(len(x), -1)
        if k == 0:
            linear = linear + a[0] * (1 + beta[0]) * x @ w.mT
        row = [torch.zeros(len(w), size, dtype=w.dtype) for size in net.sizes[1 : n_free + 1]]
        if k > 0:
            row[k - 1] = -a[k] * (1 + beta[k]) * w
        if k + 1 < n_free:
            above = net.W[k + 1]
            diagonal = diagonal + a[k + 1] * (above.mT @ above + beta[k + 1] * torch.eye(len(w), dtype=w.dtype))
            linear = linear - a[k + 1] * (above.mT @ net.b[k + 1] + beta[k + 1] * net.c[k + 1])
            row[k + 1] = -a[k + 1] * (1 + beta[k + 1]) * above.mT
        row[k] = diagonal
        rows.append(torch.cat(row, dim=1))
        q.append(linear)
    return torch.cat(rows), torch.cat(q, dim=1)


def _active_set(problem: Problem) -> Layer:
    """Solve H_AA z_A = q_A per sample, where A are the units strictly within their bounds in the reference (nonneg: z > 0)."""

    def layer(h: Tensor, q: Tensor, tol: float) -> Tensor:
        out = []
        for linear, z in zip(q, problem.reference, strict=True):
            (active,) = (z > 1e-9).nonzero(as_tuple=True)
            values = torch.linalg.solve(h[active][:, active], linear[active])
            out.append(torch.zeros_like(linear).index_put((active,), values))
        return torch.stack(out)

    return layer


def _cvxpylayers(problem: Problem) -> Layer:
    layer = peers.cvxpy_layer(problem)

    def run(h: Tensor, q: Tensor, tol: float) -> Tensor:
        # R^T R = H
        (z,) = layer(torch.linalg.cholesky(h).mT, q, solver_args={"eps": tol, "max_iters": 100_000})
        return z

    return run


def _qpth(problem: Problem) -> Layer:
    from qpth.qp import QPFunction

    _, _, g, limits = peers.as_inequalities(problem)
    nothing = torch.empty(0, dtype=torch.float64)

    def run(h: Tensor, q: Tensor, tol: float) -> Tensor:
        layer = QPFunction(eps=tol, maxIter=50, check_Q_spd=False, verbose=-1)
        # for a shared matrix it would return the mean of the samples' gradients, not their sum
        return layer(h.expand(len(q), -1, -1), -q, g, limits, nothing, nothing)

    return run


def _proxsuite(problem: Problem) -> Layer:
    from proxsuite.torch.qplayer import QPFunction

    n = problem.qp.dim
    unit, nothing = torch.eye(n, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
    lo = problem.qp.lo[0].clamp(min=-peers.INFINITY)
    hi = problem.qp.hi[0].clamp(max=peers.INFINITY)

    def run(h: Tensor, q: Tensor, tol: float) -> Tensor:
        layer = QPFunction(eps=tol, maxIter=1000, eps_backward=1e-6, omp_parallel=torch.get_num_threads() > 1)
        return layer(h, -q, nothing, nothing, unit, lo, hi)[0]

    return run


CONTENDERS: tuple[tuple[str, tuple[str, ...], Callable[[Problem], Layer | None], tuple[int, ...] | None], ...] = (
    ("lrrn", (), lambda problem: None, None),
    ("cvxpylayers", ("cvxpylayers", "cvxpy"), _cvxpylayers, None),
    ("qpth", ("qpth",), _qpth, None),
    ("proxsuite QPLayer", ("proxsuite",), _proxsuite, None),
)


def present(records: list[dict[str, Any]]) -> list[Part]:
    """Turn the records into tables of ratios."""
    parts: list[Part] = []
    for case in dict.fromkeys(record["case"] for record in records):
        rows = [record for record in records if record["case"] == case]
        title = f"Forward and backward, {case}: {rows[0]['dim']} unknowns, float64, to {TARGET:.0e} of the largest entry"
        parts.append(contest_table(title, rows))
    return parts
