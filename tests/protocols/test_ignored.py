"""README's table of what is accepted and ignored, against the code and the official clients."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Defaults, Turn
from vllm_mlx_harmony.protocols import anthropic, chat, responses
from vllm_mlx_harmony.protocols.anthropic.body import MessagesBody
from vllm_mlx_harmony.protocols.body import Wire
from vllm_mlx_harmony.protocols.chat.body import ChatBody
from vllm_mlx_harmony.protocols.responses.body import ResponsesBody

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = README.partition("## Accepted and ignored")[2].partition("\n## ")[0]

HELLO = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
ANY = ("x", 1, True, 0.5, {"a": "b"}, ["a"], None)
"""Values of a field whose type is not looked at."""


class NoSeal:
    def seal(self, text: str) -> str:
        return text

    def unseal(self, sealed: str) -> str | None:
        return None


@dataclass(frozen=True)
class Api:
    read: Callable[[Any], Turn]
    body: dict[str, Any]
    model: type[Wire]
    params: str
    """Where the official client has the fields of a request."""
    typed: dict[str, tuple[Any, ...]]
    """Values of fields that are given back, or noted, and have to be of a type for that."""


APIS = {
    "Chat": Api(
        lambda body: chat.read(body, Defaults()).turn,
        {"model": "m", "messages": [HELLO]},
        ChatBody,
        "openai.types.chat.completion_create_params:CompletionCreateParamsStreaming",
        {},
    ),
    "Responses": Api(
        lambda body: responses.read(body, Defaults(), NoSeal()).turn,
        {
            "model": "m",
            "input": "Hello",
            "text": {},
            "reasoning": {},
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        },
        ResponsesBody,
        "openai.types.responses.response_create_params:ResponseCreateParamsStreaming",
        {
            "include": (["web_search_call.action.sources", "file_search_call.results"], []),
            "max_tool_calls": (1, 7),
            "metadata": ({"a": "b"}, {}),
            "prompt_cache_key": ("k",),
            "safety_identifier": ("s",),
            "service_tier": ("auto", "flex"),
            "text.verbosity": ("low", "high"),
            "truncation": ("auto", "disabled"),
            "user": ("u",),
        },
    ),
    "Messages": Api(
        lambda body: anthropic.read(body, Defaults(), NoSeal()).turn,
        {
            "model": "m",
            "max_tokens": 9,
            "messages": [HELLO],
            "output_config": {},
            "thinking": {"type": "adaptive"},
            "tools": [{"name": "f", "input_schema": SCHEMA}],
        },
        MessagesBody,
        "anthropic.types.beta.message_create_params:MessageCreateParamsStreaming",
        {},
    ),
}


def ignored(api: str) -> list[str]:
    """The fields in the table, as paths."""
    rows = [line.split("|") for line in SECTION.splitlines() if line.startswith(f"| {api} |")]
    return [field for row in rows for field in re.findall(r"`([^`]+)`", row[2])]


def cases() -> Iterator[Any]:
    for name, api in APIS.items():
        for field in ignored(name):
            yield pytest.param(name, field, api.typed.get(field, ANY), id=f"{name} {field}")


def put(body: Any, path: str, value: object) -> None:
    """Sets the field at ``path``: ``a.b`` of an object in it, ``a[].b`` of the first of a list."""
    *above, last = path.split(".")
    for step in above:
        body = body[step[:-2]][0] if step.endswith("[]") else body.setdefault(step, {})
    body[last] = value


@pytest.mark.parametrize("name", APIS)
def test_a_field_stands_once(name: str) -> None:
    assert len(ignored(name)) == len(set(ignored(name))) > 10


@pytest.mark.parametrize(("name", "field", "values"), [*cases()])
def test_what_is_in_the_table_changes_nothing(
    name: str, field: str, values: tuple[Any, ...]
) -> None:
    api = APIS[name]
    for value in values:
        body = deepcopy(api.body)
        put(body, field, value)
        assert api.read(body) == api.read(api.body), value


@pytest.mark.parametrize("name", APIS)
def test_every_field_of_the_official_client_is_read_or_in_the_table(name: str) -> None:
    module, _, params = APIS[name].params.partition(":")
    pytest.importorskip(module.partition(".")[0])
    known = set(get_type_hints(getattr(import_module(module), params)))
    listed = {field.partition(".")[0] for field in ignored(name)}
    assert known - set(APIS[name].model.model_fields) - listed - HEADERS == set()


HEADERS = {"betas"}
"""What a client sends as a header."""

OF_CHAT: dict[str, Any] = {
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "guided_choice": ["a"],
    "guided_grammar": "root ::= a",
    "guided_json": SCHEMA,
    "guided_json_object": True,
    "guided_regex": "a",
    "ignore_eos": True,
    "logit_bias": {"1": 1},
    "logprobs": True,
    "max_completion_tokens": 5,
    "max_tokens": 5,
    "messages": [HELLO],
    "n": 2,
    "response_format": {"type": "json_object"},
    "stop": ["a"],
    "stop_token_ids": [1],
    "structured_outputs": {"regex": "a"},
}


@pytest.mark.parametrize("field", OF_CHAT)
def test_responses_refuses_what_means_something_in_chat_only(field: str) -> None:
    api = APIS["Responses"]
    with pytest.raises(RequestError) as caught:
        api.read({**api.body, field: OF_CHAT[field]})
    assert (caught.value.param, caught.value.status) == (field, 400)
    assert api.read({**api.body, field: None}) == api.read(api.body)
