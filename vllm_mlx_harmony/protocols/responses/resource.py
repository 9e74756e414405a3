"""Responses: the documents of ``/v1/responses/…`` other than responses, and their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.core.errors import HarmonyFailure, RequestError, quoted
from vllm_mlx_harmony.core.turn import ResponseInfo
from vllm_mlx_harmony.protocols.events import Document, Event
from vllm_mlx_harmony.protocols.openai_answer import output_details
from vllm_mlx_harmony.protocols.openai_content import call_arguments
from vllm_mlx_harmony.protocols.responses.input_items import CALLS, OUTPUTS
from vllm_mlx_harmony.protocols.responses.local_tools import LOCAL_TOOLS
from vllm_mlx_harmony.protocols.responses.output_items import FIRST_INPUT, key_of, pending
from vllm_mlx_harmony.protocols.responses.schema import Item
from vllm_mlx_harmony.protocols.validation import invalid


def not_found(key: str, *, param: str | None = None) -> RequestError:
    """The error for a response that is not stored: 404.

    ``param`` is ``previous_response_id`` if that field named ``key``.
    """
    code = "previous_response_not_found" if param else "not_found"
    problem = f"{'previous response' if param else 'response'} with id {quoted(key)} not found"
    return RequestError(problem, param=param, code=code, status=404)


def not_ready(key: str) -> RequestError:
    """The error for a previous response that has not ended, and cannot be continued yet."""
    problem = (
        f"previous response with id {quoted(key)} is still in progress: wait until it has finished"
    )
    return RequestError(problem, param="previous_response_id", code="previous_response_not_ready")


def is_running(document: Mapping[str, object]) -> bool:
    """Whether a response had not ended when it was stored."""
    return document.get("status") in ("queued", "in_progress")


def lost(
    document: Mapping[str, object],
    problem: str = "the server that was generating this response has stopped",
) -> Document:
    """A response that will not be continued, because of ``problem``."""
    error = {"code": "server_error", "message": problem}
    return {**document, "status": "failed", "error": error}


def running_event(document: Mapping[str, object], number: int) -> Event:
    """Says again that a background response is running. It has the sequence number of the last
    event that the client got, so that a client that reconnects continues behind that one."""
    kind = "response.queued" if document.get("status") == "queued" else "response.in_progress"
    return pending(kind, response=document)(max(number, 0))


def failed_event(document: Mapping[str, object], number: int) -> Event:
    """The last event of a response that has failed, with its sequence number."""
    return pending("response.failed", response=document)(number)


def error_event(failure: HarmonyFailure, number: int) -> Event:
    """The last event of a stream that ends although the response has not failed."""
    about = {"code": failure.code, "message": failure.message, "param": failure.param}
    return pending("error", **about)(number)


def deleted(key: str) -> Document:
    """The answer to ``DELETE /v1/responses/{key}``."""
    return {"id": key, "object": "response", "deleted": True}


def input_tokens(count: int) -> Document:
    """The answer to ``POST /v1/responses/input_tokens``."""
    return {"object": "response.input_tokens", "input_tokens": count}


def usage_of(usage: Usage) -> Document:
    """``usage`` as every document of this API has it."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": output_details(usage),
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
    **{tool.call: tool.prefix for tool in LOCAL_TOOLS.values()},
    **{f"{tool.call}_output": f"{tool.prefix}o" for tool in LOCAL_TOOLS.values()},
    "agent_message": "am",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
    "code_interpreter_call": "ci",
}
_WITH_STATUS = frozenset({*CALLS, *OUTPUTS, "message"})
_PLAIN = frozenset({"text", "input_text", "output_text"})


@dataclass(frozen=True, slots=True)
class SentItem:
    """What is read back of an item. A request keeps these, one object for each item: a collection
    of garbage stops every thread while it visits what 16,000 of them consist of."""

    type: str
    id: str | None
    raw: Document


def input_items(items: Sequence[Item | SentItem], info: ResponseInfo) -> list[Document]:
    """``items`` as they were sent, each with the fields that the schema requires of an item that is
    read back: an id, a type, a status, and content as a list of parts.
    """
    documents: list[Document] = []
    for at, item in enumerate(items):
        sent = item.raw
        document: Document = {**sent, "type": item.type}
        key = f"{_PREFIXES.get(item.type, 'item')}_{key_of(info, FIRST_INPUT + at)}"
        document["id"] = item.id or sent.get("id") or key
        if item.type in _WITH_STATUS:
            document["status"] = sent.get("status") or "completed"
        match item.type:
            case "message":
                document["content"] = _content(sent)
            case "reasoning":
                document["summary"] = sent.get("summary") or []
            case "function_call":
                document["arguments"] = call_arguments(sent.get("arguments"), "arguments")
            case "function_call_output" | "custom_tool_call_output":
                document["output"] = sent.get("output") or ""
            case "tool_search_call" | "tool_search_output":
                document["execution"] = sent.get("execution") or "client"
        documents.append(document)
    return documents


def _content(message: Document) -> list[Document]:
    """The content of a message as parts, whose types depend on its role."""
    content = message.get("content") or []
    parts: list[Document] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part["type"] not in _PLAIN:
            parts.append(part)
        elif message.get("role") == "assistant":
            annotations = part.get("annotations") or []
            parts.append({**part, "type": "output_text", "annotations": annotations})
        else:
            parts.append({**part, "type": "input_text"})
    return parts


_MAX_LIMIT = 100


def page(items: Sequence[Mapping[str, object]], query: Mapping[str, str]) -> Document:
    """One page of ``items`` as the query (``after``, ``limit``, ``order``) asks for it.

    Newest first unless ``order`` is ``asc``; 20 items unless ``limit`` is another number up to
    100. A page without items has empty ids: the clients' models want strings. Raises
    ``RequestError`` naming the parameter for anything else.
    """
    order = query.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise invalid("order", "order must be 'asc' or 'desc'")
    ordered = list(items if order == "asc" else reversed(items))
    ids = [item["id"] for item in ordered]
    key, start = query.get("after"), 0
    if key:
        if key not in ids:
            raise invalid("after", f"there is no item {quoted(key)}")
        start = ids.index(key) + 1
    digits = query.get("limit") or "20"
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= len(str(_MAX_LIMIT))
    limit = int(digits) if is_number else 0
    if not 1 <= limit <= _MAX_LIMIT:
        raise invalid("limit", f"limit must be a number from 1 to {_MAX_LIMIT}")
    data = ordered[start : start + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": start + limit < len(ordered),
    }
