"""Certificates written out, for a checker that shares no code with this package and computes exactly.

A certificate of a sample is the input, the label, a radius, and multipliers for every other output. Any nonnegative multipliers
prove some radius, so they may be rounded to short numbers. The radius that is claimed is proven here in float64 for the rounded
numbers. Inserting v = z' - z and w = g' - g into the Lagrangian of docs/theory/local-radii.md leaves a function of z' and u
alone: the activations z at the sample guide the search for multipliers, but the proof does not need them.
checker/check_certificate.py has the proof without them and checks the result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lrrn.bounds.outputs import pair_constants
from lrrn.certificates.complementarity import Sample, Terms
from lrrn.certificates.shared import SharedDual, SharedForm, shared_duals
from lrrn.network import LRRN
from lrrn.qp import DEFAULT_TOL, row_norms
from lrrn.runtime.threads import one_thread

VERSION = 1
"""Version of the layout of a written certificate."""
DIGITS = 9
"""Significant digits of a multiplier."""
UNITS = 512
"""Largest number of units for which certificates are written."""
CLAIMED = 1 - 1e-12
"""Factor on a radius for the rounding of its square root."""


def check_writable_network(net: LRRN) -> None:
    """Raise ValueError for a network whose certificates the checker does not cover."""
    energy = net.energy_snapshot(torch.float64)
    hidden = net.intervals[: energy.n_free]
    fine = energy.layers is None and energy.eliminated and energy.n_free > 0 and net.sizes[-1] > 1
    if not fine or any((each.lo, each.hi) != (0.0, math.inf) for each in hidden):
        raise ValueError(
            "certificates are written for networks of dense layers with hidden units that are at least zero and a linear "
            "read-out of at least two outputs"
        )


def written_certificates(net: LRRN, x: Tensor, *, tol: float | None = None, max_sweeps: int = 1000) -> dict[str, Any]:
    """Write certificates for the exact minimiser, by the method "shared".

    Parameters
    ----------
    net : LRRN
        Dense layers, hidden units at least zero, a linear read-out.
    x : Tensor of shape (n, d_0)
    tol, max_sweeps
        As in :meth:`LRRN.infer`. They influence the tightness of a certificate, not its validity.

    Returns
    -------
    dict
        Of what JSON can hold: ``forms``, the multipliers of products that samples share, and ``certificates``, one for each
        sample with a radius above zero, which have the number of the sample as ``index``.

    Raises
    ------
    ValueError
        The network is of another kind, or too wide, or its quadratic form cannot be proven positive definite.
    """
    check_writable_network(net)
    x = x.to(torch.float64)
    solution = net.infer(x, tol=DEFAULT_TOL[torch.float64] if tol is None else tol, max_sweeps=max_sweeps)
    energy = net.energy_snapshot(torch.float64)
    if sum(energy.free_sizes) > UNITS:
        raise ValueError(f"certificates are written for at most {UNITS} units; got {sum(energy.free_sizes):,}")
    with one_thread():
        duals = shared_duals(energy)
        if not duals:
            raise ValueError("no quadratic form of this network is proven positive definite")
        form = duals[0].form
        z = torch.cat(solution.activations[: energy.n_free], dim=-1).clamp(min=0.0)
        rows = [row for some in torch.arange(len(x)).split(256) for row in _rows(net, form, x[some], z[some])]
    certificates = [{"index": index, **row} for index, row in enumerate(rows) if row["radius"] > 0]
    return {
        "format": "lrrn certificate",
        "version": VERSION,
        "guarantee": "exact",
        "method": "shared",
        "forms": [form.lam.tolist()],
        "certificates": certificates,
    }


def _rows(net: LRRN, form: SharedForm, x: Tensor, z: Tensor) -> list[dict[str, Any]]:
    """Return the certificates of a batch."""
    energy = net.energy_snapshot(torch.float64)
    qp = energy.free(x)
    g = qp.gradient(z)
    g_error = energy.rounding.free.total(row_norms(z), row_norms(qp.q), row_norms(x))
    sample, dual = form.problem.sample(z, g, g_error), form.dual
    features = z[:, -net.sizes[-2] :]
    bias = energy.b[-1]
    y = features @ energy.weights[-1].mT + (0.0 if bias is None else bias)
    label = y.argmax(-1)
    doubt = pair_constants(net.energy_snapshot(torch.float64), "spectral").rounding[label] * (1 + row_norms(features))[:, None]
    leads = (y.gather(1, label[:, None]) - y - doubt).clamp(min=1e-300)
    squares, simple, found = torch.full_like(y, math.inf), torch.full_like(y, math.inf), []
    for j in range(net.sizes[-1]):
        rival, lead = torch.full_like(label, j), leads[:, j]
        other = label != j
        full = _shortened(dual.terms(sample, label, rival, lead))
        plain = _global_terms(dual, sample, label, rival, lead)
        for squared, terms in ((squares, full), (simple, plain)):
            squared[:, j] = torch.where(other, dual.proven_by(sample, label, rival, lead, terms)[0], math.inf)
        found.append((full, plain))
    # a square that is not a number proves nothing
    least = squares.maximum(simple).nan_to_num(nan=0.0, posinf=math.inf).amin(-1)
    radius = least.clamp(min=0.0).sqrt() * CLAIMED
    return [
        {
            "label": int(label[k]),
            "radius": float(radius[k]),
            "input": x[k].tolist(),
            **_rest(found[0][1], k),
            "rivals": {
                str(j): {"sigma": float(plain.sigma[k])} if bool(simple[k, j] >= least[k]) else _multipliers(full, k)
                for j, (full, plain) in enumerate(found)
                if j != int(label[k])
            },
        }
        for k in range(len(x))
    ]


def _global_terms(dual: SharedDual, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor) -> Terms:
    """Return the multipliers of a bound by a Lipschitz constant, Proposition 1: all but the first are common to all rivals."""
    lam, gram = dual.form.lam, dual.solver.gram
    bend = gram[label, label] + gram[rival, rival] - 2 * gram[label, rival]
    sigma = (lead / bend.clamp(min=1e-300)).nan_to_num(0.0)
    none = torch.zeros_like(sample.low)
    return _shortened(Terms(sigma, lam + none, none, lam * sample.slack.clamp(min=0.0), none, lam * sample.low))


def _shortened(terms: Terms) -> Terms:
    """Round the multipliers that differ between samples to few digits."""
    return Terms(_short(terms.sigma), terms.low, terms.high, _short(terms.floor), terms.ceiling, _short(terms.sign))


def _short(values: Tensor) -> Tensor:
    """Round numbers to few significant digits, so that their decimal form is short."""
    flat = [float(f"{value:.{DIGITS - 1}e}") for value in values.flatten().tolist()]
    return values.new_tensor(flat).reshape(values.shape)


def _multipliers(terms: Terms, k: int) -> dict[str, Any]:
    """Return the multipliers of one sample and one rival."""
    return {"sigma": float(terms.sigma[k]), **_rest(terms, k)}


def _rest(terms: Terms, k: int) -> dict[str, Any]:
    """Return the multipliers of one sample but the first."""
    return {name: [value if value else 0 for value in getattr(terms, name)[k].tolist()] for name in ("floor", "sign")}
