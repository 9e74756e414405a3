"""``Browser``: the tool server of ``--web-search``, with the tools that gpt-oss knows.

``search`` shows results, ``open`` a page, its link or another part of it, ``find`` the matches in a
page. Each result is a page under the next cursor of its conversation (`core.pages`). The pages of
earlier turns are those that the prompt shows; they are fetched again if they are not cached.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vllm_mlx_harmony.core import lru, vocab
from vllm_mlx_harmony.core.pages import Page, results_page, without_marks
from vllm_mlx_harmony.core.turn import BROWSER, Tool, WebLimits
from vllm_mlx_harmony.server.tools.browser.engines import SearchEngine
from vllm_mlx_harmony.server.tools.browser.fetching import Fetcher, read_url
from vllm_mlx_harmony.server.tools.browser.reading import Document, read, wrapped
from vllm_mlx_harmony.server.tools.tool_server import ToolError, ToolResult
from vllm_mlx_harmony.tasks import in_thread

VIEW_TOKENS, MAX_VIEW_TOKENS = 1_024, 4_096
"""Tokens of a page that are shown if the model asks for no number of lines, and if it does. The
first is that of the browser in gpt-oss's repository."""

MAX_RESULTS, MAX_EXTRACT = 20, 400
"""Results of a search, and characters of the extract of each."""

MAX_QUERY, MAX_PATTERN = 1_000, 200
"""Characters of a query and of a pattern."""

MAX_MATCHES, MATCH_LINES = 50, 4
"""Matches in a page, and the lines that are shown of each, as in gpt-oss's repository."""

CACHE_BYTES, CACHE_SECONDS = 64 * 2**20, 900.0
"""Size of the cache of pages, and the age at which a page is fetched again: a model that reads one
in parts, or looks for something in it, should see the same page."""

_NUMBER = {"type": "number", "default": -1}
_TEXT = {"type": "string"}

TOOLS = (
    Tool(
        "search",
        "Searches the web and shows the results.",
        {
            "type": "object",
            "properties": {
                "query": _TEXT,
                "topn": {"type": "number", "default": 10},
                "source": _TEXT,
            },
            "required": ["query"],
        },
        read_only=True,
    ),
    Tool(
        "open",
        "Shows a page, a link of it, or another part of it.",
        {
            "type": "object",
            "properties": {
                "id": {"type": ["number", "string"], "default": -1},
                "cursor": _NUMBER,
                "loc": _NUMBER,
                "num_lines": _NUMBER,
                "view_source": {"type": "boolean", "default": False},
                "source": _TEXT,
            },
        },
        read_only=True,
    ),
    Tool(
        "find",
        "Shows where a text occurs in a page.",
        {
            "type": "object",
            "properties": {"pattern": _TEXT, "cursor": _NUMBER},
            "required": ["pattern"],
        },
        read_only=True,
    ),
)
"""The parameters are those of openai-harmony's built-in tool, which is what the model is shown."""


class Browser:
    """The browser as a ``ToolServer``. A conversation uses a `session` of it."""

    label, description, problem = BROWSER, "", ""
    tools = TOOLS
    timeout = 60.0

    def __init__(self, engine: SearchEngine, fetcher: Fetcher) -> None:
        self.engine, self.fetcher = engine, fetcher
        self._cache: lru.ByteLRU[tuple[str, str, bool], tuple[Document, float]]
        self._cache = lru.ByteLRU(CACHE_BYTES, most=1_024)

    async def start(self) -> None:
        """There is nothing to start: the first call connects."""

    async def stop(self) -> None:
        self._cache.cache_clear()

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        return await self.session({}, "").call(tool, arguments)

    def session(
        self, pages: Mapping[int, Page], tenant: str, limits: WebLimits | None = None
    ) -> Session:
        """The browser in a conversation of ``tenant`` that shows ``pages``."""
        return Session(self, pages, tenant, limits or WebLimits())

    async def document(self, url: str, tenant: str, *, source: bool, again: bool) -> Document:
        """The page at ``url``, from the cache unless it is to be fetched ``again``."""
        key = tenant, url, source
        known = None if again else self._cache.get(key)
        if known is not None and known[1] > time.monotonic():
            return known[0]
        fetched = await self.fetcher.fetch(url)
        document = await in_thread(partial(read, fetched, source=source))
        self._cache.put(key, (document, time.monotonic() + CACHE_SECONDS), document.size)
        return document


class Session:
    """The browser in one conversation, as a ``ToolServer``."""

    label, description, problem = BROWSER, "", ""
    tools = TOOLS
    timeout = Browser.timeout

    def __init__(
        self, browser: Browser, pages: Mapping[int, Page], tenant: str, limits: WebLimits
    ) -> None:
        self._browser, self._tenant, self._limits = browser, tenant, limits
        self._pages = dict(pages)
        self._documents: dict[int, Document] = {}
        self._searches = self._fetches = 0

    async def start(self) -> None:
        """It needs no connection."""

    async def stop(self) -> None:
        """It has none."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        match tool:
            case "search":
                page = await self._search(arguments)
            case "open":
                page = await self._open(arguments)
            case "find":
                page = await self._find(arguments)
            case _:
                raise ToolError(f"the browser has no tool {tool}")
        self._pages[page.cursor] = page
        return ToolResult(page.text)

    @property
    def _next(self) -> int:
        return max(self._pages, default=-1) + 1

    # --- The tools

    async def _search(self, arguments: Mapping[str, Any]) -> Page:
        query = " ".join(_string(arguments, "query").split())
        if not query:
            raise ToolError("the query is empty", "invalid_tool_input")
        if len(query) > MAX_QUERY:
            raise ToolError(f"the query has more than {MAX_QUERY} characters", "query_too_long")
        self._searches += 1
        _check(self._searches, self._limits.searches, "searches")
        wanted = _integer(arguments, "topn", 10)
        count = max(1, min(MAX_RESULTS, 10 if wanted < 1 else wanted))
        domains = self._limits
        engine_query = query
        if len(domains.allowed) == 1:  # search engines know this operator
            engine_query = f"{query} site:{domains.allowed[0]}"
        hits = await self._browser.engine.search(engine_query, count)
        results: dict[str, tuple[str, str, list[str]]] = {}
        for hit in hits:
            try:
                url = str(read_url(hit.url))
            except ToolError:
                continue
            if domains.permits(url):
                extract = " ".join(without_marks(hit.extract).split())[:MAX_EXTRACT]
                results.setdefault(url, (hit.title, url, wrapped(extract) if extract else []))
        return results_page(self._next, query, list(results.values())[:count])

    async def _open(self, arguments: Mapping[str, Any]) -> Page:
        target = arguments.get("id", -1)
        if isinstance(target, str) and re.fullmatch(r"\s*-?\d{1,6}\s*", target):
            target = int(target)
        line = _integer(arguments, "loc", -1)
        source = arguments.get("view_source") is True
        if isinstance(target, str):
            url = target
            self._fetches += 1
            _check(self._fetches, self._limits.fetches, "pages")
            document = await self._document(url, source=source, again=True)
        else:
            number, page = _integer(arguments, "id", -1), self._page(arguments)
            document, start = await self._linked(page, number, source=source)
            line = start if line < 0 else line
        return self._view(document, max(line, 0), _integer(arguments, "num_lines", -1))

    async def _linked(self, page: Page, number: int, *, source: bool) -> tuple[Document, int]:
        """What link ``number`` of ``page`` leads to, and the line to begin at; below 0, the page
        itself."""
        if number >= 0 and (matches := _matches(page)):
            if number >= len(matches):
                raise ToolError(f"there is no match {number}", "invalid_tool_input")
            start = max(0, matches[number] - MATCH_LINES)
            return await self._document_of(page, source=source), start
        if not page.url:
            found = page.found
            if not 0 <= number < len(found):
                problem = f"the results have no link {number}: open one from 0 to {len(found) - 1}"
                raise ToolError(problem if found else "there are no results", "invalid_tool_input")
            url = found[number].url
        elif number < 0:
            return await self._document_of(page, source=source), 0
        else:
            links = (await self._document_of(page, source=False)).links
            if number >= len(links):
                raise ToolError(f"the page has no link {number}", "invalid_tool_input")
            url = links[number]
        self._fetches += 1
        _check(self._fetches, self._limits.fetches, "pages")
        return await self._document(url, source=source, again=False), 0

    async def _find(self, arguments: Mapping[str, Any]) -> Page:
        pattern = _string(arguments, "pattern")[:MAX_PATTERN]
        if not pattern.strip():
            raise ToolError("the pattern is empty", "invalid_tool_input")
        page = self._page(arguments)
        if not page.url:
            raise ToolError("open a result to find text in its page", "invalid_tool_input")
        document = await self._document_of(page, source=False)
        wanted = pattern.casefold()
        lines: list[str] = []
        matches = end = 0
        for number, line in enumerate(document.lines):
            if number >= end and wanted in line.casefold() and matches < MAX_MATCHES:
                end = number + MATCH_LINES
                lines += [f"# 【{matches}†match at L{number}】", *document.lines[number:end], ""]
                matches += 1
        heading = f"{_MATCHES} {' '.join(without_marks(pattern).split())}"
        lines = [heading, "", *lines[:-1]] if lines else [f"{heading}: none"]
        cursor = self._next
        self._documents[cursor] = document
        shown = _fitting(lines, 0, MAX_VIEW_TOKENS)
        return Page(cursor, document.title, document.url, 0, shown, len(lines))

    # --- Pages

    def _page(self, arguments: Mapping[str, Any]) -> Page:
        """The page that a call refers to: by its cursor, or the latest one."""
        cursor = _integer(arguments, "cursor", -1)
        if not self._pages:
            raise ToolError("no page is open: search, or open a URL", "invalid_tool_input")
        page = self._pages.get(max(self._pages) if cursor < 0 else cursor)
        if page is None:
            raise ToolError(f"no page has the cursor {cursor}", "invalid_tool_input")
        return page

    async def _document_of(self, page: Page, *, source: bool) -> Document:
        known = None if source else self._documents.get(page.cursor)
        return known or await self._document(page.url, source=source, again=False)

    async def _document(self, url: str, *, source: bool, again: bool) -> Document:
        url = str(read_url(url))
        if not self._limits.permits(url):
            raise ToolError("the request does not allow pages of this site", "url_not_allowed")
        document = await self._browser.document(url, self._tenant, source=source, again=again)
        if not self._limits.permits(document.url):  # after a redirect
            raise ToolError("the request does not allow pages of this site", "url_not_allowed")
        return document

    def _view(self, document: Document, line: int, count: int) -> Page:
        lines, total = document.lines, len(document.lines)
        if line >= total:
            problem = f"the page has no line {line}: its last line is {total - 1}"
            raise ToolError(problem, "invalid_tool_input")
        cursor = self._next
        wanted = lines[line : line + count] if count > 0 else lines[line:]
        shown = _fitting(wanted, line, MAX_VIEW_TOKENS if count > 0 else VIEW_TOKENS)
        self._documents[cursor] = document
        return Page(cursor, document.title, document.url, line, shown, total)


_MATCHES = "Matches of"
_MATCH = re.compile(r"# 【\d+†match at L(\d{1,9})】")


def _matches(page: Page) -> list[int]:
    """The numbers of the lines at which a page of matches has them."""
    if not page.lines[:1] or not page.lines[0].startswith(_MATCHES):
        return []
    return [int(match[1]) for line in page.lines if (match := _MATCH.fullmatch(line))]


def _fitting(lines: Sequence[str], first: int, tokens: int) -> tuple[str, ...]:
    """The first of ``lines`` that have at most ``tokens`` with their numbers; at least one."""
    left = tokens
    for place, line in enumerate(lines):
        left -= len(vocab.encode(f"L{first + place}: {line}\n"))
        if left < 0:
            return tuple(lines[: max(place, 1)])
    return tuple(lines)


def _check(count: int, limit: int | None, what: str) -> None:
    if limit is not None and count > limit:
        raise ToolError(f"the request allows no more {what}", "max_uses_exceeded")


def _string(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ToolError(f"{name} must be a string", "invalid_tool_input")
    return value


def _integer(arguments: Mapping[str, Any], name: str, default: int) -> int:
    """A number, which models also write with a fraction or as a string."""
    value = arguments.get(name)
    if value is None:
        return default
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise ToolError(f"{name} must be a number", "invalid_tool_input") from error
