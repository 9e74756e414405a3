"""Middleware: rejects requests of foreign web pages, and all requests during a shutdown.

Browsers let the server decide which pages may use it. A server without an API key trusts everybody
who can connect to it, and a browser connects on behalf of any page:

- A page may send a POST to any address. With ``Content-Type: text/plain`` the browser sends it
  without a preflight request (https://fetch.spec.whatwg.org/#cors-safelisted-request-header). The
  page cannot read the response, but the model has generated it, and whatever the request stored or
  deleted remains stored or deleted. A page may also open any WebSocket, and read what it receives.
- A page of ``evil.example`` whose name resolves to this machine (DNS rebinding) has the same origin
  as the server and may read everything. ``Origin`` and ``Host`` both say ``evil.example``.

So, without an API key, ``Origin`` must be the server's own, local, or allowed by the operator, and
``Host`` must be a name that nobody else can register. Programs send no ``Origin`` and connect by
such a name, so they are not affected. With an API key none of this is checked: pages do not know
the key.

Programs whose windows are pages (Electron, Tauri, VS Code) have an origin of a scheme of their own,
such as ``app://obsidian.md``. No web page can have one, so these are allowed.

Pages of an allowed origin may also read responses: these get the headers of the CORS protocol
(https://fetch.spec.whatwg.org/#http-cors-protocol), preflight responses included, with or without a
key.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from vllm_mlx_harmony.core.errors import HarmonyFailure, RequestError
from vllm_mlx_harmony.server.answers import SHUTTING_DOWN
from vllm_mlx_harmony.server.errors import ErrorResponse
from vllm_mlx_harmony.server.front_end import front_end_of, host_of
from vllm_mlx_harmony.server.settings import variable
from vllm_mlx_harmony.server.streams import TRANSPORT

logger = logging.getLogger("vllm_mlx_harmony")


ORIGINS_VARIABLE, HOSTS_VARIABLE = variable("origins"), variable("hosts")

_UNOWNED = (".local", ".localhost", ".internal", ".home.arpa", ".ts.net")
"""Endings of names that public DNS never resolves (RFC 6762, RFC 6761, ICANN's resolution of
2024-07-29, RFC 8375), such as Docker's ``host.docker.internal``, and Tailscale's: such a name
resolves to the machine that has it, or to a server of Tailscale (https://tailscale.com/kb/1081,
https://tailscale.com/kb/1223), whatever its owner wants."""

_PROGRAMS = (
    "app://",
    "tauri://",
    "vscode-webview://",
    "vscode-file://",
    "capacitor://",
    "ionic://",
)
"""The beginnings of the origins of programs."""

_WITHOUT_VERSION = ("/chat/completions", "/completions", "/responses", "/messages", "/models")
"""Beginnings of paths that are requested if ``/v1`` is missing from a client's base URL."""


def right_path(path: str) -> str | None:
    """The path that a client meant which has one ``/v1`` too few or too many in its base URL."""
    if path.startswith("/v1/v1/"):
        return path[len("/v1") :]
    is_api = any(f"{path}/".startswith(f"{prefix}/") for prefix in _WITHOUT_VERSION)
    return f"/v1{path}" if is_api else None


class Admission:
    """ASGI middleware: rejects foreign pages with 403, and adds CORS headers for allowed ones.

    Rejects every new request with 503 while the server shuts down (`shutdown`). Adds the
    connection's transport to the scope (`streams.transport_of`).

    ``error_at`` returns the error format of a path. ``origins`` and ``hosts`` are patterns
    (`settings`). ``name`` replaces this machine's hostname.
    """

    def __init__(
        self,
        app: ASGIApp,
        error_at: Callable[[str], ErrorResponse],
        origins: Iterable[str] = (),
        hosts: Iterable[str] = (),
        name: str | None = None,
    ) -> None:
        self._app, self._error_at = app, error_at
        self._origins, self._hosts = tuple(origins), tuple(hosts)
        self._name = (socket.gethostname() if name is None else name).lower()
        self._logged: set[str] = set()
        self._cors = CORSMiddleware(
            self._unless_shutting_down,
            allow_origin_regex=".*",  # only requests of allowed origins get there
            allow_methods="*",
            allow_headers="*",
            allow_private_network=True,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        # ``receive`` is a method of uvicorn's connection.
        scope[TRANSPORT] = getattr(getattr(receive, "__self__", None), "transport", None)
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers.get("host")
        allowed = origin is not None and self.may_read(origin, host)
        problem = None
        keyed = host_of(HTTPConnection(scope)).requires_key
        if not keyed and host is not None and not self.is_own(host):
            problem = (
                f"host {host!r} is not allowed: without an API key, only local names and IP "
                f"addresses are. Add it to {HOSTS_VARIABLE}, or require an API key"
            )
        elif not keyed and origin is not None and not allowed:
            problem = (
                f"origin {origin!r} is not allowed. Add it to {ORIGINS_VARIABLE}, or require an "
                "API key"
            )
        if problem is not None:
            if problem not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(problem)
                logger.warning("rejected: %s", problem)
            failure = RequestError(problem, status=403, code="origin_not_allowed")
            await self._reject(failure, scope, receive, send)
        elif meant := right_path(scope["path"]):
            advice = (
                "must end in /v1" if meant.startswith(f"/v1{scope['path']}") else "has /v1 twice"
            )
            problem = f"no such path: {scope['path']}. It is {meant}: the base URL {advice}"
            failure = RequestError(problem, status=404, code="not_found")
            await self._reject(failure, {**scope, "path": meant}, receive, send)
        elif allowed:
            await self._cors(scope, receive, send)
        else:
            await self._unless_shutting_down(scope, receive, send)

    async def _unless_shutting_down(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = front_end_of(HTTPConnection(scope)).answers.rejection()
        if failure is None:
            await self._app(scope, receive, send)
        else:
            await self._reject(failure, scope, receive, send)

    async def _reject(
        self, failure: HarmonyFailure, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Rejects the request or WebSocket handshake with ``failure``, in its API's format."""
        response = self._error_at(scope["path"])(failure)
        if failure.code == SHUTTING_DOWN:  # the client is to connect to another server
            response.headers["Connection"] = "close"
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(response)
        else:
            await response(scope, receive, send)

    def may_read(self, origin: str, host: str | None) -> bool:
        """Whether pages of ``origin`` may use the server at ``host``."""
        if any(fnmatchcase(origin.lower(), pattern.lower()) for pattern in self._origins):
            return True
        if origin.lower().startswith(_PROGRAMS):
            return True
        parts = _split(origin)
        if parts is None or not parts[0]:  # any page can have the origin `null`
            return False
        name, place = parts
        local = name == "localhost" or name.endswith(".localhost")
        return local or _is_address(name, loopback=True) or place == (host or "").lower()

    def is_own(self, host: str) -> bool:
        """Whether only this server can have the name ``host``, which may have a port."""
        parts = _split(f"http://{host}")
        if parts is None:
            return False
        name = parts[0]
        return (
            "." not in name  # an IPv6 address, or a name without a domain
            or _is_address(name)
            or name.endswith(_UNOWNED)
            or name == self._name
            or any(fnmatchcase(name, pattern.lower()) for pattern in self._hosts)
        )


_MAX_LOGGED = 100
"""Maximum number of distinct rejections to log: their texts contain what clients send."""


def _split(origin: str) -> tuple[str, str] | None:
    """The host of ``origin``, without and with its port; ``None`` if it is invalid."""
    try:
        parts = urlsplit(origin.lower())
        return (parts.hostname or "").rstrip("."), parts.netloc
    except ValueError:
        return None


def _is_address(name: str, *, loopback: bool = False) -> bool:
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not loopback
