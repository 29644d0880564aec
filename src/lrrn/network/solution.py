"""Results of inference: activations, energies, residuals, convergence status and error bounds."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from lrrn.energy import LiftedEnergy
from lrrn.qp import QPSolution, Status
from lrrn.runtime.lazy import lazy


@final
@dataclass(frozen=True, eq=False)
class Solution:
    """The solution of one inference problem per sample.

    Attributes
    ----------
    activations : list of L tensors of shape (n, d_k)
        z_1, ..., z_L.
    residual : Tensor of shape (n,)
        Euclidean norm of the KKT residual.
    n_sweeps : int64 Tensor of shape (n,)
        Sweeps or iterations spent.
    status : int64 Tensor of shape (n,)
        :class:`~lrrn.qp.Status` codes.
    solvers : tuple of str
        Names of the solvers used, in order.
    """

    activations: list[Tensor]
    residual: Tensor
    n_sweeps: Tensor
    status: Tensor
    solvers: tuple[str, ...]
    _energy: LiftedEnergy = field(repr=False)
    _x: Tensor = field(repr=False)
    _y: Tensor | None = field(repr=False)

    @property
    def output(self) -> Tensor:
        """z_L, of shape (n, d_L): the prediction."""
        return self.activations[-1]

    @property
    def converged(self) -> Tensor:
        """Whether the residual is at most tol * max(1, |q|), of shape (n,)."""
        return self.status == int(Status.CONVERGED)

    @lazy
    def energy(self) -> Tensor:
        """E(z; x) at these activations, of shape (n,); computed on first use."""
        return self._energy.value(self._x, [z.to(self._x.dtype) for z in self.activations])

    @lazy
    def error_bound(self) -> Tensor:
        """Proven bound on the distance of the stacked activations from the exact ones, of shape (n,), float64.

        Computed on first use, from the residual recomputed in float64, with rounding errors included. It covers the unknowns
        of the phase that was solved; an eliminated or clamped output is not among them. The error of an eliminated output is
        at most |W_{L-1}|_2 times this bound, plus the rounding of that product.
        """
        n_unknown = self._energy.n_free if self._y is None else self._energy.n_layers - 1
        if n_unknown == 0:
            return torch.zeros_like(self.residual)
        z = torch.cat(self.activations[:n_unknown], dim=-1)
        y = None if self._y is None else self._y.to(torch.float64)
        return self._energy.exact.error_bound(self._x.to(torch.float64), z, y)


@final
class ConvergenceError(RuntimeError):
    """Raised if a solve does not reach its tolerance and ``on_failure="raise"``."""


def raise_if_not_converged(solution: QPSolution, scale: Tensor, tol: float, what: str) -> None:
    """Raise a :class:`ConvergenceError` if samples missed the tolerance."""
    message = _missed(solution, scale, tol, what)
    if message is not None:
        raise ConvergenceError(message)


def warn_if_not_converged(solution: QPSolution, scale: Tensor, tol: float, what: str) -> None:
    """Issue scikit-learn's ConvergenceWarning if samples missed the tolerance."""
    message = _missed(solution, scale, tol, what)
    if message is not None:
        # lazy import: scikit-learn takes a second to load, and the warning is rarely needed
        from sklearn.exceptions import ConvergenceWarning

        warnings.warn(message, ConvergenceWarning, stacklevel=3)


def ignore_failures(solution: QPSolution, scale: Tensor, tol: float, what: str) -> None:
    """Do nothing; the caller checks the status."""


ON_FAILURE = {"warn": warn_if_not_converged, "raise": raise_if_not_converged, "ignore": ignore_failures}
"""Functions to call after a solve, by the value of ``on_failure``."""


def check_on_failure(on_failure: str) -> None:
    """Raise an error for an unknown value of ``on_failure``."""
    if on_failure not in ON_FAILURE:
        raise ValueError(f"on_failure must be one of {', '.join(map(repr, ON_FAILURE))}; got {on_failure!r}")


def _missed(solution: QPSolution, scale: Tensor, tol: float, what: str) -> str | None:
    """Return a message on the samples that missed the tolerance: number, largest residual, reasons; None if there are none."""
    if solution.certain or not bool(solution.status.any()):  # CONVERGED is 0
        return None
    missed = ~solution.converged
    worst = float((solution.residual[missed] / scale[missed]).max())
    reasons = Counter(Status(code) for code in solution.status[missed].tolist())
    why = "; ".join(f"{count} {status.message}" for status, count in reasons.most_common())
    return (
        f"{what}: {int(missed.sum())} of {len(missed)} samples did not converge; largest relative residual {worst:.2e} against "
        f"tol {tol:.0e} ({why})"
    )


def top_two(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the largest and the second largest score of each row. Ties go to the first index.

    ``argmax`` breaks ties in the same way, and so does every prediction of a label here. ``topk`` guarantees no order of ties.
    """
    best = scores.argmax(-1)
    return best, scores.scatter(-1, best.unsqueeze(-1), -torch.inf).argmax(-1)
