"""Every code block of the documentation runs and prints what the page says; the pages that were built need nothing else.

`make docs` builds the pages and runs this file; `make test` leaves it out. LRRN_RECORD=1 writes what was printed into the
pages instead of comparing, for a look at the difference before it is committed.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from contextlib import redirect_stdout
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from explorer_page import chromium, find

from doc_pages import PROMISE, ROOT, commands, difference, examples, name, pages, ran, recorded, sections

RECORD = bool(os.environ.get("LRRN_RECORD"))
BUILT = ROOT / "docs" / "_build" / "html"
DATA = Path(os.environ.get("LRRN_DATA", "nowhere")).resolve()


def with_blocks(kind: str) -> list[Path]:
    return [page for page in pages() if page.name != "README.md" and examples(page.read_text(), kind)]


@pytest.mark.parametrize("page", with_blocks("python"), ids=name)
def test_python_blocks_run_and_print_what_they_say(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text, outputs = page.read_text(), []
    namespace: dict[str, object] = {}
    for example in examples(text, "python"):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(example.block.text, name(page), "exec"), namespace)
        ran["Python blocks"] += 1
        if example.output is None:
            assert [line.strip() for line in printed.getvalue().splitlines()] == PROMISE.findall(example.block.text)
        elif RECORD:
            outputs.append((example.output, printed.getvalue()))
        else:
            assert (wrong := difference(example.output.text, printed.getvalue())) is None, wrong
    if outputs:
        page.write_text(recorded(text, outputs))


@pytest.mark.parametrize("page", with_blocks("console"), ids=name)
def test_commands_print_what_the_page_shows(page, tmp_path):
    text, outputs = page.read_text(), []
    environment = {**os.environ, "HOME": str(tmp_path), "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("LRRN_DATA", None)
    for example in examples(text, "console"):
        note = example.block.note
        data = {"LRRN_DATA": str(DATA)} if "needs data" in note else {}
        if data and not (DATA / "MNIST").is_dir():
            continue
        shown = ""
        for command, promised in commands(example.block.text):
            done = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, env=environment | data, capture_output=True, text=True, timeout=600
            )
            ran["shell commands"] += 1
            assert (done.returncode != 0) == ("fails" in note), f"{command}: {done.stdout}{done.stderr}"
            # progress and warnings go to standard error, and are the message only if there is no other
            printed = done.stderr if done.returncode else done.stdout
            # a recorded page names no folder of this machine
            shown += f"$ {command}\n{printed.replace(str(ROOT / 'models'), 'site-packages/lrrn/shipped_models')}"
            if "depends on the machine" in note:
                assert RECORD or sections(promised) == sections(printed), f"{command}: {printed}"
            elif not RECORD:
                wrong = difference(promised, printed, figures="figures vary" not in note)
                assert wrong is None, f"{command}: {wrong}"
        outputs.append((example.block, "\n".join(line.rstrip() for line in shown.splitlines()) + "\n"))
    assert str(ROOT) not in "".join(shown for _, shown in outputs)
    if RECORD and outputs:
        page.write_text(recorded(text, outputs))


def shell_lines() -> list[tuple[str, str]]:
    """Commands that pages show without output: lines that go on are joined, comments and assignments are left out."""
    lines = []
    for page in pages():
        for example in examples(page.read_text(), "sh"):
            for line in example.block.text.replace("\\\n", " ").splitlines():
                command = re.sub(r"^(\w+=\S* +)+", "", line.partition("#")[0].strip())
                lines += [(name(page), part.strip()) for part in re.split(r"&&|;", command) if part.strip()]
    return lines


@pytest.mark.parametrize("page, line", shell_lines())
def test_shell_lines_that_are_not_run_name_things_that_exist(page, line):
    ran["shell lines that were checked without running them"] += 1
    words = re.split(r"[|<>]", line)[0].split()
    ours = next((number for number, word in enumerate(words) if Path(word).name == "lrrn"), None)
    if ours is not None:  # on its own, or after torchrun, srun, python -m
        check_arguments(words[ours + 1 :])
    elif words[0] == "make":
        known = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{re.escape(target)}:", known, re.MULTILINE) for target in words[1:] if "=" not in target), line
    elif Path(words[0]).name.startswith("python") and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), line
    else:
        known_programs = {"cd", "docker", "export", "git", "kill", "pip", "python", "sbatch", "srun", "torchrun", "ulimit"}
        assert Path(words[0]).name in known_programs, f"{page}: {line!r}; write it as a console block with its output"


def check_arguments(arguments: list[str]) -> None:
    """See that the command line takes these arguments, without doing what they ask for."""
    from lrrn.cli import app

    if "--help" not in arguments:
        sub = typer.main.get_command(app).commands[arguments[0]]  # type: ignore[attr-defined]
        sub.make_context(arguments[0], arguments[1:])


def test_every_command_is_shown_with_its_output():
    from lrrn.cli import app

    text = (ROOT / "docs" / "command-line.md").read_text()
    lines = [command.split() for example in examples(text, "console") for command, _ in commands(example.block.text)]
    shown = {words[1] for words in lines if words[0] == "lrrn"}
    # what depends on the machine, or never ends, is shown and not compared
    shown |= set(re.findall(r"^\$ lrrn (explore|info)\b", (ROOT / "docs" / "command-line.md").read_text(), re.MULTILINE))
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert shown == known, "every command has a console block in docs/command-line.md, recorded with LRRN_RECORD=1"


def test_every_public_name_is_in_the_interface():
    import lrrn
    import lrrn.learning

    page = (ROOT / "docs" / "api.rst").read_text()
    for module in (lrrn, lrrn.attacks, lrrn.certificates, lrrn.estimators, lrrn.learning):
        for public in module.__all__:
            assert public.startswith("__") or re.search(rf"^   (estimators\.)?{public}$", page, re.MULTILINE), public


# --- the pages as built -----------------------------------------------------------------------------------------------


class Resources(HTMLParser):
    """Collects what a browser would fetch to show a page, and where its links go."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag, attrs):
        values = {key: value or "" for key, value in attrs}
        self.fetched += [values[key] for key in ("src", "srcset", "poster", "data") if key in values and tag != "a"]
        if tag == "link" and values.get("rel") not in ("search", "index", "next", "prev", "canonical", "author", "copyright"):
            self.fetched.append(values["href"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if "id" in values:
            self.anchors.add(values["id"])


def parsed(page: Path) -> Resources:
    found = Resources()
    found.feed(page.read_text(encoding="utf-8"))
    return found


built = pytest.mark.skipif(not (BUILT / "index.html").is_file(), reason="the pages are not built; make docs does it")


@built
def test_built_pages_fetch_nothing_from_outside():
    html = sorted(page for page in BUILT.rglob("*.html") if "_static" not in page.parts)  # the theme's own templates
    assert len(html) > 50
    for page in html:
        for address in parsed(page).fetched:
            assert not re.match(r"(https?:)?//", address), f"{page.relative_to(BUILT)} fetches {address}"
            if not address.startswith(("data:", "#")):
                target = (page.parent / address.partition("?")[0].partition("#")[0]).resolve()
                assert target.exists(), f"{page.relative_to(BUILT)} fetches {address}, which is not there"
    for style in BUILT.rglob("*.css"):
        outside = re.findall(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^)'\"]+)", style.read_text())
        assert not outside, f"{style.relative_to(BUILT)} fetches {outside}"


@built
def test_links_between_built_pages_lead_somewhere():
    known = {page.resolve(): parsed(page) for page in BUILT.rglob("*.html")}
    for page, content in known.items():
        for link in content.links:
            path, _, anchor = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.relative_to(BUILT)} links to {link}"
            if anchor and target in known:
                assert anchor in known[target].anchors, f"{page.relative_to(BUILT)} links to {link}, which has no such place"


@built
def test_the_gallery_is_there_as_notebooks():
    scripts = sorted((ROOT / "docs" / "gallery").glob("plot_*.py"))
    assert len(scripts) >= 6
    for script in scripts:
        page = BUILT / "pictures" / f"{script.stem}.html"
        (link,) = (link for link in parsed(page).links if link.endswith(f"{script.stem}.ipynb"))
        cells = json.loads((page.parent / link).read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        assert code and all(compile(text, link, "exec") for text in code)
    index = BUILT / "pictures" / "index.html"
    (link,) = (link for link in parsed(index).links if link.endswith("_jupyter.zip"))
    with zipfile.ZipFile((index.parent / link).resolve()) as together:
        assert {Path(name).stem for name in together.namelist()} == {script.stem for script in scripts}


@built
def test_no_table_begins_with_an_empty_row():
    for page in BUILT.rglob("*.html"):
        for head in re.findall(r"<thead>(.*?)</thead>", page.read_text(encoding="utf-8"), re.DOTALL):
            assert re.sub(r"<[^>]*>", "", head).strip(), f"{page.relative_to(BUILT)} has a table with an empty header"


@built
@pytest.mark.skipif(find() is None, reason="no Chromium here: apt-get install chromium, or set CHROMIUM to one")
def test_a_window_of_1280_pixels_shows_all_of_the_code_and_large_thumbnails():
    pytest.importorskip("playwright", reason="driving a browser needs playwright, of the extra test")
    clipped = "Array.from(document.querySelectorAll('article pre')).filter((e) => e.scrollWidth > e.clientWidth + 1).length"
    with chromium() as browser, browser.new_page(viewport={"width": 1280, "height": 900}) as page:
        for file in sorted(BUILT.rglob("*.html")):
            if not {"_modules", "_static"} & set(file.parts):
                page.goto(file.as_uri())
                assert page.evaluate(clipped) == 0, f"{file.relative_to(BUILT)} has code that is wider than the page"
        page.goto((BUILT / "pictures" / "index.html").as_uri())
        widths = page.evaluate("Array.from(document.querySelectorAll('.sphx-glr-thumbcontainer img'), (e) => e.clientWidth)")
        assert len(widths) >= 6 and min(widths) >= 300


@built
def test_formulae_are_mathml():
    page = (BUILT / "theory" / "lipschitz.html").read_text(encoding="utf-8")
    assert page.count("<math") > 100 and not re.search("<script[^>]*mathjax", page, re.IGNORECASE) and r"\lvert" not in page
