"""Measure the latency of the explorer from a stroke to its response, in headless Chromium; take screenshots for the docs.

Digits are drawn with the mouse at sixty moves per second. Latency is the time from the oldest pointer event that a response
covers to the frame that shows the response, by the browser's clock. It is measured while the server still computes its
constants in the background, as in the first half minute after its start, and after that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explorer_page import chromium, draw, explorer, find, new_page, strokes, until

from lrrn.studies.bench.clock import machine

if TYPE_CHECKING:
    from playwright.sync_api import Page

DIGITS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
WAIT = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help="a saved model, and further arguments of lrrn explore; digits if not given")
    parser.add_argument("--rounds", type=int, default=3, help="how often to write the ten digits in each phase")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--picture", type=Path, help="write a picture of the page, light, to this .webp or .png file")
    options = parser.parse_args()
    if find() is None:
        raise SystemExit("no Chromium here: apt-get install chromium, or set CHROMIUM to one")
    requests: list[str] = []
    start = time.monotonic()
    with explorer(*options.model, seconds=WAIT) as url, chromium() as browser:
        page = new_page(browser, requests, [], WAIT)
        page.goto(url)
        until(page, "!document.getElementById('main').hidden", WAIT)
        ready = time.monotonic() - start
        figures = {
            "machine": machine(),
            "load": os.getloadavg()[0],
            "chromium": browser.version,
            "model": page.inner_text("#model-line"),
            "seconds_to_ready": round(ready, 2),
            "while_refining": measured(page, 1),
        }
        until(page, "fetch('api/state').then((r) => r.json()).then((state) => state.refined)", WAIT)
        figures["refined"] = measured(page, options.rounds)
        figures["load_after"] = os.getloadavg()[0]
        figures["hosts_asked"] = sorted({url.split("/")[2] for url in requests})
        figures["requests"] = len(requests)
        if options.picture is not None:
            picture(page, options.picture)
    print(json.dumps(figures, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measured(page: Page, rounds: int) -> dict[str, Any]:
    """Draw digits and return the latency of responses, in milliseconds, and how often the predicted label was correct."""
    page.evaluate(
        "performance.clearMeasures(); performance.clearResourceTimings(); performance.setResourceTimingBufferSize(9999)"
    )
    right = 0
    for digit in DIGITS * rounds:
        page.click("#clear")
        for line in strokes(digit):
            draw(page, "#pad", line, pause=1 / 60)
        time.sleep(0.6)
        right += page.inner_text("#prediction") == str(digit)
    times = page.evaluate("performance.getEntriesByName('stroke to answer').map((entry) => entry.duration)")
    asked = "performance.getEntriesByType('resource').filter((entry) => entry.name.endsWith('/analyse'))"
    waited = page.evaluate(f"{asked}.map((entry) => entry.duration)")
    return {
        "answers": len(times),
        "stroke_to_answer_ms": spread(times),
        "of_which_request_ms": spread(waited),
        "digits_right": f"{right} of {len(DIGITS) * rounds}",
    }


def spread(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=20)
    return {"median": round(statistics.median(times), 1), "p95": round(cuts[-1], 1), "max": round(max(times), 1)}


def picture(page: Page, path: Path) -> None:
    """Draw a five, attack it, clamp a label, and save a screenshot of the page."""
    page.click("#clear")
    for line in strokes(5):
        draw(page, "#pad", line, pause=1 / 60)
    until(page, "document.getElementById('radius-note').innerText.includes('tight')", WAIT)
    until(page, "!document.getElementById('norm').disabled", WAIT)
    page.evaluate(
        "((e) => { e.value = Math.round(0.68 * e.max); e.dispatchEvent(new Event('input')); })(document.getElementById('norm'))"
    )
    time.sleep(1)
    bottom = page.evaluate("document.querySelector('#attack-card').getBoundingClientRect().bottom + scrollY + 16")
    clip = {"x": 0, "y": 0, "width": page.evaluate("innerWidth"), "height": bottom}
    page.screenshot(path=path, full_page=True, clip=clip, quality=82 if path.suffix == ".webp" else None)


if __name__ == "__main__":
    main()
