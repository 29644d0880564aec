"""Differentiating the minimiser under ``torch.func`` and forward-mode differentiation: vmap, vjp, jvp and what is made of them.

The passes of :mod:`lrrn.network.implicit` run compiled code on whole batches. Here, the free phase and the linear system of its
implicit derivative are two functions that torch can transform: H is symmetric, so one linear system gives both vjp and jvp.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import vjp

from lrrn.energy import LiftedEnergy
from lrrn.energy.derivatives import activation_gradient, hessian_product
from lrrn.network.policy import ADJOINT, FORWARD, SolvePolicy
from lrrn.qp import BoxQP, row_norms

EnergyOf = Callable[[Sequence[Tensor]], LiftedEnergy]
"""Builds the energy of a list of parameters."""


def transforms_active() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def unwrapped(t: Tensor) -> Tensor:
    """Return the values behind a tensor of a transform: all of those that it maps over."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def refuse_mapped(grad: Tensor) -> None:
    """Raise an error for derivatives that are mapped over although the forward pass was not."""
    if torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad):
        raise NotImplementedError(
            "LRRN cannot take several derivatives at once of a forward pass outside of torch.func (is_grads_batched=True, "
            "vectorize=True, or vmap over torch.autograd.grad); use torch.func.jacrev, jacfwd or vjp over the module, or a loop"
        )


def transformable_minimiser(energy_of: EnergyOf, policy: SolvePolicy, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the stacked minimiser of the free phase, of shape (n, dim), for transforms of ``torch.func``."""
    return _Free.apply(_Problem(energy_of, policy), x, *parameters)


class _Problem(NamedTuple):
    energy_of: EnergyOf
    policy: SolvePolicy


@final
class _Free(torch.autograd.Function):
    """x, parameters -> the stacked minimiser z of the free phase."""

    @staticmethod
    def forward(problem: _Problem, x: Tensor, *parameters: Tensor) -> Tensor:
        energy = problem.energy_of([p.detach() for p in parameters])
        return _solve(problem.policy, energy.free(x.detach()), FORWARD)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.problem, *tensors = inputs
        ctx.save_for_backward(output, *tensors)
        ctx.save_for_forward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        z, *inputs = ctx.saved_tensors
        w = _Linear.apply(ctx.problem, z, grad_outputs[0], *inputs[1:])
        return None, *vjp(_gradient_at(ctx.problem, z), *inputs)[1](-w)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        z, *inputs = ctx.saved_tensors
        return -_Linear.apply(ctx.problem, z, _push(_gradient_at(ctx.problem, z), inputs, tangents[1:]), *inputs[1:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], problem: _Problem, *tensors: Tensor) -> tuple[Tensor, int]:
        return _over_samples(_Free, info.batch_size, in_dims[1:], 1, problem, tensors)


@final
class _Linear(torch.autograd.Function):
    """z, v, parameters -> w with (H w)_i = v_i for units strictly inside their intervals, and w_i = 0 for the others."""

    @staticmethod
    def forward(problem: _Problem, z: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        energy = problem.energy_of([p.detach() for p in parameters])
        # the system is linear in v, so solve it for unit vectors: tol is then relative to the result
        size = row_norms(v)[:, None].to(v.dtype)
        unit = v.detach() / torch.where(size > 0, size, 1)
        return _solve(problem.policy, energy.adjoint(z.detach(), unit), ADJOINT) * size

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.problem, z, _, *parameters = inputs
        ctx.save_for_backward(output, z, *parameters)
        ctx.save_for_forward(output, z, *parameters)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        w, z, *parameters = ctx.saved_tensors
        u = _Linear.apply(ctx.problem, z, grad_outputs[0], *parameters)
        # dw = H^-1 (dv - dH w) on the units inside
        return None, None, u, *vjp(lambda *rest: hessian_product(ctx.problem.energy_of(rest), w), *parameters)[1](-u)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        w, z, *parameters = ctx.saved_tensors
        push = -_push(lambda *rest: hessian_product(ctx.problem.energy_of(rest), w), parameters, tangents[3:])
        return _Linear.apply(ctx.problem, z, push if tangents[2] is None else tangents[2] + push, *parameters)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], problem: _Problem, *tensors: Tensor) -> tuple[Tensor, int]:
        return _over_samples(_Linear, info.batch_size, in_dims[1:], 2, problem, tensors)


def _solve(policy: SolvePolicy, qp: BoxQP, phase: str) -> Tensor:
    """Solve a phase; torch.compile, which follows transformed code into all that it calls, stops here."""
    solve = torch.compiler.disable(policy.solve) if "torch._dynamo" in sys.modules else policy.solve
    return solve(qp, phase).z


def _gradient_at(problem: _Problem, z: Tensor) -> Callable[..., Tensor]:
    """Return the gradient of E in the activations, at z, as a function of x and the parameters."""
    return lambda x, *parameters: activation_gradient(problem.energy_of(parameters), x, z)


def _push(function: Callable[..., Tensor], primals: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Tensor:
    """Return the directional derivative of a function, by the derivative of its vjp, which is linear."""
    value: Tensor
    value, pull = vjp(function, *primals)  # type: ignore[misc]  # three values only if has_aux is set
    filled = tuple(torch.zeros_like(p) if t is None else t for p, t in zip(primals, tangents, strict=True))
    return vjp(pull, torch.zeros_like(value))[1](filled)[0]


def _over_samples(
    function: Any, size: int, dims: Sequence[int | None], n_rows: int, problem: _Problem, tensors: Sequence[Tensor]
) -> tuple[Tensor, int]:
    """Apply a function along the mapped dimensions of its tensors, the first ``n_rows`` of which have a row per sample.

    Networks that differ are solved one after the other. Samples of one network make one larger batch.
    """
    front = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims, strict=True)]
    if any(dim is not None for dim in dims[n_rows:]):
        each = ([t if dim is None else t[i] for t, dim in zip(front, dims, strict=True)] for i in range(size))
        return torch.stack([function.apply(problem, *one) for one in each]), 0
    rows = [t if dim is not None else t.expand(size, *t.shape) for t, dim in zip(front[:n_rows], dims, strict=False)]
    n = rows[0].shape[1]
    flat = function.apply(problem, *(t.reshape(size * n, t.shape[-1]) for t in rows), *front[n_rows:])
    return flat.reshape(size, n, flat.shape[-1]), 0
