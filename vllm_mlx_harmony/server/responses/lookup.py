"""Reads requests of the Responses API, which may refer to stored responses."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from vllm_mlx_harmony.core.turn import Defaults, Message
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.responses import ResponsesRequest, resource
from vllm_mlx_harmony.server import serving
from vllm_mlx_harmony.server.front_end import Caller
from vllm_mlx_harmony.server.generation import Job
from vllm_mlx_harmony.server.serving import LeasedTurnRequest, TurnApi
from vllm_mlx_harmony.server.storage.persistence import SEED_BYTES, StoringEmitter
from vllm_mlx_harmony.server.storage.store import ResourceKey, StoredResponse

logger = logging.getLogger("vllm_mlx_harmony")

_ITEM = re.compile(rf"[a-z]+_([0-9a-f]{{{2 * SEED_BYTES}}})[0-9a-f]{{4}}")
"""The id of an item, which contains the seed of its response."""


@dataclass(slots=True)
class References:
    """The responses that a request of ``caller`` refers to, looked up in ``local`` first.

    Every call may block, and raise ``StoreError``.
    """

    caller: Caller
    local: Mapping[str, StoredResponse] = field(default_factory=dict)
    _known: dict[str, StoredResponse | None] = field(default_factory=dict)

    def stored(self, response_id: str) -> StoredResponse | None:
        """The response, if it is stored."""
        if response_id in self.local:
            return self.local[response_id]
        if response_id not in self._known:
            self._known[response_id] = self.caller.responses.stored(self._key(response_id))
        return self._known[response_id]

    def previous(self, response_id: str) -> StoredResponse:
        """The response that a request continues.

        Raises ``RequestError``: 404 if it is unknown, 400 if it is still being generated.
        """
        all_responses, key = self.caller.responses, self._key(response_id)
        if all_responses.is_running(key):
            raise resource.not_ready(response_id)
        stored = self.stored(response_id)
        if stored is None:
            raise resource.not_found(response_id, param="previous_response_id")
        if resource.is_running(stored.document) and all_responses.is_running_elsewhere(key):
            raise resource.not_ready(response_id)
        return stored

    def conversation(self, conversation_id: str) -> Sequence[Mapping[str, Any]]:
        """The items of the conversation of a request. Raises ``RequestError`` 404."""
        all_conversations = self.caller.responses.conversations
        return all_conversations.find(self._key(conversation_id), param="conversation").input_items

    def item(self, item_id: str) -> Mapping[str, Any] | None:
        """The item, from the output or the input of any response."""
        match = _ITEM.fullmatch(item_id)
        stored = self.stored(f"resp_{match[1]}") if match else None
        if stored is None:
            return None
        items = chain(stored.document["output"], stored.input_items)
        return next((item for item in items if item.get("id") == item_id), None)

    def _key(self, resource_id: str) -> ResourceKey:
        return ResourceKey(resource_id, self.caller.tenant)


RESPONSES: TurnApi[ResponsesRequest] = TurnApi(
    "responses",
    lambda body, defaults, caller: read(body, defaults, References(caller)),
    blocks=True,
    servers=responses.client_servers,
    # The events of a background response may be requested later.
    emitter=lambda parsed, info, context, caller: caller.responses.emitter(
        replace(parsed, stream=parsed.stream or parsed.background), info, context, caller.tenant
    ),
    comments_progress=True,
    logprobs_field="include",
)


async def prepare(leased_request: LeasedTurnRequest) -> tuple[Job, StoringEmitter]:
    """What ``serving.prepare`` makes of a request of ``RESPONSES``, and its emitter.

    The emitter writes the last events, when it has stored the response.
    """
    job = await serving.prepare(leased_request)
    emitter = job.emitter
    assert isinstance(emitter, StoringEmitter)  # made by ``RESPONSES``
    return replace(job, write_last=emitter.write_last), emitter


def read(body: object, defaults: Defaults, references: References) -> ResponsesRequest:
    """Reads the request in ``body``. May block.

    Raises ``StoreError``, and ``RequestError``: 404 for a previous response or a conversation that
    is not stored, and 400 for one that is still being generated.
    """
    history: tuple[Message, ...] = ()
    listed_labels: frozenset[str] = frozenset()  # tool servers whose tools the conversation lists
    if (response_id := responses.previous_response_id(body)) is not None:
        previous = references.previous(response_id)
        history, tools = previous.messages, previous.document.get("tools") or []
        labels = (str(tool.get("server_label")) for tool in tools if tool["type"] == "mcp")
        listed_labels = frozenset(labels)
    earlier: Sequence[Mapping[str, Any]] = ()
    if (conversation_id := responses.conversation_id(body)) is not None:
        earlier = references.conversation(conversation_id)
    cipher = references.caller.cipher
    parsed = responses.read(
        body,
        defaults,
        cipher,
        history,
        references.item,
        listed_labels=listed_labels,
        earlier=earlier,
    )
    for note in parsed.notes:
        logger.info("responses: %s", note)
    return parsed
