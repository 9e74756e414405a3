"""Chat Completions: turns deltas into chunks, or into a completion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    Reason,
    Started,
    Text,
    ToolFinished,
    ToolStarted,
    Usage,
)
from vllm_mlx_harmony.core.errors import HarmonyFailure, OutputError
from vllm_mlx_harmony.core.turn import ResponseInfo
from vllm_mlx_harmony.protocols.events import DONE, REASONING_ENDED_BY, Event, encode, quote
from vllm_mlx_harmony.protocols.freeform import FreeformInput
from vllm_mlx_harmony.protocols.openai_error import error_body
from vllm_mlx_harmony.protocols.progress import FIELD, prompt_progress

_REASONING, _CONTENT = "reasoning", "content"
SERVER_CALLS = "server_tool_calls"
"""What the server ran: a field of the message, and of a chunk when a call has its answer. The API
has no words for it; clients that do not know it see reasoning and answer."""

_FIELDS = {Kind.REASONING: _REASONING, Kind.PREAMBLE: _CONTENT, Kind.ANSWER: _CONTENT}

_OPENINGS = {
    _REASONING: ('{"reasoning":', ',"reasoning_content":', "}"),
    _CONTENT: ('{"content":', "}"),
}
"""A delta's JSON around its text. Reasoning goes out under both names that clients look for."""


@dataclass(slots=True)
class _Call:
    """A call in the answer: its id for the client and, not streamed, the arguments so far.

    ``input`` unwraps the arguments of a freeform tool.
    """

    id: str
    name: str
    input: FreeformInput | None = None
    arguments: list[str] = field(default_factory=list)

    def document(self, arguments: str) -> dict[str, Any]:
        """The call as both shapes write it."""
        if self.input is not None:
            custom = {"name": self.name, "input": arguments}
            return {"id": self.id, "type": "custom", "custom": custom}
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}

    @property
    def opening(self) -> str:
        """The JSON before more of the arguments."""
        return '"function":{"arguments":' if self.input is None else '"custom":{"input":'


class Emitter:
    """Turns deltas into server-sent events or, without ``stream``, into one document at the end.

    A stream has a chunk with the role, a chunk for each text or call, the finish reason, the usage
    if ``include_usage``, and ``[DONE]``. The chunk's JSON is written once per message and each
    delta only quotes its text: its cost does not depend on the length of the answer, and no text
    is stored. ``freeform`` are the names of the tools that take text. ``shows_progress``: while the
    prompt is computed, chunks say how far it is.
    """

    def __init__(
        self,
        info: ResponseInfo,
        *,
        stream: bool,
        include_usage: bool = False,
        shows_reasoning: bool = True,
        freeform: frozenset[str] = frozenset(),
        shows_progress: bool = False,
    ) -> None:
        self._info = info
        self._stream = stream
        self._include_usage = include_usage
        self._shows_reasoning = shows_reasoning
        self._freeform = freeform
        self._shows_progress = shows_progress
        self._input: FreeformInput | None = None
        self._hidden = False
        self._head = encode(self._envelope("chat.completion.chunk"))[:-1] + ',"choices":['
        self._tail = ',"usage":null}' if include_usage else "}"
        self._texts: dict[str, list[str]] = {}
        self._calls: list[_Call] = []
        self._ran_calls: list[dict[str, Any]] = []
        self._served = False  # whether the open message is a call of the server's
        self._around: tuple[str, ...] = ()
        self._parts: list[str] = []
        self._joint = ""
        self._reason: FinishReason | None = None
        self._ended_by: Reason = ""
        self._usage = Usage()
        self._error: HarmonyFailure | None = None

    def feed(self, delta: Delta) -> list[Event]:
        """The events for ``delta``; always empty if the answer is not streamed."""
        match delta:
            case Text():
                return self._text(delta)
            case Started():
                return self._send('{"role":"assistant","content":null,"refusal":null}')
            case Progress():
                return self._progress(delta)
            case Opened():
                return self._opened(delta)
            case Closed():
                return [] if self._input is None else self._show(self._input.close())
            case Finished():
                return self._finished(delta)
            case Failed():
                self._error = delta.error
                return [Event(encode(error_body(delta.error))), DONE] if self._stream else []
            case ToolStarted():
                return []
            case ToolFinished():
                return self._ran(delta)
            case _:
                assert_never(delta)

    def result(self) -> dict[str, Any]:
        """The whole answer, not streamed: a ``chat.completion``.

        Raises the error that ended the turn, if one did, and ``OutputError`` before its end.
        """
        if self._error is not None:
            raise self._error
        if self._reason is None or self._stream:
            raise OutputError("the answer is incomplete or was streamed")
        choice = {
            "index": 0,
            "message": self._message(),
            "logprobs": None,
            "finish_reason": self._reason,
        }
        document = self._envelope("chat.completion")
        return {**document, "choices": [choice], "usage": _usage(self._usage)}

    def _progress(self, delta: Progress) -> list[Event]:
        """Chunks with an empty delta: clients that join roles would join llama.cpp's."""
        if not self._shows_progress:
            return []
        progress = encode(prompt_progress(delta))
        return [Event(f'{each.data[:-1]},"{FIELD}":{progress}}}') for each in self._send("{}")]

    def _opened(self, delta: Opened) -> list[Event]:
        self._hidden = delta.kind is Kind.REASONING and not self._shows_reasoning
        self._input = None
        if delta.kind is Kind.CALL:
            return self._opened_call(delta)
        if delta.kind is Kind.SERVER_CALL:
            return self._opened_server_call(delta)
        if self._hidden:
            return []
        name = _FIELDS[delta.kind]
        # Messages that land in the same field are joined by a line break (semantics B).
        self._joint = "\n" if name in self._texts else ""
        self._parts = self._texts.setdefault(name, [])
        self._around = self._framed(*_OPENINGS[name])
        return []

    def _opened_call(self, delta: Opened) -> list[Event]:
        index = len(self._calls)
        self._input = FreeformInput() if delta.name in self._freeform else None
        call = _Call(self._info.call_id(delta.index), delta.name, self._input)
        self._calls.append(call)
        self._joint = ""
        self._parts = call.arguments
        self._around = self._framed(f'{{"tool_calls":[{{"index":{index},{call.opening}', "}}]}")
        return self._send(encode({"tool_calls": [{"index": index, **call.document("")}]}))

    def _opened_server_call(self, delta: Opened) -> list[Event]:
        """Nothing is sent before it has an answer: it is no call that the client has to make."""
        call = {"id": self._info.call_id(delta.index), "name": delta.name, "arguments": ""}
        self._ran_calls.append({**call, "output": None, "error": None})
        self._served, self._parts = True, []
        return []

    def _ran(self, delta: ToolFinished) -> list[Event]:
        call = self._ran_calls[-1]
        call["arguments"], call["output"] = "".join(self._parts), delta.text
        call["error"] = None if delta.failure is None else delta.failure.text
        self._served = False
        index = len(self._ran_calls) - 1  # without which openai's client cannot join them
        return self._send(encode({SERVER_CALLS: [{"index": index, **call}]}))

    def _text(self, delta: Text) -> list[Event]:
        if self._served:
            self._parts.append(delta.text)
            return []
        if self._input is not None:
            return self._show(self._input.feed(delta.text))
        return [] if self._hidden else self._show(delta.text)

    def _show(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._joint:
            text, self._joint = self._joint + text, ""
        if self._stream:
            return [Event(quote(text).join(self._around))]
        self._parts.append(text)
        return []

    def _finished(self, delta: Finished) -> list[Event]:
        self._reason, self._usage = delta.reason, delta.usage
        self._ended_by = delta.reasoning_ended_by
        if not self._stream:
            return []
        last = self._made_to_answer()
        if not self._says_something():
            last["content"] = ""
        ended = self._send(encode(last), quote(delta.reason))
        if self._include_usage:
            ended.append(Event(f'{self._head}],"usage":{encode(_usage(self._usage))}}}'))
        return [*ended, DONE]

    def _send(self, delta: str, reason: str = "null") -> list[Event]:
        """One chunk with ``delta``, which is JSON, as is ``reason``."""
        return [Event("".join(self._framed(delta, reason=reason)))] if self._stream else []

    def _framed(self, first: str, *rest: str, reason: str = "null") -> tuple[str, ...]:
        """The pieces of a delta's JSON with the rest of the chunk at both ends."""
        head = f'{self._head}{{"index":0,"delta":'
        tail = f',"logprobs":null,"finish_reason":{reason}}}]{self._tail}'
        *middle, last = (head + first, *rest)
        return (*middle, last + tail)

    def _envelope(self, kind: str) -> dict[str, Any]:
        info = self._info
        return {
            "id": f"chatcmpl-{info.id_seed}",
            "object": kind,
            "created": info.created,
            "model": info.model,
        }

    def _message(self) -> dict[str, Any]:
        """The assistant's message. Reasoning and calls are absent when there are none."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content(), "refusal": None}
        message |= self._made_to_answer()
        if _REASONING in self._texts:
            reasoning = "".join(self._texts[_REASONING])
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        # One without an answer was not run, and is not in a stream either (D2).
        if ran := [call for call in self._ran_calls if call["output"] is not None]:
            message[SERVER_CALLS] = ran
        if self._calls:
            message["tool_calls"] = [c.document("".join(c.arguments)) for c in self._calls]
        return message

    def _made_to_answer(self) -> dict[str, Any]:
        """A field of the message, which openai's client puts together of deltas; or nothing."""
        return {REASONING_ENDED_BY: self._ended_by} if self._ended_by else {}

    def _content(self) -> str | None:
        """Null only beside calls: an answer without a word (cut while thinking) is an empty one."""
        if self._says_something() and _CONTENT not in self._texts:
            return None
        return "".join(self._texts.get(_CONTENT, ()))

    def _says_something(self) -> bool:
        return _CONTENT in self._texts or bool(self._calls)


def _usage(usage: Usage) -> dict[str, Any]:
    tools = {"tool_output_tokens": usage.tool_tokens} if usage.tool_tokens else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens, **tools},
    }
