"""Finds, follows, cancels and deletes stored responses, whichever server generates them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace

from vllm_mlx_harmony.core.errors import HarmonyFailure
from vllm_mlx_harmony.protocols.events import DONE, HEARTBEAT, Event
from vllm_mlx_harmony.protocols.responses import resource
from vllm_mlx_harmony.server.answer import DEFAULT_PING_SECONDS, PING_VARIABLE
from vllm_mlx_harmony.server.body import in_thread
from vllm_mlx_harmony.server.errors import StoreError
from vllm_mlx_harmony.server.peers.answers import (
    ALIVE,
    BEAT,
    Command,
    Directory,
    directory,
    runs_elsewhere,
)
from vllm_mlx_harmony.server.responses.background import Running
from vllm_mlx_harmony.server.responses.persistence import StoringEmitter
from vllm_mlx_harmony.server.responses.store import server_store
from vllm_mlx_harmony.server.responses.stored import StoredResponse
from vllm_mlx_harmony.server.settings import number

# --- For the server that generates a response


async def announce(response: StoringEmitter) -> None:
    """Stores a response before it is generated, so that other servers can find it."""
    known = directory()
    if known is None:
        return
    stored = await in_thread(response.stored)
    running = replace(stored, document={**stored.document, "status": "in_progress"})
    with suppress(StoreError):  # then only this server can find it until it ends
        await in_thread(server_store().put, running)
        await asyncio.to_thread(known.beat, [], {(stored.id, stored.tenant): {}})


async def withdraw(response: StoringEmitter) -> None:
    """Removes an announced response that is not generated after all."""
    known = directory()
    if known is not None:
        with suppress(StoreError):
            await asyncio.to_thread(server_store().delete, response.id, response.tenant)
            await asyncio.to_thread(known.forget, (response.id, response.tenant))


async def unless_deleted(running: Running) -> Running | None:
    """``running``, unless another server has deleted it since it ended."""
    if not running.done or directory() is None:
        return running
    try:
        known = await in_thread(server_store().get, running.id, running.tenant)
    except StoreError:
        return running
    return None if known is None else running


# --- Stored responses, wherever they are generated


async def find(key: str, tenant: str) -> StoredResponse:
    """The stored response. Raises ``RequestError`` 404 and ``StoreError``.

    A response is returned as failed if the server that generated it has died.
    """
    for pause in (0, 2 * BEAT):  # it may have just ended, or its beat may be late
        await asyncio.sleep(pause)
        stored = await _read(key, tenant)
        if not resource.is_running(stored.document) or await _runs(key, tenant):
            return stored
    return replace(stored, document=resource.lost(stored.document))


async def _read(key: str, tenant: str) -> StoredResponse:
    stored = await in_thread(server_store().get, key, tenant)
    if stored is None:
        raise resource.not_found(key)
    return stored


async def _runs(key: str, tenant: str) -> bool:
    return await asyncio.to_thread(runs_elsewhere, key, tenant)


async def follow(key: str, tenant: str, start: int) -> AsyncGenerator[Event, None] | None:
    """The events from number ``start`` to the last, as they arrive; ``None`` if there are none."""
    known = directory()
    if known is None:
        return None
    if not await asyncio.to_thread(known.has, (key, tenant)):
        stored = await _read(key, tenant)
        if not resource.is_running(stored.document):  # or its server died before the first event
            return None
    return _events(known, key, tenant, start)


async def _events(
    known: Directory, key: str, tenant: str, start: int
) -> AsyncGenerator[Event, None]:
    pings_after = number(PING_VARIABLE, DEFAULT_PING_SECONDS)
    silent_since = time.monotonic()
    ended = False
    try:
        while True:
            events = await asyncio.to_thread(known.events, (key, tenant), start)
            for event in events:
                yield event
            start += len(events)
            if DONE in events[-1:]:
                return
            if events or await _runs(key, tenant):
                ended = False
                silent_since = time.monotonic() if events else silent_since
                if pings_after and time.monotonic() - silent_since >= pings_after:
                    yield HEARTBEAT
                    silent_since = time.monotonic()
            elif not ended:
                ended = True  # its last events may have come since they were read
                continue
            else:
                stored = await find(key, tenant)
                if stored.document.get("status") == "failed":
                    yield resource.failed_event(stored.document, start)
                    break
                if not resource.is_running(stored.document):
                    break  # its last events were never sent
            await asyncio.sleep(BEAT)
    except HarmonyFailure as failure:
        yield resource.error_event(failure, start)
    yield DONE


async def cancel(stored: StoredResponse) -> StoredResponse:
    """Cancels ``stored`` on the server that generates it, and returns it afterwards."""
    known = directory()
    if known is None or not resource.is_running(stored.document):
        return stored
    await known.send((stored.id, stored.tenant), Command.CANCEL, ALIVE)
    return await find(stored.id, stored.tenant)


async def delete(key: str, tenant: str) -> bool:
    """Deletes the response on all servers; returns whether it existed."""
    known = directory()
    if known is not None and await _runs(key, tenant):
        await known.send((key, tenant), Command.DELETE, ALIVE)
    deleted = await asyncio.to_thread(server_store().delete, key, tenant)
    if known is not None:
        await asyncio.to_thread(known.forget, (key, tenant))
    return deleted
