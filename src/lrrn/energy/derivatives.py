"""Derivatives of energies in the parameters at fixed activations, in closed form.

Autograd on :meth:`LiftedEnergy.value` gives the same values, and the tests compare both. The closed form needs a fraction of
the operations. With R_k = z_{k+1} - W_k z_k - b_k and S_k = W_k^T z_{k+1} - z_k - c_k,

    dE/dW_k = a_k (-R_k z_k^T + beta_k z_{k+1} S_k^T),    dE/db_k = -a_k R_k,    dE/dc_k = -a_k beta_k S_k.

The first layer never forms S_0, which is as wide as the input: sums over samples of z_1 z_1^T and z_1 x^T are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lrrn.energy import LiftedEnergy


class Gradients(NamedTuple):
    """Derivatives in W, b and c, layer by layer; None where a bias does not exist."""

    weights: list[Tensor]
    b: list[Tensor | None]
    c: list[Tensor | None]

    def flat(self) -> list[Tensor]:
        """Return W, then b, then c, without those that do not exist."""
        return [g for group in self for g in group if g is not None]


class Phase(NamedTuple):
    """Activations of a batch, and the weight of each sample's energy."""

    blocks: Sequence[Tensor]  # z_1, ..., without an eliminated output: layers of the energy above the last are left out
    weight: Tensor  # (n, 1)


@torch.no_grad()
def energy_gradients(energy: LiftedEnergy, x: Tensor, phases: Sequence[Phase], balanced: bool = False) -> Gradients:
    """Return the derivatives of the weighted sum of energies over all phases and samples; the phases share the input ``x``.

    Set ``balanced`` if there are exactly two phases, with opposite weights. The contrastive difference is then computed in a
    form that avoids cancellation.
    """
    if not balanced:
        return _gradients(energy, x, [], [], phases)
    # E is quadratic in z, so a difference of energies is the slope at the midpoint along the difference of activations
    up, down = phases
    pairs = list(zip(up.blocks, down.blocks, strict=False))
    return _gradients(energy, x, [(u + v) / 2 for u, v in pairs], [up.weight * (u - v) for u, v in pairs], phases)


@torch.no_grad()
def slope_gradients(energy: LiftedEnergy, x: Tensor, z: Tensor, w: Tensor) -> Gradients:
    """Return the derivatives, summed over samples, of the slope d/dt E(z + t w; x) at t = 0 over the free phase's layers.

    E is quadratic in z, so the slope is 1/2 [E(z + w; x) - E(z - w; x)], computed without the cancellation in that difference.
    z and w are stacked activations of the free phase and a direction, of shape (n, dim).
    """
    zs, ws = (t.split(energy.free_sizes, dim=-1) if energy.n_free else () for t in (z, w))
    return _gradients(energy, x, zs, ws, ())


def activation_gradient(energy: LiftedEnergy, x: Tensor, z: Tensor) -> Tensor:
    """Return H z - q(x), the gradient of E in the stacked activations of the free phase, of shape (n, dim).

    Unlike :meth:`BoxQP.gradient`, it is differentiable in everything, and can be mapped over.
    """
    parts: list[Tensor] = []
    below = x
    for k, above in enumerate(z.split(energy.free_sizes, dim=-1) if energy.n_free else ()):
        a, beta, operator = energy.discounts[k], energy.beta[k], energy.operators[k]
        regression, reconstruction = energy.mismatch(k, below, above)
        pull = operator.adjoint(-regression)
        push = regression
        if reconstruction is not None:
            push, pull = push + beta * operator.apply(reconstruction), pull - beta * reconstruction
        if k > 0:
            parts[-1] = parts[-1] + a * pull
        parts.append(a * push)
        below = above
    return torch.cat(parts, dim=-1) if parts else torch.zeros_like(z)


def hessian_product(energy: LiftedEnergy, z: Tensor) -> Tensor:
    """Return H z for rows of ``z``, differentiable in everything."""
    none = (None,) * energy.n_layers
    linear = LiftedEnergy(energy.weights, none, none, energy.beta, energy.gamma, energy.intervals, energy.layers)
    return activation_gradient(linear, z.new_zeros((z.shape[0], energy.sizes[0])), z)


Layer = tuple[Tensor, Tensor | None, Tensor | None]
"""Derivatives in W, b and c of one layer."""


def _gradients(
    energy: LiftedEnergy, x: Tensor, zs: Sequence[Tensor], ws: Sequence[Tensor], phases: Sequence[Phase]
) -> Gradients:
    """Return the derivatives of slopes at ``zs`` along ``ws`` in the layers that they reach, and of the phases above."""
    out = Gradients([], [], [])
    for k, (w, b, c) in enumerate(zip(energy.weights, energy.b, energy.c, strict=True)):
        present = [phase for phase in phases if len(phase.blocks) > k]
        layer: Layer | None = None
        if energy.layers is not None and k < len(zs):
            layer = _operator_slope(energy, k, zs[k - 1] if k else x, zs[k], ws[k - 1] if k else None, ws[k])
        elif energy.layers is not None and present:
            layer = _operator_layer(energy, k, x, present)
        elif k < len(zs):
            layer = _later_slope(energy, k, zs[k - 1], zs[k], ws[k - 1], ws[k]) if k else _first_slope(energy, x, zs[0], ws[0])
        elif present:
            layer = _later_layer(energy, k, present) if k else _first_layer(energy, x, present)
        d_w, d_b, d_c = (torch.zeros_like(w), None, None) if layer is None else layer
        # an existing bias without influence has derivative zero
        out.weights.append(d_w)
        out.b.append(None if b is None else torch.zeros_like(b) if d_b is None else d_b)
        out.c.append(None if c is None else torch.zeros_like(c) if d_c is None else d_c)
    return out


def _first_layer(energy: LiftedEnergy, x: Tensor, phases: Sequence[Phase]) -> Layer:
    a, beta, w, b, c = energy.discounts[0], energy.beta[0], energy.weights[0], energy.b[0], energy.c[0]
    weighted = [phase.blocks[0] * phase.weight for phase in phases]
    push = sum(weighted[1:], start=weighted[0])  # sum over phases of weight * z_1
    gram = torch.mm(weighted[0].mT, phases[0].blocks[0])
    for phase, scaled in zip(phases[1:], weighted[1:], strict=True):
        gram.addmm_(scaled.mT, phase.blocks[0])
    share = sum((phase.weight for phase in phases[1:]), start=phases[0].weight)
    image = x @ w.mT if b is None else torch.addmm(b, x, w.mT)
    regression = torch.addcmul(push, share, image, value=-1)
    # -R_0 x^T + beta z_1 S_0^T with S_0 = W_0^T z_1 - x - c_0
    d_w = torch.mm((regression + beta * push if beta else regression).mT, x).mul_(-a)
    total = push.sum(0)
    d_c = None
    if beta:
        d_w.addmm_(gram, w, alpha=a * beta)
        if c is not None:
            d_w.addr_(total, c, alpha=-a * beta)
            d_c = torch.mv(w.mT, total).mul_(-a * beta)
            d_c.addmv_(x.mT, share[:, 0], alpha=a * beta).add_(c * share.sum(), alpha=a * beta)
    return d_w, None if b is None else regression.sum(0) * -a, d_c


def _later_layer(energy: LiftedEnergy, k: int, phases: Sequence[Phase]) -> Layer:
    a, beta, w, b, c = energy.discounts[k], energy.beta[k], energy.weights[k], energy.b[k], energy.c[k]
    below, above = (
        torch.cat([phase.blocks[j] for phase in phases]) if len(phases) > 1 else phases[0].blocks[j] for j in (k - 1, k)
    )
    weight = torch.cat([phase.weight for phase in phases]) if len(phases) > 1 else phases[0].weight
    regression = (above - (below @ w.mT if b is None else torch.addmm(b, below, w.mT))).mul_(weight)
    d_w = torch.mm(regression.mT, below).mul_(-a)
    d_b = None if b is None else regression.sum(0).mul_(-a)
    d_c = None
    if beta:
        reconstruction = torch.addmm(below, above, w, beta=-1)
        if c is not None:
            reconstruction -= c
        reconstruction *= weight
        d_w.addmm_(above.mT, reconstruction, alpha=a * beta)
        d_c = None if c is None else reconstruction.sum(0).mul_(-a * beta)
    return d_w, d_b, d_c


def _first_slope(energy: LiftedEnergy, x: Tensor, z: Tensor, w: Tensor) -> Layer:
    a, beta, weight, c = energy.discounts[0], energy.beta[0], energy.weights[0], energy.c[0]
    total = w.sum(0)
    d_c = None if c is None or not beta else torch.mv(weight.mT, total).mul_(-a * beta)
    (n, units), inputs = z.shape, x.shape[1]
    if beta and units * (n + inputs) > 4 * n * inputs:
        # equal value, but fewer multiplications if the layer is wide compared to the batch: with S_0 = W^T z - x - c,
        # a w^T (beta S_0 - x) + a beta z^T (W^T w), in two products
        both = torch.cat([w, z])
        back = energy.to_inputs(both).mul_(a * beta)
        down, reconstruction = back[:n], torch.sub(back[n:], x, alpha=a * (1 + beta))
        if c is not None:
            reconstruction.sub_(c, alpha=a * beta)
        return both.mT @ torch.cat([reconstruction, down]), total * -a, d_c
    d_w = torch.mm(w.mT, x).mul_(-a * (1 + beta))
    if beta:
        cross = torch.mm(z.mT, w)
        d_w.addmm_(cross + cross.mT, weight, alpha=a * beta)
        if c is not None:
            d_w.addr_(total, c, alpha=-a * beta)
    return d_w, total * -a, d_c


def _later_slope(energy: LiftedEnergy, k: int, z_below: Tensor, z_above: Tensor, w_below: Tensor, w_above: Tensor) -> Layer:
    a, beta, weight, b, c = energy.discounts[k], energy.beta[k], energy.weights[k], energy.b[k], energy.c[k]
    regression = z_above - (z_below @ weight.mT if b is None else torch.addmm(b, z_below, weight.mT))
    moved = torch.addmm(w_above, w_below, weight.mT, alpha=-1)
    d_w = torch.mm(moved.mT, z_below).addmm_(regression.mT, w_below).mul_(-a)
    d_b = moved.sum(0).mul_(-a)
    d_c = None
    if beta:
        reconstruction = torch.addmm(z_below, z_above, weight, beta=-1)
        if c is not None:
            reconstruction -= c
        moved = torch.addmm(w_below, w_above, weight, beta=-1)
        d_w.addmm_(z_above.mT, moved, alpha=a * beta).addmm_(w_above.mT, reconstruction, alpha=a * beta)
        d_c = moved.sum(0).mul_(-a * beta)
    return d_w, d_b, d_c


def _operator_layer(energy: LiftedEnergy, k: int, x: Tensor, phases: Sequence[Phase]) -> Layer:
    """Return the derivatives of a layer whose weights are any operator, in products with it alone."""
    a, beta, operator = energy.discounts[k], energy.beta[k], energy.operators[k]
    below = torch.cat([phase.blocks[k - 1] if k else x for phase in phases])
    above, weight = (torch.cat(parts) for parts in zip(*((phase.blocks[k], phase.weight) for phase in phases), strict=True))
    regression, reconstruction = energy.mismatch(k, below, above)
    regression = regression * (-a * weight)
    if reconstruction is None:
        return operator.outer(regression, below), regression.sum(0), None
    reconstruction = reconstruction * (a * beta * weight)
    d_w = operator.outer(torch.cat([regression, above]), torch.cat([below, reconstruction]))
    return d_w, regression.sum(0), -reconstruction.sum(0)


def _operator_slope(
    energy: LiftedEnergy, k: int, z_below: Tensor, z_above: Tensor, w_below: Tensor | None, w_above: Tensor
) -> Layer:
    """Return what :func:`_later_slope` does, for any operator; without ``w_below``, of the first layer."""
    a, beta, operator = energy.discounts[k], energy.beta[k], energy.operators[k]
    moved = w_above if w_below is None else w_above - operator.apply(w_below)
    left, right = [moved * -a], [z_below]
    if w_below is not None:
        left, right = [*left, energy.regression_mismatch(k, z_below, z_above) * -a], [*right, w_below]
    d_c = None
    if beta:
        reconstruction = energy.reconstruction_mismatch(k, z_below, z_above)
        back = operator.adjoint(w_above)
        back = back if w_below is None else back - w_below
        left, right = [*left, z_above, w_above], [*right, back * (a * beta), reconstruction * (a * beta)]
        d_c = back.sum(0) * (-a * beta)
    return operator.outer(torch.cat(left), torch.cat(right)), moved.sum(0) * -a, d_c
