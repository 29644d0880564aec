"""Throughput of our coordinate-descent kernel in multiply-adds per second, compared with a matrix product.

The count includes the multiply-adds that the kernel performs. The update of a panel is skipped, and not counted, if no sample
of a SIMD vector changes in it. Some counted operations are for samples that do not change but share a vector with samples that
do; ``needed`` excludes these too.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrrn.kernels.cpu.vector_sweep import PANEL, VECTOR_BYTES
from lrrn.qp import BoxQP
from lrrn.runtime.machine import cores
from lrrn.runtime.threads import blas_threads
from lrrn.solvers import SOLVERS
from lrrn.studies.bench.clock import Settings, measure, threads
from lrrn.studies.bench.problems import random_phase


class Counts(NamedTuple):
    """Numbers of multiply-adds of several sweeps: those performed by the kernel, and those that changed a result."""

    performed: int
    needed: int


def count_multiply_adds(qp: BoxQP, sweeps: int) -> Counts:
    """Count the multiply-adds of ``sweeps`` sweeps from zero over a batch that never stops early.

    Every unit is visited once per sweep, so a unit moved if its activation differs before and after the sweep. Samples fill the
    SIMD vectors in order. A visit costs one multiply-add for the step and one for each later unit of the panel. A panel in
    which a sample of the vector moved costs one for each of its units and each row of its layer and the two adjacent layers.
    """
    stepper = SOLVERS["coordinate_descent"].begin(qp)
    never = torch.zeros(qp.n_samples, dtype=torch.float64)
    lanes = VECTOR_BYTES // qp.q.element_size()
    z = torch.zeros_like(qp.q).clamp_(qp.lo, qp.hi)
    performed = needed = 0
    for _ in range(sweeps):
        before = z.clone()
        stepper.advance(qp, z, stepper.check(qp, z)[0], 1, never)
        step = _sweep_counts(z != before, qp.hessian.sizes, lanes)
        performed, needed = performed + step.performed, needed + step.needed
    return Counts(performed, needed)


def _sweep_counts(moved: Tensor, sizes: tuple[int, ...], lanes: int) -> Counts:
    """Count the operations of one sweep from a mask of moved units, of shape (n, dim)."""
    n = len(moved)
    vectors = -(-n // lanes)
    widths = [-(-size // PANEL) * PANEL for size in sizes]
    performed = needed = 0
    for k, start in enumerate(accumulate((0, *sizes[:-1]))):
        near = slice(max(k - 1, 0), k + 2)
        layer = moved[:, start : start + sizes[k]]
        # (vectors, lanes, panels, PANEL), padded with units and samples that do not move
        padded = torch.zeros(vectors * lanes, widths[k], dtype=torch.bool)
        padded[:n, : sizes[k]] = layer
        updates = int(padded.view(vectors, lanes, -1, PANEL).any(dim=3).any(dim=1).sum())
        visits = vectors * lanes * widths[k] * (1 + (PANEL - 1) / 2)
        performed += int(visits) + updates * lanes * PANEL * sum(widths[near])
        needed += int(layer.sum()) * sum(sizes[near])
    return Counts(performed, needed)


def sweep_rates(settings: Settings) -> list[dict[str, Any]]:
    """Return the rate of eight sweeps from zero at 128 unknowns, and of BLAS, by dtype and number of threads."""
    hidden, n, sweeps, side = (8, 64, 4, 128) if settings.quick else (64, 4096, 8, 1024)
    problem = random_phase((784, hidden, hidden, 10), n, settings.seed)
    records = []
    for dtype in (torch.float64, torch.float32):
        exact = problem.qp
        qp = BoxQP(exact.matrix.to(dtype), exact.q.to(dtype), exact.lo.to(dtype), exact.hi.to(dtype))
        counts = count_multiply_adds(qp, sweeps)
        for n_threads in sorted({1, cores()}):
            seconds, spread = _sweep_seconds(qp, sweeps, n_threads, settings.repeats)
            blas = _blas_rate(dtype, n_threads, side, settings.repeats)
            records.append(
                {
                    "kind": "sweep rate",
                    "dim": qp.dim,
                    "batch": n,
                    "sweeps": sweeps,
                    "dtype": str(dtype).removeprefix("torch."),
                    "threads": n_threads,
                    "performed": counts.performed,
                    "needed": counts.needed,
                    "seconds": seconds,
                    "spread": spread,
                    "performed_per_second": counts.performed / seconds,
                    "needed_per_second": counts.needed / seconds,
                    "blas_per_second": blas,
                }
            )
    return records


def _sweep_seconds(qp: BoxQP, sweeps: int, n_threads: int, repeats: int) -> tuple[float, float]:
    stepper = SOLVERS["coordinate_descent"].begin(qp)
    never = torch.zeros(qp.n_samples, dtype=torch.float64)

    def run() -> None:
        stepper.advance(qp, torch.zeros_like(qp.q), -qp.q, sweeps, never)

    with threads(n_threads), blas_threads(1):
        run()
        return measure(run, max(repeats, 5))


def _blas_rate(dtype: torch.dtype, n_threads: int, side: int, repeats: int) -> float:
    a, b, out = (torch.rand(side, side, dtype=dtype) for _ in range(3))
    with threads(n_threads):
        torch.mm(a, b, out=out)
        seconds, _ = measure(lambda: torch.mm(a, b, out=out), max(repeats, 5))
    return side**3 / seconds
