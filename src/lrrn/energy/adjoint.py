"""The adjoint of the free phase for gradients scaled to length one, in one kernel where there are kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from lrrn.energy.lifted import LiftedEnergy
from lrrn.qp import BoxQP, row_norms
from lrrn.runtime.devices import has_kernels

WIDEST = 8192
"""Largest number of units that the kernel supports."""


@torch.no_grad()
def unit_adjoint(energy: LiftedEnergy, z: Tensor, v: Tensor, summed: bool = False) -> tuple[BoxQP, Tensor]:
    """Return the adjoint for the directions of ``v``, rows of length one or zero, and their lengths, of shape (n, 1).

    The adjoint is linear in v, and for unit vectors the tolerance is relative to the gradient itself. Arguments are those of
    :meth:`LiftedEnergy.adjoint`. If only the sum over samples counts (``summed``), rows below the mean length are divided by
    it, and it is returned for them: the tolerance is relative to it, errors add up to as much, and short rows take fewer
    iterations. The kernel divides each row by its own length all the same.
    """
    n, dim = z.shape
    if not (0 < dim <= WIDEST and n and has_kernels(z)):
        size = row_norms(v)[:, None].to(v.dtype)
        if summed:
            size = size.clamp(min=size.mean())
        return energy.adjoint(z, v / torch.where(size > 0, size, 1)), size
    from lrrn.kernels.cuda.adjoint import open_units

    lo, hi = (bound[:, :dim].contiguous() for bound in energy.box)
    unit, down, up = (torch.empty((n, dim), dtype=v.dtype, device=v.device) for _ in range(3))
    size = v.new_empty((n, 1))
    width = 1 << (dim - 1).bit_length()
    arrays = (z.contiguous(), v.contiguous(), lo, hi, unit, down, up, size)
    open_units[(n,)](*arrays, dim, WIDTH=width, num_warps=4 if width <= 512 else 8)
    return BoxQP(energy.free_hessian, unit, down, up, linear=True, holds_zero=True), size
