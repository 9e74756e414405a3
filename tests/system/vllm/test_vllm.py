"""The three APIs over a real vLLM, both of its endpoints of ids, through the official clients.

The model is random, so what it says is noise; what it is held to, and what is counted, is not.
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
from fake_engines import served, until

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
(TO,) = vocab.encode(" to")
QUESTION: Any = [{"role": "user", "content": "Two small ones, please."}]


@pytest.fixture(scope="module", params=["vllm-completions", "vllm-tokens"])
def url(request: pytest.FixtureRequest, vllm: str) -> Iterator[str]:
    """A gateway over one of its endpoints."""
    engines = (Spec(vllm, request.param),)
    with over(GatewaySettings(engines=engines, model=MODEL, keys=KEYS)) as url:
        yield url


@contextmanager
def over(settings: GatewaySettings) -> Iterator[str]:
    """A gateway that has tried its engine, which takes longer than its start may."""
    with served(gateway(settings)) as url:
        ready = partial(httpx.get, f"{url}/ready", timeout=SECONDS)
        until(lambda: ready().status_code == httpx.codes.OK, "the engine's trial", SECONDS)
        yield url


@pytest.fixture
def chat(url: str) -> openai.OpenAI:
    """OpenAI's client."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="key-one", max_retries=0, timeout=SECONDS)


@pytest.fixture
def messages(url: str) -> anthropic.Anthropic:
    """Anthropic's."""
    return anthropic.Anthropic(base_url=url, auth_token="key-one", max_retries=0, timeout=SECONDS)


def assert_is_order(text: str) -> None:
    order = json.loads(text)
    assert order.keys() == {"size", "count"}
    assert order["size"] in {"small", "large"}
    assert order["count"] in range(1, 10)


def test_it_is_found_with_what_it_can_do(url: str) -> None:
    ready = httpx.get(f"{url}/ready").json()
    assert ready["status"] == "ready"
    listed = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer key-one"}).json()
    assert [(one["id"], one["max_model_len"]) for one in listed["data"]] == [(MODEL, 8192)]


def test_vllm_itself_is_found(vllm: str) -> None:
    """Without a kind: the endpoint of ids where it is there."""
    with over(GatewaySettings(engines=(Spec(vllm),), model=MODEL)) as url:
        ready = httpx.get(f"{url}/ready").json()
    assert [engine["up"] for engine in ready["engines"]] == [True]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_required_call_is_enforced(chat: openai.OpenAI, stream: bool) -> None:
    tool: Any = {"type": "function", "function": {"name": "order", "parameters": ORDER}}
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "tools": [tool],
        "tool_choice": "required",
        "logit_bias": {str(TO): 100},  # or it would think, for ever
        "max_tokens": 4000,  # white space is allowed, and a random model likes it
    }
    if stream:
        with chat.chat.completions.stream(**asked) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = chat.chat.completions.create(**asked).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "order")
    assert_is_order(call.function.arguments)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_typed_answer(chat: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": "Two small ones, please.",
        "reasoning": {"effort": "none"},
        "text": {"format": FORMAT},
        "max_output_tokens": 200,
    }
    if stream:
        with chat.responses.stream(**asked) as events:
            answer = events.get_final_response()
    else:
        answer = chat.responses.create(**asked)
    assert answer.status == "completed"
    assert_is_order(answer.output_text)
    assert chat.responses.retrieve(answer.id).output_text == answer.output_text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages_end_at_their_limit(messages: anthropic.Anthropic, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 24}
    if stream:
        with messages.messages.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = messages.messages.create(**asked)
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 24
    counted = messages.messages.count_tokens(model=MODEL, messages=QUESTION)
    prompt = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert prompt == counted.input_tokens


def test_reasoning_ends_where_its_budget_does(chat: openai.OpenAI) -> None:
    """A second request goes on behind the ids that were forced, held to what is left to say."""
    reasoned = []
    for seed in range(20):  # it thinks, or it does not: as it happens
        answer = chat.responses.create(
            model=MODEL,
            input="Think about it.",
            text={"format": FORMAT},
            max_output_tokens=400,
            extra_body={"thinking_token_budget": 12, "seed": seed},
        )
        assert_is_order(answer.output_text)
        details: Any = answer.usage and answer.usage.output_tokens_details
        reasoned.append(details.reasoning_tokens)
        if reasoned[-1] > 0:
            break
    assert 12 <= reasoned[-1] < 12 + 40


def test_the_same_prompt_is_cached_for_its_tenant_alone(chat: openai.OpenAI, url: str) -> None:
    long = f"Here is list {uuid4()}: " + ", ".join(f"item {number}" for number in range(400))

    def cached(client: openai.OpenAI) -> int:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": long}], max_tokens=2
        )
        details: Any = answer.usage and answer.usage.prompt_tokens_details
        return int(details.cached_tokens)

    other = openai.OpenAI(base_url=f"{url}/v1", api_key="key-other", max_retries=0, timeout=SECONDS)
    assert cached(chat) == 0
    assert cached(chat) > 500
    assert cached(other) == 0
    assert cached(other) > 500


def test_client_disconnect_frees_vllm(chat: openai.OpenAI, vllm: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 6000}
    with chat.chat.completions.create(**asked, stream=True) as chunks:
        for number, _ in enumerate(chunks):
            if number == 5:
                assert _running(vllm) == 1
                break
    until(lambda: _running(vllm) == 0, "vLLM to be free", SECONDS)


def _running(vllm: str) -> int:
    text = httpx.get(f"{vllm}/metrics", timeout=SECONDS).text
    found = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def test_refusal_of_vllm_is_a_request_error(chat: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert refused.value.body is not None
    with suppress(openai.BadRequestError):
        chat.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 9000}], max_tokens=5
        )
        raise AssertionError("a prompt that is too long was taken")
