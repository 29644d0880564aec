"""Outputs and their slopes in the input, for whoever walks towards a decision boundary: many inputs, no parameters."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from lrrn.network import LRRN
from lrrn.qp import row_norms
from lrrn.solvers import solve

TOL, AIM = 1e-6, 1e-10
"""Slopes are solved to ``AIM`` while that makes progress. What they lead to is checked by :meth:`LRRN.infer`, not believed."""


@final
class Slopes:
    """The output of a network and its derivatives in x, in float64.

    Every derivative is a combination of the rows of the first weight matrix, so it is handed around as its coefficients.

    Parameters
    ----------
    net : LRRN
        Its parameters are copied.
    """

    def __init__(self, net: LRRN) -> None:
        self._energy = net.energy_snapshot(torch.float64)
        self.n_outputs = net.sizes[-1]
        self.first = self._energy.weights[0]
        self._gram = self.first @ self.first.mT

    def outputs(self, x: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the stacked minimisers, of shape (n, dim), and the outputs, of shape (n, d_L)."""
        z = solve(self._energy.free(x), tol=TOL, aim=AIM, start=start).z
        return z, self._energy.activations(x, z)[-1]

    def coefficients(self, z: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of v^T z_L in x, per sample, as coefficients of the rows of W_0.

        Parameters
        ----------
        z : Tensor of shape (n, dim)
            Stacked minimisers.
        v : Tensor of shape (n, d_L)

        Returns
        -------
        Tensor of shape (n, d_1)
            dv^T z_L / dx is this times W_0.
        """
        energy = self._energy
        if energy.n_free == 0:
            return v
        pull = v @ energy.weights[-1] if energy.eliminated else v
        size = row_norms(pull)[:, None]
        push = z.new_zeros(z.shape)
        push[:, -pull.shape[1] :] = pull / torch.where(size > 0, size, 1)
        w = solve(energy.adjoint(z, push), tol=TOL, aim=AIM).z
        # d/dx = a_0 (1 + beta_0) W_0^T w_1, as in lrrn.implicit
        return w[:, : energy.sizes[1]] * (size * (energy.discounts[0] * (1 + energy.beta[0])))

    def jacobian(self, z: Tensor) -> Tensor:
        """Return the coefficients of every output's gradient, of shape (n, d_L, d_1)."""
        unit = torch.eye(self.n_outputs, dtype=z.dtype, device=z.device)
        flat = self.coefficients(z.repeat_interleave(self.n_outputs, 0), unit.repeat(len(z), 1))
        return flat.unflatten(0, (len(z), self.n_outputs))

    def lengths(self, coefficients: Tensor) -> Tensor:
        """Return the Euclidean norms of gradients given by coefficients in the last dimension."""
        return ((coefficients @ self._gram) * coefficients).sum(-1).clamp(min=0.0).sqrt()

    def spectral(self, jacobian: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest singular value of each Jacobian and the input direction it belongs to, of norm one."""
        # J J^T is only d_L x d_L
        values, vectors = torch.linalg.eigh(jacobian @ self._gram @ jacobian.mT)
        direction = (vectors[..., -1:] * jacobian).sum(-2) @ self.first
        return values[..., -1].clamp(min=0.0).sqrt(), normalised(direction)

    def rivals(self, x: Tensor, label: Tensor) -> Tensor:
        """Order the other outputs by how near the boundary to each looks from x, of shape (n, d_L - 1)."""
        z, y = self.outputs(x)
        jacobian, row = self.jacobian(z), torch.arange(len(x), device=x.device)
        lead = y[row, label][:, None] - y
        distance = lead / self.lengths(jacobian[row, label][:, None] - jacobian)
        distance = torch.nan_to_num(distance, nan=torch.finfo(y.dtype).max).scatter(1, label[:, None], math.inf)
        return distance.argsort(dim=1, stable=True)[:, :-1]


def normalised(v: Tensor) -> Tensor:
    """Return rows of norm one; rows of zeros stay."""
    size = row_norms(v)[..., None]
    return v / torch.where(size > 0, size, 1)
