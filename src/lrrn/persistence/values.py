"""Values of parameters and attributes as JSON, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any, final

import numpy as np

from lrrn.energy.constraints import Interval
from lrrn.network import Conv

MAX_BYTES = 2**28
"""Largest array, in bytes, that a header may declare."""
MISFIT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""Errors of making a model of contents that do not fit one."""
HELD = "numbers, text or None, or lists, tuples, dictionaries or arrays of these"
"""What a header holds."""
LONGEST = 100
"""Number of characters of a value in a message."""


@final
class Unfit(ValueError):
    """What a file must not hold: :func:`lrrn.load` refuses such a file, and :func:`lrrn.save` does not write it.

    Attributes
    ----------
    remedy : str
        What to do about it before the model is saved.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


def brief(value: Any) -> str:
    """Return a value as a message shows it: in one line, and without the middle if that is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


def json_values(values: Mapping[str, Any], remedy: Callable[[str], str], owner: str = "") -> dict[str, Any]:
    """Convert named values to JSON types; raise Unfit if one could not be restored from them.

    ``remedy`` says, by name, what to do about it; ``owner`` stands in front of the name.
    """
    for name, value in values.items():
        try:
            restored(json.loads(json.dumps(plain(value))))
        except MISFIT as error:
            reason = f"{owner}{name} is {brief(value)}, of type {type(value).__name__}, not {HELD}"
            raise Unfit(reason, remedy(name)) from error
    converted: dict[str, Any] = plain(dict(values))
    return converted


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
