"""Responses looked up and stored: what a request continues, and what remains of its answer.

A response is stored before a client can know that it has ended.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

from vllm_mlx_harmony.core.deltas import Delta, Failed, Finished
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Defaults, Message, ResponseInfo
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.protocols.responses import ResponsesRequest, resource
from vllm_mlx_harmony.server.body import in_thread
from vllm_mlx_harmony.server.encryption import server_cipher
from vllm_mlx_harmony.server.host import Context
from vllm_mlx_harmony.server.responses.shared_background import another_server_runs
from vllm_mlx_harmony.server.responses.store import StoredResponse, StoreError, server_store

logger = logging.getLogger("vllm_mlx_harmony")

_KEY_BYTES = 10


def new_id_seed() -> str:
    """What the ids of a new response are made from: as much as an item's id has room for.

    The id of an item contains that of its response.
    """
    return secrets.token_hex(_KEY_BYTES)


_ITEM = re.compile(rf"[a-z]+_([0-9a-f]{{{2 * _KEY_BYTES}}})[0-9a-f]{{4}}")


@dataclass(slots=True)
class References:
    """What a request of ``tenant`` refers to, each looked up once, in ``local`` first.

    Every call may block on a disk: not for the event loop. Raises ``StoreError``.
    """

    tenant: str
    local: Mapping[str, StoredResponse] = field(default_factory=dict)
    _known: dict[str, StoredResponse | None] = field(default_factory=dict)

    def stored(self, key: str) -> StoredResponse | None:
        """The answer with the id ``key``, if it is kept."""
        if key in self.local:
            return self.local[key]
        if key not in self._known:
            self._known[key] = server_store().get(key, self.tenant)
        return self._known[key]

    def messages(self, key: str | None) -> tuple[Message, ...]:
        """The conversation that a request goes on with.

        Raises ``RequestError``: 404, and 400 for one that another server still generates.
        """
        if key is None:
            return ()
        stored = self.stored(key)
        if stored is None:
            raise resource.not_found(key, param="previous_response_id")
        if resource.is_running(stored.document) and another_server_runs(key, self.tenant):
            raise resource.not_ready(key)
        return stored.messages

    def listed(self, key: str | None) -> frozenset[str]:
        """The tool servers that a request, or one before it, was told the tools of."""
        stored = None if key is None else self.stored(key)
        tools = [] if stored is None else stored.document.get("tools") or []
        return frozenset(str(each.get("server_label")) for each in tools if each["type"] == "mcp")

    def item(self, key: str) -> Mapping[str, Any] | None:
        """The item with the id ``key``, of whatever answer or its input."""
        named = _ITEM.fullmatch(key)
        stored = named and self.stored(f"resp_{named[1]}")
        if not stored:
            return None
        items = chain(stored.document["output"], stored.input_items)
        return next((item for item in items if item.get("id") == key), None)


def read(body: object, defaults: Defaults, references: References) -> ResponsesRequest:
    """The request in ``body``, with what it refers to; may block on a disk.

    Raises ``StoreError``, and ``RequestError``: 404 for a previous response that is not kept.
    """
    previous = responses.previous_response_id(body)
    history, listed = references.messages(previous), references.listed(previous)
    cipher = server_cipher(references.tenant)
    parsed = responses.read(body, defaults, cipher, history, references.item, listed=listed)
    if parsed.background and not parsed.store:
        raise RequestError("background needs store to be true", param="background")
    for note in parsed.notes:
        logger.info("responses: %s", note)
    return parsed


class StoringEmitter:
    """An emitter whose answer is stored before anybody learns that it has ended.

    ``forgotten``: it was deleted before that.
    """

    def __init__(
        self, parsed: ResponsesRequest, info: ResponseInfo, context: Context, tenant: str
    ) -> None:
        self.tenant = tenant
        self._parsed, self._info, self._context = parsed, info, context
        self._emitter = parsed.emitter(info, time.time)
        self._last: list[Event] | None = None
        self._before: dict[str, Any] = {}  # the response as it was before its end
        self._storing: asyncio.Future[None] | None = None
        self.forgotten = False
        if parsed.store:
            _unended[self.id] = self

    @property
    def id(self) -> str:
        """The id of the response."""
        return responses.response_id(self._info)

    def create(self) -> list[Event]:
        """The events that announce the response, before its turn has come."""
        return self._emitter.create()

    def feed(self, delta: Delta) -> list[Event]:
        """The events for ``delta``, any but the last: that one ends the response (``end``)."""
        return self._emitter.feed(delta)

    async def end(self, delta: Finished | Failed | None) -> list[Event]:
        """The events that end the response, once it is stored; ``None``: it was cancelled.

        After that it is stored for good: a response that is deleted then does not come back.
        """
        if self._last is None:
            self._before = self._emitter.document()
            self._last = self._emitter.cancel() if delta is None else self._emitter.feed(delta)
            if self._parsed.store and not self.forgotten:
                self._storing = asyncio.ensure_future(in_thread(self._store))
        if self._storing is not None:
            await asyncio.wait({self._storing})  # which a cancellation of ours does not cancel
        return self._last

    async def forget(self) -> bool:
        """Whether it has not ended: then it is not kept, but who reads it reads it to its end.

        Otherwise it is as kept as it will ever be.
        """
        if self._last is None:
            known, self.forgotten = not self.forgotten, True
            return known
        if self._storing is not None:
            await asyncio.wait({self._storing})
        return False

    def result(self) -> dict[str, Any]:
        """The whole answer, as the protocol's emitter has it."""
        return self._emitter.result()

    def document(self) -> dict[str, Any]:
        """The response as it is now. It has not ended before it is kept."""
        pending = self._storing is not None and not self._storing.done()
        return self._before if pending else self._emitter.document()

    def input_items(self) -> list[dict[str, Any]]:
        """What was asked, as items."""
        return self._parsed.input_items(self._info)

    def stored(self) -> StoredResponse:
        """All of the answer that is worth keeping."""
        document = self._emitter.document()
        ended = document["status"] in ("completed", "incomplete")
        messages = self._parsed.conversation(self._context.messages, ended=ended)
        return StoredResponse(self.id, document, self.input_items(), messages, self.tenant)

    def _store(self) -> None:
        """A disk that is full takes no answer away from the client that waits for it.

        The response says that it was not stored: nobody counts on it and meets a 404 later.
        """
        try:
            if server_store().put(self.stored()):
                return
            problem = "it is larger than the store"
        except StoreError as error:
            problem = error.message
        logger.warning("the response %s could not be stored: %s", self.id, problem)
        self._last = self._emitter.unstored(self._last or [])


_unended: WeakValueDictionary[str, StoringEmitter] = WeakValueDictionary()
"""The answers that are being generated, and some that have ended, by their ids."""


async def forget(key: str, tenant: str) -> bool:
    """Whether an answer of ``tenant`` with this id was being generated: it is not kept, then."""
    answer = _unended.get(key)
    return answer is not None and answer.tenant == tenant and await answer.forget()
