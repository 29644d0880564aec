"""Certificates of a classifier's labels."""

from __future__ import annotations

import math

import torch
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d
from torch import Tensor

from lrrn.bounds import LipschitzBound
from lrrn.certificates.class_energies import certify_energies
from lrrn.certificates.radius import certify_solution, check_method, chosen_method, takes_products
from lrrn.estimators._base import Array, LiftedEstimator
from lrrn.estimators.certificate import SampleCertificate
from lrrn.estimators.parameters import checked_size
from lrrn.learning.settings import checked_number
from lrrn.qp import DEFAULT_TOL


class CertifiedLabels(LiftedEstimator):
    """Mixin for an estimator that predicts the largest output of the network, or the label of least class energy."""

    objective: str | None
    classes_: Array

    def _constant(self) -> LipschitzBound:
        if self.objective == "class_energy":
            raise AttributeError(
                "lipschitz_ needs scores that have a Lipschitz constant; energies, the scores of objective 'class_energy', are "
                "quadratic in X. certificate(X) has certified radii"
            )
        if len(self.classes_) > 2:
            return self.network_.lipschitz()
        return self.network_.lipschitz(pair=(0, 1))  # the one score is the difference of two outputs

    def certificate(
        self,
        X: ArrayLike,
        method: str = "auto",
        seconds: float | None = None,
        target_radius: float = math.inf,
        norm: str | None = None,
    ) -> SampleCertificate:
        """Return labels, margins, certified radii and energies of samples, all from one solve.

        The radii hold for the labels that :meth:`predict` computes, solver error and rounding included, at every perturbed
        input whose solve converges. Where it does not, :meth:`predict` warns, or raises with ``on_failure="raise"``.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
        method : {"auto", "paper", "pairwise", "spectral", "multiplier", "shared", "branched", "local"}, default="auto"
            As in :func:`lrrn.certify`. Labels predicted by class energies are certified by bounds on their differences.
        seconds : float, optional
            Time budget for the constants common to all samples, as in :func:`lrrn.certify`.
        target_radius : float, optional
            As in :func:`lrrn.certify`, in the norm of the radii.
        norm : {None, "input", "scaled"}, default=None
            Norm of the radii: "input" is Euclidean in the units of X, "scaled" Euclidean after every feature is divided by its
            ``scale_in_``. None is "scaled" with ``standardize="features"``, otherwise "input".

        Returns
        -------
        SampleCertificate
        """
        check_is_fitted(self, "network_")
        target_radius = checked_number("target_radius", target_radius, "be a radius above 0", lambda radius: radius > 0)
        named, by_energy = self._norm(norm), self.objective == "class_energy"
        if by_energy and method not in ("auto", "energy"):
            raise ValueError(f"objective 'class_energy' has one method, 'energy'; got {method!r}")
        if not by_energy:
            check_method(method)

        def work(x: Tensor) -> dict[str, Tensor]:
            free = self._infer(x)
            reach = self.scaling.reach(target_radius, x, norm) if target_radius < math.inf else target_radius
            if by_energy:
                certificate = certify_energies(self.network_, x, max_sweeps=self.max_sweeps)
            else:
                given = ("deployed", seconds, DEFAULT_TOL[torch.float64], reach)
                certificate = certify_solution(self.network_, x, free, method, *given)
            return {
                "prediction": certificate.prediction,
                "margin": certificate.margin,
                "radius": self.scaling.radius(certificate.radius, x, norm),
                "energy": free.energy,
                # every class energy has its own solve
                "converged": free.converged & certificate.error_bound.isfinite() if by_energy else free.converged,
            }

        columns = self._columns(X, work)
        columns["prediction"] = self.classes_[columns["prediction"]]
        chosen, scale = self._chosen_method(method), self.scaling.feature_scale(norm)
        by_products = not by_energy and takes_products(self.network_, chosen)
        return SampleCertificate(**columns, method=chosen, norm=named, feature_scale=scale, by_products=by_products)

    def _chosen_method(self, method: str) -> str:
        """Return the method that derives the radii when ``method`` is asked for."""
        return "energy" if self.objective == "class_energy" else chosen_method(self.network_, method)

    def certified_radius(
        self,
        X: ArrayLike,
        method: str = "auto",
        seconds: float | None = None,
        target_radius: float = math.inf,
        norm: str | None = None,
    ) -> Array:
        """Return the radius within which the predicted label of each sample is proven not to change.

        Parameters
        ----------
        X, method, seconds, target_radius, norm
            As in :meth:`certificate`, which returns the labels too.

        Returns
        -------
        array of shape (n_samples,)
        """
        return self.certificate(X, method, seconds, target_radius, norm).radius

    def certified_score(self, X: ArrayLike, y: ArrayLike, eps: float, method: str = "auto", norm: str | None = None) -> float:
        """Return the certified accuracy: the share of samples classified correctly and certified for norm ``eps``.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
        y : array of shape (n_samples,)
        eps : float
            Size of the perturbation.
        method, norm
            As in :meth:`certificate`; ``norm`` measures ``eps``.

        Returns
        -------
        float
        """
        eps = checked_size(eps)
        y = column_or_1d(y)
        check_consistent_length(X, y)
        # by default, the radii of certified_radius to the last digit; a search up to eps may prove slightly larger ones
        target = eps if eps > 0 and method != "auto" else math.inf
        return self.certificate(X, method, target_radius=target, norm=norm).certified_accuracy(y, eps)
