"""Maximisation of the dual with shared products: a concave quadratic function with bounds, the same Hessian for all samples.

The unknowns are the first multiplier s, of the lead, and the coefficients y of v and of w in the Lagrangian. Samples differ in
the lead m, the linear term q, the bounds of y and the pair of outputs (label i and rival j), which enters through the column
h = h_i - h_j of the Hessian and the entry k = (e_i - e_j)^T K (e_i - e_j):

    maximise  s m + q y - 1/2 (k s^2 + 2 s h y + y G y)  over  s >= 0,  lo <= y <= hi.

A bound is proven for whatever point is returned, so the solver stops early, by rules that depend on no clock.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from lrrn.linalg.blocks import symmetrised

RIDGE = 1e-9
"""Regularisation added to the diagonal of the scaled Hessian, which is singular: it has more multipliers than dimensions."""
PENALTY, RELAXATION = 0.3, 1.6
"""Penalty of the splitting, relative to the Hessian's diagonal, and its over-relaxation."""
STRIDE, LONGEST = 10, 300
"""Iterations of the splitting between two evaluations of the dual, and their largest number."""
GAIN = 1e-5
"""A sample stops when a stride raises the dual by less than this fraction. The rate is linear, so little is left to gain."""
TOGETHER = 256
"""Samples per batch of the splitting, which then fits into a processor's cache."""


@final
class Splitting:
    """Douglas-Rachford splitting (ADMM): each iteration is one product with the inverse of G plus a multiple of its diagonal.

    The inverse is computed once for all samples, which suits Hessians of up to some thousand unknowns. The first multiplier
    is eliminated, so that samples of all pairs of outputs form one batch.
    """

    def __init__(self, hessian: Tensor, cross: Tensor, gram: Tensor) -> None:
        """Prepare for G of shape (d, d), columns h_i of shape (n_outputs, d) and K of shape (n_outputs, n_outputs)."""
        self.scale = hessian.diagonal().clamp(min=1e-300).rsqrt()
        self.hessian = symmetrised(hessian * self.scale * self.scale[:, None])
        shifted = self.hessian + (PENALTY + RIDGE) * torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
        factor, info = torch.linalg.cholesky_ex(shifted)
        self.inverse = torch.cholesky_inverse(factor) if int(info) == 0 else torch.full_like(hessian, math.nan)
        self.cross, self.gram = cross * self.scale, gram
        self.solved = self.cross @ self.inverse

    def maximised(
        self, label: Tensor, rival: Tensor, lead: Tensor, q: Tensor, lo: Tensor, hi: Tensor, goal: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return s and y, approximately optimal or with a dual above ``goal``."""
        parts = [
            self._maximised(*(t[rows] for t in (label, rival, lead, q, lo, hi, goal)))
            for rows in torch.arange(len(q), device=q.device).split(TOGETHER)
        ]
        s, y = (torch.cat(part) for part in zip(*parts, strict=True))
        return s, y * self.scale

    def _maximised(
        self, label: Tensor, rival: Tensor, lead: Tensor, q: Tensor, lo: Tensor, hi: Tensor, goal: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, lo, hi = q * self.scale, lo / self.scale, hi / self.scale
        h, solved = self.cross[label] - self.cross[rival], self.solved[label] - self.solved[rival]
        k = self.gram[label, label] + self.gram[rival, rival] - 2 * self.gram[label, rival]
        left = (k - (h * solved).sum(-1)).clamp(min=1e-300)
        best = torch.full_like(lead, -math.inf)
        s, y = torch.zeros_like(lead), torch.zeros_like(q)
        rows = torch.arange(len(q), device=q.device)
        offset, state = q @ self.inverse, torch.zeros_like(q)
        for _ in range(0, LONGEST, STRIDE):
            for _ in range(STRIDE):
                z = torch.clamp(state, lo, hi)
                # minimise over y and s with the penalty |y - (2 z - state)|^2
                x = torch.addmm(offset, 2 * z - state, self.inverse, alpha=PENALTY)
                first = ((lead - (h * x).sum(-1)) / left).clamp(min=0.0)
                x.addcmul_(solved, first[:, None], value=-1)
                state = torch.add(state, x.sub_(z), alpha=RELAXATION)
            z = torch.clamp(state, lo, hi)
            first = ((lead - (h * z).sum(-1)) / k.clamp(min=1e-300)).clamp(min=0.0)
            value = first * (lead - (h * z).sum(-1)) - k * first.square() / 2 + ((q - z @ self.hessian / 2) * z).sum(-1)
            gained = value - best[rows]
            better = gained > 0
            best[rows[better]], s[rows[better]], y[rows[better]] = value[better], first[better], z[better]
            keep = ((gained.abs() > GAIN * value.abs()) & (value < goal)).nonzero().squeeze(1)
            if len(keep) == 0:
                break
            if len(keep) < len(rows):
                rows, state, lead, goal, k, left = (t[keep] for t in (rows, state, lead, goal, k, left))
                q, lo, hi, h, solved, offset = (t[keep] for t in (q, lo, hi, h, solved, offset))
        return s, y
