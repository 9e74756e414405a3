"""Chat Completions: turns deltas into chunks, or into a completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import assert_never

from vllm_mlx_harmony.core import deltas
from vllm_mlx_harmony.core.deltas import Delta, FinishReason, Kind, Usage
from vllm_mlx_harmony.core.errors import HarmonyFailure, OutputError
from vllm_mlx_harmony.core.turn import ReasoningField, ResponseInfo
from vllm_mlx_harmony.protocols.citations import link, span
from vllm_mlx_harmony.protocols.events import (
    DONE,
    REASONING_ENDED_BY,
    Document,
    Event,
    encode,
    quote,
)
from vllm_mlx_harmony.protocols.freeform import FreeformInput
from vllm_mlx_harmony.protocols.openai_answer import entries, error_body, output_details
from vllm_mlx_harmony.protocols.progress import FIELD, prompt_progress

_REASONING, _CONTENT, _ANNOTATIONS = "reasoning", "content", "annotations"
SERVER_CALLS = "server_tool_calls"
"""The calls that the server ran: a field of the message, and of a chunk when a call has its
answer. The API has no field for them; clients that do not know this one see the reasoning and
the answer."""


def _delta_around(*fields: str) -> tuple[str, ...]:
    """A delta's JSON around its text, which is in each of ``fields``."""
    first, *other_fields = fields
    return (f'{{"{first}":', *(f',"{field}":' for field in other_fields), "}")


@dataclass(eq=False)
class Emitter:
    """Turns deltas into server-sent events or, without ``stream``, into one document at the end.

    A stream has a chunk with the role, a chunk for each text or call, the finish reason, the usage
    if ``include_usage``, and ``[DONE]``. No text is stored. ``freeform`` are the names of the tools
    that take text; the client gets it as the arguments of a function for those in ``flat``.
    ``shows_progress``: while the prompt is being processed, chunks report its progress. Clients
    look for reasoning under one or the other name of ``reasoning_field``.
    """

    info: ResponseInfo
    _: KW_ONLY
    stream: bool
    include_usage: bool = False
    shows_reasoning: bool = True
    freeform: frozenset[str] = frozenset()
    flat: frozenset[str] = frozenset()
    shows_progress: bool = False
    reasoning_field: ReasoningField = ReasoningField.BOTH

    def __post_init__(self) -> None:
        self._input: FreeformInput | None = None
        self._hidden = False
        self._head = encode(self._envelope("chat.completion.chunk"))[:-1] + ',"choices":['
        self._tail = ',"usage":null}' if self.include_usage else "}"
        self._texts: dict[str, list[str]] = {}
        self._logprobs: list[Document] = []
        self._annotations: list[Document] = []
        self._length = 0  # of the content
        self._is_content = False  # whether the open message is part of it
        self._calls: list[Document] = []
        self._server_calls: list[Document] = []
        self._call: tuple[Document, str] | None = None  # an open one, and the field for its text
        self._is_server_call = False  # whether the open message is one
        self._around: tuple[str, ...] = ()
        self._parts: list[str] = []
        self._joint = ""
        self._reason: FinishReason | None = None
        self._ended_by: Document = {}
        self._usage = Usage()
        self._error: HarmonyFailure | None = None

    def feed(self, delta: Delta) -> list[Event]:  # noqa: C901, PLR0912 - a case for each delta
        """The events for ``delta``; always empty if the answer is not streamed."""
        match delta:
            case deltas.Text() if self._is_server_call:
                self._parts.append(delta.text)
                return []
            case deltas.Text() if self._input is not None:
                return self._show(self._input.feed(delta.text))
            case deltas.Text():
                return [] if self._hidden else self._show(delta.text, delta.logprobs)
            case deltas.Citation():
                events = self._show(link(delta), delta.logprobs)
                cited = {"type": "url_citation", "url_citation": span(delta, self._length)}
                self._annotations.append(cited)
                return [*events, *self._send(encode({_ANNOTATIONS: [cited]}))]
            case deltas.Started():
                return self._send('{"role":"assistant","content":null,"refusal":null}')
            case deltas.Progress() if self.shows_progress:
                # With an empty delta: clients that join roles would join llama.cpp's.
                field = f',"{FIELD}":{encode(prompt_progress(delta))}}}'
                return [Event(event.data[:-1] + field) for event in self._send("{}")]
            case deltas.Progress() | deltas.ToolStarted():
                return []
            case deltas.Opened():
                return self._open(delta)
            case deltas.Closed():
                events = [] if self._input is None else self._show(self._input.close())
                if self._call is not None:
                    body, name = self._call
                    body[name] = "".join(self._parts)
                return events
            case deltas.ToolFinished():
                call = self._server_calls[-1]
                call["output"] = delta.text
                call["error"] = None if delta.failure is None else delta.failure.text
                index = len(self._server_calls) - 1  # openai's client joins chunks by it
                return self._send(encode({SERVER_CALLS: [{"index": index, **call}]}))
            case deltas.Finished():
                return [*self.finish(delta), *self.end(delta.usage)]
            case deltas.Failed():
                self._error = delta.error
                return [Event(encode(error_body(delta.error))), DONE] if self.stream else []
            case _:
                assert_never(delta)

    def keep_alive(self) -> Event:
        """What is sent in a silence: a chunk with an empty delta. A comment would be enough for
        opencode, which waits for bytes, but not for OpenClaw, which waits for chunks."""
        return Event("".join(self._framed("{}")))

    def finish(self, delta: deltas.Finished) -> list[Event]:
        self._reason = delta.reason
        if delta.reasoning_ended_by:  # openai's client adds fields of deltas to the message
            self._ended_by = {REASONING_ENDED_BY: delta.reasoning_ended_by}
        empty = {} if _CONTENT in self._texts or self._calls else {"content": ""}
        return self._send(encode({**self._ended_by, **empty}), quote(delta.reason))

    def end(self, usage: Usage) -> list[Event]:
        self._usage = usage
        if not self.stream:
            return []
        last = Event(f'{self._head}],"usage":{encode(_usage(usage))}}}')
        return [last, DONE] if self.include_usage else [DONE]

    def result(self) -> Document:
        """The whole answer: a ``chat.completion``. Raises the error that ended the turn, if any."""
        if self._error is not None:
            raise self._error
        if self._reason is None or self.stream:
            raise OutputError("the answer is incomplete or was streamed")
        choice = {
            "index": self.info.choice,
            "message": self._message(),
            "logprobs": {"content": self._logprobs, "refusal": None} if self._logprobs else None,
            "finish_reason": self._reason,
        }
        document = self._envelope("chat.completion")
        return {**document, "choices": [choice], "usage": _usage(self._usage)}

    def _open(self, delta: deltas.Opened) -> list[Event]:
        self._hidden = delta.kind is Kind.REASONING and not self.shows_reasoning
        self._input = self._call = None
        self._joint = ""
        self._is_server_call = delta.kind is Kind.SERVER_CALL
        self._is_content = delta.kind in (Kind.PREAMBLE, Kind.ANSWER)
        key = self.info.call_id(delta.index)
        if self._is_server_call:
            # Sent once its result is known: the client does not have to make this call.
            call: Document = {"id": key, "name": delta.name, "arguments": ""}
            self._server_calls.append({**call, "output": None, "error": None})
            self._call, self._parts = (self._server_calls[-1], "arguments"), []
        elif delta.kind is Kind.CALL:
            index, kind, name = len(self._calls), "function", "arguments"
            if delta.name in self.freeform:
                self._input = FreeformInput()
                if delta.name not in self.flat:
                    kind, name = "custom", "input"
            body = {"name": delta.name, name: ""}
            call = {"id": key, "type": kind, kind: body}
            self._calls.append(call)
            self._call, self._parts = (body, name), []
            opening = f'{{"tool_calls":[{{"index":{index},"{kind}":{{"{name}":'
            self._around = self._framed(opening, "}}]}")
            return self._send(encode({"tool_calls": [{"index": index, **call}]}))
        elif not self._hidden:
            name = _REASONING if delta.kind is Kind.REASONING else _CONTENT
            # Messages that land in the same field are joined by a line break (semantics B).
            self._joint = "\n" if name in self._texts else ""
            self._parts = self._texts.setdefault(name, [])
            fields = self.reasoning_field.names if name is _REASONING else (name,)
            self._around = self._framed(*_delta_around(*fields))
        return []

    def _show(self, text: str, logprobs: Sequence[deltas.TextLogprob] = ()) -> list[Event]:
        if not text:
            return []
        if self._joint:
            text, self._joint = self._joint + text, ""
        if self._is_content:
            self._length += len(text)
        if self.stream and logprobs:
            scores = encode({"content": entries(logprobs), "refusal": None})
            return self._send(encode({_CONTENT: text}), logprobs=scores)
        self._logprobs += entries(logprobs)
        if self.stream:
            return [Event(quote(text).join(self._around))]
        self._parts.append(text)
        return []

    def _send(self, delta: str, reason: str = "null", logprobs: str = "null") -> list[Event]:
        """One chunk with ``delta``, which is JSON, as are ``reason`` and ``logprobs``."""
        framed = self._framed(delta, reason=reason, logprobs=logprobs)
        return [Event("".join(framed))] if self.stream else []

    def _framed(
        self, first: str, *rest: str, reason: str = "null", logprobs: str = "null"
    ) -> tuple[str, ...]:
        """The pieces of a delta's JSON with the rest of the chunk at both ends."""
        head = f'{self._head}{{"index":{self.info.choice},"delta":'
        tail = f',"logprobs":{logprobs},"finish_reason":{reason}}}]{self._tail}'
        *middle, last = (head + first, *rest)
        return (*middle, last + tail)

    def _envelope(self, kind: str) -> Document:
        info = self.info
        return {
            "id": f"chatcmpl-{info.id_seed}",
            "object": kind,
            "created": info.created,
            "model": info.model,
        }

    def _message(self) -> Document:
        """The assistant's message. Reasoning and calls are absent when there are none."""
        content: str | None = "".join(self._texts.get(_CONTENT, ()))
        if self._calls and _CONTENT not in self._texts:
            content = None  # only beside calls: an answer that was cut while thinking is empty
        message: Document = {"role": "assistant", "content": content, "refusal": None}
        message |= self._ended_by
        if _REASONING in self._texts:
            reasoning = "".join(self._texts[_REASONING])
            message |= dict.fromkeys(self.reasoning_field.names, reasoning)
        # One without an answer was not run, and is not in a stream either (D2).
        if finished := [call for call in self._server_calls if call["output"] is not None]:
            message[SERVER_CALLS] = finished
        if self._annotations:
            message[_ANNOTATIONS] = self._annotations
        if self._calls:
            message["tool_calls"] = self._calls
        return message


class ChoicesEmitter:
    """Writes several answers to one prompt as the choices of one: each has an emitter."""

    def __init__(self, choices: Sequence[Emitter]) -> None:
        self._choices = choices

    def feed(self, delta: Delta | deltas.ChoiceDelta) -> list[Event]:
        """The events for ``delta``; always empty if the answer is not streamed."""
        match delta:
            case deltas.ChoiceDelta(index, deltas.Finished() as finished):
                return self._choices[index].finish(finished)
            case deltas.ChoiceDelta(index, inner):
                return self._choices[index].feed(inner)
            case deltas.Finished(usage=usage):
                return self._choices[0].end(usage)
            case _:
                return self._choices[0].feed(delta)

    def keep_alive(self) -> Event:
        return self._choices[0].keep_alive()

    def result(self) -> Document:
        """The whole answer, not streamed. Raises as ``Emitter.result``."""
        document, *other_documents = (choice.result() for choice in self._choices)
        return {
            **document,
            "choices": [*document["choices"], *(other["choices"][0] for other in other_documents)],
        }


def _usage(usage: Usage) -> Document:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": output_details(usage),
    }
