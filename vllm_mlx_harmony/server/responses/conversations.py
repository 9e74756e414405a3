"""The HTTP endpoints of OpenAI's conversations."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.responses import conversations, resource
from vllm_mlx_harmony.protocols.responses.schema import Item
from vllm_mlx_harmony.server.body import read_document
from vllm_mlx_harmony.server.encryption import ServerCipher
from vllm_mlx_harmony.server.endpoint import Endpoint, OpenAIEndpoint, json_in_thread
from vllm_mlx_harmony.server.front_end import Caller, front_end_of
from vllm_mlx_harmony.server.host import tenant_of
from vllm_mlx_harmony.server.storage.conversations import Conversations
from vllm_mlx_harmony.server.storage.store import ResourceKey, StoredResponse


def _read_all(
    earlier: Sequence[Mapping[str, Any]],
    items: Sequence[Item],
    defaults: Defaults,
    cipher: ServerCipher,
) -> None:
    """Raises ``RequestError`` for items that no request could have behind the ``earlier`` ones."""
    body = {"model": "none", "input": [item.raw for item in items]}
    try:
        responses.read(body, defaults, cipher, earlier=earlier)
    except RequestError as error:
        if (error.param or "").startswith("input["):
            where = str(error.param).replace("input", "items", 1)
            problem = error.message.replace("input[", "items[")
            raise RequestError(problem, param=where, code=error.code) from error
        raise


async def create_conversation(request: Request) -> Response:
    """``POST /v1/conversations``."""
    defaults, body = await _body(request)

    def create(caller: Caller) -> Mapping[str, Any]:
        parsed = conversations.read_create(body)
        seed = secrets.token_hex(16)
        items = parsed.items or []
        if items:
            _read_all((), items, defaults, caller.cipher)
        listed = conversations.conversation_items(items, set(), seed)
        key = ResourceKey(f"conv_{seed}", caller.tenant)
        document = conversations.conversation(key.id, int(time.time()), parsed.metadata or {})
        _conversations(caller).create(key, document, listed)
        return document

    return await _answer(request, create)


async def retrieve_conversation(request: Request, conversation_id: str) -> Response:
    """``GET /v1/conversations/{conversation_id}``."""
    key = _key(request, conversation_id)
    return await _answer(request, lambda caller: _conversations(caller).find(key).document)


async def update_conversation(request: Request, conversation_id: str) -> Response:
    """``POST /v1/conversations/{conversation_id}``: replaces the metadata."""
    key = _key(request, conversation_id)
    _, body = await _body(request)

    def update(caller: Caller) -> Mapping[str, Any]:
        metadata = conversations.read_update(body).metadata

        def updated(found: StoredResponse) -> StoredResponse:
            return replace(found, document={**found.document, "metadata": metadata})

        return _conversations(caller).change(key, updated).document

    return await _answer(request, update)


async def delete_conversation(request: Request, conversation_id: str) -> Response:
    """``DELETE /v1/conversations/{conversation_id}``. Responses in it remain stored."""
    key = _key(request, conversation_id)

    def delete(caller: Caller) -> Mapping[str, Any]:
        if not _conversations(caller).delete(key):
            raise conversations.not_found(conversation_id)
        return conversations.deleted(conversation_id)

    return await _answer(request, delete)


async def list_items(request: Request, conversation_id: str) -> Response:
    """``GET /v1/conversations/{conversation_id}/items``: a page of the items."""
    key = _key(request, conversation_id)

    def page(caller: Caller) -> Mapping[str, Any]:
        items = _conversations(caller).find(key).input_items
        return resource.page(items, request.query_params)

    return await _answer(request, page)


async def create_items(request: Request, conversation_id: str) -> Response:
    """``POST /v1/conversations/{conversation_id}/items``: adds items at the end."""
    key = _key(request, conversation_id)
    defaults, body = await _body(request)

    def create(caller: Caller) -> Mapping[str, Any]:
        items = conversations.read_items(body)

        def extended(found: StoredResponse) -> StoredResponse:
            _read_all(found.input_items, items, defaults, caller.cipher)
            taken = {str(item.get("id")) for item in found.input_items}
            added = conversations.conversation_items(items, taken, secrets.token_hex(16))
            return replace(found, input_items=[*found.input_items, *added])

        changed = _conversations(caller).change(key, extended)
        return conversations.item_list(changed.input_items[-len(items) :])

    return await _answer(request, create)


async def retrieve_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """``GET /v1/conversations/{conversation_id}/items/{item_id}``."""
    key = _key(request, conversation_id)

    def retrieve(caller: Caller) -> Mapping[str, Any]:
        items = _conversations(caller).find(key).input_items
        return items[_place(items, conversation_id, item_id)]

    return await _answer(request, retrieve)


async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """``DELETE /v1/conversations/{conversation_id}/items/{item_id}``."""
    key = _key(request, conversation_id)

    def without(found: StoredResponse) -> StoredResponse:
        items = [*found.input_items]
        del items[_place(items, conversation_id, item_id)]
        return replace(found, input_items=items)

    return await _answer(
        request, lambda caller: _conversations(caller).change(key, without).document
    )


def _place(items: Sequence[Mapping[str, Any]], conversation_id: str, item_id: str) -> int:
    for at, item in enumerate(items):
        if item.get("id") == item_id:
            return at
    raise conversations.item_not_found(conversation_id, item_id)


def _key(request: Request, conversation_id: str) -> ResourceKey:
    return ResourceKey(conversation_id, tenant_of(request))


def _conversations(caller: Caller) -> Conversations:
    return caller.responses.conversations


async def _body(request: Request) -> tuple[Defaults, object]:
    """The server's defaults, and the parsed body of a request."""
    front_end = front_end_of(request)
    _, document = await read_document(request, front_end.settings)
    return front_end.host.defaults(None), document.value


async def _answer(request: Request, make: Callable[[Caller], Mapping[str, Any]]) -> Response:
    """The document that ``make`` returns, called in a thread: it may read long items."""
    return await json_in_thread(make, Caller(front_end_of(request), tenant_of(request)))


_ALL = "/v1/conversations"
_ONE = f"{_ALL}/{{conversation_id}}"
_ITEM = f"{_ONE}/items/{{item_id}}"

_endpoint = partial(
    OpenAIEndpoint, why="stored conversations", dependencies_of=("/v1/responses", "POST")
)

ENDPOINTS: tuple[Endpoint, ...] = (
    _endpoint(_ALL, ("POST",), create_conversation),
    _endpoint(_ONE, ("GET",), retrieve_conversation),
    _endpoint(_ONE, ("POST",), update_conversation),
    _endpoint(_ONE, ("DELETE",), delete_conversation),
    _endpoint(f"{_ONE}/items", ("GET",), list_items),
    _endpoint(f"{_ONE}/items", ("POST",), create_items),
    _endpoint(_ITEM, ("GET",), retrieve_item),
    _endpoint(_ITEM, ("DELETE",), delete_item),
)
