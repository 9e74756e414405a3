"""Log probabilities in Chat Completions and Responses: of content only, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")

from event_checker import check, from_wire
from harmony_text import ids_of
from official_clients import clients
from openai.lib.streaming.chat import ChatCompletionStreamState
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.server.app import application

pytestmark = pytest.mark.usefixtures("no_grammars")

PREAMBLE, FINAL = "Let me see: 🧑🏽‍🚀.", "Good day, 世界."
SCRIPT = (
    "<|channel|>analysis<|message|>They greet me.<|end|>"
    f"<|start|>assistant<|channel|>commentary<|message|>{PREAMBLE}<|end|>"
    f"<|start|>assistant<|channel|>final<|message|>{FINAL}<|return|>"
)
CALL = '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a":1}<|call|>'
SCRIPTS = {"Hello!": SCRIPT, "Call.": CALL}


def entry(token: int, logprob: float, no_bytes: Any) -> dict[str, Any]:
    if token in vocab.CONTROL:
        return {"token": vocab.encoding().decode([token]), "logprob": logprob, "bytes": no_bytes}
    content = vocab.token_bytes(token)
    text = content.decode("utf-8", "replace")
    return {"token": text, "logprob": logprob, "bytes": [*content]}


def expected(text: str, most: int, no_bytes: Any = None) -> list[dict[str, Any]]:
    """The entries of all ids of ``text``, as `scripted_host.logprobs` has them."""
    likeliest = [vocab.RETURN, vocab.END, *range(18)][:most]
    top = [entry(token, -0.25 * at, no_bytes) for at, token in enumerate(likeliest, start=1)]
    return [
        {**entry(token, -token / 1000, no_bytes), "top_logprobs": top} for token in ids_of(text)
    ]


@pytest.fixture
def wire(request: pytest.FixtureRequest) -> Iterator[TestClient]:
    engine = ScriptedEngine(SCRIPTS, **getattr(request, "param", {}))
    with TestClient(application(SingleEngineHost(engine)), base_url="http://localhost") as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


def chat(text: str = "Hello!", **fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "tools": tools, **fields}


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("most", [None, 0, 5, 20])
@pytest.mark.parametrize("n", [1, 2])
def test_chat_has_logprobs_of_content(at_once: int, most: int | None, n: int) -> None:
    options = chat(logprobs=True, n=n, **({} if most is None else {"top_logprobs": most}))
    entries = expected(PREAMBLE, most or 0) + expected(FINAL, most or 0)

    async def test() -> None:
        client, _ = clients(SingleEngineHost(ScriptedEngine(SCRIPTS, at_once)))
        whole = await client.chat.completions.create(**options)
        state = ChatCompletionStreamState()
        async for chunk in await client.chat.completions.create(**options, stream=True):
            state.handle_chunk(chunk)
            for choice in chunk.choices:
                content = getattr(choice.delta, "content", None)
                assert bool(choice.logprobs) == bool(content)
        for completion in (whole, state.current_completion_snapshot):
            assert len(completion.choices) == n
            for choice in completion.choices:
                assert choice.message.content == f"{PREAMBLE}\n{FINAL}"
                assert choice.logprobs is not None
                assert choice.logprobs.refusal is None
                dumped = [token.model_dump() for token in choice.logprobs.content or ()]
                assert dumped == entries

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"logprobs": False, "top_logprobs": 0}])
def test_chat_omits_unrequested_logprobs(
    wire: TestClient, stream: bool, fields: dict[str, Any]
) -> None:
    answer = wire.post("/v1/chat/completions", json=chat(stream=stream, **fields))
    assert '"logprobs":null' in answer.text
    assert '"logprobs":{' not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_call_has_no_logprobs(wire: TestClient, stream: bool) -> None:
    answer = wire.post("/v1/chat/completions", json=chat("Call.", stream=stream, logprobs=True))
    assert answer.status_code == 200
    assert '"logprobs":{' not in answer.text


INCLUDE = {"include": ["message.output_text.logprobs"]}
REQUESTED: dict[str, tuple[dict[str, Any], int | None]] = {
    "include": (INCLUDE, 0),
    "both": ({**INCLUDE, "top_logprobs": 3}, 3),
    "a number": ({"top_logprobs": 20}, 20),
    "neither": ({"include": ["reasoning.encrypted_content"], "top_logprobs": 0}, None),
}


@pytest.mark.parametrize(("fields", "most"), REQUESTED.values(), ids=REQUESTED)
@pytest.mark.parametrize("wire", [{"at_once": 1}, {"at_once": 3}], indirect=True)
def test_responses_have_logprobs_of_content(
    wire: TestClient, fields: dict[str, Any], most: int | None
) -> None:
    body = {"model": MODEL, "input": "Hello!", **fields}
    whole = wire.post("/v1/responses", json=body).json()
    answer = wire.post("/v1/responses", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    streamed = check(from_wire(answer.text))
    stored = wire.get(f"/v1/responses/{streamed['id']}").json()
    for document in (whole, streamed, stored):
        assert document["top_logprobs"] == fields.get("top_logprobs", 0)
        parts = [item["content"][0] for item in document["output"] if item["type"] == "message"]
        assert [part["text"] for part in parts] == [PREAMBLE, FINAL]
        for part in parts:
            entries = [] if most is None else expected(part["text"], most, no_bytes=[])
            assert part["logprobs"] == entries
    reasoning = [item for item in whole["output"] if item["type"] == "reasoning"]
    assert "logprobs" not in json.dumps(reasoning)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", chat(logprobs=True), "logprobs"),
    "responses": ("/v1/responses", {"model": MODEL, "input": "Hi", **INCLUDE}, "include"),
}


@pytest.mark.parametrize(("path", "body", "param"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", [{"has_logprobs": False}], indirect=True)
def test_logprobs_are_rejected_without_engine_support(
    wire: TestClient, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    answer = wire.post(path, json={**body, "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported_value")
