"""Proven upper bounds on the spectral norm of a 2-D convolution with zero padding and stride.

The Gram matrix of a convolution couples neighbouring rows of an image only: it is block tridiagonal. Where the smaller one has
at most ``EXACT_LIMIT`` rows, its largest eigenvalue is proven as in ``verified``. Otherwise the convolution is a sub-block of
one on a twisted torus, whose norm is the largest norm of one small matrix per frequency. ``docs/theory/operators.md`` has the
proofs; equation numbers are those of that page. All computations are in float64 on the CPU, with weights scaled by a power of
two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal, localcontext
from functools import cache
from itertools import chain, pairwise, product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrrn.linalg.blocks import PANEL, BlockTridiagonal, gram, symmetrised
from lrrn.linalg.verified import EPS, UNDERFLOW, largest_eigenvalue

EXACT_LIMIT = 4096
"""Largest number of inputs or units, whichever is less, for which the Gram matrix of the convolution is factored."""
CROWDED_LIMIT = 1024
"""Largest size of the matrix of a frequency if an axis that has few pixels or units is kept off the torus."""
SLACK, SMALL_SLACK = 1e-3, 1e-4
"""What is added to estimates of the squared norm of a frequency's matrix, as a fraction, before they are proven."""
CHUNK = 2**22
"""Number of entries of the matrices of all frequencies that are in memory at once."""
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")


class Reads(NamedTuple):
    """All triples, along one axis, of a unit, a pixel that it reads, and the tap through which it does."""

    unit: Tensor
    pixel: Tensor
    tap: Tensor
    stride: int = 1
    padding: int = 0

    def coarse(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the triples after space-to-depth: the unit reads the pixel which is as far from it as the tap says."""
        return self.unit, (self.pixel + self.padding) // self.stride, self.tap // self.stride


def convolution_norm(
    weight: Tensor, in_shape: tuple[int, int, int], stride: int, padding: int, *, nearly_orthogonal: bool = False
) -> float:
    """Return a proven upper bound on the spectral norm of x -> conv2d(x, weight, stride=stride, padding=padding).

    Parameters
    ----------
    weight : Tensor of shape (out_channels, in_channels, rows, columns)
        Kernels, of any float type and on any device; conversion to float64 is exact.
    in_shape : tuple of int
        Channels, height and width of an input.
    stride, padding : int
        Of both axes; the padding consists of zeros.
    nearly_orthogonal : bool, default=False
        Whether the matrices of all frequencies are nearly orthogonal, as of layers that are trained to be. The torus is then as
        tight as the image, and the bound comes from it alone: within 1e-4 of the norm. It is proven for other kernels, too.

    Returns
    -------
    float
        The bound, for exact arithmetic with these weights; infinite if a weight is not finite. It is within 5 % of the norm if
        there are at most ``EXACT_LIMIT`` inputs or as few units, and usually within 15 % otherwise; it can be loose where a
        kernel of many channels nearly fills the image.
    """
    weight = weight.detach().to("cpu", torch.float64)
    if not bool(weight.isfinite().all()):
        return math.inf
    rows, columns = (_reads(n, k, stride, padding) for n, k in zip(in_shape[1:], weight.shape[2:], strict=True))
    w = torch.zeros_like(weight)
    # taps that only ever read padding are no part of the operator
    used = (..., rows.tap.unique()[:, None], columns.tap.unique())
    w[used] = weight[used]
    if not bool(w.any()):
        return 0.0
    exponent = math.frexp(float(w.abs().max()))[1]
    # exact, but for weights that are smaller than the largest one by a factor of 2^-1022: UNDERFLOW exceeds their norm
    w = torch.from_numpy(np.ldexp(w.numpy(), -exponent))
    n_units = w.shape[0] * _count(rows.unit) * _count(columns.unit)
    n_pixels = w.shape[1] * _count(rows.pixel) * _count(columns.pixel)
    if nearly_orthogonal:
        bound = _by_frequency(w, rows, columns, SMALL_SLACK)
    elif min(n_units, n_pixels) <= EXACT_LIMIT:
        h, error = _squared(w, rows, columns, of_units=n_units <= n_pixels)
        bound = math.sqrt(largest_eigenvalue(h, error)) * (1 + 4 * EPS)
    else:
        bound = _by_frequency(*_uncrowded(w, rows, columns))
    try:
        return math.nextafter(math.ldexp(bound * (1 + EPS) + UNDERFLOW, exponent), math.inf)
    except OverflowError:
        return math.inf


def _reads(size: int, kernel: int, stride: int, padding: int) -> Reads:
    n_units = max(0, (size + 2 * padding - kernel) // stride + 1)
    unit, tap = torch.meshgrid(torch.arange(n_units), torch.arange(kernel), indexing="ij")
    pixel = stride * unit + tap - padding
    inside = (pixel >= 0) & (pixel < size)
    return Reads(unit[inside], pixel[inside], tap[inside], stride, padding)


def _count(values: Tensor) -> int:
    return len(values.unique())


def _squared(w: Tensor, rows: Reads, columns: Reads, of_units: bool) -> tuple[BlockTridiagonal, float]:
    """Return A A^T, of the units, or A^T A, of the pixels, as computed, and a proven bound on the norm of its error."""
    # rows of the image are coupled if one unit reads both, rows of units if both read one pixel: (2)
    unit, pixel, tap = rows.coarse()
    level = (unit if of_units else pixel) // max(1, int(tap.max()))
    if not of_units:
        w, rows, columns = w.transpose(0, 1), _exchanged(rows), _exchanged(columns)
    unrolled = _unrolled(w, columns)
    groups: dict[int, list[int]] = {}
    for k, row in sorted(set(zip(level.tolist(), rows.unit.tolist(), strict=True))):
        groups.setdefault(k, []).append(row)
    h = _gram_of_rows(list(groups.values()), rows, unrolled)
    # every entry is an inner product of two rows of A, of at most this length, and symmetrised: the rounding error is at most
    # gamma_(length + 1) |A|_F^2 in norm, as | |A| |A|^T |_F <= |A|_F^2. EPS is twice the unit roundoff
    length = unrolled.shape[0] * unrolled.shape[2]
    squares = _count(rows.unit) * float(unrolled.square().sum())
    return h, 2 * (length + 4) * EPS * squares + UNDERFLOW


def _exchanged(reads: Reads) -> Reads:
    """Return the triples of the adjoint, in which pixels read units."""
    return reads._replace(unit=reads.pixel, pixel=reads.unit)


def _unrolled(w: Tensor, columns: Reads) -> Tensor:
    """Return the matrices from one row of pixels to one row of units, for each row of taps; their entries are weights or 0."""
    n_out, n_in, n_taps, _ = w.shape
    out = w.new_zeros(n_taps, n_out, int(columns.unit.max()) + 1, n_in, int(columns.pixel.max()) + 1)
    out[:, :, columns.unit, :, columns.pixel] = w[..., columns.tap].permute(3, 2, 0, 1)
    return out.flatten(3).flatten(1, 2)


def _gram_of_rows(groups: list[list[int]], rows: Reads, unrolled: Tensor) -> BlockTridiagonal:
    """Return A A^T, of which groups of rows are the blocks; rows couple within a group and with the next one only."""
    reads: dict[int, dict[int, int]] = {}
    for unit, pixel, tap in zip(*(values.tolist() for values in rows[:3]), strict=True):
        reads.setdefault(unit, {})[pixel] = tap

    @cache
    def of_taps(pairs: tuple[tuple[int, int], ...]) -> Tensor:
        # the same for all rows away from the border
        out = unrolled.new_zeros(unrolled.shape[1], unrolled.shape[1])
        for left, right in pairs:
            out.addmm_(unrolled[left], unrolled[right].mT)
        return out

    def of_rows(first: int, second: int) -> Tensor:
        if first < second:
            return of_rows(second, first).mT
        return of_taps(tuple((tap, reads[second][pixel]) for pixel, tap in reads[first].items() if pixel in reads[second]))

    def of_groups(first: list[int], second: list[int]) -> Tensor:
        return torch.cat([torch.cat([of_rows(i, j) for j in second], 1) for i in first])

    if len(groups) < 4:
        # below that, a block-tridiagonal factorisation costs more than a dense one
        groups = [list(chain.from_iterable(groups))]
    diag = tuple(symmetrised(of_groups(group, group)) for group in groups)
    return BlockTridiagonal(diag, tuple(of_groups(after, before) for before, after in pairwise(groups)))


def _uncrowded(w: Tensor, rows: Reads, columns: Reads) -> tuple[Tensor, Reads, Reads]:
    """Return the convolution with each axis on which a torus would be loose turned into channels, where that is cheap.

    That is so where units, or pixels, are hardly more than taps; all are counted after space-to-depth.
    """
    for _ in range(2):
        unit, pixel, tap = columns.coarse()
        crowded = min(_count(unit), _count(pixel)) <= int(tap.max()) + 2
        smaller = min(w.shape[0] * _count(columns.unit), w.shape[1] * _count(columns.pixel) * rows.stride)
        if crowded and smaller <= max(CROWDED_LIMIT, min(w.shape[0], w.shape[1] * rows.stride * columns.stride)):
            w = _unrolled(w, columns).permute(1, 2, 0)[..., None]
            columns = Reads(*torch.zeros(3, 1, dtype=torch.long))
        w, rows, columns = w.transpose(2, 3), columns, rows
    return w, rows, columns


def _by_frequency(w: Tensor, rows: Reads, columns: Reads, slack: float = SLACK) -> float:
    """Return a bound on the norm by (4): the least, over four twists, of the largest norm of all frequencies' matrices."""
    blocks, taps = _blocks(w, rows.stride, columns.stride)
    sizes = tuple(_torus_size(reads) for reads in (rows, columns))
    roots = tuple(_roots(2 * size) for size in sizes)
    best, estimates = torch.empty(0), torch.full((1,), math.inf)
    for twist in product(*((0, 1) if size > 1 else (0,) for size in sizes)):
        phases = _phases(sizes, twist, taps, roots)
        found = torch.cat([_estimates(chunk, blocks) for chunk in _chunks(phases, blocks)])
        if float(found.max()) < float(estimates.max()):
            best, estimates = phases, found
    # what is proven of one frequency first makes the others succeed
    phases = best[estimates.argsort(descending=True)]
    squared = _largest_square(phases, blocks, float(estimates.max()), slack)
    return (math.sqrt(squared) * (1 + 4 * EPS) + _transform_error(blocks)) * (1 + 4 * EPS)


def _blocks(w: Tensor, *strides: int) -> tuple[Tensor, Tensor]:
    """Return the kernel after space-to-depth, as wide matrices of shape (taps, n, m), and the places of its taps, (taps, 2)."""
    pad = [-k % stride for k, stride in zip(w.shape[2:], strides, strict=True)]
    w = torch.nn.functional.pad(w, (0, pad[1], 0, pad[0]))
    w = w.unflatten(3, (-1, strides[1])).unflatten(2, (-1, strides[0])).permute(2, 4, 0, 1, 3, 5).flatten(3)
    taps = (w != 0).any(-1).any(-1).nonzero()
    blocks = w[taps[:, 0], taps[:, 1]]
    blocks = blocks[..., (blocks != 0).any(0).any(0)]
    return (blocks if blocks.shape[1] <= blocks.shape[2] else blocks.mT.contiguous()), taps


def _torus_size(reads: Reads) -> int:
    """Return the least length of a torus on which no unit reads a pixel around it: (3)."""
    unit, pixel, tap = reads.coarse()
    return 1 + int(max(tap.max() + unit.max() - pixel.min(), pixel.max() - unit.min() - tap.min()))


def _roots(n: int) -> Tensor:
    """Return exp(2 pi i j / n), j < n, rounded from 50 digits of Taylor's series: within 2^(1/2) / 2 units u."""
    with localcontext() as context:
        context.prec = 50
        angle, term, parts = 2 * PI / n, Decimal(1), [Decimal(0), Decimal(0)]
        for k in range(60):
            parts[k % 2] += term if k % 4 < 2 else -term
            term *= angle / (k + 1)
        powers = [(Decimal(1), Decimal(0))]
        for _ in range(n - 1):
            x, y = powers[-1]
            powers.append((x * parts[0] - y * parts[1], x * parts[1] + y * parts[0]))
    return torch.tensor([complex(float(x), float(y)) for x, y in powers], dtype=torch.complex128)


def _phases(sizes: tuple[int, ...], twist: tuple[int, ...], taps: Tensor, roots: tuple[Tensor, ...]) -> Tensor:
    """Return the factors of the taps, of shape (frequencies, taps); of a frequency and its negative, one will do."""
    # angles are multiples of pi / size, reduced exactly. A product of two roots is wrong by at most 7 units u: 4 of its own
    # rounding and 2 of the roots'
    numbers = [2 * torch.arange(size) + shift for size, shift in zip(sizes, twist, strict=True)]
    numbers[0] = numbers[0][numbers[0] <= sizes[0]]
    first, second = (
        root[(number[:, None] * taps[:, i]) % len(root)] for i, (number, root) in enumerate(zip(numbers, roots, strict=True))
    )
    return (first[:, None] * second).flatten(0, 1)


def _chunks(phases: Tensor, blocks: Tensor) -> Iterator[Tensor]:
    _, n, m = blocks.shape
    return iter(phases.split(max(1, CHUNK // max(n * m, 4 * n * n))))


def _estimates(phases: Tensor, blocks: Tensor, steps: int = 12) -> Tensor:
    """Estimate the squared norm of every frequency's matrix, from a Krylov space, in float32; not bounds."""
    matrices = torch.tensordot(phases.to(torch.complex64), blocks.to(torch.complex64), 1)
    start = torch.randn(blocks.shape[1], generator=torch.Generator().manual_seed(0)).to(torch.complex64)
    basis = start.expand(len(phases), -1)[:, :, None] / start.norm()
    for _ in range(min(steps, blocks.shape[1]) - 1):
        new = matrices @ (matrices.mH @ basis[:, :, -1:])
        new = new - basis @ (basis.mH @ new)
        basis = torch.cat([basis, new / new.norm(dim=1, keepdim=True).clamp(min=1e-30)], -1)
    # orthonormal also where the Krylov space is smaller, so that no estimate is too large by more than rounding
    images = matrices.mH @ torch.linalg.qr(basis)[0]
    return torch.linalg.eigvalsh(images.mH @ images)[:, -1].double()


def _transform_error(blocks: Tensor) -> float:
    """Return a bound on the norm of the rounding error of any frequency's matrix, that of its phases included."""
    # a phase is wrong by at most 7 units u (_phases) and a sum over all taps by gamma_taps: the real and the imaginary part
    # of an entry by at most (taps + 8) u sum |w|, and 2^(1/2) u < EPS
    return (len(blocks) + 8) * EPS * float(torch.linalg.vector_norm(blocks.abs().sum(0)))


def _largest_square(phases: Tensor, blocks: Tensor, estimate: float, slack: float) -> float:
    """Return a proven bound on the largest squared norm of the matrices of the frequencies, given these phases as exact."""
    shift, excess = estimate * (1 + slack), 0.0
    for chunk in _chunks(phases, blocks):
        squares, error = _hermitian_squares(chunk, blocks)
        while not (found := _excess(squares, shift) + error) < math.inf:
            shift *= 1 + 10 * slack
            if not shift < math.inf:
                return math.inf
        excess = max(excess, found)
    return (shift + excess + UNDERFLOW) * (1 + 4 * EPS)


def _hermitian_squares(phases: Tensor, blocks: Tensor) -> tuple[Tensor, float]:
    """Return B B^* of each frequency's matrix B, as real symmetric matrices of twice the size, and a bound on their error."""
    real, imaginary = (torch.tensordot(part.contiguous(), blocks, 1) for part in (phases.real, phases.imag))
    both = torch.cat([real, imaginary], -1)
    even, cross = gram(both), imaginary @ real.mT
    odd = cross - cross.mT
    # X + i Y acts as [[X, -Y], [Y, X]], whose error is at most that of X plus that of Y in norm: gamma_(2 m + 1) |B|_F^2 and
    # gamma_(m + 1) 2 |Re B|_F |Im B|_F <= gamma_(m + 1) |B|_F^2, together less than 4 (m + 1) u |B|_F^2
    error = 4 * (blocks.shape[2] + 4) * EPS * float(both.square().sum((1, 2)).max())
    return torch.cat([torch.cat([even, -odd], -1), torch.cat([odd, even], -1)], -2), error + UNDERFLOW


def _excess(h: Tensor, shift: float) -> float:
    """Return d such that no eigenvalue of a batch of matrices is above shift + d, proven; infinite if no such number is found.

    If shift I - h = F F^T + R, no eigenvalue of h exceeds shift + |R|, whatever computed F (``BlockCholesky.defect``).
    """
    n = h.shape[-1]
    shifted = -h
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift)
    factor, info = torch.linalg.cholesky_ex(shifted)
    if bool(info.any()):
        return math.inf
    squares = h.new_zeros(len(h))
    for end in range(PANEL, n + PANEL, PANEL):
        # R is symmetric: its lower triangle, with all of the diagonal panels, has at least half of its squares
        rows = slice(end - PANEL, end)
        left = torch.baddbmm(shifted[:, rows, :end], factor[:, rows, :end], factor[:, :end, :end].mT, alpha=-1)
        squares += 2 * left.square().sum((1, 2))
    # rounding of the lower triangle of R, 2^(1/2) gamma_(n + 1) (|F|_F^2 + |shifted|_F), and of the diagonal, u |shifted|_F,
    # are together less than 2 (n + 4) u times that sum; a sum of so many squares has a relative error of n^2 u at most
    size = factor.square().sum((1, 2)) + torch.linalg.matrix_norm(shifted)
    defect = float((squares.sqrt() * (1 + n * n * EPS) + (n + 4) * EPS * size).max())
    return defect + n * n * torch.finfo(torch.float64).smallest_normal if defect < math.inf else math.inf
