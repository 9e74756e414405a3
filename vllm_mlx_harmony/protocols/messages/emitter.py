"""The Messages API: turns deltas into events, or into a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from json import loads
from typing import Literal, TypeAlias, assert_never

from vllm_mlx_harmony.core import deltas
from vllm_mlx_harmony.core.deltas import Delta, FinishReason, Kind, Usage
from vllm_mlx_harmony.core.errors import HarmonyFailure, OutputError, PromptTooLong
from vllm_mlx_harmony.core.turn import PYTHON, Namespace, ResponseInfo
from vllm_mlx_harmony.protocols.encryption import Cipher
from vllm_mlx_harmony.protocols.events import REASONING_ENDED_BY, Document, Event, encode, quote
from vllm_mlx_harmony.protocols.messages.schema import THREAD_UNSUPPORTED
from vllm_mlx_harmony.protocols.messages.tool_types import SERVER_TOOLS, WEB_TOOLS
from vllm_mlx_harmony.protocols.messages.web import citation_of, native_result, native_tool
from vllm_mlx_harmony.protocols.partial_json import ObjectText
from vllm_mlx_harmony.protocols.server_calls import CodeArguments, label_and_name
from vllm_mlx_harmony.protocols.unavailable import NONE, Unavailable

PING = Event('{"type":"ping"}', "ping")

Display: TypeAlias = Literal["shown", "encrypted", "hidden", "preambles"]
"""Reasoning as blocks with text and signature, with the signature alone, or not at all.

``preambles``: preambles instead of reasoning, as with Anthropic's ``between_tools``: what the model
says between its calls is sent as thinking, and a text block is always part of the answer.
"""

UPDATE = "<|channel|>commentary<|message|>"
"""Prefix of the encrypted text of a preamble that is shown as thinking."""


def token_count(prompt_tokens: int) -> Document:
    """The response of ``count_tokens`` for a prompt of ``prompt_tokens``."""
    return {"input_tokens": prompt_tokens}


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""The type of an error, by its status; others are those of the caller or of the server."""


def request_id(id_seed: str) -> str:
    return f"req_{id_seed[:24]}"


def error_body(error: HarmonyFailure, request_id: str | None = None) -> Document:
    """``error`` in Anthropic's format, with the ``type`` that api.anthropic.com sends for it.

    The format has no field for the invalid parameter, so the message names it. Claude Code reads
    the two numbers of a prompt that is too long and shortens the conversation by their difference.
    """
    message = error.message
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.window} maximum"
    elif error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    is_client_error = error.status < HTTPStatus.INTERNAL_SERVER_ERROR
    other = "invalid_request_error" if is_client_error else "api_error"
    body: Document = {"type": _TYPES.get(error.status, other), "message": message}
    if error.code == THREAD_UNSUPPORTED:  # the details that Anthropic's client looks for
        body["details"] = {"error_code": error.code, "unsupported": [error.param]}
    return {"type": "error", "error": body, "request_id": request_id}


# --- Content blocks.


class _TextBlock:
    """A text while it is written, and the base of other blocks.

    ``delta`` is the type of its deltas and ``name`` the field that carries their text.
    ``citations`` are those of the text.
    """

    delta, name = "text_delta", "text"

    def __init__(self) -> None:
        self.citations: list[Document] = []

    def take(self, text: str) -> str:
        """Adds to the message; returns the text to send."""
        return text

    def rest(self) -> str:
        """The remaining text to send when the message ends."""
        return ""

    def signature(self) -> str:
        """The signature of the whole text; empty if the block has none."""
        return ""

    def document(self, text: str, signature: str) -> Document:
        """The block with ``text``, all that was sent or nothing."""
        cited = {"citations": self.citations} if self.citations else {}
        return {"type": "text", "text": text, **cited}


class _ThinkingBlock(_TextBlock):
    """Collects its text, shown or not: the signature encrypts all of it, preceded by ``mark``."""

    delta, name = "thinking_delta", "thinking"

    def __init__(self, cipher: Cipher, *, shown: bool, mark: str = "") -> None:
        super().__init__()
        self._cipher = cipher
        self._shown = shown
        self._parts = [mark]

    def take(self, text: str) -> str:
        self._parts.append(text)
        return text if self._shown else ""

    def signature(self) -> str:
        return self._cipher.encrypt("".join(self._parts))

    def document(self, text: str, signature: str) -> Document:
        return {"type": "thinking", "thinking": text, "signature": signature}


class _ToolUseBlock(_TextBlock):
    """A call: of a tool of the server ``label``, which the server runs, or of the client's.

    Since the input is an object, ``code`` becomes a field of it. ``native``: the tool is one of
    Anthropic's.
    """

    delta, name = "input_json_delta", "partial_json"

    def __init__(
        self, call_id: str, tool: str, label: str = "", *, code: bool = False, native: bool = False
    ) -> None:
        super().__init__()
        self._head = {"type": "tool_use", "id": call_id, "name": tool}
        if native:
            self._head |= {"type": "server_tool_use", "id": _server_id(call_id)}
        elif label:
            self._head |= {"type": "mcp_tool_use", "id": _mcp_id(call_id)}
        self._server = {"server_name": label} if label else {}
        self._input = ObjectText()
        self._code = CodeArguments() if code else None

    def take(self, text: str) -> str:
        return self._input.feed(self._code.feed(text) if self._code else text)

    def rest(self) -> str:
        closing = self._input.feed(self._code.close()) if self._code else ""
        return closing + self._input.close()

    def document(self, text: str, signature: str) -> Document:
        return {**self._head, "input": loads(text) if text else {}, **self._server}


def _mcp_id(call_id: str) -> str:
    """The id of the call's block. Calls of earlier turns already have such an id."""
    head, _, key = call_id.partition("_")
    return f"mcptoolu_{key}" if head == "call" else call_id


def _server_id(call_id: str) -> str:
    head, _, key = call_id.partition("_")
    return f"srvtoolu_{key}" if head == "call" else call_id


# --- The answer.

_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
    "pause": "pause_turn",
}


@dataclass(eq=False)
class Emitter:
    """Turns deltas into server-sent events or, without ``stream``, into one document at the end.

    A stream has ``message_start``; for each message the start, deltas and stop of a block;
    ``message_delta`` with the stop reason and the usage; ``message_stop``. Only the text of an open
    thinking block (to encrypt it) or an open call is stored. ``native``: calls of the browser are
    those of Anthropic's tools.
    """

    info: ResponseInfo
    cipher: Cipher
    _: KW_ONLY
    stream: bool
    thinking: Display = "shown"
    namespaces: Sequence[Namespace] = ()
    native: bool = False
    unavailable: Unavailable = NONE

    def __post_init__(self) -> None:
        self._block: _TextBlock | None = None  # the open one, unless it is hidden
        self._server_call = ""  # the id of the last one
        self._tool = ""  # and its tool of Anthropic's, if it is one
        self._uses: Counter[str] = Counter()
        self._count = 0
        self._head = ""
        self._parts: list[str] = []
        self._content: list[Document] = []
        self._finished: deltas.Finished | None = None
        self._error: HarmonyFailure | None = None

    def keep_alive(self) -> Event:
        """What is sent in a silence: allowed anywhere in a stream."""
        return PING

    def feed(self, delta: Delta) -> list[Event]:  # noqa: C901, PLR0912 - a case for each delta
        """The events for ``delta``; always empty if the answer is not streamed."""
        match delta:
            case deltas.Text():
                if self._block is None:
                    return []
                # A block has the text that its citations support, and ends with them.
                again = self._next_block() if self._block.citations else []
                return [*again, *self._show(self._block.take(delta.text))]
            case deltas.Citation():
                return self._cite(delta)
            case deltas.Started():
                # The cached part is left out while it is unknown, because clients add up these
                # numbers.
                usage: Document = {"input_tokens": delta.prompt_tokens, "output_tokens": 0}
                if delta.cached_tokens is not None:
                    usage = _usage(Usage(delta.prompt_tokens, cached_tokens=delta.cached_tokens))
                nothing = {"stop_reason": None, "stop_sequence": None}
                start = self._send("message_start", message=self._message(nothing, usage))
                return [*start, *self._failed_calls()]
            case deltas.Opened():
                block = self._block = self._new_block(delta)
                if block is None:
                    return []
                return self._open(block)
            case deltas.Closed():
                block, self._block = self._block, None
                return [] if block is None else self._close(block)
            case deltas.ToolStarted():
                if delta.call is not None:
                    self._server_call = delta.call.id
                    self._tool = native_tool(delta.call.name) if self.native else ""
                return []
            case deltas.ToolFinished() if self._tool:
                self._uses[self._tool] += 1
                content = native_result(self._tool, delta, self.cipher)
                key, kind = _server_id(self._server_call), f"{self._tool}_tool_result"
                return self._add_block({"type": kind, "tool_use_id": key, "content": content})
            case deltas.ToolFinished():  # its block is complete when it starts
                return self._add_block(
                    {
                        "type": "mcp_tool_result",
                        "tool_use_id": _mcp_id(self._server_call),
                        "is_error": delta.failure is not None,
                        "content": [{"type": "text", "text": delta.text, "citations": None}],
                    }
                )
            case deltas.Finished():
                self._finished = delta
                stopped, usage = self._ending(delta)
                return [
                    *self._send("message_delta", delta=stopped, usage=usage),
                    *self._send("message_stop"),
                ]
            case deltas.Failed():
                self._error = delta.error
                return self._send(**error_body(delta.error, request_id(self.info.id_seed)))
            case deltas.Progress():  # in a comment: there is no event for it
                return []
            case _:
                assert_never(delta)

    def result(self) -> Document:
        """The whole answer: a ``message``. Raises the error that ended the turn, if any."""
        if self._error is not None:
            raise self._error
        if self._finished is None or self.stream:
            raise OutputError("the answer is incomplete or was streamed")
        return self._message(*self._ending(self._finished))

    def _open(self, block: _TextBlock) -> list[Event]:
        index, self._count = self._count, self._count + 1
        self._parts, self._block = [], block
        self._head = (
            f'{{"type":"content_block_delta","index":{index},'
            f'"delta":{{"type":"{block.delta}","{block.name}":'
        )
        opened = block.document("", "")
        return self._send("content_block_start", index=index, content_block=opened)

    def _close(self, block: _TextBlock) -> list[Event]:
        index = self._count - 1
        events, signature = self._show(block.rest()), block.signature()
        if signature:
            signed = {"type": "signature_delta", "signature": signature}
            events += self._send("content_block_delta", index=index, delta=signed)
        if not self.stream:
            self._content.append(block.document("".join(self._parts), signature))
        return [*events, *self._send("content_block_stop", index=index)]

    def _next_block(self) -> list[Event]:
        assert self._block is not None
        return [*self._close(self._block), *self._open(_TextBlock())]

    def _cite(self, citation: deltas.Citation) -> list[Event]:
        if type(self._block) is not _TextBlock:
            return []
        document = citation_of(citation)
        self._block.citations.append(document)
        cited = {"type": "citations_delta", "citation": document}
        return self._send("content_block_delta", index=self._count - 1, delta=cited)

    def _ending(self, finished: deltas.Finished) -> tuple[Document, Document]:
        stopped, usage = _ending(finished)
        if self._uses:
            counted = {f"{name}_requests": self._uses[name] for name in WEB_TOOLS}
            usage["server_tool_use"] = counted
        return stopped, usage

    def _new_block(self, delta: deltas.Opened) -> _TextBlock | None:
        """The block for a message; ``None`` if the request hides it."""
        match delta.kind:
            case Kind.CALL:
                return _ToolUseBlock(self.info.call_id(delta.index), delta.name)
            case Kind.SERVER_CALL:
                label, tool = label_and_name(self.namespaces, delta.name)
                self._server_call = self.info.call_id(delta.index)
                self._tool = native_tool(delta.name) if self.native else ""
                if self._tool:
                    return _ToolUseBlock(self._server_call, self._tool, native=True)
                return _ToolUseBlock(self._server_call, tool, label, code=delta.name == PYTHON)
            case Kind.REASONING if self.thinking in ("hidden", "preambles"):
                return None
            case Kind.REASONING:
                return _ThinkingBlock(self.cipher, shown=self.thinking == "shown")
            case Kind.PREAMBLE if self.thinking == "preambles":
                return _ThinkingBlock(self.cipher, shown=True, mark=UPDATE)
            case _:
                return _TextBlock()

    def _failed_calls(self) -> list[Event]:
        """The calls of the tools that are refused, each with the error of its API."""
        events: list[Event] = []
        for name in self.unavailable.refused:
            if name not in SERVER_TOOLS.values():
                continue
            key = f"srvtoolu_{self.info.id_seed[:20]}{self._count:04x}"
            result = f"{name}_tool_result"
            error = {"type": f"{result}_error", "error_code": "unavailable"}
            events += self._add_block(
                {"type": "server_tool_use", "id": key, "name": name, "input": {}}
            )
            events += self._add_block({"type": result, "tool_use_id": key, "content": error})
        return events

    def _add_block(self, block: Document) -> list[Event]:
        """Adds a complete ``block``; returns its events."""
        index, self._count = self._count, self._count + 1
        self._content.append(block)
        return [
            *self._send("content_block_start", index=index, content_block=block),
            *self._send("content_block_stop", index=index),
        ]

    def _show(self, text: str) -> list[Event]:
        if not text:
            return []
        if self.stream:
            return [Event(f"{self._head}{quote(text)}}}}}", "content_block_delta")]
        self._parts.append(text)
        return []

    def _send(self, type: str, **fields: object) -> list[Event]:  # noqa: A002 - the field's name
        return [Event(encode({"type": type, **fields}), type)] if self.stream else []

    def _message(self, stopped: Document, usage: Document) -> Document:
        return {
            "id": f"msg_{self.info.id_seed}",
            "type": "message",
            "role": "assistant",
            "model": self.info.model,
            "content": self._content,
            **stopped,
            "usage": usage,
            **self.unavailable.fields,
        }


def _usage(usage: Usage) -> Document:
    """The three parts of the prompt are disjoint, and their sum is what ``count_tokens`` counts.

    Clients rely on that (``Message.usage`` in Anthropic's SDK). Every prompt is written to the
    cache, at no cost, so this is not counted separately.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _ending(finished: deltas.Finished) -> tuple[Document, Document]:
    """The stop reason, for which a stop string takes precedence, and the usage.

    Fields of our own are in the usage's details: Anthropic's client accepts any there.
    """
    sequence, usage = finished.stop_sequence, finished.usage
    reason = _STOP_REASONS[finished.reason] if sequence is None else "stop_sequence"
    details: Document = {"thinking_tokens": usage.reasoning_tokens}
    if usage.tool_tokens:
        details["tool_output_tokens"] = usage.tool_tokens
    if finished.reasoning_ended_by:
        details[REASONING_ENDED_BY] = finished.reasoning_ended_by
    stopped = {"stop_reason": reason, "stop_sequence": sequence}
    return stopped, {**_usage(usage), "output_tokens_details": details}
