"""Write the report: the same sections as Markdown, for the repository, and as a self-contained HTML page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrrn.reports.page import Page
from lrrn.runtime.storage import write_bytes
from lrrn.studies.common.sections import MET, MISSED, NOT_RUN, Section

TITLE = "The paper, reproduced"


def summary(sections: Sequence[Section]) -> str:
    """Count the verdicts."""
    counts = Counter(comparison.verdict for section in sections for comparison in section.comparisons)
    return f"Targets: {counts[MET]} met, {counts[MISSED]} missed, {counts[NOT_RUN]} not run."


def write(folder: Path, sections: Sequence[Section], preface: Sequence[str], title: str = TITLE) -> None:
    """Write ``report.md``, ``report.html`` and the figures into a folder."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for section in sections:
        for figure in section.figures:
            write_bytes(folder / "figures" / figure.file, figure.content)
    write_bytes(folder / "report.md", _markdown(sections, preface, title).encode())
    write_bytes(folder / "report.html", _page(sections, preface, title).encode())


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Write figures as JSON, one line per run, row or comparison."""
    write_bytes(path, (_json(content, 2) + "\n").encode())


def _json(content: Any, levels: int) -> str:
    """Encode content as JSON, with one line per entry of the first ``levels`` levels."""
    if not levels or not content or not isinstance(content, dict | list):
        return json.dumps(content)
    if isinstance(content, list):
        return "[\n" + ",\n".join(_json(entry, levels - 1) for entry in content) + "\n]"
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_json(entry, levels - 1)}" for key, entry in content.items()) + "\n}"


def _markdown(sections: Sequence[Section], preface: Sequence[str], title: str) -> str:
    lines = [f"# {title}", ""]
    for text in [*preface, summary(sections)]:
        lines += [text, ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for text in section.text:
            lines += [text, ""]
        if section.comparisons:
            lines += [*_table(section.columns, [comparison.cells() for comparison in section.comparisons]), ""]
        for remark in section.remarks():
            lines += [remark, ""]
        for caption, columns, rows in section.tables:
            if rows:
                lines += [caption, "", *_table(columns, rows), ""]
        for figure in section.figures:
            lines += [f"![{figure.caption}](figures/{figure.file})", "", f"*{figure.caption}*", ""]
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = "|" + "|".join("---" for _ in columns) + "|"
    return [_line(columns), ruler, *(_line(row) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _page(sections: Sequence[Section], preface: Sequence[str], title: str) -> str:
    page = Page(title)
    for text in [*preface, summary(sections)]:
        page.text(text)
    for section in sections:
        page.heading(section.title)
        for text in section.text:
            page.text(text)
        if section.comparisons:
            page.table(section.columns, [comparison.cells() for comparison in section.comparisons])
        for remark in section.remarks():
            page.text(remark)
        for caption, columns, rows in section.tables:
            if rows:
                page.text(caption)
                page.table(columns, rows)
        for figure in section.figures:
            page.picture(figure.caption, figure.content)
    return page.html()
