"""Answers that are not this server's to generate: stored ones, and those that another generates.

Knows how they are looked up, followed, cancelled and deleted. Refuses to know paths and queries
(routes), and what servers tell each other (elsewhere).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from vllm_mlx_harmony.core.errors import HarmonyFailure
from vllm_mlx_harmony.protocols.events import DONE, Event
from vllm_mlx_harmony.protocols.responses import resource
from vllm_mlx_harmony.server.body import in_thread
from vllm_mlx_harmony.server.responses.elsewhere import (
    ALIVE,
    BEAT,
    Wish,
    runs_elsewhere,
    server_elsewhere,
)
from vllm_mlx_harmony.server.responses.store import StoredResponse, server_store

_GRANTED = 0.1
"""Seconds between two looks whether another server has done what it was asked for."""


async def find(key: str, tenant: str) -> StoredResponse:
    """The answer. Raises ``RequestError`` 404, and ``StoreError``.

    One of which nothing more will come, since the server that generated it has gone, has failed.
    """
    stored = await _read(key, tenant)
    if not resource.is_running(stored.document) or await _runs(key, tenant):
        return stored
    await asyncio.sleep(2 * BEAT)  # it may have ended just now, or be told of again
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


async def has_events(key: str, tenant: str) -> bool:
    """Whether events of it come from another server, or are still there from it."""
    elsewhere = server_elsewhere()
    if elsewhere is None:
        return False
    return await _runs(key, tenant) or bool(
        await asyncio.to_thread(elsewhere.events, key, tenant, -1)
    )


async def follow(key: str, tenant: str, start: int) -> AsyncGenerator[Event, None]:
    """The events from number ``start`` on, as another server tells them, to the last one."""
    elsewhere = server_elsewhere()
    assert elsewhere is not None
    try:
        ending = False
        while True:
            events = await asyncio.to_thread(elsewhere.events, key, tenant, start)
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
                    break  # it has ended, and of its end nothing was told
                ending = not resource.is_running(stored.document)
            await asyncio.sleep(BEAT)
    except HarmonyFailure as failure:
        yield resource.error_event(failure, start)
    yield DONE


async def cancel(stored: StoredResponse) -> StoredResponse:
    """``stored``, which another server generates, when that has ended it, or has not for long."""
    elsewhere = server_elsewhere()
    assert elsewhere is not None
    await asyncio.to_thread(elsewhere.want, stored.id, stored.tenant, Wish.CANCEL)
    for _ in range(int(ALIVE / _GRANTED)):
        stored = await _read(stored.id, stored.tenant)
        if not resource.is_running(stored.document):
            return stored
        await asyncio.sleep(_GRANTED)
    return await find(stored.id, stored.tenant)


async def delete(key: str, tenant: str) -> bool:
    """Whether there was an answer; from now on there is none, on no server."""
    elsewhere = server_elsewhere()
    if elsewhere is not None and await _runs(key, tenant):
        await asyncio.to_thread(elsewhere.want, key, tenant, Wish.DELETE)
        for _ in range(int(ALIVE / _GRANTED)):
            if not await _runs(key, tenant):
                break
            await asyncio.sleep(_GRANTED)
    deleted = await asyncio.to_thread(server_store().delete, key, tenant)
    if elsewhere is not None:
        await asyncio.to_thread(elsewhere.forget, key, tenant)
    return deleted
