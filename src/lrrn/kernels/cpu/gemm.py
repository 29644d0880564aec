"""BLAS from compiled code: a matrix product (gemm) on parts of arrays, by the routine that Numba's ``np.dot`` calls.

Each use of ``np.dot`` itself would take seconds to compile, allocate temporaries, and could not accumulate.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

SMALL = 10**6
"""Multiply-adds up to which OpenBLAS multiplies without copying the matrices into another layout first."""
LEAST = 16
"""Fewest rows or columns of a block; their number is a multiple of it, so that blocks fill vectors."""

CHAR, WORD, POINTER = ir.IntType(8), ir.IntType(64), ir.IntType(8).as_pointer()


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
        entry = context.get_data_type(signature.args[13].dtype)

        def data(kind: Any, value: Any, at: Any) -> Any:
            return builder.gep(context.data_model_manager[kind].get(builder, value, "data"), [at])

        def slot(value: Any) -> Any:
            return builder.bitcast(cgutils.alloca_once_value(builder, value), POINTER)

        left = data(signature.args[4], a, a_at), a_stride, a_transposed
        right = data(signature.args[8], b, b_at), b_stride, b_transposed
        result = data(signature.args[13], c, c_at), c_stride
        builder.call(_in_blocks(builder.module, entry), [m, n, k, slot(alpha), *left, *right, slot(beta), *result])
        return context.get_dummy_value()

    return signature, generate


def _in_blocks(module: Any, entry: Any) -> Any:
    """Return the function that computes a product in blocks of rows or columns, at most SMALL; written once per module.

    With one long side, such as that of the input, this takes a fifth less time. Blocks depend on the sizes only.
    """
    single = isinstance(entry, ir.FloatType)
    name = f"lrrn_gemm_{'single' if single else 'double'}"
    if name in module.globals:
        return module.globals[name]
    flag, numbers = ir.IntType(1), entry.as_pointer()
    shape = [WORD, WORD, WORD, POINTER, numbers, WORD, flag, numbers, WORD, flag, POINTER, numbers, WORD]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), shape), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    m, n, k, alpha, a, a_stride, a_transposed, b, b_stride, b_transposed, beta, c, c_stride = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    zero, least = ir.Constant(WORD, 0), ir.Constant(WORD, LEAST)
    by_rows = builder.icmp_signed(">", m, n)
    longer, area = builder.select(by_rows, m, n), builder.mul(builder.select(by_rows, n, m), k)
    area = builder.select(builder.icmp_signed(">", area, zero), area, ir.Constant(WORD, 1))
    size = builder.mul(builder.sdiv(builder.sdiv(ir.Constant(WORD, SMALL), area), least), least)
    cut = builder.and_(builder.icmp_signed(">", size, zero), builder.icmp_signed("<", size, longer))
    size = builder.select(cut, size, longer)
    with cgutils.for_range_slice(builder, zero, longer, size, WORD) as (at, _):
        left = builder.sub(longer, at)
        here = builder.select(builder.icmp_signed("<", left, size), left, size)
        rows, columns = builder.select(by_rows, here, m), builder.select(by_rows, n, here)
        a_at = builder.select(by_rows, builder.select(a_transposed, at, builder.mul(at, a_stride)), zero)
        b_at = builder.select(by_rows, zero, builder.select(b_transposed, builder.mul(at, b_stride), at))
        c_at = builder.select(by_rows, builder.mul(at, c_stride), at)
        arrays = [builder.bitcast(builder.gep(*one), POINTER) for one in ((a, [a_at]), (b, [b_at]), (c, [c_at]))]
        letters = [
            builder.select(transposed, ir.Constant(CHAR, ord("t")), ir.Constant(CHAR, ord("n")))
            for transposed in (b_transposed, a_transposed)
        ]
        shape = [CHAR, CHAR, CHAR, WORD, WORD, WORD, POINTER, POINTER, WORD, POINTER, WORD, POINTER, POINTER, WORD]
        routine = cgutils.get_or_insert_function(module, ir.FunctionType(ir.IntType(32), shape), "numba_xxgemm")
        # the routine is column-major, so compute the transposed product: C^T = op(B)^T op(A)^T
        kind = ir.Constant(CHAR, ord("s" if single else "d"))
        builder.call(
            routine,
            [kind, *letters, columns, rows, k, alpha, arrays[1], b_stride, arrays[0], a_stride, beta, arrays[2], c_stride],
        )
    builder.ret_void()
    return function
