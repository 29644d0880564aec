"""The command: it serves until interrupted, reads the model file and writes nothing."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest
from typer.testing import CliRunner

import lrrn
from lrrn.cli import app
from sessions import digits

pytest.importorskip("starlette", reason="the explorer's server needs the extra explore")

from lrrn.explore.launch import address, bind
from lrrn.kernels.cpu.cache import folders

WATCHED = """
import json, sys
log = open(sys.argv[1], "a", buffering=1)
def watch(event, arguments):
    if event in ("open", "socket.bind", "socket.connect", "os.remove", "os.rename", "os.mkdir"):
        log.write(json.dumps([event, [str(argument) for argument in arguments]]) + "\\n")
sys.addaudithook(watch)
from lrrn.cli import app
app(sys.argv[2:])
"""


def test_the_command_serves_until_interrupted_reads_the_model_alone_and_writes_nothing(tmp_path, plain):
    model, told, log = tmp_path / "m.safetensors", tmp_path / "told.json", tmp_path / "log"
    lrrn.save(plain.model, model, plain.reference)
    private = tmp_path / "data"
    private.mkdir()
    command = [
        sys.executable,
        "-B",
        "-c",
        WATCHED,
        str(log),
        "explore",
        str(model),
        "--port",
        "0",
        "--no-open",
        "--json",
        str(told),
    ]
    environment = {**os.environ, "LRRN_DATA": str(private)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    )
    try:
        end = time.monotonic() + 180
        while not told.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.1)
        found = json.loads(told.read_text())
        host, port = re.fullmatch(r"http://([\d.]+):(\d+)/", found["address"]).groups()
        assert host == "127.0.0.1" and found["model"] == "m.safetensors" and found["process"] == process.pid

        def ask(path, body=None):
            headers = {"Content-Type": "application/json"}
            with closing(http.client.HTTPConnection(host, int(port), timeout=120)) as connection:
                connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
                return json.loads(connection.getresponse().read())

        while ask("/api/state")["phase"] == "opening":
            time.sleep(0.2)
        start = len(log.read_text().splitlines())
        pixels = digits()[0][0].tolist()
        assert "scores" in ask("/api/analyse", {"pixels": pixels})
        assert "images" in ask("/api/attack", {"pixels": pixels})
        assert "radius" in ask("/api/tighten", {"pixels": pixels})
        assert "gap" in ask("/api/clamp", {"pixels": pixels, "label": 1})
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, errors
    assert "until you press Ctrl-C" in output and errors == ""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    opened = [arguments for event, arguments in events if event == "open"]
    written = {path for path, mode, flags in opened if int(flags) & (os.O_WRONLY | os.O_RDWR) and path != "/dev/null"}
    # what --json asked for, by way of a neighbour (and its descriptor), and the cache of compiled kernels, with its parents
    kept = next(folders(__file__))
    asked = re.compile(
        rf"{re.escape(str(tmp_path))}(/told\.json|/\.told\.json\.\w+\.part)?|[0-9]+|{re.escape(str(kept))}(/.*)?|"
        + "|".join(re.escape(str(parent)) for parent in kept.parents)
    )
    assert not [path for path in written if not asked.fullmatch(path)]
    changed = [arguments[0] for event, arguments in events if event in ("os.remove", "os.rename", "os.mkdir")]
    assert not [path for path in changed if not asked.fullmatch(path)]
    below = {path for path, _, _ in opened if path.startswith(str(tmp_path))}
    # safetensors reads the file without Python, so it may not be among them
    assert {path for path in below if not asked.fullmatch(path)} <= {str(model)}
    bound = {arguments[1] for event, arguments in events if event == "socket.bind"}
    assert bound == {"('127.0.0.1', 0)"}
    assert not [arguments for event, arguments in events if event == "socket.connect"]
    later = {path for event, (path, *_) in events[start:] if event == "open"}
    code = (".py", ".pyc", ".so", ".nbc", ".nbi")  # modules that are imported, kernels that are loaded when first needed
    assert not {path for path in later if not path.endswith(code) and "/proc/" not in path}


def test_without_its_packages_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr("lrrn.explore.find_spec", lambda name: None if name == "uvicorn" else name)
    done = CliRunner().invoke(app, ["explore"], terminal_width=200)
    assert done.exit_code == 1 and "needs uvicorn: pip install 'lrrn[explore]'" in done.output


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--image", "8by8"], 2, "HEIGHTxWIDTH, such as 28x28, or 3xHEIGHTxWIDTH for colour, such as 3x32x32; got '8by8'"),
        (["--image", "8x8"], 2, "--samples and --image are for a model of yours"),
        (["--samples", "digits"], 2, "--samples and --image are for a model of yours"),
        (["no.safetensors", "--target", "y"], 2, "--target is for a table that --samples names"),
        (["--port", "70000"], 2, "--port"),
        (["no.safetensors"], 1, "no file no.safetensors"),
        (["--samples", "cats"], 2, "unknown data 'cats'"),
        (["--device", "tpu"], 2, "unknown device 'tpu'"),
        (["--json", "/no/such/folder/x.json"], 2, "folder does not exist; make it first"),
        (["--host", "203.0.113.1", "--port", "0"], 1, "give a --host that is an address of this machine"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(arguments, status, message):
    done = CliRunner().invoke(app, ["explore", *arguments], terminal_width=200)
    assert done.exit_code == status and message in " ".join(done.output.replace("│", " ").split()), done.output


def test_ports():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert address(first) == f"http://127.0.0.1:{port}/"
        with pytest.raises(OSError, match=rf"port {port}: .*try --port 0"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", None) as usual, bind("127.0.0.1", None) as other:
        assert usual.getsockname()[1] != other.getsockname()[1]


def test_answers_are_sent_at_once():
    """Small packets do not wait for receipts, which systems delay by 40 ms: asyncio sees to that for sockets known as TCP."""

    async def accepted(listener) -> int:
        found = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda _, writer: found.set_result(writer), sock=listener)
        async with server:
            _, client = await asyncio.open_connection(*listener.getsockname())
            writer = await found
            at_once = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            client.close()
        return at_once

    assert asyncio.run(accepted(bind("127.0.0.1", 0)))
