"""Results of one solve per sample, as arrays: labels, margins, certified radii and energies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import ArrayLike

from lrrn.certificates.radius import certified_share
from lrrn.estimators._base import Array


@final
@dataclass(frozen=True, eq=False)
class SampleCertificate:
    """Labels and their certified radii.

    Attributes
    ----------
    prediction : array of shape (n_samples,)
        Labels, as ``predict`` returns them.
    margin : array of shape (n_samples,)
        Computed margin: largest minus second largest score, or the distance from the threshold of an energy model.
    radius : array of shape (n_samples,)
        In the units of X: the label cannot change for any perturbation of smaller Euclidean norm. 0 where nothing is certified,
        in particular where the solve did not converge.
    energy : array of shape (n_samples,)
        Free energies, as ``energy`` returns them.
    converged : bool array of shape (n_samples,)
        Whether the solve met its tolerance.
    method : str
        Method that derived the radii.
    """

    prediction: Array
    margin: Array
    radius: Array
    energy: Array
    converged: Array
    method: str

    def certified_accuracy(self, y: ArrayLike, eps: float) -> float:
        """Return the share of samples that are classified correctly and certified for every perturbation of norm ``eps``.

        Parameters
        ----------
        y : array of shape (n_samples,)
            True labels.
        eps : float
            Size of the perturbation, in the units of X; 0 gives the plain accuracy.
        """
        right = torch.as_tensor(np.asarray(self.prediction == np.asarray(y)))
        return certified_share(right, torch.as_tensor(self.radius), eps)


@final
@dataclass(frozen=True, eq=False)
class RegressionCertificate:
    """Predictions and their certified intervals.

    Attributes
    ----------
    prediction : array of shape (n_samples,) or (n_samples, n_targets)
        As ``predict`` returns them.
    intervals : dict from float to (lower, upper)
        For every size of perturbation, in the units of X: certified bounds on the predictions, as arrays of the shape of
        ``prediction``; infinite where the solve did not converge.
    energy : array of shape (n_samples,)
        Free energies, as ``energy`` returns them.
    converged : bool array of shape (n_samples,)
        Whether the solve met its tolerance.
    """

    prediction: Array
    intervals: dict[float, tuple[Array, Array]]
    energy: Array
    converged: Array
