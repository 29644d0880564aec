"""New arrays, and the lesser and the greater of two numbers, in kernels.

They are intrinsic: Numba compiles several functions for each way to call ``np.empty``, ``min`` or ``max``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from lrrn.kernels.cpu.compiled import kernel


def _new(context: Any, builder: Any, kind: Any, shape: tuple[Any, ...]) -> Any:
    """Emit code for a new array of a given shape."""
    item = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    strides = [item]
    for length in shape[:0:-1]:
        strides.insert(0, builder.mul(strides[0], length))
    size = builder.mul(strides[0], shape[0])
    meminfo = context.nrt.meminfo_alloc_aligned(builder, size=size, align=context.get_preferred_array_alignment(kind.dtype))
    array = context.make_array(kind)(context, builder)
    data = builder.bitcast(context.nrt.meminfo_data(builder, meminfo), context.get_data_type(kind.dtype).as_pointer())
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=item, meminfo=meminfo)
    return array._getvalue()


@intrinsic  # type: ignore[untyped-decorator]
def empty(typing_context: Any, rows: Any, columns: Any, like: Any) -> Any:
    """Return an array of shape (rows, columns) with the dtype of another array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _new(context, builder, signature.return_type, tuple(arguments[:2]))

    return types.Array(like.dtype, 2, "C")(types.intp, types.intp, like), generate


@intrinsic  # type: ignore[untyped-decorator]
def vector(typing_context: Any, length: Any, like: Any) -> Any:
    """Return a vector with the dtype of another array, or of a given dtype."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _new(context, builder, signature.return_type, tuple(arguments[:1]))

    return types.Array(like.dtype, 1, "C")(types.intp, like), generate


@intrinsic  # type: ignore[untyped-decorator]
def lesser(typing_context: Any, a: Any, b: Any) -> Any:
    """Return the lesser of two numbers; the first one if they do not compare."""
    return _choice(typing_context, "<", a, b)


@intrinsic  # type: ignore[untyped-decorator]
def greater(typing_context: Any, a: Any, b: Any) -> Any:
    """Return the greater of two numbers; the first one if they do not compare."""
    return _choice(typing_context, ">", a, b)


def _choice(typing_context: Any, sign: str, a: Any, b: Any) -> Any:
    """Return the types and the code of a choice: the second number if it compares so with the first."""
    kind = typing_context.unify_types(types.unliteral(a), types.unliteral(b))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b = arguments
        compare = builder.fcmp_ordered if isinstance(signature.return_type, types.Float) else builder.icmp_signed
        return builder.select(compare(sign, b, a), b, a)

    return kind(kind, kind), generate


@kernel
def zeros(rows: int, columns: int, like: Any) -> Any:
    """Return zeros of shape (rows, columns) with the dtype of another array."""
    out = empty(rows, columns, like)
    for i in range(rows):
        row = out[i]
        for j in range(columns):
            row[j] = 0
    return out


@kernel
def numbers(length: int) -> Any:
    """Return float64 numbers, which are zero."""
    out = vector(length, np.float64)
    for i in range(length):
        out[i] = 0
    return out


@kernel
def integers(length: int, value: int) -> Any:
    """Return int64 numbers, all of which are ``value``."""
    out = vector(length, np.int64)
    for i in range(length):
        out[i] = value
    return out
