"""Several training steps in one compiled call: the gradient of a batch, then the update of the parameters, and so on."""

from __future__ import annotations

from typing import Any

import numpy as np

from lrrn.kernels.cpu.arguments import Course, Loss, Network, PackedQP, Rule
from lrrn.kernels.cpu.arrays import empty, greater, integers, lesser, numbers, vector, zeros
from lrrn.kernels.cpu.compiled import kernel
from lrrn.kernels.cpu.gram import gram
from lrrn.kernels.cpu.predicted_loss import prediction_step
from lrrn.kernels.cpu.training_step import energy_step, prepare

TINY_SINGLE, TINY_DOUBLE = 2.0**-126, 2.0**-1022
"""Smallest normal numbers."""


@kernel
def update(flat: Any, slope: Any, last: int, width: int, rows: int, rate: float, rule: Rule) -> None:
    """Update the parameters by their derivatives; W_{L-1}, of shape (rows, width), begins at ``last``."""
    kind = flat.dtype.type
    if rule.penalty != 0:
        factor = kind(2 * rule.penalty)
        for j in range(last, last + rows * width):
            slope[j] += factor * flat[j]
    if rule.mean.shape[0] == 0:
        step = kind(rate)
        for j in range(flat.shape[0]):
            flat[j] -= step * slope[j] if rule.decay[j] >= 0 else kind(0)
    else:
        for i in range(rule.taken.shape[0]):
            rule.taken[i] += 1
        taken = np.float64(rule.taken[0])
        step = kind(rate / (1 - rule.beta_mean**taken))
        root = kind(1 / np.sqrt(1 - rule.beta_square**taken))
        new, new_square, keep, eps = (
            kind(1 - rule.beta_mean),
            kind(1 - rule.beta_square),
            kind(rule.beta_square),
            kind(rule.eps),
        )
        shrink = kind(rate)
        for j in range(flat.shape[0]):
            trained = rule.decay[j] >= 0
            g = slope[j]
            mean = rule.mean[j] + new * (g - rule.mean[j])
            square = keep * rule.square[j] + new_square * g * g
            moved = flat[j] - shrink * rule.decay[j] * flat[j] - step * mean / (np.sqrt(square) * root + eps)
            rule.mean[j] = mean if trained else kind(0)
            rule.square[j] = square if trained else kind(0)
            flat[j] = moved if trained else flat[j]
    scale_rows(flat, last, width, rule.norms)


@kernel
def scale_rows(flat: Any, last: int, width: int, norms: Any) -> None:
    """Scale the rows of W_{L-1} whose norm is outside its limits."""
    kind = flat.dtype.type
    for i in range(norms.shape[0]):
        row = flat[last + i * width : last + (i + 1) * width]
        total = 0.0
        for j in range(width):
            total += np.float64(row[j]) * np.float64(row[j])
        norm = greater(kind(np.sqrt(total)), kind(TINY_SINGLE if flat.itemsize == 4 else TINY_DOUBLE))
        wanted = kind(lesser(greater(norm, norms[i, 0]), norms[i, 1]))
        if wanted != norm:
            for j in range(width):
                row[j] = row[j] / norm * wanted


@kernel
def _shares(course: Course, rows: Any) -> Any:
    """Return the factors of samples in the mean over a batch."""
    n = rows.shape[0]
    weight = vector(n, course.weights)
    for i in range(n):
        weight[i] = course.weights[rows[i]] / n if course.weights.shape[0] > 0 else 1 / n
    return weight


@kernel
def _start(course: Course, rows: Any, lo: Any, hi: Any, free: int) -> Any:
    """Return feasible warm starts of the free phase: the activations of the last epoch, or zero."""
    z = zeros(rows.shape[0], free, course.weights)
    for i in range(rows.shape[0]):
        if course.activations.shape[0] > 0:
            for j in range(free):
                z[i, j] = course.activations[rows[i], j]
        for j in range(free):
            z[i, j] = lesser(greater(z[i, j], lo[0, j]), hi[0, j])
    return z


@kernel
def _keep(course: Course, rows: Any, z: Any) -> None:
    """Keep the activations for the next epoch."""
    if course.activations.shape[0] > 0:
        for i in range(rows.shape[0]):
            for j in range(z.shape[1]):
                course.activations[rows[i], j] = z[i, j]


@kernel
def energy_steps(
    net: Network,
    eliminated: bool,
    first_weights: Any,  # (d_1, d_0): W_0
    square: Any,  # (d_1, d_1), scratch
    phase_free: PackedQP,  # scratch
    phase_clamped: PackedQP,
    sign_free: Any,
    sign_clamped: Any,
    tol_free: float,
    tol: float,
    max_sweeps: int,
    from_zero: bool,  # whether zero is feasible
    course: Course,
    rule: Rule,
    slope: Any,  # (p,), scratch
    totals: Any,  # (2,): the sum of losses, added to step by step, and the number of sweeps
) -> int:
    """Take the steps of an energy objective; return how many were taken before one did not converge."""
    last, n_all, sweeps = net.w_at.shape[0] - 1, course.order.shape[0], integers(1, 0)
    free, hidden = phase_free.lo.shape[1], phase_clamped.lo.shape[1]
    cold = from_zero and course.activations.shape[0] == 0
    for i in range(course.rates.shape[0]):
        at = (course.first + i) * course.size
        rows = course.order[at : lesser(at + course.size, n_all)]
        n = rows.shape[0]
        weight, losses = _shares(course, rows), vector(n, net.flat)
        z_free = _start(course, rows, phase_free.lo, phase_free.hi, free)
        z_clamped = empty(n, hidden, net.flat)
        if sign_free == 0:
            for r in range(n):
                for j in range(hidden):
                    z_clamped[r, j] = z_free[r, j]
        gram(first_weights, square)
        prepare(net, eliminated, square, sign_free != 0, sign_clamped != 0, phase_free, phase_clamped)
        done = energy_step(
            net, eliminated, phase_free, phase_clamped, course.inputs, course.targets, rows, weight, sign_free, sign_clamped,
            tol_free, tol, max_sweeps, cold, z_free, z_clamped, sweeps, losses, slope,
        )  # fmt: skip
        totals[1] += sweeps[0]
        sweeps[0] = 0
        if not done:
            return i
        if sign_free != 0:
            _keep(course, rows, z_free)
        loss = 0.0
        for r in range(n):
            loss += np.float64(losses[r]) * np.float64(weight[r])
        totals[0] += loss * n
        update(net.flat, slope, net.w_at[last], net.sizes[last], net.sizes[last + 1], course.rates[i], rule)
    return course.rates.shape[0]


@kernel
def prediction_steps(
    net: Network,
    layers: int,
    phase: PackedQP,
    single: PackedQP,
    square: Any,  # (d_1, d_1), scratch; empty if beta_0 is 0
    first_weights: Any,  # (d_1, d_0): W_0
    loss: Loss,
    tol: float,
    limit: float,
    max_sweeps: int,
    from_zero: bool,
    course: Course,
    rule: Rule,
    slope: Any,
    totals: Any,
) -> int:
    """Take the steps of a loss of the prediction; return how many were taken before one did not converge."""
    last, n_all, sweeps = net.w_at.shape[0] - 1, course.order.shape[0], integers(1, 0)
    cold = from_zero and course.activations.shape[0] == 0
    for i in range(course.rates.shape[0]):
        at = (course.first + i) * course.size
        rows = course.order[at : lesser(at + course.size, n_all)]
        n = rows.shape[0]
        weight, losses = _shares(course, rows), numbers(n)
        z = _start(course, rows, phase.lo, phase.hi, phase.lo.shape[1])
        if square.shape[0] > 0:
            gram(first_weights, square)
        done = prediction_step(
            net, layers, phase, single, square, course.inputs, course.targets, rows, weight, loss, i,
            tol, limit, max_sweeps, cold, z, sweeps, losses, slope,
        )  # fmt: skip
        totals[1] += sweeps[0]
        sweeps[0] = 0
        if not done:
            return i
        _keep(course, rows, z)
        total = 0.0
        for r in range(n):
            total += losses[r] * np.float64(weight[r])
        totals[0] += total * n
        update(net.flat, slope, net.w_at[last], net.sizes[last], net.sizes[last + 1], course.rates[i], rule)
    return course.rates.shape[0]
