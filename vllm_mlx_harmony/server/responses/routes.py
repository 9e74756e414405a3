"""The HTTP endpoints of the Responses API."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.deltas import Delta
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import ResponseInfo
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.protocols.responses import ResponsesRequest, resource
from vllm_mlx_harmony.server.endpoint import Endpoint, OpenAIEndpoint, json_in_thread
from vllm_mlx_harmony.server.front_end import front_end_of
from vllm_mlx_harmony.server.host import tenant_of
from vllm_mlx_harmony.server.responses import lookup
from vllm_mlx_harmony.server.responses.lookup import RESPONSES, References, read
from vllm_mlx_harmony.server.serving import (
    LeasedTurnRequest,
    TurnApi,
    count,
    generate,
    respond,
    serve,
)
from vllm_mlx_harmony.server.storage.persistence import new_id_seed
from vllm_mlx_harmony.server.storage.store import ResourceKey
from vllm_mlx_harmony.server.streams import EventStream


class _CompactionEmitter:
    """Makes the document from the response that contains the summary."""

    def __init__(self, parsed: ResponsesRequest, info: ResponseInfo, *_: Any) -> None:
        self._parsed, self._info = parsed, info
        self._emitter = parsed.emitter(info)

    def feed(self, delta: Delta) -> list[Event]:
        return self._emitter.feed(delta)

    def keep_alive(self) -> Event:
        return self._emitter.keep_alive()

    def result(self) -> dict[str, Any]:
        """The document. Raises ``OutputError`` if the model wrote no summary."""
        document: dict[str, Any] = self._parsed.compacted(self._emitter.result(), self._info)
        return document


COMPACT: TurnApi[ResponsesRequest] = TurnApi(
    "responses_compact",
    lambda body, defaults, caller: read(body, defaults, References(caller)).compaction(),
    blocks=True,
    servers=responses.client_servers,
    emitter=_CompactionEmitter,
    logprobs_field="include",
)


# --- New responses


async def create_response(request: Request) -> Response:
    """``POST /v1/responses``."""
    return await serve(RESPONSES, request, _create, new_id_seed())


async def _create(leased_request: LeasedTurnRequest) -> Response:
    job, emitter = await lookup.prepare(leased_request)
    if not emitter.request.background:
        return await respond(leased_request, job)
    front_end = leased_request.front_end
    response = await front_end.responses.start(
        emitter, lambda sink: leased_request.start_answer(job, announced=True, sink=sink)
    )
    if job.stream:
        return EventStream(leased_request.http_request, response.follow())
    document = response.document
    return await json_in_thread(lambda: document)


async def compact_response(request: Request) -> Response:
    """``POST /v1/responses/compact``: a summary of the conversation."""
    return await serve(COMPACT, request, generate, id_seed=new_id_seed())


async def count_input_tokens(request: Request) -> Response:
    """``POST /v1/responses/input_tokens``: the length of the prompt of the same request."""
    return await count(RESPONSES, request, resource.input_tokens)


# --- Existing responses


def _key(request: Request, response_id: str) -> ResourceKey:
    return ResourceKey(response_id, tenant_of(request))


async def retrieve_response(request: Request, response_id: str) -> Response:
    """``GET /v1/responses/{response_id}``; with ``stream`` and ``starting_after``, its events."""
    after, start = request.query_params.get("starting_after"), 0
    streams = request.query_params.get("stream") == "true"
    if streams and after:
        if not (after.isascii() and after.isdigit()):
            raise RequestError("starting_after must be a whole number", param="starting_after")
        start = int(after[:18]) + 1  # int() is quadratic, and 18 digits exceed any limit
    front_end = front_end_of(request)
    found = await front_end.responses.find(_key(request, response_id))
    if not streams:
        document = found.document
        return await json_in_thread(lambda: document)
    # The response continues even if this reader disconnects.
    return EventStream(request, await front_end.responses.follow(found, start))


async def delete_response(request: Request, response_id: str) -> Response:
    """``DELETE /v1/responses/{response_id}``, which also ends a running background response."""
    if not await front_end_of(request).responses.delete(_key(request, response_id)):
        raise resource.not_found(response_id)
    return JSONResponse(resource.deleted(response_id))


async def list_input_items(request: Request, response_id: str) -> Response:
    """``GET /v1/responses/{response_id}/input_items``: a page of the input."""
    found = await front_end_of(request).responses.find(_key(request, response_id))

    return await json_in_thread(lambda: resource.page(found.input_items, request.query_params))


async def cancel_response(request: Request, response_id: str) -> Response:
    """``POST /v1/responses/{response_id}/cancel``. Has no effect on a response that has ended."""
    found = await front_end_of(request).responses.find(_key(request, response_id))
    if not found.document["background"]:
        raise RequestError(
            "only responses created with background=true can be cancelled", param="response_id"
        )
    document = (await front_end_of(request).responses.cancel(found)).document
    return await json_in_thread(lambda: document)


# --- Paths


CREATE = ("/v1/responses", "POST")
_ONE = "/v1/responses/{response_id}"


_endpoint = partial(OpenAIEndpoint, dependencies_of=CREATE)


_HOST_HAS_NONE = "the host has no such endpoint"
_STORED = "reads and deletes stored responses"

ENDPOINTS: tuple[Endpoint, ...] = (
    OpenAIEndpoint(
        "/v1/responses", ("POST",), create_response, "items and events made from token ids"
    ),
    _endpoint("/v1/responses/compact", ("POST",), compact_response, _HOST_HAS_NONE),
    _endpoint("/v1/responses/input_tokens", ("POST",), count_input_tokens, _HOST_HAS_NONE),
    _endpoint(_ONE, ("GET",), retrieve_response, _STORED),
    _endpoint(_ONE, ("DELETE",), delete_response, _STORED),
    _endpoint(f"{_ONE}/input_items", ("GET",), list_input_items, _STORED),
    _endpoint(f"{_ONE}/cancel", ("POST",), cancel_response, "cancels background responses"),
)
