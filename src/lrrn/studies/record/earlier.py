"""Read the rows of an earlier report from its ``results.json``, for rows whose work folders no longer exist."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lrrn.runtime.storage import FileFormatError
from lrrn.studies.record import record_report
from lrrn.studies.record.recipes import rows_of
from lrrn.studies.record.rows import Extent, Row
from lrrn.studies.record.scores import disagreements

FILE, ITEM = "results.json", "record"
"""Name of the file with the figures of a report, and the value of its key "item"."""
LEAST, MOST = 1e-9, 1e15
"""Smallest step of a curve, in size or in share, and largest finite figure that charts and sums can handle."""
_REMEDY = "and a new report would replace it; move it away or choose another --output"


def earlier(output: Path, data: str, extent: Extent) -> dict[Row, dict[str, Any]]:
    """Return the figures of an earlier report by row, for all its seeds; rows whose recipe has changed since are left out.

    Parameters
    ----------
    output : Path
        Folder of the report; without a report in it, no rows are returned.
    data : str
    extent : Extent

    Raises
    ------
    FileFormatError
        ``results.json`` is damaged, or it does not belong to a record, or it belongs to another record, which a new report
        would replace. Only the file of a smoke test may be replaced; its rows are not reused.
    """
    path = output / FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or content.get("item") != ITEM:
            raise FileFormatError(f"{path} was not written by lrrn record, {_REMEDY}")
        about = content["data"], Extent(**content["extent"])
        if about == (data, extent):
            return _rows(content["rows"], data, extent)
        if about[1].quick is True:
            return {}
    except FileFormatError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path} is damaged ({type(error).__name__}: {error}), {_REMEDY}") from error
    raise FileFormatError(
        f"{path} is a record on {about[0]} ({_told(about[1])}) and not one on {data} ({_told(extent)}), {_REMEDY}"
    )


def _told(extent: Extent) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(extent).items())


def _rows(found: dict[str, dict[str, Any]], data: str, extent: Extent) -> dict[Row, dict[str, Any]]:
    rows = {}
    for name, told in found.items():
        if told["row"] != name:
            raise ValueError(f"the row {name} is named {told['row']} inside")
        seed = int(name.rpartition("-seed")[2])
        result = {key: value for key, value in told.items() if key != "title"}
        for row in (Row(kind, data, seed, extent) for kind in rows_of(data)):
            if row.name == name:
                _check(row, result)
                rows[row] = result
    return rows


def _check(row: Row, result: dict[str, Any]) -> None:
    """Raise an error, of any type, if the row has invalid figures or no report can be made of it."""
    figures = [value for key, value in result.items() if key not in ("recipe", "seed")]
    if not all(0 <= number <= MOST or number == math.inf for number in _numbers(figures)):
        raise ValueError(f"{row.name} has figures that are below 0 or none")
    if "curve" in result:
        eps, shares = (np.asarray(result["curve"][name], float) for name in ("eps", "certified"))
        sound = eps.shape == shares.shape == (eps.size,) and eps.size > 1 and eps.max() <= MOST and shares.max() <= 1
        if not sound or np.diff(eps).min() < LEAST or shares.min(initial=1.0, where=shares > 0) < LEAST:
            raise ValueError(f"the curve of {row.name} cannot be drawn")
    record_report.sections(row.data, [row], {row: result}, {})
    record_report.brief(row.data, [row], {row: result})
    disagreements(result)
    json.dumps(result, ensure_ascii=False).encode()  # lone surrogates cannot be encoded


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float):
        yield value
