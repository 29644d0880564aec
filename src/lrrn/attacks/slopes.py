"""Outputs and their gradients with respect to the input, in batches; no gradients with respect to parameters."""

from __future__ import annotations

import math
from typing import Protocol, final

import torch
from torch import Tensor, nn

from lrrn.network import LRRN
from lrrn.qp import BoxQP, row_norms
from lrrn.solvers import solve

TOL, AIM = {torch.float64: 1e-6, torch.float32: 1e-4}, {torch.float64: 1e-10, torch.float32: 1e-5}
"""Tolerance and target residual of the solves: they go on to ``AIM`` while they make progress. The resulting attacks are
confirmed by :meth:`LRRN.infer`, in float64."""
WIDE = 512
"""Number of units from which on solves are in float32, as they always are on a GPU: more digits are expensive there, and a
search does not need them."""


class Surface(Protocol):
    """Interface of a model under attack: outputs in float64, and gradients represented by coefficients.

    ``numbers`` is the count of numbers that the gradients of one sample's outputs take.
    """

    n_inputs: int
    n_outputs: int
    n_coefficients: int
    numbers: int
    device: torch.device

    def labels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels of an ordinary prediction at x, and whether each is reliable."""

    def outputs(self, x: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return a state from which gradients are computed, of shape (n, m), and the outputs, of shape (n, n_outputs)."""

    def coefficients(self, z: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of v^T y in x, per sample, as coefficients of shape (n, n_coefficients)."""

    def gradient(self, coefficients: Tensor) -> Tensor:
        """Return the gradient itself, of shape (n, n_inputs)."""

    def lengths(self, coefficients: Tensor) -> Tensor:
        """Return the Euclidean norms of gradients given by coefficients in the last dimension."""


def surface(model: nn.Module, n_inputs: int) -> Surface:
    """Return the attack interface of a network, or of any module from float64 inputs of shape (n, n_inputs) to scores."""
    return Slopes(model) if isinstance(model, LRRN) else ModuleSlopes(model, n_inputs)


@final
class Slopes:
    """The output of a network and its derivatives with respect to x, as float64 numbers; the parameters are copied.

    The solves behind them are in float64, or from ``WIDE`` units on and on a GPU in float32. Every derivative is a linear
    combination of the rows of the first weight matrix, and is represented by its coefficients. A first layer that is not a
    matrix may have more units than inputs: derivatives are then represented as they are.
    """

    def __init__(self, net: LRRN) -> None:
        self._net = net
        precise = sum(net.sizes[1:]) < WIDE and net.W[0].device.type == "cpu"
        self._dtype = torch.float64 if precise else torch.float32
        self._energy = net.energy_snapshot(self._dtype)
        self.n_inputs, self.n_outputs = net.sizes[0], net.sizes[-1]
        self._direct = self._energy.layers is not None
        self._first = self._energy.weights[0].to(torch.float64)
        self.n_coefficients = self.n_inputs if self._direct else len(self._first)
        self.numbers, self.device = self.n_outputs * sum(net.sizes[1:]), self._first.device
        self._gram = None if self._direct else self._first @ self._first.mT

    def labels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels that :meth:`LRRN.infer` computes, and whether its solves converged."""
        solution = self._net.infer(x)
        return solution.output.argmax(-1), solution.converged

    def outputs(self, x: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the stacked minimisers, of shape (n, dim), and the outputs, of shape (n, d_L)."""
        x = x.to(self._dtype)
        z = self._solved(self._energy.free(x), start)
        return z, self._energy.activations(x, z)[-1].to(torch.float64)

    def _solved(self, qp: BoxQP, start: Tensor | None = None) -> Tensor:
        return solve(qp, tol=TOL[self._dtype], aim=AIM[self._dtype], start=start).z

    def coefficients(self, z: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of v^T z_L in x at stacked minimisers: this times W_0, of shape (n, d_1)."""
        energy, v = self._energy, v.to(self._dtype)
        if energy.n_free == 0:
            return self._represented(v)
        pull = energy.operators[-1].adjoint(v) if energy.eliminated else v
        size = row_norms(pull)[:, None]
        push = z.new_zeros(z.shape)
        push[:, -pull.shape[1] :] = pull / torch.where(size > 0, size, 1)
        w = self._solved(energy.adjoint(z, push))
        # d/dx = a_0 (1 + beta_0) W_0^T w_1, as in lrrn.network.implicit
        return self._represented(w[:, : energy.sizes[1]] * (size * (energy.discounts[0] * (1 + energy.beta[0]))))

    def _represented(self, by_unit: Tensor) -> Tensor:
        return (self._energy.operators[0].adjoint(by_unit.to(self._dtype)) if self._direct else by_unit).to(torch.float64)

    def gradient(self, coefficients: Tensor) -> Tensor:
        """Return coefficients times W_0."""
        return coefficients if self._direct else coefficients @ self._first

    def _products(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the inner products of gradients given by coefficients, over all pairs of rows."""
        return (left if self._gram is None else left @ self._gram) @ right.mT

    def lengths(self, coefficients: Tensor) -> Tensor:
        """Return the Euclidean norms of gradients given by coefficients in the last dimension."""
        own = coefficients if self._gram is None else coefficients @ self._gram
        return (own * coefficients).sum(-1).clamp(min=0.0).sqrt()

    def spectral(self, jacobian: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest singular value of each Jacobian and its right singular vector, of norm one."""
        # J J^T is only d_L x d_L
        values, vectors = torch.linalg.eigh(self._products(jacobian, jacobian))
        direction = self.gradient((vectors[..., -1:] * jacobian).sum(-2))
        return values[..., -1].clamp(min=0.0).sqrt(), normalised(direction)


@final
class ModuleSlopes:
    """The scores of any differentiable module and their gradients. The coefficients are the gradients themselves.

    The module maps float64 inputs of shape (n, n_inputs) to float64 scores, row by row; the largest score is the label.
    """

    def __init__(self, module: nn.Module, n_inputs: int) -> None:
        self._module = module
        self.device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        with torch.no_grad():
            self.n_outputs = module(torch.zeros((1, n_inputs), dtype=torch.float64, device=self.device)).shape[-1]
        self.n_inputs = self.n_coefficients = n_inputs
        self.numbers = self.n_outputs * n_inputs

    def labels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the largest scores; a label is reliable if its scores are finite."""
        scores = self._module(x)
        return scores.argmax(-1), scores.isfinite().all(-1)

    def outputs(self, x: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return x itself and the scores."""
        return x, self._module(x)

    def coefficients(self, z: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of v^T y in x."""
        with torch.enable_grad():
            leaf = z.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad((self._module(leaf) * v).sum(), leaf)
        return slope

    def gradient(self, coefficients: Tensor) -> Tensor:
        """Return the coefficients, which are the gradient."""
        return coefficients

    def lengths(self, coefficients: Tensor) -> Tensor:
        """Return Euclidean norms."""
        return torch.linalg.vector_norm(coefficients, dim=-1)


def jacobian(of: Surface, z: Tensor) -> Tensor:
    """Return the coefficients of every output's gradient, of shape (n, n_outputs, n_coefficients)."""
    unit = torch.eye(of.n_outputs, dtype=z.dtype, device=z.device)
    flat = of.coefficients(z.repeat_interleave(of.n_outputs, 0), unit.repeat(len(z), 1))
    return flat.unflatten(0, (len(z), of.n_outputs))


def nearest_rivals(of: Surface, x: Tensor, label: Tensor) -> Tensor:
    """Sort the other outputs by the linearised distance from x to their decision boundary, of shape (n, n_outputs - 1)."""
    z, y = of.outputs(x)
    slopes, row = jacobian(of, z), torch.arange(len(x), device=x.device)
    lead = y[row, label][:, None] - y
    distance = lead / of.lengths(slopes[row, label][:, None] - slopes)
    distance = torch.nan_to_num(distance, nan=torch.finfo(y.dtype).max).scatter(1, label[:, None], math.inf)
    return distance.argsort(dim=1, stable=True)[:, :-1]


def normalised(v: Tensor) -> Tensor:
    """Scale rows to norm one; zero rows are unchanged."""
    size = row_norms(v)[..., None]
    return v / torch.where(size > 0, size, 1)
