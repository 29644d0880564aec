"""Output of a suite: tables, charts and remarks, for the terminal and for a page."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from lrrn.reports.page import Page


@final
@dataclass(frozen=True)
class Table:
    """A table: title, column headings and rows of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@final
@dataclass(frozen=True)
class Chart:
    """A line chart for the page; not shown in the terminal."""

    caption: str
    x: str
    y: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_y: bool = False


Part = Table | Chart | str


def number(value: float) -> str:
    """Format with three significant digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """Format a time in a suitable unit."""
    if value is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{number(value / 1e-6)} us"


def contest_table(title: str, records: Sequence[dict[str, Any]]) -> Table:
    """Rank contenders on one problem by the ratio of their time to our best; those without a time are listed with a reason."""
    ours = [record["seconds"] for record in records if record["ours"] and record["seconds"] is not None]
    rows = []
    for record in records:
        time, threads = record["seconds"], record["threads"]
        rows.append(
            (
                record["contender"],
                seconds(time),
                seconds(record["spread"]),
                "-" if record["error"] is None else f"{record['error']:.0e}",
                number(time / min(ours)) if ours and time is not None else "-",
                "-" if threads is None else str(threads or "own"),
                record["note"],
            )
        )
    return Table(title, ("contender", "median", "+-", "error", "times our best", "threads", "note"), rows)


def as_page(title: str, sections: Mapping[str, tuple[str, Sequence[Part]]]) -> str:
    """Return a page with one section per suite: description of machine and policy, then its parts."""
    page = Page(title)
    for name, (introduction, parts) in sections.items():
        page.heading(name)
        page.text(introduction)
        for part in parts:
            if isinstance(part, Table):
                page.text(part.title)
                page.table(part.columns, part.rows)
            elif isinstance(part, Chart):
                page.lines(part.caption, part.x, part.y, part.series, log_y=part.log_y)
            else:
                page.text(part)
    return page.html()


def as_markdown(title: str, sections: Mapping[str, tuple[str, Sequence[Part]]]) -> str:
    """Return the same as Markdown, charts left out."""
    lines = [f"# {title}"]
    for name, (introduction, parts) in sections.items():
        lines += ["", f"## {name}", "", *_wrapped(introduction)]
        for part in parts:
            if isinstance(part, Table):
                sides = ["---" if _is_text(index, column) else "---:" for index, column in enumerate(part.columns)]
                rows = [part.columns, sides, *part.rows]
                lines += ["", f"**{part.title}**", "", *("| " + " | ".join(row) + " |" for row in rows)]
            elif isinstance(part, str):
                lines += ["", *_wrapped(part)]
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 128, break_long_words=False, break_on_hyphens=False)


def _is_text(index: int, column: str) -> bool:
    return index == 0 or column in ("contender", "method", "network", "optimiser", "note")


def print_parts(console: Any, parts: Sequence[Part]) -> None:
    """Print tables and remarks to a rich console."""
    from rich.table import Table as Grid

    for part in parts:
        if isinstance(part, Table):
            grid = Grid(title=part.title)
            for index, column in enumerate(part.columns):
                grid.add_column(column, justify="left" if _is_text(index, column) else "right")
            for row in part.rows:
                grid.add_row(*row)
            console.print(grid)
        elif isinstance(part, str):
            console.print(part, highlight=False)
