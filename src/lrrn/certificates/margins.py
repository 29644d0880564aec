"""Margins of all labels under perturbations: the score of a label minus the largest other score.

The scores are those of the exact minimiser. y_k - y_j changes by at most rho_kj |delta| when x moves by delta, so the margin of
label k, the smallest of these differences over j, lies between the smallest y_k - y_j - slack_kj and the smallest
y_k - y_j + slack_kj, where slack_kj is rho_kj |delta| plus the errors of the solve at x and of the read-out.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from lrrn.bounds.outputs import pair_constants
from lrrn.certificates.complementarity import local_problem
from lrrn.certificates.errors import SolveErrors
from lrrn.certificates.matrix_free import form_of, matrix_free_radii, takes_operators
from lrrn.certificates.shared import shared_duals, shared_radii
from lrrn.linalg import verified
from lrrn.network import LRRN
from lrrn.network.solution import Solution
from lrrn.qp import DEFAULT_TOL, row_norms

METHOD = "spectral"
"""Method of the Lipschitz constants. Other methods are tighter, but looser than a dual per sample."""
_UP = 1 + 1e-12
"""Factor that covers the rounding of a few scalar operations."""


def margin_bounds(net: LRRN, x: Tensor, solution: Solution, eps: float) -> tuple[Tensor, Tensor]:
    """Return bounds on the exact margin of every label over all perturbations of Euclidean norm at most ``eps``.

    Parameters
    ----------
    net : LRRN
    x : float64 Tensor of shape (n, d_0)
    solution : Solution
        Of the free phase at ``x``.
    eps : float
        Size of the perturbation; 0 gives bounds on the margin at ``x``.

    Returns
    -------
    lower, upper : float64 Tensor of shape (n, d_L)
        Infinite where the solve did not converge.
    """
    errors = SolveErrors.of(net, x, solution, DEFAULT_TOL[torch.float64])
    y, rho = solution.output, pair_constants(net.energy_snapshot(torch.float64), METHOD).rho
    lower, upper = torch.empty_like(y), torch.empty_like(y)
    for k in range(y.shape[1]):
        # not a number where outputs that do not move meet a perturbation without limit
        lead, slack = y[:, k, None] - y, (rho[k] * (eps * _UP)).nan_to_num(math.inf, math.inf) + _doubt(net, errors, k)
        lower[:, k] = _without(lead - slack, k).amin(-1)
        upper[:, k] = _without(lead + slack, k).amin(-1)
    converged = solution.converged[:, None]
    return torch.where(converged, lower, -math.inf), torch.where(converged, upper, math.inf)


def ruled_out(net: LRRN, x: Tensor, solution: Solution, eps: float, threshold: float) -> Tensor:
    """Return the labels whose exact margin is proven to be below a threshold wherever a perturbation of norm ``eps`` leads.

    Parameters
    ----------
    net, x, solution, eps
        As in :func:`margin_bounds`.
    threshold : float

    Returns
    -------
    bool Tensor of shape (n, d_L)
        False where the solve did not converge.
    """
    out = margin_bounds(net, x, solution, eps)[1] < threshold
    energy = net.energy_snapshot(torch.float64)
    if not (0 < eps < math.inf and math.isfinite(threshold) and energy.n_free > 0):
        return out
    by_products = takes_operators(energy)
    if not (by_products or energy.has_matrices) or not (form_of(energy).mu if by_products else energy.free_mu) > 0:
        return out
    errors, rho = SolveErrors.of(net, x, solution, DEFAULT_TOL[torch.float64]), pair_constants(energy, METHOD).rho
    qp, y = energy.free(x), solution.output
    z = torch.cat(solution.activations[: energy.n_free], dim=-1)
    g_error = energy.rounding.free.total(row_norms(z), row_norms(qp.q), row_norms(x))
    state = z, qp.gradient(z), g_error
    with nullcontext() if by_products else local_problem(energy).threads():
        if by_products:
            radii = partial(matrix_free_radii, form_of(energy))
        else:
            radii = partial(shared_radii, local_problem(energy), shared_duals(energy))
        for k in range(y.shape[1]):
            # the margin is above the threshold only where every other output leads by less than minus the threshold
            rounding = 4 * verified.EPS * (y.abs() + y[:, k, None].abs() + abs(threshold))
            lead = y - y[:, k, None] + threshold - _doubt(net, errors, k) - rounding
            rival = _without(-lead / rho[k], k).argmin(-1)
            open_ = solution.converged & ~out[:, k]
            leads = torch.full_like(y, math.inf)
            leads[:, k] = torch.where(open_, lead.gather(1, rival[:, None])[:, 0], 0.0)
            rates = torch.stack([rho[rival], torch.zeros_like(y)], -1)
            radius = radii(*state, rival, leads, rates, target_radius=eps).to(x.device)
            out[:, k] |= open_ & (radius / _UP > eps)
    return out


def _doubt(net: LRRN, errors: SolveErrors, k: int) -> Tensor:
    """Return bounds on the error of the differences of output k and every other, of shape (n, d_L)."""
    constants = pair_constants(net.energy_snapshot(torch.float64), METHOD)
    return (constants.error[k] * errors.here[:, None] + constants.rounding[k] * errors.size[:, None]) * _UP


def _without(values: Tensor, k: int) -> Tensor:
    """Return the values with column k replaced by infinity."""
    return values.index_fill(1, torch.tensor([k], device=values.device), math.inf)
