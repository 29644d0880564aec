"""Reads Markdown pages: their code blocks, what they promise to print, and whether that is what was printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

FENCE = re.compile(r"^(?P<note><!-- (?P<why>[^\n]*?) -->\n)?```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?%?")
DURATION = re.compile(r"\d[\d.,]* (?:s|ms|us|minutes)\b")
PROMISE = re.compile(r"^print\(.*\)\s+# (.*?)(?::.*)?$", re.MULTILINE)
ran = {"Python blocks": 0, "shell commands": 0, "shell lines that were checked without running them": 0}
"""How much of the documentation was put to the test; conftest.py prints it at the end."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, where the text is, and the comment on the line before it."""

    kind: str
    text: str
    start: int
    end: int
    note: str


@dataclass(frozen=True)
class Example:
    """A block to run, and the block right after it that shows the output, if there is one."""

    block: Block
    output: Block | None


def pages() -> list[Path]:
    """All Markdown pages that people write; generated reports and what the build makes are left out."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if not {"_build", "pictures", "record", "reproduction"} & set(page.relative_to(ROOT).parts):
            found.append(page)
    return found


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str) -> list[Block]:
    return [
        Block(match["kind"], match["body"], match.start("body"), match.end("body"), match["why"] or "")
        for match in FENCE.finditer(text)
    ]


def examples(text: str, kind: str) -> list[Example]:
    """Blocks of a language, each with the ``text`` block that follows it without anything between."""
    found = blocks(text)
    out = []
    for block, after in zip(found, [*found[1:], None], strict=False):
        if block.kind == kind:
            shown = after is not None and after.kind == "text" and text[block.end : after.start].strip("`\n") == "text"
            out.append(Example(block, after if shown else None))
    return out


def commands(block: str) -> list[tuple[str, str]]:
    """Split a console block into commands, which begin with a dollar sign, and what each prints."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
    assert parts[0] == "", f"a console block begins with a command after '$ '; this one with {parts[0]!r}"
    return [tuple(part.split("\n", 1)) for part in parts[1:]]  # type: ignore[misc]


def difference(promised: str, printed: str, figures: bool = True) -> str | None:
    """Say how an output differs from the one promised; None if it does not.

    Words must agree. Percentages may differ by 2.5 points, other figures by three in their last digit or by a tenth, since
    other processors round differently and training makes much of it; times may differ at will. Without ``figures`` so may
    all the others.
    """
    expected, got = (_lines(text, figures) for text in (promised, printed))
    if len(expected) != len(got):
        return f"{len(expected)} lines are promised and {len(got)} are printed:\n{printed}"
    for number, (a, b) in enumerate(zip(expected, got, strict=True)):
        if NUMBER.split(a) != NUMBER.split(b) or (figures and not _near(NUMBER.findall(a), NUMBER.findall(b))):
            return f"line {number + 1}: promised {a!r}, printed {b!r}"
    return None


def sections(text: str) -> list[str]:
    """Return the first words of the lines that are not indented: what is left of an output that depends on the machine."""
    return [line.split()[0] for line in text.splitlines() if line[:1].strip()]


def _lines(text: str, figures: bool) -> list[str]:
    # tables are as wide as their widest figure, so rules and spaces are no part of the promise
    text = re.sub(r"[━─┏┓┗┛┡┩└┘┳╇┴╈┯┷┠┨]+", "", DURATION.sub("some time", text))
    if not figures:
        text = NUMBER.sub("0", text)
    return [line for line in (re.sub(r"\s+", " ", line).strip() for line in text.splitlines()) if line]


def _near(promised: list[str], printed: list[str]) -> bool:
    for a, b in zip(promised, printed, strict=True):
        (x, unit), (y, _) = _read(a), _read(b)
        if abs(x - y) > (2.5 if a.endswith("%") else max(3 * unit, 0.1 * abs(x))) * (1 + 1e-9):
            return False
    return True


def _read(figure: str) -> tuple[float, float]:
    """Return a figure and the unit of its last digit; small whole numbers are names or counts, and have none."""
    digits, _, exponent = figure.rstrip("%").replace(",", "").partition("e")
    decimals = len(digits.partition(".")[2])
    value = float(digits) * 10.0 ** int(exponent or 0)
    rounded = decimals or exponent or figure.endswith("%") or abs(value) >= 20
    return value, 10.0 ** (int(exponent or 0) - decimals) if rounded else 0.0


def recorded(text: str, outputs: list[tuple[Block, str]]) -> str:
    """Return a page with outputs put in place of those it has."""
    for block, output in sorted(outputs, key=lambda pair: -pair[0].start):
        text = text[: block.start] + output + text[block.end :]
    return text
