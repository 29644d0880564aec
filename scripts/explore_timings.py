"""How long the explorer takes from a stroke to its answer, in headless Chromium; and pictures of the page for the docs.

Digits are written with the mouse at sixty moves a second. A time runs from the oldest pointer event an answer covers to the
frame that shows the answer, by the browser's own clock. Times are taken while the server still proves its constants in the
background, as in the first half minute after it starts, and after that.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import chromium
from lrrn.studies.bench.clock import machine

DIGITS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
WAIT = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help="a saved model, and further arguments of lrrn explore; digits if not given")
    parser.add_argument("--rounds", type=int, default=3, help="how often to write the ten digits in each phase")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--picture", type=Path, help="write a picture of the page, light, to this .webp or .png file")
    options = parser.parse_args()
    path = chromium.find()
    if path is None:
        raise SystemExit("no Chromium here: apt-get install chromium, or set CHROMIUM to one")
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        command = [sys.executable, "-m", "lrrn", "explore", *options.model, "--port", "0", "--no-open", "--json", str(told)]
        start = time.monotonic()
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            url = chromium.wait_for(told, server, WAIT)["address"]
            with chromium.Browser(path, scale=1.0) as browser:
                browser.open(url)
                browser.until("!document.getElementById('main').hidden", WAIT)
                ready = time.monotonic() - start
                figures = {
                    "machine": machine(),
                    "load": os.getloadavg()[0],
                    "chromium": browser.call("Browser.getVersion")["product"],
                    "model": browser.text("#model-line"),
                    "seconds_to_ready": round(ready, 2),
                    "while_refining": measured(browser, 1),
                }
                browser.until("fetch('api/state').then((r) => r.json()).then((state) => state.refined)", WAIT)
                figures["refined"] = measured(browser, options.rounds)
                figures["load_after"] = os.getloadavg()[0]
                figures["hosts_asked"] = sorted({url.split("/")[2] for url in browser.requests})
                figures["requests"] = len(browser.requests)
                if options.picture is not None:
                    picture(browser, options.picture)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)
    print(json.dumps(figures, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measured(browser: chromium.Browser, rounds: int) -> dict[str, Any]:
    """Write digits and return how long answers took, in milliseconds, and how often the label was the digit's."""
    browser.run(
        "performance.clearMeasures(); performance.clearResourceTimings(); performance.setResourceTimingBufferSize(9999)"
    )
    right = 0
    for digit in DIGITS * rounds:
        browser.click("#clear")
        for line in chromium.strokes(digit):
            browser.draw("#pad", line, pause=1 / 60)
        time.sleep(0.6)
        right += browser.text("#prediction") == str(digit)
    times = browser.run("performance.getEntriesByName('stroke to answer').map((entry) => entry.duration)")
    asked = "performance.getEntriesByType('resource').filter((entry) => entry.name.endsWith('/analyse'))"
    waited = browser.run(f"{asked}.map((entry) => entry.duration)")
    return {
        "answers": len(times),
        "stroke_to_answer_ms": spread(times),
        "of_which_request_ms": spread(waited),
        "digits_right": f"{right} of {len(DIGITS) * rounds}",
    }


def spread(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=20)
    return {"median": round(statistics.median(times), 1), "p95": round(cuts[-1], 1), "max": round(max(times), 1)}


def picture(browser: chromium.Browser, path: Path) -> None:
    """Write a five, attack it, clamp a label, and keep what the page looks like."""
    browser.click("#clear")
    for line in chromium.strokes(5):
        browser.draw("#pad", line, pause=1 / 60)
    browser.until("document.getElementById('radius-note').innerText.includes('tight')", WAIT)
    browser.until("!document.getElementById('norm').disabled", WAIT)
    browser.run(
        "((e) => { e.value = Math.round(0.68 * e.max); e.dispatchEvent(new Event('input')); })(document.getElementById('norm'))"
    )
    time.sleep(1)
    options = {"quality": 82} if path.suffix == ".webp" else {}
    browser.screenshot(path, whole=True, down_to="#attack-card", **options)


if __name__ == "__main__":
    main()
