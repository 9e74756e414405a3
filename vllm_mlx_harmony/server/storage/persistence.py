"""Stores responses, before their clients can see that they have ended."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm_mlx_harmony.core.deltas import Delta, Failed, Finished
from vllm_mlx_harmony.core.errors import HarmonyFailure, StoreError
from vllm_mlx_harmony.core.pages import Citations
from vllm_mlx_harmony.core.prompt_pages import prompt_pages
from vllm_mlx_harmony.core.turn import Message, ResponseInfo
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.citations import link
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.protocols.responses import ResponsesRequest
from vllm_mlx_harmony.server.host import Context
from vllm_mlx_harmony.server.storage.conversations import Conversations
from vllm_mlx_harmony.server.storage.store import ResourceKey, Store, StoredResponse
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
        *,
        store: Store,
        conversations: Conversations,
    ) -> None:
        self._tenant, self._store, self._conversations = tenant, store, conversations
        self.request, self._info, self._context = parsed, info, context
        self._emitter = parsed.emitter(info, time.time)
        self.forgotten = False
        # From the last delta on; done when the response is stored.
        self._last_events: asyncio.Future[list[Event]] | None = None
        self._before: dict[str, Any] = {}  # the response before its last delta

    @property
    def key(self) -> ResourceKey:
        return ResourceKey(responses.response_id(self._info), self._tenant)

    def create(self) -> list[Event]:
        """The events that announce a queued response."""
        return self._emitter.create()

    def feed(self, delta: Delta) -> list[Event]:
        """The events for any ``delta`` but the last, for which there is ``write_last``."""
        return self._emitter.feed(delta)

    def keep_alive(self) -> Event:
        return self._emitter.keep_alive()

    async def write_last(self, delta: Finished | Failed | None) -> list[Event]:
        """Stores the response, then returns its last events. ``None``: it was cancelled."""
        if self._last_events is None:
            self._before = self._emitter.document()
            last = self._emitter.cancel() if delta is None else self._emitter.feed(delta)
            self._last_events = asyncio.ensure_future(self._store_all(last))
        await asyncio.wait({self._last_events})  # a cancellation of this task does not stop it
        return self._last_events.result()

    async def forget(self) -> bool:
        """Keeps the response from being stored. Its readers still get all of it.

        Returns whether this call did so. If the response has ended, it is stored by then, if it
        could be.
        """
        if self._last_events is not None:
            await asyncio.wait({self._last_events})
            return False
        first, self.forgotten = not self.forgotten, True
        return first

    def result(self) -> dict[str, Any]:
        return self._emitter.result()

    def document(self) -> dict[str, Any]:
        """The response as it is now. It does not end before it is stored."""
        ending = self._last_events is not None and not self._last_events.done()
        return self._before if ending else self._emitter.document()

    def input_items(self) -> list[dict[str, Any]]:
        return self.request.input_items(self._info)

    def stored(self) -> StoredResponse:
        document = self._emitter.document()
        ended = document["status"] in ("completed", "incomplete")
        written: Sequence[Message] = self._context.messages
        if self.request.turn.has_browser:
            pages = prompt_pages(self._context.render_for_completion())
            written = Citations(pages).rewrite(written, link)
        messages = self.request.conversation(written, ended=ended)
        return StoredResponse(self.key.id, document, self.input_items(), messages, self.key.tenant)

    async def _store_all(self, last: list[Event]) -> list[Event]:
        """Adds to the conversation, and stores the response if it is to be kept. Returns its
        ``last`` events.

        If that fails, the response still goes to its client. Its document then has ``store:
        false``, so that clients do not refer to it later.
        """
        keeps = self.request.store and not self.forgotten
        if self.request.conversation_id is not None and (problem := await _problem(self._append)):
            logger.warning("the conversation of %s could not be stored: %s", self.key.id, problem)
        if keeps and (problem := await _problem(self._put)):
            logger.warning("the response %s could not be stored: %s", self.key.id, problem)
            last = self._emitter.mark_not_stored(last)
        return last

    def _append(self) -> None:
        """Adds the input and the output to the conversation, if the response has ended well."""
        conversation, document = self.request.conversation_id, self._emitter.document()
        if conversation is not None and document["status"] in ("completed", "incomplete"):
            items = [*self.input_items(), *document["output"]]
            self._conversations.append(ResourceKey(conversation, self._tenant), items)

    def _put(self) -> None:
        if not self._store.put(self.stored()):
            raise StoreError("it is larger than the store")


async def _problem(storing: Callable[[], None]) -> str:
    """Why ``storing`` fails; empty if it does not. Never raises: the answer itself is complete."""
    try:
        await in_thread(storing)
    except HarmonyFailure as error:
        return error.message
    except Exception:
        logger.exception("a store failed")
        return "internal error"
    return ""
