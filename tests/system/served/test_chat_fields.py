"""Fields of requests on the real server: model names, freeform tools, seeds, pictures."""

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
    from server_process import Server

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


def test_aliases_work_in_every_api(server: Server, client: openai.OpenAI, create: Any) -> None:
    model_ids = {model.id for model in client.models.list()}
    assert {"claude-*", "gpt-4o"} <= model_ids
    assert client.models.retrieve("claude-opus-4").id == "claude-opus-4"
    chat = create(model="gpt-4o", messages=WHO)
    assert (chat.model, chat.choices[0].message.content) == ("gpt-4o", "A stand-in.")
    response = client.responses.create(model="gpt-4o", input="Who are you?")
    assert (response.model, response.output_text) == ("gpt-4o", "A stand-in.")
    anthropic_client = anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0)
    message: Any = anthropic_client.messages.create(
        model="claude-opus-4", max_tokens=50, messages=WHO
    )  # type: ignore[arg-type]
    assert (message.model, message.content[-1].text) == ("claude-opus-4", "A stand-in.")
    with pytest.raises(openai.NotFoundError):
        create(model="gpt-5", messages=WHO)


@pytest.mark.parametrize("stream", [False, True])
def test_freeform_tool_is_called(create: Any, stream: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Patch it."}]
    completion = create(model="gpt-4o", messages=messages, tools=[TOOL], stream=stream)
    if stream:
        parts = [call for chunk in completion for call in chunk.choices[0].delta.tool_calls or ()]
        custom = [part.model_extra["custom"] for part in parts if "custom" in part.model_extra]
        name, call_id = custom[0]["name"], parts[0].id
        patch = "".join(part.get("input") or "" for part in custom)
    else:
        (call,) = completion.choices[0].message.tool_calls
        name, call_id, patch = call.custom.name, call.id, call.custom.input
    assert (name, patch) == ("patch", "*** Begin Patch\n+é\n*** End Patch")
    call_item = {"id": call_id, "type": "custom", "custom": {"name": name, "input": patch}}
    messages += [
        {"role": "assistant", "tool_calls": [call_item]},
        {"role": "tool", "tool_call_id": call_id, "content": "done"},
    ]
    final = create(model="gpt-4o", messages=messages, tools=[TOOL])
    assert final.choices[0].message.content == "It is done."
    assert final.usage.prompt_tokens_details.cached_tokens > 0


def test_final_message_is_continued(create: Any) -> None:
    messages = [*WHO, {"role": "assistant", "content": "A stand"}]
    whole = create(model="gpt-4o", messages=messages)
    continued = create(
        model="gpt-4o", messages=messages, extra_body={"continue_final_message": True}
    )
    end_and_start = 3  # <|end|><|start|>assistant
    assert continued.usage.prompt_tokens == whole.usage.prompt_tokens - end_and_start


def test_picture_is_accepted_in_messages(create: Any) -> None:
    picture_message = {"role": "user", "content": [PIXEL, {"type": "text", "text": "What is it?"}]}
    create(model="gpt-4o", messages=[picture_message])
    completion = create(
        model="gpt-4o", messages=[picture_message, {"role": "assistant", "content": "?"}, *WHO]
    )
    assert completion.choices[0].message.content == "A stand-in."


def test_same_seed_gives_same_answer(create: Any) -> None:
    hot = {"model": "gpt-4o", "messages": WHO, "temperature": 2.0, "max_tokens": 20}
    bias = {"logit_bias": {str(token): 100 for token in range(1000, 1040)}}
    answers = [create(**hot, **bias, seed=seed).choices[0].message.content for seed in (7, 7, 8)]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


@pytest.mark.parametrize("stream", [False, True])
def test_frequency_penalty_counts_the_whole_output(create: Any, stream: bool) -> None:
    """The next scripted id leads the end of the message by 20, which ten penalties of 1.9 do not
    reach and eleven exceed."""
    request: dict[str, Any] = {"model": "gpt-4o", "temperature": 0, "stream": stream}
    request["messages"] = [{"role": "user", "content": "Sing."}]

    def sing(**penalty: float) -> str:
        completion = create(**request, **penalty)
        if stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in completion)
        return str(completion.choices[0].message.content)

    assert sing() == " la" * 30
    assert sing(frequency_penalty=1.9) == " la" * 11
    # A presence penalty applies once, however often the word occurs.
    assert sing(presence_penalty=1.9) == " la" * 30
    with pytest.raises(openai.BadRequestError) as raised:
        create(**request, frequency_penalty=2.1)
    assert raised.value.param == "frequency_penalty"
