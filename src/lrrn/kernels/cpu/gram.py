"""W W^T of a matrix that fits into the cache: vectorised inner products for one triangle, copied to the other.

For small layers, BLAS spends as much time on packing the matrix as its kernels save.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lrrn.kernels.cpu.arrays import lesser
from lrrn.kernels.cpu.compiled import kernel
from lrrn.kernels.cpu.gemm import gemm
from lrrn.kernels.cpu.vector_sweep import VECTOR_BYTES, Vectors

TILE = 4
"""Rows and columns of a tile whose inner products are kept in registers."""


@intrinsic  # type: ignore[untyped-decorator]
def inner_products(typing_context: Any, w: Any, i: Any, j: Any, vectors: Any, out: Any) -> Any:
    """Write W[i : i + TILE] W[j : j + TILE]^T to ``out``, over the first ``vectors`` vectors of columns; C-contiguous."""
    number = types.int64
    signature = types.void(w, number, number, number, out)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = Vectors(context, builder, signature.args[0].dtype)
        given, i, j, vectors, result = arguments
        matrix = context.make_array(signature.args[0])(context, builder, given)
        out = context.make_array(signature.args[4])(context, builder, result)
        stride, order = builder.extract_value(matrix.shape, 1), builder.extract_value(out.shape, 1)
        left, right = ([builder.add(first, v.number(k)) for k in range(TILE)] for first in (i, j))
        sums = [[cgutils.alloca_once(builder, v.kind) for _ in right] for _ in left]
        for total in (total for row in sums for total in row):
            builder.store(v.zero, total)
        with cgutils.for_range(builder, vectors) as step:
            at = builder.mul(step.index, v.number(v.width))
            a, b = (
                [v.load(v.address(matrix.data, builder.add(builder.mul(row, stride), at))) for row in rows]
                for rows in (left, right)
            )
            for row, total_row in zip(a, sums, strict=True):
                for column, total in zip(b, total_row, strict=True):
                    builder.store(v.multiply_add(row, column, builder.load(total)), total)
        for row, total_row in zip(left, sums, strict=True):
            for column, total in zip(right, total_row, strict=True):
                place = builder.add(builder.mul(row, order), column)
                builder.store(v.sum(builder.load(total)), builder.gep(out.data, [place]))
        return context.get_dummy_value()

    return signature, generate


@kernel
def gram(w: Any, out: Any) -> None:
    """Write W W^T, for W of shape (d, d_in), to ``out`` of shape (d, d)."""
    d, d_in = w.shape
    one = w.dtype.type(1)
    vectors = d_in * w.itemsize // VECTOR_BYTES
    whole = vectors * VECTOR_BYTES // w.itemsize
    if d < TILE or vectors == 0:
        gemm(d, d, d_in, one, w, 0, d_in, False, w, 0, d_in, True, one * 0, out, 0, d)
    else:
        # shift the last tile of each row and column back, so that it does not exceed the matrix
        for i in range(0, d, TILE):
            for j in range(0, i + 1, TILE):
                inner_products(w, lesser(i, d - TILE), lesser(j, d - TILE), vectors, out)
        if whole < d_in:
            gemm(d, d, d_in - whole, one, w, whole, d_in, False, w, whole, d_in, True, one, out, 0, d)
    for i in range(d):
        for j in range(i + 1, d):
            out[i, j] = out[j, i]
