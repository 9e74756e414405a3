"""Log probabilities through the gateway: refused unless the engine returns the model's own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from app_server import run_server
from fake_engines import EXCHANGES, TOP_LOGPROBS, FakeEngine, logprob_of, with_logprobs
from gateway_in_process import CountingGateway
from harmony_text import ids_of
from starlette.testclient import TestClient

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.engine_api.engine import GenerationSettings, Step
from vllm_mlx_harmony.gateway.engines.detection import KINDS
from vllm_mlx_harmony.gateway.engines.dialect import EngineRequest
from vllm_mlx_harmony.server.app import application

KEY = "sesame"
TEXT = "Good day, 世界."
SCRIPTS = {
    "Hello!": "<|channel|>analysis<|message|>Hm. A greeting, then.<|end|>"
    f"<|start|>assistant<|channel|>final<|message|>{TEXT}<|return|>",
    "<|message|>Hm": f"<|start|>assistant<|channel|>final<|message|>{TEXT}<|return|>",
}
GIVING, REFUSING = ("vllm", "vllm-tokens", "vllm-mlx"), ("sglang", "llamacpp")
SETTINGS = GenerationSettings(max_tokens=50, temperature=0.7, top_p=0.9)


def request(most: int | None) -> EngineRequest:
    return EngineRequest("m", (1, 2), replace(SETTINGS, top_logprobs=most))


def steps(kind: str, most: int) -> list[Step]:
    output = ids_of(SCRIPTS["Hello!"])
    body = json.loads(json.dumps(KINDS[kind].body(request(most))))
    events = with_logprobs(kind, body, EXCHANGES[kind].events([1, 2], output, "stop"))
    return [KINDS[kind].read(event.encode(), at) for at, event in enumerate(events)]


@pytest.mark.parametrize("most", [0, 1, 5, 20])
@pytest.mark.parametrize("kind", GIVING)
def test_every_id_has_its_logprob_and_the_likeliest(kind: str, most: int) -> None:
    logprobs = [logprob for step in steps(kind, most) for logprob in step.logprobs]
    assert tuple(logprob.token for logprob in logprobs) == ids_of(SCRIPTS["Hello!"])
    for entry in logprobs:
        assert entry.logprob == logprob_of(entry.token)
        # At vLLM's limit of 20, its endpoint of ids counts an unlikely id as the last of them.
        shown = 19 if (kind, most) == ("vllm-tokens", 20) else most
        assert entry.top[:shown] == TOP_LOGPROBS[:shown]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_requests_without_logprobs_send_no_field(kind: str) -> None:
    assert "logprob" not in json.dumps(KINDS[kind].body(request(None)))


def test_tokens_are_read_as_numbers() -> None:
    """As in the newest vLLM."""

    top = [{"token_id": 5, "logprob": -1, "rank": 1}]
    content = [{"token_id": 5, "logprob": -1, "rank": 1, "top_logprobs": top}]
    choice = {"index": 0, "token_ids": [5], "logprobs": {"content": content}}
    (entry,) = KINDS["vllm-tokens"].read(json.dumps({"choices": [choice]}).encode(), 0).logprobs
    assert (entry.token, entry.logprob, entry.top) == (5, -1.0, ((5, -1.0),))


GARBAGE: list[Any] = [
    {"content": [7]},
    {"content": [{"logprob": "much"}]},
    {"token_logprobs": [None], "top_logprobs": [None]},
    {"token_logprobs": 7, "top_logprobs": [None]},
    {"token_logprobs": [-1.0], "top_logprobs": [{"token_id:5": "x"}]},
]


@pytest.mark.parametrize("logprobs", GARBAGE)
def test_garbage_is_an_output_error(logprobs: Any) -> None:
    event = {"choices": [{"index": 0, "token_ids": [5], "logprobs": logprobs}]}
    with pytest.raises(OutputError):
        KINDS["vllm"].read(json.dumps(event).encode(), 0)


def post(kind: str, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    engine = FakeEngine(kind, SCRIPTS)
    with run_server(engine.app) as url:
        app = application(CountingGateway(KEY, (engine, url)))
        client = TestClient(app, base_url="http://localhost")
        client.headers["Authorization"] = f"Bearer {KEY}"
        messages = [{"role": "user", "content": "Hello!"}]
        prompt = {"messages": messages} if "chat" in path else {"input": "Hello!"}
        return client.post(path, json={"model": "gpt-oss-20b", **prompt, **fields})


# With a budget, the answer is that of two requests, with forced ids between them.
@pytest.mark.parametrize("fields", [{}, {"thinking_token_budget": 2}], ids=["free", "budget"])
@pytest.mark.parametrize("kind", GIVING)
def test_gateway_returns_logprobs(kind: str, fields: dict[str, Any]) -> None:
    answer = post(kind, logprobs=True, top_logprobs=3, **fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == TEXT
    content = choice["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in content] == [*map(vocab.token_bytes, ids_of(TEXT))]
    assert [entry["logprob"] for entry in content] == [*map(logprob_of, ids_of(TEXT))]
    for token in content:
        assert [entry["logprob"] for entry in token["top_logprobs"]] == [
            logprob for _, logprob in TOP_LOGPROBS[:3]
        ]
        assert token["top_logprobs"][0]["token"] == "<|return|>"
        assert token["top_logprobs"][0]["bytes"] is None


@pytest.mark.parametrize("kind", REFUSING)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_logprobs_are_rejected(kind: str, stream: bool) -> None:
    answer = post(kind, logprobs=True, stream=stream)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
    include = ["message.output_text.logprobs"]
    answer = post(kind, "/v1/responses", include=include, stream=stream)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")
    assert post(kind, stream=stream).status_code == 200


def test_missing_log_probability_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import fake_engines

    monkeypatch.setattr(fake_engines, "with_logprobs", lambda kind, body, events: events)
    answer = post("vllm", logprobs=True)
    assert answer.status_code >= 500
    assert "log probability" in answer.text
