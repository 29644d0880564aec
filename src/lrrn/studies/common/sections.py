"""Parts of a report: sections with text, comparisons, tables and figures; and the results they are computed from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, final

from lrrn.studies.common.runs import Run

MET, MISSED, NOT_RUN, NO_TARGET, OURS = "met", "missed", "not run", "no target", "not in the paper"


@final
@dataclass(frozen=True)
class Comparison:
    """Comparison of one of the paper's figures with ours.

    Attributes
    ----------
    row, quantity : str
    paper : float or None
        None where the paper has no such figure.
    ours : tuple of float
        One for each seed; empty if nothing was run.
    within : float, optional
        Target: largest difference, as a share of the paper's figure.
    below : float, optional
        Target: largest amount by which ours may be lower.
    form : str
        Format string for figures.
    note : str
        Why nothing was run, or the known reason for a missed target; shown only in these cases.
    is_share : bool
        Whether ``below`` and the difference are shares, shown in percentage points.
    """

    row: str
    quantity: str
    paper: float | None
    ours: tuple[float, ...]
    within: float | None = None
    below: float | None = None
    form: str = "{:.3f}"
    note: str = ""
    is_share: bool = True

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's; as a share of the latter unless ``below`` is the target."""
        if self.paper is None or not self.ours:
            return None
        gap = fmean(self.ours) - self.paper
        return gap if self.below is not None else gap / self.paper

    @property
    def verdict(self) -> str:
        """Whether the target is met."""
        if not self.ours:
            return NOT_RUN
        difference = self.difference
        if difference is None:
            return OURS
        if self.within is not None:
            return MET if abs(difference) <= self.within + 1e-12 else MISSED
        if self.below is not None:
            return MET if difference >= -self.below - 1e-12 else MISSED
        return NO_TARGET

    def cells(self) -> list[str]:
        """Return the row of a table, in the order of ``COLUMNS``."""
        paper = "-" if self.paper is None else self.form.format(self.paper)
        ours = self.form.format(fmean(self.ours)) if self.ours else "-"
        spread = f"{self.form.format(min(self.ours))} to {self.form.format(max(self.ours))}" if len(self.ours) > 1 else "-"
        gap, difference = self.difference, "-"
        if gap is not None:
            difference = f"{100 * gap:+.2f} points" if self.below is not None else f"{100 * gap:+.1f} %"
            difference = difference if self.is_share or self.below is None else f"{gap:+.3f}"
        return [self.row, self.quantity, paper, ours, spread, difference, self.verdict]


COLUMNS = ["row", "quantity", "paper", "ours", "over seeds", "difference", "verdict"]


@final
@dataclass(frozen=True)
class Figure:
    """A figure: its file, and the lines (SVG) or images (PNG) to draw in it."""

    file: str
    caption: str
    content: bytes


@final
@dataclass
class Section:
    """A part of the report."""

    title: str
    text: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=lambda: list(COLUMNS))
    comparisons: list[Comparison] = field(default_factory=list)
    tables: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def remarks(self) -> list[str]:
        """Return why rows have no figure or miss their target: one sentence per reason, with the rows concerned."""
        told: dict[tuple[str, str], dict[str, None]] = {}
        for comparison in self.comparisons:
            if comparison.note and comparison.verdict in (MISSED, NOT_RUN):
                told.setdefault((comparison.verdict, comparison.note), {})[comparison.row] = None
        return [f"{verdict.capitalize()}, {note}: {'; '.join(rows)}." for (verdict, note), rows in told.items()]


@final
@dataclass(frozen=True)
class Results:
    """Results of runs, and the reasons why other runs have none.

    Attributes
    ----------
    by_run : dict of Run to dict
    reasons : dict of Run to str
    filters : callable
        Maps a run and the name of one of its array files to the array, or None.
    """

    by_run: dict[Run, dict[str, Any]]
    reasons: dict[Run, str]
    filters: Callable[[Run, str], Any]

    def each(self, runs: Sequence[Run], *path: str) -> tuple[float, ...]:
        """Return one figure for each of several runs, leaving out runs without a result."""
        found = []
        for run in runs:
            if run in self.by_run:
                value: Any = self.by_run[run]["figures"]
                for key in path:
                    value = value.get(key) if isinstance(value, dict) else None
                if value is not None:
                    found.append(float(value))
        return tuple(found)

    def why_not(self, runs: Sequence[Run]) -> str:
        """Return why a run has no result."""
        return next((self.reasons[run] for run in runs if run in self.reasons), "")
