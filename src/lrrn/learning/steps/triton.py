"""A captured training step of a narrow network on a CUDA device in seven kernel launches: solves, loss and derivatives."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any, cast, final

import torch
from torch import Tensor

from lrrn.learning.cuda_graph import SAFETY, DeviceCounts
from lrrn.learning.flat import FlatParameters
from lrrn.learning.losses import CrossEntropy, Margin, SquaredError
from lrrn.learning.objectives import Batch, EnergyObjective, Objective
from lrrn.learning.settings import Settings
from lrrn.learning.steps.base import shares
from lrrn.network import LRRN
from lrrn.network.small_batch import structure_of
from lrrn.qp import DEFAULT_TOL
from lrrn.runtime.devices import has_kernels
from lrrn.solvers.half_precision import DOWN, UP, rounds_and_steps, tile_and_warps

WIDEST, MOST_OUTPUTS = 128, 64
"""Maximum numbers of hidden units and of outputs that fit on chip."""
CHUNK, MOST_PARTS = 64, 8
"""Columns of the input per matrix product, and maximum number of parts into which the columns are split."""
MOST_ROWS = 64
"""Maximum rows of the batch per step of a sum over the batch."""
TILE, COLUMNS = 16, 32
"""Rows and columns of a tile of the joint matrices, and columns of the input, per Triton program."""
SIDE = 32
"""Side length, in units, of the square tiles in which second moments are summed."""
SIGNS = ((-1.0, 1.0), (1.0, 0.0), (0.0, 1.0))
"""Factors on the free and the clamped energy that the kernels support."""


@final
class TritonKernels:
    """Loss and derivatives of a signed sum of the two energies or of a loss of the prediction, by a fixed number of sweeps.

    It computes the same as :class:`Autograd`, under a policy with ``fixed_sweeps`` whose observer counts on the device. It
    never synchronises with the device. The derivative of a loss of the prediction is that of a difference of two energies, too;
    only the last layer's is another.
    """

    name = "triton"
    reads_rows = True

    def __init__(self, net: LRRN, objective: Objective, flat: FlatParameters, aim: float) -> None:
        energy = net.energy_now()
        self._loss = None if isinstance(objective, EnergyObjective) else cast(Margin | CrossEntropy | SquaredError, objective)
        signs = SIGNS[0] if self._loss is not None else cast(EnergyObjective, objective).signs
        assert signs is not None
        self._passes = 2 if isinstance(objective, Margin) and objective.adversarial_eps != 0 else 1
        self._flat, self._signs = flat, signs
        self._device = flat.vector.device
        self._sizes, self._n_layers = energy.sizes, energy.n_layers
        hidden = energy.sizes[1:-1]
        self._dim = sum(hidden)
        self._width, self._first, self._last = (padded(size) for size in (self._dim, hidden[0], energy.sizes[-1]))
        self._width = max(self._width, self._last)  # sums over outputs are kept in rows of this width
        self._block = padded(max(energy.sizes[1:]))
        self._lo, self._hi = (bound[0, : self._dim].contiguous() for bound in energy.box)
        self._places = [places.tolist() for places in structure_of(energy).layers[:3]]
        self._own = list(energy.discounts)
        self._reach = [a * beta for a, beta in zip(energy.discounts, energy.beta, strict=True)]
        self._tables()
        self._room()

    @staticmethod
    def applies(net: LRRN, objective: Objective, settings: Settings) -> bool:
        """Whether the kernels have the objective, and the network is narrow, with an output to eliminate."""
        energy = net.energy_now()
        w = net.W[0]
        sums_phases = isinstance(objective, EnergyObjective) and objective.signs in SIGNS
        return (
            (sums_phases or isinstance(objective, Margin | CrossEntropy | SquaredError))
            and len(net.W) > 1
            and net.is_dense
            and energy.eliminated
            and sum(energy.sizes[1:-1]) <= WIDEST
            and energy.sizes[-1] <= MOST_OUTPUTS
            and w.dtype == torch.float32
            and has_kernels(w)
            and net.solver in ("auto", "accelerated")
        )

    def _tables(self) -> None:
        """Build index tables from entries of the joint matrices to positions in the parameter vector."""
        w_at, b_at, c_at = self._places
        n, width, sizes = self._n_layers - 1, self._width, self._sizes
        starts = [0, *accumulate(sizes[1:-1])]  # index of the first unit of each hidden layer
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
            # dloss/dW = dloss/dy z^T stands in the place of -a (y - W z - b) z^T, whose other moments are zero
            factors.append([self._own[n] if self._loss is None else -1.0, 0.0])
        maps = (weights, b_map, c_map, below, above, torch.tensor(plan, dtype=torch.int32).view(-1, 13), torch.tensor(factors))
        self._maps = [table.to(self._device) for table in maps]

    def _biases(self, k: int) -> tuple[int, int]:
        """Return the lengths of b_k and c_k."""
        _, b_at, c_at = self._places
        return self._sizes[k + 1] if b_at[k] >= 0 else 0, self._sizes[k] if c_at[k] >= 0 else 0

    def _room(self) -> None:
        """Allocate the buffers between kernels whose size does not depend on the batch."""
        width, d_1 = self._width, self._sizes[1]

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        # columns of the input per part of the first products, and number of parts, so that a program sums as little as possible
        self._span = CHUNK * -(-self._sizes[0] // (CHUNK * MOST_PARTS))
        self._parts = -(-self._sizes[0] // self._span)
        self._gram, self._back = room(self._parts, d_1, d_1), room(self._parts, d_1)
        self._bias, self._constant = room(width), room(1)
        self._h = room(2, width, width)
        halves = (room(2, width, width, dtype=torch.float16) for _ in range(3))
        self._matrices = (room(2, width), *halves, room(2, 2))
        self._s = room((1 + self._passes) * width**2 + self._last * width)
        self._t = room(4 * width + 2)

    @torch.no_grad()
    def gradients(self, batch: Batch, weight: Tensor | None, n: int, rows: Tensor | None) -> Tensor | None:
        """Return None unless the policy has a fixed number of sweeps and counts on the device, as in a CUDA graph."""
        policy = batch.policy
        if policy.fixed_sweeps is None or not isinstance(policy.observer, DeviceCounts):
            return None
        here = (batch.x if rows is None else rows).shape[0]
        return self._weighted(batch, shares(batch.x, weight, here, n), rows, policy.fixed_sweeps, policy.observer)

    def _weighted(self, batch: Batch, weight: Tensor, rows: Tensor | None, sweeps: int, counts: DeviceCounts) -> Tensor:
        sign_free, sign_clamped = self._signs
        if batch.target is None and sign_clamped:
            raise ValueError("this objective needs targets y, and none were given")
        x, n = batch.x.contiguous(), len(weight)
        pick = torch.arange(n, device=x.device) if rows is None else rows.contiguous()
        y = x if batch.target is None else batch.target.contiguous()
        shapes = ((self._parts, n, self._sizes[1]), (self._parts, n), (n, self._sizes[1]), (n, self._sizes[-1]), (n,), ())
        images, size, image, slopes, losses, total = (torch.empty(shape, device=x.device) for shape in shapes)
        points = torch.empty((self._passes, n, self._dim), device=x.device)
        change = torch.empty_like(points[0]) if sign_free and sign_clamped else points[0]
        self._assemble(x, pick, images, size, n)
        if self._loss is None:
            self._solve(batch, (images, size, image, y, pick), (points, change, losses), sweeps, counts)
        else:
            # the slopes take the place of the targets, and perturbed images that of the images
            self._predict(batch, (images, y, pick), (points, change, losses, slopes, image), sweeps, counts)
            y = slopes
        self._differentiate(x, y, pick, image, losses, total, weight, points[-1], change)
        batch.activations = points[0] if sign_free else None
        return total

    def _assemble(self, x: Tensor, pick: Tensor, images: Tensor, size: Tensor, n: int) -> None:
        """Multiply the inputs by the first weights, and build both Hessians, their half-precision copies and their scales."""
        kernels, flat, width = _kernels(), self._flat.vector, self._width
        (w_at, _, c_at), (d_0, d_1) = self._places, self._sizes[:2]
        weights, b_map, c_map, below, above = self._maps[:5]
        tiles = -(-n // TILE) + -(-d_1 // TILE) + 1
        shape = {"FIRST": self._first, "TILE": TILE, "CHUNK": CHUNK, "num_warps": 4}
        kernels.project[(tiles, self._parts)](
            flat, x, pick, images, self._gram, self._back, size, n, d_0, d_1, c_at[0], self._biases(0)[1], self._span, **shape
        )
        joint = (flat, self._gram, self._back, weights, b_map, c_map, below, above, self._bias, self._constant)
        outputs = (w_at[-1], self._sizes[-1], self._sizes[-2])
        shape = {"PARTS": self._parts, "WIDTH": width, "LAST": self._last, "TILE": TILE, "num_warps": 4}
        kernels.assemble[(width // TILE, width // TILE)](
            *joint, self._h, self._dim, d_1, *outputs, self._reach[0], self._own[-1], **shape
        )
        # the clamped phase is the second
        kernels.halve_phases[(2 if self._loss is None else 1,)](
            self._h, *self._matrices, self._dim, UP, DOWN, WIDTH=width, num_warps=8 if width > 64 else 4
        )

    def _solve(
        self, batch: Batch, given: tuple[Tensor, ...], found: tuple[Tensor, ...], sweeps: int, counts: DeviceCounts
    ) -> None:
        """Solve both phases of every sample by a fixed number of sweeps."""
        images, size, image, y, pick = given
        _, b_at, _ = self._places
        start = found[0] if batch.start is None else batch.start.contiguous()
        arrays = (self._flat.vector, images, size, image, y, pick, start, self._bias, self._constant, self._lo, self._hi)
        numbers = (
            len(image), self._dim, self._sizes[1], b_at[0], self._biases(0)[0], *self._outputs(), self._own[0], self._reach[0],
            self._own[-1], *self._goal(batch, counts), *rounds_and_steps(sweeps), *self._signs,
        )  # fmt: skip
        grid, shape = self._tiles(batch, len(image))
        shape |= {"FREE": self._signs[0] != 0, "CLAMPED": self._signs[1] != 0}
        _kernels().solve[grid](*arrays, *self._matrices, *found, counts.table, *numbers, **shape)

    def _predict(
        self, batch: Batch, given: tuple[Tensor, ...], found: tuple[Tensor, ...], sweeps: int, counts: DeviceCounts
    ) -> None:
        """Solve the free phase of every sample and its adjoint, at adversarial inputs if asked for, and compute the losses."""
        images, y, pick = given
        progress, n = batch.progress, len(pick)
        progress = progress if isinstance(progress, Tensor) else y.new_full((), progress)
        start = found[0] if batch.start is None else batch.start.contiguous()
        arrays = (self._flat.vector, images, self._gram, y, pick, start, self._bias, self._lo, self._hi, progress)
        numbers = (
            n, self._dim, self._sizes[1], *self._outputs(), self._own[0] + self._reach[0],
            *self._goal(batch, counts), *rounds_and_steps(sweeps), *loss_numbers(self._loss),
        )  # fmt: skip
        grid, shape = self._tiles(batch, n)
        shape |= {"PASSES": self._passes, "SQUARED": isinstance(self._loss, SquaredError)}
        _kernels().predict[grid](*arrays, *self._matrices, *found, counts.table, *numbers, **shape)

    def _outputs(self) -> tuple[int, ...]:
        """Return the offsets of W_{L-1} and b_{L-1}, the length of b_{L-1}, and the numbers of outputs and of units below."""
        w_at, b_at, _ = self._places
        return w_at[-1], b_at[-1], self._biases(self._n_layers - 1)[0], self._sizes[-1], self._sizes[-2]

    @staticmethod
    def _goal(batch: Batch, counts: DeviceCounts) -> tuple[float, float]:
        """Return the tolerance of the solves, and the relative residual that nearly all should reach."""
        tol = DEFAULT_TOL[torch.float32] if batch.policy.tol is None else batch.policy.tol
        return tol, min(counts.aim, SAFETY * tol)

    def _tiles(self, batch: Batch, n: int) -> tuple[tuple[int], dict[str, Any]]:
        """Return the grid of the solves, one program for each tile of samples, and their constants."""
        at_once, warps = tile_and_warps(n)
        shape = {"PARTS": self._parts, "WIDTH": self._width, "LAST": self._last, "TILE": at_once, "num_warps": warps}
        return (-(-n // at_once),), shape | {"START": batch.start is not None}

    def _differentiate(
        self, x: Tensor, y: Tensor, pick: Tensor, image: Tensor, losses: Tensor, total: Tensor, weight: Tensor,
        point: Tensor, change: Tensor,
    ) -> None:  # fmt: skip
        """Sum second moments of the activations and compute the derivatives from them."""
        from lrrn.kernels.cuda import derivatives as kernels

        flat, out, width, n = self._flat.vector, self._flat.gradient, self._width, len(image)
        (_, b_at, c_at), (d_0, d_1) = self._places, self._sizes[:2]
        (b_size, c_size), plan, factors = self._biases(0), self._maps[5], self._maps[6]
        sign_free, sign_clamped = self._signs
        sign, balanced, predicts = sign_clamped or sign_free, bool(sign_free and sign_clamped), self._loss is not None
        shape = {"BALANCED": balanced, "ATTACKED": self._passes > 1, "WIDTH": width, "LAST": self._last}
        shape |= {"TILE": min(padded(n), MOST_ROWS), "num_warps": 8}
        phases, strip = (weight, point, change, self._s, self._t), min(SIDE, width)
        kernels.moments[(width // strip, width // strip, 2 if sign_clamped else 1)](
            flat, image, y, pick, image, losses, total, *phases, n, self._dim, d_1, b_at[0], b_size, self._sizes[-1], sign,
            0.0 if predicts else 0.5, PREDICTS=predicts, STRIP=strip, **{**shape, "num_warps": 4},
        )  # fmt: skip
        if not sign_clamped:
            out.zero_()  # the last layer does not contribute
        kernels.first_layer[(-(-d_0 // COLUMNS),)](
            flat, x, pick, image, *phases, out, n, self._dim, d_0, d_1, b_at[0], b_size, c_at[0], c_size, self._own[0],
            self._reach[0], sign, FIRST=self._first, COLUMNS=COLUMNS, num_stages=2, **shape,
        )  # fmt: skip
        if self._n_layers > (1 if sign_clamped else 2):
            side = self._block // TILE
            kernels.later_layers[(len(plan), side, side)](
                flat, self._s, self._t, plan, factors, out, WIDTH=width, BLOCK=self._block, TILE=TILE, num_warps=4
            )


def loss_numbers(loss: Margin | CrossEntropy | SquaredError | None) -> list[float]:
    """Return margin, temperature and size of an attack: what each begins with, and what training adds to it."""
    numbers = (loss.margin, loss.temperature, loss.adversarial_eps) if isinstance(loss, Margin) else (0.0, 1.0, 0.0)
    pairs = (number if isinstance(number, tuple) else (number, number) for number in numbers)
    return [part for begin, end in pairs for part in (float(begin), float(end - begin))]


def padded(size: int) -> int:
    """Return the smallest power of two, at least ``size``, that a matrix product on chip supports."""
    return max(16, 1 << (size - 1).bit_length())


@cache
def _kernels() -> Any:
    """Import the kernels on first use: Triton is slow to import and may not be installed."""
    from lrrn.kernels.cuda import training_step

    return training_step
