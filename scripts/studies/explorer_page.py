"""Control the explorer in the system's Chromium with Playwright, for its tests and timings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Line = list[tuple[float, float]]
NAMES = ("chromium", "chromium-browser", "google-chrome")
ALONE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
"""Browser option that restricts network access to this machine."""


def find() -> str | None:
    """Return the path of Chromium, from the environment variable CHROMIUM or an installed one; None if there is none."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the installed Chromium headless; Playwright's own browsers are not needed."""
    from playwright.sync_api import sync_playwright

    sandbox = not hasattr(os, "geteuid") or os.geteuid() != 0  # root has no sandbox
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=find(), chromium_sandbox=sandbox, args=[ALONE]) as browser,
    ):
        yield browser


def new_page(browser: Browser, requests: list[str], problems: list[str], seconds: float, **options: Any) -> Page:
    """Return an empty page that records every request, including data: URLs, and all errors and warnings.

    Parameters
    ----------
    browser : Browser
    requests, problems : list of str
        Lists to which URLs, and errors and warnings, are appended.
    seconds : float
        Default timeout of the page.
    **options
        Options of Playwright's ``new_page``.
    """
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}} | options)
    page.set_default_timeout(1000 * seconds)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning", "assert") else None)
    session = page.context.new_cdp_session(page)
    session.on("Network.requestWillBeSent", lambda event: requests.append(event["request"]["url"]))
    session.send("Network.enable")
    return page


def until(page: Page, condition: str, seconds: float = 60.0) -> Any:
    """Poll an expression until it is true; return its value. The page's policy forbids eval, so not ``wait_for_function``."""
    end = time.monotonic() + seconds
    while not (value := page.evaluate(condition)):
        if time.monotonic() > end:
            raise TimeoutError(f"after {seconds:g} s still not: {condition}")
        page.wait_for_timeout(20)
    return value


def draw(page: Page, selector: str, points: Line, pause: float = 0.004, touch: bool = False) -> None:
    """Draw a line through points, given as fractions of an element's width and height, by mouse or touch."""
    element = page.locator(selector)
    element.scroll_into_view_if_needed()
    box = element.bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    if touch:  # Playwright supports only taps
        session = page.context.new_cdp_session(page)
        for kind, (x, y) in zip(["touchStart"] + ["touchMove"] * (len(places) - 1), places, strict=True):
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y}]})
            time.sleep(pause)
        session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        return
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place)
        time.sleep(pause)
    page.mouse.up()


def strokes(digit: int) -> list[Line]:
    """Return the strokes of a digit, as lines of points in the unit square."""
    lines = [[tuple(map(int, point.split(","))) for point in line.split()] for line in DIGITS[digit].split("|")]
    return [_dense([(x / 100, y / 100) for x, y in line]) for line in lines]


def _dense(line: Line, step: float = 0.03) -> Line:
    points = [line[0]]
    for (x0, y0), (x1, y1) in pairwise(line):
        n = max(1, round(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 / step))
        points += [(x0 + (x1 - x0) * k / n, y0 + (y1 - y0) * k / n) for k in range(1, n + 1)]
    return points


DIGITS = {
    0: "50,15 36,20 28,36 27,58 33,77 48,86 63,79 71,62 71,40 64,22 50,15",
    1: "40,30 54,14 54,86",
    2: "30,30 38,18 54,14 66,24 66,40 50,60 30,84 72,84",
    3: "31,20 50,14 66,24 62,40 46,47 64,54 70,70 56,85 32,82",
    4: "52,14 36,40 26,62 50,62 74,60 | 60,42 56,64 54,86",
    5: "68,15 38,15 34,45 54,42 68,56 66,74 50,86 32,80",
    6: "60,14 42,34 32,60 36,78 50,86 64,80 66,64 52,54 36,64",
    7: "28,16 70,16 58,45 46,86 | 36,52 68,48",
    8: "50,48 36,36 38,20 50,14 63,20 63,35 50,48 36,62 36,78 50,86 64,78 64,62 50,48",
    9: "66,30 54,16 38,22 36,40 50,48 65,36 67,28 62,60 50,86",
}
"""Strokes by digit, in hundredths of the width and height."""


@contextmanager
def explorer(*arguments: str, seconds: float = 60.0) -> Iterator[str]:
    """Run ``lrrn explore`` as a subprocess, yield its URL, interrupt it and check that it exits cleanly."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        command = [sys.executable, "-m", "lrrn", "explore", *arguments, "--port", "0", "--no-open", "--json", str(told)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            yield _address(told, server, seconds)
        finally:
            server.send_signal(signal.SIGINT)
            errors = server.communicate(timeout=30)[1]
        if server.returncode != 0 or errors:
            raise RuntimeError(f"lrrn explore ended with status {server.returncode} and wrote: {errors}")


def _address(path: Path, server: subprocess.Popen[str], seconds: float) -> str:
    """Wait for the file with the server's URL, and return the URL."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"lrrn explore ended with status {server.returncode}")
        try:
            return str(json.loads(path.read_text())["address"])
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(0.05)
    raise RuntimeError(f"lrrn explore did not say where it is within {seconds:g} s")
