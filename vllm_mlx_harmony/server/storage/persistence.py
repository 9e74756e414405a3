"""Stores responses, before their clients can see that they have ended."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

from vllm_mlx_harmony.core.deltas import Delta, Failed, Finished
from vllm_mlx_harmony.core.errors import StoreError
from vllm_mlx_harmony.core.turn import ResponseInfo
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.protocols.responses import ResponsesRequest
from vllm_mlx_harmony.server.answers import AnswerKey
from vllm_mlx_harmony.server.host import Context
from vllm_mlx_harmony.server.storage.store import Store, StoredResponse
from vllm_mlx_harmony.tasks import in_thread

logger = logging.getLogger("vllm_mlx_harmony")

SEED_BYTES = 10


def new_id_seed() -> str:
    """The seed of the ids of a new response. The ids of its items contain it."""
    return secrets.token_hex(SEED_BYTES)


class StoringEmitter:
    """An emitter that stores the response before its last events are sent.

    ``request`` is the parsed request. ``forgotten``: the response was deleted before it was stored.
    """

    def __init__(
        self,
        parsed: ResponsesRequest,
        info: ResponseInfo,
        context: Context,
        tenant: str,
        store: Store,
    ) -> None:
        self._tenant, self._responses = tenant, store
        self.request, self._info, self._context = parsed, info, context
        self._emitter = parsed.emitter(info, time.time)
        self._last: list[Event] | None = None
        self._before: dict[str, Any] = {}  # the response before its last delta
        self._storing: asyncio.Future[None] | None = None
        self.forgotten = False

    @property
    def key(self) -> AnswerKey:
        return AnswerKey(responses.response_id(self._info), self._tenant)

    def create(self) -> list[Event]:
        """The events that announce a queued response."""
        return self._emitter.create()

    def feed(self, delta: Delta) -> list[Event]:
        """The events for any ``delta`` but the last, for which there is ``write_last``."""
        return self._emitter.feed(delta)

    def keep_alive(self) -> Event:
        return self._emitter.keep_alive()

    async def write_last(self, delta: Finished | Failed | None) -> list[Event]:
        """The last events of the response, when it is stored. ``None``: it was cancelled."""
        if self._last is None:
            self._before = self._emitter.document()
            self._last = self._emitter.cancel() if delta is None else self._emitter.feed(delta)
            if self.request.store and not self.forgotten:
                self._storing = asyncio.ensure_future(in_thread(self._store))
        if self._storing is not None:
            await asyncio.wait({self._storing})  # a cancellation of this task does not stop it
        return self._last

    async def forget(self) -> bool:
        """Keeps the response from being stored. Its readers still get all of it.

        Returns false if it has ended; then it is stored, if it could be.
        """
        if self._last is None:
            first = not self.forgotten
            self.forgotten = True
            return first
        if self._storing is not None:
            await asyncio.wait({self._storing})
        return False

    def result(self) -> dict[str, Any]:
        return self._emitter.result()

    def document(self) -> dict[str, Any]:
        """The response as it is now. It does not end before it is stored."""
        pending = self._storing is not None and not self._storing.done()
        return self._before if pending else self._emitter.document()

    def input_items(self) -> list[dict[str, Any]]:
        return self.request.input_items(self._info)

    def stored(self) -> StoredResponse:
        document = self._emitter.document()
        ended = document["status"] in ("completed", "incomplete")
        messages = self.request.conversation(self._context.messages, ended=ended)
        return StoredResponse(self.key.id, document, self.input_items(), messages, self.key.tenant)

    def _store(self) -> None:
        """Stores the response. If that fails, the response still goes to its client.

        Its document then has ``store: false``, so that clients do not refer to it later.
        """
        try:
            if self._responses.put(self.stored()):
                return
            problem = "it is larger than the store"
        except StoreError as error:
            problem = error.message
        except Exception:  # the answer itself is complete
            logger.exception("a store failed")
            problem = "internal error"
        logger.warning("the response %s could not be stored: %s", self.key.id, problem)
        self._last = self._emitter.mark_not_stored(self._last or [])
