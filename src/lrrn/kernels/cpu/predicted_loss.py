"""One training step of a loss of the prediction as a single compiled call, adversarial inputs included."""

from __future__ import annotations

from typing import Any

import numpy as np

from lrrn.kernels.cpu.arguments import Loss, Network, PackedQP
from lrrn.kernels.cpu.arrays import empty, integers, numbers, vector, zeros
from lrrn.kernels.cpu.compiled import kernel
from lrrn.kernels.cpu.small_batch import backward, forward
from lrrn.kernels.cpu.training_step import gather


@kernel
def _squared_error(y: Any, target: Any, weight: Any, losses: Any, slope: Any) -> None:
    """Write half the squared distances, and their derivatives in the prediction times the weights."""
    for i in range(y.shape[0]):
        losses[i] = 0.0
        for j in range(y.shape[1]):
            part = np.float64(y[i, j]) - np.float64(target[i, j])
            losses[i] += 0.5 * part * part
            slope[i, j] = part * weight[i]


@kernel
def _softmax(y: Any, target: Any, margin: float, temperature: float, wrong: bool, weight: Any, losses: Any, slope: Any) -> None:
    """Write T CE((y - m onehot) / T), and its derivatives in y times the weights.

    With ``wrong``, log sum exp is over the wrong logits only, as an attack increases it.
    """
    k = y.shape[1]
    logits = numbers(k)
    for i in range(y.shape[0]):
        largest, right = -np.inf, 0.0
        for j in range(k):
            hit = np.float64(target[i, j])
            logits[j] = (np.float64(y[i, j]) - margin * hit) / temperature
            right += hit * logits[j] if hit != 0 else 0.0
            if wrong and hit > 0:
                logits[j] = -np.inf
            largest = max(largest, logits[j])
        total = 0.0
        for j in range(k):
            logits[j] = np.exp(logits[j] - largest)
            total += logits[j]
        losses[i] = temperature * (np.log(total) + largest - right)
        for j in range(k):
            slope[i, j] = (logits[j] / total - np.float64(target[i, j])) * weight[i]


@kernel
def _loss(loss: Loss, at: int, wrong: bool, y: Any, target: Any, weight: Any, losses: Any, slope: Any) -> None:
    if loss.squared:
        _squared_error(y, target, weight, losses, slope)
    else:
        _softmax(y, target, loss.margin[at], loss.temperature[at], wrong, weight, losses, slope)


@kernel
def _move(x: Any, slope: Any, size: float) -> Any:
    """Return the inputs moved by ``size`` along the slopes."""
    out = np.empty(x.shape, x.dtype)
    for i in range(x.shape[0]):
        total = 0.0
        for j in range(x.shape[1]):
            total += np.float64(slope[i, j]) * np.float64(slope[i, j])
        factor = size / np.sqrt(total) if total > 0 else 0.0
        for j in range(x.shape[1]):
            out[i, j] = np.float64(x[i, j]) + factor * np.float64(slope[i, j])
    return out


@kernel
def prediction_step(
    net: Network,
    layers: int,  # number of layers that are unknowns
    phase: PackedQP,  # out: H
    single: PackedQP,  # out: the same in float32; without panels to use no float32
    square: Any,  # (d_1, d_1): W_0 W_0^T; not read if beta_0 is 0
    inputs: Any,  # (samples, d_0)
    targets: Any,  # (samples, d_L)
    rows: Any,  # (n,) int64: the samples to use
    weight: Any,  # (n,): the factor on each sample's loss
    loss: Loss,
    at: int,  # which of the margins, temperatures and sizes to use
    tol: float,
    limit: float,  # largest accepted relative residual
    max_sweeps: int,
    cold: bool,  # whether z holds zeros
    z: Any,  # (n, dim), feasible; out: the minimiser at the inputs
    sweeps: Any,  # (1,) int64, added to
    losses: Any,  # (n,) float64, out
    out: Any,  # (p,), out: derivatives of the sum of weight * losses
) -> bool:
    """Return whether every solve converged; if not, only ``z`` and ``sweeps`` are valid."""
    n, dim, width, flat = rows.shape[0], z.shape[1], targets.shape[1], net.flat
    x, y = gather(inputs, rows), gather(targets, rows)
    output, slope, g, there = empty(n, width, flat), empty(n, width, flat), empty(n, dim, flat), z
    norms, scale, used = numbers(n), numbers(n), integers(n, 0)
    ones, nothing, attacks = vector(n, flat), vector(0, flat), loss.size[at] != 0
    for i in range(n):
        ones[i] = 1
    # one place for each pass, which are long to compile: first at the inputs, to attack them, then at the attacked inputs
    for last in range(0 if attacks else 1, 2):
        attacking, again = last == 0, attacks and last == 1
        aim, most = (loss.tol, loss.limit) if attacking else (tol, limit)
        done = forward(
            net, layers, phase, single, square, x, tol, limit, max_sweeps, again, cold and not again, there, output,
            g, norms, scale, used,
        )  # fmt: skip
        for i in range(n):
            sweeps[0] += used[i]
        if not done:
            return False
        _loss(loss, at, attacking, output, y, ones if attacking else weight, losses, slope)
        w, d_x = zeros(n, dim, flat), empty(n if attacking else 0, x.shape[1], flat)
        done = backward(
            net, layers, phase, single, x, aim, most, max_sweeps, there, slope, True, g, norms, scale, used, w, d_x,
            nothing if attacking else out,
        )  # fmt: skip
        for i in range(n):
            sweeps[0] += used[i]
        if not done:
            return False
        if attacking:
            x, there = _move(x, d_x, loss.size[at]), z.copy()
    return True
