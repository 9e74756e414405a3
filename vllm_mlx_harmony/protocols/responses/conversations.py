"""OpenAI's conversations: the documents of ``/v1/conversations/…``, and their errors.

https://platform.openai.com/docs/api-reference/conversations
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field

from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.turn import ResponseInfo
from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.responses.compaction import TRIGGER
from vllm_mlx_harmony.protocols.responses.output_items import key_of
from vllm_mlx_harmony.protocols.responses.resource import input_items
from vllm_mlx_harmony.protocols.responses.schema import (
    AnyItem,
    Item,
    ItemReference,
    Metadata,
)
from vllm_mlx_harmony.protocols.validation import RequestModel, unsupported, validate


class CreateBody(RequestModel):
    """The body of ``POST /v1/conversations``."""

    items: list[AnyItem] | None = None
    metadata: Metadata | None = None


class UpdateBody(RequestModel):
    metadata: Annotated[Metadata, BeforeValidator(lambda value: {} if value is None else value)]


class ItemsBody(RequestModel):
    items: Annotated[list[AnyItem], Field(min_length=1)]


def read_create(body: object) -> CreateBody:
    """The body of a request that creates a conversation. Raises ``RequestError``."""
    request = validate(CreateBody, body)
    _reject_unsupported(request.items or ())
    return request


def read_update(body: object) -> UpdateBody:
    return validate(UpdateBody, body)


def read_items(body: object) -> list[Item]:
    """The items that a request adds. Raises ``RequestError``."""
    items = validate(ItemsBody, body).items
    _reject_unsupported(items)
    return items


def _reject_unsupported(items: Sequence[Item]) -> None:
    """Raises ``RequestError`` for items that mean something in a request only."""
    for at, item in enumerate(items):
        if isinstance(item, ItemReference) or item.type == TRIGGER:
            where = f"items[{at}]"
            raise unsupported(where, f"{where} cannot be of type {quoted(item.type)}")


def conversation(key: str, created: int, metadata: Mapping[str, str]) -> Document:
    return {
        "id": key,
        "object": "conversation",
        "created_at": created,
        "metadata": dict(metadata),
    }


def deleted(key: str) -> Document:
    """The answer to ``DELETE /v1/conversations/{key}``."""
    return {"id": key, "object": "conversation.deleted", "deleted": True}


def conversation_items(items: Sequence[Item], taken: set[str], id_seed: str) -> list[Document]:
    """``items`` as they are read back. An id that is ``taken`` is replaced."""
    info = ResponseInfo(id_seed, 0, "")
    documents = input_items(items, info)
    for at, document in enumerate(documents):
        if document["id"] in taken:
            prefix = str(document["id"]).partition("_")[0]
            document["id"] = f"{prefix}_{key_of(info, at)}"
        taken.add(document["id"])
    return documents


def item_list(items: Sequence[Mapping[str, object]]) -> Document:
    """All ``items``, as the answer to the request that added them."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"],
        "last_id": items[-1]["id"],
        "has_more": False,
    }


def not_found(key: str, *, param: str | None = None) -> RequestError:
    """The error for a conversation that is not stored: 404."""
    problem = f"conversation with id {quoted(key)} not found"
    return RequestError(problem, param=param, code="conversation_not_found", status=404)


def item_not_found(key: str, item: str) -> RequestError:
    problem = f"item with id {quoted(item)} not found in conversation {quoted(key)}"
    return RequestError(problem, param="item_id", code="not_found", status=404)
