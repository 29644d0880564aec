"""Differentiating the minimiser: the forward pass solves the free phase, the backward pass its adjoint.

With v = dloss/dz* and w the solution of the adjoint QP, dloss/dtheta = -d/dtheta of the slope of E at z* along w: the
symmetric contrastive difference 1/2 [E(z* + w) - E(z* - w)], the limit of equilibrium propagation. Nothing is unrolled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lrrn.derivatives import slope_gradients
from lrrn.energy import LiftedEnergy
from lrrn.qp import BoxQP, QPSolution, row_norms

EnergyOf = Callable[[Sequence[Tensor]], LiftedEnergy]


class SolvePhase(Protocol):
    """Solves one phase, by whatever means the network is set to, and reports how it went."""

    def __call__(self, qp: BoxQP, what: str, start: Tensor | None = None) -> QPSolution:
        """Return the solution of ``qp``; ``what`` names it in reports."""
        ...


def minimiser(
    energy_of: EnergyOf, solve: SolvePhase, x: Tensor, parameters: Sequence[Tensor], start: Tensor | None = None
) -> Tensor:
    """Return the stacked minimiser of the free phase, differentiable once in ``x`` and the parameters.

    Parameters
    ----------
    energy_of : callable
        Builds the energy from a list of parameters in the order given here.
    solve : callable
        Solves the free phase and, in the backward pass, its adjoint.
    x : Tensor of shape (n, d_0)
    parameters : sequence of Tensor
        All of the dtype of ``x``.
    start : Tensor of shape (n, dim), optional
        Where to start the free phase.

    Returns
    -------
    Tensor of shape (n, dim)
    """
    return _Minimiser.apply(energy_of, solve, start, x, *parameters)


@final
class _Minimiser(torch.autograd.Function):
    """x, parameters -> the stacked minimiser of the free phase, with the implicit gradient."""

    @staticmethod
    def forward(
        ctx: Any, energy_of: EnergyOf, solve: SolvePhase, start: Tensor | None, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.solve = solve
        ctx.energy = energy_of([p.detach() for p in parameters])
        solved = solve(ctx.energy.free(x), "forward pass", start)
        ctx.save_for_backward(x, solved.z, *parameters)
        return solved.z

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (v,) = grad_outputs
        x, z, *parameters = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            # the adjoint is linear in v, so solve it for unit vectors: tol is then relative to the gradient itself
            size = row_norms(v)[:, None].to(v.dtype)
            unit = v / torch.where(size > 0, size, 1)
            w = ctx.solve(ctx.energy.adjoint(z, unit), "adjoint").z * size
            slopes = slope_gradients(ctx.energy, x, z, w).flat()
            d_x = torch.zeros_like(x)
            if ctx.needs_input_grad[3] and ctx.energy.n_free:
                # dloss/dx = a_0 (1 + beta_0) W_0^T w_1
                first = w[:, : ctx.energy.sizes[1]]
                d_x = (first @ ctx.energy.weights[0]).mul_(ctx.energy.discounts[0] * (1 + ctx.energy.beta[0]))
            grads = (d_x, *(slope.neg_() for slope in slopes))
        if torch.is_grad_enabled():
            grads = tuple(_FirstDerivativeOnly.apply(grad, v, x, *parameters) for grad in grads)
        return None, None, None, *grads


@final
class _FirstDerivativeOnly(torch.autograd.Function):
    """Passes a gradient through and refuses to differentiate it."""

    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor, *anchors: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            "LRRN has first derivatives only: its prediction is piecewise affine in x, and second derivatives in the "
            "parameters are not implemented. Do not differentiate through a gradient taken with create_graph=True"
        )
