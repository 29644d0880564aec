"""Rows of a record that are small enough for tests."""

from __future__ import annotations

from lrrn.studies.record.rows import Extent
from lrrn.studies.record.stages import Effort

TINY = Extent(samples=60, tests=20, quick=True)
LITTLE = Effort(images=4, autoattack=0, bound_seconds=0.2)
