"""The quadratic part of the shared dual of one layer, in the eigenvectors of A A^T; inverted with penalties on p and r."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from lrrn.linalg.operators import Operator

ROWS = 256
"""Columns of A^T A that are computed at once."""
SMALLEST = 1e-6
"""Smallest eigenvalue in use, relative to the largest."""

Number = TypeVar("Number", float, Tensor)


@final
class Form(NamedTuple, Generic[Number]):
    """Entries of a symmetric form in two numbers, or of its inverse."""

    pp: Number
    pr: Number
    rr: Number


@final
class Spectrum:
    """Eigenvectors V and eigenvalues e of A^T A, and the form at every e.

    With h = (a (1 + beta))^2 / 2, 1 / k = 2 a lambda + (2 a lambda beta - lambda^2 h) e and m = a + (a beta - lambda h) e, the
    form is [[k, k m], [k m, k m^2 + h e]]. In the null space of A^T, it is that of e = 0.

    Parameters
    ----------
    operator : Operator
        A.
    a, beta, multiplier : float
        Discount and beta of the layer, and lambda.

    Attributes
    ----------
    at_mean : Form
        The form at the mean eigenvalue of A A^T.
    """

    def __init__(self, operator: Operator, a: float, beta: float, multiplier: float) -> None:
        rows, columns = operator.shape
        self.operator, h = operator, (a * (1 + beta)) ** 2 / 2
        self._h, self._a, self._curvature = h, a, 2 * a * multiplier
        self._slopes = a * beta - multiplier * h, self._curvature * beta - multiplier**2 * h
        unit = torch.eye(columns, dtype=operator.weight.dtype, device=operator.weight.device)
        gram = torch.cat([operator.adjoint(operator.apply(part)) for part in unit.split(ROWS)])
        # eigh raises an error for what is not finite; NaN proves nothing
        values, self.vectors = gram[0] * torch.nan, gram
        if bool(gram.isfinite().all()):
            values, self.vectors = torch.linalg.eigh((gram + gram.mT) / 2)
        self.values = values.clamp(min=max(SMALLEST * float(values[-1]), 1e-30))
        self.at_mean = self._form(float(values.clamp(min=0.0).sum()) / rows)

    def _form(self, e: Number) -> Form[Number]:
        m, k = e * self._slopes[0] + self._a, 1 / (e * self._slopes[1] + self._curvature)
        return Form(k, k * m, k * m * m + e * self._h)

    def inverse(self, p: Tensor, r: Tensor) -> Inverse:
        """Return the inverse with penalties on p and on r, both of shape (n, 1)."""
        outside = _inverted(self._form(torch.zeros_like(p)), p, r)
        inside = _inverted(self._form(self.values), p, r)
        return Inverse(self, outside, Form(*((new - old) / self.values for new, old in zip(inside, outside, strict=True))))


def _inverted(form: Form[Tensor], p: Tensor, r: Tensor) -> Form[Tensor]:
    pp, rr = form.pp + p, form.rr + r
    det = pp * rr - form.pr * form.pr
    return Form(rr / det, -form.pr / det, pp / det)


@final
@dataclass(frozen=True)
class Inverse:
    """The inverse: ``outside`` in the null space of A^T, and the change from there, per unit of the eigenvalue."""

    spectrum: Spectrum
    outside: Form[Tensor]
    change: Form[Tensor]

    def solved(self, p: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply rows of p and r."""
        operator, vectors, out, change = self.spectrum.operator, self.spectrum.vectors, self.outside, self.change
        p_in, r_in = (operator.adjoint(torch.cat([p, r])) @ vectors).split(len(p))
        both = torch.cat([change.pp * p_in + change.pr * r_in, change.pr * p_in + change.rr * r_in])
        p_more, r_more = operator.apply(both @ vectors.mT).split(len(p))
        return out.pp * p + out.pr * r + p_more, out.pr * p + out.rr * r + r_more
