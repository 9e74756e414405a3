"""Responses: the documents of ``/v1/responses/…`` other than responses, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.core.errors import HarmonyFailure, RequestError, quoted
from vllm_mlx_harmony.core.turn import ResponseInfo
from vllm_mlx_harmony.protocols.events import Event, encode
from vllm_mlx_harmony.protocols.openai_content import call_arguments
from vllm_mlx_harmony.protocols.responses.input_items import CALLS, OUTPUTS
from vllm_mlx_harmony.protocols.responses.schema import NO_CONVERSATIONS, Item, read_item


def not_found(key: str, *, param: str | None = None) -> RequestError:
    """The error for a response that is not stored: 404.

    ``param`` is ``previous_response_id`` if that field named ``key``.
    """
    code = "previous_response_not_found" if param else "not_found"
    problem = f"{'previous response' if param else 'response'} with id {quoted(key)} not found"
    return RequestError(problem, param=param, code=code, status=404)


def no_conversations() -> RequestError:
    """The error for every path of OpenAI's conversations: 404, with the alternative."""
    return RequestError(f"not found: {NO_CONVERSATIONS}", code="not_found", status=404)


def not_ready(key: str) -> RequestError:
    """The error for a previous response that has not ended, and cannot be continued yet."""
    problem = f"previous response with id {quoted(key)} has not ended yet: wait until it has"
    return RequestError(problem, param="previous_response_id", code="previous_response_not_ready")


def is_running(document: Mapping[str, Any]) -> bool:
    """Whether a response had not ended when it was stored."""
    return document.get("status") in ("queued", "in_progress")


def lost(document: Mapping[str, Any]) -> dict[str, Any]:
    """A response that will not be continued, because its server has stopped."""
    error = {
        "code": "server_error",
        "message": "the server that generated this response has stopped",
    }
    return {**document, "status": "failed", "error": error}


def failed_event(document: Mapping[str, Any], number: int) -> Event:
    """The last event of a response that has failed, the one with this sequence number."""
    kind = "response.failed"
    event = {"type": kind, "sequence_number": number, "response": document}
    return Event(encode(event), kind)


def error_event(failure: HarmonyFailure, number: int) -> Event:
    """The last event of a stream that ends although the response has not failed."""
    event = {"type": "error", "sequence_number": number, "code": failure.code}
    return Event(encode({**event, "message": failure.message, "param": failure.param}), "error")


def deleted(key: str) -> dict[str, Any]:
    """The answer to ``DELETE /v1/responses/{key}``."""
    return {"id": key, "object": "response", "deleted": True}


def input_tokens(count: int) -> dict[str, Any]:
    """The answer to ``POST /v1/responses/input_tokens``."""
    return {"object": "response.input_tokens", "input_tokens": count}


def compaction(items: Sequence[Item], response: Mapping[str, Any], info: ResponseInfo) -> Any:
    """The answer to ``POST /v1/responses/compact``: the user's messages among ``items``, which are
    those of the whole conversation, and the output of ``response``, the ``compaction`` item.
    """
    users = [item for item in input_items(items, info) if item.get("role") == "user"]
    return {
        "id": response["id"],
        "object": "response.compaction",
        "created_at": response["created_at"],
        "output": [*users, *response["output"]],
        "usage": response["usage"],
    }


def user_item(text: str) -> Item:
    """A user's message of an earlier response, as an item."""
    return read_item({"type": "message", "role": "user", "content": text})


def usage_of(usage: Usage) -> dict[str, Any]:
    """``usage`` as every document of this API has it."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            **({"tool_output_tokens": usage.tool_tokens} if usage.tool_tokens else {}),
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


# --- The input as a client reads it back: GET /v1/responses/{id}/input_items.

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
    "configuration_update": "cfu",
    "compaction": "cmp",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
    "code_interpreter_call": "ci",
}
_INPUT = 0x8000  # ids of input items count from here, those of output items from 0
_WITH_STATUS = frozenset({*CALLS, *OUTPUTS, "message"})


def input_items(items: Sequence[Item], info: ResponseInfo) -> list[dict[str, Any]]:
    """``items`` as they were sent, each with what the schema wants of an item that is read back.

    That is more than it wants of one that is sent: an id, a type, content as a list of parts.
    """
    return [_listed(item, f"{info.id_seed[:20]}{_INPUT + at:04x}") for at, item in enumerate(items)]


def _listed(item: Item, key: str) -> dict[str, Any]:
    listed = {**item.document, "type": item.type}
    listed["id"] = item.id or listed.get("id") or f"{_PREFIXES.get(item.type, 'item')}_{key}"
    if item.type in _WITH_STATUS:
        listed["status"] = listed.get("status") or "completed"
    if item.type in _FILLED:
        name, filled = _FILLED[item.type]
        listed[name] = filled(item)
    return listed


def _content(item: Item) -> list[dict[str, Any]]:
    given = item.document.get("content") or []
    parts = [{"type": "text", "text": given}] if isinstance(given, str) else given
    return [_listed_part(item, part) for part in parts]


def _listed_part(item: Item, part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] not in _PLAIN:
        return part
    if item.document.get("role") == "assistant":
        return {**part, "type": "output_text", "annotations": part.get("annotations") or []}
    return {**part, "type": "input_text"}


def _arguments(item: Item) -> str:
    return call_arguments(item.document.get("arguments"), "arguments")


_PLAIN = frozenset({"text", "input_text", "output_text"})

_FILLED: dict[str, tuple[str, Callable[[Item], Any]]] = {
    "message": ("content", _content),
    "reasoning": ("summary", lambda item: item.document.get("summary") or []),
    "function_call": ("arguments", _arguments),
    **dict.fromkeys(
        ("function_call_output", "custom_tool_call_output"),
        ("output", lambda item: item.document.get("output") or ""),
    ),
    **dict.fromkeys(
        ("tool_search_call", "tool_search_output"),
        ("execution", lambda item: item.document.get("execution") or "client"),
    ),
}
"""Per item the field that a client may leave out, or send in another shape than it is listed in."""


def page(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """One page of ``items`` as the query (``after``, ``limit``, ``order``) asks for it.

    Newest first unless ``order`` is ``asc``; 20 items unless ``limit`` is another number up to
    100. A page without items has empty ids: the clients' models want strings. Raises
    ``RequestError`` naming the parameter for anything else.
    """
    order = query.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise RequestError("order must be 'asc' or 'desc'", param="order", code="invalid_value")
    ordered = list(items if order == "asc" else reversed(items))
    start, limit = _after(ordered, query.get("after")), _limit(query.get("limit"))
    data = ordered[start : start + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": start + limit < len(ordered),
    }


def _after(items: Sequence[Mapping[str, Any]], key: str | None) -> int:
    if not key:
        return 0
    for position, item in enumerate(items):
        if item["id"] == key:
            return position + 1
    raise RequestError(f"there is no item {quoted(key)}", param="after", code="invalid_value")


_MOST = 100


def _limit(requested: str | None) -> int:
    if not requested:
        return 20
    number = (
        int(requested)
        if requested.isascii() and requested.isdigit() and len(requested) <= len(str(_MOST))
        else 0
    )
    if not 1 <= number <= _MOST:
        problem = f"limit must be a number from 1 to {_MOST}"
        raise RequestError(problem, param="limit", code="invalid_value")
    return number
