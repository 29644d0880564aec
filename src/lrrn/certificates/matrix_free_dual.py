"""Maximises the shared dual with one multiplier per layer, by products with the layers' operators.

For fixed multipliers of the products, the dual is a concave quadratic function of the coefficients p of v and r of w plus
bounds and slopes of single unknowns. Its gradient is the minimiser of the Lagrangian: v in p and w + g in r. That minimiser
has a closed form for one layer with the multiplier that needs no inverse, and comes from conjugate gradients otherwise.
The methods that maximise the dual of a batch are in ``dual_batches``. A bound is proven for whatever they return, so float32
will do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from lrrn.certificates.block_multipliers import without_norms
from lrrn.certificates.complementarity import Faces, Sample
from lrrn.certificates.dual_batches import Ascent, Response, Splitting
from lrrn.certificates.layer_spectrum import Spectrum
from lrrn.runtime.lazy import lazy

if TYPE_CHECKING:
    from lrrn.certificates.matrix_free import Pulls

INPUTS = 4096
"""Largest number of inputs of a layer whose dual is maximised by splitting."""
INNER, ROUGH = 8, 30
"""Steps of conjugate gradients per iteration, from the last minimiser; and for estimating a curvature."""
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-11}
"""Relative residual at which conjugate gradients stop early."""
BALANCE = 2.0
"""Step of r relative to that of p, each in units of its own curvature."""
ROUNDS, SAFETY = 20, 1.1
"""Iterations for estimating a largest curvature, and the factor by which steps are shortened, since the estimate is low."""


@final
class MatrixFreeSolver:
    """The dual of a network's Lagrangian in the dtype of its operators; common to all samples and pairs of outputs.

    Parameters
    ----------
    pulls : Pulls
        Gradients of the energy.
    scalars : sequence of float
        Multipliers of the products, one per layer.
    below, above, fixed : Tensor of shape (dim,)
        Which units have a lower and an upper bound, and which cannot move.
    """

    def __init__(self, pulls: Pulls, scalars: Sequence[float], below: Tensor, above: Tensor, fixed: Tensor) -> None:
        self.pulls, self.below, self.above, self.fixed = pulls, below, above, fixed
        self.scalars = tuple(scalars)
        like = pulls.operators[0].weight
        self.dtype = like.dtype
        self.lam = torch.cat([like.new_full((n,), s) for n, s in zip(pulls.sizes, scalars, strict=True)])
        simple = without_norms(pulls.beta[0], pulls.discounts[0])
        self.simple = len(scalars) == 1 and scalars[0] == simple

    @property
    def splits(self) -> bool:
        """Whether the dual is maximised by splitting, which needs the eigenvectors of a matrix of the size of the inputs."""
        return len(self.scalars) == 1 and self.pulls.operators[0].shape[1] <= INPUTS

    @lazy
    def spectrum(self) -> Spectrum:
        """Eigenvectors and eigenvalues of the only layer."""
        return Spectrum(self.pulls.operators[0], self.pulls.discounts[0], self.pulls.beta[0], self.scalars[0])

    def prepare(self) -> None:
        """Compute what is common to all samples."""
        if self.splits:
            self.spectrum  # noqa: B018
        else:
            self.steps  # noqa: B018

    def response(self, p: Tensor, r: Tensor, start: Response | None = None, steps: int = INNER) -> Response:
        """Return the Lagrangian's minimiser, for coefficients p of v and r of w; approximately, from ``start``."""
        return self._closed(p, r) if self.simple else self._iterated(p, r, start, steps)

    def _closed(self, p: Tensor, r: Tensor) -> Response:
        """One layer: the form in v, after minimising over u, is a multiple of the identity."""
        pulls, lam = self.pulls, self.scalars[0]
        operator, a, beta = pulls.operators[0], pulls.discounts[0], pulls.beta[0]
        t = operator.adjoint(r)
        b = p + a * r + (a * beta - lam * (a * (1 + beta)) ** 2 / 2) * operator.apply(t)
        v = b / (-2 * lam * a)
        back = operator.adjoint(v)
        u = (lam * back + t) * (a * (1 + beta) / 2)
        return Response(v, a * (v + operator.apply(beta * back - (1 + beta) * u)), -b)

    def _iterated(self, p: Tensor, r: Tensor, start: Response | None, steps: int) -> Response:
        """Conjugate gradients, preconditioned by the diagonal."""
        pulls, first, tiny = self.pulls, self.pulls.sizes[0], torch.finfo(self.dtype).tiny
        half = pulls.discounts[0] * (1 + pulls.beta[0]) / 2
        t = pulls.operators[0].adjoint(r[:, :first])
        b = p + pulls.of_v(half * self.scalars[0] * t, r, t)
        v, bent = (torch.zeros_like(p), torch.zeros_like(p)) if start is None else (start.v, start.bent)
        residual = -(bent + b)
        ahead = self.inverse_diagonal * residual
        direction, energy = ahead, (residual * ahead).sum(-1, keepdim=True)
        enough = CLOSE[self.dtype] ** 2 * (b * self.inverse_diagonal * b).sum(-1, keepdim=True)
        for k in range(steps):
            bent_step = self._bent(direction)
            # a direction without curvature is zero: its sample has converged
            step = energy / (direction * bent_step).sum(-1, keepdim=True).clamp(min=tiny)
            v, bent, residual = v + step * direction, bent + step * bent_step, residual - step * bent_step
            ahead = self.inverse_diagonal * residual
            now = (residual * ahead).sum(-1, keepdim=True)
            if k % 10 == 9 and bool((now <= enough).all()):
                break
            direction = ahead + now / energy.clamp(min=tiny) * direction
            energy = now
        back = pulls.operators[0].adjoint(v[:, :first])
        return Response(v, pulls.of_v(half * (self.scalars[0] * back + t), v, back), bent)

    def _bent(self, v: Tensor) -> Tensor:
        """Return twice the product of v with the form in v that minimising over u leaves."""
        pulls, lam = self.pulls, self.scalars
        blocks = v.split(pulls.sizes, -1)
        found: list[Tensor] = []
        for k, (operator, a, beta) in enumerate(zip(pulls.operators, pulls.discounts, pulls.beta, strict=True)):
            above, back = blocks[k], operator.adjoint(blocks[k])
            weight = 2 * a * lam[k] * beta - ((lam[0] * a * (1 + beta)) ** 2 / 2 if k == 0 else 0.0)
            here = 2 * a * lam[k] * above + operator.apply(weight * back)
            if k > 0:
                below, cross = blocks[k - 1], a * (1 + beta) * (lam[k - 1] + lam[k])
                forth = operator.apply(below)
                down = 2 * a * lam[k - 1] * (beta * below + operator.adjoint(forth)) - cross * back
                found[-1], here = found[-1] + down, here - cross * forth
            found.append(here)
        return torch.cat(found, -1)

    @lazy
    def inverse_diagonal(self) -> Tensor:
        """Inverse diagonal of twice the form in v after minimising over u."""
        pulls = self.pulls
        squares = [operator.squares() for operator in pulls.operators]
        blocks = []
        for k, (rows, _) in enumerate(squares):
            block = pulls.discounts[k] * (1 + pulls.beta[k] * rows)
            if k + 1 < len(squares):
                block = block + pulls.discounts[k + 1] * (squares[k + 1][1] + pulls.beta[k + 1])
            blocks.append(block)
        diagonal = 2 * self.lam * torch.cat(blocks)
        first = pulls.sizes[0]
        gain = pulls.discounts[0] * (1 + pulls.beta[0])
        diagonal[:first] -= (self.lam[:first] * gain).square() * squares[0][0] / 2
        return 1 / diagonal.clamp(min=1e-30)

    @lazy
    def steps(self) -> tuple[Tensor, Tensor]:
        """Step lengths of p and of r, one number per layer each."""
        blocks = []
        for part in range(2):
            sizes = []
            for k, n in enumerate(self.pulls.sizes):
                keep = torch.zeros_like(self.lam)
                keep[sum(self.pulls.sizes[:k]) :][:n] = 1.0
                sizes.append(self._curvature(*((keep, keep * 0) if part == 0 else (keep * 0, keep))))
            blocks.append(torch.cat([self.lam.new_full((n,), 1 / c) for n, c in zip(self.pulls.sizes, sizes, strict=True)]))
        p, r = blocks[0], blocks[1] * BALANCE**2
        whole = self._curvature(p.sqrt(), r.sqrt()) * SAFETY
        return p / whole, r / whole

    def _curvature(self, p_scale: Tensor, r_scale: Tensor) -> float:
        """Estimate the largest curvature of the dual in scaled unknowns, by power iteration; not a bound."""
        random = torch.randn((2, len(self.lam)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        p, r = random.to(self.lam).split(1)
        size = self.lam.new_ones(())
        for _ in range(ROUNDS):
            v, w, _ = self.response(p * p_scale / size, r * r_scale / size, steps=ROUGH)
            p, r = -v * p_scale, -w * r_scale
            size = (p.square().sum() + r.square().sum()).sqrt().clamp(min=1e-30)
        return float(size)

    def maximised(
        self, c: Tensor, lead: Tensor, sample: Sample, goal: Tensor, faces: Faces | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return sigma, p and r in float64, approximately optimal or with a dual above ``goal``.

        Parameters
        ----------
        c : Tensor of shape (n, dim)
            Coefficients of v in the leads.
        lead, goal : Tensor of shape (n,)
        sample : Sample
            A batch.
        faces : Faces, optional
            Conditions that hold as equations.
        """
        # the solution is proportional to lead, distances and slack
        unit = lead[:, None]
        run = (Splitting if self.splits else Ascent)(
            self,
            c.to(self.dtype),
            torch.where(self.below, sample.low / unit, math.inf).to(self.dtype),
            (sample.high / unit).to(self.dtype),
            (sample.slack / unit).to(self.dtype),
            (goal / lead.square()).to(self.dtype),
            faces=faces,
        )
        sigma, p, r = (t.to(torch.float64) for t in run.best())
        return sigma * lead, p * unit, r * unit
