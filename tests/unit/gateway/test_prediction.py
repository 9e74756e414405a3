"""Predictions through the gateway: which engines get them, and the counts that they report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

import fake_engines
import httpx
from app_server import run_server
from fake_engines import EXCHANGES, METADATA, FakeEngine

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine_api.engine import GenerationSettings
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import KINDS, Spec
from vllm_mlx_harmony.gateway.engines.dialect import EngineRequest
from vllm_mlx_harmony.gateway.settings import GatewaySettings
from vllm_mlx_harmony.server.ids import IdRequest

MODEL = "gpt-oss-20b"
PLUGIN = "vllm-mlx"
PATH = "/harmony/v1/generate"
ANSWER = "<|start|>assistant<|channel|>final<|message|>Good day.<|return|>"
SCRIPTS = {
    "Hello!": f"<|channel|>analysis<|message|>Hm. A greeting, then.<|end|>{ANSWER}",
    "<|message|>Hm": ANSWER,
}
SETTINGS = GenerationSettings(max_tokens=50, temperature=0.7, top_p=0.9)


def body(kind: str, prediction: tuple[int, ...]) -> dict[str, Any]:
    settings = replace(SETTINGS, prediction=prediction)
    return KINDS[kind].body(EngineRequest("m", (1, 2), settings))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_only_the_id_endpoint_gets_a_prediction(kind: str) -> None:
    """Without a prediction the field is left out, since older servers do not know it."""
    assert "prediction" not in json.dumps(body(kind, ()))
    if kind != PLUGIN:
        assert body(kind, (5, 6)) == body(kind, ())
        return
    sent = IdRequest.model_validate(json.loads(json.dumps(body(kind, (5, 6)))))
    assert sent.settings.resolved() == replace(SETTINGS, prediction=(5, 6))


@pytest.mark.parametrize(
    ("event", "counts"),
    [
        ({"accepted": 3, "rejected": 1}, (3, 1)),
        ({"rejected": 1}, (0, 1)),
        ({}, (0, 0)),
        ({"accepted": -3, "rejected": "many"}, (0, 0)),
    ],
)
def test_counts_are_read(event: dict[str, Any], counts: tuple[int, int]) -> None:
    step = KINDS[PLUGIN].read(json.dumps({"ids": [5], **event}).encode(), 0)
    assert (step.ids, step.accepted, step.rejected) == ((5,), *counts)


def draft_events(prompt: Sequence[int], output: Sequence[int], finish: str) -> Iterator[str]:
    """Events of an engine whose first step has a draft: counts so far, only in events with ids."""
    for event in map(json.loads, fake_engines.plugin_events(prompt, output, finish)):
        yield json.dumps({**event, **({"accepted": 7, "rejected": 3} if event["ids"] else {})})


def post_chat(
    engine: FakeEngine, *, stream: bool, **fields: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """Sends a chat to a gateway; returns its usage details and the gateway's counters."""
    message = {"role": "user", "content": "Hello!"}
    request = {"model": MODEL, "messages": [message], "stream": stream, **fields}
    if stream:
        request["stream_options"] = {"include_usage": True}
    with run_server(engine.app) as url:
        settings = GatewaySettings(engines=(Spec(url),), model=MODEL)
        with (
            run_server(gateway(settings)) as base,
            httpx.Client(base_url=base, timeout=180) as client,
        ):
            answer = client.post("/v1/chat/completions", json=request)
            assert answer.status_code == 200, answer.text
            counted = client.get("/metrics").text
    document = answer.json() if not stream else json.loads(answer.text.split("data: ")[-2])
    name = "vllm_mlx_harmony_prediction_tokens_total"
    lines = [line.split() for line in counted.splitlines() if line.startswith(f"{name}{{")]
    return document["usage"]["completion_tokens_details"], {
        line[0]: float(line[1]) for line in lines
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("fields", "requests"),
    # With a budget, the answer is that of two requests, with forced ids between them.
    [({}, 1), ({"stop": "day"}, 1), ({"thinking_token_budget": 2}, 2)],
    ids=["free", "stopped", "budget"],
)
def test_prediction_reaches_the_engine_and_is_counted(
    stream: bool, fields: dict[str, Any], requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXCHANGES, PLUGIN, replace(EXCHANGES[PLUGIN], events=draft_events))
    engine = FakeEngine(PLUGIN, SCRIPTS)
    prediction = {"type": "content", "content": "Good day."}
    details, counted = post_chat(engine, stream=stream, prediction=prediction, **fields)
    predicted = vocab.encode("Good day.")
    assert [sent["settings"]["prediction"] for sent in engine.bodies] == [predicted] * requests
    assert details["accepted_prediction_tokens"] == 7 * requests
    assert details["rejected_prediction_tokens"] == 3 * requests
    assert sorted(counted.values()) == [3 * requests, 7 * requests]


@pytest.mark.parametrize(
    ("kind", "about"),
    [(PLUGIN, {"harmony": 1}), (PLUGIN, {"harmony": 1, "settings": 7}), ("vllm", None)],
)
def test_prediction_is_not_sent_to_other_engines(
    kind: str, about: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if about is not None:
        monkeypatch.setitem(METADATA[kind], PATH, about)
    engine = FakeEngine(kind, SCRIPTS)
    prediction = {"type": "content", "content": "Good day."}
    details, counted = post_chat(engine, stream=False, prediction=prediction)
    assert engine.bodies and "prediction" not in json.dumps(engine.bodies)
    assert "accepted_prediction_tokens" not in details and not any(counted.values())
