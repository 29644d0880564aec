"""The prediction as an operator of torch, which ``torch.compile`` and ``torch.export`` keep in their graphs as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lrrn.energy import LiftedEnergy
from lrrn.energy.constraints import Interval
from lrrn.linalg.layer_shape import LayerShape
from lrrn.network.implicit import Asked, prediction_backward, without_autocast
from lrrn.network.policy import FORWARD, SolvePolicy
from lrrn.network.transforms import transforms_active


def graph_prediction(energy: LiftedEnergy, policy: SolvePolicy, x: Tensor) -> Tensor:
    """Return the prediction of an energy by the operator ``lrrn::prediction``, differentiable once.

    A policy may set ``solver``, ``tol`` and ``max_sweeps`` only: nothing else can be stored in a graph.
    """
    if policy != SolvePolicy(policy.solver, policy.tol, None, policy.max_sweeps):
        raise ValueError(
            "in torch.compile, a policy may set solver, tol and max_sweeps only; use the network as it is for others"
        )
    if transforms_active():
        raise NotImplementedError("torch.func inside torch.compile: transform LRRN outside of it, as in torch.func.vmap(net)")
    if energy.n_free == 0 and energy.layers is None:
        return torch.nn.functional.linear(x, energy.weights[-1], energy.b[-1])
    numbers = [float(energy.b[0] is not None), float(energy.c[0] is not None), *energy.beta, energy.gamma]
    for each in energy.intervals:
        numbers += [each.lo, each.hi]
    numbers += [math.nan if policy.tol is None else policy.tol, float(policy.max_sweeps)]
    parameters = [p for p in (*energy.weights, *energy.b, *energy.c) if p is not None]
    output, _ = _prediction(x, parameters, numbers, _written(energy.layers), policy.solver)
    return output


def _written(layers: tuple[LayerShape, ...] | None) -> list[int]:
    """Return the shapes of layers as integers, each tuple after its length; at first the number of layers, 0 if matrices."""
    found = [len(layers or ())]
    for layer in layers or ():
        for shape in (layer.in_shape, layer.out_shape, layer.weight_shape):
            found += [len(shape), *shape]
        found += [layer.stride, layer.padding, layer.pool]
    return found


def _layers(written: Sequence[int]) -> tuple[LayerShape, ...] | None:
    """Return the layers of which :func:`_written` made integers."""
    rest = iter(written)
    layers = []
    for _ in range(next(rest)):
        in_shape, out_shape, weight_shape = (tuple(islice(rest, next(rest))) for _ in range(3))
        layers.append(LayerShape(in_shape, out_shape, weight_shape, *islice(rest, 3)))
    return tuple(layers) or None


def _read(
    parameters: Sequence[Tensor], numbers: Sequence[float], layers: Sequence[int], solver: str
) -> tuple[LiftedEnergy, SolvePolicy]:
    """Return the energy and the policy that :func:`graph_prediction` wrote down."""
    n = (len(numbers) - 5) // 3
    has_b, has_c, *beta = numbers[: n + 2]
    ends = numbers[n + 3 : -2]
    intervals = tuple(Interval(lo, hi) for lo, hi in zip(ends[::2], ends[1::2], strict=True))
    none = (None,) * n
    b = tuple(parameters[n : 2 * n]) if has_b else none
    c = tuple(parameters[-n:]) if has_c else none
    energy = LiftedEnergy(tuple(parameters[:n]), b, c, tuple(beta), numbers[n + 2], intervals, _layers(layers))
    tol, max_sweeps = numbers[-2:]
    return energy.to(parameters[0].dtype), SolvePolicy(solver, None if math.isnan(tol) else tol, None, int(max_sweeps))


@torch.library.custom_op(
    "lrrn::prediction",
    mutates_args=(),
    schema="(Tensor x, Tensor[] parameters, float[] numbers, int[] layers, str solver) -> (Tensor, Tensor)",
)
def _prediction(
    x: Tensor, parameters: Sequence[Tensor], numbers: Sequence[float], layers: Sequence[int], solver: str
) -> tuple[Tensor, Tensor]:
    """Return the output and the stacked minimiser."""
    if not bool(x.isfinite().all()):
        raise ValueError("x has a non-finite value (NaN or infinity); clean the data first")
    energy, policy = _read(parameters, numbers, layers, solver)
    with torch.no_grad(), without_autocast(x.device):
        z = policy.solve(energy.free(x), FORWARD).z
        return energy.output(x, z).clone(), z


@_prediction.register_fake
def _(
    x: Tensor, parameters: Sequence[Tensor], numbers: Sequence[float], layers: Sequence[int], solver: str
) -> tuple[Tensor, Tensor]:
    energy, _ = _read(parameters, numbers, layers, solver)
    return x.new_empty((x.shape[0], energy.sizes[-1])), x.new_empty((x.shape[0], sum(energy.free_sizes)))


@torch.library.custom_op(
    "lrrn::prediction_backward",
    mutates_args=(),
    schema="(Tensor d_y, Tensor x, Tensor z, Tensor[] parameters, float[] numbers, int[] layers, str solver) -> Tensor[]",
)
def _backward(
    d_y: Tensor,
    x: Tensor,
    z: Tensor,
    parameters: Sequence[Tensor],
    numbers: Sequence[float],
    layers: Sequence[int],
    solver: str,
) -> list[Tensor]:
    """Return derivatives in x, then in all parameters."""
    energy, policy = _read(parameters, numbers, layers, solver)
    with torch.no_grad(), without_autocast(x.device):
        grads = prediction_backward(Asked(policy, (True,) * (1 + len(parameters))), energy, d_y, x, z)
    return [grad for grad in grads if grad is not None]  # all of them are there


@_backward.register_fake
def _(
    d_y: Tensor,
    x: Tensor,
    z: Tensor,
    parameters: Sequence[Tensor],
    numbers: Sequence[float],
    layers: Sequence[int],
    solver: str,
) -> list[Tensor]:
    return [torch.empty_like(t) for t in (x, *parameters)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, parameters, ctx.numbers, ctx.layers, ctx.solver = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], *parameters)


def _derivatives(ctx: Any, d_y: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    x, z, *parameters = ctx.saved_tensors
    d_x, *grads = _backward(d_y, x, z, parameters, ctx.numbers, ctx.layers, ctx.solver)
    return d_x, grads, None, None, None


_prediction.register_autograd(_derivatives, setup_context=_save)
