"""BLAS from compiled code: a matrix product (gemm) on parts of arrays, by the routine that Numba's ``np.dot`` calls.

Each use of ``np.dot`` itself would take seconds to compile, allocate temporaries, and could not accumulate.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


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
