"""Attacks: adversarial perturbations that change a label, found with exact gradients. They bound radii from above.

A certificate proves that no such perturbation exists within a radius; an attack finds one. Every result is confirmed by the
network's own prediction, so a distance below a certified radius would refute the certificate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from lrrn.attacks.inputs import checked_inputs
from lrrn.attacks.slopes import nearest_rivals, surface
from lrrn.attacks.walker import LOST, Walker
from lrrn.network import LRRN
from lrrn.network.checks import vectors
from lrrn.qp import row_norms
from lrrn.runtime.threads import blas_threads

Clip = tuple[float | Tensor, float | Tensor]
FROM_X = ((0.8, 0), (0.8, 1), (0.9, 0), (0.9, 2), (0.9, None), (0.95, 0), (0.95, 1), (0.98, 0), (0.98, None))
"""Refinement by ascents from x: fraction of the smallest distance so far, and rank of the rival class, nearest first."""
FROM_BEST = ((0.98, 0.2), (0.99, 0.1), (0.998, 0.05))
"""Refinement by ascents from the best point so far: fraction of its distance, and relative size of the first step."""


@final
@dataclass(frozen=True, eq=False)
class Attack:
    """Result of an attack. A failed attack is no evidence of robustness.

    Attributes
    ----------
    success : bool Tensor of shape (n,)
        Whether the label at ``x``, computed in float64 (by :meth:`LRRN.infer`, with a solve that converged), is not the true
        one, and the perturbation is no larger than allowed.
    x : float64 Tensor of shape (n, d_0)
        The perturbed inputs; the given ones where the attack failed.
    distance : float64 Tensor of shape (n,)
        Euclidean norms of the perturbations, ``inf`` where the attack failed: upper bounds on the distance to the nearest
        input with another label. 0 where the label was wrong to begin with.
    """

    success: Tensor
    x: Tensor
    distance: Tensor


def pgd(
    net: nn.Module,
    x: Tensor,
    label: Tensor,
    eps: float | Tensor,
    *,
    steps: int = 50,
    restarts: int = 3,
    seed: int = 0,
    clip: Clip | None = None,
) -> Attack:
    """Search for a perturbation of Euclidean norm at most ``eps`` that changes the label, by projected gradient ascent (PGD).

    The ascent maximises the lead of a wrong output over the right one, with steps that decrease from ``eps`` to 0. Even
    restarts are targeted at one rival class each, nearest first. Odd restarts follow the largest wrong output. The first
    restart begins at x itself, all others at random points.

    Parameters
    ----------
    net : LRRN or nn.Module
        A network with at least two outputs, the largest of which is the label; or any other differentiable module from float64
        inputs of shape (n, d_0) to such outputs.
    x : Tensor of shape (n, d_0), or images
        Inputs of any dtype; attacked in float64. The images of a network that takes them are attacked as vectors.
    label : int64 Tensor of shape (n,)
        True labels, as indices of outputs.
    eps : float or Tensor of shape (n,)
        Largest norm of the perturbation, for all or per sample.
    steps, restarts : int, default=50 and 3
        Gradient steps per ascent, and number of ascents.
    seed : int, default=0
        Seed of the random starts.
    clip : (lo, hi), optional
        Bounds of the perturbed inputs: numbers, or tensors of shape (d_0,), such as (0, 1) for images. By default there are
        none, as in the certificate.

    Returns
    -------
    Attack
    """
    if steps < 1 or restarts < 1:
        raise ValueError(f"steps and restarts must be at least 1; got {steps} and {restarts}")
    walker, x, label = _checked(net, x, label, clip)
    reach = _checked_reach(eps, x)
    generator = torch.Generator().manual_seed(seed)
    found = x.clone()
    with torch.no_grad(), blas_threads(1):
        for rows in walker.chunks(x, label):
            order = nearest_rivals(walker.slopes, x[rows], label[rows])
            for restart in range(restarts):
                if len(rows) == 0:
                    break
                here, right, eps_here = x[rows], label[rows], reach[rows]
                aim = None if restart % 2 else order[:, restart // 2 % order.shape[1]]
                start = torch.zeros_like(here) if restart == 0 else walker.random(here, eps_here, generator)
                delta, hit = walker.ascend(here, right, aim, eps_here, start, steps, 1.0)
                found[rows[hit]] = here[hit] + delta[hit]
                rows, order = rows[~hit], order[~hit]
        return _confirmed(walker, x, found, label, reach)


def minimal_perturbation(
    net: nn.Module,
    x: Tensor,
    label: Tensor,
    *,
    steps: int = 30,
    rivals: int = 3,
    refine_steps: int = 20,
    seed: int = 0,
    clip: Clip | None = None,
) -> Attack:
    """Search for the smallest perturbation that changes the label: linearise, step to the nearest boundary, shrink.

    As in DeepFool, the outputs are linearised, and each step goes slightly beyond the decision boundary to a rival class. The
    target is the mean of two points of the linearised boundary: the one nearest to the iterate and the one nearest to x. The
    latter keeps the perturbation small. The best point is then moved towards x by bisection. Projected gradient ascents, from x
    and from that point, search for changed labels at smaller norms.

    Parameters
    ----------
    net, x, label, clip
        As in :func:`pgd`.
    steps : int, default=30
        Linearisations per rival.
    rivals : int, default=3
        Number of rival classes to step towards, nearest first.
    refine_steps : int, default=20
        Gradient steps per ascent; 0 disables the refinement.
    seed : int, default=0
        Seed of the random starts for inputs with zero gradients.

    Returns
    -------
    Attack
        The distance is an upper bound on that of the nearest input with another label, ``inf`` if none was found.
    """
    if steps < 1 or rivals < 1 or refine_steps < 0:
        raise ValueError(f"steps and rivals must be at least 1, refine_steps at least 0; got {steps}, {rivals}, {refine_steps}")
    walker, x, label = _checked(net, x, label, clip)
    generator = torch.Generator().manual_seed(seed)
    found = x.clone()
    with torch.no_grad(), blas_threads(1):
        for rows in walker.chunks(x, label):
            here, right = x[rows], label[rows]
            order = nearest_rivals(walker.slopes, here, right)
            delta = walker.walk(here, right, order[:, :rivals], steps)
            # where no linearised search succeeded, run ascents within growing balls
            for factor in LOST:
                lost = (~walker.fooled(here + delta, right)).nonzero()[:, 0]
                if len(lost):
                    reach = factor * (1 + row_norms(here[lost]))
                    start = walker.random(here[lost], reach, generator)
                    delta[lost], _ = walker.ascend(here[lost], right[lost], None, reach, start, steps, 1.0)
            hit = walker.fooled(here + delta, right)
            rows, here, right, order, delta = (t[hit] for t in (rows, here, right, order, delta))
            delta = walker.shrink(here, right, delta)
            if refine_steps:
                delta = _refined(walker, here, right, order, delta, refine_steps)
            found[rows] = here + delta
        return _confirmed(walker, x, found, label, x.new_full((len(x),), math.inf))


def strongest_perturbation(
    net: nn.Module,
    x: Tensor,
    label: Tensor,
    eps: float | Tensor,
    *,
    steps: int = 30,
    rivals: int = 2,
    clip: Clip | None = None,
) -> Tensor:
    """Search for the perturbation of Euclidean norm at most ``eps`` that minimises the margin of the label.

    Unlike :func:`pgd`, it does not stop where the label changes, and it returns its result whether the label changed or not. It
    shows the effect of an attack of that strength. Ascents from x maximise the lead of each of the nearest rival classes.

    Parameters
    ----------
    net, x, label, eps, clip
        As in :func:`pgd`.
    steps : int, default=30
        Gradient steps per ascent.
    rivals : int, default=2
        Number of rival classes, nearest first.

    Returns
    -------
    float64 Tensor of shape (n, d_0)
        The perturbed inputs, at most ``eps`` from x. Their labels are not computed.
    """
    if steps < 1 or rivals < 1:
        raise ValueError(f"steps and rivals must be at least 1; got {steps} and {rivals}")
    walker, x, label = _checked(net, x, label, clip)
    reach = _checked_reach(eps, x)
    found = x.clone()
    with torch.no_grad(), blas_threads(1):
        for rows in walker.chunks(x):
            here, right = x[rows], label[rows]
            most = here.new_full((len(rows),), -math.inf)
            for aim in nearest_rivals(walker.slopes, here, right)[:, :rivals].unbind(1):
                delta, lead = walker.press(here, right, aim, reach[rows], steps)
                better = lead > most
                found[rows[better]], most[better] = (here + delta)[better], lead[better]
    return found


def _refined(walker: Walker, x: Tensor, label: Tensor, order: Tensor, delta: Tensor, steps: int) -> Tensor:
    """Search for perturbations smaller than the given successful ones; columns of ``order`` are the rivals, nearest first."""
    plan = [(share, rank, 0.0, 1.0) for share, rank in FROM_X] + [(share, None, share, first) for share, first in FROM_BEST]
    for share, rank, start, first_step in plan:
        if rank is not None and rank >= order.shape[1]:
            continue
        aim = None if rank is None else order[:, rank]
        smaller, hit = walker.ascend(x, label, aim, share * row_norms(delta), start * delta, steps, first_step)
        if bool(hit.any()):
            delta[hit] = walker.shrink(x[hit], label[hit], smaller[hit])
    return delta


def _confirmed(walker: Walker, x: Tensor, found: Tensor, label: Tensor, reach: Tensor) -> Attack:
    """Confirm all results by one more prediction, as a batch, and compute their distances."""
    distance = row_norms(found - x)
    success = walker.fooled(found, label) & (distance <= reach)
    return Attack(success, torch.where(success[:, None], found, x), torch.where(success, distance, math.inf))


def _checked_reach(eps: float | Tensor, x: Tensor) -> Tensor:
    reach = torch.as_tensor(eps, dtype=torch.float64, device=x.device)
    if tuple(reach.shape) not in ((), (1,), (len(x),)):
        raise ValueError(f"eps must be a number, or {len(x)} of them, one for each row of x; got shape {tuple(reach.shape)}")
    reach = reach.expand(len(x))
    if not bool((reach >= 0).all() and reach.isfinite().all()):
        raise ValueError(f"eps must be finite and at least 0; got {eps}")
    return reach


def _checked_end(end: float | Tensor, net: nn.Module, x: Tensor) -> Tensor:
    """Return one end of clip, flattened as x was, with a number for every feature."""
    end = torch.as_tensor(end, dtype=torch.float64, device=x.device)
    end = vectors(end, net.image_shape) if isinstance(net, LRRN) else end
    if tuple(end.shape) not in ((), (1,), (x.shape[1],)):
        raise ValueError(
            f"an end of clip must be a number, or {x.shape[1]} of them, one for each feature of x; got shape {tuple(end.shape)}"
        )
    return end.expand(x.shape[1])


def _checked(net: nn.Module, x: Tensor, label: Tensor, clip: Clip | None) -> tuple[Walker, Tensor, Tensor]:
    """Check the arguments common to all attacks and move them to the network's device."""
    x = checked_inputs(net, x)
    of = surface(net, x.shape[-1])
    k = of.n_outputs
    if k < 2:
        raise ValueError("an attack changes which output is largest, and this network has one")
    x = x.to(device=of.device, dtype=torch.float64)
    label = torch.as_tensor(label)
    if label.dtype.is_floating_point or tuple(label.shape) != (len(x),):
        raise ValueError(f"label must hold {len(x)} output numbers; got {label.dtype} of shape {tuple(label.shape)}")
    label = label.to(device=x.device, dtype=torch.int64)
    if len(label) and not (0 <= int(label.min()) and int(label.max()) < k):
        raise ValueError(f"label must hold output numbers from 0 to {k - 1}; got {int(label.min())} to {int(label.max())}")
    if clip is None:
        return Walker(of, None), x, label
    lo, hi = (_checked_end(end, net, x) for end in clip)
    outside = ((x < lo) | (x > hi)).any(-1)
    if bool(outside.any()):
        raise ValueError(f"row {int(outside.nonzero()[0])} of x lies outside of clip; clip must hold the inputs themselves")
    return Walker(of, (lo, hi)), x, label
