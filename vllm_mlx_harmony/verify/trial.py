"""The server under test, and one check's exchanges with it, which are recorded for the report."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import httpx
from httpx_sse import EventSource

from vllm_mlx_harmony.verify.apis import Api, Event, parsed
from vllm_mlx_harmony.verify.values import Answer, Ask, Document, Failed, Usage, require

OK = 200
KEPT = 2000
"""Characters of a request and of its response that are recorded."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A response that was not streamed."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def document(self) -> Document:
        """Its body. Raises ``Failed`` if that is not a JSON object."""
        return parsed(self.text)


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
    headers = {"anthropic-version": "2023-06-01", **_credentials(key)}
    base = url.rstrip("/").removesuffix("/v1")
    return httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout)


def _credentials(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "x-api-key": key} if key else {}


@dataclass(slots=True)
class Exchange:
    """The beginnings of what was sent and received."""

    sent: str
    received: str = ""

    def add(self, text: str) -> None:
        """Records more of the response."""
        self.received += text[: KEPT - len(self.received)]


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a check on one API of a server."""

    server: Server
    api: Api
    exchanges: list[Exchange] = field(default_factory=list)

    async def send(
        self,
        method: str,
        path: str,
        body: Document | str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """A response, whatever its status. A body of text is sent as it is."""
        text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
        content = None if body is None else text
        exchange = self._exchange(method, path, content or "")
        kind = {"Content-Type": "application/json"} if content else {}
        response = await self.server.client.request(
            method, path, content=content, headers={**kind, **(headers or {})}
        )
        exchange.add(f"{response.status_code} {response.text}")
        return Reply(response.status_code, response.headers, response.text)

    async def answer(self, ask: Ask) -> Answer:
        """The answer to a request that is not streamed. Raises ``Failed``."""
        return self.api.read(await self.document(ask))

    async def document(self, ask: Ask) -> Document:
        """The response to a request that is not streamed. Raises ``Failed`` unless it is 200."""
        return await self.post(self.api.body(self.server.model, ask))

    async def post(self, body: Document) -> Document:
        """The response to a body. Raises ``Failed`` unless it is 200."""
        reply = await self.send("POST", self.api.path, body)
        require(reply.status == OK, f"status {reply.status}, not 200")
        return reply.document

    async def streamed(self, ask: Ask) -> Answer:
        """The answer to a streamed request. Raises ``Failed``."""
        return self.api.read(self.api.assemble(await self.collected(ask)))

    async def collected(self, ask: Ask) -> list[Event]:
        """All events of a streamed request. Raises ``Failed``."""
        async with aclosing(self.events(ask)) as events:
            return [event async for event in events]

    def events(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """The events of a streamed request, as ``stream`` has them."""
        body = {**self.api.body(self.server.model, ask), "stream": True}
        if self.api.name == "chat":
            body = {"stream_options": {"include_usage": True}, **body}
        return self.stream(body)

    async def stream(self, body: Document) -> AsyncGenerator[Event, None]:
        """The response to a body. Raises ``Failed`` unless it is of server-sent events.

        Closing the iterator closes the connection.
        """
        exchange = self._exchange("POST", self.api.path, json.dumps(body, ensure_ascii=False))
        async with self.server.client.stream("POST", self.api.path, json=body) as response:
            exchange.add(f"{response.status_code}\n")
            kind = response.headers.get("content-type", "").partition(";")[0]
            if response.status_code != OK or kind != "text/event-stream":
                exchange.add((await response.aread()).decode("utf-8", "replace"))
                raise Failed(f"status {response.status_code} with {kind or 'no content type'}")
            async for event in EventSource(response).aiter_sse():
                name = event.event if event.event != "message" else ""
                exchange.add(f"event: {name}\ndata: {event.data}\n" if name else f"{event.data}\n")
                yield Event(name, event.data)

    def _exchange(self, method: str, path: str, content: str) -> Exchange:
        exchange = Exchange(f"{method} {path} {content[:KEPT]}".strip())
        self.exchanges.append(exchange)
        return exchange


async def models(http: httpx.AsyncClient) -> dict[str, int | None]:
    """Names and context lengths of the models that a server lists. Raises ``Failed``."""
    response = await http.get("/v1/models")
    require(response.status_code == OK, f"GET /v1/models: status {response.status_code}")
    listed = parsed(response.text).get("data")
    require(isinstance(listed, list), "GET /v1/models has no list `data`")
    return {each["id"]: _context(each) for each in listed or ()}


async def selected(http: httpx.AsyncClient, model: str | None) -> tuple[str, int | None]:
    """The model to use and its context: the one that is given, or the only one that is listed.

    Raises ``Failed`` if that is none.
    """
    try:
        listed = await models(http)
    except Failed:
        if model is None:
            raise
        listed = {}
    if model is None and len(listed) != 1:
        raise Failed(f"the server has {', '.join(listed) or 'no models'}: choose one with --model")
    name = model or next(iter(listed))
    return name, listed.get(name)


async def versions(http: httpx.AsyncClient) -> dict[str, str]:
    """What a server says of itself: its ``Server`` header, and vLLM's ``/version``."""
    response = await http.get("/version")
    found = {"server": response.headers.get("server", "")}
    if response.status_code == OK and response.text.startswith("{"):
        found["version"] = str(parsed(response.text).get("version", ""))
    return {name: text for name, text in found.items() if text}


def _context(model: Document) -> int | None:
    """As vLLM and this project list it, or llama.cpp."""
    length = model.get("max_model_len") or (model.get("meta") or {}).get("n_ctx")
    return length if isinstance(length, int) else None
