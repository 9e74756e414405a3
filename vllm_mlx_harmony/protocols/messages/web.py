"""The Messages API: web search and web fetch, as Anthropic's servers write them.

- https://platform.claude.com/docs/en/agents-and-tools/tool-use/web-search-tool
- https://platform.claude.com/docs/en/agents-and-tools/tool-use/web-fetch-tool

The model calls the browser that it was trained with: its searches are ``web_search``, and the pages
that it opens or searches ``web_fetch``, whether or not the request declares that tool, too. The
input is what the model wrote.

``encrypted_content`` has what the model read of a search, so that a client which sends the result
back gives the model the same text again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_mlx_harmony.core.deltas import Citation, ToolFailure, ToolFinished
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.pages import Page, read_page
from vllm_mlx_harmony.core.turn import BROWSER, WebLimits
from vllm_mlx_harmony.protocols.encryption import Cipher
from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.messages.schema import WebTool
from vllm_mlx_harmony.protocols.messages.tool_types import SERVER_TOOLS, WEB_FETCH, WEB_SEARCH
from vllm_mlx_harmony.protocols.validation import unsupported

_NATIVE: Mapping[str, str] = {
    f"{BROWSER}.search": WEB_SEARCH,
    f"{BROWSER}.open": WEB_FETCH,
    f"{BROWSER}.find": WEB_FETCH,
}

_CODES: Mapping[str, tuple[str, ...]] = {
    WEB_SEARCH: ("invalid_tool_input", "max_uses_exceeded", "query_too_long", "too_many_requests"),
    WEB_FETCH: (
        *("invalid_tool_input", "max_uses_exceeded", "too_many_requests", "url_not_accessible"),
        *("url_not_allowed", "url_too_long", "unsupported_content_type"),
    ),
}
"""The documented codes of errors, besides ``unavailable``."""


def native_tool(recipient: str) -> str:
    """The tool of Anthropic's for a call of the browser; empty for any other."""
    return _NATIVE.get(recipient, "")


def recipients_of_native(tool: str) -> tuple[str, ...]:
    """The calls of the browser that are calls of ``tool``."""
    return tuple(recipient for recipient, name in _NATIVE.items() if name == tool)


def native_result(tool: str, finished: ToolFinished, cipher: Cipher) -> object:
    """The content of the result of ``tool``."""
    if finished.failure is not None:
        return _error(tool, finished.failure)
    page = read_page(finished.text)
    if tool == WEB_SEARCH:
        return _results(page, finished.text, cipher)
    source = {"type": "text", "media_type": "text/plain", "data": finished.text}
    document = {"type": "document", "source": source, "title": page.title if page else None}
    return {
        "type": "web_fetch_result",
        "url": page.url if page else "",
        "content": {**document, "citations": {"enabled": True}},
        "retrieved_at": None,
    }


def _error(tool: str, failure: ToolFailure) -> Document:
    code = failure.code if failure.code in _CODES[tool] else "unavailable"
    return {"type": f"{tool}_tool_result_error", "error_code": code}


def _results(page: Page | None, text: str, cipher: Cipher) -> list[Document]:
    """An entry for each result; the first has all that the model read."""
    found = page.found if page else ()
    return [
        {
            "type": "web_search_result",
            "title": result.title,
            "url": result.url,
            "encrypted_content": cipher.encrypt("" if place else text),
            "page_age": None,
        }
        for place, result in enumerate(found)
    ]


def displayed(content: object, cipher: Cipher) -> str | None:
    """What the model read, in the ``content`` of a result which `native_result` made; ``None`` if
    it is from elsewhere."""
    if isinstance(content, list) and content and isinstance(content[0], dict):
        encrypted = content[0].get("encrypted_content")
        text = cipher.decrypt(encrypted) if isinstance(encrypted, str) else None
        return text or None
    data: object = content
    for name in ("content", "source", "data"):
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, str) and read_page(data) else None


def citation_of(citation: Citation) -> Document:
    return {
        "type": "web_search_result_location",
        "url": citation.url,
        "title": citation.title,
        "cited_text": citation.passage,
        "encrypted_index": "",
    }


def limits_of(tools: Sequence[tuple[str, WebTool]], known: WebLimits | None) -> WebLimits | None:
    """What the declared ``tools`` permit, each with its place in the request.

    ``known`` is ``None`` if the tool server cannot be limited. Raises ``RequestError``.
    """
    allowed: list[str] = []
    blocked: list[str] = []
    uses: dict[str, int | None] = {}
    for where, tool in tools:
        if tool.allowed_domains and tool.blocked_domains:
            problem = f"{where}: allowed_domains and blocked_domains cannot both be set"
            raise RequestError(problem, param=where)
        allowed += tool.allowed_domains or ()
        blocked += tool.blocked_domains or ()
        uses[SERVER_TOOLS[tool.type]] = tool.max_uses
    if known is None and (allowed or blocked):
        where = tools[0][0]
        raise unsupported(where, f"{where}: this server's browser cannot be limited to domains")
    limits = WebLimits(tuple(allowed), tuple(blocked), uses.get(WEB_SEARCH), uses.get(WEB_FETCH))
    return None if known is None else limits
