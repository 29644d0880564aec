"""Nearest prototypes: the label of the nearest of some points, which may be all training samples.

What is proven: x + u is nearer to w_i than to w_j as long as |u| < (|x - w_j|^2 - |x - w_i|^2) / (2 |w_i - w_j|), the distance
to the bisecting hyperplane. If w_i has the predicted label and this holds for every w_j of another label, the label stands:
*some* prototype of its class beats all others, whichever is nearest then. So the radius is the best over w_i of the least over
w_j ("bisector"). The triangle inequality makes (d_j - d_i) / 2 ("margin") a lower bound on each term, which also speaks for all
prototypes too far away to be looked at one by one. Rounding is taken off throughout.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from lrrn import verified

BLOCK_NUMBERS = 2**24
"""Numbers held at once in the largest array."""
OWN, OTHERS = 64, 1024
"""How many of the nearest prototypes of the predicted label, and of the others, are paired."""


@final
class NearestPrototypes(nn.Module):
    """Scores are minus the squared distance to the nearest prototype of each class, in float64.

    Parameters
    ----------
    prototypes : Tensor of shape (m, d)
    labels : int64 Tensor of shape (m,)
        Class numbers; every class up to the largest needs a prototype.
    """

    kind: ClassVar[str] = "nearest prototypes"
    methods: ClassVar[tuple[str, ...]] = ("margin", "bisector")

    def __init__(self, prototypes: Tensor, labels: Tensor) -> None:
        super().__init__()
        order = labels.argsort(stable=True)
        counts = torch.bincount(labels)
        if not bool((counts > 0).all()):
            raise ValueError(f"class {int((counts == 0).nonzero()[0])} has no prototype; every class needs one")
        points = prototypes.detach()[order].to(torch.float64)
        self.points = nn.Parameter(points, requires_grad=False)
        self.labels = nn.Parameter(labels[order], requires_grad=False)
        self._counts = counts.tolist()

    @property
    def n_parameters(self) -> int:
        """How many numbers it keeps."""
        return self.points.numel()

    def forward(self, x: Tensor) -> Tensor:
        """Return minus the squared distance to the nearest prototype of each class, of shape (n, n_classes)."""
        with torch.no_grad():
            nearest = torch.cat([self._nearest(part) for part in x.split(self._rows(len(self.points)))])
        # the distances that count are computed from differences, so that gradients flow and nothing cancels
        return -(x[:, None] - self.points[nearest]).square().sum(-1)

    def _nearest(self, x: Tensor) -> Tensor:
        start, found = 0, []
        for part in self._squares(x).split(self._counts, dim=1):
            found.append(part.argmin(1) + start)
            start += part.shape[1]
        return torch.stack(found, 1)

    def _squares(self, x: Tensor) -> Tensor:
        """Return squared distances to all prototypes, of shape (n, m), within ``_doubt``."""
        return (_squared(x)[:, None] + _squared(self.points) - 2 * (x @ self.points.mT)).clamp(min=0.0)

    def _doubt(self, x: Tensor) -> Tensor:
        """Return a bound on the rounding of squared distances, of shape (n,)."""
        reach = _squared(x).sqrt() + float(_squared(self.points).max()) ** 0.5
        return 8 * (x.shape[1] + 8) * verified.EPS * reach.square()

    def _rows(self, numbers: int) -> int:
        return max(1, BLOCK_NUMBERS // max(numbers, 1))

    def radii(self, x: Tensor, method: str = "bisector") -> Tensor:
        """Return proven radii.

        Parameters
        ----------
        x : float64 Tensor of shape (n, d)
        method : {"margin", "bisector"}

        Returns
        -------
        float64 Tensor of shape (n,)
        """
        own, others = min(OWN, max(self._counts)), min(OTHERS, len(self.points))
        rows = min(self._rows(len(self.points)), self._rows((own + others) * x.shape[1] + own * others))
        return torch.cat([self._radii(part, method, own, others) for part in x.split(rows)])

    def _radii(self, x: Tensor, method: str, n_own: int, n_others: int) -> Tensor:
        label, squares, doubt = self(x).argmax(-1), self._squares(x), self._doubt(x)[:, None]
        same = self.labels == label[:, None]
        near = squares.masked_fill(~same, math.inf).topk(n_own, dim=1, largest=False)
        # one more than is paired, which stands for all that are farther
        far = squares.masked_fill(same, math.inf).topk(min(n_others + 1, squares.shape[1]), dim=1, largest=False)
        near_d = (near.values + doubt).sqrt()[..., None]
        far_d = (far.values - doubt).clamp(min=0.0).sqrt()[:, None]
        # at x + u the label is computed too: its squared distances are at most four times as uncertain, since the radius is at
        # most |x| + |w|, and the nearest of either class may be taken for another that is as near within that
        later = 16 * doubt[..., None]
        margins = (far_d - near_d) / 2 - later / (2 * (far_d + near_d))  # (n, own, others)
        lead = far.values[:, None, :n_others] - near.values[..., None] - 2 * doubt[..., None] - later
        apart = self._apart(near.indices, far.indices[:, :n_others])
        bisectors = torch.cat([lead / (2 * apart), margins[..., n_others:]], -1)
        chosen = bisectors if method == "bisector" else torch.minimum(margins, bisectors)[:, :1]
        radius = chosen.nan_to_num(nan=0.0).amin(-1).amax(-1).clamp(min=0.0) * (1 - 1e-12)
        return torch.where(radius.isfinite(), radius, 0.0)

    def _apart(self, own: Tensor, others: Tensor) -> Tensor:
        """Return upper bounds on the distances between prototypes, of shape (n, own, others)."""
        a, b = self.points[own], self.points[others]
        sizes = _squared(a)[..., None] + _squared(b)[:, None]
        error = 8 * (a.shape[-1] + 8) * verified.EPS * sizes
        return ((sizes - 2 * (a @ b.mT)).clamp(min=0.0) + error).sqrt() * (1 + 1e-12)

    def header(self) -> dict[str, Any]:
        """Return what a file must know besides the tensors: nothing."""
        return {}

    @classmethod
    def restored(cls, tensors: dict[str, Tensor], header: dict[str, Any]) -> NearestPrototypes:
        """Make the classifier from what a file holds."""
        return cls(tensors["points"], tensors["labels"])


def _squared(x: Tensor) -> Tensor:
    return x.square().sum(-1)
