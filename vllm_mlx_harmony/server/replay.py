"""The generated turns that a request may reuse: those of the same model and tenant.

What is stored of a turn, and when it is reused: `core.replay`.
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
from vllm_mlx_harmony.core.turn import Message, Turn
from vllm_mlx_harmony.server.host import Context, Host, Lease
from vllm_mlx_harmony.server.peers.connection import (
    Connection,
    PeersError,
    key_of,
    server_connection,
)

logger = logging.getLogger(__name__)

VARIABLE = "VLLM_MLX_HARMONY_REPLAY"
"""Environment variable: MiB of generated turns that are kept in memory; 0 disables reuse."""

DEFAULT = 64


class SharedTurns:
    """An archive in the Redis that several servers share, where turns expire."""

    blocks = True

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, key: bytes, turn: GeneratedTurn) -> None:
        """Writes the turn, unless Redis is unavailable."""
        name, content = key_of("turn", key.hex()), turn.to_bytes()
        with suppress(PeersError):
            self._connection.call(
                lambda redis: redis.set(name, content, ex=self._connection.seconds)
            )

    def find(self, keys: Sequence[bytes]) -> list[GeneratedTurn | None]:
        """The turns; none while Redis is unavailable, so that messages are rendered instead."""
        names = [key_of("turn", key.hex()) for key in keys]
        try:
            found = self._connection.call(lambda redis: redis.mget(names))
        except PeersError:
            return [None] * len(keys)
        return [None if content is None else GeneratedTurn.from_bytes(content) for content in found]

    def use(self, key: bytes) -> None:
        """No-op: entries expire a fixed time after they are stored."""


@lru_cache(maxsize=1)
def replay(archive: Archive | None) -> Replay | None:
    """The generated turns of this process and, if there is an ``archive``, of earlier ones.

    ``None`` if reuse is disabled.
    """
    requested = os.environ.get(VARIABLE, "").strip() or str(DEFAULT)
    if not requested.isascii() or not requested.isdigit():
        logger.warning("%s=%s is not a number of MiB; using %d", VARIABLE, requested, DEFAULT)
        requested = str(DEFAULT)
    return Replay(int(requested) * 2**20, archive) if int(requested) else None


@lru_cache(maxsize=1)
def _shared_turns(connection: Connection) -> SharedTurns:
    return SharedTurns(connection)


def view(host: Host, lease: Lease) -> ReplayScope | None:
    """The turns that a request with this lease may reuse; ``None`` if reuse is disabled."""
    connection = server_connection()
    archive = host.archive if connection is None else _shared_turns(connection)
    turns = replay(archive)  # type: ignore[arg-type]  # lru_cache hashes an archive by identity
    return None if turns is None else turns.view(f"{lease.engine.model}\0{lease.tenant}")


def replaying(
    renderer: Callable[..., Rendered], turns: ReplayScope | None
) -> Callable[[Turn], Rendered]:
    """``renderer`` with ``turns``, if it supports them: other packages' renderers may not."""
    if turns is None or not _supports_replay(renderer):
        return renderer
    return partial(renderer, replay=turns)


@lru_cache(maxsize=8)
def _supports_replay(renderer: Callable[..., Rendered]) -> bool:
    return "replay" in signature(renderer).parameters


def remember(
    turns: ReplayScope | None, context: Context, echoed: Callable[[Message], Message]
) -> None:
    """Stores the generated turns of ``context``, which has ended.

    ``echoed`` maps a message to how it will be read when a client sends it back.
    """
    if turns is not None:
        for output in getattr(context, "outputs", ()):
            turns.remember(replace(output, messages=tuple(map(echoed, output.messages))))
