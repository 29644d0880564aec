"""What inference returns: activations, energies, and what each answer is worth."""

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
    """The answer to one inference problem per sample.

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
        The solvers that worked on the batch, in order.
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

        Computed on first use, from a float64 recomputation of the residual; rounding is inside it. It covers the unknowns of
        the phase that was solved: an eliminated or a clamped output is not among them. An eliminated output is off by at
        most |W_{L-1}|_2 times this, plus the rounding of that product.
        """
        n_unknown = self._energy.n_free if self._y is None else self._energy.n_layers - 1
        if n_unknown == 0:
            return torch.zeros_like(self.residual)
        z = torch.cat(self.activations[:n_unknown], dim=-1)
        y = None if self._y is None else self._y.to(torch.float64)
        return self._energy.exact.error_bound(self._x.to(torch.float64), z, y)


@final
class ConvergenceError(RuntimeError):
    """A solve missed its tolerance, and the caller asked for an error where that happens."""


def raise_if_not_converged(solution: QPSolution, scale: Tensor, tol: float, what: str) -> None:
    """Raise a :class:`ConvergenceError` if samples missed the tolerance."""
    message = _missed(solution, scale, tol, what)
    if message is not None:
        raise ConvergenceError(message)


def warn_if_not_converged(solution: QPSolution, scale: Tensor, tol: float, what: str) -> None:
    """Issue scikit-learn's ConvergenceWarning if samples missed the tolerance."""
    message = _missed(solution, scale, tol, what)
    if message is not None:
        # imported here because scikit-learn takes a second to load and most sessions never need the warning
        from sklearn.exceptions import ConvergenceWarning

        warnings.warn(message, ConvergenceWarning, stacklevel=3)


def ignore_failures(solution: QPSolution, scale: Tensor, tol: float, what: str) -> None:
    """Leave it to the caller to look at the status."""


ON_FAILURE = {"warn": warn_if_not_converged, "raise": raise_if_not_converged, "ignore": ignore_failures}
"""What may be done where samples miss the tolerance."""


def check_on_failure(on_failure: str) -> None:
    """Refuse an unknown way to treat samples that do not converge."""
    if on_failure not in ON_FAILURE:
        raise ValueError(f"on_failure must be one of {', '.join(map(repr, ON_FAILURE))}; got {on_failure!r}")


def _missed(solution: QPSolution, scale: Tensor, tol: float, what: str) -> str | None:
    """Return how many samples missed the tolerance, by how much and why; None if all converged."""
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
    """Return the label of each row of scores, and the runner-up: of equal scores the first counts as the larger.

    ``argmax`` follows the same rule, and so does everything that names a label here; ``topk`` promises none.
    """
    best = scores.argmax(-1)
    return best, scores.scatter(-1, best.unsqueeze(-1), -torch.inf).argmax(-1)
