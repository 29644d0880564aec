"""Certified radii: Euclidean distance within which the predicted label is proven not to change.

For the predicted class i and any other j, y_i - y_j cannot fall by more than rho_ij |delta| when x moves by delta, so the label
is unchanged for |delta| < min_j (y_i - y_j - errors) / rho_ij. The errors are those of the solve at x and, for the deployed
guarantee, of the solve at the perturbed input. Of the latter it is only known that it met the termination criterion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lrrn.bounds.outputs import pair_constants
from lrrn.certificates.branching import Branching
from lrrn.certificates.complementarity import local_problem
from lrrn.certificates.errors import SolveErrors, check_guarantee
from lrrn.certificates.inputs import as_vectors, check_network
from lrrn.certificates.local import local_radius
from lrrn.certificates.matrix_free import form_of, has_layer_multipliers, matrix_free_radii, takes_operators
from lrrn.certificates.nearest import Dual
from lrrn.certificates.shared import SEARCHED, shared_duals, shared_radii
from lrrn.energy import LiftedEnergy
from lrrn.network import LRRN
from lrrn.network.solution import Solution, top_two
from lrrn.qp import DEFAULT_TOL, row_norms

METHODS = ("auto", "paper", "pairwise", "spectral", "multiplier", "shared", "branched", "local")
BY_SAMPLE = ("shared", "branched", "local")
"""Methods that start from constants and improve the radius per sample."""
WIDE_UNITS, OUTPUTS = 4096, 128
"""Largest numbers of unknown units and of outputs for which "auto" is "shared", if it needs no search for multipliers."""


@final
@dataclass(frozen=True, eq=False)
class Certificate:
    """Labels and their certified radii.

    Attributes
    ----------
    prediction : int64 Tensor of shape (n,)
        Index of the largest output; the first in a tie, as in ``argmax``.
    margin : float64 Tensor of shape (n,)
        Largest output minus the second largest, as computed.
    radius : float64 Tensor of shape (n,)
        The label cannot change for any perturbation of smaller Euclidean norm. 0 where nothing is certified, in particular
        where the solve did not converge.
    error_bound : float64 Tensor of shape (n,)
        Proven bound on the difference between the margin at x and that of the exact outputs.
    method : str
        Method that derived the radii. "auto" is replaced by the method that it chose.
    guarantee : str
        "exact" is a statement about the exact minimiser. "deployed" is a statement about this library's solver in float64, at
        the tolerance used here: the label that it computes at the perturbed input is the same if that solve converges.
    by_products : bool
        Whether "shared" or "branched" took products with the layers alone, which wide networks need. If not, and for other
        methods, matrices of the size of all units may have been factored.
    """

    prediction: Tensor
    margin: Tensor
    radius: Tensor
    error_bound: Tensor
    method: str
    guarantee: str
    by_products: bool = False

    def certified_accuracy(self, y: Tensor, eps: float) -> float:
        """Return the share of samples that are classified correctly and certified for every perturbation of norm ``eps``.

        Parameters
        ----------
        y : Tensor of shape (n,)
            True labels, as indices of outputs.
        eps : float
            Size of the perturbation; 0 gives the plain accuracy.
        """
        y = torch.as_tensor(y)
        if y.shape != self.prediction.shape:
            raise ValueError(f"y must hold {len(self.prediction)} indices of outputs; got shape {tuple(y.shape)}")
        if y.is_floating_point():
            raise ValueError(f"y must hold indices of outputs, which are whole numbers; got {y.dtype}")
        return certified_share(self.prediction == y.to(self.prediction), self.radius, eps)


def certified_share(right: Tensor, radius: Tensor, eps: float) -> float:
    """Return the certified accuracy: the share of samples that are correct and certified for perturbations of norm ``eps``."""
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0; got {eps}")
    return float((right if eps == 0 else right & (radius > eps)).double().mean())


def check_method(method: str) -> None:
    """Raise ValueError for an unknown method."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; use one of {', '.join(METHODS)}")


def chosen_method(net: LRRN, method: str) -> str:
    """Return the method that "auto" stands for; other methods stand for themselves.

    The choice depends on the structure of the network only: radii depend neither on the machine nor on the rest of a batch.
    """
    if method != "auto":
        return method
    energy = net.energy_snapshot(torch.float64)
    if energy.n_free == 0:
        return "spectral"
    units = sum(energy.free_sizes)
    cheap = units <= SEARCHED or (units <= WIDE_UNITS and has_layer_multipliers(energy))
    if cheap and net.sizes[-1] <= OUTPUTS:
        return "shared"
    return "multiplier" if energy.has_matrices else "spectral"


def takes_products(net: LRRN, method: str) -> bool:
    """Whether a method takes products with the layers alone for this network; by its structure, never by a clock."""
    energy = net.energy_snapshot(torch.float64)
    return energy.n_free > 0 and _by_operators(energy, chosen_method(net, method))


def _by_operators(energy: LiftedEnergy, method: str) -> bool:
    """Whether the radii of a method come from products with the layers' operators instead of a matrix."""
    return method in ("shared", "branched") and takes_operators(energy)


def _first_method(net: LRRN, method: str, seconds: float | None) -> str:
    """Return the method of the constants from which a method starts."""
    chosen, energy = chosen_method(net, method), net.energy_snapshot(torch.float64)
    no_search = sum(energy.free_sizes) > SEARCHED and has_layer_multipliers(energy) and chosen in ("shared", "branched")
    if (seconds is None or not energy.has_matrices) and (no_search or _by_operators(energy, chosen)):
        return "spectral"
    if method in BY_SAMPLE:
        return "multiplier"
    if chosen != "shared" or seconds is not None:
        return method
    # where units have two bounds, the dual may be below the multiplier bound: no special case of it as in Proposition 1
    unknown = net.intervals[: energy.n_free]
    return "auto" if any(math.isfinite(each.lo) and math.isfinite(each.hi) for each in unknown) else "spectral"


def certify(
    net: LRRN,
    x: Tensor,
    method: str = "auto",
    *,
    guarantee: str = "deployed",
    seconds: float | None = None,
    target_radius: float = math.inf,
    branches: int | None = None,
    solver: str = "auto",
    tol: float | None = None,
    max_sweeps: int = 1000,
) -> Certificate:
    """Certify the labels that a network predicts.

    Parameters
    ----------
    net : LRRN
        A network with at least two outputs. The label is the index of the largest.
    x : Tensor of shape (n, d_0), or images
        Inputs of any dtype; solved in float64.
    method : {"auto", "paper", "pairwise", "spectral", "multiplier", "shared", "branched", "local"}, default="auto"
        "paper" is the paper's margin / (sqrt(2) rho). The others use a constant for each pair of classes: "pairwise" from the
        paper's bound on the features, "spectral" from the tighter spectral bound, "multiplier" with one multiplier per unit,
        optimised for each pair. "shared" and "local" start from "multiplier" and solve a Lagrangian dual per sample, which
        depends on the state of each unit. "shared" solves it for all samples at once, in about a millisecond per sample at 128
        units. If all hidden layers have reconstruction terms, it starts from "spectral" in networks of more than 256 units, and
        no multipliers are searched for. With one hidden layer of more than 256 units, or more than 2,048 units in several
        layers, it then needs products with the weights only: no matrix of the size of the units is built or factored.
        "branched" is "shared" with branch and bound on units that have a lower bound only, and meant for ``target_radius``: it
        raises radii that are below it by a few per cent, and takes up to thousands of times as long for a sample. "local"
        solves the dual one sample at a time, in a fraction of a second each. "auto" is "shared", started from "spectral", in
        networks of up to 128 outputs that have up to 256 hidden units, or up to 4,096 for which "shared" searches for no
        multipliers. In others it is "multiplier" with a budget of 5 s or, in networks with larger convolutions, "spectral";
        there "shared" gives larger radii, in seconds per sample. Where units have two bounds, "auto" takes the larger of these
        two radii in networks of up to 256 units.
    guarantee : {"deployed", "exact"}, default="deployed"
        Whether to include the error of the solve at the perturbed input ("deployed") or not ("exact").
    seconds : float, optional
        Time budget for the constants, as in :meth:`LRRN.lipschitz`; they are cached until the parameters change. If given,
        "auto" starts from "multiplier" in small networks too.
    target_radius : float, optional
        Perturbation size of interest. "shared", "branched" and "local" process only samples whose radius by the constants
        that they start from is smaller, and stop at this radius.
    branches : int, optional
        Largest number of branches of a sample and a pair of outputs, for "branched"; if not given, 2048 with a target and 32
        without.
    solver, tol, max_sweeps
        As in :meth:`LRRN.infer`.

    Returns
    -------
    Certificate
        Prediction, margin, radius and error bound, per sample.
    """
    check_network(net)
    check_method(method)
    check_guarantee(guarantee)
    if net.sizes[-1] < 2:
        raise ValueError("a certificate compares outputs, and this network has one; see output_interval for regression")
    if not target_radius > 0:
        raise ValueError(f"target_radius must be a radius above 0; got {target_radius}")
    if branches is not None and branches < 1:
        raise ValueError(f"branches must be at least 1; got {branches}")
    tol = DEFAULT_TOL[torch.float64] if tol is None else tol
    x = as_vectors(net, x)
    solution = net.infer(x, solver=solver, tol=tol, max_sweeps=max_sweeps)
    return certify_solution(net, x, solution, method, guarantee, seconds, tol, target_radius, branches)


def certify_solution(
    net: LRRN,
    x: Tensor,
    solution: Solution,
    method: str,
    guarantee: str,
    seconds: float | None,
    tol: float,
    target_radius: float = math.inf,
    branches: int | None = None,
) -> Certificate:
    """Certify labels from a given solution, so that several methods can share one solve.

    ``solution`` is the result of :meth:`LRRN.infer` for the same float64 ``x`` and ``tol``; the rest is as in :func:`certify`.
    """
    constants = pair_constants(net.energy_snapshot(torch.float64), _first_method(net, method, seconds), seconds)
    method = chosen_method(net, method)
    energy = net.energy_snapshot(torch.float64)
    # wide networks: a bound on the smallest eigenvalue of H by structure, instead of a factorisation
    mu = form_of(energy).mu if energy.n_free > 0 and _by_operators(energy, method) else None
    errors = SolveErrors.of(net, x, solution, tol, mu=mu)
    y = solution.output
    best, runner_up = top_two(y)
    largest, second = (y.gather(1, which[:, None]) for which in (best, runner_up))
    margin = (largest - second)[:, 0]
    rho, scale, rounding = (table[best] for table in (constants.rho, constants.error, constants.rounding))  # (n, d_L)
    extra = torch.zeros_like(rho)
    doubt = scale * errors.here[:, None] + rounding * errors.size[:, None]
    # the exact lead over output j is within doubt_j of the computed one, and the margin is the smallest lead. The exact second
    # largest output may be another than the computed one. If the exact label differs, top-1 minus top-2 has the same bound
    error = (doubt - (second - y)).scatter(1, best[:, None], -math.inf).amax(-1)
    if guarantee == "deployed":
        doubt = doubt + scale * errors.later[:, None] + rounding * errors.size[:, None]
        extra = scale * errors.slope + rounding * errors.size_slope
    leads = largest - y - doubt
    radii = (leads / (rho + extra)).scatter(1, best[:, None], math.inf)
    radius = radii.amin(-1)
    if method in BY_SAMPLE and energy.n_free > 0 and (energy.free_mu if mu is None else mu) > 0:
        rates, aim = torch.stack([rho, extra], -1), (target_radius, branches)
        radius = _radii_by_sample(net, x, solution, method, best, leads, rates, aim)
    radius = radius.clamp(min=0.0) * (1 - 1e-12)
    radius = torch.where(solution.converged & radius.isfinite(), radius, 0.0)
    return Certificate(best, margin, radius, error, method, guarantee, takes_products(net, method))


def _radii_by_sample(
    net: LRRN,
    x: Tensor,
    solution: Solution,
    method: str,
    best: Tensor,
    leads: Tensor,
    rates: Tensor,
    aim: tuple[float, int | None],
) -> Tensor:
    """Return per-sample radii: "shared" and "branched" for all samples at once, "local" one after the other.

    ``aim`` is the radius of interest and the largest number of branches.
    """
    target_radius, branches = aim
    energy = net.energy_snapshot(torch.float64)
    qp = energy.free(x)
    z = torch.cat(solution.activations[: energy.n_free], dim=-1)
    g = qp.gradient(z)
    g_error = energy.rounding.free.total(row_norms(z), row_norms(qp.q), row_norms(x))
    leads = torch.where(solution.converged[:, None], leads, 0.0)
    if _by_operators(energy, method):
        form = form_of(energy)
        branched = Branching(form, target_radius, branches) if method == "branched" else None
        return matrix_free_radii(form, z, g, g_error, best, leads, rates, target_radius, branched)
    problem = local_problem(energy)
    with problem.threads():
        duals: Sequence[Dual] = shared_duals(energy)
        if method == "branched":
            # branches last: only where the other dual falls short
            duals = [*duals[1:], *(Branching(dual, target_radius, branches) for dual in shared_duals(energy)[:1])]
        radius = shared_radii(problem, duals, z, g, g_error, best, leads, rates, target_radius)
        if method == "local":
            leads, rates = leads.cpu(), rates.cpu()
            for k in ((radius > 0) & (radius < target_radius)).nonzero().squeeze(1).tolist():
                alone = local_radius(problem, z[k], g[k], g_error[k], int(best[k]), leads[k], rates[k], target_radius)
                radius[k] = max(float(radius[k]), alone)
    return radius.to(x.device)
