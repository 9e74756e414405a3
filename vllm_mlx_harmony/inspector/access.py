"""Who may read the inspector: pages of this server only, behind its API key if it has one.

A browser sends no ``Authorization`` when it opens a page. So the page itself is open and has
nothing in it but a form for the key. The key is checked as that of any request, and exchanged for
a cookie: random, ``HttpOnly`` (no script reads it), ``SameSite=Strict`` (no other site sends it),
valid for half a day. The server remembers which key it stands for and checks that again with each
request, so a key that is withdrawn ends its sessions. With ``Authorization``, no cookie is needed.

Other pages are kept out twice, because a server without a key has no cookie: by the header
``Sec-Fetch-Site``, which scripts cannot set, and for browsers that do not send it (those of plain
HTTP addresses other than localhost) by ``Origin``.

https://developer.mozilla.org/en-US/docs/Web/HTTP/Reference/Headers/Sec-Fetch-Site
"""

from __future__ import annotations

import secrets
import time
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from vllm_mlx_harmony.server.front_end import host_of
from vllm_mlx_harmony.server.host import tenant_of

SECONDS = 12 * 3600
"""Seconds for which a cookie is valid. Then the page asks for the key again."""

MAX_SESSIONS = 100
"""Cookies that are valid at a time. One more ends the oldest."""

MAX_KEY_LENGTH = 1_000
"""Characters of a key that is tried. A longer one is invalid; a login may have `routes.MAX_LOGIN`
bytes."""

PATH = "/harmony"

SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
"""Headers of every response: a page loads nothing but its own files, and nothing is stored."""


class Sessions:
    """The keys that cookies stand for."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[bytes, float]] = {}

    async def open(self, request: Request, key: str, response: Response) -> None:
        """Sets a cookie for ``key``. Raises ``HTTPException`` 401 if it is not a valid one."""
        if not (key.isascii() and key.isprintable() and len(key) <= MAX_KEY_LENGTH):
            raise HTTPException(401, "Invalid API key")
        header = b"Bearer " + key.strip().encode()
        connection = _with_key(request, header)
        await host_of(connection).authenticate(connection)
        while len(self._keys) >= MAX_SESSIONS:
            del self._keys[next(iter(self._keys))]
        token = secrets.token_urlsafe(32)
        self._keys[token] = header, time.monotonic() + SECONDS
        response.set_cookie(
            _cookie(request),
            token,
            max_age=SECONDS,
            path=PATH,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )

    def close(self, request: Request, response: Response) -> None:
        self._keys.pop(request.cookies.get(_cookie(request), ""), None)
        response.delete_cookie(_cookie(request), path=PATH, httponly=True, samesite="strict")

    async def owner(self, request: Request) -> str | None:
        """The tenant whose requests ``request`` may read; ``None``: all, as there is no key.

        Raises ``HTTPException`` 401.
        """
        if not host_of(request).requires_key:
            return None
        connection: HTTPConnection = request
        if "authorization" not in request.headers:
            key, until = self._keys.get(request.cookies.get(_cookie(request), ""), (b"", 0.0))
            if time.monotonic() >= until:
                raise HTTPException(401, "this server has an API key: log in")
            connection = _with_key(request, key)
        await host_of(connection).authenticate(connection)
        return tenant_of(connection)

    async def is_valid(self, request: Request) -> bool:
        """Whether ``owner`` still accepts ``request``."""
        try:
            await self.owner(request)
        except HTTPException:
            return False
        return True


def check_origin(request: Request) -> None:
    """Raises ``HTTPException`` 403 for a request by a page of another origin."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        own = site == "same-origin" or (site == "none" and request.method == "GET")
    else:
        own = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    if not own:
        raise HTTPException(403, "only the inspector's own pages may do this")


def _with_key(request: Request, header: bytes) -> HTTPConnection:
    other_headers = [header for header in request.scope["headers"] if header[0] not in _KEYS]
    return HTTPConnection(
        {**request.scope, "headers": [*other_headers, (b"authorization", header)]}
    )


_KEYS = (b"authorization", b"x-api-key")


def _cookie(request: Request) -> str:
    """The cookie's name. Browsers send cookies to all ports of a host."""
    return f"harmony_inspector_{request.url.port or 0}"
