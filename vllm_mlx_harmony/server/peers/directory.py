"""Answers on other servers: cancelled from here, and background responses watched from here.

Only the server that generates an answer can stop it. Another server leaves a command for it in
Redis, and waits until the command is gone. Each server has a heartbeat: every
``REPORT_SECONDS`` it reads the commands for its running answers. It deletes a command when it
has carried it out.

With the same heartbeat a server renews the entry of each background response that it generates,
and adds the new events. If the entry expires, after ``EXPIRY_SECONDS``, the response is lost: its
server has died.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from json import dumps, loads
from typing import Any

from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server.answers import AnswerKey, Answers
from vllm_mlx_harmony.server.peers.connection import Connection, PeersError, key_of
from vllm_mlx_harmony.server.storage.background import BackgroundResponse
from vllm_mlx_harmony.server.storage.sharing import REPORT_SECONDS
from vllm_mlx_harmony.server.storage.store import ResourceKey

logger = logging.getLogger("vllm_mlx_harmony")

EXPIRY_SECONDS = 10
"""Seconds after the last heartbeat at which a background response is lost."""

CONFIRMATION_SECONDS = 3 * REPORT_SECONDS
"""If no server confirms a cancellation within this many seconds, none has the answer."""

EVENTS_SECONDS = 600
"""Seconds for which events are stored after the last one."""

TICK = 0.05
"""Seconds between two checks whether a command was carried out."""


class Command(StrEnum):
    """A command for the server that generates an answer."""

    CANCEL = "cancel"
    DELETE = "delete"


class Directory:
    """The running answers of all servers. Methods block, and raise ``PeersError``."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call

    def beat(
        self, running: Sequence[AnswerKey], background: Mapping[ResourceKey, Mapping[int, Event]]
    ) -> dict[AnswerKey | ResourceKey, Command]:
        """The commands for ``running`` answers and ``background`` responses.

        Renews the entries of the latter, and adds their new events, by their numbers: if Redis
        received them but its reply was lost, the next heartbeat sends them again.
        """
        keys: list[AnswerKey | ResourceKey] = [*running, *background]
        if not keys:
            return {}

        def exchanged(redis: Any) -> list[bytes | None]:
            pipe = redis.pipeline(transaction=False)
            for key, events in background.items():
                pipe.set(_redis_key("run", key), b"1", ex=EXPIRY_SECONDS)
                if events:
                    log = {dumps((number, *event)): number for number, event in events.items()}
                    pipe.zadd(_redis_key("log", key), log)
                    pipe.expire(_redis_key("log", key), EVENTS_SECONDS)
            pipe.mget([_redis_key("command", key) for key in keys])
            commands: list[bytes | None] = pipe.execute()[-1]
            return commands

        found = zip(keys, self._call(exchanged), strict=True)
        known = {command.value.encode(): command for command in Command}
        return {key: known[command] for key, command in found if command in known}

    def ended(self, key: AnswerKey | ResourceKey) -> None:
        """Removes the entry of an answer, and the command for it, but not its events."""
        self._call(lambda redis: redis.delete(_redis_key("run", key), _redis_key("command", key)))

    def forget(self, key: ResourceKey) -> None:
        """Removes everything about a background response."""
        self._call(
            lambda redis: redis.delete(
                *(_redis_key(kind, key) for kind in ("run", "command", "log"))
            )
        )

    def runs(self, key: ResourceKey) -> bool:
        """Whether any server generates the background response."""
        return bool(self._call(lambda redis: redis.exists(_redis_key("run", key))))

    def has(self, key: ResourceKey) -> bool:
        """Whether any server generates the background response, or its events are stored."""
        return bool(
            self._call(lambda redis: redis.exists(_redis_key("run", key), _redis_key("log", key)))
        )

    def events(self, key: ResourceKey, start: int) -> list[Event]:
        """The stored events of the background response from number ``start`` on, up to one that
        cannot be read."""
        found = self._call(lambda redis: redis.zrangebyscore(_redis_key("log", key), start, "+inf"))
        events: list[Event] = []
        with suppress(ValueError, TypeError):
            events.extend(Event(*loads(event)[1:]) for event in found)
        return events

    async def send(self, key: AnswerKey | ResourceKey, command: Command, seconds: float) -> bool:
        """Whether a server has carried out ``command`` within so many ``seconds``."""
        name = _redis_key("command", key)
        lifetime = 2 * int(seconds + 1)

        async def call(request: Any) -> Any:
            return await asyncio.to_thread(self._call, request)

        await call(lambda redis: redis.set(name, command.value, ex=lifetime))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.sleep(TICK)
            if not await call(lambda redis: redis.exists(name)):
                return True
        # If we delete it ourselves, no server took it.
        return not await call(lambda redis: redis.delete(name))


def _redis_key(kind: str, key: AnswerKey | ResourceKey) -> str:
    """Different for all keys: the id of a resource has a prefix, the seed of an answer has none."""
    name, tenant = key
    return key_of(kind, tenant, name)


class Heartbeat:
    """The heartbeat task of this server, whose ``answers`` these are; runs while there are some."""

    def __init__(self, directory: Directory, answers: Answers) -> None:
        self._directory, self._answers = directory, answers
        self._sent: dict[BackgroundResponse, int] = {}  # the number of events in Redis
        self._executing: dict[AnswerKey | ResourceKey, asyncio.Future[None]] = {}
        self._task: asyncio.Future[None] | None = None
        self._idle = 0  # heartbeats without an answer, since the last one began

    def background_begins(self, response: BackgroundResponse) -> None:
        """``response`` begins, whose answer is one of ``answers``."""
        self._sent[response] = 0
        self.answer_begins()

    def answer_begins(self) -> None:
        self._idle = 0  # the task may be about to end
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._idle < 2:  # noqa: PLR2004 - an answer that is about to run is found by the next
            running = self._answers.running
            self._idle = 0 if running or self._sent else self._idle + 1
            try:
                await self._beat(running)
            except PeersError:  # the last events of an ended response can then be read only here
                for ended in [response for response in self._sent if response.done]:
                    del self._sent[ended]
            except Exception:
                logger.exception("the heartbeat to the other servers failed")
            await asyncio.sleep(REPORT_SECONDS)

    async def _beat(self, running: Sequence[AnswerKey]) -> None:
        background = {response.key: response for response in self._sent}
        new = {
            response.key: response.numbered_events(sent) for response, sent in self._sent.items()
        }
        commands = await asyncio.to_thread(self._directory.beat, running, new)
        for key, command in commands.items():
            if key not in self._executing:
                work = self._execute(key, command, background)
                self._executing[key] = asyncio.ensure_future(work)
        for key, response in background.items():
            self._sent[response] += len(new[key])
            if response.deleted:
                await asyncio.to_thread(self._directory.forget, key)
                del self._sent[response]
            elif response.done and self._sent[response] == len(response.events):
                await asyncio.to_thread(self._directory.ended, key)
                del self._sent[response]

    async def _execute(
        self,
        key: AnswerKey | ResourceKey,
        command: Command,
        background: Mapping[ResourceKey, BackgroundResponse],
    ) -> None:
        """Carries out ``command``. For a background response the next heartbeat removes it."""
        try:
            if isinstance(key, AnswerKey):
                self._answers.cancel(key)
                await asyncio.to_thread(self._directory.ended, key)
            elif command is Command.CANCEL:
                await background[key].cancel()
            else:
                await background[key].delete()
        except PeersError:
            pass  # the command expires
        finally:
            del self._executing[key]
