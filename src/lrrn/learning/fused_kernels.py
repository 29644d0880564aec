"""The fast way through a captured step on a CUDA device: solves and derivatives of the paper's objectives in seven launches."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from lrrn.learning.captured import SAFETY, DeviceCounts
from lrrn.learning.flat import FlatParameters
from lrrn.learning.objectives import Batch, EnergyObjective, Objective
from lrrn.network import LRRN
from lrrn.network.small_batch import structure_of
from lrrn.qp import DEFAULT_TOL
from lrrn.runtime.devices import has_kernels
from lrrn.solvers.half_precision import DOWN, UP, rounds_and_steps, tile_and_warps

WIDEST, MOST_OUTPUTS = 128, 64
"""Most hidden units, and most outputs, that stay on chip."""
CHUNK, MOST_PARTS = 64, 8
"""Columns of the input that are an operand at a time, and most parts that they are shared out to."""
MOST_ROWS = 64
"""Most rows of the batch that sums over it take at a time."""
SIDE = 32
"""Units along a side of the squares that second moments are added up in."""
SIGNS = ((-1.0, 1.0), (1.0, 0.0), (0.0, 1.0))
"""Factors on the free and the clamped energy that the kernels know."""


@final
class FusedKernels:
    """Loss and derivatives of a signed sum of the free and the clamped energy, by solves of a fixed number of sweeps.

    It does what :meth:`EnergyObjective.terms` and :func:`total_gradients` do while ``net.fixed_sweeps`` is set and solves are
    counted by :class:`DeviceCounts`; nothing waits for the device.

    Parameters
    ----------
    net : LRRN
    objective : EnergyObjective
        One for which :meth:`applies`.
    flat : FlatParameters
        The network's, attached.
    """

    def __init__(self, net: LRRN, objective: EnergyObjective, flat: FlatParameters) -> None:
        energy = net.energy_now()
        assert objective.signs is not None
        self._net, self._flat, self._signs = net, flat, objective.signs
        self._device = flat.vector.device
        self._sizes, self._n_layers = energy.sizes, energy.n_layers
        hidden = energy.sizes[1:-1]
        self._dim = sum(hidden)
        self._width, self._first, self._last = (padded(size) for size in (self._dim, hidden[0], energy.sizes[-1]))
        self._block = padded(max(energy.sizes[1:]))
        self._lo, self._hi = (bound[0, : self._dim].contiguous() for bound in energy.box)
        self._places = [places.tolist() for places in structure_of(energy).layers[:3]]
        self._own = list(energy.discounts)
        self._reach = [a * beta for a, beta in zip(energy.discounts, energy.beta, strict=True)]
        self._tables()
        self._room()

    @staticmethod
    def applies(net: LRRN, objective: Objective) -> bool:
        """Whether the objective is made of the two phases, and the network narrow, with an output that can be left out."""
        energy = net.energy_now()
        w = net.W[0]
        return (
            isinstance(objective, EnergyObjective)
            and objective.signs in SIGNS
            and len(net.W) > 1
            and energy.eliminated
            and sum(energy.sizes[1:-1]) <= WIDEST
            and energy.sizes[-1] <= MOST_OUTPUTS
            and w.dtype == torch.float32
            and has_kernels(w)
            and net.solver in ("auto", "accelerated")
        )

    def _tables(self) -> None:
        """Write down where in the vector of parameters every entry of the joint matrices is."""
        w_at, b_at, c_at = self._places
        n, width, sizes = self._n_layers - 1, self._width, self._sizes
        starts = [0, *accumulate(sizes[1:-1])]  # where each hidden layer's units begin
        weights = torch.full((width, width), -1, dtype=torch.int32)
        b_map, c_map = (torch.full((width,), -1, dtype=torch.int32) for _ in range(2))
        below, above = torch.ones(width), torch.zeros(width)
        plan, factors = list[list[int]](), list[list[float]]()
        for k in range(n):
            units = slice(starts[k], starts[k + 1])
            below[units] = self._own[k]
            if b_at[k] >= 0:
                b_map[units] = torch.arange(b_at[k], b_at[k] + sizes[k + 1])
            if k == 0:
                continue
            under = slice(starts[k - 1], starts[k])
            weights[units, under] = torch.arange(w_at[k], w_at[k] + sizes[k + 1] * sizes[k]).view(sizes[k + 1], sizes[k]).int()
            above[under] = self._reach[k]
            if c_at[k] >= 0:
                c_map[under] = torch.arange(c_at[k], c_at[k] + sizes[k])
            up, low = starts[k], starts[k - 1]
            moments = [up * width + low, low * width + low, up * width + up, up, low, 4 * width]
            plan.append([w_at[k], b_at[k], c_at[k], *self._biases(k), sizes[k + 1], sizes[k], *moments])
            factors.append([self._own[k], self._reach[k]])
        if self._signs[1]:
            low = starts[n - 1]
            moments = [2 * width**2 + low, width**2 + low * width + low, 0, 3 * width, 2 * width + low, 4 * width + 1]
            plan.append([w_at[n], b_at[n], c_at[n], *self._biases(n), sizes[n + 1], sizes[n], *moments])
            factors.append([self._own[n], 0.0])
        maps = (weights, b_map, c_map, below, above, torch.tensor(plan, dtype=torch.int32).view(-1, 13), torch.tensor(factors))
        self._maps = [table.to(self._device) for table in maps]

    def _biases(self, k: int) -> tuple[int, int]:
        """Return how many numbers b_k and c_k have."""
        _, b_at, c_at = self._places
        return self._sizes[k + 1] if b_at[k] >= 0 else 0, self._sizes[k] if c_at[k] >= 0 else 0

    def _room(self) -> None:
        """Make room for what the kernels hand to each other and is as large whatever the batch."""
        width, d_1 = self._width, self._sizes[1]

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        # columns of the input that a part of the first products has, and parts: a program adds up no more than it must
        self._span = CHUNK * -(-self._sizes[0] // (CHUNK * MOST_PARTS))
        self._parts = -(-self._sizes[0] // self._span)
        self._gram, self._back = room(self._parts, d_1, d_1), room(self._parts, d_1)
        self._bias, self._constant = room(width), room(1)
        self._h = room(2, width, width)
        halves = (room(2, width, width, dtype=torch.float16) for _ in range(3))
        self._matrices = (room(2, width), *halves, room(2, 2))
        self._s = room(2 * width**2 + self._last * width)
        self._t = room(4 * width + 2)

    def __call__(self, batch: Batch, weight: Tensor, rows: Tensor | None = None) -> Tensor:
        """Set the derivatives of the weighted sum of losses and return that sum.

        ``rows`` says which rows of ``batch.x`` and ``batch.target`` are meant: all, if it is None. ``batch.activations`` gets
        the free phase's activations.
        """
        counts, sweeps = self._net.report, self._net.fixed_sweeps
        assert isinstance(counts, DeviceCounts) and sweeps is not None
        kernels, flat, out = _kernels(), self._flat.vector, self._flat.gradient
        sign_free, sign_clamped = self._signs
        if batch.target is None and sign_clamped:
            raise ValueError("this objective needs targets y, and none were given")
        x, n, dim, width = batch.x.contiguous(), len(weight), self._dim, self._width
        pick = torch.arange(n, device=x.device) if rows is None else rows.contiguous()
        y = x if batch.target is None else batch.target.contiguous()
        (w_at, b_at, c_at), (d_0, d_1), n_layers = self._places, self._sizes[:2], self._n_layers
        own, reach, last = self._own[0], self._reach[0], self._own[-1]
        parts, shapes = self._parts, ((self._parts, n, d_1), (self._parts, n), (n, d_1), (n,), ())
        images, size, image, losses, total = (torch.empty(shape, device=x.device) for shape in shapes)
        free = torch.empty((n, dim), device=x.device)
        clamped = torch.empty_like(free) if sign_clamped else free
        tile, (b_size, c_size) = 16, self._biases(0)
        weights, b_map, c_map, below, above, plan, factors = self._maps
        outputs = (w_at[-1], self._sizes[-1], self._sizes[-2])

        tiles = -(-n // tile) + -(-d_1 // tile) + 1
        shape = {"FIRST": self._first, "TILE": tile, "CHUNK": CHUNK, "num_warps": 4}
        kernels.project[(tiles, parts)](
            flat, x, pick, images, self._gram, self._back, size, n, d_0, d_1, c_at[0], c_size, self._span, **shape
        )

        joint = (flat, self._gram, self._back, weights, b_map, c_map, below, above, self._bias, self._constant)
        shape = {"PARTS": parts, "WIDTH": width, "LAST": self._last, "TILE": tile, "num_warps": 4}
        kernels.assemble[(width // tile, width // tile)](*joint, self._h, dim, d_1, *outputs, reach, last, **shape)
        kernels.halve_phases[(2,)](self._h, *self._matrices, dim, UP, DOWN, WIDTH=width, num_warps=8 if width > 64 else 4)

        tol = DEFAULT_TOL[torch.float32] if self._net.tol is None else self._net.tol
        limit = min(counts.aim, SAFETY * tol)
        start = free if batch.start is None else batch.start.contiguous()
        given = (flat, images, size, image, y, pick, start, self._bias, self._constant, self._lo, self._hi)
        numbers = (
            n,
            dim,
            d_1,
            b_at[0],
            b_size,
            w_at[-1],
            b_at[-1],
            self._biases(n_layers - 1)[0],
            *outputs[1:],
            own,
            reach,
            last,
        )
        at_once, warps = tile_and_warps(n)
        shape = {"PARTS": parts, "WIDTH": width, "LAST": self._last, "TILE": at_once, "num_warps": warps}
        shape |= {"FREE": sign_free != 0, "CLAMPED": sign_clamped != 0, "START": batch.start is not None}
        kernels.solve[(-(-n // at_once),)](
            *given, *self._matrices, free, clamped, losses, counts.table, *numbers, tol, limit, *rounds_and_steps(sweeps),
            sign_free, sign_clamped, **shape,
        )  # fmt: skip

        sign, balanced = sign_clamped or sign_free, bool(sign_free and sign_clamped)
        shape = {"BALANCED": balanced, "WIDTH": width, "TILE": min(padded(n), MOST_ROWS), "num_warps": 8}
        phases, strip = (weight, free, clamped, self._s, self._t), min(SIDE, width)
        kernels.moments[(width // strip, width // strip, 2 if sign_clamped else 1)](
            flat, image, y, pick, losses, total, *phases, n, dim, d_1, b_at[0], b_size, outputs[1], sign,
            LAST=self._last, STRIP=strip, **{**shape, "num_warps": 4},
        )  # fmt: skip
        if not sign_clamped:
            out.zero_()  # the last layer has no part in it
        columns = 32
        kernels.first_layer[(-(-d_0 // columns),)](
            flat, x, pick, image, *phases, out, n, dim, d_0, d_1, b_at[0], b_size, c_at[0], c_size, own, reach, sign,
            FIRST=self._first, COLUMNS=columns, num_stages=2, **shape,
        )  # fmt: skip
        if n_layers > (1 if sign_clamped else 2):
            side = self._block // tile
            kernels.later_layers[(len(plan), side, side)](
                flat, self._s, self._t, plan, factors, out, WIDTH=width, BLOCK=self._block, TILE=tile, num_warps=4
            )
        batch.activations = free if sign_free else None
        return total


def padded(size: int) -> int:
    """Return the least power of two that a matrix product on chip takes."""
    return max(16, 1 << (size - 1).bit_length())


@cache
def _kernels() -> Any:
    """Import the kernels when they are first needed: Triton takes its time, and may be absent."""
    from lrrn.kernels.cuda import training_step

    return training_step
