"""Start the explorer's server. Its socket is bound first, so that the address is known before anything else runs."""

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
from lrrn.explore.gallery import Gallery
from lrrn.explore.opening import open_file, train_digits
from lrrn.explore.server import application, is_loopback
from lrrn.persistence.reference import ImageShape

Array = NDArray[Any]

USUAL_PORT = 8137
"""Default port, tried first if none is given."""


def run(
    path: Path | None,
    data: Gallery | None,
    image_shape: ImageShape | None,
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
        A saved model; if not given, one is trained on digits, from ``seed``.
    data, image_shape, device
        As in :func:`~lrrn.explore.opening.open_file`.
    host, port
        As in :func:`bind`.
    show : bool
        Whether to open a browser.
    say : callable
        Called with a line of text for the user.
    tell : callable
        Called with the address and the name of the model, for other programs, once the server answers requests.
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
        # the socket already listens: connections made before the server runs wait in its queue
        tell({"address": url, "model": name, "process": os.getpid()})
        say(f"Exploring {name} at {url} until you press Ctrl-C.")
        if not is_loopback(host):
            say(f"Anybody who can reach {host} can use it.")
        if show:
            open_browser(url)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    if explorer.working:
        # a thread inside a factorisation does not notice that the interpreter exits, and would crash it
        sys.stdout.flush()
        os._exit(0)


def bind(host: str, port: int | None) -> socket.socket:
    """Return a listening socket. Port 0 is any free port, None the default port or, if that is taken, any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for attempt in (USUAL_PORT, 0) if port is None else (port,):
        # asyncio sets TCP_NODELAY only if the protocol is given; otherwise a response waits 40 ms for an acknowledgement
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
    """Return the URL of the page for a browser on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def prepared(explorer: Explorer, host: str, listener: socket.socket) -> uvicorn.Server:
    """Return a server for a socket; ``run(sockets=[listener])`` answers requests until it is interrupted."""
    # errors are logged where they become responses; the server's own log shows only requests, and only on demand
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
    """Open the page in a browser if there is a graphical display. Text browsers are not used: they would block the terminal."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    return webbrowser.open(url)
