"""Starting the explorer's server: on a socket that is bound before anything else, so that its address is known."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import webbrowser
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import uvicorn
from numpy.typing import NDArray

from lrrn.explore.explorer import Explorer
from lrrn.explore.opening import open_file, train_digits
from lrrn.explore.server import application, is_loopback

Array = NDArray[Any]

USUAL_PORT = 8137
"""Tried first if no port is asked for."""


def run(
    path: Path | None,
    data: tuple[str, Array, Array | None] | None,
    image_shape: tuple[int, int] | None,
    device: str,
    seed: int,
    host: str,
    port: int | None,
    show: bool,
    say: Callable[[str], None],
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """Explore a model until interrupted.

    Parameters
    ----------
    path : Path, optional
        A saved model; without it one is trained on digits.
    data, image_shape, device
        As in :func:`~lrrn.explore.opening.open_file`.
    seed : int
        Of what is trained.
    host, port
        As in :func:`bind`.
    show : bool
        Whether to open a browser.
    say : callable
        Takes a line for the user.
    tell : callable
        Takes the address and the name of the model, for machines, when requests are answered.
    """
    if path is None and (data is not None or image_shape is not None):
        raise ValueError("--samples and --image are for a model of yours; give a MODEL, or leave them out")
    if path is None:
        name = "digits, trained just now"
        explorer = Explorer(name, lambda progress: train_digits(seed, device, progress))
    else:
        name = path.name
        opened = open_file(path, device, image_shape, data)
        explorer = Explorer(name, lambda progress: opened)
    with closing(bind(host, port)) as listener:
        url = address(listener)
        server = prepared(explorer, host, listener)
        explorer.start()
        # the socket listens already: who comes before the server runs waits in line
        tell({"address": url, "model": name, "process": os.getpid()})
        say(f"Exploring {name} at {url} until you press Ctrl-C.")
        if not is_loopback(host):
            say(f"Anybody who can reach {host} can use it.")
        if show:
            open_browser(url)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    if explorer.working:
        # a thread inside a factorisation does not hear that the interpreter is ending, and would bring it down noisily
        sys.stdout.flush()
        os._exit(0)


def bind(host: str, port: int | None) -> socket.socket:
    """Return a listening socket.

    Parameters
    ----------
    host : str
    port : int, optional
        0 for any that is free. If not given the usual one or, if that is taken, any that is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for attempt in (USUAL_PORT, 0) if port is None else (port,):
        # asyncio sends small packets at once only where the protocol is named; else an answer waits 40 ms for a receipt
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            if sys.platform != "win32":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, attempt))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            if attempt == 0 or port is not None:
                taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
                advice = "try --port 0 for any that is free" if taken else "give a --host that is an address of this machine"
                raise OSError(f"cannot listen on {host}, port {attempt}: {error.strerror or error}; {advice}") from error
    raise AssertionError("unreachable")


def address(listener: socket.socket) -> str:
    """Return the address that a browser on this machine opens."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def prepared(explorer: Explorer, host: str, listener: socket.socket) -> uvicorn.Server:
    """Return a server for a socket; ``run(sockets=[listener])`` answers requests until it is interrupted.

    Parameters
    ----------
    explorer : Explorer
    host : str
        As given to :func:`bind`.
    listener : socket
    """
    # errors are logged where they are turned into answers; of the server's own log only requests, and only if asked for
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    verbose = logging.getLogger().isEnabledFor(logging.INFO)
    config = uvicorn.Config(
        application(explorer, host, listener.getsockname()[1]),
        log_config=None,
        access_log=verbose,
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def open_browser(url: str) -> bool:
    """Show the page, if there is a screen to show it on; a browser in the terminal would be in the way."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    return webbrowser.open(url)
