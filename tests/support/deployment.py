"""A gateway in this process with fake engines behind it, all on sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from app_server import run_server
from fake_engines import FakeEngine
from gateway_in_process import MODEL, CountingGateway

from vllm_mlx_harmony.gateway.routing_policy import Rule
from vllm_mlx_harmony.server.app import application

TEXT = "The answer is long enough to be cut anywhere: été, ☀, 你好, and an end."
SCRIPTS = {
    "Hello": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    f"<|channel|>final<|message|>{TEXT}<|return|>",
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"input": "Hello", "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 500},
}
CHAT = "/v1/chat/completions"


class Deployment:
    """A gateway on a socket, and the engines behind it."""

    def __init__(
        self, stack: ExitStack, *engines: FakeEngine, rule: Rule | None = None, **settings: Any
    ) -> None:
        self.engines = engines
        urls = [stack.enter_context(run_server(engine.app)) for engine in engines]
        # The first engine is every conversation's home.
        rule = replace(rule or Rule(), weight=lambda name, _: -urls.index(name))
        self.host = CountingGateway("", *zip(engines, urls, strict=True), rule=rule, **settings)
        self.url = stack.enter_context(run_server(application(self.host)))

    def ask(self, path: str = CHAT, *, stream: bool = False, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "stream": stream, **BODIES[path], **fields}
        return httpx.post(self.url + path, json=body, timeout=180)

    @asynccontextmanager
    async def streaming(self, client: httpx.AsyncClient) -> AsyncIterator[httpx.Response]:
        body = {"model": MODEL, "stream": True, **BODIES[CHAT]}
        async with client.stream("POST", self.url + CHAT, json=body) as response:
            yield response
