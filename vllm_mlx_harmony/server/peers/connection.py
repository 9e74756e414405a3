"""The connection to the Redis that several servers share.

Requests must not suffer if Redis is unavailable. Every call blocks, so it runs in a thread, but no
longer than ``CONNECT`` and ``ANSWER`` allow. After a failure all calls fail immediately for
``PAUSE`` seconds. Then one call tries again, while the others still fail.

A key is ``vllm-mlx-harmony:``, a kind, ``:`` and a digest of the tenant and the id, so that nobody
can look up a response by its id alone. Everything but the key of encrypted reasoning expires.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, TypeVar

from vllm_mlx_harmony.core.errors import StoreError
from vllm_mlx_harmony.server.settings import STORE_VARIABLE, ServerSettings, without_password

logger = logging.getLogger("vllm_mlx_harmony")

T = TypeVar("T")

CONNECT, ANSWER, PAUSE = 0.5, 1.0, 2.0
"""Timeouts of connecting and of one response, and the pause after a failure, in seconds."""

_KEY_BYTES = 32
_KEY_NAME = "vllm-mlx-harmony:encryption-key"


class PeersError(StoreError):
    """Redis is unavailable, or has rejected a command. 503."""


class Connection:
    """A connection to Redis for all threads. Calls block, and raise ``PeersError``."""

    def __init__(self, url: str, seconds: int = ServerSettings().store_seconds) -> None:
        """Entries expire after ``seconds``.

        Raises ``PeersError`` if Redis does not answer or the package is not installed.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            problem = (
                f"{STORE_VARIABLE}={without_password(url)} requires the redis package: "
                "pip install 'redis>=5'"
            )
            raise PeersError(problem) from error
        self._unreachable = (redis.ConnectionError, redis.TimeoutError, OSError)
        self._refused = redis.RedisError
        self._name = without_password(url)
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self.seconds = seconds
        try:
            # Redis may have closed an idle connection, so a lost connection is retried once.
            self._client = redis.Redis.from_url(
                url,
                socket_connect_timeout=CONNECT,
                socket_timeout=ANSWER,
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            )
            self.encryption_key = self.call(_encryption_key)
        except (PeersError, ValueError) as error:
            problem = f"{STORE_VARIABLE}={self._name} cannot be used: {error}"
            raise PeersError(problem) from error

    def call(self, command: Callable[[Any], T]) -> T:
        """Calls ``command`` with the client (`redis.Redis`)."""
        with self._lock:
            now = time.monotonic()
            if now < self._paused_until:
                raise PeersError(f"{self._name} is not responding", retry_after=int(PAUSE))
            was_paused = self._paused_until > 0
            if was_paused:  # other calls fail until the result is known
                self._paused_until = now + CONNECT + ANSWER + PAUSE
        try:
            result = command(self._client)
        except self._unreachable as error:
            with self._lock:
                first, self._paused_until = not self._paused_until, time.monotonic() + PAUSE
            if first:
                logger.warning("%s is not available; continuing without it (%s)", self._name, error)
            problem = f"{self._name}: {error}"
            raise PeersError(problem, retry_after=int(PAUSE)) from error
        except self._refused as error:  # out of memory, or not permitted
            self._answers(was_paused)
            raise PeersError(f"{self._name}: {error}", retry_after=int(PAUSE)) from error
        self._answers(was_paused)
        return result

    def _answers(self, was_paused: bool) -> None:
        if was_paused:
            with self._lock:
                self._paused_until = 0.0
            logger.warning("%s is available again", self._name)
            with suppress(*self._unreachable, self._refused):  # it may have lost its data
                self._client.set(_KEY_NAME, self.encryption_key, nx=True)


def key_of(kind: str, *parts: str) -> str:
    """The key of an entry of this ``kind``; ``parts`` are, for example, a tenant and an id."""
    digest = blake2b(digest_size=20)
    for part in parts:
        content = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(content) + content)
    return f"vllm-mlx-harmony:{kind}:{digest.hexdigest()}"


def _encryption_key(client: Any) -> bytes:
    """The key of encrypted reasoning, which the first server creates."""
    client.set(_KEY_NAME, secrets.token_bytes(_KEY_BYTES), nx=True)
    found: bytes | None = client.get(_KEY_NAME)
    if found is None or len(found) != _KEY_BYTES:
        raise PeersError(f"{_KEY_NAME} is not a key")
    return found


def connect(settings: ServerSettings) -> Connection | None:
    """The Redis of the ``settings``, if they name one. Raises as ``Connection``."""
    return Connection(settings.store, settings.store_seconds) if settings.has_peers else None
