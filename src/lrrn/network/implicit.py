"""Differentiating the minimiser: the forward pass solves the free phase, the backward pass its adjoint.

With v = dloss/dz* and w the solution of the adjoint QP, dloss/dtheta = -d/dtheta of the slope of E at z* along w: the
symmetric contrastive difference 1/2 [E(z* + w) - E(z* - w)], the limit of equilibrium propagation. The solver is not unrolled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd.function import FunctionCtx

from lrrn.energy import LiftedEnergy
from lrrn.energy.adjoint import unit_adjoint
from lrrn.energy.derivatives import slope_gradients
from lrrn.network.policy import ADJOINT, FORWARD, SolvePolicy
from lrrn.network.small_batch import SmallBatch, Structure, fit
from lrrn.network.transforms import EnergyOf, refuse_mapped, transformable_minimiser, transforms_active


def minimiser(
    energy_of: EnergyOf,
    policy: SolvePolicy,
    x: Tensor,
    parameters: Sequence[Tensor],
    start: Tensor | None = None,
    energy: LiftedEnergy | None = None,
) -> Tensor:
    """Return the stacked minimiser of the free phase, of shape (n, dim), differentiable once in ``x`` and the parameters.

    Parameters
    ----------
    energy_of : callable
        Maps parameters to their energy.
    policy : SolvePolicy
        Solver settings of the free phase and, in the backward pass, of its adjoint.
    x : Tensor of shape (n, d_0)
    parameters : sequence of Tensor
        All have the dtype of ``x``.
    start : Tensor of shape (n, dim), optional
        Warm start of the free phase.
    energy : LiftedEnergy, optional
        Energy of these parameters, detached. If given, its Hessian is reused instead of being built again.
    """
    if transforms_active():
        return transformable_minimiser(energy_of, policy, x, parameters)
    structure = fit(policy, energy_of(parameters) if energy is None else energy, x)
    return _Minimiser.apply(_Way(energy_of, policy, structure, False), energy, start, x, *parameters)


def prediction(energy_of: EnergyOf, policy: SolvePolicy, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the prediction at the :func:`minimiser`, of shape (n, d_L), differentiable once in ``x`` and the parameters.

    The compiled passes for small batches compute the output themselves: a separate read-out would add a third to their time.
    """
    energy = energy_of(parameters)
    if transforms_active():
        return energy.output(x, transformable_minimiser(energy_of, policy, x, parameters))
    structure = fit(policy, energy, x)
    compiled = structure is not None
    z_or_output: Tensor = _Minimiser.apply(_Way(energy_of, policy, structure, compiled), None, None, x, *parameters)
    return z_or_output if compiled else energy.output(x, z_or_output)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast if it is enabled; otherwise return a null context, which is cheaper to enter."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class _Way(NamedTuple):
    """Settings of the forward and backward pass, and whether they are for the output or for the stacked minimiser."""

    energy_of: EnergyOf
    policy: SolvePolicy
    structure: Structure | None
    reads_out: bool


@final
class _Minimiser(torch.autograd.Function):
    """x, parameters -> the stacked minimiser of the free phase, or the output there, with the implicit gradient."""

    @staticmethod
    def forward(
        ctx: Any, way: _Way, energy: LiftedEnergy | None, start: Tensor | None, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.way, ctx.small, ctx.energy = way, None, energy
        if way.structure is not None:
            flat = _flatten_dense_tensors(parameters)
            small = SmallBatch(way.structure, flat, x, way.policy.tolerances(x.dtype))
            found = small.minimise(start, way.reads_out)
            start = found.solution.z
            if found.converged:
                way.policy.observer(found.solution, found.scale, small.tolerances.must, FORWARD)
                ctx.small = small
                ctx.save_for_backward(x, start, *parameters)
                return found.output if way.reads_out else start
        # keep the energy, so that the adjoint reuses its Hessian
        ctx.energy = way.energy_of([p.detach() for p in parameters]) if energy is None else energy
        z = way.policy.solve(ctx.energy.free(x), FORWARD, start).z
        ctx.save_for_backward(x, z, *parameters)
        return ctx.energy.output(x, z) if way.reads_out else z

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (given,) = grad_outputs
        way: _Way = ctx.way
        x, z, *parameters = ctx.saved_tensors
        grads: tuple[Tensor | None, ...]
        refuse_mapped(given)
        with torch.no_grad(), without_autocast(x.device):
            found, flat = None, x.new_empty(sum(p.numel() for p in parameters))
            if ctx.small is not None:
                found = ctx.small.adjoint(given, flat, ctx.needs_input_grad[3], way.reads_out)
            if found is not None:
                way.policy.observer(found.solution, found.scale, ctx.small.tolerances.must, ADJOINT)
                grads = (found.d_x, *_unflatten_dense_tensors(flat, parameters))
            else:
                energy = way.energy_of([p.detach() for p in parameters]) if ctx.energy is None else ctx.energy
                backward = prediction_backward if way.reads_out else _general_backward
                grads = backward(Asked(way.policy, ctx.needs_input_grad[3:]), energy, given, x, z)
        if torch.is_grad_enabled():
            grads = tuple(None if grad is None else _FirstDerivativeOnly.apply(grad, given, x, *parameters) for grad in grads)
        return None, None, None, *grads


class Asked(NamedTuple):
    """How to solve the adjoint, whether derivatives in x and in each parameter are needed, and what is known beforehand.

    That is the share of samples in which a unit is inside its bounds, and an estimate of the adjoint.
    """

    policy: SolvePolicy
    needed: tuple[bool, ...]
    expected: Tensor | None = None
    start: Tensor | None = None


def _general_backward(asked: Asked, energy: LiftedEnergy, v: Tensor, x: Tensor, z: Tensor) -> tuple[Tensor | None, ...]:
    adjoint, size = unit_adjoint(energy, z, v, summed=not asked.needed[0])
    start = None if asked.start is None else asked.start / torch.where(size > 0, size, 1)
    minus = asked.policy.solve(replace(adjoint, expected=asked.expected), ADJOINT, start).z * -size
    d_x = torch.zeros_like(x) if asked.needed[0] else None
    if d_x is not None and energy.n_free:
        # dloss/dx = a_0 (1 + beta_0) W_0^T w_1
        first = minus[:, : energy.sizes[1]]
        d_x = energy.to_inputs(first).mul_(-energy.discounts[0] * (1 + energy.beta[0]))
    if not any(asked.needed[1:]):
        return d_x, *(None for _ in asked.needed[1:])
    return d_x, *slope_gradients(energy, x, z, minus).flat()


def through_output(energy: LiftedEnergy, d_y: Tensor, z: Tensor) -> Tensor:
    """Return derivatives with respect to the stacked minimiser, from those with respect to the output."""
    last = energy.operators[-1].adjoint(d_y) if energy.eliminated else d_y
    if last.shape == z.shape:
        return last
    v = torch.zeros_like(z)
    v[:, -last.shape[1] :] = last
    return v


def prediction_backward(asked: Asked, energy: LiftedEnergy, d_y: Tensor, x: Tensor, z: Tensor) -> tuple[Tensor | None, ...]:
    """Compute what :func:`_general_backward` does, from derivatives with respect to the output."""
    d_x, *derivatives = _general_backward(asked, energy, through_output(energy, d_y, z), x, z)
    if energy.eliminated:
        # y = W_{L-1} z_{L-1} + b_{L-1}
        last = energy.n_layers - 1
        derivatives[last] = energy.operators[-1].outer(d_y, z[:, -energy.sizes[-2] :])
        if energy.b[-1] is not None:
            derivatives[2 * last + 1] = d_y.sum(0)
    return d_x, *derivatives


@final
class _FirstDerivativeOnly(torch.autograd.Function):
    """Identity on a gradient; raises an error if the gradient is differentiated."""

    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor, *anchors: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            "LRRN has first derivatives only outside of torch.func: do not differentiate through a gradient taken with "
            "create_graph=True. torch.func.hessian, or torch.func.grad twice, has second derivatives"
        )
