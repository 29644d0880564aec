"""Nearest-prototype classifier: predicts the label of the nearest prototype. All training samples may be prototypes.

The certificate: x + u is nearer to w_i than to w_j as long as |u| < (|x - w_j|^2 - |x - w_i|^2) / (2 |w_i - w_j|), the distance
to the bisecting hyperplane. If w_i has the predicted label and this holds for every w_j of another label, the label does not
change: *some* prototype of its class is nearer than all others, whichever is the nearest then. So the "bisector" radius is the
maximum over w_i of the minimum over w_j; only some of the w_i are tried. By the triangle inequality, (d_j - d_i) / 2 is a lower
bound on each term. With the nearest prototypes of both kinds it is the "margin" radius. Rounding errors are subtracted
throughout.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from lrrn.linalg import verified

BLOCK_NUMBERS = 2**24
"""Largest number of entries of an array in memory."""
OWN = 8
"""Number of prototypes of the predicted label that are tried."""


@final
class NearestPrototypes(nn.Module):
    """Scores are minus the squared distance to the nearest prototype of each class, in float64.

    Parameters
    ----------
    prototypes : Tensor of shape (m, d)
    labels : int64 Tensor of shape (m,)
        Class indices; every class up to the largest needs a prototype.
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
        """Number of stored parameters."""
        return self.points.numel()

    def forward(self, x: Tensor) -> Tensor:
        """Return minus the squared distance to the nearest prototype of each class, of shape (n, n_classes)."""
        with torch.no_grad():
            nearest = torch.cat([self._nearest(part) for part in x.split(max(1, BLOCK_NUMBERS // len(self.points)))])
        # the final distances are computed from differences, to be differentiable and to avoid cancellation
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

    def radii(self, x: Tensor, method: str = "bisector") -> Tensor:
        """Return certified radii.

        Parameters
        ----------
        x : float64 Tensor of shape (n, d)
        method : {"margin", "bisector"}

        Returns
        -------
        float64 Tensor of shape (n,)
        """
        one = self._margins if method == "margin" else self._bisectors
        rows = max(1, BLOCK_NUMBERS // (len(self.points) * (1 if method == "margin" else OWN)))
        radius = torch.cat([one(part) for part in x.split(rows)]).clamp(min=0.0) * (1 - 1e-12)
        return torch.where(radius.isfinite(), radius, 0.0)

    def _margins(self, x: Tensor) -> Tensor:
        own, others, _, doubt, later = self._split(x)
        near, far = (own.amin(1) + doubt).sqrt(), (others.amin(1) - doubt).clamp(min=0.0).sqrt()
        return (far - near) / 2 - later / (2 * (far + near))

    def _bisectors(self, x: Tensor) -> Tensor:
        own, others, same, doubt, later = self._split(x)
        least, rival = others.min(1)
        # the bisector with the nearest rival is an upper bound on a prototype's radius: try those with the largest bound
        hope = (least[:, None] - own) / self._apart(self.points[rival])
        chosen = hope.topk(min(OWN, hope.shape[1]), dim=1).indices
        lead = others[:, None] - own.gather(1, chosen)[..., None] - (2 * doubt + later)[:, None, None]  # (n, chosen, m)
        apart = self._apart(self.points[chosen].flatten(0, 1)).reshape(lead.shape)
        radii = (lead / (2 * apart)).amin(-1)
        # if the class has fewer prototypes than are tried, the rest belong to other classes and are ignored
        return radii.masked_fill(~same.gather(1, chosen), 0.0).amax(-1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return squared distances to prototypes of the label and to the others, infinite where they do not apply.

        Also returns a mask of the prototypes of the label, a bound on the rounding error of the squares, and a bound on the
        effect of rounding at x + u. There the errors of squares are at most four times as large, since the radius is at most
        |x| + |w|. A label is computed from two squares, and each may belong to another prototype at the same distance within
        that error.
        """
        squares, doubt = self._squares(x), self._doubt(x)
        same = self.labels == self(x).argmax(-1)[:, None]
        return squares.masked_fill(~same, math.inf), squares.masked_fill(same, math.inf), same, doubt, 16 * doubt

    def _apart(self, points: Tensor) -> Tensor:
        """Return upper bounds on distances to all prototypes."""
        sizes = _squared(points)[:, None] + _squared(self.points)
        error = 8 * (points.shape[1] + 8) * verified.EPS * sizes
        return ((sizes - 2 * (points @ self.points.mT)).clamp(min=0.0) + error).sqrt() * (1 + 1e-12)

    def header(self) -> dict[str, Any]:
        """Return the metadata that a file stores besides the tensors: none."""
        return {}

    @classmethod
    def restored(cls, tensors: dict[str, Tensor], header: dict[str, Any]) -> NearestPrototypes:
        """Create the classifier from the contents of a file."""
        return cls(tensors["points"], tensors["labels"])


def _squared(x: Tensor) -> Tensor:
    return x.square().sum(-1)
