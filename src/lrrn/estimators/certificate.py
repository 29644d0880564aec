"""What one solve says about samples: labels, margins, certified radii and energies, as arrays."""

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
    """Labels, and how far each is guaranteed.

    Attributes
    ----------
    prediction : array of shape (n_samples,)
        Labels, as ``predict`` returns them.
    margin : array of shape (n_samples,)
        By how much the label leads, as computed: over the second largest score, or against the threshold of an energy model.
    radius : array of shape (n_samples,)
        In the units of X: the label cannot change for any perturbation of smaller Euclidean norm. 0 where nothing is certified,
        in particular where the solve did not converge.
    energy : array of shape (n_samples,)
        Free energies, as ``energy`` returns them.
    converged : bool array of shape (n_samples,)
        Whether the solve met its tolerance.
    method : str
        How the radii were derived.
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
            Right labels.
        eps : float
            Size of the perturbation, in the units of X; 0 gives the plain accuracy.
        """
        right = torch.as_tensor(np.asarray(self.prediction == np.asarray(y)))
        return certified_share(right, torch.as_tensor(self.radius), eps)


@final
@dataclass(frozen=True, eq=False)
class RegressionCertificate:
    """Predictions, and how far each can move.

    Attributes
    ----------
    prediction : array of shape (n_samples,) or (n_samples, n_targets)
        As ``predict`` returns them.
    intervals : dict from float to (lower, upper)
        For every size of perturbation, in the units of X: arrays of the shape of ``prediction`` between which predictions stay;
        infinite where the solve did not converge.
    energy : array of shape (n_samples,)
        Free energies, as ``energy`` returns them.
    converged : bool array of shape (n_samples,)
        Whether the solve met its tolerance.
    """

    prediction: Array
    intervals: dict[float, tuple[Array, Array]]
    energy: Array
    converged: Array
