"""The Responses API over a WebSocket, as in the Open Responses specification.

A connection has one response at a time, in the order of its messages. The last response can be
continued as long as the connection lasts, even if it is not stored.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from json import dumps
from typing import Any

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.status import WS_1013_TRY_AGAIN_LATER
from starlette.types import Message, Receive
from starlette.websockets import WebSocket, WebSocketDisconnect

from vllm_mlx_harmony.core.deltas import Finished, Started, Usage
from vllm_mlx_harmony.core.errors import HarmonyFailure, RequestError
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.events import DONE
from vllm_mlx_harmony.server.body import Document, parse_json
from vllm_mlx_harmony.server.errors import failure_of, openai_error, retry_headers
from vllm_mlx_harmony.server.front_end import Caller, front_end_of, host_of
from vllm_mlx_harmony.server.generation import Deltas, Job
from vllm_mlx_harmony.server.host import NotHarmony
from vllm_mlx_harmony.server.responses.lookup import RESPONSES, References, prepare, read
from vllm_mlx_harmony.server.serving import LeasedRequest, lease_for
from vllm_mlx_harmony.server.storage.persistence import StoringEmitter, new_id_seed
from vllm_mlx_harmony.server.streams import (
    abort_connection,
    send_with_timeout,
    transport_of,
)
from vllm_mlx_harmony.tasks import cancel_and_wait

logger = logging.getLogger("vllm_mlx_harmony")

LIFETIME = 3600.0
"""Maximum duration of a connection in seconds, as in the specification. A running response is
completed first."""

MAX_WAITING = 32
"""Maximum messages that wait on a connection. Several together are limited to the maximum size of a
body."""

UNSENT_SECONDS = 0.05
"""Seconds between two checks whether the client has read everything."""

_TRANSPORT = frozenset({"type", "stream", "stream_options", "background", "generate"})
"""Fields of a message that do not belong to the request, or concern its transport."""


async def serve_socket(socket: WebSocket) -> None:
    """``/v1/responses`` as a WebSocket: serves one response after the other until it is closed."""
    try:
        await host_of(socket).authenticate(socket)
    except HTTPException as error:
        await socket.send_denial_response(openai_error(error))
        return
    await socket.accept()
    await ResponsesSocket(socket).serve()


class ResponsesSocket:
    """One connection. It keeps the last response, even if that is not stored."""

    def __init__(self, socket: WebSocket, lifetime: float = LIFETIME) -> None:
        self._socket = socket
        self._transport = transport_of(socket)
        self._front_end = front_end_of(socket)
        self._until = time.monotonic() + lifetime
        self._waiting: asyncio.Queue[str | None] = asyncio.Queue(MAX_WAITING)
        self._waiting_bytes = 0
        self._previous: StoringEmitter | None = None
        self._send: Callable[[str], Awaitable[None]] = self._write
        self._api = replace(RESPONSES, read=self._read, comments_progress=False)

    async def serve(self) -> None:
        """Serves responses until the connection ends, which also ends a running response."""
        answering = asyncio.ensure_future(self._answer_all())
        listening = asyncio.ensure_future(self._listen())

        def give_up() -> None:
            abort_connection(self._transport)
            answering.cancel()

        seconds = self._front_end.settings.stream_seconds
        with send_with_timeout(seconds, self._write, give_up) as self._send:
            try:
                await asyncio.wait({answering, listening}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (answering, listening):
                    await cancel_and_wait(task)
                    error = None if task.cancelled() else task.exception()
                    if error and not isinstance(error, WebSocketDisconnect):
                        logger.error("a WebSocket failed", exc_info=error)
                # `_api` refers to this object, so the response would live until a garbage
                # collection.
                self._previous = None

    async def _write(self, text: str) -> None:
        """Returns when the operating system has all of ``text``. Raises ``WebSocketDisconnect``.

        uvicorn itself waits only before the next message, and closes a connection only when all
        unsent bytes have been read, which never happens if the client stops reading.
        """
        try:
            await self._socket.send_text(text)
        except RuntimeError as error:  # Starlette raises it after `abort_connection`
            raise WebSocketDisconnect from error
        while self._transport is not None and self._transport.get_write_buffer_size():
            await asyncio.sleep(UNSENT_SECONDS)

    async def _listen(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            self._waiting_bytes += sys.getsizeof(text)
            several = not self._waiting.empty()  # a single long message has its own error
            most = self._front_end.settings.max_body
            if self._waiting.full() or (several and self._waiting_bytes > most):
                await self._socket.close(WS_1013_TRY_AGAIN_LATER, "too many messages are waiting")
                return
            self._waiting.put_nowait(text)

    async def _answer_all(self) -> None:
        with suppress(WebSocketDisconnect):  # while an event is sent
            while True:
                with anyio.move_on_after(self._until - time.monotonic()) as waiting:
                    text = await self._waiting.get()
                if waiting.cancelled_caught:
                    break
                self._waiting_bytes -= sys.getsizeof(text)
                with self._front_end.answers.delay_shutdown():
                    await self._answer(text)
            await self._send_error(_OVER)
            await self._socket.close()

    async def _answer(self, text: str | None) -> None:
        document: dict[str, Any] = {}
        try:
            sent = (text or "").encode("utf-8", "surrogatepass")
            message = await parse_json(sent, self._front_end.settings)
            if (
                not isinstance(message.value, dict)
                or message.value.get("type") != "response.create"
            ):
                raise RequestError("a message must be of type 'response.create'", param="type")
            document = message.value
            await self._front_end.host.check_rate_limit(self._socket)
            if failure := self._front_end.answers.rejection():
                raise failure
            fields = {key: value for key, value in document.items() if key not in _TRANSPORT}
            body = replace(message, value={**fields, "stream": True})
            await self._respond(body, generates=document.get("generate") is not False)
        except WebSocketDisconnect:
            raise
        except ClientDisconnect:
            return
        except Exception as raised:  # noqa: BLE001 - the client gets every error
            error = _NOT_HARMONY if isinstance(raised, NotHarmony) else raised
            # The specification discards the response that a failed turn was to continue.
            self._forget(responses.previous_response_id(document))
            await self._send_error(failure_of(error, "a response failed"))

    async def _respond(self, body: Document, *, generates: bool) -> None:
        scope = {**self._socket.scope, "type": "http", "method": "POST"}
        request = Request(scope, _empty_body())
        async with lease_for(self._api, request, body, self._front_end) as lease:
            leased_request = LeasedRequest(
                self._api, self._front_end, request, body, lease, new_id_seed()
            )
            job, emitter = await prepare(leased_request)
            deltas = None if generates else _no_output(job)
            async with aclosing(leased_request.start_answer(job, deltas=deltas)) as events:
                await events.first_event()  # earlier errors have a status, as over HTTP
                async for event in events:
                    if not (event is DONE or event.comment):
                        await self._send(event.data)
            if not emitter.forgotten and emitter.document()["status"] != "failed":
                self._previous = emitter
            else:
                self._forget(emitter.request.previous_response_id)

    def _forget(self, response_id: str | None) -> None:
        if self._previous is not None and self._previous.key.id == response_id:
            self._previous = None

    def _read(self, body: object, defaults: Any, caller: Caller) -> Any:
        """Reads a request. In a thread, because ``stored`` may write thousands of items."""
        previous = self._previous
        local = {} if previous is None else {previous.key.id: previous.stored()}
        return read(body, defaults, References(caller, local))

    async def _send_error(self, failure: HarmonyFailure) -> None:
        """Sends an error event, with the headers of the HTTP response, which Codex reads."""
        event = {"type": "error", "status": failure.status, **responses.error_body(failure)}
        if headers := retry_headers(failure):
            event["headers"] = headers
        await self._send(dumps(event))


_NOT_HARMONY = RequestError("this model is not available over a WebSocket", param="model")

_OVER = RequestError(
    f"Responses websocket connection limit reached ({LIFETIME / 60:.0f} minutes). "
    "Create a new websocket connection to continue.",
    code="websocket_connection_limit_reached",
)


def _empty_body() -> Receive:
    """The ASGI ``receive`` of a request without a body, whose client never disconnects."""
    messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return messages.pop() if messages else await never

    return receive


async def _no_output(job: Job) -> Deltas:
    """The deltas of a turn without output, which prepares the next one (``generate: false``)."""
    prompt_tokens = len(job.context.render_for_completion())
    yield [Started(prompt_tokens)]
    yield [Finished("stop", None, Usage(prompt_tokens))]


UVICORN = "uvicorn.error"
"""Name of the logger of uvicorn's errors."""


def without_traceback(record: logging.LogRecord) -> bool:
    """A log filter for ``UVICORN``: removes the traceback for messages that are not UTF-8."""
    error = record.exc_info and record.exc_info[1]
    if isinstance(error, UnicodeDecodeError) and record.msg.startswith("Invalid UTF-8"):
        record.exc_info = None
    return True
