"""Responses: turns deltas into events, or into a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from typing import assert_never

from vllm_mlx_harmony.core import deltas
from vllm_mlx_harmony.core.deltas import Delta, Kind, Usage
from vllm_mlx_harmony.core.errors import HarmonyFailure, OutputError
from vllm_mlx_harmony.core.turn import ResponseInfo, ServerCall
from vllm_mlx_harmony.protocols.events import (
    DONE,
    HEARTBEAT,
    REASONING_ENDED_BY,
    Document,
    Event,
    encode,
)
from vllm_mlx_harmony.protocols.openai_answer import entries
from vllm_mlx_harmony.protocols.responses.output_items import (
    COMPLETED,
    FIRST_LIST,
    IN_PROGRESS,
    INCOMPLETE,
    LAST_APPROVED,
    MessageItem,
    OutputItem,
    OutputOptions,
    PendingEvent,
    added,
    done,
    key_of,
    output_item,
)
from vllm_mlx_harmony.protocols.responses.resource import usage_of
from vllm_mlx_harmony.protocols.responses.server_items import (
    ServerItem,
    failed_call,
    server_item,
    tool_list,
)


def response_id(info: ResponseInfo) -> str:
    return f"resp_{info.id_seed}"


# --- The answer.

_QUEUED, _FAILED, _CANCELLED = "queued", "failed", "cancelled"

_ENDINGS = {
    COMPLETED: "response.completed",
    INCOMPLETE: "response.incomplete",
    _CANCELLED: "response.incomplete",  # the schema has no event of its own for it
    _FAILED: "response.failed",
}


@dataclass(eq=False)
class Emitter:
    """Turns deltas into server-sent events, and has the response as a document at any time.

    Without ``stream``, it does the same and returns no events. ``repeated`` are the fields of the
    response that repeat the request. Three events have them, and tools may be megabytes, so their
    JSON, without the braces, is written once: ``repeated_json``, if it already exists. ``now``
    returns the Unix time for ``completed_at``, which is null without it. ``queues``: the response
    may have to wait, and begins with the status ``queued``.
    """

    info: ResponseInfo
    options: OutputOptions
    repeated: Document
    now: Callable[[], float] | None = None
    _: KW_ONLY
    stream: bool
    repeated_json: str = ""
    queues: bool = False

    def __post_init__(self) -> None:
        self._status = _QUEUED if self.queues else IN_PROGRESS
        self._in_progress = False
        self._number = 0
        self._output: list[Document] = []
        self._item: OutputItem | None = None
        self._usage: Usage | None = None
        self._completed_at: int | None = None
        self._reasoning_ended_by: str | None = None
        self._error: HarmonyFailure | None = None

    def feed(self, delta: Delta) -> list[Event]:  # noqa: C901, PLR0912 - a case for each delta
        """The events for ``delta``; always empty if the answer is not streamed."""
        match delta:
            case deltas.Text() if self._item is not None:
                logprobs = entries(delta.logprobs, no_bytes=[])
                return self._write_events(self._item.take(delta.text, logprobs))
            case deltas.Citation() if isinstance(self._item, MessageItem):
                logprobs = entries(delta.logprobs, no_bytes=[])
                return self._write_events(self._item.cite(delta, logprobs))
            case deltas.Started():
                return self._start()
            case deltas.Opened(kind=Kind.SERVER_CALL):
                index, key = len(self._output), key_of(self.info, delta.index)
                item = server_item(index, key, delta.name, self.options)
                return self._step(item, item.opened())
            case deltas.Opened():
                message = output_item(delta, len(self._output), self.info, self.options)
                return self._step(message, message.opened())
            case deltas.Closed(complete=True) if self._item is not None:
                return self._step(self._item, self._item.closed())
            case deltas.Closed():
                return self._end_item()
            case deltas.ToolStarted(call=ServerCall() as call):
                key = key_of(self.info, LAST_APPROVED - len(self._output))
                approved = f"mcpr_{call.id.partition('_')[2]}"
                item = server_item(len(self._output), key, call.name, self.options, approved)
                written = [*item.opened(), *item.take(call.arguments), *item.closed()]
                return self._step(item, [*written, *item.started()])
            case deltas.ToolStarted() if isinstance(self._item, ServerItem):
                return self._step(self._item, self._item.started())
            case deltas.ToolFinished() if isinstance(self._item, ServerItem):
                return self._step(self._item, self._item.finished(delta.text, delta.failure))
            case deltas.Finished():
                self._usage = delta.usage
                self._reasoning_ended_by = delta.reasoning_ended_by
                left = self._end_item()  # a call that was not run
                return [*left, *self._end(INCOMPLETE if delta.reason == "length" else COMPLETED)]
            case deltas.Failed():
                self._error = delta.error
                return [*self._start(), *self._end_item(), *self._end(_FAILED)]
            case deltas.Progress():
                return []  # progress is in a comment: there is no event for it
            case deltas.Text() | deltas.Citation() | deltas.ToolStarted() | deltas.ToolFinished():
                return []  # no item that takes it is open
            case _:
                assert_never(delta)

    def keep_alive(self) -> Event:
        """What is sent in a silence: `response.in_progress` once more, as Codex gives up on a
        stream without an event for five minutes, whatever comments it has."""
        if not self._in_progress or self._status != IN_PROGRESS:
            return HEARTBEAT
        (event,) = self._write_response("response.in_progress")
        return event

    def create(self) -> list[Event]:
        """The events of a new response, whose turn may begin later.

        Without this call, the first delta returns them, too. Empty the second time.
        """
        if self._number:
            return []
        kinds = ["response.created", *(["response.queued"] if self.queues else [])]
        return [event for kind in kinds for event in self._write_response(kind)]

    def cancel(self) -> list[Event]:
        return [*self._start(), *self._end_item(), *self._end(_CANCELLED)]

    def add_item(self, item: Document) -> list[Event]:
        """Adds a complete ``item`` to the output; returns its events."""
        index = len(self._output)
        self._output.append(item)
        return self._write_events([added(index, item), done(index, item)])

    def mark_not_stored(self, last: list[Event]) -> list[Event]:
        """The last events of a response that could not be stored, in place of ``last``.

        ``store`` is false in them, even if the request set it.
        """
        self.repeated = {**self.repeated, "store": False}
        self.repeated_json = ""
        if not last:
            return []
        self._number -= 1
        return [*last[:-2], *self._write_response(_ENDINGS[self._status]), DONE]

    def result(self) -> Document:
        """The whole answer: a ``response``. Raises the error that ended the turn, if any."""
        if self._error is not None:
            raise self._error
        if self._status not in _ENDINGS:
            raise OutputError("the answer is incomplete")
        return self.document()

    def document(self) -> Document:
        return {**self._head(), **self.repeated, **self._state()}

    def _head(self) -> Document:
        return {
            "id": response_id(self.info),
            "object": "response",
            "created_at": self.info.created,
            "model": self.info.model,
        }

    def _state(self) -> Document:
        items = list(self._output)
        if self._item is not None and self._item.announced:
            items.append(self._item.document())
        ended_by = self._reasoning_ended_by
        return {
            **({REASONING_ENDED_BY: ended_by} if ended_by else {}),
            "status": self._status,
            "completed_at": self._completed_at,
            "error": _error(self._error),
            "incomplete_details": _CUT if self._status == INCOMPLETE else None,
            "output": items,
            "usage": None if self._usage is None else usage_of(self._usage),
        }

    def _start(self) -> list[Event]:
        if self._in_progress:
            return []
        self._in_progress = True
        events = self.create()
        self._status = IN_PROGRESS
        events += self._write_response("response.in_progress")
        for namespace in self.options.tool_lists:
            index = len(self._output)
            item, item_events = tool_list(index, key_of(self.info, FIRST_LIST + index), namespace)
            self._output.append(item)
            events += self._write_events(item_events)
        for name in self.options.refused:
            index = len(self._output)
            failed = failed_call(index, key_of(self.info, FIRST_LIST + index), name, self.options)
            if failed is not None:
                self._output.append(failed[0])
                events += self._write_events(failed[1])
        return events

    def _step(self, item: OutputItem, events: list[PendingEvent]) -> list[Event]:
        """The ``events`` of ``item``, which becomes part of the output when it is over."""
        self._item = None if item.done else item
        if item.finished_document is not None:
            self._output.append(item.finished_document)
        return self._write_events(events)

    def _end_item(self) -> list[Event]:
        return [] if self._item is None else self._step(self._item, self._item.ended())

    def _end(self, status: str) -> list[Event]:
        self._status = status
        if status == COMPLETED and self.now is not None:
            self._completed_at = int(self.now())
        events = self._write_response(_ENDINGS[status])
        return [*events, DONE] if self.stream else []

    # Events

    def _write_response(self, kind: str) -> list[Event]:
        if not self.stream:
            return []
        self.repeated_json = self.repeated_json or encode(self.repeated)[1:-1]
        parts = encode(self._head())[1:-1], self.repeated_json, encode(self._state())[1:-1]
        response = f"{{{','.join(filter(None, parts))}}}"

        def event(number: int) -> Event:
            start = encode({"type": kind, "sequence_number": number})[:-1]
            return Event(f'{start},"response":{response}}}', kind)

        return self._write_events([event])

    def _write_events(self, events: Sequence[PendingEvent]) -> list[Event]:
        if not self.stream:
            return []
        first, self._number = self._number, self._number + len(events)
        return [event(number) for number, event in enumerate(events, first)]


_CUT = {"reason": "max_output_tokens"}


def _error(error: HarmonyFailure | None) -> Document | None:
    """``error`` as a response has it; its codes are a closed list in the schema."""
    if error is None:
        return None
    is_client_error = error.status < HTTPStatus.INTERNAL_SERVER_ERROR
    code = "invalid_prompt" if is_client_error else "server_error"
    if error.status == HTTPStatus.TOO_MANY_REQUESTS:
        code = "rate_limit_exceeded"
    return {"code": code, "message": error.message}
