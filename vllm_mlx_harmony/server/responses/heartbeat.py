"""The heartbeat of this server's background responses (`shared_background`)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace

from vllm_mlx_harmony.server.body import in_thread
from vllm_mlx_harmony.server.responses.background import Background, Running
from vllm_mlx_harmony.server.responses.persistence import StoringEmitter, forget
from vllm_mlx_harmony.server.responses.shared_background import (
    BEAT,
    Command,
    SharedBackground,
    shared_background,
)
from vllm_mlx_harmony.server.responses.store import server_store
from vllm_mlx_harmony.server.shared import SharedError, StoreError

logger = logging.getLogger("vllm_mlx_harmony")


async def announce(answer: StoringEmitter) -> None:
    """Stores a response before it is generated, so that other servers can find it."""
    shared = shared_background()
    if shared is None:
        return
    stored = await in_thread(answer.stored)
    running = replace(stored, document={**stored.document, "status": "in_progress"})
    with suppress(StoreError):  # then only this server can find it until it ends
        await in_thread(server_store().put, running)
        await asyncio.to_thread(shared.beat, [(stored.id, stored.tenant)], [[]])


async def withdraw(answer: StoringEmitter) -> None:
    """Removes an announced response that is not generated after all."""
    shared = shared_background()
    if shared is not None:
        with suppress(StoreError):
            await asyncio.to_thread(server_store().delete, answer.id, answer.tenant)
            await asyncio.to_thread(shared.forget, answer.id, answer.tenant)


class Heartbeat:
    """Sends heartbeats for the responses in ``background``."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._sent: dict[Running, int] = {}  # events of each response that have been sent
        self._commands: dict[Running, asyncio.Future[None]] = {}
        self._beating: asyncio.Future[None] | None = None

    def watch(self, running: Running) -> None:
        """Sends heartbeats for ``running`` until it has ended."""
        shared = shared_background()
        if shared is None:
            return
        self._sent[running] = 0
        if self._beating is None or self._beating.done():
            self._beating = asyncio.ensure_future(self._beat(shared))

    async def _beat(self, shared: SharedBackground) -> None:
        while self._sent:
            try:
                await self._report(shared)
            except SharedError:  # the last events of an ended response can then be read only here
                for running in [each for each in self._sent if each.done]:
                    self._drop(running)
            except Exception:
                logger.exception("the heartbeat of background responses failed")
            await asyncio.sleep(BEAT)

    async def _report(self, shared: SharedBackground) -> None:
        sent = {each: each.events[start:] for each, start in self._sent.items()}
        names = [(each.id, each.tenant) for each in sent]
        commands = await asyncio.to_thread(shared.beat, names, list(sent.values()))
        for (running, events), command in zip(sent.items(), commands, strict=True):
            self._sent[running] += len(events)
            if self._background.get(running.id, running.tenant) is not running:  # deleted here
                await asyncio.to_thread(shared.forget, running.id, running.tenant)
                self._drop(running)
            elif running.done and self._sent[running] == len(running.events):
                await asyncio.to_thread(shared.ended, running.id, running.tenant)
                self._drop(running)
            elif command is not None and running not in self._commands:
                self._commands[running] = asyncio.ensure_future(self._execute(running, command))

    async def _execute(self, running: Running, command: Command) -> None:
        """Carries out ``command``. The next heartbeat reports the result."""
        if command is Command.CANCEL:
            await running.cancel()
        else:
            await forget(running.id, running.tenant)
            await self._background.forget(running.id, running.tenant)

    def _drop(self, running: Running) -> None:
        del self._sent[running]
        self._commands.pop(running, None)
