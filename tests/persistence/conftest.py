"""Where the tests of files put theirs."""

from __future__ import annotations

import pytest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.lrrn"
