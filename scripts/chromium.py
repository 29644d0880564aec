"""Drive Debian's Chromium by the DevTools protocol over a pipe: no package, no port, nothing downloaded."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from queue import Empty, Queue
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--metrics-recording-only",
    "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
# the browser reads its commands from descriptor 3 and writes to 4
PLUMBING = "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"


def find() -> str | None:
    """Return the path of a Chromium, or None: the variable CHROMIUM, or what is installed."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """The browser refused a command, or the page raised an error."""


class Browser:
    """A headless browser with one page.

    Parameters
    ----------
    path : str
        As :func:`find` returns it.
    width, height : int
        Of the window, in CSS pixels.
    scale : float
        Device pixels a CSS pixel.
    mobile : bool
        Whether it has a touch screen and lays pages out as a phone does.
    dark : bool
        Whether it prefers dark colours.
    """

    def __init__(
        self, path: str, width: int = 1280, height: int = 900, scale: float = 1.0, mobile: bool = False, dark: bool = False
    ) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._answers: dict[int, Queue[dict[str, Any]]] = {}
        self._count = 0
        self._session: str | None = None
        self._profile = tempfile.TemporaryDirectory(prefix="lrrn-chromium-", ignore_cleanup_errors=True)
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        flags = [*FLAGS, *sandbox, f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PLUMBING, str(read), str(write), path, *flags],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        threading.Thread(target=self._listen, daemon=True).start()
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        self.prefer(dark)

    # --- the protocol -------------------------------------------------------------------------------------------------

    def call(self, method: str, timeout: float = 60.0, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._count += 1
        number = self._count
        self._answers[number] = Queue()
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        try:
            answer = self._answers[number].get(timeout=timeout)
        except Empty:
            raise BrowserError(f"{method}: no answer within {timeout:g} s") from None
        finally:
            del self._answers[number]
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _listen(self) -> None:
        rest = b""
        while chunk := os.read(self._in, 2**16):
            *messages, rest = (rest + chunk).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message and message["id"] in self._answers:
                    self._answers[message["id"]].put(message)
                elif "method" in message:
                    self._note(message["method"], message.get("params", {}))

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        """Keep what tests look at: every request, everything that went wrong."""
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(value.get("value", value.get("description"))) for value in parameters["args"]))

    # --- the page -----------------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Evaluate JavaScript, promises included, and return its value."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = 60.0) -> Any:
        """Wait until an expression holds and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(condition)):
            if time.monotonic() > end:
                raise BrowserError(f"after {seconds:g} s still not: {condition}; problems: {self.problems}")
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """Return the visible text of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Scroll an element into view and return left, top, width and height."""
        script = (
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        left, top, width, height = self.run(script)
        return left, top, width, height

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        left, top, width, height = self.box(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, left + width / 2, top + height / 2)

    def draw(self, selector: str, points: list[tuple[float, float]], pause: float = 0.004, touch: bool = False) -> None:
        """Draw a line through points given in shares of an element's width and height, with the mouse or a finger."""
        left, top, width, height = self.box(selector)
        places = [(left + x * width, top + y * height) for x, y in points]
        if touch:
            self._touch("touchStart", places[0])
            for place in places[1:]:
                self._touch("touchMove", place)
                time.sleep(pause)
            self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
            return
        self._mouse("mousePressed", *places[0])
        for x, y in places[1:]:
            self._mouse("mouseMoved", x, y)
            time.sleep(pause)
        self._mouse("mouseReleased", *places[-1])

    def _mouse(self, kind: str, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def _touch(self, kind: str, place: tuple[float, float]) -> None:
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": place[0], "y": place[1]}])

    def key(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def choose_file(self, selector: str, path: Path) -> None:
        """Put a file into a file input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def prefer(self, dark: bool) -> None:
        """Prefer dark or light colours."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, whole: bool = False, down_to: str | None = None, **options: Any) -> None:
        """Save a picture, in the form its suffix says, of the window; if ``whole``, of the page, or down to an element."""
        self.run(
            "document.activeElement?.blur(); new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        if whole:
            width, height = self.run("[innerWidth, document.documentElement.scrollHeight]")
            if down_to is not None:
                height = self.run(
                    f"document.querySelector({json.dumps(down_to)}).getBoundingClientRect().bottom + scrollY + 16"
                )
            options["clip"] = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        form = path.suffix.removeprefix(".")
        picture = self.call("Page.captureScreenshot", format=form, captureBeyondViewport=whole, **options)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        """End the browser."""
        self._session = None
        try:
            self.call("Browser.close", timeout=10)
            self._process.wait(10)
        except (BrowserError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def strokes(digit: int) -> list[list[tuple[float, float]]]:
    """Return how a digit is written, as lines of points in the unit square, for tests and timings."""
    return [_dense(line) for line in DIGITS[digit]]


def _dense(line: list[tuple[float, float]], step: float = 0.03) -> list[tuple[float, float]]:
    points = [line[0]]
    for (x0, y0), (x1, y1) in pairwise(line):
        n = max(1, round(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 / step))
        points += [(x0 + (x1 - x0) * k / n, y0 + (y1 - y0) * k / n) for k in range(1, n + 1)]
    return points


DIGITS: dict[int, list[list[tuple[float, float]]]] = {
    0: [
        [
            (0.5, 0.15),
            (0.36, 0.2),
            (0.28, 0.36),
            (0.27, 0.58),
            (0.33, 0.77),
            (0.48, 0.86),
            (0.63, 0.79),
            (0.71, 0.62),
            (0.71, 0.4),
            (0.64, 0.22),
            (0.5, 0.15),
        ]
    ],
    1: [[(0.4, 0.3), (0.54, 0.14), (0.54, 0.86)]],
    2: [[(0.3, 0.3), (0.38, 0.18), (0.54, 0.14), (0.66, 0.24), (0.66, 0.4), (0.5, 0.6), (0.3, 0.84), (0.72, 0.84)]],
    3: [
        [
            (0.31, 0.2),
            (0.5, 0.14),
            (0.66, 0.24),
            (0.62, 0.4),
            (0.46, 0.47),
            (0.64, 0.54),
            (0.7, 0.7),
            (0.56, 0.85),
            (0.32, 0.82),
        ]
    ],
    4: [[(0.52, 0.14), (0.36, 0.4), (0.26, 0.62), (0.5, 0.62), (0.74, 0.6)], [(0.6, 0.42), (0.56, 0.64), (0.54, 0.86)]],
    5: [[(0.68, 0.15), (0.38, 0.15), (0.34, 0.45), (0.54, 0.42), (0.68, 0.56), (0.66, 0.74), (0.5, 0.86), (0.32, 0.8)]],
    6: [
        [
            (0.6, 0.14),
            (0.42, 0.34),
            (0.32, 0.6),
            (0.36, 0.78),
            (0.5, 0.86),
            (0.64, 0.8),
            (0.66, 0.64),
            (0.52, 0.54),
            (0.36, 0.64),
        ]
    ],
    7: [[(0.28, 0.16), (0.7, 0.16), (0.58, 0.45), (0.46, 0.86)], [(0.36, 0.52), (0.68, 0.48)]],
    8: [
        [
            (0.5, 0.48),
            (0.36, 0.36),
            (0.38, 0.2),
            (0.5, 0.14),
            (0.63, 0.2),
            (0.63, 0.35),
            (0.5, 0.48),
            (0.36, 0.62),
            (0.36, 0.78),
            (0.5, 0.86),
            (0.64, 0.78),
            (0.64, 0.62),
            (0.5, 0.48),
        ]
    ],
    9: [
        [
            (0.66, 0.3),
            (0.54, 0.16),
            (0.38, 0.22),
            (0.36, 0.4),
            (0.5, 0.48),
            (0.65, 0.36),
            (0.67, 0.28),
            (0.62, 0.6),
            (0.5, 0.86),
        ]
    ],
}


def wait_for(path: Path, process: subprocess.Popen[Any], seconds: float = 60.0) -> dict[str, Any]:
    """Wait for a JSON file that a process writes, and return its content."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise BrowserError(f"the server ended with status {process.returncode}")
        try:
            return dict(json.loads(path.read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(0.05)
    raise BrowserError(f"no {path} after {seconds:g} s")
