"""``Sharing``: what a server has in common with others that have the same clients.

Clients of several servers behind one address may send each request to a different one. If the
servers share a Redis, ``server.peers.sharing.RedisSharing`` is their ``Sharing``: each of them
finds, follows, cancels and deletes the responses of all, decrypts their reasoning, and reuses the
turns that they have generated. Otherwise it is ``SingleServer``, and each server has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vllm_mlx_harmony.core.replay import Archive
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server.answers import AnswerKey, Answers
from vllm_mlx_harmony.server.storage.background import BackgroundResponse
from vllm_mlx_harmony.server.storage.store import ResourceKey, Store, StoredResponse

REPORT_SECONDS = 0.5
"""Seconds between two reports of a server about its running answers."""


class Sharing(Protocol):
    """Methods that are not coroutines block, except for ``answer_begins`` and
    ``background_begins``. All but these and ``runs`` may raise ``StoreError``."""

    @property
    def store(self) -> Store:
        """The store of responses."""

    @property
    def encryption_key(self) -> bytes | None:
        """The key of encrypted reasoning; ``None`` if the server has a key of its own."""

    @property
    def archive(self) -> Archive | None:
        """The generated turns of all servers; ``None`` if there is only the archive of the host."""

    # --- Answers

    @property
    def answers(self) -> Answers:
        """The answers of this server."""

    def answer_begins(self) -> None:
        """One of ``answers`` begins. From now on, other servers can cancel it."""

    async def cancel(self, key: AnswerKey) -> bool:
        """Cancels an answer on another server; returns whether one had it."""

    # --- Background responses

    async def announce(self, make: Callable[[], StoredResponse]) -> None:
        """Lets other servers find a response that is about to begin, as ``make`` returns it."""

    async def withdraw(self, key: ResourceKey) -> None:
        """Removes an announced response that does not begin after all."""

    def background_begins(self, response: BackgroundResponse) -> None:
        """``response`` begins, and its answer is one of ``answers``. From now on, other servers can
        follow, cancel and delete it."""

    def runs(self, key: ResourceKey) -> bool:
        """Whether any server, this one included, generates the response; also true if that cannot
        be found out."""

    def has_events(self, key: ResourceKey) -> bool:
        """Whether any server generates the response, or its events are still known."""

    def events(self, key: ResourceKey, start: int) -> list[Event]:
        """The known events of the response from number ``start`` on."""

    async def was_deleted(self, key: ResourceKey) -> bool:
        """Whether the response, which this server has in memory, was deleted on another one."""

    async def cancel_response(self, key: ResourceKey) -> None:
        """Cancels the response on the server that generates it."""

    async def delete_response(self, key: ResourceKey) -> bool:
        """Deletes the response on all servers; returns whether it was stored."""
