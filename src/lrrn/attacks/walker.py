"""Building blocks of the attacks: projected gradient ascent within a ball, and steps towards a decision boundary."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from lrrn.attacks.slopes import Surface, normalised
from lrrn.qp import row_norms

CHUNK_NUMBERS = 2**23
"""Size of the largest array: samples are attacked in chunks that fit it. On a GPU the limit is sixteen times as large."""
INSIDE = 1 - 1e-10
"""Fraction of eps to which perturbations are projected, so that rounding does not make them larger than eps."""
BEYOND = (0.0, 1e-5, 1e-4, 1e-3, 1e-2)
"""Shares by which a shrunk perturbation grows until a prediction confirms it."""
LOST = (0.5, 2.0, 8.0, 8.0, 8.0)
"""Radii, in units of 1 + |x|, of the balls for random starts where no linearised search succeeded."""


@final
class Walker:
    """Steps of the attacks on batches of perturbed inputs. Shapes: x, delta (n, d_0); label (n,)."""

    def __init__(self, of: Surface, box: tuple[Tensor, Tensor] | None) -> None:
        self.slopes, self._box = of, box

    def chunks(self, x: Tensor, label: Tensor | None = None) -> Iterator[Tensor]:
        """Yield row indices in chunks whose Jacobians fit into memory; with labels, only rows that have theirs."""
        numbers = CHUNK_NUMBERS if x.device.type == "cpu" else 16 * CHUNK_NUMBERS
        size = max(1, numbers // max(self.slopes.numbers, 3 * self.slopes.n_inputs))
        for rows in torch.arange(len(x), device=x.device).split(size):
            kept = rows if label is None else rows[~self.fooled(x[rows], label[rows])]
            if len(kept):
                yield kept

    def fooled(self, x: Tensor, label: Tensor) -> Tensor:
        """Whether an ordinary prediction at x gives another label."""
        if len(x) == 0:
            return torch.zeros_like(label, dtype=torch.bool)
        computed, trusted = self.slopes.labels(x)
        return (computed != label) & trusted

    def allowed(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return the perturbation with the perturbed input clipped into the box."""
        if self._box is None:
            return delta
        return torch.minimum(torch.maximum(x + delta, self._box[0]), self._box[1]) - x

    def inside(self, x: Tensor, delta: Tensor, reach: Tensor) -> Tensor:
        """Project onto the ball of radius ``reach`` and the box; scaling down towards x does not leave the box."""
        delta = self.allowed(x, delta)
        size = row_norms(delta)
        return delta * (INSIDE * reach / torch.where(size > 0, size, 1)).clamp(max=1.0)[:, None]

    def random(self, x: Tensor, reach: Tensor, generator: torch.Generator) -> Tensor:
        """Draw perturbations within ``reach``, in the span of possible gradients (the rows of W_0 for a network)."""
        noise = torch.randn((len(x), self.slopes.n_coefficients), generator=generator, dtype=x.dtype).to(x.device)
        share = torch.rand(len(x), generator=generator, dtype=x.dtype).to(x.device)
        return self.inside(x, normalised(self.slopes.gradient(noise)) * (reach * share)[:, None], reach)

    def ascend(
        self, x: Tensor, label: Tensor, rival: Tensor | None, reach: Tensor, delta: Tensor, steps: int, first_step: float
    ) -> tuple[Tensor, Tensor]:
        """Maximise the lead of ``rival``, or of the largest wrong output, within ``reach``; return perturbations and successes.

        Steps decrease from ``first_step * reach`` to 0. A sample whose label has changed is removed from the batch.
        """
        result, hit = delta.clone(), torch.zeros_like(label, dtype=torch.bool)
        rows, z = torch.arange(len(x), device=x.device), None
        for step in range(steps + 1):
            z, y = self.slopes.outputs(x + delta, z)
            changed = (y.argmax(-1) != label).nonzero()[:, 0]
            changed = changed[self.fooled((x + delta)[changed], label[changed])]
            if len(changed):
                result[rows[changed]], hit[rows[changed]] = delta[changed], True
                keep = torch.ones_like(label, dtype=torch.bool).index_fill_(0, changed, False)
                rows, x, label, reach, delta, z, y = (t[keep] for t in (rows, x, label, reach, delta, z, y))
                rival = None if rival is None else rival[keep]
            if step == steps or len(rows) == 0:
                break
            towards = best_wrong(y, label) if rival is None else rival
            uphill = normalised(self.slopes.gradient(self._slope(z, towards, label)))
            size = first_step * 0.5 * (1 + math.cos(math.pi * step / steps))
            delta = self.inside(x, delta + uphill * (size * reach)[:, None], reach)
        result[rows] = delta
        return result, hit

    def press(self, x: Tensor, label: Tensor, rival: Tensor, reach: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Maximise the lead of ``rival`` within ``reach`` by all steps; return the best perturbations and their leads."""
        row = torch.arange(len(x), device=x.device)
        delta, z = torch.zeros_like(x), None
        best, most = delta.clone(), x.new_full((len(x),), -math.inf)
        for step in range(steps + 1):
            z, y = self.slopes.outputs(x + delta, z)
            lead = y[row, rival] - y[row, label]
            better = lead > most
            best[better], most[better] = delta[better], lead[better]
            uphill = normalised(self.slopes.gradient(self._slope(z, rival, label)))
            size = 0.5 * (1 + math.cos(math.pi * step / steps))
            delta = self.inside(x, delta + uphill * (size * reach)[:, None], reach)
        return best, most

    def walk(self, x: Tensor, label: Tensor, rivals: Tensor, steps: int) -> Tensor:
        """Step to the linearised boundary to each of several rivals; return the smallest perturbations that changed a label.

        The result is zero where none did. ``rivals`` has shape (n, m).
        """
        n, m = rivals.shape
        owner = torch.arange(n, device=x.device).repeat_interleave(m)
        x, label, rival = x[owner], label[owner], rivals.reshape(-1)
        row = torch.arange(n * m, device=x.device)
        delta, z = torch.zeros_like(x), None
        best, shortest = torch.zeros_like(x), x.new_full((n * m,), math.inf)
        for _ in range(steps):
            z, y = self.slopes.outputs(x + delta, z)
            size = row_norms(delta)
            better = (y.argmax(-1) != label) & (size < shortest)
            best[better], shortest[better] = delta[better], size[better]
            slope = self._slope(z, rival, label)
            steepness = self.slopes.lengths(slope)
            uphill = normalised(self.slopes.gradient(slope))
            # the hyperplane {d : lead + steepness uphill^T (d - delta) = 0}, and a thousandth of the step beyond it
            lead = y[row, rival] - y[row, label]
            along = torch.where(steepness > 0, -lead / steepness, 0.0)
            from_here = delta + uphill * (1.001 * along)[:, None]
            from_x = uphill * ((uphill * delta).sum(-1) + 1.001 * along)[:, None]
            delta = self.allowed(x, torch.where((steepness > 0)[:, None], 1.0005 * 0.5 * (from_here + from_x), delta))
        pick = shortest.reshape(n, m).argmin(1) + m * torch.arange(n, device=x.device)
        return best[pick]

    def shrink(self, x: Tensor, label: Tensor, delta: Tensor, halvings: int = 20) -> Tensor:
        """Shrink successful perturbations towards x by bisection, as long as the label stays changed.

        The search may compute with fewer digits than a prediction: its result is enlarged until a prediction confirms it.
        """
        low, high, z = x.new_zeros(len(x)), x.new_ones(len(x)), None
        for _ in range(halvings):
            middle = 0.5 * (low + high)
            z, y = self.slopes.outputs(x + delta * middle[:, None], z)
            fooled = y.argmax(-1) != label
            low, high = torch.where(fooled, low, middle), torch.where(fooled, middle, high)
        share, rows = torch.ones_like(high), torch.arange(len(x), device=x.device)
        for more in BEYOND:
            tried = (high[rows] * (1 + more)).clamp(max=1.0)
            fooled = self.fooled(x[rows] + delta[rows] * tried[:, None], label[rows])
            share[rows[fooled]], rows = tried[fooled], rows[~fooled]
        return delta * share[:, None]

    def _slope(self, z: Tensor, rival: Tensor, label: Tensor) -> Tensor:
        """Return the coefficients of the gradient of a rival's lead over the right output."""
        k = self.slopes.n_outputs
        return self.slopes.coefficients(z, (functional.one_hot(rival, k) - functional.one_hot(label, k)).to(z.dtype))


def best_wrong(y: Tensor, label: Tensor) -> Tensor:
    """Return the index of the largest output except that of the label."""
    return y.scatter(1, label[:, None], -math.inf).argmax(-1)
