"""The server under test, and one check's exchanges with it, which are recorded for the report."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import httpx
from httpx_sse import EventSource, ServerSentEvent

from vllm_mlx_harmony.verify.apis import Api, parsed
from vllm_mlx_harmony.verify.values import Ask, Document, Failed, ReceivedAnswer, Usage, require

OK = 200
MAX_RECORDED = 2000
"""Characters of a request and of its response that are recorded."""


@dataclass(frozen=True, slots=True)
class Server:
    """The server under test.

    ``context`` is the model's length in tokens, if it is listed; ``loops`` is what each turn of the
    tool loop used, by API.
    """

    client: httpx.AsyncClient
    model: str
    key: str | None = None
    context: int | None = None
    loops: dict[str, list[Usage]] = field(default_factory=dict)


def client(url: str, key: str | None, timeout: float) -> httpx.AsyncClient:
    """A client for ``url``, with or without ``/v1``; ``timeout`` is in seconds."""
    credentials = {"Authorization": f"Bearer {key}", "x-api-key": key} if key else {}
    headers = {"anthropic-version": "2023-06-01", **credentials}
    base = url.rstrip("/").removesuffix("/v1")
    return httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout)


@dataclass(slots=True)
class Exchange:
    """The beginnings of what was sent and received."""

    sent: str = ""
    received: str = ""

    def add(self, text: str) -> None:
        self.received += text[: MAX_RECORDED - len(self.received)]


@dataclass(slots=True)
class Trial:
    """One run of a check on one API of a server, and its last exchange.

    Methods but ``send`` raise ``Failed`` for any other response than the one they return.
    """

    server: Server
    api: Api
    exchange: Exchange = field(default_factory=Exchange)

    async def send(
        self,
        method: str,
        path: str,
        body: Document | str = "",
        **headers: str,
    ) -> httpx.Response:
        """A response, whatever its status. A body of text is sent as it is."""
        content = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
        exchange = self._exchange(method, path, content)
        if content:
            headers["Content-Type"] = "application/json"
        response = await self.server.client.request(method, path, content=content, headers=headers)
        exchange.add(f"{response.status_code} {response.text}")
        return response

    async def answer(self, ask: Ask) -> ReceivedAnswer:
        return self.api.read(await self.document(ask))

    async def document(self, ask: Ask) -> Document:
        return await self.post(self.api.body(self.server.model, ask))

    async def post(self, body: Document) -> Document:
        reply = await self.send("POST", self.api.path, body)
        require(reply.status_code == OK, f"status {reply.status_code}, not 200")
        return parsed(reply.text)

    async def streamed(self, ask: Ask) -> ReceivedAnswer:
        return self.api.read(self.api.assemble(await self.collected(ask)))

    async def collected(self, ask: Ask) -> list[ServerSentEvent]:
        async with aclosing(self.events(ask)) as events:
            return [event async for event in events]

    def events(self, ask: Ask) -> AsyncGenerator[ServerSentEvent, None]:
        body = {**self.api.body(self.server.model, ask), "stream": True}
        if self.api.name == "chat":
            body = {"stream_options": {"include_usage": True}, **body}
        return self.stream(body)

    def stream(self, body: Document) -> AsyncGenerator[ServerSentEvent, None]:
        exchange = self._exchange("POST", self.api.path, json.dumps(body, ensure_ascii=False))
        return stream(self.server.client, self.api.path, body, exchange)

    def _exchange(self, method: str, path: str, content: str) -> Exchange:
        self.exchange = Exchange(f"{method} {path} {content[:MAX_RECORDED]}".strip())
        return self.exchange


async def stream(
    http: httpx.AsyncClient, path: str, body: Document, exchange: Exchange
) -> AsyncGenerator[ServerSentEvent, None]:
    """The events of a streamed response. Raises ``Failed`` for any other.

    Closing the iterator closes the connection.
    """
    async with http.stream("POST", path, json=body) as response:
        exchange.add(f"{response.status_code}\n")
        kind = response.headers.get("content-type", "").partition(";")[0]
        if response.status_code != OK or kind != "text/event-stream":
            text = (await response.aread()).decode("utf-8", "replace")
            exchange.add(text)
            kind = kind or "no content type"
            raise Failed(f"status {response.status_code} with {kind}: {text[:200]}")
        async for event in EventSource(response).aiter_sse():
            exchange.add(f"event: {event.event}\ndata: {event.data}\n")
            yield event


async def models(http: httpx.AsyncClient) -> dict[str, int | None]:
    """Names and context lengths of the models that a server lists. Raises ``Failed``."""
    response = await http.get("/v1/models")
    require(response.status_code == OK, f"GET /v1/models: status {response.status_code}")
    data = parsed(response.text).get("data")
    require(isinstance(data, list), "GET /v1/models has no list `data`")
    found = {}
    for entry in data or ():
        # as vLLM and this project list it, or llama.cpp
        length = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")
        found[entry["id"]] = length if isinstance(length, int) else None
    return found


async def selected(http: httpx.AsyncClient, model: str | None) -> tuple[str, int | None]:
    """The model to use and its context: the one that is given, or the only one that is listed.

    Raises ``Failed`` if that is none.
    """
    try:
        contexts = await models(http)
    except Failed:
        if model is None:
            raise
        contexts = {}
    if model is None and len(contexts) != 1:
        raise Failed(
            f"the server has {', '.join(contexts) or 'no models'}: choose one with --model"
        )
    name = model or next(iter(contexts))
    return name, contexts.get(name)


async def versions(http: httpx.AsyncClient) -> dict[str, str]:
    """What a server says of itself: its ``Server`` header, and vLLM's ``/version``."""
    response = await http.get("/version")
    found = {"server": response.headers.get("server", "")}
    if response.status_code == OK and response.text.startswith("{"):
        found["version"] = str(parsed(response.text).get("version", ""))
    return {name: text for name, text in found.items() if text}
