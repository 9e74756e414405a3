"""Several answers to one prompt, and log probabilities, with real grammars and caches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from server_process import FLAG, HARMONY

if TYPE_CHECKING:
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = [pytest.mark.served, pytest.mark.nightly]  # in process the gate tests it, too

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
LONG = "A word, and another one. " * 120


@pytest.fixture(scope="module")
def server(start: Start, tiny_dir: Path) -> Server:
    env = {"VLLM_MLX_HARMONY_CACHE": "256M", "VLLM_MLX_HARMONY_GRAMMAR": "auto"}
    return start(*FLAG, model=tiny_dir, command=HARMONY, env=env, greedy=False)


def complete(client: openai.OpenAI, model: str, text: str, **fields: Any) -> Any:
    create: Any = client.chat.completions.create
    messages = [{"role": "user", "content": text}]
    return create(model=model, messages=messages, max_tokens=24, seed=7, **fields)


def parts_of(choice: Any) -> tuple[Any, ...]:
    message = choice.message
    reasoning = getattr(message, "reasoning", None)
    return reasoning, message.content, choice.finish_reason


def computed_tokens(server: Server) -> int:
    """The number of prompt tokens that were not cached."""
    with server.client() as client:
        counters = re.search(
            r'"harmony_prefix_reuse":(\{.*?\})', client.get("/v1/cache/stats").text
        )
    assert counters is not None
    return int(json.loads(counters[1])["tokens_new"])


def test_each_choice_equals_answer_with_its_seed(
    server: Server, client: openai.OpenAI, model: str
) -> None:
    before = computed_tokens(server)
    completion = complete(client, model, LONG, n=4)
    prompt, cached = (
        completion.usage.prompt_tokens,
        completion.usage.prompt_tokens_details.cached_tokens,
    )
    assert prompt > 600
    assert computed_tokens(server) - before <= prompt + 3 - cached  # the others compute its last id
    create: Any = client.chat.completions.create
    messages = [{"role": "user", "content": LONG}]
    single_completions = [
        create(model=model, messages=messages, max_tokens=24, seed=7 + offset)
        for offset in range(4)
    ]
    assert [parts_of(choice) for choice in completion.choices] == [
        parts_of(single.choices[0]) for single in single_completions
    ]
    assert completion.usage.completion_tokens == sum(
        single.usage.completion_tokens for single in single_completions
    )


def test_streamed_choices_equal_whole_ones(client: openai.OpenAI, model: str) -> None:
    whole = complete(client, model, "Hello!", n=3)
    state = ChatCompletionStreamState()
    for chunk in complete(client, model, "Hello!", n=3, stream=True):
        state.handle_chunk(chunk)
    streamed = state.current_completion_snapshot
    choices = sorted(streamed.choices, key=lambda choice: choice.index)
    assert [parts_of(choice) for choice in choices] == [
        parts_of(choice) for choice in whole.choices
    ]


def test_every_choice_conforms_to_the_grammar(client: openai.OpenAI, model: str) -> None:
    function = {"name": "pick", "parameters": CITY, "strict": True}
    tools = [{"type": "function", "function": function}]
    completion = complete(
        client,
        model,
        "Pick a city.",
        n=8,
        tools=tools,
        tool_choice="required",
        reasoning_effort="none",
        extra_body={"max_tokens": 400},
    )
    calls = [call for choice in completion.choices for call in choice.message.tool_calls]
    assert len(calls) == len({call.id for call in calls}) >= 8
    arguments = [json.loads(call.function.arguments)["city"] for call in calls]
    assert {*arguments} <= {"Rome", "Oslo", "Lima"}
    assert len({*arguments}) > 1


FORMAT = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_has_log_probabilities(
    client: openai.OpenAI, model: str, stream: bool
) -> None:
    fields = {"n": 2, "logprobs": True, "top_logprobs": 5, "response_format": FORMAT}
    budget = {"max_tokens": 200, "reasoning_effort": "none"}
    completion = complete(client, model, "A city.", stream=stream, extra_body=budget, **fields)
    if stream:
        state = ChatCompletionStreamState()
        for chunk in completion:
            state.handle_chunk(chunk)
        completion = state.current_completion_snapshot
    assert len(completion.choices) == 2
    for choice in completion.choices:
        assert json.loads(choice.message.content)["city"] in ("Rome", "Oslo", "Lima")
        content = choice.logprobs.content
        text_format = b"".join(bytes(logprob.bytes) for logprob in content)
        assert text_format.decode() == choice.message.content
        for token in content:
            likeliest = [top.logprob for top in token.top_logprobs]
            assert likeliest == sorted(likeliest, reverse=True)
            assert len(likeliest) == 5
            assert token.logprob <= likeliest[0] <= 0


def test_response_has_log_probabilities(client: openai.OpenAI, model: str) -> None:
    text_format: Any = {"format": {"type": "json_schema", **FORMAT["json_schema"]}}
    response = client.responses.create(
        model=model,
        input="A city.",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        text=text_format,
        reasoning={"effort": "none"},
        max_output_tokens=200,
    )
    (part,) = (item.content[0] for item in response.output if item.type == "message")
    assert part.type == "output_text"
    text = b"".join(bytes(token.bytes) for token in part.logprobs or ())
    assert text.decode() == part.text == response.output_text
    assert {len(token.top_logprobs) for token in part.logprobs or ()} == {2}
