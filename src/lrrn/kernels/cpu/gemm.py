"""BLAS from compiled code: a matrix product (gemm) on parts of arrays, by the routine that Numba's ``np.dot`` calls.

Each use of ``np.dot`` itself would take seconds to compile, allocate temporaries, and could not accumulate.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lrrn.kernels.cpu.compiled import kernel

SMALL = 10**6
"""Multiply-adds up to which OpenBLAS multiplies without copying the matrices into another layout first."""
LEAST = 16
"""Fewest rows or columns of a block; their number is a multiple of it, so that blocks fill vectors."""


@intrinsic  # type: ignore[untyped-decorator]
def gemm(
    typing_context: Any,
    m: Any,
    n: Any,
    k: Any,
    alpha: Any,
    a: Any,
    a_at: Any,
    a_stride: Any,
    a_transposed: Any,
    b: Any,
    b_at: Any,
    b_stride: Any,
    b_transposed: Any,
    beta: Any,
    c: Any,
    c_at: Any,
    c_stride: Any,
) -> Any:
    """C = alpha op(A) op(B) + beta C with C of shape (m, n), op(A) of shape (m, k) and op(B) of shape (k, n).

    Each matrix starts at offset ``at`` of a C-contiguous array, and its rows are ``stride`` entries apart.
    """
    kind = c.dtype
    number, flag = types.int64, types.boolean
    matrix = (number, number, flag)
    signature = types.void(number, number, number, kind, a, *matrix, b, *matrix, kind, c, number, number)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        m, n, k, alpha, a, a_at, a_stride, a_transposed, b, b_at, b_stride, b_transposed, beta, c, c_at, c_stride = arguments
        char, word, pointer = ir.IntType(8), ir.IntType(64), ir.IntType(8).as_pointer()

        def data(kind: Any, value: Any, at: Any) -> Any:
            array = context.make_array(kind)(context, builder, value)
            return builder.bitcast(builder.gep(array.data, [at]), pointer)

        def letter(transposed: Any) -> Any:
            return builder.select(transposed, ir.Constant(char, ord("t")), ir.Constant(char, ord("n")))

        def slot(value: Any) -> Any:
            return builder.bitcast(cgutils.alloca_once_value(builder, value), pointer)

        shape = [char, char, char, word, word, word, pointer, pointer, word, pointer, word, pointer, pointer, word]
        routine = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), shape), "numba_xxgemm")
        letters = {types.float32: "s", types.float64: "d"}
        # the routine is column-major, so compute the transposed product: C^T = op(B)^T op(A)^T
        builder.call(
            routine,
            [
                ir.Constant(char, ord(letters[signature.args[13].dtype])),
                letter(b_transposed),
                letter(a_transposed),
                n,
                m,
                k,
                slot(alpha),
                data(signature.args[8], b, b_at),
                b_stride,
                data(signature.args[4], a, a_at),
                a_stride,
                slot(beta),
                data(signature.args[13], c, c_at),
                c_stride,
            ],
        )
        return context.get_dummy_value()

    return signature, generate


@kernel
def gemm_in_blocks(
    m: int,
    n: int,
    k: int,
    alpha: Any,
    a: Any,
    a_at: int,
    a_stride: int,
    a_transposed: bool,
    b: Any,
    b_at: int,
    b_stride: int,
    b_transposed: bool,
    beta: Any,
    c: Any,
    c_at: int,
    c_stride: int,
) -> None:
    """Compute the product of :func:`gemm` in blocks of rows or of columns that BLAS takes for small.

    With one long side, such as that of the input, this takes a fifth less time. Blocks depend on the sizes only.
    """
    by_rows = m > n
    longer, area = max(m, n), min(m, n) * k
    size = SMALL // max(area, 1) // LEAST * LEAST
    if size == 0 or size > longer:
        size = max(longer, 1)
    for at in range(0, longer, size):
        here = min(size, longer - at)
        rows, columns, left, right, to = m, n, a_at, b_at, c_at
        if by_rows:
            rows = here
            left += at if a_transposed else at * a_stride
            to += at * c_stride
        else:
            columns = here
            right += at * b_stride if b_transposed else at
            to += at
        gemm(
            rows, columns, k, alpha, a, left, a_stride, a_transposed, b, right, b_stride, b_transposed, beta, c, to, c_stride
        )  # fmt: skip
