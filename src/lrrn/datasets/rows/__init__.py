"""Tables of samples read in chunks of rows, from arrays in memory or from files larger than memory."""

from __future__ import annotations

from lrrn.datasets.rows.base import ArrayRows, DataError, Rows, mapped, release, unreadable
from lrrn.datasets.rows.files import open_npy, open_npz
from lrrn.datasets.rows.parquet import open_parquet

__all__ = ["ArrayRows", "DataError", "Rows", "mapped", "open_npy", "open_npz", "open_parquet", "release", "unreadable"]
