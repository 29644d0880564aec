"""Differentiating the minimiser: the forward pass solves the free phase, the backward pass its adjoint.

With v = dloss/dz* and w the solution of the adjoint QP, dloss/dtheta = -d/dtheta of the slope of E at z* along w: the
symmetric contrastive difference 1/2 [E(z* + w) - E(z* - w)], the limit of equilibrium propagation. Nothing is unrolled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lrrn.compact import Compact, Tolerances, applies
from lrrn.derivatives import slope_gradients
from lrrn.energy import LiftedEnergy
from lrrn.qp import BoxQP, QPSolution, row_norms

FORWARD, ADJOINT = "forward pass", "adjoint"
"""Names of the solves in reports."""


class Phases(Protocol):
    """A network as seen from here: it solves phases by whatever means it is set to, and hears how that went."""

    def energy_of(self, parameters: Sequence[Tensor]) -> LiftedEnergy:
        """Build the energy of a list of parameters."""
        ...

    def solve_phase(self, qp: BoxQP, what: str, start: Tensor | None = None) -> QPSolution:
        """Return the solution of ``qp``; ``what`` names it in reports."""
        ...

    def compact_tolerances(self, dtype: torch.dtype) -> Tolerances | None:
        """Return what the compiled passes of small batches should reach, or None if they should not be used."""
        ...

    def report(self, solution: QPSolution, scale: Tensor, tol: float, what: str) -> None:
        """Hear of a solve that went without :meth:`solve_phase`."""
        ...


def minimiser(
    phases: Phases, x: Tensor, parameters: Sequence[Tensor], start: Tensor | None = None, energy: LiftedEnergy | None = None
) -> Tensor:
    """Return the stacked minimiser of the free phase, differentiable once in ``x`` and the parameters.

    Parameters
    ----------
    phases : Phases
        Solves the free phase and, in the backward pass, its adjoint.
    x : Tensor of shape (n, d_0)
    parameters : sequence of Tensor
        All of the dtype of ``x``.
    start : Tensor of shape (n, dim), optional
        Where to start the free phase.
    energy : LiftedEnergy, optional
        That of these parameters, detached, where it is at hand: its Hessian is not built again.

    Returns
    -------
    Tensor of shape (n, dim)
    """
    return _Minimiser.apply(phases, start, energy, x, *parameters)


@final
class _Minimiser(torch.autograd.Function):
    """x, parameters -> the stacked minimiser of the free phase, with the implicit gradient."""

    @staticmethod
    def forward(
        ctx: Any, phases: Phases, start: Tensor | None, energy: LiftedEnergy | None, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.phases, ctx.compact = phases, None
        ctx.energy = phases.energy_of([p.detach() for p in parameters]) if energy is None else energy
        tolerances = phases.compact_tolerances(x.dtype)
        z = None
        if tolerances is not None and applies(ctx.energy, x):
            compact = Compact(ctx.energy, parameters, x, tolerances)
            found = compact.minimise(start)
            start = found.solution.z
            if found.converged:
                phases.report(found.solution, found.scale, tolerances.must, FORWARD)
                ctx.compact, z = compact, start
        if z is None:
            z = phases.solve_phase(ctx.energy.free(x), FORWARD, start).z
        ctx.save_for_backward(x, z, *parameters)
        return z

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (v,) = grad_outputs
        x, z, *parameters = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            found = None if ctx.compact is None else ctx.compact.adjoint(v, ctx.needs_input_grad[3])
            if found is None:
                grads = _general_backward(ctx, v, x, z)
            else:
                ctx.phases.report(found.solution, found.scale, ctx.compact.tolerances.must, ADJOINT)
                grads = (found.d_x, *found.derivatives)
        if torch.is_grad_enabled():
            grads = tuple(None if grad is None else _FirstDerivativeOnly.apply(grad, v, x, *parameters) for grad in grads)
        return None, None, None, *grads


def _general_backward(ctx: Any, v: Tensor, x: Tensor, z: Tensor) -> tuple[Tensor | None, ...]:
    # the adjoint is linear in v, so solve it for unit vectors: tol is then relative to the gradient itself
    size = row_norms(v)[:, None].to(v.dtype)
    unit = v / torch.where(size > 0, size, 1)
    w = ctx.phases.solve_phase(ctx.energy.adjoint(z, unit), ADJOINT).z * size
    d_x = torch.zeros_like(x)
    if ctx.needs_input_grad[3] and ctx.energy.n_free:
        # dloss/dx = a_0 (1 + beta_0) W_0^T w_1
        first = w[:, : ctx.energy.sizes[1]]
        d_x = (first @ ctx.energy.weights[0]).mul_(ctx.energy.discounts[0] * (1 + ctx.energy.beta[0]))
    if not any(ctx.needs_input_grad[4:]):
        return d_x, *(None for _ in ctx.needs_input_grad[4:])
    return d_x, *(slope.neg_() for slope in slope_gradients(ctx.energy, x, z, w).flat())


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
