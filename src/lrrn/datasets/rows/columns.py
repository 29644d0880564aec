"""Which columns of a table are features, which one is the target, and which are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from lrrn.datasets.rows.base import DataError

MOST_NAMES = 8
"""Largest number of column names in an error message."""


@final
@dataclass(frozen=True)
class Choice:
    """The columns to read from a table.

    Attributes
    ----------
    target : str or None
        Name or number of the target's column; "none" if there is none; None to find it by :meth:`columns`.
    features : sequence of str, or int, or None
        Names of the features, in the order to read them in, or their number, if a model expects them.
    drop : sequence of str
        Names or numbers of columns to leave out.
    """

    target: str | None = None
    features: Sequence[str] | int | None = None
    drop: Sequence[str] = ()

    @property
    def names(self) -> list[str] | None:
        """The names of the features that a model expects; None if it expects none."""
        return None if self.features is None or isinstance(self.features, int) else [*self.features]

    @property
    def n_features(self) -> int | None:
        """The number of features that a model expects; None if it expects none."""
        return self.features if self.features is None or isinstance(self.features, int) else len(self.features)

    def columns(self, path: object, header: Sequence[str] | None, first: Sequence[str]) -> tuple[list[int], int | None]:
        """Return the numbers of the columns with the features, in order, and of the one with the target.

        If no target is named, it is the one column that the model does not know, wherever it is; for a model without names,
        the last column unless there are just as many columns as features; without a model, the last column.

        Parameters
        ----------
        path : object
            Name of the table in error messages.
        header : sequence of str, or None
            Names of the columns, if the table has names.
        first : sequence of str
            The first line, in error messages.
        """
        dropped = {self.position(path, header, first, column) for column in self.drop}
        left = [j for j in range(len(first)) if j not in dropped]
        target = None
        if self.target is not None and self.target != "none":
            target = self.position(path, header, first, self.target)
            if target in dropped:
                raise DataError(f"{path}: {self.target!r} cannot be both the target and dropped")
        if header is not None and self.names is not None:
            return self._by_name(path, header, left, target)
        if self.target is None and left:
            target = None if len(left) == self.n_features else left[-1]
        return [j for j in left if j != target], target

    def _by_name(
        self, path: object, header: Sequence[str], left: list[int], target: int | None
    ) -> tuple[list[int], int | None]:
        names = self.names or []
        at = {header[j]: j for j in left}
        missing = [name for name in names if name not in at]
        extra = [header[j] for j in left if header[j] not in {*names} and j != target]
        if missing:
            also = f", and has {_listed(extra)}, which it does not know" if extra else ""
            raise DataError(
                f"{path} lacks {_listed(missing)}, which the model was trained on{also}; rename or add what is missing"
            )
        if target is not None and header[target] in names:
            raise DataError(f"{path}: {header[target]!r} cannot be the target, since the model was trained on it as a feature")
        if len(extra) > (target is None):
            advice = (
                "name the target (--target) and leave the others out (--drop)" if target is None else "leave them out (--drop)"
            )
            raise DataError(f"{path} has {_listed(extra)}, which the model was not trained on; {advice}")
        if self.target is None and extra:
            target = at[extra[0]]
        return [at[name] for name in names], target

    @staticmethod
    def position(path: object, header: Sequence[str] | None, first: Sequence[str], column: str) -> int:
        """Return the number of a column that is given by its name or its number, counted from 0."""
        if header is not None and column in header:
            return list(header).index(column)
        if column.isdecimal() and len(column) < 10 and int(column) < len(first):
            return int(column)
        found = f"its first line is {', '.join(first)}" if header is None else f"it has {', '.join(header)}"
        raise DataError(f"{path} has no column {column!r}; {found}")


def check_distinct_names(path: object, header: Sequence[str]) -> None:
    """Raise an error if two columns have one name."""
    name, times = max(Counter(header).items(), key=lambda item: item[1], default=("", 1))
    if times > 1:
        raise DataError(f"{path} has two columns of one name, {name!r}; give each its own")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"the column{'s' * (len(names) > 1)} {', '.join(map(repr, names[:MOST_NAMES]))}{more}"
