"""Local radii without a matrix: the shared dual of wide and convolutional networks, by products with the layers' operators.

The multipliers of the products are one number per layer (``block_multipliers``), so that the quadratic part of the Lagrangian
is positive definite by inspection. No multiplier is searched for, no matrix of the size of the units is built and none is
factored. A bound is proven at a computed minimiser, with the rounding of every product. See docs/theory/matrix-free.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from lrrn.bounds.multiplier import LARGEST, LEAST
from lrrn.certificates.block_multipliers import Layers, block_multipliers, form_floor, hessian_floor
from lrrn.certificates.complementarity import Faces, Sample, Terms
from lrrn.certificates.dual_batches import FINAL
from lrrn.certificates.matrix_free_dual import MatrixFreeSolver
from lrrn.certificates.nearest import Dual, nearest_radii
from lrrn.energy import LiftedEnergy
from lrrn.linalg import verified
from lrrn.linalg.operators import Dense, Operator
from lrrn.qp import row_norms
from lrrn.runtime.lazy import lazy, once_per_owner
from lrrn.runtime.threads import blas_threads, over_rows, workers

CHUNK, CHUNK_CUDA = 2**30, 2**34
"""Memory of a batch of samples, in bytes, on the CPU and on a GPU."""
SHARE = 8
"""A batch takes at most one part in this many of a GPU's memory, however much of it is free: batches decide the last bits."""
PER_UNIT = 400
"""Bytes per sample and per unit or input: vectors in use at once."""
WIDE, WIDE_DEEP = 256, 2048
"""Number of unknown units above which no matrix is used, with one and with several hidden layers."""
SMALL = 1e-3
"""Smallest bound on a norm in use: multipliers grow without limit as it falls."""


@final
class Pulls:
    """Gradients of the energy without biases, E(v; u) = 1/2 sum_k a_k (|v_{k+1} - A_k v_k|^2 + beta_k |A_k^T v_{k+1} - v_k|^2).

    ``v`` holds blocks 1, ..., K side by side, and v_0 = u. In terms of H and B, the gradient in v is H v - B u.
    """

    def __init__(self, operators: Sequence[Operator], beta: Sequence[float], discounts: Sequence[float]) -> None:
        self.operators, self.beta, self.discounts = tuple(operators), tuple(beta), tuple(discounts)
        self.sizes = [operator.shape[0] for operator in operators]

    def to(self, dtype: torch.dtype) -> Pulls:
        """Return the same in another dtype."""
        return Pulls([_converted(operator, dtype) for operator in self.operators], self.beta, self.discounts)

    def of_v(self, u: Tensor | None, v: Tensor, first_back: Tensor | None = None) -> Tensor:
        """Return w = H v - B u, with u = 0 if not given; ``first_back`` is A_0^T v_1 if known."""
        blocks = v.split(self.sizes, -1)
        found: list[Tensor] = []
        for k, (operator, a, beta) in enumerate(zip(self.operators, self.discounts, self.beta, strict=True)):
            above, below = blocks[k], u if k == 0 else blocks[k - 1]
            back = first_back if k == 0 and first_back is not None else operator.adjoint(above)
            inner = beta * back if below is None else beta * back - (1 + beta) * below
            if k > 0:
                found[-1] = found[-1] + a * (
                    beta * blocks[k - 1] - (1 + beta) * back + operator.adjoint(operator.apply(blocks[k - 1]))
                )
            found.append(a * (above + operator.apply(inner)))
        return torch.cat(found, -1)

    def at_rest(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return H v and B^T v."""
        back = self.operators[0].adjoint(v[:, : self.sizes[0]])
        return self.of_v(None, v, back), self.discounts[0] * (1 + self.beta[0]) * back

    @lazy
    def size(self) -> float:
        """Bound on the gradient's norm per unit of |u| + |v|, with absolute values throughout: rounding is relative to it."""
        parts = zip(self.operators, self.discounts, self.beta, strict=True)
        return sum(a * (1 + beta) * (1 + operator.size) ** 2 for operator, a, beta in parts)


def _converted(operator: Operator, dtype: torch.dtype) -> Operator:
    inner = getattr(operator, "inner", None)
    if inner is not None:
        return replace(operator, inner=_converted(inner, dtype))  # type: ignore[type-var]
    return replace(operator, weight=operator.weight.detach().to(dtype))  # type: ignore[type-var]


@final
class MatrixFreeForm:
    """The Lagrangian's quadratic part with one multiplier per layer, the units' bounds and the read-out.

    Parameters
    ----------
    operators : sequence of Operator
        A_0, ..., A_{K-1} in float64: those of the layers that are unknowns of the free phase.
    beta, discounts : sequence of K floats
    lo, hi : Tensor of shape (1, dim)
        Bounds of the units, side by side; infinite where there are none.
    read_out : Operator, optional
        From the last block to the outputs. None if the last block is the output.
    """

    def __init__(
        self,
        operators: Sequence[Operator],
        beta: Sequence[float],
        discounts: Sequence[float],
        lo: Tensor,
        hi: Tensor,
        read_out: Operator | None = None,
    ) -> None:
        self.pulls, self.read_out = Pulls(operators, beta, discounts), read_out
        self.layers = Layers(tuple(discounts), tuple(beta), tuple(max(each.norm(), SMALL) for each in operators))
        self.scalars = block_multipliers(self.layers)
        self.floor = form_floor(self.layers, self.scalars)
        self.mu = hessian_floor(self.layers)
        self.lo, self.hi = lo[0], hi[0]
        self.lam = torch.cat(
            [torch.full((n,), s, dtype=lo.dtype, device=lo.device) for n, s in zip(self.pulls.sizes, self.scalars, strict=True)]
        )
        below, above = self.lo.isfinite(), self.hi.isfinite()
        self.fixed = below & above & (self.lo >= self.hi)
        self.below, self.above = below, above
        self.two_sided = below & above & ~self.fixed
        self.upper, self.free = above & ~below, ~above & ~below
        self.inputs = operators[0].shape[1]
        lengths = [len(self.lam) + self.inputs, *(each.terms for each in operators)]
        self.rounding = 8 * (max(lengths) + 8) * verified.EPS

    @property
    def usable(self) -> bool:
        """Whether the form is proven positive definite, with multipliers inside the range of proofs."""
        inside = all(LEAST < s < LARGEST for s in self.scalars) and self.pulls.size < LARGEST
        return self.floor > LEAST and self.mu > 0 and inside

    @property
    def n_outputs(self) -> int:
        """Number of outputs."""
        return self.pulls.sizes[-1] if self.read_out is None else self.read_out.shape[0]

    @property
    def splits(self) -> Tensor:
        """Whether branches may split on a unit: it has a lower bound only."""
        return self.below & ~self.above

    @property
    def rows(self) -> int:
        """Samples per batch."""
        memory = CHUNK
        if self.lam.is_cuda:
            memory = min(CHUNK_CUDA, torch.cuda.get_device_properties(self.lam.device).total_memory // SHARE)
        return max(1, memory // (PER_UNIT * (len(self.lam) + self.inputs)))

    @lazy
    def solver(self) -> MatrixFreeSolver:
        """Finds multipliers, in float32."""
        return MatrixFreeSolver(self.pulls.to(torch.float32), self.scalars, self.below, self.above, self.fixed)

    def slopes(self, label: Tensor, rival: Tensor) -> tuple[Tensor, float]:
        """Return the coefficients of v in the leads of labels over other outputs, and a bound on their rounding."""
        pick = self.lam.new_zeros((len(label), self.n_outputs))
        pick.scatter_(1, label[:, None], 1.0).scatter_(1, rival[:, None], -1.0)
        error = 0.0
        if self.read_out is not None:
            pick = self.read_out.adjoint(pick)
            error = 4 * (self.read_out.terms + 8) * verified.EPS * self.read_out.size
        return torch.nn.functional.pad(pick, (len(self.lam) - pick.shape[1], 0)), error

    def sample(self, z: Tensor, g: Tensor, g_error: Tensor) -> Sample:
        """Build a batch from computed z and g = H z - q; ``g_error`` bounds the norm of the error of g."""
        zero = torch.zeros_like(z)
        low = torch.where(self.below & ~self.fixed, z - self.lo, zero)
        high = torch.where(self.above, torch.where(self.fixed, zero, self.hi - z), math.inf)
        low_error = verified.EPS * (row_norms(low) + row_norms(high.masked_fill(high.isinf(), 0.0))) * 2
        return Sample(low, high, g, low_error, g_error, torch.zeros_like(g_error))

    def drift(self, sample: Sample, label: Tensor, rival: Tensor) -> Tensor:
        """No unit is eliminated: nothing is lost from the lead."""
        return sample.drift

    def proven(self, sample: Sample, label: Tensor, rival: Tensor, lead: Tensor, goal: float | Tensor = math.inf) -> Tensor:
        """Return proven lower bounds on the squared norm of a perturbation that reduces the lead to zero.

        ``lead`` holds the leads of ``label`` over ``rival``, above zero. A bound above ``goal`` need not be the largest.
        """
        return self.bounds(sample, label, rival, lead, goal)[0]

    def bounds(
        self,
        sample: Sample,
        label: Tensor,
        rival: Tensor,
        lead: Tensor,
        goal: float | Tensor = math.inf,
        faces: Faces | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return such bounds, and the products of units at the minimiser: zero at every perturbed input."""
        c, c_error = self.slopes(label, rival)
        return self.lower_bound(sample, c, c_error, lead, self.terms(sample, c, lead, goal, faces))

    def terms(
        self, sample: Sample, c: Tensor, lead: Tensor, goal: float | Tensor = math.inf, faces: Faces | None = None
    ) -> Terms:
        """Return approximately optimal multipliers."""
        goal = torch.as_tensor(goal, dtype=lead.dtype, device=lead.device).expand_as(lead)
        return self.signed(sample, *self.solver.maximised(c, lead, sample, goal, faces), faces)

    def signed(self, sample: Sample, sigma: Tensor, of_v: Tensor, of_w: Tensor, faces: Faces | None = None) -> Terms:
        """Convert coefficients of v and w to multipliers of the right signs.

        Multipliers of w + slack have either sign for free units, and are not positive for units with an upper bound only.
        """
        lam, low, room = self.lam, sample.low, sample.room
        width = (low + room).clamp(min=1e-300)
        share = ((of_w + lam * room) / width).clamp(min=0.0).minimum(lam)
        share = torch.where(self.two_sided, share, torch.where(self.upper, torch.zeros_like(lam), lam))
        up = lam * sample.slack - of_v
        over = lam * low - of_w
        sign = torch.where(self.free, -of_w, over.clamp(min=0.0))
        sign = torch.where(self.upper, -(of_w + lam * room).clamp(min=0.0), sign)
        floor = torch.where(self.below, up.clamp(min=0.0), 0.0)
        if faces is not None:
            sign, floor = torch.where(faces.active, over, sign), torch.where(faces.inactive, up, floor)
        return Terms(
            sigma.clamp(min=0.0),
            share,
            (lam - share).clamp(min=0.0),
            floor,
            torch.where(self.above, (-up).clamp(min=0.0), 0.0),
            torch.where(self.two_sided | self.fixed, 0.0, sign),
        )

    def lower_bound(self, sample: Sample, c: Tensor, c_error: float, lead: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
        """Return proven lower bounds on the Lagrangian with these multipliers, over all v and u: inequality (11).

        Also returns (v + low) (w + slack) at the computed minimiser, which is zero at every perturbed input.
        """
        of_v, of_w = terms.slopes(sample)
        linear, lam, pulls = terms.sigma[:, None] * c + of_v, self.lam, self.pulls
        v = self.minimiser(linear, of_w)
        weight = lam * v + of_w  # the coefficient of w in the derivative
        back, toward = pulls.at_rest(weight)
        u = toward / 2
        w = pulls.of_v(u, v)
        slope_v, slope_u = lam * w + back + linear, 2 * u - toward
        value = u.square().sum(-1) + (linear * v).sum(-1) + (weight * w).sum(-1)
        size, largest = pulls.size, max(self.scalars)
        far, pull = row_norms(v) + row_norms(u), largest * row_norms(v) + terms.pull(sample)
        rounding_slope = self.rounding * (size * (largest * far + pull) + row_norms(linear) + 2 * row_norms(u))
        rounding_value = self.rounding * (row_norms(u).square() + (row_norms(linear) + size * pull) * far)
        errors = (0.0, 0.0, c_error, 0.0)
        error = terms.error_of(errors, (size, size), self.rounding, sample, row_norms(c), torch.zeros_like(lead), lead)
        slope = row_norms(slope_v) + row_norms(slope_u) + rounding_slope + 2 * error * far
        curvature = self.floor - error
        constant = terms.constant(sample, lead)
        bound = value + constant - rounding_value - error * (far.square() + 1) - slope.square() / (4 * curvature)
        lost = 16 * verified.EPS * (value.abs() + constant.abs() + bound.abs())
        return torch.where(curvature > 0, bound - lost, -math.inf), (v + sample.low) * (w + sample.slack)

    def minimiser(self, linear: Tensor, of_w: Tensor) -> Tensor:
        """Return v that minimises the Lagrangian, approximately, for coefficients ``linear`` of v and ``of_w`` of w."""
        return self._exact_solver.response(linear, of_w, steps=FINAL).v

    @lazy
    def _exact_solver(self) -> MatrixFreeSolver:
        return MatrixFreeSolver(self.pulls, self.scalars, self.below, self.above, self.fixed)


def matrix_free_radii(
    form: MatrixFreeForm,
    z: Tensor,
    g: Tensor,
    g_error: Tensor,
    best: Tensor,
    leads: Tensor,
    rates: Tensor,
    target_radius: float = math.inf,
    dual: Dual | None = None,
) -> Tensor:
    """Return certified radii of a batch, of shape (n,), at least those of the global Lipschitz constants.

    The arguments are those of :func:`lrrn.certificates.shared.shared_radii`, and what proves bounds: the form if not given.
    """
    known = (leads / rates.sum(-1)).scatter(1, best[:, None], math.inf)
    radius = known.amin(1)
    look = (radius > 0) & (radius < target_radius) & radius.isfinite()
    todo = look.nonzero().squeeze(1)
    if len(todo) == 0 or not form.usable:
        return radius

    def work(start: int, stop: int, at_once: int) -> None:
        for rows in todo[start:stop].split(at_once):
            sample = form.sample(z[rows], g[rows], g_error[rows])
            parts = best[rows], known[rows], leads[rows], rates[rows, :, 1]
            radius[rows] = nearest_radii(form if dual is None else dual, sample, *parts, target_radius)

    dense = all(isinstance(operator, Dense) for operator in form.pulls.operators)
    if z.device.type != "cpu" or (len(todo) < 2 and not dense):  # threads share the convolutions of one image
        work(0, len(todo), form.rows)
        return radius
    form.solver.prepare()  # once for all threads
    at_once, inference = max(1, form.rows // workers()), torch.is_inference_mode_enabled()

    def part(start: int, stop: int) -> None:
        with torch.inference_mode(inference), torch.no_grad(), blas_threads(1):
            work(start, stop, at_once)

    # a thread per part of the samples, not per product: threads of BLAS would wait for each other on a busy machine, where
    # one sample took twenty times as long; on an idle one they gain little
    over_rows(part, len(todo), 1)
    return radius


def takes_operators(energy: LiftedEnergy) -> bool:
    """Whether a network is so wide that its radii come from products with operators; by structure alone.

    Below these sizes matrices are affordable. In networks of several hidden layers, they are an order of magnitude faster.
    """
    limit = WIDE if energy.n_free == 1 else WIDE_DEEP
    return has_layer_multipliers(energy) and sum(energy.free_sizes) > limit


def has_layer_multipliers(energy: LiftedEnergy) -> bool:
    """Whether one multiplier per layer can be admissible: there are hidden layers, all with reconstruction terms."""
    return energy.n_free > 0 and all(beta > 0 for beta in energy.beta[: max(1, energy.n_layers - 1)])


@once_per_owner
def form_of(energy: LiftedEnergy) -> MatrixFreeForm:
    """Return the form of a float64 energy with at least one unknown layer; cached for the lifetime of the energy."""
    operators = energy.operators
    n, dim = energy.n_free, sum(energy.free_sizes)
    lo, hi = (bound[:, :dim] for bound in energy.box)
    read_out = operators[-1] if energy.eliminated else None
    return MatrixFreeForm(operators[:n], energy.beta[:n], energy.discounts[:n], lo, hi, read_out)
