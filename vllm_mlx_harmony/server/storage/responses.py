"""``Responses``: the responses of a front end, in memory, in its store, or on other servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from weakref import WeakValueDictionary

from vllm_mlx_harmony.core.errors import HarmonyFailure, RequestError
from vllm_mlx_harmony.core.turn import ResponseInfo
from vllm_mlx_harmony.protocols.events import DONE, HEARTBEAT, Event
from vllm_mlx_harmony.protocols.responses import ResponsesRequest, resource
from vllm_mlx_harmony.server.host import Context
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.storage.background import (
    AT_ONCE,
    BackgroundResponse,
    BackgroundResponses,
    Closable,
)
from vllm_mlx_harmony.server.storage.conversations import Conversations
from vllm_mlx_harmony.server.storage.persistence import StoringEmitter
from vllm_mlx_harmony.server.storage.sharing import REPORT_SECONDS, Sharing
from vllm_mlx_harmony.server.storage.store import ResourceKey, StoredResponse
from vllm_mlx_harmony.tasks import in_thread


class Responses:
    """Methods may raise ``StoreError``."""

    def __init__(self, sharing: Sharing, settings: ServerSettings) -> None:
        self._sharing, self._ping_seconds = sharing, settings.ping_seconds
        self.conversations = Conversations(sharing.store)
        self._background = BackgroundResponses(settings)
        self._emitters: WeakValueDictionary[ResourceKey, StoringEmitter] = WeakValueDictionary()
        """Those of running responses, and of some that have ended."""

    # --- While a response is generated

    def emitter(
        self, parsed: ResponsesRequest, info: ResponseInfo, context: Context, tenant: str
    ) -> StoringEmitter:
        """The emitter of a new response, which is stored if the request asks for it, and added to
        the request's conversation."""
        emitter = StoringEmitter(
            parsed,
            info,
            context,
            tenant,
            store=self._sharing.store,
            conversations=self.conversations,
        )
        if parsed.store:
            self._emitters[emitter.key] = emitter
        return emitter

    async def start(
        self, emitter: StoringEmitter, start: Callable[[BackgroundResponse], Closable]
    ) -> BackgroundResponse:
        """Starts the background response of ``emitter``, and tells other servers. ``start`` starts
        the answer, whose sink it is.

        Raises ``HostError`` 503 if the running responses take all the memory that they may.
        """
        try:
            await self._sharing.announce(emitter.stored)
            response = await self._background.start(emitter, start)
        except BaseException:
            await self._sharing.withdraw(emitter.key)
            raise
        self._sharing.background_begins(response)
        return response

    # --- For a new request

    def stored(self, key: ResourceKey) -> StoredResponse | None:
        """The response, if it is stored. Blocks."""
        return self._sharing.store.get(key)

    def is_running(self, key: ResourceKey) -> bool:
        """Whether this server generates the background response."""
        running = self._background.get(key)
        return running is not None and not running.done

    def is_running_elsewhere(self, key: ResourceKey) -> bool:
        """Whether another server generates the background response, given that this one does not.
        Blocks."""
        return self._sharing.runs(key)

    def background(self, key: ResourceKey) -> BackgroundResponse | None:
        """The background response, if this server has it in memory."""
        return self._background.get(key)

    # --- For any server

    async def find(self, key: ResourceKey) -> BackgroundResponse | StoredResponse:
        """The response, which this server has in memory, or which is stored.

        Raises ``RequestError`` 404.
        """
        running = self._background.get(key)
        if running is None:
            return await self._find_stored(key)
        if running.done and await self._sharing.was_deleted(key):
            raise resource.not_found(key.id)
        return running

    async def _find_stored(self, key: ResourceKey) -> StoredResponse:
        """The stored response; as failed if the server that generated it has died."""
        # It may have just ended, or the report of its server may be late.
        for pause in (0, 2 * REPORT_SECONDS):
            await asyncio.sleep(pause)
            stored = await self._read(key)
            if not resource.is_running(stored.document) or await self._runs(key):
                return stored
        return replace(stored, document=resource.lost(stored.document))

    async def _read(self, key: ResourceKey) -> StoredResponse:
        stored = await in_thread(self.stored, key)
        if stored is None:
            raise resource.not_found(key.id)
        return stored

    async def _runs(self, key: ResourceKey) -> bool:
        return await asyncio.to_thread(self._sharing.runs, key)

    async def follow(
        self, found: BackgroundResponse | StoredResponse, start: int
    ) -> AsyncGenerator[Event, None]:
        """The events from number ``start`` on, as they arrive. During a silence, an event says that
        the response is running. Raises ``RequestError`` if there are no events."""
        if isinstance(found, BackgroundResponse):
            return found.follow(start)
        if (
            await asyncio.to_thread(self._sharing.has_events, found.key)
            # Its server may have died before the first event.
            or resource.is_running((await self._read(found.key)).document)
        ):
            return self._events(found.key, start)
        raise RequestError(
            "the events of this response are not available: they are stored for a limited time "
            "and only for responses created with background=true",
            param="stream",
        )

    async def _events(self, key: ResourceKey, start: int) -> AsyncGenerator[Event, None]:
        silent_since = time.monotonic()
        try:
            while True:
                runs = await self._runs(key)  # asked first: if it has ended, these are all events
                events = await asyncio.to_thread(self._sharing.events, key, start)
                for event in events:
                    yield event
                    start += 1
                    if not start % AT_ONCE:
                        await asyncio.sleep(0)
                if DONE in events[-1:]:
                    return
                if events or runs:
                    silent_since = time.monotonic() if events else silent_since
                    if self._ping_seconds and time.monotonic() - silent_since >= self._ping_seconds:
                        yield await self._ping(key, start - 1)
                        silent_since = time.monotonic()
                else:
                    stored = await self._find_stored(key)
                    if stored.document.get("status") == "failed":
                        yield resource.failed_event(stored.document, start)
                        break
                    if not resource.is_running(stored.document):
                        break  # its last events were never sent
                await asyncio.sleep(REPORT_SECONDS)
        except HarmonyFailure as failure:
            yield resource.error_event(failure, start)
        yield DONE

    async def _ping(self, key: ResourceKey, number: int) -> Event:
        """Says that a response on another server is running; a comment if it cannot be read now."""
        with suppress(HarmonyFailure):
            return resource.running_event((await self._read(key)).document, number)
        return HEARTBEAT

    async def cancel(
        self, found: BackgroundResponse | StoredResponse
    ) -> BackgroundResponse | StoredResponse:
        """Cancels ``found`` on the server that generates it, and returns it afterwards."""
        if isinstance(found, BackgroundResponse):
            await found.cancel()
            return found
        if not resource.is_running(found.document):
            return found
        await self._sharing.cancel_response(found.key)
        return await self._find_stored(found.key)

    async def cancel_elsewhere(self, key: ResourceKey) -> bool:
        """Cancels the background response if another server generates it; returns whether one
        does. As an answer, it would fail."""
        if not await self._runs(key):
            return False
        await self._sharing.cancel_response(key)
        return True

    async def delete(self, key: ResourceKey) -> bool:
        """Ends and deletes the response on all servers; returns whether it existed."""
        emitter = self._emitters.get(key)
        forgotten = emitter is not None and await emitter.forget()
        cancelled = await self._background.forget(key)
        deleted = await self._sharing.delete_response(key)
        return forgotten or cancelled or deleted
