"""The Messages API: turns deltas into events, or into a message."""

from __future__ import annotations

from collections.abc import Sequence
from json import loads
from typing import Any, Literal, Protocol, TypeAlias

from typing_extensions import assert_never

from vllm_mlx_harmony.core.deltas import (
    Closed,
    Delta,
    Failed,
    Finished,
    FinishReason,
    Kind,
    Opened,
    Progress,
    Started,
    Text,
    ToolFinished,
    ToolStarted,
    Usage,
)
from vllm_mlx_harmony.core.errors import HarmonyFailure, OutputError, PromptTooLong
from vllm_mlx_harmony.core.turn import PYTHON, Namespace, ResponseInfo
from vllm_mlx_harmony.protocols.encryption import Cipher
from vllm_mlx_harmony.protocols.events import REASONING_ENDED_BY, Event, encode, quote
from vllm_mlx_harmony.protocols.messages.partial_json import ObjectText
from vllm_mlx_harmony.protocols.messages.schema import THREAD_UNSUPPORTED
from vllm_mlx_harmony.protocols.server_calls import CodeArguments

PING = Event('{"type":"ping"}', "ping")
"""Keeps a connection alive while a long prompt is prefilled. Allowed anywhere in a stream."""

Display: TypeAlias = Literal["shown", "encrypted", "hidden", "preambles"]
"""Reasoning as blocks with text and signature, with the signature alone, or not at all.

``preambles``: no reasoning, and preambles in its place, as Anthropic's ``between_tools`` has it:
what the model says between its calls comes as thinking, and the text of an answer is the answer
alone.
"""


UPDATE = "<|channel|>commentary<|message|>"
"""Prefix of the encrypted text of a preamble that is shown as thinking."""


def counted(prompt_tokens: int) -> dict[str, Any]:
    """The response of ``count_tokens`` for a prompt of ``prompt_tokens``."""
    return {"input_tokens": prompt_tokens}


# --- Errors.

_CALLERS_FAULT = range(400, 500)
_ERRORS: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def request_id(info: ResponseInfo) -> str:
    """The ``request-id`` of the answer that ``info`` is of."""
    return f"req_{info.id_seed[:24]}"


def error_body(error: HarmonyFailure, request_id: str | None = None) -> dict[str, Any]:
    """``error`` in Anthropic's format, with the ``type`` that api.anthropic.com sends for it."""
    other = "invalid_request_error" if error.status in _CALLERS_FAULT else "api_error"
    details = {"type": _ERRORS.get(error.status, other), "message": _message(error)}
    return {"type": "error", "error": {**details, **_details(error)}, "request_id": request_id}


def _details(error: HarmonyFailure) -> dict[str, Any]:
    """The machine-readable details that Anthropic's client looks for."""
    if error.code != THREAD_UNSUPPORTED:
        return {}
    return {"details": {"error_code": error.code, "unsupported": [error.param]}}


def _message(error: HarmonyFailure) -> str:
    """The message, which names the invalid field: the format has no field for it.

    Claude Code reads the two numbers and shortens the conversation by their difference.
    """
    if isinstance(error, PromptTooLong):
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.window} maximum"
    if error.param is None or error.param in error.message:
        return error.message
    return f"{error.param}: {error.message}"


# --- Content blocks, a class for each: the text that is sent of a message, and the document.


class _Block(Protocol):
    """A block while it is being written.

    ``delta`` is the type of its deltas and ``name`` the field that carries their text.
    """

    delta: str
    name: str

    def take(self, text: str) -> str:
        """Adds to the message; returns the text to send."""

    def rest(self) -> str:
        """The remaining text to send when the message ends."""

    def signature(self) -> str:
        """The signature of the whole text; empty if the block has none."""

    def document(self, text: str, signature: str) -> dict[str, Any]:
        """The block with ``text``, all that was sent or nothing."""


class _TextBlock:
    delta, name = "text_delta", "text"

    def take(self, text: str) -> str:
        return text

    def rest(self) -> str:
        return ""

    def signature(self) -> str:
        return ""

    def document(self, text: str, signature: str) -> dict[str, Any]:
        return {"type": "text", "text": text}


class _ThinkingBlock:
    """Collects its text, shown or not: the signature encrypts all of it, preceded by ``mark``."""

    delta, name = "thinking_delta", "thinking"

    def __init__(self, cipher: Cipher, *, shown: bool, mark: str = "") -> None:
        self._cipher = cipher
        self._shown = shown
        self._parts = [mark]

    def take(self, text: str) -> str:
        self._parts.append(text)
        return text if self._shown else ""

    def rest(self) -> str:
        return ""

    def signature(self) -> str:
        return self._cipher.encrypt("".join(self._parts))

    def document(self, text: str, signature: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": text, "signature": signature}


class _ToolUseBlock:
    delta, name = "input_json_delta", "partial_json"

    def __init__(self, call_id: str, tool: str) -> None:
        self._id = call_id
        self._tool = tool
        self._input = ObjectText()

    def take(self, text: str) -> str:
        return self._input.feed(text)

    def rest(self) -> str:
        return self._input.close()

    def signature(self) -> str:
        return ""

    def document(self, text: str, signature: str) -> dict[str, Any]:
        given = loads(text) if text else {}
        return {"type": "tool_use", "id": self._id, "name": self._tool, "input": given}


class _McpToolUseBlock(_ToolUseBlock):
    """A call of a tool that the server runs. Code becomes a field, since input is an object."""

    def __init__(self, call_id: str, label: str, tool: str, *, code: bool) -> None:
        super().__init__(_mcp_id(call_id), tool)
        self._label = label
        self._code = CodeArguments() if code else None

    def take(self, text: str) -> str:
        return super().take(self._code.feed(text) if self._code else text)

    def rest(self) -> str:
        return (super().take(self._code.close()) if self._code else "") + super().rest()

    def document(self, text: str, signature: str) -> dict[str, Any]:
        block = super().document(text, signature)
        return {**block, "type": "mcp_tool_use", "server_name": self._label}


def _mcp_id(call_id: str) -> str:
    """The id of the call's block. Calls of earlier turns already have such an id."""
    head, _, key = call_id.partition("_")
    return f"mcptoolu_{key}" if head == "call" else call_id


# --- The answer.

_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
    "pause": "pause_turn",
}


class Emitter:
    """Turns deltas into server-sent events or, without ``stream``, into one document at the end.

    A stream has ``message_start``; for each message the start, deltas and stop of a block;
    ``message_delta`` with the stop reason and the usage; ``message_stop``. A delta's JSON is
    written once per block and each delta only quotes its text: its cost does not depend on the
    length of the answer. Only the text of an open thinking block (to encrypt it) or an open call
    is stored.
    """

    def __init__(
        self,
        info: ResponseInfo,
        cipher: Cipher,
        *,
        stream: bool,
        thinking: Display = "shown",
        namespaces: Sequence[Namespace] = (),
    ) -> None:
        self._info = info
        self._cipher = cipher
        self._stream = stream
        self._thinking = thinking
        self._served = {
            recipient: (each.label, tool.origin[-1])
            for each in namespaces
            for recipient, tool in each.by_recipient.items()
        }
        self._block: _Block | None = None
        self._server_call = ""  # the id of the last one
        self._count = 0
        self._head = ""
        self._parts: list[str] = []
        self._content: list[dict[str, Any]] = []
        self._finished: Finished | None = None
        self._error: HarmonyFailure | None = None

    def feed(self, delta: Delta) -> list[Event]:
        """The events for ``delta``; always empty if the answer is not streamed."""
        match delta:
            case Text():
                return [] if self._block is None else self._more(self._block.take(delta.text))
            case Started():
                nothing = {"stop_reason": None, "stop_sequence": None}
                message = self._message([], nothing, _started_usage(delta))
                return self._send("message_start", message=message)
            case Opened():
                return self._opened(delta)
            case Closed():
                return self._closed()
            case Finished():
                self._finished = delta
                stopped, usage = _stopped(delta), _final_usage(delta)
                return [
                    *self._send("message_delta", delta=stopped, usage=usage),
                    *self._send("message_stop"),
                ]
            case Failed():
                self._error = delta.error
                body = error_body(delta.error, request_id(self._info))
                return [Event(encode(body), "error")] if self._stream else []
            case Progress():  # in a comment: there is no event for it
                return []
            case ToolStarted():
                self._server_call = delta.call.id if delta.call else self._server_call
                return []
            case ToolFinished():
                return self._ran(delta)
            case _:
                assert_never(delta)

    def result(self) -> dict[str, Any]:
        """The whole answer, not streamed: a ``message``.

        Raises the error that ended the turn, if one did, and ``OutputError`` before its end.
        """
        if self._error is not None:
            raise self._error
        if self._finished is None or self._stream:
            raise OutputError("the answer is incomplete or was streamed")
        finished = self._finished
        return self._message(self._content, _stopped(finished), _final_usage(finished))

    def _opened(self, delta: Opened) -> list[Event]:
        self._block = self._new_block(delta)
        if self._block is None:
            return []
        index, block = self._count, self._block
        self._count += 1
        self._parts = []
        self._head = (
            f'{{"type":"content_block_delta","index":{index},'
            f'"delta":{{"type":"{block.delta}","{block.name}":'
        )
        return self._send("content_block_start", index=index, content_block=block.document("", ""))

    def _new_block(self, delta: Opened) -> _Block | None:
        """The block for a message; ``None`` if the request hides it."""
        if delta.kind is Kind.CALL:
            return _ToolUseBlock(self._info.call_id(delta.index), delta.name)
        if delta.kind is Kind.SERVER_CALL:
            head, _, rest = delta.name.partition(".")
            label, tool = self._served.get(delta.name, (head, rest or head))
            self._server_call = self._info.call_id(delta.index)
            return _McpToolUseBlock(self._server_call, label, tool, code=delta.name == PYTHON)
        if delta.kind is Kind.PREAMBLE and self._thinking == "preambles":
            return _ThinkingBlock(self._cipher, shown=True, mark=UPDATE)
        if delta.kind is not Kind.REASONING:
            return _TextBlock()
        if self._thinking in ("hidden", "preambles"):
            return None
        return _ThinkingBlock(self._cipher, shown=self._thinking == "shown")

    def _ran(self, delta: ToolFinished) -> list[Event]:
        """The result is a block of its own, complete when it starts."""
        block = {
            "type": "mcp_tool_result",
            "tool_use_id": _mcp_id(self._server_call),
            "is_error": delta.failure is not None,
            "content": [{"type": "text", "text": delta.text, "citations": None}],
        }
        index, self._count = self._count, self._count + 1
        if not self._stream:
            self._content.append(block)
        return [
            *self._send("content_block_start", index=index, content_block=block),
            *self._send("content_block_stop", index=index),
        ]

    def _more(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._stream:
            return [Event(f"{self._head}{quote(text)}}}}}", "content_block_delta")]
        self._parts.append(text)
        return []

    def _closed(self) -> list[Event]:
        block, self._block = self._block, None
        if block is None:
            return []
        index = self._count - 1
        events, signature = self._more(block.rest()), block.signature()
        if signature:
            delta = {"type": "signature_delta", "signature": signature}
            events += self._send("content_block_delta", index=index, delta=delta)
        if not self._stream:
            self._content.append(block.document("".join(self._parts), signature))
        return [*events, *self._send("content_block_stop", index=index)]

    def _send(self, kind: str, **fields: Any) -> list[Event]:
        return [Event(encode({"type": kind, **fields}), kind)] if self._stream else []

    def _message(
        self, content: list[dict[str, Any]], stopped: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._info.id_seed}",
            "type": "message",
            "role": "assistant",
            "model": self._info.model,
            "content": content,
            **stopped,
            "usage": usage,
        }


def _stopped(finished: Finished) -> dict[str, Any]:
    """The stop reason. A stop string of the request takes precedence."""
    sequence = finished.stop_sequence
    reason = _STOP_REASONS[finished.reason] if sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(usage: Usage) -> dict[str, Any]:
    """The three parts of the prompt are disjoint, their sum is what ``count_tokens`` counts.

    So clients read it (``Message.usage`` in Anthropic's SDK). What is written to the cache is not
    counted apart: here that costs nothing, and everything is.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _started_usage(delta: Started) -> dict[str, Any]:
    """Without the parts as long as they are not known: a client must not add a guess to them."""
    if delta.cached_tokens is None:
        return {"input_tokens": delta.prompt_tokens, "output_tokens": 0}
    return _usage(Usage(delta.prompt_tokens, cached_tokens=delta.cached_tokens))


def _final_usage(finished: Finished) -> dict[str, Any]:
    """Fields of our own are in the details: Anthropic's client takes them as they come."""
    usage = finished.usage
    details: dict[str, Any] = {"thinking_tokens": usage.reasoning_tokens}
    if usage.tool_tokens:
        details["tool_output_tokens"] = usage.tool_tokens
    if finished.reasoning_ended_by:
        details[REASONING_ENDED_BY] = finished.reasoning_ended_by
    return {**_usage(usage), "output_tokens_details": details}
