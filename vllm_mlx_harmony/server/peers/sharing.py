"""``RedisSharing``: the ``Sharing`` of servers that share a Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from vllm_mlx_harmony.core.errors import StoreError
from vllm_mlx_harmony.core.replay import Archive
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server.answers import AnswerKey, Answers
from vllm_mlx_harmony.server.peers.connection import Connection, PeersError
from vllm_mlx_harmony.server.peers.directory import (
    CONFIRMATION_SECONDS,
    EXPIRY_SECONDS,
    Command,
    Directory,
    Heartbeat,
)
from vllm_mlx_harmony.server.peers.store import SharedStore
from vllm_mlx_harmony.server.peers.turns import SharedTurns
from vllm_mlx_harmony.server.storage.background import BackgroundResponse
from vllm_mlx_harmony.server.storage.store import ResourceKey, Store, StoredResponse
from vllm_mlx_harmony.tasks import in_thread


class RedisSharing:
    """Methods are described in ``Sharing``."""

    def __init__(self, connection: Connection) -> None:
        self.store: Store = SharedStore(connection)
        self.encryption_key: bytes | None = connection.encryption_key
        self.archive: Archive | None = SharedTurns(connection)
        self._directory = Directory(connection)
        self.answers = Answers()
        self._heartbeat = Heartbeat(self._directory, self.answers)

    def answer_begins(self) -> None:
        self._heartbeat.answer_begins()

    async def cancel(self, key: AnswerKey) -> bool:
        return await self._directory.send(key, Command.CANCEL, CONFIRMATION_SECONDS)

    async def announce(self, make: Callable[[], StoredResponse]) -> None:
        stored = await in_thread(make)
        running = replace(stored, document={**stored.document, "status": "in_progress"})
        with suppress(StoreError):  # then only this server can find it until it ends
            await in_thread(self.store.put, running)
            await asyncio.to_thread(self._directory.beat, [], {stored.key: {}})

    async def withdraw(self, key: ResourceKey) -> None:
        with suppress(StoreError):
            await asyncio.to_thread(self.store.delete, key)
            await asyncio.to_thread(self._directory.forget, key)

    def background_begins(self, response: BackgroundResponse) -> None:
        self._heartbeat.background_begins(response)

    def runs(self, key: ResourceKey) -> bool:
        try:
            return self._directory.runs(key)
        except PeersError:  # the response must not be reported as lost
            return True

    def has_events(self, key: ResourceKey) -> bool:
        return self._directory.has(key)

    def events(self, key: ResourceKey, start: int) -> list[Event]:
        return self._directory.events(key, start)

    async def was_deleted(self, key: ResourceKey) -> bool:
        with suppress(StoreError):
            return await in_thread(self.store.get, key) is None
        return False

    async def cancel_response(self, key: ResourceKey) -> None:
        await self._directory.send(key, Command.CANCEL, EXPIRY_SECONDS)

    async def delete_response(self, key: ResourceKey) -> bool:
        if await asyncio.to_thread(self.runs, key):
            await self._directory.send(key, Command.DELETE, EXPIRY_SECONDS)
        deleted = await asyncio.to_thread(self.store.delete, key)
        await asyncio.to_thread(self._directory.forget, key)
        return deleted
