"""HTTP server of the explorer: a self-contained page and a few JSON endpoints, for this machine only.

Only this module imports Starlette, so that the rest of the package works without it.
"""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.resources import files
from typing import Any, final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lrrn.explore.explorer import Explorer
from lrrn.explore.session import Session

logger = logging.getLogger("lrrn.explore")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGI = Callable[[Message, Receive, Send], Awaitable[None]]

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
BYTES_A_PIXEL = 24
"""Bytes allowed per number in a request; a larger request is refused without reading it."""


class Refusal(Exception):
    """Raised to refuse a request, with the HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def application(explorer: Explorer, host: str, port: int) -> ASGI:
    """Return the ASGI application. Requests for other hosts than its own, ``host`` and ``port``, are refused."""
    routes = [
        *(Route(path, _constant(content, kind)) for path, (content, kind) in _assets().items()),
        Route("/api/state", _getter(explorer.state)),
        Route("/api/model", _getter(explorer.overview)),
        Route("/api/analyse", _question(explorer, lambda session, x, _: session.analyse(x)), methods=["POST"]),
        Route("/api/tighten", _question(explorer, lambda session, x, _: session.tighten(x)), methods=["POST"]),
        Route("/api/prove", _question(explorer, lambda session, x, _: session.prove(x)), methods=["POST"]),
        Route("/api/image", _answer(explorer, _image), methods=["POST"]),
        Route("/api/clamp", _question(explorer, _clamp), methods=["POST"]),
        Route("/api/attack", _question(explorer, _attack), methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {404: _not_found, 405: _not_allowed, Exception: _failed}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), host, port)


@final
class Guard:
    """Middleware against cross-site requests and DNS rebinding; it also adds security headers to responses.

    DNS rebinding shows in the Host header: it has the foreign name that resolves to this machine. A cross-site script shows
    in the Origin header. ``host`` is the address that the server is bound to.
    """

    def __init__(self, app: ASGI, host: str, port: int) -> None:
        self._app, self._host, self._port = app, host, port

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        reason = self.objection(scope["method"], scope["headers"])
        if reason is not None:
            logger.warning("refused: %s", reason)
            await JSONResponse({"error": reason}, 403)(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)

    def objection(self, method: str, headers: list[tuple[bytes, bytes]]) -> str | None:
        """Return why a request is refused, judging by its headers; None if it is allowed."""
        values: dict[str, list[str]] = {}
        for name, value in headers:
            values.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        hosts = values.get("host", [])
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return f"this server answers requests for itself, not for {', '.join(hosts) or 'no host at all'!r}"
        for origin in values.get("origin", []):
            if urlsplit(origin).scheme != "http" or origin != f"http://{hosts[0]}":
                return f"requests from pages of {origin!r} are not answered"
        elsewhere = any(site not in ("same-origin", "none") for site in values.get("sec-fetch-site", []))
        if elsewhere and not (method == "GET" and values.get("sec-fetch-mode") == ["navigate"]):  # links may lead here
            return "requests from other sites are not answered"
        if method == "POST" and values.get("content-type") != ["application/json"]:
            return "questions are asked as application/json"
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header names this server: an IP address or localhost, with our port. DNS may rebind other names."""
        try:
            parts = urlsplit(f"//{host}")
            name, port = parts.hostname, parts.port or 80
        except ValueError:
            return False
        if name is None or port != self._port or parts.netloc.lower() != host.lower() or parts.path or parts.username:
            return False
        if name in ("localhost", self._host.lower()):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not is_loopback(self._host)


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address, or the name is localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _assets() -> dict[str, tuple[bytes, str]]:
    """Return the page's files, read once: a mapping from paths to contents and media types."""
    found = {}
    for file in files("lrrn.explore").joinpath("page").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in TYPES:
            found["/" if file.name == "index.html" else f"/{file.name}"] = (file.read_bytes(), TYPES[suffix])
    return found


def _constant(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


def _getter(look: Callable[[], dict[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return JSONResponse(look())
        except RuntimeError as error:
            return JSONResponse({"error": str(error)}, 503)

    return answer


Ask = Callable[[Session, NDArray[np.float64], dict[str, Any]], dict[str, Any]]


def _question(explorer: Explorer, ask: Ask) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that reads an image and queries the session in a separate thread."""
    return _answer(explorer, lambda session, content: ask(session, _pixels(content.get("pixels"), session), content))


def _answer(
    explorer: Explorer, ask: Callable[[Session, dict[str, Any]], dict[str, Any]]
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that reads a JSON object and queries the session in a separate thread."""

    async def answer(request: Request) -> Response:
        try:
            session = explorer.session
            content = await _read(request, 1024 + BYTES_A_PIXEL * session.n_pixels)
            return JSONResponse(await run_in_threadpool(ask, session, content))
        except Refusal as error:
            return JSONResponse({"error": str(error)}, error.status)
        except RuntimeError as error:
            return JSONResponse({"error": str(error)}, 503)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)

    return answer


def _image(session: Session, content: dict[str, Any]) -> dict[str, Any]:
    index = content.get("index")
    if type(index) is not int:
        raise ValueError(f"index should be the number of an image; got {index!r:.40}")
    return session.image(index)


def _clamp(session: Session, pixels: NDArray[np.float64], content: dict[str, Any]) -> dict[str, Any]:
    label = content.get("label")
    if type(label) is not int:
        raise ValueError(f"label should be the number of a class; got {label!r:.40}")
    return session.clamp(pixels, label)


def _attack(session: Session, pixels: NDArray[np.float64], content: dict[str, Any]) -> dict[str, Any]:
    keep = content.get("keep", False)
    if type(keep) is not bool:
        raise ValueError(f"keep should be true or false; got {keep!r:.40}")
    return session.attack(pixels, keep)


async def _read(request: Request, limit: int) -> dict[str, Any]:
    """Read a JSON object of limited size."""
    too_large = Refusal(413, f"An image for this model takes no more than {limit} bytes; the request is larger.")
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "The request should be a JSON object and cannot be read as one.") from None
    if not isinstance(content, dict):
        raise Refusal(400, f"The request should be a JSON object; it is a {type(content).__name__}.")
    return content


def _pixels(values: Any, session: Session) -> NDArray[np.float64]:
    """Check an image: numbers in [0, 1], one per pixel and channel of the model."""
    *channels, height, width = session.image_shape
    of = "red, green and blue values from 0 to 1, channel by channel and" if channels else "grey values from 0 to 1,"
    expected = f"{height} x {width} {of} row by row"
    if not isinstance(values, list) or len(values) != session.n_pixels:
        got = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
        raise Refusal(400, f"An image should be {expected}; got {got}.")
    if not all(type(value) in (int, float) and 0 <= value <= 1 for value in values):
        raise Refusal(400, f"An image should be {expected}; some of these values are no such numbers.")
    return np.array(values, dtype=np.float64)


async def _not_found(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"There is nothing at {request.url.path}."}, 404)


async def _not_allowed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"{request.method} is not for {request.url.path}."}, 405)


async def _failed(request: Request, error: Exception) -> Response:
    logger.error("%s failed", request.url.path, exc_info=error)
    return JSONResponse({"error": "Something went wrong here; the terminal that lrrn explore runs in says what."}, 500)
