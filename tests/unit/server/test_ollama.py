"""Ollama's and LM Studio's endpoints, on the wire and through the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("ollama")

import ollama
from official_clients import ollama_client
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient

from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Steps
from vllm_mlx_harmony.server import settings

pytestmark = pytest.mark.usefixtures("no_grammars")

SCRIPTS = {
    "Hello!": "<|channel|>analysis<|message|>They greet.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Good day.<|return|>"
}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SingleEngineHost:
    monkeypatch.setenv(settings.variable("model_names"), "gpt-oss:20b")
    return SingleEngineHost(ScriptedEngine(SCRIPTS, 3))


@pytest.fixture
def wire(host: SingleEngineHost) -> Iterator[TestClient]:
    with TestClient(host.app, base_url="http://localhost") as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "gptoss",
    "families": ["gptoss"],
    "parameter_size": "",
    "quantization_level": "",
}


def test_official_client_lists_and_shows_models(host: SingleEngineHost) -> None:
    client = ollama_client(host)

    async def test() -> None:
        listing = await client.list()
        assert [model.model for model in listing.models] == [MODEL, "gpt-oss:20b"]
        (running,) = (await client.ps()).models
        assert (running.model, running.context_length) == (MODEL, 4096)
        details = await client.show("gpt-oss:20b")
        assert details.modelinfo == {
            "general.architecture": "gptoss",
            "gptoss.context_length": 4096,
        }
        assert details.capabilities == ["completion", "tools", "thinking"]
        with pytest.raises(ollama.ResponseError) as refused:
            await client.show("llama3")
        assert refused.value.status_code == 404
        assert "llama3" in refused.value.error

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_generate_answers_prompt(host: SingleEngineHost, stream: bool) -> None:
    client = ollama_client(host)

    async def test() -> tuple[str, str, str]:
        options: Any = {"model": "gpt-oss:20b", "prompt": "Hello!", "stream": stream}
        response = await client.generate(**options)
        lines = [line async for line in response] if stream else [response]
        thinking = "".join(line.thinking or "" for line in lines)
        assert {line.model for line in lines} == {"gpt-oss:20b"}
        return thinking, "".join(line.response for line in lines), lines[-1].done_reason

    assert asyncio.run(test()) == ("They greet.", "Good day.", "stop")
    assert host.leases == 0
    assert [tracker.api for tracker in host.trackers] == ["ollama_generate"]


def test_stream_has_json_lines(wire: TestClient) -> None:
    """Streaming is the default."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]}
    response = wire.post("/api/chat", json=body)
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert response.text.endswith("}\n")
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["total_duration"] > 0


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_request_without_prompt_loads_model(
    host: SingleEngineHost, wire: TestClient, path: str
) -> None:
    answer = wire.post(f"/api/{path}", json={"model": "gpt-oss:20b", "keep_alive": "5m"}).json()
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("gpt-oss:20b", True, "load")
    assert host.engine.prompts == []  # type: ignore[attr-defined]
    assert host.leases == 0
    assert wire.post(f"/api/{path}", json={"model": "llama3"}).status_code == 404
    assert wire.post(f"/api/{path}", json={"model": MODEL, "think": 1}).status_code == 400


ERRORS: list[tuple[str, str, object, int]] = [
    ("POST", "/api/chat", [], 400),
    ("POST", "/api/chat", {"messages": "x", "model": MODEL}, 400),
    ("POST", "/api/generate", {"model": MODEL, "prompt": "x", "raw": True}, 400),
    ("POST", "/api/chat", {"model": "llama3", "messages": [{"role": "user", "content": "x"}]}, 404),
    ("POST", "/api/show", {}, 400),
    ("POST", "/api/show", {"model": f"gpt-oss:20b{'x' * 4_096}"}, 404),
    ("GET", "/api/chat", None, 405),
    ("POST", "/api/pull", {"model": MODEL}, 404),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), ERRORS)
def test_invalid_request_gets_error_text(
    wire: TestClient, method: str, path: str, body: object, status: int
) -> None:
    response = wire.request(method, path, json=body)
    assert response.status_code == status
    assert [*response.json()] == ["error"]
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize("path", ["tags", "ps", "version", "v0/models"])
def test_key_is_required(wire: TestClient, path: str) -> None:
    assert wire.get(f"/api/{path}").status_code == 200
    refused = wire.get(f"/api/{path}", headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401
    assert isinstance(refused.json()["error"], dict if path == "v0/models" else str)


def test_version_is_new_enough_for_clients(wire: TestClient) -> None:
    version = wire.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)


def test_lm_studio_lists_models(wire: TestClient) -> None:
    entry = {
        "id": MODEL,
        "object": "model",
        "type": "llm",
        "publisher": "openai",
        "arch": "gpt-oss",
        "state": "loaded",
        "capabilities": ["tool_use"],
        "max_context_length": 4096,
        "loaded_context_length": 4096,
    }
    models = {"object": "list", "data": [entry, {**entry, "id": "gpt-oss:20b"}]}
    assert wire.get("/api/v0/models").json() == models
    assert wire.get("/api/v0/models/").json() == models
    assert wire.get("/api/v0/models/gpt-oss:20b").json() == models["data"][1]
    missing = wire.get("/api/v0/models/llama3")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/models", "/api/v0/models"])
def test_length_of_model_name_is_limited(
    path: str, host: SingleEngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in requests, even if a pattern would match it."""
    monkeypatch.setenv(settings.variable("model_names"), "gpt-*")
    with TestClient(host.app, base_url="http://localhost") as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        for length, status in ((4_096, 200), (4_097, 404)):
            answer = client.get(f"{path}/{'gpt-'.ljust(length, '5')}")
            assert answer.status_code == status
        assert len(answer.text) < 1_000


class FailingEngine(ScriptedEngine):
    """Fails after its first ids."""

    async def generate(self, request: GenerationRequest) -> Steps:
        async for step in super().generate(request):
            yield step
            raise RuntimeError("broken")


def test_stream_error_reaches_official_client(host: SingleEngineHost) -> None:
    host.engine = FailingEngine({"Hello!": "<|channel|>final<|message|>One two three four"}, 5)

    async def test() -> None:
        options: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]}
        lines = await ollama_client(host).chat(**options, stream=True)
        async for line in lines:
            assert line.message.content == "One two"

    with pytest.raises(ollama.ResponseError, match="internal error"):
        asyncio.run(test())
    assert host.leases == 0
