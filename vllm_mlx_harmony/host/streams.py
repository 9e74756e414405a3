"""An answer as server-sent events: framed one by one, ended with a word, closed when nobody reads.

Knows Starlette's streams. Refuses to know what an event says (protocols).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, suppress
from typing import Any, Protocol

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm_mlx_harmony.core.deltas import Delta, Failed
from vllm_mlx_harmony.core.errors import INTERNAL, HarmonyFailure, OutputError
from vllm_mlx_harmony.host.answers import Deltas, stopped
from vllm_mlx_harmony.protocols.events import Event, frame

logger = logging.getLogger(__name__)


class Emitter(Protocol):
    """Writes one answer in the shape of an API."""

    def feed(self, delta: Delta) -> list[Event]:
        """What goes on the wire for ``delta``."""

    def result(self) -> dict[str, Any]:
        """The whole answer, when it is not streamed."""


class EventStream(StreamingResponse):
    """A stream of ``guarded`` frames, whose ``deltas`` are closed when nobody reads it any more.

    Starlette leaves the iterator of a client that has gone to the garbage collector, which may
    come much later, and the engine stays busy until then.
    """

    def __init__(self, guarded: AsyncIterator[str], deltas: Deltas) -> None:
        super().__init__(guarded, media_type="text/event-stream")
        self._deltas = deltas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # A task of its own: this one may be cancelled, and whatever it awaits with it.
            closing = asyncio.ensure_future(_close(self.body_iterator, self._deltas))
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)


_closing: set[asyncio.Future[None]] = set()


async def _close(guarded: Any, deltas: Deltas) -> None:
    await guarded.aclose()
    with suppress(RuntimeError):  # it is running: then the guard has cancelled it just now
        await deltas.aclose()


PING_SECONDS = 5.0
"""Silence after which a stream says that it is alive, in APIs that have a word for it."""


async def frames(
    begun: list[Delta], deltas: Deltas, emitter: Emitter, ping: Event | None = None
) -> AsyncIterator[str]:
    """One server-sent event at a time, of ``begun`` and then of ``deltas``; a failure is one too.

    ``ping`` goes out whenever nothing else does, as while a long prompt is prefilled.
    """
    try:
        for event in _fed(emitter, begun):
            yield frame(event)
        async with aclosing(deltas if ping is None else _with_silences(deltas)) as groups:
            async for group in groups:
                for event in _fed(emitter, group) if group is not None else filter(None, [ping]):
                    yield frame(event)
    except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
        for event in emitter.feed(Failed(_told(error))):
            yield frame(event)


def _fed(emitter: Emitter, group: list[Delta]) -> Iterator[Event]:
    for delta in group:
        yield from emitter.feed(delta)


async def _with_silences(deltas: Deltas) -> AsyncGenerator[list[Delta] | None, None]:
    """The groups of ``deltas``, and a ``None`` for each long wait between them."""
    async with aclosing(deltas):
        while True:
            coming = asyncio.ensure_future(anext(deltas, None))
            try:
                while not (await asyncio.wait({coming}, timeout=PING_SECONDS))[0]:
                    yield None
            finally:
                if not coming.done():
                    await stopped(coming)
            group = coming.result()
            if group is None:
                return
            yield group


def _told(error: Exception) -> HarmonyFailure:
    if isinstance(error, HarmonyFailure):
        return error
    logger.error("a stream failed", exc_info=error)
    return OutputError(INTERNAL, code="internal_error")
