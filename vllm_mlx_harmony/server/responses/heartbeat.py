"""What runs in this server's background, announced to the servers that share its clients.

Knows when that is, and what is done for them. Refuses to know how they are reached (elsewhere)
and how an answer is generated (background).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace

from vllm_mlx_harmony.server.body import in_thread
from vllm_mlx_harmony.server.responses.background import Background, Running
from vllm_mlx_harmony.server.responses.elsewhere import BEAT, Elsewhere, Wish, server_elsewhere
from vllm_mlx_harmony.server.responses.persistence import StoringEmitter, forget
from vllm_mlx_harmony.server.responses.store import StoreError, server_store
from vllm_mlx_harmony.server.shared import SharedError

logger = logging.getLogger("vllm_mlx_harmony")


async def announce(answer: StoringEmitter) -> None:
    """Stores an answer that is about to be generated, where another server may be asked for it."""
    elsewhere = server_elsewhere()
    if elsewhere is None:
        return
    stored = await in_thread(answer.stored)
    running = replace(stored, document={**stored.document, "status": "in_progress"})
    with suppress(StoreError, SharedError):  # then it is known here alone until it has ended
        await in_thread(server_store().put, running)
        await asyncio.to_thread(elsewhere.beat, [(stored.id, stored.tenant)], [[]])


async def withdraw(answer: StoringEmitter) -> None:
    """An answer that was announced is not generated after all."""
    elsewhere = server_elsewhere()
    if elsewhere is not None:
        with suppress(StoreError, SharedError):
            await asyncio.to_thread(server_store().delete, answer.id, answer.tenant)
            await asyncio.to_thread(elsewhere.forget, answer.id, answer.tenant)


class Heartbeat:
    """Tells of the answers in ``background``, as long as there are any to tell of."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._sent: dict[Running, int] = {}  # how many of its events
        self._granted: dict[Running, asyncio.Future[None]] = {}
        self._beating: asyncio.Future[None] | None = None

    def watch(self, running: Running) -> None:
        """From now on until it has ended."""
        elsewhere = server_elsewhere()
        if elsewhere is None:
            return
        self._sent[running] = 0
        if self._beating is None or self._beating.done():
            self._beating = asyncio.ensure_future(self._beat(elsewhere))

    async def _beat(self, elsewhere: Elsewhere) -> None:
        while self._sent:
            try:
                await self._tell(elsewhere)
            except SharedError:  # nobody can ask for those that ended meanwhile but here
                for running in [each for each in self._sent if each.done]:
                    self._drop(running)
            except Exception:
                logger.exception("other servers could not be told of the background")
            await asyncio.sleep(BEAT)

    async def _tell(self, elsewhere: Elsewhere) -> None:
        sent = {each: each.events[start:] for each, start in self._sent.items()}
        names = [(each.id, each.tenant) for each in sent]
        wishes = await asyncio.to_thread(elsewhere.beat, names, list(sent.values()))
        for (running, events), wish in zip(sent.items(), wishes, strict=True):
            self._sent[running] += len(events)
            if self._background.get(running.id, running.tenant) is not running:  # deleted here
                await asyncio.to_thread(elsewhere.forget, running.id, running.tenant)
                self._drop(running)
            elif running.done and self._sent[running] == len(running.events):
                await asyncio.to_thread(elsewhere.ended, running.id, running.tenant)
                self._drop(running)
            elif wish is not None and running not in self._granted:
                self._granted[running] = asyncio.ensure_future(self._grant(running, wish))

    async def _grant(self, running: Running, wish: Wish) -> None:
        """Does what is wanted. That it has ended, or is gone, is told with the next beat."""
        if wish is Wish.CANCEL:
            await running.cancel()
        else:
            await forget(running.id, running.tenant)
            await self._background.forget(running.id, running.tenant)

    def _drop(self, running: Running) -> None:
        del self._sent[running]
        self._granted.pop(running, None)
