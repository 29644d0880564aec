"""Search for radii with any dual: the other outputs of each sample in turn, nearest first, up to limits that are raised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from lrrn.bounds.multiplier import LEAST
from lrrn.certificates.complementarity import FARTHEST, NEARLY, Sample, sought

ABOVE = 1 + 1e-3
"""The dual need not exceed the square of the limit of the search by more than this factor."""


class Dual(Protocol):
    """What a search for radii needs of a dual."""

    @property
    def n_outputs(self) -> int:
        """Number of outputs."""
        ...

    def drift(self, sample: Sample, label: Tensor, rival: Tensor) -> Tensor:
        """Return bounds on what the errors of eliminated units take from the leads of labels over other outputs."""
        ...

    def proven(self, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor, goal: float | Tensor = math.inf) -> Tensor:
        """Return proven lower bounds on the squared norm of a perturbation that reduces the lead to zero."""
        ...


@final
class Largest:
    """The largest of the bounds of several duals of the same samples.

    Parameters
    ----------
    duals : sequence of Dual
        At least one. Later ones are used only where the bounds of those before are below the goal.
    """

    def __init__(self, duals: Sequence[Dual]) -> None:
        self._duals = tuple(duals)

    @property
    def n_outputs(self) -> int:
        """Number of outputs."""
        return self._duals[0].n_outputs

    def drift(self, sample: Sample, label: Tensor, rival: Tensor) -> Tensor:
        """Return what the errors of eliminated units take from the leads."""
        return self._duals[0].drift(sample, label, rival)

    def proven(self, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor, goal: float | Tensor = math.inf) -> Tensor:
        """Return proven lower bounds on the squared norm of a perturbation that reduces the lead to zero."""
        goal = torch.as_tensor(goal, dtype=lead.dtype, device=lead.device).expand_as(lead)
        found = torch.full_like(lead, -math.inf)
        for dual in self._duals:
            rows = (~(found >= goal)).nonzero().squeeze(1)
            if len(rows):
                more = dual.proven(sample.take(rows), label[rows], rival[rows], lead[rows], goal[rows])
                # a NaN proves nothing
                found[rows] = torch.fmax(found[rows], more)
        return found


def nearest_radii(
    dual: Dual, sample: Sample, label: Tensor, known: Tensor, leads: Tensor, extra: Tensor, target_radius: float
) -> Tensor:
    """Process the other outputs of each sample by increasing known radius, as long as they can lower the result."""
    values, order = known.sort(1)
    nearest = torch.full_like(values[:, 0], math.inf)
    for k in range(dual.n_outputs - 1):
        value, rival = values[:, k], order[:, k]
        closer = value < nearest.clamp(max=target_radius)
        nearest = torch.where(closer, nearest, torch.minimum(nearest, value))
        rows = closer.nonzero().squeeze(1)
        if len(rows) == 0:
            break
        pick = rows, rival[rows]
        lead = leads[pick]
        here = sample.take(rows)
        drift = dual.drift(here, label[rows], rival[rows])
        ceiling = nearest[rows].clamp(max=target_radius * (1 + 1e-6)).minimum(FARTHEST * value[rows])
        known_here = value[rows], lead, extra[pick], drift, ceiling
        proven = _raised(dual, here, label[rows], rival[rows], *known_here)
        nearest[rows] = torch.minimum(nearest[rows], proven)
    return nearest


def _raised(
    dual: Dual,
    sample: Sample,
    label: Tensor,
    rival: Tensor,
    radius: Tensor,
    lead: Tensor,
    extra: Tensor,
    drift: Tensor,
    ceiling: Tensor,
) -> Tensor:
    """Return proven radii of one pair per sample, at least the known ones.

    Where the limit of the search is reached, the search is repeated with a larger limit.
    """
    radius, rows = radius.clone(), torch.arange(len(radius), device=radius.device)
    while len(rows):
        most, left = sought(radius[rows], lead[rows], extra[rows], ceiling[rows])
        left = left - drift[rows]
        goal = most.square() * ABOVE
        square = dual.proven(sample.take(rows), label[rows], rival[rows], left.clamp(min=1e-300), goal)
        # NaN proves nothing, and a value that small may have lost too much to underflow
        proven = torch.minimum(torch.where((left > 0) & (square > LEAST**2), square, 0.0).sqrt(), most) * (1 - 1e-15)
        radius[rows] = torch.maximum(radius[rows], proven)
        rows = rows[(proven >= most * NEARLY) & (most < ceiling[rows])]
    return radius
