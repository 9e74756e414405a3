"""The three APIs over both id endpoints of a real vLLM, with the official clients.

The model has random weights, so its text is noise; constraints and counts are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from uuid import uuid4

import anthropic
import httpx
import openai
import pytest
from app_server import run_server
from waiting import wait_until

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.settings import GatewaySettings, Key

MODEL = "gpt-oss-20b"
SECONDS = 600.0
KEYS = tuple(Key(name, digest(f"key-{name}")) for name in ("one", "other"))
ORDER = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer"}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "name": "order", "schema": ORDER, "strict": True}
ORDER["properties"]["count"].update(minimum=1, maximum=9)  # type: ignore[index]
(TO_TOKEN,) = vocab.encode(" to")
QUESTION: Any = [{"role": "user", "content": "Two small ones, please."}]


@pytest.fixture(scope="module", params=["vllm-completions", "vllm-tokens"])
def url(request: pytest.FixtureRequest, vllm: str) -> Iterator[str]:
    """A gateway over one of vLLM's endpoints."""
    engines = (Spec(vllm, request.param),)
    with gateway_over(GatewaySettings(engines=engines, model=MODEL, keys=KEYS)) as url:
        yield url


@contextmanager
def gateway_over(settings: GatewaySettings) -> Iterator[str]:
    """The URL of a gateway whose trial of its engine, which outlasts the start, is over."""
    with run_server(gateway(settings)) as url:
        ready = partial(httpx.get, f"{url}/ready", timeout=SECONDS)
        wait_until(lambda: ready().status_code == httpx.codes.OK, "the engine's trial", SECONDS)
        yield url


@pytest.fixture
def chat(url: str) -> openai.OpenAI:
    """OpenAI's client."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="key-one", max_retries=0, timeout=SECONDS)


@pytest.fixture
def anthropic_client(url: str) -> anthropic.Anthropic:
    """Anthropic's client."""
    return anthropic.Anthropic(base_url=url, auth_token="key-one", max_retries=0, timeout=SECONDS)


def assert_is_order(text: str) -> None:
    order = json.loads(text)
    assert order.keys() == {"size", "count"}
    assert order["size"] in {"small", "large"}
    assert order["count"] in range(1, 10)


def test_gateway_is_ready_and_lists_model(url: str) -> None:
    ready = httpx.get(f"{url}/ready").json()
    assert ready["status"] == "ready"
    models = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer key-one"}).json()
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [(MODEL, 8192)]


def test_endpoint_is_detected_without_a_kind(vllm: str) -> None:
    """vLLM's id endpoint is preferred where it exists."""
    with gateway_over(GatewaySettings(engines=(Spec(vllm),), model=MODEL)) as url:
        ready = httpx.get(f"{url}/ready").json()
    assert [engine["up"] for engine in ready["engines"]] == [True]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_required_call_is_enforced(chat: openai.OpenAI, stream: bool) -> None:
    function = {"name": "order", "parameters": ORDER, "strict": True}
    tool: Any = {"type": "function", "function": function}
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "tools": [tool],
        "tool_choice": "required",
        "logit_bias": {str(TO_TOKEN): 100},  # else the model would reason for ever
        "max_tokens": 4000,  # a random model writes much white space, which is allowed
    }
    if stream:
        with chat.chat.completions.stream(**request) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = chat.chat.completions.create(**request).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "order")
    assert_is_order(call.function.arguments)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_schema_is_enforced_in_responses(chat: openai.OpenAI, stream: bool) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "input": "Two small ones, please.",
        "reasoning": {"effort": "none"},
        "text": {"format": FORMAT},
        "max_output_tokens": 200,
    }
    if stream:
        with chat.responses.stream(**request) as events:
            response = events.get_final_response()
    else:
        response = chat.responses.create(**request)
    assert response.status == "completed"
    assert_is_order(response.output_text)
    assert chat.responses.retrieve(response.id).output_text == response.output_text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages_end_at_their_limit(anthropic_client: anthropic.Anthropic, stream: bool) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 24}
    if stream:
        with anthropic_client.messages.stream(**request) as events:
            message = events.get_final_message()
    else:
        message = anthropic_client.messages.create(**request)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 24
    counted = anthropic_client.messages.count_tokens(model=MODEL, messages=QUESTION)
    prompt = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert prompt == counted.input_tokens


def test_reasoning_ends_at_its_budget(chat: openai.OpenAI) -> None:
    """A second request continues behind the forced ids, with the rest of the grammar."""
    reasoning_tokens = []
    for seed in range(20):  # whether it reasons depends on the seed
        response = chat.responses.create(
            model=MODEL,
            input="Think about it.",
            text={"format": FORMAT},
            max_output_tokens=400,
            extra_body={"thinking_token_budget": 12, "seed": seed},
        )
        assert_is_order(response.output_text)
        details: Any = response.usage and response.usage.output_tokens_details
        reasoning_tokens.append(details.reasoning_tokens)
        if reasoning_tokens[-1] > 0:
            break
    assert 12 <= reasoning_tokens[-1] < 12 + 40


def test_prompt_is_cached_for_its_tenant_only(chat: openai.OpenAI, url: str) -> None:
    long = f"Here is list {uuid4()}: " + ", ".join(f"item {number}" for number in range(400))

    def cached_tokens(client: openai.OpenAI) -> int:
        completion = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": long}], max_tokens=2
        )
        details: Any = completion.usage and completion.usage.prompt_tokens_details
        return int(details.cached_tokens)

    other_client = openai.OpenAI(
        base_url=f"{url}/v1", api_key="key-other", max_retries=0, timeout=SECONDS
    )
    assert cached_tokens(chat) == 0
    assert cached_tokens(chat) > 500
    assert cached_tokens(other_client) == 0
    assert cached_tokens(other_client) > 500


def test_client_disconnect_frees_vllm(chat: openai.OpenAI, vllm: str) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 6000}
    with chat.chat.completions.create(**request, stream=True) as chunks:
        for number, _ in enumerate(chunks):
            if number == 5:
                assert _running_requests(vllm) == 1
                break
    wait_until(lambda: _running_requests(vllm) == 0, "vLLM to be free", SECONDS)


def _running_requests(vllm: str) -> int:
    text = httpx.get(f"{vllm}/metrics", timeout=SECONDS).text
    match = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
    assert match is not None
    return int(float(match[1]))


def test_refusal_of_vllm_is_a_request_error(chat: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        chat.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert raised.value.body is not None
    with suppress(openai.BadRequestError):
        chat.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 9000}], max_tokens=5
        )
        raise AssertionError("a prompt that is too long was taken")
