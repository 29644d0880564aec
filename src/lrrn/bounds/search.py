"""Optimisation of multipliers: L-BFGS on a smoothed largest eigenvalue. Results are estimates, not proven bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

SHARPNESS = (100.0, 3000.0)
"""Parameters of the smoothed largest eigenvalue, in order: larger values are closer to the largest eigenvalue."""


def gain(h: Tensor, root: Tensor, lam: Tensor, c: Tensor, sharpness: float) -> tuple[float, Tensor | None]:
    """Return the square of the unproven constant of multipliers for |C v|, and its gradient in the multipliers.

    It is the largest eigenvalue of R^T Lam S^-1 Lam R, smoothed if ``sharpness`` is finite, and without a gradient
    otherwise; infinite if S is not positive definite. ``root`` is R, of shape (m, r), with R R^T = B B^T.
    """
    s = lam[:, None] * h + h * lam - c.mT @ c
    factor, info = torch.linalg.cholesky_ex(s)
    if int(info) != 0:
        return math.inf, None
    right = lam[:, None] * root
    y = torch.cholesky_solve(right, factor)
    product = right.mT @ y
    if not bool(product.isfinite().all()):
        return math.inf, None
    values, vectors = torch.linalg.eigh(product)
    top = float(values[-1])
    if not math.isfinite(sharpness) or not top > 0:
        return top, None
    scaled = (values / top - 1) * sharpness
    share = torch.softmax(scaled, 0)
    excess = float(torch.logsumexp(scaled, 0)) / sharpness
    # smoothing is relative to the largest eigenvalue, which therefore adds a term to the derivative
    share[-1] += 1 + excess - float(share @ values) / top
    keep = share > 1e-9
    share, vectors = share[keep], vectors[:, keep]
    directions = y @ vectors
    return top * (1 + excess), 2 * ((directions * (root @ vectors - h @ directions)) @ share)


def minimised(
    value: Callable[[Tensor, float], tuple[float, Tensor | None]], lam: Tensor, free: Tensor, evaluations: int
) -> Tensor:
    """Minimise a constant over multipliers by L-BFGS, starting at ``lam``; never return something worse than the start.

    ``value`` maps multipliers and sharpness to the square of the constant and its gradient, like :func:`gain`. It is called
    at most ``evaluations`` times: unlike a time budget, this gives the same result on every machine. Multipliers that are
    ``free`` may have either sign; the others stay positive.
    """
    from scipy.optimize import minimize

    scale = lam.abs().clamp(min=1e-30)
    best, best_lam = value(lam, math.inf)[0], lam

    def unpack(theta: np.ndarray) -> Tensor:
        # optimise the logarithm, which keeps multipliers of constrained units positive
        t = torch.from_numpy(theta).to(lam)
        return torch.where(free, scale * t, scale * t.exp())

    def objective(theta: np.ndarray, sharpness: float) -> tuple[float, np.ndarray]:
        trial = unpack(theta)
        height, gradient = value(trial, sharpness)
        if gradient is None or not 0 < height < math.inf:
            return 1e6, np.zeros_like(theta)
        return math.log(height), (torch.where(free, scale, trial) * gradient / height).cpu().numpy()

    if len(lam) == 0 or not best < math.inf:
        return lam
    for sharpness in SHARPNESS:
        begin = torch.where(free, best_lam / scale, (best_lam / scale).clamp(min=1e-30).log())
        options = {"maxfun": -(-evaluations // len(SHARPNESS)), "maxiter": 10_000, "maxcor": 20, "ftol": 1e-9, "gtol": 1e-9}
        found = minimize(objective, begin.cpu().numpy(), args=(sharpness,), jac=True, method="L-BFGS-B", options=options)
        trial = unpack(found.x)
        height = value(trial, math.inf)[0]
        if height < best:
            best, best_lam = height, trial
    return best_lam
