"""The README: its code runs and prints what it shows, its tables are those that were measured, its links lead somewhere."""

from __future__ import annotations

import io
import os
import re
import runpy
from contextlib import redirect_stdout

import pytest

from doc_pages import ROOT, blocks, difference, examples, recorded, sections

README = ROOT / "README.md"
TEXT = README.read_text()


def test_the_examples_print_what_the_readme_shows():
    outputs = []
    for example in examples(TEXT, "python"):
        assert example.output is not None
        lines = [line for line in example.block.text.splitlines() if line.strip()]
        assert len(lines) <= 10
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(example.block.text, "README.md", "exec"), {})
        outputs.append((example.output, printed.getvalue()))
    if os.environ.get("LRRN_RECORD"):
        README.write_text(recorded(TEXT, outputs))
        return
    for output, text in outputs:
        assert (wrong := difference(output.text, text)) is None, wrong


def test_a_table_comes_first():
    table, images = examples(TEXT, "python")
    assert "load_breast_cancer" in table.block.text and "load_digits" in images.block.text


def test_the_example_may_print_what_other_machines_have_printed():
    """The ranges that the text gives are around the figures shown, and within what the test above allows."""
    example = examples(TEXT, "python")[-1]
    shown = example.output.text
    ranges = re.findall(r"from\s(\d+\.\d+) to (\d+\.\d+)", TEXT[example.output.end : TEXT.index("What is proven holds")])
    figures = re.findall(r"\d+\.\d+(?=% |\n)", shown)
    figures = [figure for figure in figures if figure != "0.1"]  # the size of the perturbation
    assert ranges
    for end in (0, 1):
        printed = shown
        for figure, limits in zip(figures, ranges, strict=False):
            assert float(limits[0]) <= float(figure) <= float(limits[1])
            printed = printed.replace(figure, limits[end])
        assert (wrong := difference(shown, printed)) is None, wrong


def test_the_two_commands_are_there():
    (shell,) = (block for block in blocks(TEXT) if block.kind == "sh")
    targets = re.findall(r"^make (\w+)", shell.text, re.MULTILINE)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_tables_are_those_of_the_measurements():
    script = runpy.run_path(str(ROOT / "scripts" / "studies" / "readme_tables.py"))
    for page in script["PAGES"]:
        text = page.read_text()
        assert script["updated"](page, text) == text, "run python scripts/studies/readme_tables.py and look at what changed"


def test_a_stale_table_is_noticed_and_a_missing_place_refused():
    script = runpy.run_path(str(ROOT / "scripts" / "studies" / "readme_tables.py"))
    stale = re.sub(r"(cvxpylayers \| )(\d)", r"\1\g<2>9", TEXT)
    assert stale != TEXT and script["updated"](script["README"], stale) == TEXT
    with pytest.raises(ValueError, match="no place for the table 'fast'"):
        script["updated"](script["README"], TEXT.replace("<!-- table: fast -->", ""))


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", TEXT):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


def test_outputs_are_compared_with_some_tolerance_but_not_too_much():
    assert difference("a 0.52 b", "a 0.51 b") is None
    assert difference("a 0.52 b", "a 0.59 b") is not None
    assert difference("accuracy 98.1%", "accuracy 97.2%") is None
    assert difference("accuracy 98.1%", "accuracy 95.2%") is not None
    assert difference("30 digits", "30 letters") is not None
    assert difference("it is a 7", "it is a 3") is not None
    assert difference("one\ntwo", "one") is not None
    assert difference("took 3.1 s", "took 99 s") is None
    assert difference("| 12 |", "| 700 |") is not None
    assert difference("| 12 |", "| 700 |", figures=False) is None
    assert sections("versions  torch 2\n          numpy 1\ndevices cpu") == ["versions", "devices"]
