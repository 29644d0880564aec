"""Every Python block of the README and the docs runs, and prints what its comments say."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if "```python" in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run_and_print_what_they_say(page):
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(block, page.name, "exec"), namespace)
        promised = re.findall(r"^print\(.*\)\s+# (.*?)(?::.*)?$", block, flags=re.MULTILINE)
        assert [line.strip() for line in printed.getvalue().splitlines()][: len(promised)] == promised
