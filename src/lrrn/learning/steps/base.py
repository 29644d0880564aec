"""Interface of the gradient backends."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from lrrn.kernels.constants import LANES
from lrrn.kernels.cpu.arguments import Course, Rule
from lrrn.learning.flat import FlatParameters
from lrrn.learning.objectives import Batch, Objective
from lrrn.learning.settings import Settings
from lrrn.network import LRRN
from lrrn.network.policy import SolvePolicy

PART_ROWS, PART_WORK, MOST_PARTS = 48, 2**20, 8
"""Minimum rows per part of a batch, minimum multiply-adds per sweep over them, and maximum number of parts. They do not depend
on the number of threads, so that sums do not either."""


class GradientBackend(Protocol):
    """Computes the gradient of a batch.

    Attributes
    ----------
    name : str
        Name in the history.
    reads_rows : bool
        Whether it gathers rows of the data itself, which avoids a copy.
    """

    name: str
    reads_rows: bool

    def __init__(self, net: LRRN, objective: Objective, flat: FlatParameters, aim: float) -> None:
        """Prepare for batches of a network; its parameters are attached to ``flat``."""

    @staticmethod
    def applies(net: LRRN, objective: Objective, settings: Settings) -> bool:
        """Whether this backend supports this network and this objective."""
        ...

    def gradients(self, batch: Batch, weight: Tensor | None, n: int, rows: Tensor | None) -> float | Tensor | None:
        """Set the gradients of the contribution of a batch to the mean loss over ``n`` samples; return this contribution.

        Parameters
        ----------
        batch : Batch
            ``batch.activations`` is set to the activations of the free phase.
        weight : Tensor of shape (n_rows,), optional
            Sample weights; one if not given.
        n : int
            Samples of the whole batch; this may be one rank's part of it.
        rows : Tensor of shape (n_rows,), optional
            Rows of ``batch.x`` and ``batch.target`` to use; all if not given.

        Returns
        -------
        float, Tensor of shape () or None
            None passes the batch to the next backend; ``batch.start`` may then be closer to the solution.
        """
        ...


@runtime_checkable
class SeveralSteps(Protocol):
    """A backend that takes several steps in one call, updates included."""

    name: str

    def takes_several(self, size: int, policy: SolvePolicy) -> bool:
        """Whether it takes several steps in one call with batches of this size."""
        ...

    def several(self, course: Course, progress: np.ndarray, rule: Rule, policy: SolvePolicy, totals: np.ndarray) -> int:
        """Take steps; return how many were taken: fewer if one converges slowly.

        Parameters
        ----------
        course : Course
            The steps, and the data.
        progress : array of shape (n_steps,)
            Completed share of training before each step.
        rule : Rule
            How the parameters are updated.
        policy : SolvePolicy
        totals : float64 array of shape (2,)
            The sum of losses, added to step by step, and the number of sweeps.
        """
        ...


def shares(like: Tensor, weight: Tensor | None, here: int, n: int) -> Tensor:
    """Return the factors of ``here`` samples in the mean over ``n``."""
    return like.new_full((here,), 1 / n) if weight is None else weight / n


def parts_of(n: int, work: int) -> int:
    """Return the number of parts of a batch of ``n`` rows, each with ``work`` multiply-adds per sweep.

    It is a power of two, which most thread counts divide evenly. Several steps on batches of one part are a single compiled
    call: with little work, a second thread saves less time than that.
    """
    parts = 1
    while 2 * parts <= MOST_PARTS and n >= 2 * parts * PART_ROWS and n * work >= 2 * parts * PART_WORK:
        parts *= 2
    return parts


def edges_of(n: int, parts: int) -> list[int]:
    """Return the boundaries of the parts of a batch of ``n`` rows; parts after the first are whole SIMD vectors of samples."""
    return [0, *(n - LANES * round(n * (parts - i) / parts / LANES) for i in range(1, parts)), n]


def course_samples(course: Course, steps: int) -> int:
    """Return the number of samples of the first steps of a course."""
    first = course.first * course.size
    return min(first + steps * course.size, len(course.order)) - first if steps else 0
