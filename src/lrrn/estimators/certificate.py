"""Results of one solve per sample, as arrays: labels, margins, certified radii and energies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, final

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils.validation import column_or_1d

from lrrn.certificates.radius import certified_share
from lrrn.estimators._base import Array
from lrrn.estimators.parameters import checked_size


def true_labels(y: ArrayLike, predicted: Array) -> Array:
    """Return labels as a one-dimensional array; raise if there are not as many as predictions, or of another type."""
    labels = cast(Array, column_or_1d(y))
    if len(labels) != len(predicted):
        raise ValueError(f"y must have a label for each of the {len(predicted)} samples; got {len(labels)}")
    if len(labels) and isinstance(labels[0], str) != isinstance(predicted[0], str):
        raise ValueError(f"y has labels such as {labels[0]!r}, and predictions are of another type, such as {predicted[0]!r}")
    return labels


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
        The label cannot change for any perturbation of smaller norm. 0 where nothing is certified, in particular where the
        solve did not converge.
    energy : array of shape (n_samples,)
        Free energies, as ``energy`` returns them.
    converged : bool array of shape (n_samples,)
        Whether the solve met its tolerance.
    method : str
        Method that derived the radii.
    norm : {"euclidean", "scaled"}
        Norm of the radii: the Euclidean norm in the units of X, or the Euclidean norm after every feature is divided by its
        scale.
    feature_scale : array of shape (n_features,)
        How far each feature may move, alone and in its own units, per unit of the radius; 0 for a feature that the certificate
        holds fixed, such as a category.
    by_products : bool
        As of :class:`lrrn.Certificate`.
    """

    prediction: Array
    margin: Array
    radius: Array
    energy: Array
    converged: Array
    method: str
    norm: str
    feature_scale: Array
    by_products: bool = False

    def feature_radius(self) -> Array:
        """Return how far each feature may move alone, in its own units, without a change of the label.

        Returns
        -------
        array of shape (n_samples, n_features)
            No statement about several features that move at once: that is ``radius``.
        """
        return self.radius[:, None] * self.feature_scale

    def certified_accuracy(self, y: ArrayLike, eps: float) -> float:
        """Return the share of samples that are classified correctly and certified for every perturbation of norm ``eps``.

        Parameters
        ----------
        y : array of shape (n_samples,)
            True labels.
        eps : float
            Size of the perturbation, in the norm of the radii; 0 gives the plain accuracy.
        """
        eps = checked_size(eps)
        right = torch.as_tensor(np.asarray(self.prediction == true_labels(y, self.prediction)))
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
        For every size of perturbation: certified bounds on the predictions, as arrays of the shape of ``prediction``; infinite
        where the solve did not converge.
    energy : array of shape (n_samples,)
        Free energies, as ``energy`` returns them.
    converged : bool array of shape (n_samples,)
        Whether the solve met its tolerance.
    norm : {"euclidean", "scaled"}
        Norm of the sizes: the Euclidean norm in the units of X, or the Euclidean norm after every feature is divided by its
        scale.
    """

    prediction: Array
    intervals: dict[float, tuple[Array, Array]]
    energy: Array
    converged: Array
    norm: str
