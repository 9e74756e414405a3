"""Which web pages may use the server: the check that a browser leaves to whom it talks to.

A server without an API key trusts whoever can reach it, and a browser lets every page reach it:

- A page may send a POST to any address. With ``Content-Type: text/plain`` the browser does not even
  ask first (https://fetch.spec.whatwg.org/#cors-safelisted-request-header); the page cannot read
  the answer, but the model has worked for it, and what was stored or deleted stays so. It may open
  any WebSocket, and read all that comes back.
- A page of ``evil.example`` whose name is made to resolve to this machine (DNS rebinding) is of the
  server's own origin: it may read everything. ``Origin`` and ``Host`` both say ``evil.example``.

So, as long as there is no key, ``Origin`` has to be this server's own, local, or allowed by the
operator, and ``Host`` has to be a name that nobody else can own. A program sends no ``Origin`` and
reaches the server by such a name: it notices nothing. With a key, the key is the check: a page does
not have it.

An origin that may use the server may read its answers, too: it gets the headers of the CORS
protocol (https://fetch.spec.whatwg.org/#http-cors-protocol), preflight included, key or not.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable
from fnmatch import fnmatchcase
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.server.apis import api_at
from vllm_mlx_harmony.server.errors import error_response
from vllm_mlx_harmony.server.host import host_of

logger = logging.getLogger("vllm_mlx_harmony")

ORIGINS_VARIABLE = "VLLM_MLX_HARMONY_ORIGINS"
"""Environment variable: origins of pages that may use the server, separated by commas: patterns
such as ``https://chat.example.com``, ``vscode-webview://*`` or ``*``."""

HOSTS_VARIABLE = "VLLM_MLX_HARMONY_HOSTS"
"""Environment variable: names by which the server may be reached, separated by commas: patterns
such as ``llm.example.com`` or ``*.example.com``."""

_UNOWNED = (".local", ".localhost", ".internal", ".home.arpa")
"""Endings of names that no public DNS resolves (RFC 6762, RFC 6761, ICANN's resolution of
2024-07-29, RFC 8375): no stranger can make one point here. Docker's ``host.docker.internal`` is
one of them."""


class OriginCheck:
    """ASGI middleware: refuses with 403 what a foreign page sends, and lets allowed pages read.

    ``origins`` and ``hosts`` are the patterns of the two variables; ``name`` is this machine's.
    """

    def __init__(
        self,
        app: ASGIApp,
        origins: Iterable[str] | None = None,
        hosts: Iterable[str] | None = None,
        name: str | None = None,
    ) -> None:
        self._app = app
        self._origins = _patterns(ORIGINS_VARIABLE) if origins is None else tuple(origins)
        self._hosts = _patterns(HOSTS_VARIABLE) if hosts is None else tuple(hosts)
        self._name = (socket.gethostname() if name is None else name).lower()
        self._logged: set[str] = set()
        self._cors = _Cors(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers.get("host")
        keyed = host_of(HTTPConnection(scope)).requires_key
        problem = None if keyed else self._problem(origin, host)
        if problem is not None:
            await self._reject(problem, scope, receive, send)
        elif origin is not None and self.may_read(origin, host):
            await self._cors(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def may_read(self, origin: str, host: str | None) -> bool:
        """Whether pages of ``origin`` may use a server that is reached as ``host``."""
        if any(fnmatchcase(origin.lower(), pattern) for pattern in self._origins):
            return True
        parts = _split(origin)
        if parts is None or not parts[0]:  # `null` is what any page can make itself be
            return False
        name, place = parts
        local = name == "localhost" or name.endswith(".localhost")
        return local or _is_address(name, loopback=True) or place == (host or "").lower()

    def _problem(self, origin: str | None, host: str | None) -> str | None:
        """What is wrong with where a request comes from, and what to do about it."""
        if host is not None and not self._is_ours(host):
            return (
                f"the host name {host!r} is not one of this server's: without an API key it "
                f"answers only to names that nobody else can own. Set {HOSTS_VARIABLE}, or an "
                "API key"
            )
        if origin is not None and not self.may_read(origin, host):
            return (
                f"pages of {origin!r} may not use this server, which has no API key. "
                f"Set {ORIGINS_VARIABLE}, or an API key"
            )
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether ``host``, with or without a port, is a name that only this server can have."""
        parts = _split(f"http://{host}")
        if parts is None:
            return False
        name = parts[0]
        return (
            "." not in name  # an address of version 6, or a name without a domain
            or _is_address(name)
            or name.endswith(_UNOWNED)
            or name == self._name
            or any(fnmatchcase(name, pattern) for pattern in self._hosts)
        )

    async def _reject(self, problem: str, scope: Scope, receive: Receive, send: Send) -> None:
        if problem not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(problem)
            logger.warning("refused: %s", problem)
        body = api_at(scope["path"]).error_body
        response = error_response(
            body, RequestError(problem, status=403, code="origin_not_allowed")
        )
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(response)
        else:
            await response(scope, receive, send)


class _Cors(CORSMiddleware):
    """Starlette's CORS headers, for requests that were let through: their origin is allowed."""

    def __init__(self, check: OriginCheck) -> None:
        super().__init__(
            check._app, allow_methods="*", allow_headers="*", allow_private_network=True
        )

    def is_allowed_origin(self, origin: str) -> bool:
        return True


_MOST_LOGGED = 100
"""Different refusals that are logged: a stranger chooses what they say."""


def _patterns(variable: str) -> tuple[str, ...]:
    given = os.environ.get(variable, "").lower().split(",")
    return tuple(pattern for each in given if (pattern := each.strip()))


def _split(origin: str) -> tuple[str, str] | None:
    """The name in ``origin``, and the name with its port; ``None`` when it is no address."""
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
