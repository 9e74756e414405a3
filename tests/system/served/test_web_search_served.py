"""Web search on the real host, with a scripted model and a search engine on 127.0.0.1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest
from server_process import FLAG, HARMONY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

pytest.importorskip("httpx2")
pytest.importorskip("lxml")


import fake_web

pytestmark = [pytest.mark.served, pytest.mark.nightly]  # in process the gate tests it, too

QUESTION = "How many live in Rome?"
CALL = "<|channel|>analysis to=browser.{} code<|message|>{}<|call|>"
SCRIPTS = [
    Script(f"{QUESTION}<|end|>", CALL.format("search", '{"query":"rome inhabitants"}')),
    Script("L2: A city.<|end|>", CALL.format("open", '{"id":0}')),
    Script(
        "L2: It has 2.8 million people.<|end|>",
        "<|channel|>final<|message|>There are 2.8 million【1†L2】.<|return|>",
    ),
]


@pytest.fixture(scope="module")
def site() -> Iterator[fake_web.Site]:
    with fake_web.run_site() as site:
        site.add("/rome", "<title>Rome</title><h1>Rome</h1><p>It has 2.8 million people.</p>")
        site.search(("Rome", f"{site.url}/rome", "A city."))
        yield site


@pytest.fixture(scope="module")
def server(
    site: fake_web.Site, start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A host with neither a tool configuration nor ``VLLM_MLX_HARMONY_TOOLS``."""
    server = start(
        *FLAG,
        model=standin.write(tmp_path_factory.mktemp("web") / "model", SCRIPTS),
        command=HARMONY,
        env={
            "VLLM_MLX_HARMONY_WEB_SEARCH": f"searxng:{site.url}",
            "VLLM_MLX_HARMONY_WEB_INTRANET": site.url,
            "VLLM_MLX_HARMONY_GRAMMAR": "auto",
        },
    )
    yield server
    server.stop()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_responses_searches_and_cites(server: Server, site: fake_web.Site, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="x", max_retries=0)
    tools: Any = [{"type": "web_search"}]
    request: Any = {"model": str(server.model), "input": QUESTION, "tools": tools}
    if stream:
        with client.responses.stream(**request) as events:
            response: Any = events.get_final_response()
    else:
        response = client.responses.create(**request)
    kinds = [item.type for item in response.output]
    assert kinds == ["web_search_call", "web_search_call", "message"]
    (part,) = response.output[-1].content
    (annotation,) = part.annotations
    url = f"{site.url}/rome"
    assert (annotation.url, annotation.title) == (url, "Rome")
    assert part.text == f"There are 2.8 million ([127.0.0.1:{site.port}]({url}))."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages_searches_and_cites(server: Server, site: fake_web.Site, stream: bool) -> None:
    """The request of Claude Code's WebSearch."""
    client = anthropic.Anthropic(base_url=server.base_url, api_key="x", max_retries=0)
    request: Any = {
        "model": str(server.model),
        "max_tokens": 1000,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    }
    if stream:
        with client.messages.stream(**request) as events:
            message: Any = events.get_final_message()
    else:
        message = client.messages.create(**request)
    kinds = [block.type for block in message.content]
    assert kinds == [
        *("server_tool_use", "web_search_tool_result"),
        *("server_tool_use", "web_fetch_tool_result"),
        *("text", "text"),
    ]
    assert message.content[4].citations[0].url == f"{site.url}/rome"


def test_startup_log_names_the_search_engine(server: Server, site: fake_web.Site) -> None:
    assert "browser: search, open, find" in server.log
    assert f"the web is searched with searxng at {site.url}" in server.log
