"""Certified radii: how far an input can move, in Euclidean norm, before the predicted label can change.

For the predicted class i and any other j, y_i - y_j cannot fall by more than rho_ij |delta| when x moves by delta, so the label
stands for |delta| < min_j (y_i - y_j - errors) / rho_ij. The errors are those of the solve at x and, for the deployed solver,
of the solve at the perturbed input, of which only its test for convergence is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lrrn.certificates.complementarity import local_problem
from lrrn.certificates.errors import SolveErrors, check_guarantee
from lrrn.certificates.local import local_radius
from lrrn.certificates.outputs import pair_constants
from lrrn.certificates.shared import shared_form, shared_radii
from lrrn.network import LRRN
from lrrn.network.solution import Solution, top_two
from lrrn.qp import DEFAULT_TOL, row_norms

METHODS = ("auto", "paper", "pairwise", "spectral", "multiplier", "shared", "local")
BY_SAMPLE = ("shared", "local")
"""Methods that start from the multiplier bound and look at the samples."""


@final
@dataclass(frozen=True, eq=False)
class Certificate:
    """Labels, and how far each is guaranteed.

    Attributes
    ----------
    prediction : int64 Tensor of shape (n,)
        Number of the output that is largest; of equal ones the first, as ``argmax`` has it.
    margin : float64 Tensor of shape (n,)
        Largest output minus the second largest, as computed.
    radius : float64 Tensor of shape (n,)
        The label cannot change for any perturbation of smaller Euclidean norm. 0 where nothing is certified, in particular
        where the solve did not converge.
    error_bound : float64 Tensor of shape (n,)
        Proven bound on how far the margin at x is from that of the exact outputs.
    method : str
        How the Lipschitz constants were derived.
    guarantee : str
        "exact" speaks of the exact minimiser; "deployed" of this library's solver in float64 at the tolerance used here: the
        label it computes at the perturbed input is the same wherever its own solve converges.
    """

    prediction: Tensor
    margin: Tensor
    radius: Tensor
    error_bound: Tensor
    method: str
    guarantee: str

    def certified_accuracy(self, y: Tensor, eps: float) -> float:
        """Return the share of samples that are classified correctly and certified for every perturbation of norm ``eps``.

        Parameters
        ----------
        y : Tensor of shape (n,)
            Right labels, as output numbers.
        eps : float
            Size of the perturbation; 0 gives the plain accuracy.
        """
        return certified_share(self.prediction == torch.as_tensor(y).to(self.prediction), self.radius, eps)


def certified_share(right: Tensor, radius: Tensor, eps: float) -> float:
    """Return the share of samples that are right and certified for every perturbation of norm ``eps``."""
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0; got {eps}")
    return float((right if eps == 0 else right & (radius > eps)).double().mean())


def check_method(method: str) -> None:
    """Refuse an unknown method."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; use one of {', '.join(METHODS)}")


def certify(
    net: LRRN,
    x: Tensor,
    method: str = "auto",
    *,
    guarantee: str = "deployed",
    seconds: float | None = None,
    target_radius: float = math.inf,
    solver: str = "auto",
    tol: float | None = None,
    max_sweeps: int = 1000,
) -> Certificate:
    """Certify the labels a network predicts.

    Parameters
    ----------
    net : LRRN
        A network with at least two outputs, the largest of which is the label.
    x : Tensor of shape (n, d_0)
        Inputs; solved in float64 whatever their type.
    method : {"auto", "paper", "pairwise", "spectral", "multiplier", "shared", "local"}, default="auto"
        "paper" is the paper's margin / (sqrt(2) rho). The others use a constant for each pair of classes: "pairwise" from the
        paper's bound on the features, "spectral" from the tighter one, "multiplier" with one multiplier a unit optimised for
        each pair. "auto" is the best of these that its budget allows. "shared" and "local" start from "multiplier" and
        go on with what the state of each unit at a sample tells: the first for all samples at once, in a millisecond or two
        each at 128 units, the second one by one, in a fraction of a second each.
    guarantee : {"deployed", "exact"}, default="deployed"
        Whether to allow for the error of the solve at the perturbed input too.
    seconds : float, optional
        Budget for the constants, as in :meth:`LRRN.lipschitz`; they are remembered as long as the parameters stay.
    target_radius : float, optional
        Where only one size of perturbation counts: "shared" and "local" look at the samples whose other radius is smaller than
        this, and stop at it.
    solver, tol, max_sweeps
        As in :meth:`LRRN.infer`.

    Returns
    -------
    Certificate
        Prediction, margin, radius and error bound, per sample.
    """
    check_method(method)
    check_guarantee(guarantee)
    if net.sizes[-1] < 2:
        raise ValueError("a certificate compares outputs, and this network has one; see output_interval for regression")
    if not target_radius > 0:
        raise ValueError(f"target_radius must be a radius above 0; got {target_radius}")
    tol = DEFAULT_TOL[torch.float64] if tol is None else tol
    x = x.to(torch.float64)
    solution = net.infer(x, solver=solver, tol=tol, max_sweeps=max_sweeps)
    return certify_solution(net, x, solution, method, guarantee, seconds, tol, target_radius)


def certify_solution(
    net: LRRN,
    x: Tensor,
    solution: Solution,
    method: str,
    guarantee: str,
    seconds: float | None,
    tol: float,
    target_radius: float = math.inf,
) -> Certificate:
    """Certify labels whose solve is at hand, so that several methods need not repeat it.

    Parameters
    ----------
    net, x, method, guarantee, seconds, tol, target_radius
        As in :func:`certify`, but ``x`` in float64.
    solution : Solution
        Of :meth:`LRRN.infer` for this very ``x`` and ``tol``.

    Returns
    -------
    Certificate
    """
    constants = pair_constants(net, "multiplier" if method in BY_SAMPLE else method, seconds)
    errors = SolveErrors.of(net, x, solution, tol)
    y = solution.output
    best, runner_up = top_two(y)
    largest, second = (y.gather(1, which[:, None]) for which in (best, runner_up))
    margin = (largest - second)[:, 0]
    rho, scale, rounding = (table[best] for table in (constants.rho, constants.error, constants.rounding))  # (n, d_L)
    extra = torch.zeros_like(rho)
    doubt = scale * errors.here[:, None] + rounding * errors.size[:, None]
    # the exact lead over output j is within doubt_j of the computed one, and the margin is the least lead: another output
    # than the runner-up may be second in truth. If the label itself is another, top-1 minus top-2 is within the same bound
    error = (doubt - (second - y)).scatter(1, best[:, None], -math.inf).amax(-1)
    if guarantee == "deployed":
        doubt = doubt + scale * errors.later[:, None] + rounding * errors.size[:, None]
        extra = scale * errors.slope + rounding * errors.size_slope
    leads = largest - y - doubt
    radii = (leads / (rho + extra)).scatter(1, best[:, None], math.inf)
    radius = radii.amin(-1)
    energy = net.energy_snapshot(torch.float64)
    if method in BY_SAMPLE and energy.n_free > 0 and energy.free_mu > 0:
        radius = _radii_by_sample(net, x, solution, method, best, leads, torch.stack([rho, extra], -1), target_radius)
    radius = radius.clamp(min=0.0) * (1 - 1e-12)
    radius = torch.where(solution.converged & radius.isfinite(), radius, 0.0)
    return Certificate(best, margin, radius, error, method, guarantee)


def _radii_by_sample(
    net: LRRN, x: Tensor, solution: Solution, method: str, best: Tensor, leads: Tensor, rates: Tensor, target_radius: float
) -> Tensor:
    """Return radii seen from each sample: all at once, or one after the other."""
    problem, energy = local_problem(net), net.energy_snapshot(torch.float64)
    qp = energy.free(x)
    z = torch.cat(solution.activations[: energy.n_free], dim=-1)
    g = qp.gradient(z)
    g_error = energy.rounding.free.total(row_norms(z), row_norms(qp.q), row_norms(x))
    leads = torch.where(solution.converged[:, None], leads, 0.0)
    with problem.threads():
        radius = shared_radii(shared_form(net), z, g, g_error, best, leads, rates, target_radius)
        if method == "local":
            leads, rates = leads.cpu(), rates.cpu()
            for k in ((radius > 0) & (radius < target_radius)).nonzero().squeeze(1).tolist():
                alone = local_radius(problem, z[k], g[k], g_error[k], int(best[k]), leads[k], rates[k], target_radius)
                radius[k] = max(float(radius[k]), alone)
    return radius.to(x.device)
