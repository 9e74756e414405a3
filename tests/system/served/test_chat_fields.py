"""What clients send beside messages, on the real server: names, freeform tools, seeds, pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

PATCH = '{"input":"*** Begin Patch\\n+é\\n*** End Patch"}'
SCRIPTS = [
    Script("Patch it.", f"<|channel|>commentary to=functions.patch<|message|>{PATCH}<|call|>"),
    Script("done", "<|channel|>final<|message|>It is done.<|return|>"),
    Script("Who are you?", "<|channel|>final<|message|>A stand-in.<|return|>"),
    Script("Sing.", f"<|channel|>final<|message|>{' la' * 30}<|return|>"),
]
WHO = [{"role": "user", "content": "Who are you?"}]
TOOL = {"type": "custom", "custom": {"name": "patch", "description": "Edits files."}}
PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.fixture(scope="module")
def server(enforcing_server: Server, standin_dir: Path) -> Server:
    standin.rescript(standin_dir, SCRIPTS)
    return enforcing_server


@pytest.fixture(scope="module")
def create(client: openai.OpenAI) -> Any:
    return client.chat.completions.create


def test_other_names_in_every_api(server: Server, client: openai.OpenAI, create: Any) -> None:
    listed = {model.id for model in client.models.list()}
    assert {"claude-*", "gpt-4o"} <= listed
    assert client.models.retrieve("claude-opus-4").id == "claude-opus-4"
    chat = create(model="gpt-4o", messages=WHO)
    assert (chat.model, chat.choices[0].message.content) == ("gpt-4o", "A stand-in.")
    response = client.responses.create(model="gpt-4o", input="Who are you?")
    assert (response.model, response.output_text) == ("gpt-4o", "A stand-in.")
    asking = anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0)
    message: Any = asking.messages.create(model="claude-opus-4", max_tokens=50, messages=WHO)  # type: ignore[arg-type]
    assert (message.model, message.content[-1].text) == ("claude-opus-4", "A stand-in.")
    with pytest.raises(openai.NotFoundError):
        create(model="gpt-5", messages=WHO)


@pytest.mark.parametrize("stream", [False, True])
def test_a_freeform_tool(create: Any, stream: bool) -> None:
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Patch it."}]
    answer = create(model="gpt-4o", messages=asked, tools=[TOOL], stream=stream)
    if stream:
        parts = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
        custom = [part.model_extra["custom"] for part in parts if "custom" in part.model_extra]
        name, key = custom[0]["name"], parts[0].id
        given = "".join(each.get("input") or "" for each in custom)
    else:
        (call,) = answer.choices[0].message.tool_calls
        name, key, given = call.custom.name, call.id, call.custom.input
    assert (name, given) == ("patch", "*** Begin Patch\n+é\n*** End Patch")
    called = {"id": key, "type": "custom", "custom": {"name": name, "input": given}}
    asked += [
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": key, "content": "done"},
    ]
    after = create(model="gpt-4o", messages=asked, tools=[TOOL])
    assert after.choices[0].message.content == "It is done."
    assert after.usage.prompt_tokens_details.cached_tokens > 0


def test_final_message_is_continued(create: Any) -> None:
    begun = [*WHO, {"role": "assistant", "content": "A stand"}]
    whole = create(model="gpt-4o", messages=begun)
    more = create(model="gpt-4o", messages=begun, extra_body={"continue_final_message": True})
    end_and_start = 3  # <|end|><|start|>assistant
    assert more.usage.prompt_tokens == whole.usage.prompt_tokens - end_and_start


def test_a_picture_is_a_line(create: Any) -> None:
    shown = {"role": "user", "content": [PIXEL, {"type": "text", "text": "What is it?"}]}
    create(model="gpt-4o", messages=[shown])
    later = create(model="gpt-4o", messages=[shown, {"role": "assistant", "content": "?"}, *WHO])
    assert later.choices[0].message.content == "A stand-in."


def test_a_seed_draws_the_same_again(create: Any) -> None:
    hot = {"model": "gpt-4o", "messages": WHO, "temperature": 2.0, "max_tokens": 20}
    bias = {"logit_bias": {str(token): 100 for token in range(1000, 1040)}}
    drawn = [create(**hot, **bias, seed=seed).choices[0].message.content for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


@pytest.mark.parametrize("stream", [False, True])
def test_frequency_penalty_counts_the_whole_output(create: Any, stream: bool) -> None:
    """The next scripted id leads the end of a message by 20: ten penalties of 1.9 leave it ahead,
    the eleventh does not."""
    sing: dict[str, Any] = {"model": "gpt-4o", "temperature": 0, "stream": stream}
    sing["messages"] = [{"role": "user", "content": "Sing."}]

    def sung(**penalty: float) -> str:
        answer = create(**sing, **penalty)
        if stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        return str(answer.choices[0].message.content)

    assert sung() == " la" * 30
    assert sung(frequency_penalty=1.9) == " la" * 11
    # A presence penalty is taken once, however often a word stands there.
    assert sung(presence_penalty=1.9) == " la" * 30
    with pytest.raises(openai.BadRequestError) as refused:
        create(**sing, frequency_penalty=2.1)
    assert refused.value.param == "frequency_penalty"
