"""Branch and bound on single units: larger radii where the relaxation of the complementarity limits them.

At a perturbed input, a unit with a lower bound only is at its bound (v + low = 0) or has no gradient (w + slack = 0). The
duals of ``shared`` and ``matrix_free`` relax this to a product. A branch assumes one of the two as an equation, whose
multiplier has either sign, so that its dual is larger. The smallest bound of the leaves of a tree holds for the sample. All
leaves of all samples are problems of one batch, since the quadratic part does not depend on the branch. See
docs/theory/matrix-free.md.
"""

from __future__ import annotations

import math
from typing import Protocol, final

import torch
from torch import Tensor

from lrrn.certificates.complementarity import Faces, Sample
from lrrn.certificates.nearest import Dual

LEAVES, FEW = 2048, 32
"""Largest number of branches of a sample and a pair of outputs, with and without a target, if no other is given."""
NEAR = 1.06
"""Branches are tried for a target up to this multiple of the radius without them; without a target, for that multiple."""


class Branchable(Dual, Protocol):
    """What branch and bound needs of a dual."""

    @property
    def rows(self) -> int:
        """Samples per batch."""
        ...

    @property
    def splits(self) -> Tensor:
        """Whether branches may split on a unit, of shape (m,): it has a lower bound only."""
        ...

    def bounds(
        self, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor, goal: Tensor, faces: Faces
    ) -> tuple[Tensor, Tensor]:
        """Return proven bounds for branches, and (v + low) (w + slack) at the minimiser."""
        ...


@final
class Branching:
    """Proves bounds like a dual, with branches where the dual's own bound falls short of the goal by little.

    Parameters
    ----------
    dual : Branchable
    target_radius : float
        Radius of interest; infinite for the largest one.
    branches : int, optional
        Largest number of branches of a sample and a pair of outputs; ``LEAVES`` with a target and ``FEW`` without if not given.
    """

    def __init__(self, dual: Branchable, target_radius: float, branches: int | None = None) -> None:
        self.dual, self.has_target = dual, math.isfinite(target_radius)
        self.branches = (LEAVES if self.has_target else FEW) if branches is None else branches

    @property
    def n_outputs(self) -> int:
        """Number of outputs."""
        return self.dual.n_outputs

    def drift(self, sample: Sample, label: Tensor, rival: Tensor) -> Tensor:
        """Return what the errors of eliminated units take from the leads."""
        return self.dual.drift(sample, label, rival)

    def proven(self, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor, goal: float | Tensor = math.inf) -> Tensor:
        """Return proven lower bounds on the squared norm of a perturbation that reduces the lead to zero."""
        goal = torch.as_tensor(goal, dtype=lead.dtype, device=lead.device).expand_as(lead)
        everything = torch.arange(len(lead), device=lead.device)
        root, unit = self._bounds(sample, everything, (label, rival, lead, goal), _no_path(lead))
        near, leaves = root * NEAR**2, self.branches
        # a goal of minus infinity ends the search
        sought = torch.where(goal <= near, goal, -math.inf) if self.has_target else torch.minimum(goal, near)
        # the smallest bound of the leaves that have reached what is sought, and the largest that all leaves of a round had
        closed, found = torch.full_like(root, math.inf), root.clone()
        tried = torch.ones_like(root)
        rows = ((root < sought) & (unit >= 0) & (tried + 2 <= leaves)).nonzero().squeeze(1)
        bound, path = root[rows], unit[rows, None]
        state = torch.zeros_like(path, dtype=torch.bool)
        while len(rows):
            rows, bound, path = rows.repeat(2), bound.repeat(2), path.repeat(2, 1)
            state = torch.cat([state, state])
            state[: len(state) // 2, -1] = True
            tried.index_add_(0, rows, torch.ones_like(bound))
            new, unit = self._bounds(sample, rows, (label, rival, lead, sought), (path, state))
            # what holds for a branch holds for the branches of it; a NaN proves nothing
            bound = torch.fmax(bound, new)
            still = bound < sought[rows]
            closed.scatter_reduce_(0, rows[~still], bound[~still], "amin")
            open_ = torch.full_like(root, math.inf).scatter_reduce_(0, rows[still], bound[still], "amin")
            split = torch.full_like(root, 0).index_add_(0, rows[still], torch.ones_like(bound[still]))
            touched = torch.zeros_like(root, dtype=torch.bool).index_fill_(0, rows, True)
            found = torch.where(touched, torch.maximum(found, torch.minimum(closed, open_)), found)
            stuck = torch.zeros_like(touched).index_fill_(0, rows[still & (unit < 0)], True)
            going = still & ~stuck[rows] & (tried + 2 * split <= leaves)[rows]
            rows, bound = rows[going], bound[going]
            path = torch.cat([path[going], unit[going, None]], 1)
            state = torch.cat([state[going], torch.zeros_like(state[going, :1])], 1)
        return found

    def _bounds(
        self, sample: Sample, rows: Tensor, problem: tuple[Tensor, Tensor, Tensor, Tensor], path: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return proven bounds, and the unit to branch on: that with the largest product, or -1 if none has any.

        ``rows`` are the samples of the branches, ``problem`` the labels, rivals, leads and goals of all samples.
        """
        bounds, units = [], []
        at_once = self.dual.rows
        # in batches: vectors of the size of all units for thousands of branches of a sample need not fit into memory
        for some, units_of, state in zip(rows.split(at_once), path[0].split(at_once), path[1].split(at_once), strict=True):
            faces = self._faces(units_of, state)
            label, rival, lead, goal = (each[some] for each in problem)
            bound, product = self.dual.bounds(sample.take(some), label, rival, lead, goal, faces)
            splits = self.dual.splits & ~(faces.active | faces.inactive)
            most = product.abs().nan_to_num(0.0).masked_fill(~splits, 0.0).max(-1)
            bounds.append(bound)
            units.append(torch.where(most.values > 0, most.indices, -1))
        return torch.cat(bounds), torch.cat(units)

    def _faces(self, path: Tensor, state: Tensor) -> Faces:
        """Return the equations of branches: ``path`` holds units, and ``state`` whether they are active."""
        chosen = torch.zeros((len(path), len(self.dual.splits)), dtype=torch.bool, device=path.device)
        active = chosen.scatter(1, path, state)
        return Faces(chosen.scatter(1, path, ~state), active)


def _no_path(lead: Tensor) -> tuple[Tensor, Tensor]:
    path = torch.zeros((len(lead), 0), dtype=torch.int64, device=lead.device)
    return path, path.bool()
