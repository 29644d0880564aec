"""Differences of the energy's derivatives between two activations, in compiled code for the CPU.

The derivative in W_k is quadratic in the activations: with mismatches R, the difference between u and v is
R(u) u - R(v) v = R'(d) m + R(m) d with d = u - v and m = (u + v) / 2. That avoids cancellation where the phases nearly agree.
With d any direction and m an activation, it is the derivative along d.
"""

from __future__ import annotations

from typing import Any

from lrrn.kernels.cpu.arguments import Network
from lrrn.kernels.cpu.arrays import empty, zeros
from lrrn.kernels.cpu.compiled import kernel
from lrrn.kernels.cpu.gemm import gemm


@kernel
def add_differences(
    net: Network,
    layers: int,  # number of layers of weights
    x: Any,  # (n, d_0)
    stack: Any,  # (3 n, units of these layers): weighted differences d, means m, and d again
    out: Any,  # (p,)
) -> None:
    """Add the derivatives of the first ``layers`` layers' energies; those in W_0 are written and need not be zero before."""
    n, dim, one = x.shape[0], stack.shape[1], net.flat.dtype.type(1)
    sums = zeros(1, dim, net.flat)
    total = sums[0]
    for i in range(n):
        row = stack[i]
        for j in range(dim):
            total[j] += row[j]
    at, below = 0, 0
    moments = empty(0, 0, net.flat)
    for k in range(layers):
        d, d_in, w_at = net.sizes[k + 1], net.sizes[k], net.w_at[k]
        _add_biases(net, k, sums, at, below, out)
        keep = one * 0 if k == 0 else one
        if 2 * n < d:
            _add_by_samples(net, k, x, stack, at, below, keep, out)
            moments = empty(0, 0, net.flat)
        else:
            lower, moments = moments, _moments(net, n, stack, at, d)
            if k == 0:
                gemm(d, d_in, n, -net.both[0], stack, at, dim, True, x, 0, d_in, False, keep, out, w_at, d_in)
            else:
                if lower.shape[0] == 0:
                    lower = _moments(net, n, stack, below, d_in)
                start = n * dim + below
                gemm(d, d_in, 2 * n, -net.both[k], stack, at, dim, True, stack, start, dim, False, keep, out, w_at, d_in)
                gemm(d, d_in, d_in, net.a[k], net.flat, w_at, d_in, False, lower, 0, d_in, False, one, out, w_at, d_in)
            if net.ab[k] != 0:
                gemm(d, d_in, d, net.ab[k], moments, 0, d, False, net.flat, w_at, d_in, False, one, out, w_at, d_in)
            _add_products_of_biases(net, k, sums, at, below, out)
        below, at = at, at + d


@kernel
def _moments(net: Network, n: int, stack: Any, at: int, d: int) -> Any:
    """Return the sum of d m^T + m d^T over the samples, for the units of one layer."""
    dim, one = stack.shape[1], net.flat.dtype.type(1)
    out = empty(d, d, net.flat)
    gemm(d, d, n, one, stack, at, dim, True, stack, n * dim + at, dim, False, one * 0, out, 0, d)
    for i in range(d):
        for j in range(i + 1):
            both = out[i, j] + out[j, i]
            out[i, j] = both
            out[j, i] = both
    return out


@kernel
def _add_biases(net: Network, k: int, sums: Any, at: int, below: int, out: Any) -> None:
    """Add the derivatives in the biases of layer ``k``, which are linear: they depend on the sums of d only."""
    flat, d, d_in, dim, one = net.flat, net.sizes[k + 1], net.sizes[k], sums.shape[1], net.flat.dtype.type(1)
    b_at, c_at, w_at, a, ab = net.b_at[k], net.c_at[k], net.w_at[k], net.a[k], net.ab[k]
    if b_at >= 0:
        for j in range(d):
            out[b_at + j] -= a * sums[0, at + j]
        if k > 0:
            gemm(1, d, d_in, a, sums, below, dim, False, flat, w_at, d_in, True, one, out, b_at, d)
    if c_at >= 0 and ab != 0:
        gemm(1, d_in, d, -ab, sums, at, dim, False, flat, w_at, d_in, False, one, out, c_at, d_in)
        if k > 0:
            for j in range(d_in):
                out[c_at + j] += ab * sums[0, below + j]


@kernel
def _add_products_of_biases(net: Network, k: int, sums: Any, at: int, below: int, out: Any) -> None:
    """Add the terms of the derivative in W_k that are products of its biases with the sums of d."""
    flat, d, d_in, dim, one = net.flat, net.sizes[k + 1], net.sizes[k], sums.shape[1], net.flat.dtype.type(1)
    b_at, c_at, w_at, a, ab = net.b_at[k], net.c_at[k], net.w_at[k], net.a[k], net.ab[k]
    if k > 0 and b_at >= 0:
        gemm(d, d_in, 1, a, flat, b_at, d, True, sums, below, dim, False, one, out, w_at, d_in)
    if ab != 0 and c_at >= 0:
        gemm(d, d_in, 1, -ab, sums, at, dim, True, flat, c_at, d_in, False, one, out, w_at, d_in)


@kernel
def _add_by_samples(net: Network, k: int, x: Any, stack: Any, at: int, below: int, keep: Any, out: Any) -> None:
    """Add the derivative in W_k by way of W_k and the activations of each sample, which takes less time for few samples."""
    flat, d, d_in, n, dim, one = net.flat, net.sizes[k + 1], net.sizes[k], x.shape[0], stack.shape[1], net.flat.dtype.type(1)
    b_at, c_at, w_at, a, ab, both = net.b_at[k], net.c_at[k], net.w_at[k], net.a[k], net.ab[k], net.both[k]
    # beta a W_k^T z_{k+1} - a (1 + beta) z_k - beta a c_k of the means, without c_k of the differences
    rows = zeros(2 * n, d_in, flat)
    for i in range(n if k == 0 else 2 * n):
        # separate vectors, here and below, which the compiler can vectorise
        target = rows[i]
        source = x[i] if k == 0 else stack[n + i, below:]
        for j in range(d_in):
            target[j] = -both * source[j]
        if i < n and c_at >= 0:
            bias = flat[c_at:]
            for j in range(d_in):
                target[j] -= ab * bias[j]
    if ab != 0:
        gemm(2 * n, d_in, d, ab, stack, n * dim + at, dim, False, flat, w_at, d_in, False, one, rows, 0, d_in)
    gemm(d, d_in, 2 * n, one, stack, at, dim, True, rows, 0, d_in, False, keep, out, w_at, d_in)
    if k == 0:
        return
    # a (W_k z_k + b_k)
    rows = zeros(2 * n, d, flat)
    for i in range(n):
        if b_at >= 0:
            for j in range(d):
                rows[i, j] = a * flat[b_at + j]
    gemm(2 * n, d, d_in, a, stack, n * dim + below, dim, False, flat, w_at, d_in, True, one, rows, 0, d)
    gemm(d, d_in, 2 * n, one, rows, 0, d, True, stack, below, dim, False, one, out, w_at, d_in)
