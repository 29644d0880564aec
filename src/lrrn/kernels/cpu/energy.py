"""The energy in compiled code for the CPU: its QPs and its derivatives.

The mathematics is that of :mod:`lrrn.energy`, and the tests compare both. For small batches the cost of a step is dominated by
the overhead of a hundred small operations; compiled code avoids it. Derivatives are a flat vector like the parameters of a
:class:`~lrrn.kernels.cpu.arguments.Network`. Loops are explicit because each whole-array expression takes seconds to compile.
"""

from __future__ import annotations

from typing import Any

from lrrn.kernels.cpu.arguments import Network, PackedQP
from lrrn.kernels.cpu.arrays import empty, greater, lesser, vector, zeros
from lrrn.kernels.cpu.compiled import kernel
from lrrn.kernels.cpu.coordinate_descent import fill_panels, invert_diagonal
from lrrn.kernels.cpu.gemm import gemm
from lrrn.kernels.cpu.vector_sweep import PANEL


@kernel
def pack(net: Network, gram: Any, blocks: int, closed: bool, phase: PackedQP) -> None:
    """Write the first ``blocks`` blocks of H as panels; if ``closed``, the last one includes the terms of the layer above.

    ``gram`` is W_0 W_0^T; it is not read if beta_0 is 0.
    """
    flat, w_at, sizes, a, ab = net.flat, net.w_at, net.sizes, net.a, net.ab
    at, unit = 0, 0
    below = empty(sizes[1], 0, flat)
    for k in range(blocks):
        d = sizes[k + 1]
        block = zeros(d, d, flat)
        pressed = k + 1 < blocks or closed
        # a_k (I + beta_k W_k W_k^T) + a_{k+1} (W_{k+1}^T W_{k+1} + beta_{k+1} I)
        if ab[k] != 0:
            if k == 0:
                for i in range(d):
                    source, target = gram[i], block[i]
                    for j in range(d):
                        target[j] = ab[0] * source[j]
            else:
                gemm(d, d, sizes[k], ab[k], flat, w_at[k], sizes[k], False, flat, w_at[k], sizes[k], True, a[k], block, 0, d)
        own = a[k]
        above = empty(sizes[k + 2] if k + 1 < blocks else 0, d, flat)
        if pressed:
            own += ab[k + 1]
            width = sizes[k + 2]
            start = w_at[k + 1]
            gemm(d, d, width, a[k + 1], flat, start, d, True, flat, start, d, False, flat.dtype.type(1), block, 0, d)
            for i in range(above.shape[0]):
                source, target = flat[start + i * d :], above[i]
                for j in range(d):
                    target[j] = -net.both[k + 1] * source[j]
        for j in range(d):
            block[j, j] += own
        at = fill_panels(phase.panels, at, below, block, above)
        unit = invert_diagonal(phase.inverse_diagonal, unit, block)
        below = above


@kernel
def press(net: Network, k: int, phase: PackedQP) -> None:
    """Add the terms of layer ``k`` to the last block of H, in panels that :func:`pack` wrote without them."""
    flat, w_at, layout = net.flat, net.w_at, phase.layout
    d, width, dim = net.sizes[k], net.sizes[k + 1], phase.place.shape[0]
    start = phase.place[dim - d]
    block = zeros(d, d, flat)
    gemm(d, d, width, net.a[k], flat, w_at[k], d, True, flat, w_at[k], d, False, flat.dtype.type(0), block, 0, d)
    for p in range(layout.shape[0]):
        first = layout[p, 1] - start
        if first < 0:
            continue
        at = layout[p, 0] + (start - layout[p, 2]) * PANEL
        for i in range(lesser(PANEL, d - first)):
            j = first + i
            block[j, j] += net.ab[k]
            for m in range(d):
                phase.panels[at + m * PANEL + i] += block[m, j]
            phase.inverse_diagonal[start + j] = 1 / phase.panels[at + j * PANEL + i]


@kernel
def linear(net: Network, blocks: int, x: Any, q: Any) -> None:
    """Write q of the free phase over its first ``blocks`` blocks."""
    flat, w_at, b_at, c_at, a, ab = net.flat, net.w_at, net.b_at, net.c_at, net.a, net.ab
    n, dim = q.shape
    one = flat.dtype.type(1)
    start = 0
    for k in range(blocks):
        d, d_in = net.sizes[k + 1], net.sizes[k]
        term = zeros(1, d, flat)
        if b_at[k] >= 0:
            for j in range(d):
                term[0, j] = a[k] * flat[b_at[k] + j]
        if c_at[k] >= 0 and ab[k] != 0:
            gemm(1, d, d_in, ab[k], flat, c_at[k], d_in, False, flat, w_at[k], d_in, True, one, term, 0, d)
        if k + 1 < blocks:
            width = net.sizes[k + 2]
            if b_at[k + 1] >= 0:
                gemm(1, d, width, -a[k + 1], flat, b_at[k + 1], width, False, flat, w_at[k + 1], d, False, one, term, 0, d)
            if c_at[k + 1] >= 0:
                for j in range(d):
                    term[0, j] -= ab[k + 1] * flat[c_at[k + 1] + j]
        for i in range(n):
            source, target = term[0], q[i, start:]
            for j in range(d):
                target[j] = source[j]
        if k == 0:
            gemm(n, d, d_in, net.both[0], x, 0, d_in, False, flat, w_at[0], d_in, True, one, q, 0, dim)
        start += d


@kernel
def mismatch(
    net: Network, k: int, backwards: bool, below: Any, below_at: int, above: Any, above_at: int, n: int, to: Any
) -> None:
    """Write z_{k+1} - W_k z_k - b_k or, backwards, W_k^T z_{k+1} - z_k - c_k for ``n`` samples into a vector, row by row.

    Layers are columns of the given arrays, from an offset on.
    """
    flat, w_at, d, d_in = net.flat, net.w_at[k], net.sizes[k + 1], net.sizes[k]
    one = flat.dtype.type(1)
    source, width, bias, at, sign = below, d_in, net.c_at[k], below_at, -one
    if not backwards:
        source, width, bias, at, sign = above, d, net.b_at[k], above_at, one
    for i in range(n):
        row = source[i, at:]
        for j in range(width):
            value = sign * row[j]
            if bias >= 0:
                value -= flat[bias + j]
            to[i * width + j] = value
    if backwards:
        gemm(n, d_in, d, one, above, above_at, above.shape[1], False, flat, w_at, d_in, False, one, to, 0, d_in)
    else:
        gemm(n, d, d_in, -one, below, below_at, below.shape[1], False, flat, w_at, d_in, True, one, to, 0, d)


@kernel
def add_layer(
    net: Network, k: int, below: Any, below_at: int, above: Any, above_at: int, weight: Any, sign: Any, out: Any
) -> None:
    """Add ``sign`` times the derivatives of one layer's energy to ``out``: products of mismatches and activations."""
    n, d, d_in, w_at = weight.shape[0], net.sizes[k + 1], net.sizes[k], net.w_at[k]
    one = net.flat.dtype.type(1)
    rows = vector(n * greater(d, d_in), net.flat)
    for direction in range(2 if net.ab[k] != 0 else 1):
        backwards = direction == 1
        mismatch(net, k, backwards, below, below_at, above, above_at, n, rows)
        width, bias = (d_in, net.c_at[k]) if backwards else (d, net.b_at[k])
        for i in range(n):
            factor = -sign * weight[i] * (net.ab[k] if backwards else net.a[k])
            for j in range(width):
                rows[i * width + j] *= factor
                if bias >= 0:
                    out[bias + j] += rows[i * width + j]
        if backwards:
            gemm(
                d, d_in, n, -one, above, above_at, above.shape[1], True, rows, 0, d_in, False, one, out, w_at, d_in
            )  # fmt: skip
        else:
            gemm(
                d, d_in, n, one, rows, 0, d, True, below, below_at, below.shape[1], False, one, out, w_at, d_in
            )  # fmt: skip


@kernel
def clear(out: Any, first: int, length: int) -> None:
    """Set a vector to zero, except for ``length`` entries from ``first`` on."""
    for j in range(first):
        out[j] = 0
    for j in range(first + length, out.shape[0]):
        out[j] = 0
