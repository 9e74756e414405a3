"""Finds responses on any of the servers, and reads requests that refer to them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from vllm_mlx_harmony.core.errors import HarmonyFailure, RequestError, StoreError
from vllm_mlx_harmony.core.turn import Defaults, Message
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.events import DONE, HEARTBEAT, Event
from vllm_mlx_harmony.protocols.responses import ResponsesRequest, resource
from vllm_mlx_harmony.server import serving
from vllm_mlx_harmony.server.answers import AnswerKey
from vllm_mlx_harmony.server.encryption import server_cipher
from vllm_mlx_harmony.server.generation import Job
from vllm_mlx_harmony.server.peers.answers import (
    EXPIRY_SECONDS,
    HEARTBEAT_SECONDS,
    Command,
    Directory,
    directory,
    runs_elsewhere,
)
from vllm_mlx_harmony.server.responses.background import AT_ONCE, BACKGROUND, Running
from vllm_mlx_harmony.server.responses.persistence import SEED_BYTES, StoringEmitter
from vllm_mlx_harmony.server.responses.store import StoredResponse, server_store
from vllm_mlx_harmony.server.serving import Api, Received
from vllm_mlx_harmony.tasks import in_thread

logger = logging.getLogger("vllm_mlx_harmony")

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
        await asyncio.to_thread(known.beat, [], {AnswerKey(stored.id, stored.tenant): {}})


async def withdraw(response: StoringEmitter) -> None:
    """Removes an announced response that is not generated after all."""
    known = directory()
    if known is not None:
        with suppress(StoreError):
            await asyncio.to_thread(server_store().delete, response.id, response.tenant)
            await asyncio.to_thread(known.forget, AnswerKey(response.id, response.tenant))


# --- For any server


async def find(key: str, tenant: str) -> Running | StoredResponse:
    """The response, which this server has in memory, or which is stored.

    Raises ``RequestError`` 404 and ``StoreError``.
    """
    running = BACKGROUND.get(key, tenant)
    if running is None:
        return await _stored(key, tenant)
    if running.done and directory() is not None:  # another server may have deleted it
        with suppress(StoreError):
            await _read(key, tenant)
    return running


async def _stored(key: str, tenant: str) -> StoredResponse:
    """The stored response. It is returned as failed if the server that generated it has died."""
    for pause in (0, 2 * HEARTBEAT_SECONDS):  # it may have just ended, or its heartbeat may be late
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


async def follow(
    found: Running | StoredResponse, start: int, pings_after: float
) -> AsyncGenerator[Event, None]:
    """The events from number ``start`` to the last, as they arrive.

    After ``pings_after`` seconds of silence, an event says that the response is running; 0: never.
    Raises ``RequestError`` if there are no events.
    """
    if isinstance(found, Running):
        return found.follow(start)
    known, answer = directory(), AnswerKey(found.id, found.tenant)
    if known is not None and (
        await asyncio.to_thread(known.has, answer)
        # Its server may have died before the first event.
        or resource.is_running((await _read(*answer)).document)
    ):
        return _events(known, answer, start, pings_after)
    raise RequestError(
        "the events of this response are not available: they are stored for a limited time "
        "and only for responses created with background=true",
        param="stream",
    )


async def _events(
    known: Directory, answer: AnswerKey, start: int, pings_after: float
) -> AsyncGenerator[Event, None]:
    silent_since = time.monotonic()
    try:
        while True:
            runs = await _runs(*answer)  # asked first: if it has ended, these are all events
            events = await asyncio.to_thread(known.events, answer, start)
            for event in events:
                yield event
                start += 1
                if not start % AT_ONCE:
                    await asyncio.sleep(0)
            if DONE in events[-1:]:
                return
            if events or runs:
                silent_since = time.monotonic() if events else silent_since
                if pings_after and time.monotonic() - silent_since >= pings_after:
                    yield await _ping(*answer, start - 1)
                    silent_since = time.monotonic()
            else:
                stored = await _stored(*answer)
                if stored.document.get("status") == "failed":
                    yield resource.failed_event(stored.document, start)
                    break
                if not resource.is_running(stored.document):
                    break  # its last events were never sent
            await asyncio.sleep(HEARTBEAT_SECONDS)
    except HarmonyFailure as failure:
        yield resource.error_event(failure, start)
    yield DONE


async def _ping(key: str, tenant: str, number: int) -> Event:
    """Says that a response on another server is running; a comment if it cannot be read now."""
    with suppress(HarmonyFailure):
        return resource.running_event((await _read(key, tenant)).document, number)
    return HEARTBEAT


async def cancel(found: Running | StoredResponse) -> Running | StoredResponse:
    """Cancels ``found`` on the server that generates it, and returns it afterwards."""
    if isinstance(found, Running):
        await found.cancel()
        return found
    known = directory()
    if known is None or not resource.is_running(found.document):
        return found
    await known.send(AnswerKey(found.id, found.tenant), Command.CANCEL, EXPIRY_SECONDS)
    return await _stored(found.id, found.tenant)


async def delete(key: str, tenant: str) -> bool:
    """Deletes the response on all servers; returns whether it existed."""
    known = directory()
    if known is not None and await _runs(key, tenant):
        await known.send(AnswerKey(key, tenant), Command.DELETE, EXPIRY_SECONDS)
    deleted = await asyncio.to_thread(server_store().delete, key, tenant)
    if known is not None:
        await asyncio.to_thread(known.forget, AnswerKey(key, tenant))
    return deleted


# --- Requests that refer to stored responses

_ITEM = re.compile(rf"[a-z]+_([0-9a-f]{{{2 * SEED_BYTES}}})[0-9a-f]{{4}}")
"""The id of an item, which contains the seed of its response."""


@dataclass(slots=True)
class References:
    """The responses that a request of ``tenant`` refers to, looked up in ``local`` first.

    Every call may block, and raise ``StoreError``.
    """

    tenant: str
    local: Mapping[str, StoredResponse] = field(default_factory=dict)
    _known: dict[str, StoredResponse | None] = field(default_factory=dict)

    def stored(self, key: str) -> StoredResponse | None:
        """The response with the id ``key``, if it is stored."""
        if key in self.local:
            return self.local[key]
        if key not in self._known:
            self._known[key] = server_store().get(key, self.tenant)
        return self._known[key]

    def previous(self, key: str) -> StoredResponse:
        """The response that a request continues.

        Raises ``RequestError``: 404 if it is unknown, 400 if it is still being generated.
        """
        running = BACKGROUND.get(key, self.tenant)
        if running is not None and not running.done:
            raise resource.not_ready(key)
        stored = self.stored(key)
        if stored is None:
            raise resource.not_found(key, param="previous_response_id")
        if resource.is_running(stored.document) and runs_elsewhere(key, self.tenant):
            raise resource.not_ready(key)
        return stored

    def item(self, key: str) -> Mapping[str, Any] | None:
        """The item with the id ``key``, from the output or the input of any response."""
        match = _ITEM.fullmatch(key)
        stored = self.stored(f"resp_{match[1]}") if match else None
        if stored is None:
            return None
        items = chain(stored.document["output"], stored.input_items)
        return next((item for item in items if item.get("id") == key), None)


RESPONSES = Api(
    "responses",
    lambda body, defaults, tenant: read(body, defaults, References(tenant)),
    blocks=True,
    servers=responses.client_servers,
    # The events of a background response may be requested later.
    emitter=lambda parsed, info, context, tenant: StoringEmitter(
        replace(parsed, stream=parsed.stream or parsed.background), info, context, tenant
    ),
    comments_progress=True,
    logprobs="include",
)


async def prepare(received: Received) -> tuple[Job, StoringEmitter]:
    """What ``serving.prepare`` makes of a request of ``RESPONSES``, and its emitter.

    The emitter writes the last events, when it has stored the response.
    """
    job = await serving.prepare(received)
    emitter = job.emitter
    assert isinstance(emitter, StoringEmitter)  # made by ``RESPONSES``
    return replace(job, write_last=emitter.write_last), emitter


def read(body: object, defaults: Defaults, references: References) -> ResponsesRequest:
    """Reads the request in ``body``. May block.

    Raises ``StoreError``, and ``RequestError``: 404 for a previous response that is not stored, and
    400 for one that is still being generated.
    """
    history: tuple[Message, ...] = ()
    listed: frozenset[str] = frozenset()  # tool servers whose tools the conversation lists
    if (key := responses.previous_response_id(body)) is not None:
        previous = references.previous(key)
        history, tools = previous.messages, previous.document.get("tools") or []
        listed = frozenset(str(each.get("server_label")) for each in tools if each["type"] == "mcp")
    cipher = server_cipher(references.tenant)
    parsed = responses.read(body, defaults, cipher, history, references.item, listed=listed)
    for note in parsed.notes:
        logger.info("responses: %s", note)
    return parsed
