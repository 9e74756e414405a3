"""``SingleServer``: the ``Sharing`` of a server that shares nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vllm_mlx_harmony.core.replay import Archive
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server.answers import AnswerKey, Answers
from vllm_mlx_harmony.server.storage.background import BackgroundResponse
from vllm_mlx_harmony.server.storage.store import ResourceKey, Store, StoredResponse


class SingleServer:
    """Methods are described in ``Sharing``. Nothing is known of any other server."""

    encryption_key: bytes | None = None
    archive: Archive | None = None

    def __init__(self, store: Store) -> None:
        self.store = store
        self.answers = Answers()

    def answer_begins(self) -> None:
        pass

    async def cancel(self, key: AnswerKey) -> bool:
        return False

    async def announce(self, make: Callable[[], StoredResponse]) -> None:
        pass

    async def withdraw(self, key: ResourceKey) -> None:
        pass

    def background_begins(self, response: BackgroundResponse) -> None:
        pass

    def runs(self, key: ResourceKey) -> bool:
        return False

    def has_events(self, key: ResourceKey) -> bool:
        return False

    def events(self, key: ResourceKey, start: int) -> list[Event]:
        return []

    async def was_deleted(self, key: ResourceKey) -> bool:
        return False

    async def cancel_response(self, key: ResourceKey) -> None:
        pass

    async def delete_response(self, key: ResourceKey) -> bool:
        return await asyncio.to_thread(self.store.delete, key)
