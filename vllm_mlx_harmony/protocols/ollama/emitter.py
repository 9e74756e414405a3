"""Ollama's API: turns deltas into lines of JSON, or into one document.

https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from json import loads
from typing import assert_never

from vllm_mlx_harmony.core import deltas
from vllm_mlx_harmony.core.deltas import Delta, Kind
from vllm_mlx_harmony.core.errors import HarmonyFailure, OutputError
from vllm_mlx_harmony.core.turn import ResponseInfo
from vllm_mlx_harmony.protocols.citations import link
from vllm_mlx_harmony.protocols.events import REASONING_ENDED_BY, Document, Event, encode, quote
from vllm_mlx_harmony.protocols.openai_answer import entries
from vllm_mlx_harmony.protocols.partial_json import ObjectText


def error_body(error: HarmonyFailure) -> Document:
    """``error`` in Ollama's format, a message that names the invalid parameter."""
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return {"error": message}


def loaded(model: str, created: int, *, chat: bool) -> Document:
    """The answer to a request without a prompt, which only loads the model."""
    answer: Document = {"response": ""}
    if chat:
        answer = {"message": {"role": "assistant", "content": ""}}
    head = {"model": model, "created_at": timestamp(created)}
    return {**head, **answer, "done": True, "done_reason": "load"}


def timestamp(seconds: int) -> str:
    """A Unix time as in RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_THINKING, _CONTENT = "thinking", "content"


@dataclass(eq=False)
class Emitter:
    """Turns deltas into lines or, without ``stream``, into one document at the end.

    A stream has a line for each text and each call, which is complete, and one with ``done: true``,
    which has the reason and the metrics. All times are in nanoseconds on one clock: ``began`` is
    when the request arrived. ``chat``: the answer is a ``message``, otherwise a ``response``. Calls
    of tools that the server runs are not shown.
    """

    info: ResponseInfo
    began: int
    _: KW_ONLY
    stream: bool
    chat: bool

    def __post_init__(self) -> None:
        self._now = self._started = self.began
        self._generating: int | None = None  # since when
        head = {"model": self.info.model, "created_at": timestamp(self.info.created)}
        self._head = encode(head)[:-1]
        self._texts: dict[str, list[str]] = {}
        self._field = ""  # the open message's; empty if it is not shown
        self._joint = ""
        self._name = ""  # of the open call
        self._arguments = ObjectText()
        self._parts: list[str] = []
        self._calls: list[Document] = []
        self._logprobs: list[Document] = []
        self._finished: deltas.Finished | None = None
        self._error: HarmonyFailure | None = None

    def feed(self, delta: Delta, now: int) -> list[Event]:
        """The lines for ``delta``, of the time ``now``; always empty without ``stream``."""
        self._now = now
        match delta:
            case deltas.Text() if self._name:
                self._parts.append(self._arguments.feed(delta.text))
                return []
            case deltas.Text():
                return self._show(delta)
            case deltas.Citation():
                return self._show(deltas.Text(link(delta), delta.logprobs))
            case deltas.Started():
                self._started = now
                return []
            case deltas.Opened():
                return self._open(delta)
            case deltas.Closed():
                return self._close()
            case deltas.Finished():
                self._finished = delta
                last = {**self._answer({}), **self._ending(delta)}
                return self._send(encode(last)[1:-1]) if self.stream else []
            case deltas.Failed():
                self._error = delta.error
                return [Event(encode(error_body(delta.error)))] if self.stream else []
            case deltas.Progress() | deltas.ToolStarted() | deltas.ToolFinished():
                return []
            case _:
                assert_never(delta)

    def keep_alive(self) -> Event:
        """What is sent in a silence: a line with an empty text."""
        return Event(f'{self._head},{encode(self._answer({}))[1:-1]},"done":false}}')

    def result(self) -> Document:
        """The whole answer. Raises the error that ended the turn, if any."""
        if self._error is not None:
            raise self._error
        if self._finished is None or self.stream:
            raise OutputError("the answer is incomplete or was streamed")
        texts: Document = {name: "".join(parts) for name, parts in self._texts.items()}
        if self._calls:
            texts["tool_calls"] = self._calls
        scores = {"logprobs": self._logprobs} if self._logprobs else {}
        head = {"model": self.info.model, "created_at": timestamp(self.info.created)}
        return {**head, **self._answer(texts), **scores, **self._ending(self._finished)}

    def _open(self, delta: deltas.Opened) -> list[Event]:
        if self._generating is None:
            self._generating = self._now
        self._field = self._name = self._joint = ""
        match delta.kind:
            case Kind.CALL:
                self._name, self._key = delta.name, self.info.call_id(delta.index)
                self._arguments, self._parts = ObjectText(), []
            case Kind.SERVER_CALL:
                pass
            case kind:
                self._field = _THINKING if kind is Kind.REASONING else _CONTENT
                # Messages that land in the same field are joined by a line break (semantics B).
                self._joint = "\n" if self._field in self._texts else ""
                self._texts.setdefault(self._field, [])
        return []

    def _show(self, delta: deltas.Text) -> list[Event]:
        if not self._field:
            return []
        text, self._joint = self._joint + delta.text, ""
        scores = entries(delta.logprobs)
        if not self.stream:
            self._logprobs += scores
            self._texts[self._field].append(text)
            return []
        fields = f',"logprobs":{encode(scores)}' if scores else ""
        return self._send(f"{self._around(text)}{fields}")

    def _around(self, text: str) -> str:
        """The JSON of a text, without its braces."""
        quoted = quote(text)
        if self._field == _THINKING:
            quoted = f'"","thinking":{quoted}'
        if self.chat:
            return f'"message":{{"role":"assistant","content":{quoted}}}'
        return f'"response":{quoted}'

    def _close(self) -> list[Event]:
        if not self._name:
            return []
        name, self._name = self._name, ""
        text = "".join((*self._parts, self._arguments.close()))
        function = {
            "index": len(self._calls),
            "name": name,
            "arguments": loads(text) if text else {},
        }
        call = {"id": self._key, "function": function}
        self._calls.append(call)
        answer = self._answer({"tool_calls": [call]})
        return self._send(encode(answer)[1:-1]) if self.stream else []

    def _send(self, fields: str) -> list[Event]:
        """A line with ``fields``, which are JSON without braces."""
        done = "" if self._finished else ',"done":false'
        return [Event(f"{self._head},{fields}{done}}}")]

    def _answer(self, fields: Document) -> Document:
        """``fields`` where the answer has them, with an empty text if they have none."""
        fields = {_CONTENT: "", **fields}
        if self.chat:
            return {"message": {"role": "assistant", **fields}}
        return {"response": fields.pop(_CONTENT), **fields}

    def _ending(self, finished: deltas.Finished) -> Document:
        """Why the answer ends, and the metrics. A call is no reason of its own in this API."""
        usage = finished.usage
        generating = self._now if self._generating is None else self._generating
        ended = finished.reasoning_ended_by
        return {
            "done": True,
            "done_reason": "length" if finished.reason == "length" else "stop",
            **({REASONING_ENDED_BY: ended} if ended else {}),
            "total_duration": self._now - self.began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": generating - self._started,
            "eval_count": usage.completion_tokens,
            "eval_duration": self._now - generating,
        }
