"""What programs expect of a local server, through a gateway."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("openai")
pytest.importorskip("anthropic")

import anthropic
import httpx
import openai
from app_server import run_server
from fake_engines import FakeEngine
from gateway_in_process import MODEL
from harmony_text import ids_of
from local_apis import CHECKS, ENOUGH, FINAL, SCRIPTS, THINKING, URGENT

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.settings import load


class Reasoning(FakeEngine):
    """Answers briefly after reasoning that the gateway has ended."""

    def output_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        text = vocab.encoding().decode(list(prompt))
        if THINKING in text and text.endswith("<|end|><|start|>assistant"):
            return ids_of(FINAL.format(ENOUGH))
        return super().output_ids(prompt)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    engine = Reasoning("vllm", {**SCRIPTS, URGENT: "B<|return|>"}, pause=0.02)
    with (
        run_server(engine.app) as url,
        run_server(gateway(load({"engines": [url], "model": MODEL}, {}))) as base,
        httpx.Client(base_url=base, timeout=60) as http,
    ):
        yield http


@pytest.mark.nightly(sample=5)
@pytest.mark.parametrize("check", CHECKS)
def test_gateway_passes_check(http: httpx.Client, check: str) -> None:
    CHECKS[check](http, MODEL)


SEARCHES = '<|channel|>analysis to=browser.search code<|message|>{"query": "Rome"}<|call|>'
QUESTION = "Is it warm in Rome?"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_official_clients_can_search_the_web(stream: bool) -> None:
    """With Responses and with Messages."""
    pytest.importorskip("httpx2")
    pytest.importorskip("lxml")
    import fake_web

    with fake_web.run_site() as site:
        site.search(("Rome", "https://a.example/rome", "It has 20 °C."))
        engine = FakeEngine("vllm", {QUESTION: SEARCHES, "20 °C": FINAL.format("It is warm.")})
        flags = {"model": MODEL, "web_search": f"searxng:{site.url}"}
        with (
            run_server(engine.app) as url,
            run_server(gateway(load({**flags, "engines": [url]}, {}))) as base,
        ):
            responses = openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0).responses
            request: Any = {"model": MODEL, "input": QUESTION, "tools": [{"type": "web_search"}]}
            if stream:
                with responses.stream(**request) as events:
                    response: Any = events.get_final_response()
            else:
                response = responses.create(**request)
            messages = anthropic.Anthropic(base_url=base, api_key="x", max_retries=0).messages
            tool = {"type": "web_search_20250305", "name": "web_search"}
            user = {"role": "user", "content": QUESTION}
            request = {"model": MODEL, "max_tokens": 500, "messages": [user], "tools": [tool]}
            if stream:
                with messages.stream(**request) as blocks:
                    message: Any = blocks.get_final_message()
            else:
                message = messages.create(**request)
    assert [item.type for item in response.output] == ["web_search_call", "message"]
    assert response.output_text == "It is warm."
    kinds = ["server_tool_use", "web_search_tool_result", "text"]
    assert [block.type for block in message.content] == kinds
    assert message.usage.server_tool_use.web_search_requests == 1
    assert site.queries() == ["Rome"] * 2
