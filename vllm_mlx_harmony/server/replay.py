"""Which earlier turns a request may be answered from: its model's, and its API key's.

Knows the setting and who asks. What is remembered, and when it is the same turn: core.replay.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from inspect import signature

from vllm_mlx_harmony.core.render import Rendered
from vllm_mlx_harmony.core.replay import Archive, GeneratedTurn, Replay, ReplayScope
from vllm_mlx_harmony.core.serialization import read, written
from vllm_mlx_harmony.core.turn import Message, Turn
from vllm_mlx_harmony.server.host import Context, Host, Lease
from vllm_mlx_harmony.server.shared import Shared, SharedError, server_shared, shared_key

logger = logging.getLogger(__name__)

VARIABLE = "VLLM_MLX_HARMONY_REPLAY"
"""Environment variable: MiB of generated turns that are remembered; 0 remembers none."""

DEFAULT = 64


@lru_cache(maxsize=1)
def replay(archive: Archive | None) -> Replay | None:
    """The turns of this process and, where there is an ``archive``, of those before it.

    ``None`` when nothing is to be remembered.
    """
    requested = os.environ.get(VARIABLE, "").strip() or str(DEFAULT)
    if not requested.isascii() or not requested.isdigit():
        logger.warning("%s=%s is not a number of MiB: %d it is", VARIABLE, requested, DEFAULT)
        requested = str(DEFAULT)
    return Replay(int(requested) * 2**20, archive) if int(requested) else None


class SharedTurns:
    """The archive of turns in Redis, where all servers that use it find them; see ``Archive``."""

    blocks = True

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def put(self, key: bytes, turn: GeneratedTurn) -> None:
        """Has it written, unless Redis has gone: then no other server places it again."""
        name, content = shared_key("turn", key.hex()), written(turn)
        with suppress(SharedError):
            self._shared.call(lambda redis: redis.set(name, content, ex=self._shared.seconds))

    def find(self, keys: Sequence[bytes]) -> list[GeneratedTurn | None]:
        """The turns; none while Redis is gone: they are written anew, as messages are."""
        names = [shared_key("turn", key.hex()) for key in keys]
        try:
            found = self._shared.call(lambda redis: redis.mget(names))
        except SharedError:
            return [None] * len(keys)
        return [None if content is None else read(content) for content in found]

    def use(self, key: bytes) -> None:
        """It expires all the same, by the time that it was generated."""


@lru_cache(maxsize=1)
def _shared_turns(shared: Shared) -> SharedTurns:
    return SharedTurns(shared)


def view(host: Host, lease: Lease) -> ReplayScope | None:
    """What a request with this lease may be answered from."""
    shared = server_shared()
    archive = host.archive if shared is None else _shared_turns(shared)
    turns = replay(archive)  # type: ignore[arg-type]  # by identity, as any object
    return None if turns is None else turns.view(f"{lease.harmony.model}\0{lease.tenant}")


def replaying(
    renderer: Callable[..., Rendered], turns: ReplayScope | None
) -> Callable[[Turn], Rendered]:
    """``renderer`` with ``turns``, if it is one that knows of them: it may be somebody else's."""
    if turns is None or not _knows_replay(renderer):
        return renderer
    return partial(renderer, replay=turns)


@lru_cache(maxsize=8)
def _knows_replay(renderer: Callable[..., Rendered]) -> bool:
    return "replay" in signature(renderer).parameters


def remember(
    turns: ReplayScope | None, context: Context, echoed: Callable[[Message], Message]
) -> None:
    """Takes in what ``context``, which has ended, holds of generated turns.

    ``echoed`` is how its messages are read when a client gives them back.
    """
    if turns is not None:
        for output in getattr(context, "outputs", ()):
            turns.remember(replace(output, messages=tuple(map(echoed, output.messages))))
