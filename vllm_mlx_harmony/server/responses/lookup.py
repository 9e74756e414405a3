"""Stored responses, and background responses of other servers: read, follow, cancel, delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from vllm_mlx_harmony.core.errors import HarmonyFailure
from vllm_mlx_harmony.protocols.events import DONE, Event
from vllm_mlx_harmony.protocols.responses import resource
from vllm_mlx_harmony.server.body import in_thread
from vllm_mlx_harmony.server.responses.shared_background import (
    ALIVE,
    BEAT,
    Command,
    another_server_runs,
    shared_background,
)
from vllm_mlx_harmony.server.responses.store import StoredResponse, server_store

_POLL = 0.1
"""Seconds between two checks whether another server has carried out a command."""


async def find(key: str, tenant: str) -> StoredResponse:
    """The stored response. Raises ``RequestError`` 404 and ``StoreError``.

    A response is returned as failed if the server that generated it has died.
    """
    stored = await _read(key, tenant)
    if not resource.is_running(stored.document) or await _runs(key, tenant):
        return stored
    await asyncio.sleep(2 * BEAT)  # it may have just ended, or its heartbeat may be late
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
    return await asyncio.to_thread(another_server_runs, key, tenant)


async def has_events(key: str, tenant: str) -> bool:
    """Whether there are events of the response from another server."""
    shared = shared_background()
    if shared is None:
        return False
    return await _runs(key, tenant) or bool(await asyncio.to_thread(shared.events, key, tenant, -1))


async def follow(key: str, tenant: str, start: int) -> AsyncGenerator[Event, None]:
    """The events from number ``start`` to the last, from another server."""
    shared = shared_background()
    assert shared is not None
    try:
        ending = False
        while True:
            events = await asyncio.to_thread(shared.events, key, tenant, start)
            for event in events:
                yield event
            start += len(events)
            if DONE in events[-1:]:
                return
            if not events:
                stored = await find(key, tenant)
                if stored.document.get("status") == "failed" and not await _runs(key, tenant):
                    yield resource.failed_event(stored.document, start)
                    break
                if ending and not resource.is_running(stored.document):
                    break  # it has ended, and its last events were never sent
                ending = not resource.is_running(stored.document)
            await asyncio.sleep(BEAT)
    except HarmonyFailure as failure:
        yield resource.error_event(failure, start)
    yield DONE


async def cancel(stored: StoredResponse) -> StoredResponse:
    """Cancels ``stored`` on another server, and returns it when that is done or times out."""
    shared = shared_background()
    assert shared is not None
    await asyncio.to_thread(shared.send, stored.id, stored.tenant, Command.CANCEL)
    for _ in range(int(ALIVE / _POLL)):
        stored = await _read(stored.id, stored.tenant)
        if not resource.is_running(stored.document):
            return stored
        await asyncio.sleep(_POLL)
    return await find(stored.id, stored.tenant)


async def delete(key: str, tenant: str) -> bool:
    """Deletes the response on all servers; returns whether it existed."""
    shared = shared_background()
    if shared is not None and await _runs(key, tenant):
        await asyncio.to_thread(shared.send, key, tenant, Command.DELETE)
        for _ in range(int(ALIVE / _POLL)):
            if not await _runs(key, tenant):
                break
            await asyncio.sleep(_POLL)
    deleted = await asyncio.to_thread(server_store().delete, key, tenant)
    if shared is not None:
        await asyncio.to_thread(shared.forget, key, tenant)
    return deleted
