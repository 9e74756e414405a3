"""`gateway stand-in`: an engine for trying a gateway, which is detected as a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("openai")

import httpx
import openai
from app_server import run_server

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.settings import GatewaySettings, Key
from vllm_mlx_harmony.gateway.standin import TEXT, StandinEngine, StandinGateway, application
from vllm_mlx_harmony.server import enforcement, ids

MODEL, KEY = "gpt-oss-20b", "key-of-the-engine"
ANSWER = "This is a stand-in engine, not gpt-oss: it answers every request with this text."
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "size": {"enum": ["small", "large"]},
        "note": {"type": "string"},
        "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    },
    "required": ["size", "note", "items"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A gateway in front of the stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ids.ID_ENDPOINT_VARIABLE, "1")
        patch.setenv(enforcement.GRAMMAR_VARIABLE, "auto")
        settings = GatewaySettings(engines=(), model=MODEL, keys=(Key("gateway", digest(KEY)),))
        with run_server(application(StandinGateway(settings, StandinEngine(MODEL, 0.0)))) as engine:
            over = GatewaySettings(engines=(Spec(engine, key=KEY),), model=MODEL)
            with run_server(gateway(over)) as url:
                yield url


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def test_standin_is_detected_with_its_context(url: str) -> None:
    ready = httpx.get(f"{url}/ready", timeout=180).json()
    assert [engine["up"] for engine in ready["engines"]] == [True], ready
    (listed,) = httpx.get(f"{url}/v1/models", timeout=180).json()["data"]
    assert (listed["id"], listed["max_model_len"]) == (MODEL, 131_072)


@pytest.mark.parametrize("limit", [None, 5], ids=["whole", "cut"])
def test_every_answer_is_the_same_text(client: openai.OpenAI, limit: int | None) -> None:
    request: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]}
    if limit is not None:
        request["max_tokens"] = limit
    answer = client.chat.completions.create(**request)
    tokens = len(vocab.encoding().encode(TEXT, allowed_special="all"))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == (limit or tokens)
    if limit is None:
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == (
            "stop",
            ANSWER,
        )
    else:
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("strict", [False, True], ids=["loose", "strict"])
def test_required_call_is_made(client: openai.OpenAI, strict: bool) -> None:
    function = {"name": "order", "parameters": ORDER, "strict": strict}
    request: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Two, please."}]}
    called = client.chat.completions.create(
        **request, tools=[{"type": "function", "function": function}], tool_choice="required"
    )
    (call,) = called.choices[0].message.tool_calls or ()
    assert not isinstance(call, openai.types.chat.ChatCompletionMessageCustomToolCall)
    form = {"name": "order", "schema": ORDER, "strict": strict}
    typed = client.chat.completions.create(
        **request, response_format={"type": "json_schema", "json_schema": form}
    )
    for text in (call.function.arguments, typed.choices[0].message.content):
        order = json.loads(text or "")
        assert order.keys() == ORDER["properties"].keys()
        assert order["size"] in {"small", "large"}
        assert not strict or len(order["items"]) >= 2


@pytest.mark.parametrize("speed", ["0", "-1", "nan"])
def test_speed_must_be_positive(speed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "stand-in", "--tokens-per-second", speed]) == 2
    assert "must be greater than 0" in capsys.readouterr().err
