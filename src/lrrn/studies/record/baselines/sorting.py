"""Dense networks with sorting activations, as exported from 1-Lipschitz libraries; without hidden layers, linear classifiers.

The certificate is about the network of the exported weights, computed in float64. Sorting a group of numbers is 1-Lipschitz.
So the Lipschitz constant of the last layer's input is at most the product of the hidden weights' spectral norms, and that of
y_i - y_j is at most |w_i - w_j| times this product. The norms are not estimates of a power iteration during training: they are
computed from all singular values and proven by a verified factorisation. The rounding error of the scores, at x and at the
perturbed input, is subtracted. The certificate does not cover the float32 network that was trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from lrrn.linalg import verified
from lrrn.runtime.lazy import lazy

_UP = 1 + 1e-12
"""Covers the rounding of norms and products of a few float64 numbers."""


def _group_sort(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).sort(-1).values.flatten(-2)


def _max_min(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], -1)


SORTS: dict[str, Callable[[Tensor], Tensor]] = {
    "group_sort": _group_sort,
    "max_min": _max_min,
    "full_sort": lambda x: x.sort(-1).values,
}
"""Sorting activations by name: adjacent pairs (torchlip's GroupSort2), pairs half a layer apart (orthogonium's MaxMin), all."""


@final
class SortNetwork(nn.Module):
    """Affine layers with a sort after each but the last, in float64.

    Parameters
    ----------
    weights, biases : sequences of Tensor
        Weights of shape (d_{k+1}, d_k) and biases of shape (d_{k+1},).
    sort : {"group_sort", "max_min", "full_sort"}, default="group_sort"
    """

    kind: ClassVar[str] = "sort network"
    methods: ClassVar[tuple[str, ...]] = ("pairwise",)

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor], sort: str = "group_sort") -> None:
        super().__init__()
        if sort not in SORTS:
            raise ValueError(f"unknown sort {sort!r}; use one of {', '.join(SORTS)}")
        odd = [len(w) for w in weights[:-1] if len(w) % 2 and sort != "full_sort"]
        if odd:
            raise ValueError(f"{sort} pairs units, so layers need even widths; got {odd[0]}")
        self.sort = sort
        self.weights, self.biases = (
            nn.ParameterList(nn.Parameter(t.detach().to(torch.float64, copy=True), requires_grad=False) for t in several)
            for several in (weights, biases)
        )

    @property
    def n_parameters(self) -> int:
        """Number of learnt parameters."""
        return sum(t.numel() for t in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores, of shape (n, n_classes)."""
        for w, b in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = SORTS[self.sort](nn.functional.linear(x, w, b))
        return nn.functional.linear(x, self.weights[-1], self.biases[-1])

    def radii(self, x: Tensor, method: str = "pairwise") -> Tensor:
        """Return certified radii: min_j (y_i - y_j - rounding) / (|w_i - w_j| times the norms of the layers before).

        Parameters
        ----------
        x : float64 Tensor of shape (n, d_0)
        method : {"pairwise"}

        Returns
        -------
        float64 Tensor of shape (n,)
            Without hidden layers, the distances to the nearest decision boundary, up to rounding.
        """
        y = self(x)
        best = y.argmax(-1)
        rho = _distances(self.weights[-1])[best] * (math.prod(self.norms[:-1]) * _UP)  # (n, n_classes)
        still, growing = self._rounding()
        # the error of y_i - y_j is at most sqrt(2) times that of y; the error at the perturbed input grows with its norm
        lead = y.gather(1, best[:, None]) - y - 2 * math.sqrt(2) * (still + growing * _norms(x))[:, None]
        radii = lead / (rho + math.sqrt(2) * growing)
        radius = radii.scatter(1, best[:, None], math.inf).amin(-1).clamp(min=0.0) * (1 - 1e-12)
        return torch.where(radius.isfinite(), radius, 0.0)

    @lazy
    def norms(self) -> tuple[float, ...]:
        """Proven upper bounds on the spectral norms of the layers, computed once: the weights never change."""
        return tuple(proven_norm(w) for w in self.weights)

    def _rounding(self) -> tuple[float, float]:
        """Return a and b such that the computed scores are within a + b |x| of the exact ones, in norm.

        A layer's product has an error of at most gamma |W|_F |input| in any summation order, plus the propagated earlier error.
        """
        size, error = (0.0, 1.0), (0.0, 0.0)  # both affine in |x|
        for w, b, norm in zip(self.weights, self.biases, self.norms, strict=True):
            gamma = 2 * (w.shape[1] + 4) * verified.EPS
            frobenius, shift = float(w.norm()), float(b.norm())
            fresh = (gamma * (frobenius * size[0] + shift), gamma * frobenius * size[1])
            error = (norm * error[0] + 2 * fresh[0], norm * error[1] + 2 * fresh[1])
            size = (norm * size[0] + shift + error[0], norm * size[1] + error[1])
        return error

    def header(self) -> dict[str, str]:
        """Return the metadata that a file stores besides the tensors."""
        return {"sort": self.sort}

    @classmethod
    def restored(cls, tensors: dict[str, Tensor], header: dict[str, str]) -> SortNetwork:
        """Create the network from the contents of a file."""
        n = sum(name.startswith("weights.") for name in tensors)
        return cls([tensors[f"weights.{k}"] for k in range(n)], [tensors[f"biases.{k}"] for k in range(n)], header["sort"])


def proven_norm(w: Tensor) -> float:
    """Return a proven upper bound on the largest singular value, tight to about nine digits.

    ``verified.spectral_norm`` estimates large norms from a subspace and adds a percent. That is too loose for a product of
    layers trained to norm one, so this function computes all singular values.
    """
    w = w.detach().to(torch.float64)
    thin = w if len(w) <= w.shape[1] else w.mT
    gram, error = verified.squared(thin)
    largest = float(torch.linalg.eigvalsh(gram.diag[0])[-1])
    candidate = largest * (1 + 1e-10) + 2 * verified.margin(gram, largest, error)
    if verified.is_positive_definite(gram.negated(), candidate, error):
        return math.sqrt(candidate) * (1 + 4 * verified.EPS)
    return verified.spectral_norm(w)


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1) * _UP


def _distances(w: Tensor) -> Tensor:
    # the faster formula with inner products suffers from cancellation
    return torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist") * _UP
