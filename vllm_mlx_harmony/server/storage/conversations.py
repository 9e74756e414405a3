"""``Conversations``: OpenAI's conversations, in the store of responses.

A conversation is stored as its document and its items, under a tenant of its own kind, so that its
id is no response's. Requests are read with its items in front of their input, as clients without a
store send them, and what they add is written when their response ends. A front end makes the
changes of a conversation one after the other. Of two servers that change the same one at once, the
last wins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols.responses import conversations
from vllm_mlx_harmony.server.storage.store import ResourceKey, Store, StoredResponse

MAX_ITEMS = 20_000
"""Items of a conversation: a request reads all of them."""


class Conversations:
    """Methods block, and may raise ``StoreError``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._locks: WeakValueDictionary[ResourceKey, threading.Lock] = WeakValueDictionary()

    def create(
        self, key: ResourceKey, document: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
    ) -> None:
        """Stores a new conversation. Raises ``RequestError`` if it is too large."""
        self._put(StoredResponse(key.id, document, items, (), _stored_key(key).tenant))

    def find(self, key: ResourceKey, *, param: str | None = None) -> StoredResponse:
        """The conversation. Raises ``RequestError`` 404."""
        found = self._get(key)
        if found is None:
            raise conversations.not_found(key.id, param=param)
        return found

    def change(
        self, key: ResourceKey, change: Callable[[StoredResponse], StoredResponse]
    ) -> StoredResponse:
        """Replaces the conversation with the result of ``change``, and returns it.

        Raises ``RequestError`` 404, or if it becomes too large.
        """
        with self._changing(key):
            changed = change(self.find(key))
            self._put(changed)
        return changed

    def append(self, key: ResourceKey, items: Sequence[Mapping[str, Any]]) -> None:
        """Adds what a response has added to its conversation, unless it was deleted meanwhile.

        Raises ``RequestError`` if it becomes too large.
        """
        with self._changing(key):
            found = self._get(key)
            if found is not None:
                self._put(replace(found, input_items=[*found.input_items, *items]))

    def delete(self, key: ResourceKey) -> bool:
        """Deletes the conversation; returns whether it existed."""
        with self._changing(key):
            return self._store.delete(_stored_key(key))

    @contextmanager
    def _changing(self, key: ResourceKey) -> Iterator[None]:
        """Nobody else changes the conversation while it is read, changed and written."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            yield

    def _get(self, key: ResourceKey) -> StoredResponse | None:
        return self._store.get(_stored_key(key))

    def _put(self, conversation: StoredResponse) -> None:
        count = len(conversation.input_items)
        if count > MAX_ITEMS or not self._store.put(conversation):
            problem = f"the conversation is too large: it has {count} items"
            raise RequestError(problem, status=413, code="request_too_large")


def _stored_key(key: ResourceKey) -> ResourceKey:
    """The key in the store: conversations have tenants of their own, so that their ids are no
    responses'."""
    return ResourceKey(key.id, f"{key.tenant}/conversations")
