"""The explorer's server answers this machine alone, as the session does, and says what is wrong with a question."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from contextlib import closing
from importlib.resources import files

import pytest

from lrrn.explore.explorer import Explorer
from lrrn.explore.gallery import Gallery
from lrrn.explore.opening import Opened
from lrrn.explore.session import Session
from sessions import digits

pytest.importorskip("starlette", reason="the explorer's server needs the extra explore")

from lrrn.explore.launch import bind, prepared
from lrrn.explore.server import Guard


class Served:
    """An explorer on a port of its own, and a way to ask it that leaves every header to the test."""

    def __init__(self, explorer):
        self.listener = bind("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.server = prepared(explorer, "127.0.0.1", self.listener)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        explorer.start()
        self.thread.start()

    def ask(self, method, path, body=None, **headers):
        given = {"Host": f"127.0.0.1:{self.port}", **({"Content-Type": "application/json"} if body is not None else {})}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        if content is not None:
            given.setdefault("Content-Length", str(len(content)))
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.putrequest(method, path, skip_host=True)
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(content)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    def end(self):
        self.server.should_exit = True
        self.thread.join(10)
        self.listener.close()


@pytest.fixture(scope="module")
def served(plain):
    explorer = Explorer("a model", lambda progress: Opened(plain))
    running = Served(explorer)
    while explorer.state()["phase"] == "opening":
        time.sleep(0.02)
    yield running
    running.end()


def test_the_page_asks_nobody_else(served):
    status, headers, page = served.ask("GET", "/")
    assert status == 200 and headers["content-type"].startswith("text/html") and b"lrrn explorer" in page
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    names = re.findall(rb'(?:src|href)="([^"]+)"', page)
    assert {b"app.js", b"style.css", b"favicon.svg"} <= set(names)
    for file in files("lrrn.explore").joinpath("page").iterdir():
        content = file.read_text()
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", re.sub(r"(?m)^\s*//.*$", "", content)))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name
        path = "/" if file.name == "index.html" else f"/{file.name}"
        assert served.ask("GET", path)[2].decode() == content


def test_questions_are_answered_as_the_session_answers(served, plain):
    pixels = digits()[0][1].round(4)
    status, _, body = served.ask("POST", "/api/analyse", {"pixels": pixels.tolist()})
    assert status == 200 and json.loads(body) == json.loads(json.dumps(plain.analyse(pixels)))
    assert json.loads(served.ask("POST", "/api/clamp", {"pixels": pixels.tolist(), "label": 2})[2])["label"] == 2
    assert len(json.loads(served.ask("POST", "/api/attack", {"pixels": pixels.tolist(), "keep": True})[2])["images"]) == 41
    assert json.loads(served.ask("POST", "/api/tighten", {"pixels": pixels.tolist()})[2])["radius"] > 0
    state = json.loads(served.ask("GET", "/api/state")[2])
    assert state["phase"] == "ready" and state["version"] >= 1
    assert json.loads(served.ask("GET", "/api/model")[2])["name"] == "a model"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"not json", 400, "cannot be read"),
        (b"[1, 2]", 400, "it is a list"),
        (b"[" * 2000, 400, "cannot be read"),
        ({}, 400, "should be 8 x 8 grey values from 0 to 1, row by row; got NoneType"),
        ({"pixels": [0.5] * 63}, 400, "got 63 values"),
        ({"pixels": ["0.5"] * 64}, 400, "no such numbers"),
        ({"pixels": [True] * 64}, 400, "no such numbers"),
        ({"pixels": [1.5] * 64}, 400, "no such numbers"),
        (b'{"pixels": [' + b", ".join([b"NaN"] * 64) + b"]}", 400, "no such numbers"),
        ({"pixels": [0.123456789] * 4000}, 413, "takes no more than 2560 bytes"),
    ],
)
def test_malformed_and_oversized_images_get_a_clear_message(served, body, status, message):
    found, _, answer = served.ask("POST", "/api/analyse", body)
    assert found == status and message in json.loads(answer)["error"]


def test_a_body_larger_than_it_says_is_cut_off(served):
    found, _, answer = served.ask("POST", "/api/analyse", b"x" * 9, Content_Length="99999999999")
    assert found == 413 and "takes no more" in json.loads(answer)["error"]
    chunks = iter([b"x" * 1000] * 50)
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)) as connection:
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        connection.request("POST", "/api/analyse", body=chunks, headers=headers, encode_chunked=True)
        assert connection.getresponse().status == 413


def test_images_are_handed_out_by_number(plain):
    session = Session(plain.model, (8, 8), plain.reference, Gallery("mine", *digits(20)))
    running = Served(explorer := Explorer("m", lambda progress: Opened(session)))
    try:
        while explorer.state()["phase"] == "opening":
            time.sleep(0.02)
        status, _, body = running.ask("POST", "/api/image", {"index": 3})
        assert status == 200 and json.loads(body) == json.loads(json.dumps(session.image(3)))
        for given, reason in (
            ({"index": 20}, "mine has images from 0 to 19; got 20"),
            ({"index": "3"}, "index should be the number of an image; got '3'"),
            ({"index": True}, "index should be the number of an image; got True"),
            ({}, "index should be the number of an image; got None"),
        ):
            status, _, body = running.ask("POST", "/api/image", given)
            assert status == 400 and json.loads(body)["error"] == reason
    finally:
        running.end()


def test_other_questions_and_paths_are_refused(served):
    pixels = [0.0] * 64
    for path, body, status, message in (
        ("/api/image", {"index": 0}, 400, "no images to choose from"),
        ("/api/prove", {"pixels": pixels}, 400, "proven without a request"),
        ("/api/clamp", {"pixels": pixels, "label": "3"}, 400, "number of a class"),
        ("/api/clamp", {"pixels": pixels, "label": -1}, 400, "from 0 to 9"),
        ("/api/attack", {"pixels": pixels, "keep": 1}, 400, "true or false"),
        ("/api/nothing", {}, 404, "nothing at /api/nothing"),
        ("/api/state", {}, 405, "POST is not for"),
    ):
        found, headers, answer = served.ask("POST", path, body)
        assert found == status and message in json.loads(answer)["error"], path
        assert "content-security-policy" in headers
    assert served.ask("GET", "/../pyproject.toml")[0] == 404
    assert served.ask("GET", "/api/analyse")[0] == 405


def test_strangers_are_refused(served):
    here = f"127.0.0.1:{served.port}"
    image = {"pixels": [0.0] * 64}
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"evil.example:{served.port}"},  # its DNS points here
        {"Host": f"127.0.0.1.evil.example:{served.port}"},
        {"Host": "127.0.0.1:1"},
        {"Host": f"192.168.1.5:{served.port}"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://localhost:{served.port}"},  # ours, but not the one that was asked
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Content_Type": "text/plain"},  # what a form of a stranger's page can send without asking
        {"Content_Type": None},
    ):
        status, sent, answer = served.ask("POST", "/api/analyse", image, **headers)
        assert status in (400, 403) and b"scores" not in answer, headers
        assert status == 400 or "content-security-policy" in sent
    assert served.ask("POST", "/api/analyse", image, Origin=f"http://{here}", Sec_Fetch_Site="same-origin")[0] == 200
    assert served.ask("GET", "/", Host=f"localhost:{served.port}")[0] == 200
    assert served.ask("GET", "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
    assert served.ask("GET", "/api/model", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")[0] == 403


@pytest.mark.parametrize(
    ("bound", "host", "fine"),
    [
        ("127.0.0.1", "127.0.0.1:8137", True),
        ("127.0.0.1", "LOCALHOST:8137", True),
        ("127.0.0.1", "[::1]:8137", True),
        ("127.0.0.1", "10.0.0.7:8137", False),
        ("127.0.0.1", "localhost:80", False),
        ("127.0.0.1", "localhost", False),
        ("127.0.0.1", "user@localhost:8137", False),
        ("127.0.0.1", "localhost:8137/x", False),
        ("127.0.0.1", "[::1:8137", False),
        ("127.0.0.1", "localhost:x", False),
        ("0.0.0.0", "10.0.0.7:8137", True),
        ("0.0.0.0", "evil.example:8137", False),
        ("lab.example", "lab.example:8137", True),
        ("lab.example", "evil.example:8137", False),
    ],
)
def test_hosts(bound, host, fine):
    assert (Guard(None, bound, 8137).objection("GET", [(b"host", host.encode())]) is None) == fine


def test_a_request_for_two_hosts_or_none_is_refused():
    guard = Guard(None, "127.0.0.1", 8137)
    assert guard.objection("GET", []) is not None
    assert guard.objection("GET", [(b"host", b"localhost:8137"), (b"host", b"evil.example")]) is not None


def test_before_the_model_is_there_and_if_it_never_comes():
    go = threading.Event()

    def opener(progress):
        progress(3, 30)
        go.wait(30)
        raise ValueError("no such luck")

    running = Served(Explorer("late", opener))
    try:
        while json.loads(running.ask("GET", "/api/state")[2])["total"] == 0:
            time.sleep(0.01)
        assert json.loads(running.ask("GET", "/api/state")[2]) == {
            "phase": "opening",
            "done": 3,
            "total": 30,
            "error": None,
            "version": 0,
            "refined": False,
        }
        for method, path, body in (("GET", "/api/model", None), ("POST", "/api/analyse", {"pixels": []})):
            status, _, answer = running.ask(method, path, body)
            assert status == 503 and "still being trained" in json.loads(answer)["error"]
        go.set()
        while (state := json.loads(running.ask("GET", "/api/state")[2]))["phase"] == "opening":
            time.sleep(0.01)
        assert state["phase"] == "failed" and "no such luck" in state["error"]
    finally:
        running.end()


def test_an_error_of_ours_is_logged_and_not_shown_to_the_page(plain, monkeypatch, caplog):
    running = Served(Explorer("a model", lambda progress: Opened(plain)))
    try:
        while json.loads(running.ask("GET", "/api/state")[2])["phase"] == "opening":
            time.sleep(0.01)
        monkeypatch.setattr(Session, "analyse", lambda self, pixels: 1 / 0)
        status, _, answer = running.ask("POST", "/api/analyse", {"pixels": [0.0] * 64})
        assert status == 500 and "terminal" in json.loads(answer)["error"] and b"division" not in answer
        assert "/api/analyse failed" in caplog.text and "ZeroDivisionError" in caplog.text
    finally:
        running.end()
