"""Values of parameters and attributes as JSON, and back."""

from __future__ import annotations

import re
from dataclasses import astuple
from typing import Any

import numpy as np

from lrrn.energy.constraints import Interval
from lrrn.network import Conv

MAX_BYTES = 2**28
"""Largest array, in bytes, that a header may declare."""


def plain(value: Any) -> Any:
    """Convert a value to JSON types. Arrays and tuples are tagged, so that they can be restored."""
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.str if value.dtype != object else "object"}
    if isinstance(value, tuple):
        return {"tuple": [plain(item) for item in value]}
    if isinstance(value, Conv):
        return {"conv": list(astuple(value))}
    if isinstance(value, Interval):
        return {"tuple": [repr(value.lo), repr(value.hi)], "of": "interval"}
    if isinstance(value, dict):
        return {"items": [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def restored(value: Any) -> Any:
    """Undo :func:`plain`."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "conv" in value:
        return Conv(*value["conv"])
    if "array" in value:
        return _array(value["array"], value["dtype"])
    if value.get("of") == "interval":
        return Interval(*(float(end) for end in value["tuple"]))
    if "tuple" in value:
        return tuple(restored(item) for item in value["tuple"])
    return {restored(key): restored(item) for key, item in value["items"]}


def _array(values: Any, dtype: Any) -> np.ndarray:
    """Build an array. The dtype must be one that :func:`plain` writes, and the size is limited."""
    if not isinstance(dtype, str) or re.fullmatch(r"[<>|]?([biuf]\d{1,2}|U\d{1,6})|object", dtype) is None:
        raise ValueError(f"arrays of {dtype!r} are not read")
    if _leaves(values) * np.dtype(dtype).itemsize > MAX_BYTES:  # e.g. millions of empty strings of a megabyte each
        raise ValueError(f"an array of {dtype} is announced that would take more than {MAX_BYTES} bytes")
    return np.array(values, dtype=dtype)


def _leaves(values: Any) -> int:
    return sum(_leaves(item) for item in values) if isinstance(values, list) else 1
