"""The search engines that ``--web-search`` names.

- ``ddgs``: the package of that name (https://github.com/deedy5/ddgs), which asks public search
  engines as a browser does. It needs no key. Those engines may refuse who asks too often.
- ``searxng:URL``: an instance of SearXNG, whose ``search.formats`` include ``json``:
  https://docs.searxng.org/dev/search_api.html
- ``brave``: Brave's API, with ``BRAVE_API_KEY``: https://api-dashboard.search.brave.com/documentation
- ``tavily``: Tavily's API, with ``TAVILY_API_KEY``:
  https://docs.tavily.com/documentation/api-reference/endpoint/search
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import unescape
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit

import httpx2

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.server.tools import guarded_http
from vllm_mlx_harmony.server.tools.tool_server import ToolError

SECONDS = 15.0
"""Time limit of one search."""

MAX_BYTES = 2 * 2**20
"""Maximum size of a search engine's response."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A result of a search engine."""

    title: str
    url: str
    extract: str = ""


class SearchEngine(Protocol):
    @property
    def name(self) -> str:
        """For the operator: without keys."""

    async def search(self, query: str, count: int) -> Sequence[Hit]:
        """At most about ``count`` results, best first. Raises ``ToolError``."""


def engine_of(text: str, environment: Mapping[str, str] = os.environ) -> SearchEngine:
    """The engine that ``--web-search`` names. Raises ``HostError`` for an unknown one, and where a
    key or a package is missing."""
    name, _, url = text.partition(":")
    if name == "ddgs" and not url:
        return Ddgs()
    if name == "searxng" and urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname:
        return JsonEngine(f"searxng at {url}", _searxng(url), ("results",), "content", private=True)
    if name in _KEYED and not url:
        variable, (request, path, extract) = f"{name.upper()}_API_KEY", _KEYED[name]
        key = environment.get(variable, "").strip()
        if not key:
            raise HostError(f"--web-search {name} requires {variable}")
        return JsonEngine(name, partial(request, key), path, extract)
    known = ", ".join(("ddgs", "searxng:URL", *_KEYED))
    raise HostError(f"--web-search: {text!r} is not one of {known}")


@dataclass(frozen=True, slots=True)
class _Request:
    url: str
    headers: Sequence[tuple[str, str]] = ()
    body: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class JsonEngine:
    """An engine with an API in JSON. Its results are at ``path``, each with ``title``, ``url`` and
    the field ``extract``. ``private``: the operator has named its address."""

    name: str
    request: Callable[[str, int], _Request] = field(repr=False)
    path: tuple[str, ...]
    extract: str
    private: bool = False

    async def search(self, query: str, count: int) -> Sequence[Hit]:
        request = self.request(query, count)
        try:
            async with asyncio.timeout(SECONDS):
                status, content = await self._sent(request)
        except TimeoutError as error:
            raise ToolError("the search engine does not respond", "unavailable") from error
        except httpx2.HTTPError as error:
            raise ToolError(
                f"the search engine cannot be reached: {error}", "unavailable"
            ) from error
        if status == _TOO_MANY:
            raise ToolError("the search engine refuses further searches", "too_many_requests")
        if status != _OK:
            raise ToolError(f"the search engine responds with {status}", "unavailable")
        try:
            found = json.loads(content)
            for name in self.path:
                found = found.get(name) or ()
            return [hit for result in found if (hit := self._hit(result))]
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise ToolError("the search engine's response is malformed", "unavailable") from error

    async def _sent(self, request: _Request) -> tuple[int, bytes]:
        """The status and the body of the response."""
        url = httpx2.URL(request.url)
        method = "GET" if request.body is None else "POST"
        parts, size = [], 0
        async with (
            guarded_http.client(url, request.headers, private=self.private) as client,
            client.stream(method, url, json=request.body) as response,
        ):
            async for part in response.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size > MAX_BYTES:
                    raise httpx2.ReadError("its response is too long")
            return response.status_code, b"".join(parts)

    def _hit(self, result: object) -> Hit | None:
        if not isinstance(result, dict):
            return None
        url, title, extract = (result.get(name) for name in ("url", "title", self.extract))
        if not isinstance(url, str):
            return None
        texts = (value if isinstance(value, str) else "" for value in (title, extract))
        return Hit(next(texts), url, next(texts))


_OK, _TOO_MANY = 200, 429


def _searxng(url: str) -> Callable[[str, int], _Request]:
    base = url.rstrip("/")
    headers = (("Accept", "application/json"),)
    return lambda query, count: _Request(
        f"{base}/search?{urlencode({'q': query, 'format': 'json'})}", headers
    )


def _brave(key: str, query: str, count: int) -> _Request:
    parameters = urlencode({"q": query, "count": count, "text_decorations": "false"})
    headers = (("Accept", "application/json"), ("X-Subscription-Token", key))
    return _Request(f"https://api.search.brave.com/res/v1/web/search?{parameters}", headers)


def _tavily(key: str, query: str, count: int) -> _Request:
    body = {"query": query, "max_results": count}
    return _Request("https://api.tavily.com/search", (("Authorization", f"Bearer {key}"),), body)


_KEYED: Mapping[str, tuple[Callable[[str, str, int], _Request], tuple[str, ...], str]] = {
    "brave": (_brave, ("web", "results"), "description"),
    "tavily": (_tavily, ("results",), "content"),
}


class Ddgs:
    """The package ``ddgs``, which connects by itself, to the search engines that it knows."""

    name = "ddgs"

    def __init__(self) -> None:
        try:
            import ddgs  # noqa: F401
        except ImportError as error:
            raise HostError("--web-search ddgs requires the package ddgs") from error

    async def search(self, query: str, count: int) -> Sequence[Hit]:
        try:
            async with asyncio.timeout(SECONDS):
                results = await asyncio.to_thread(self._search, query, count)
        except TimeoutError as error:
            raise ToolError("the search engines do not respond", "unavailable") from error
        return [
            Hit(
                unescape(result.get("title") or ""),
                result["href"],
                unescape(result.get("body") or ""),
            )
            for result in results
            if isinstance(result.get("href"), str)
        ]

    def _search(self, query: str, count: int) -> Sequence[Mapping[str, Any]]:
        from ddgs import DDGS
        from ddgs.exceptions import DDGSException, RatelimitException

        try:
            found: Sequence[Mapping[str, Any]] = DDGS(timeout=10).text(query, max_results=count)
        except RatelimitException as error:
            raise ToolError(
                "the search engines refuse further searches", "too_many_requests"
            ) from error
        except DDGSException as error:
            if "No results" in str(error):
                return []
            raise ToolError(f"the search failed: {error}", "unavailable") from error
        return found
