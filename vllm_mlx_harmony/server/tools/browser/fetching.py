"""Reads a page over HTTP: of a public address, within limits, and politely.

Each request goes through the guard of `guarded_http`, a redirect like any other request: it
resolves the host once, connects to the address that it has checked, and accepts no private one
unless the operator has named its host (``VLLM_MLX_HARMONY_WEB_INTRANET``). Nothing of the client or
of the operator is sent along, and no cookie is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import httpx2

from vllm_mlx_harmony.server.tools import guarded_http
from vllm_mlx_harmony.server.tools.guarded_http import UrlPattern
from vllm_mlx_harmony.server.tools.tool_server import ToolError

SECONDS = 20.0
"""Time limit of a page, redirects included."""

MAX_BYTES = 2 * 2**20
"""Bytes of a page that are read. The rest is cut off."""

MAX_REDIRECTS = 5
"""As RFC 2068 recommended: more usually indicate a loop."""

MAX_URL = 2_000
"""Characters of a URL, as in most browsers and search engines."""

FIRST_OPEN_PORT = 1024
"""Below it, only the ports of HTTP and HTTPS are used: others belong to services that are not web
sites, such as mail servers."""

HEADERS = (
    ("User-Agent", "vllm-mlx-harmony (opens single pages for a user)"),
    ("Accept", "text/html,application/xhtml+xml,text/*;q=0.9,application/json;q=0.9,*/*;q=0.1"),
    ("Accept-Language", "en,*;q=0.5"),
)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The beginning of a page. ``url`` is where it was found, ``content_type`` in lower case."""

    url: str
    content: bytes
    content_type: str
    charset: str | None
    cut: bool = False


class Fetcher:
    """Fetches pages, one at a time from each host. ``intranet``: patterns of URLs whose hosts may
    have private addresses."""

    def __init__(self, intranet: Sequence[UrlPattern] = ()) -> None:
        self._intranet = tuple(intranet)
        self._hosts: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, url: str) -> Fetched:
        """The page at ``url``. Raises ``ToolError``."""
        try:
            async with asyncio.timeout(SECONDS):
                parsed = read_url(url)
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._get(parsed)
                    if isinstance(found, Fetched):
                        return found
                    parsed = found
        except TimeoutError as error:
            raise ToolError("the page was not sent in time", "url_not_accessible") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise ToolError(f"the page cannot be read: {why}", "url_not_accessible") from error
        raise ToolError("the page redirects too often", "url_not_accessible")

    async def _get(self, url: httpx2.URL) -> Fetched | httpx2.URL:
        """The page, or the URL that it redirects to."""
        private = any(pattern.names_host and pattern.allows(url) for pattern in self._intranet)
        lock = self._hosts.setdefault(url.host, asyncio.Lock())
        async with (
            lock,
            guarded_http.client(url, HEADERS, private=private) as client,
            client.stream("GET", url) as response,
        ):
            if response.has_redirect_location:
                return read_url(str(url.join(response.headers["location"])))
            if response.status_code != _OK:
                problem = f"the server responds with {response.status_code}"
                raise ToolError(
                    f"{problem} {response.reason_phrase}".rstrip(), "url_not_accessible"
                )
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            parts, size = [], 0
            async for part in response.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size >= MAX_BYTES:
                    break
            content = b"".join(parts)[:MAX_BYTES]
            charset = response.charset_encoding
            return Fetched(str(url), content, kind, charset, cut=size >= MAX_BYTES)


def read_url(text: str) -> httpx2.URL:
    """The URL of a page, without its fragment. Raises ``ToolError`` for any other."""
    if len(text) > MAX_URL:
        raise ToolError("the URL is too long", "url_too_long")
    try:
        url = httpx2.URL(text.strip())
    except (httpx2.InvalidURL, ValueError, TypeError) as error:
        raise ToolError("this is not a URL", "invalid_tool_input") from error
    port = guarded_http.port_of(url)
    if url.scheme not in ("http", "https") or not url.host:
        raise ToolError("only URLs with http:// or https:// can be opened", "url_not_allowed")
    if url.userinfo:
        raise ToolError("URLs with a user name or password cannot be opened", "url_not_allowed")
    if port < FIRST_OPEN_PORT and port not in (80, 443):
        raise ToolError(f"pages at port {port} cannot be opened", "url_not_allowed")
    return url.copy_with(fragment=None)


_OK = 200
