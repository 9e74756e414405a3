"""docs/api.md compared with the code and the official clients: every parameter and its effect.

A row of a table of parameters says one of three things, and each is tried on a valid body with the
field in it: an ``honoured`` field changes the request, an ``ignored`` one does not change the turn,
and a ``refused`` one is a 400 that names the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from ciphers import Tagged

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Defaults, Namespace, Tool
from vllm_mlx_harmony.protocols import chat, messages, ollama, responses
from vllm_mlx_harmony.protocols.chat.schema import UNSUPPORTED_FIELDS as CHAT_UNSUPPORTED
from vllm_mlx_harmony.protocols.chat.schema import ChatBody
from vllm_mlx_harmony.protocols.messages.schema import MessagesBody
from vllm_mlx_harmony.protocols.ollama.schema import UNSUPPORTED_FIELDS as OLLAMA_UNSUPPORTED
from vllm_mlx_harmony.protocols.ollama.schema import ChatBody as OllamaChatBody
from vllm_mlx_harmony.protocols.ollama.schema import GenerateBody
from vllm_mlx_harmony.protocols.responses.schema import UNSUPPORTED_FIELDS as RESPONSES_UNSUPPORTED
from vllm_mlx_harmony.protocols.responses.schema import ResponsesBody
from vllm_mlx_harmony.protocols.validation import RequestModel

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "api.md").read_text("utf-8")
STATES = ("honoured", "ignored", "refused")

SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
USER = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
ANSWER = {"role": "assistant", "content": "Hello"}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
TEXT = {"type": "text"}
INVALID, UNSUPPORTED = "invalid_value", "unsupported_value"
ANY = ("x", 1, True, 0.5, {"a": "b"}, ["a"], None)
"""Values of a field whose type is not checked."""


SEAL = Tagged()


@dataclass(frozen=True)
class Api:
    read: Callable[[Any], Any]
    body: dict[str, Any]
    model: type[RequestModel]
    clients: tuple[str, ...]
    """Where the official client has the fields of a request."""
    honoured: Mapping[str, Any]
    """A value of each honoured field that makes a difference."""
    refused: Mapping[str, Any]
    """A value of each refused field that is refused."""
    typed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Valid values of ignored fields that have a type, because they are echoed or noted."""
    accepted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of refused fields that are accepted, because they ask for the default."""


DRAWN: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.5,
    "seed": 1,
}
TEMPLATE: dict[str, Any] = {
    "chat_template_kwargs.reasoning_effort": "high",
    "chat_template_kwargs.model_identity": "You are a pirate.",
    "chat_template_kwargs.builtin_tools": ["python"],
}
GRAMMAR = {"syntax": "regex", "definition": "[0-9]+"}


class OllamaBody(OllamaChatBody, GenerateBody):
    """The fields of both kinds of requests: chat and generate."""


OF_GENERATE = {*GenerateBody.model_fields} | {field for field, *_ in OLLAMA_UNSUPPORTED}
OF_GENERATE -= {*OllamaChatBody.model_fields}


def read_ollama(body: Any) -> Any:
    """A chat request, or a generate request if a field belongs only to that."""
    if not OF_GENERATE & {*body}:
        return ollama.read_chat(body, Defaults())
    return ollama.read_generate({"prompt": "Hello", **body}, Defaults())


BROWSING = Defaults(namespaces=(Namespace("browser", (Tool("search"),)),))
"""The defaults of a server that searches the web."""

APIS = {
    "Chat Completions": Api(
        lambda body: chat.read(body, BROWSING),
        {
            "model": "m",
            "messages": [USER, ANSWER],
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
                {"type": "custom", "custom": {"name": "g"}},
            ],
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        },
        ChatBody,
        ("openai.types.chat.completion_create_params:CompletionCreateParamsStreaming",),
        {
            **DRAWN,
            **TEMPLATE,
            "model": "other",
            "messages": [USER, USER],
            "stream": True,
            "stream_options.include_usage": True,
            "return_progress": True,
            "max_completion_tokens": 5,
            "max_tokens": 5,
            "min_tokens": 5,
            "ignore_eos": True,
            "stop": "a",
            "timeout": 5,
            "prediction": {"type": "content", "content": "x"},
            "logit_bias": {"1": 1},
            "tools": [],
            "tools[].function.strict": True,
            "tools[1].custom.format": {"type": "grammar", "grammar": GRAMMAR},
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "response_format": TEXT,
            "response_format.json_schema": {**SCHEMA, "title": "other"},
            "response_format.json_schema.strict": True,
            "structured_outputs": {"regex": "a"},
            "guided_json": SCHEMA,
            "guided_json_object": True,
            "guided_regex": "a",
            "guided_choice": ["a"],
            "guided_grammar": "start: /a/",
            "json_schema": SCHEMA,
            "regex": "a",
            "grammar": "start: /a/",
            "reasoning_effort": "high",
            "reasoning.effort": "high",
            "reasoning.max_tokens": 5,
            "reasoning.enabled": False,
            "reasoning.exclude": True,
            "include_reasoning": False,
            "thinking_token_budget": 5,
            "thinking_budget_tokens": 5,
            "thinking_budget": 5,
            "thinking.budget_tokens": 5,
            "thinking.type": "disabled",
            "enable_thinking": False,
            "chat_template_kwargs.enable_thinking": False,
            "continue_final_message": True,
            "add_generation_prompt": False,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "web_search_options": {},
        },
        {
            "ebnf": 'root ::= "a"',
            "structured_outputs.structural_tag": "x",
            "structured_outputs.disable_additional_properties": True,
            "prompt_logprobs": 0,
            "logprob_token_ids": [1],
            "modalities": ["text", "audio"],
            "audio": {"voice": "a"},
            "functions": [{"name": "f"}],
            "function_call": "auto",
            "moderation": {},
            "echo": True,
            "use_beam_search": True,
            "stop_token_ids": [1],
            "include_stop_str_in_output": True,
            "truncate_prompt_tokens": 5,
            "allowed_token_ids": [1],
            "bad_words": ["a"],
            "repetition_detection": {},
            "chat_template": "x",
            "documents": [{}],
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "return_prompt_text": True,
        },
        accepted={
            "structured_outputs.disable_additional_properties": (False,),
            "modalities": (["text"],),
            "functions": ([],),
            "echo": (False,),
            "use_beam_search": (False,),
            "stop_token_ids": ([],),
            "include_stop_str_in_output": (False,),
            "allowed_token_ids": ([],),
            "bad_words": ([],),
            "documents": ([],),
            "return_token_ids": (False,),
            "return_tokens_as_token_ids": (False,),
            "return_prompt_text": (False,),
        },
    ),
    "Responses": Api(
        lambda body: responses.read(body, Defaults(), SEAL),
        {
            "model": "m",
            "input": "Hello",
            "text": {},
            "reasoning": {},
            "tools": [
                {"type": "function", "name": "f", "parameters": SCHEMA},
                {"type": "custom", "name": "g"},
                {"type": "tool_search", "execution": "client"},
            ],
        },
        ResponsesBody,
        (
            "openai.types.responses.response_create_params:ResponseCreateParamsStreaming",
            "openai.types.responses.input_token_count_params:InputTokenCountParams",
            "openai.types.responses.response_compact_params:ResponseCompactParams",
        ),
        {
            **DRAWN,
            **TEMPLATE,
            "model": "other",
            "input": "Bye",
            "instructions": "Be short.",
            "previous_response_id": "resp_1",
            "conversation": "conv_1",
            "stream": True,
            "store": False,
            "background": True,
            "include": ["reasoning.encrypted_content"],
            "max_output_tokens": 5,
            "top_logprobs": 2,
            "min_tokens": 5,
            "ignore_eos": True,
            "thinking_token_budget": 5,
            "timeout": 5,
            "tools": [],
            "tools[].strict": True,
            "tools[1].format": {"type": "grammar", **GRAMMAR},
            "tools[].defer_loading": True,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "text.format": {"type": "json_object"},
            "reasoning.effort": "high",
            "reasoning.summary": "auto",
            "reasoning.generate_summary": "auto",
            "reasoning_effort": "high",
        },
        {
            "prompt_cache_options.prewarm": True,
            "prompt": {"id": "p"},
            "moderation": {},
            "logprobs": True,
            "structured_outputs": {"regex": "a"},
            "guided_json": SCHEMA,
            "guided_json_object": True,
            "guided_regex": "a",
            "guided_choice": ["a"],
            "guided_grammar": "start: /a/",
            "json_schema": SCHEMA,
            "regex": "a",
            "grammar": "start: /a/",
            "ebnf": 'root ::= "a"',
            "response_format": {"type": "json_object"},
            "max_tokens": 5,
            "max_completion_tokens": 5,
            "messages": [USER],
            "n": 2,
            "stop": ["a"],
            "logit_bias": {"1": 1},
            "stop_token_ids": [1],
            "allowed_token_ids": [1],
            "bad_words": ["a"],
        },
        typed={
            "max_tool_calls": (1, 7),
            "metadata": ({"a": "b"}, {}),
            "prompt_cache_key": ("k",),
            "safety_identifier": ("s",),
            "service_tier": ("auto", "flex"),
            "text.verbosity": ("low", "high"),
            "truncation": ("auto", "disabled"),
            "user": ("u",),
        },
        accepted={
            "prompt_cache_options.prewarm": (False,),
            "logprobs": (False,),
            "guided_json_object": (False,),
            "json_schema": ({},),
            "regex": ("",),
            "grammar": ("",),
            "ebnf": ("",),
            "n": (1,),
        },
    ),
    "Messages": Api(
        lambda body: messages.read(body, Defaults(), SEAL),
        {
            "model": "m",
            "max_tokens": 9,
            "messages": [USER],
            "output_config": {},
            "thinking": {"type": "enabled"},
            "tools": [{"name": "f", "input_schema": SCHEMA}],
        },
        MessagesBody,
        (
            "anthropic.types.beta.message_create_params:MessageCreateParamsStreaming",
            "anthropic.types.beta.message_count_tokens_params:MessageCountTokensParams",
            "anthropic.types.message_create_params:MessageCreateParamsStreaming",
        ),
        {
            "model": "other",
            "messages": [USER, USER],
            "system": "Be short.",
            "max_tokens": 5,
            "stream": True,
            "stop_sequences": ["a"],
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 5,
            "tools": [],
            "tools[].strict": True,
            "tools[].defer_loading": True,
            "tool_choice": {"type": "any"},
            "tool_choice.disable_parallel_tool_use": True,
            "thinking.type": "disabled",
            "thinking.budget_tokens": 5,
            "thinking.display": "omitted",
            "output_config.effort": "high",
            "output_config.format": FORMAT,
            "output_format": FORMAT,
            "mcp_servers": [{"type": "url", "name": "x", "url": "https://x"}],
        },
        {"thread": {}, "compaction": {}},
    ),
    "Ollama": Api(
        read_ollama,
        {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "options": {}},
        OllamaBody,
        ("ollama._types:ChatRequest", "ollama._types:GenerateRequest"),
        {
            "model": "other",
            "messages": [{"role": "user", "content": "Bye"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "prompt": "Bye",
            "system": "Be short.",
            "images": ["AAAA"],
            "stream": False,
            "format": "json",
            "think": "high",
            "logprobs": True,
            "top_logprobs": 2,
            "timeout": 5,
            "options.num_predict": 5,
            "options.stop": ["a"],
            **{f"options.{name}": value for name, value in DRAWN.items() if "repe" not in name},
            "options.repeat_penalty": 1.5,
        },
        {
            "suffix": "x",
            "template": "x",
            "raw": True,
            "context": [1],
            "width": 1,
            "height": 1,
            "steps": 1,
            "options.mirostat": 1,
            "options.tfs_z": 0.5,
            "options.typical_p": 0.5,
        },
        accepted={
            "suffix": ("",),
            "template": ("",),
            "raw": (False,),
            "context": ([],),
            "width": (0,),
            "height": (0,),
            "steps": (0,),
            "options.mirostat": (0,),
            "options.tfs_z": (1,),
            "options.typical_p": (1.0,),
        },
    ),
}


def table(heading: str) -> list[tuple[str, ...]]:
    """The rows below a heading, without their backquotes; the first two are the table's head."""
    section = PAGE.partition(f"# {heading}\n")[2].partition("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert lines, heading
    cells = (re.split(r"(?<!\\)\|", line)[1:-1] for line in lines[2:] if line != lines[1])
    return [tuple(cell.strip() for cell in row) for row in cells]


def parameters(heading: str) -> dict[str, str]:
    """The state of every parameter in a table, whose rows may have several. Each is there once."""
    rows = [
        (name, state)
        for cell, state, _ in table(heading)
        for name in re.findall(r"`([^`]+)`", cell)
    ]
    names = [name for name, _ in rows]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert {state for _, state in rows} <= {*STATES}
    return dict(rows)


PARAMETERS = {name: parameters(f"Parameters of {name}") for name in APIS}


def rows_of_state(state: str) -> Iterator[tuple[str, str]]:
    for name, states in PARAMETERS.items():
        yield from ((name, row) for row, row_state in states.items() if row_state == state)


def put(body: Any, path: str, value: object) -> None:
    """Set the field at ``path``: ``a.b`` in an object, ``a[].b`` in the first item of a list."""
    *above, last = path.split(".")
    for step in above:
        name, _, index = step.partition("[")
        inner = body.setdefault(name, {}) if not index else body[name][int(index[:-1] or 0)]
        if not index and step == "tool_choice":
            inner.setdefault("type", "auto")
        body = inner
    body[last] = value


def body_for(api: Api, path: str) -> dict[str, Any]:
    """A body of the API that can have ``path``."""
    body = deepcopy(api.body)
    if path.startswith(("guided_", "structured_outputs", "json_schema", "regex", "grammar")):
        body.pop("response_format", None)  # there can be one format only
    if path == "top_logprobs" and api.model in (ChatBody, OllamaBody):
        body["logprobs"] = True
    return body


def body_with(api: Api, path: str, value: object) -> dict[str, Any]:
    """The same body with ``value`` at ``path``."""
    body = body_for(api, path)
    put(body, path, value)
    return body


def values(fields: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """By the row's name: the path to set, which may contain an index, and its value."""
    return {re.sub(r"\[\d+\]", "[]", path): (path, value) for path, value in fields.items()}


@pytest.mark.parametrize("name", APIS)
def test_every_parameter_of_official_clients_has_row(name: str) -> None:
    listed = {re.split(r"[.\[]", parameter)[0] for parameter in PARAMETERS[name]}
    for client in APIS[name].clients:
        module, _, params = client.partition(":")
        pytest.importorskip(module.partition(".")[0])
        model = getattr(import_module(module), params)
        fields = set(getattr(model, "model_fields", ()) or get_type_hints(model))
        assert fields - listed == set(), client


@pytest.mark.parametrize("name", APIS)
def test_every_field_has_row(name: str) -> None:
    listed = {re.split(r"[.\[]", parameter)[0] for parameter in PARAMETERS[name]}
    assert set(APIS[name].model.model_fields) - listed == set()
    assert {field for field, *_ in UNSUPPORTED_FIELDS.get(name, ())} - listed == set()


UNSUPPORTED_FIELDS = {
    "Chat Completions": CHAT_UNSUPPORTED,
    "Responses": RESPONSES_UNSUPPORTED,
    "Ollama": OLLAMA_UNSUPPORTED,
}


@pytest.mark.parametrize("name", APIS)
def test_every_row_has_example(name: str) -> None:
    examples = {"honoured": APIS[name].honoured, "refused": APIS[name].refused}
    for state, fields in examples.items():
        rows = {row for row, row_state in PARAMETERS[name].items() if row_state == state}
        assert rows == set(values(fields)), state


@pytest.mark.parametrize(("name", "row"), [*rows_of_state("honoured")])
def test_honoured_parameters_change_the_request(name: str, row: str) -> None:
    api = APIS[name]
    path, value = values(api.honoured)[row]
    before, request = api.read(body_for(api, path)), api.read(body_with(api, path, value))
    if row in OUTSIDE_REQUEST:
        assert request.turn == before.turn
        return
    if row in DELIVERY:
        assert without_repeated(request) != without_repeated(before)
    else:
        assert request.turn != before.turn


def without_repeated(request: Any) -> Any:
    """The request without the fields that the response only repeats."""
    if isinstance(request, responses.ResponsesRequest):
        return replace(request, _repeated={}, _repeated_json="")
    return request


OUTSIDE_REQUEST = frozenset({"timeout"})
"""Parameters that the server reads before the request, which are no part of the turn: see
`tests/unit/server/test_http.py`."""

DELIVERY = frozenset(
    {
        "background",
        "conversation",
        "include",
        "include_reasoning",
        "model",
        "previous_response_id",
        "return_progress",
        "reasoning.exclude",
        "reasoning.generate_summary",
        "reasoning.summary",
        "store",
        "stream",
        "stream_options.include_usage",
        "thinking.display",
    }
)
"""Parameters of where a request goes, or how its answer is sent or kept: no part of the turn."""


@pytest.mark.parametrize(("name", "row"), [*rows_of_state("ignored")])
def test_ignored_parameters_change_nothing(name: str, row: str) -> None:
    api = APIS[name]
    before = api.read(body_for(api, row))
    for value in api.typed.get(row, ANY):
        assert api.read(body_with(api, row, value)).turn == before.turn, value


@pytest.mark.parametrize(("name", "row"), [*rows_of_state("refused")])
def test_refused_parameters_are_named(name: str, row: str) -> None:
    api = APIS[name]
    with pytest.raises(RequestError) as caught:
        api.read(body_with(api, row, api.refused[row]))
    assert caught.value.status == 400
    assert caught.value.code in (UNSUPPORTED, "thread_unsupported_request")
    assert caught.value.param
    assert row.startswith(caught.value.param)
    before = api.read(body_for(api, row))
    for value in (None, *api.accepted.get(row, ())):
        assert api.read(body_with(api, row, value)).turn == before.turn, value


CLAIMS: tuple[tuple[str, str, object, str | None], ...] = (
    ("Chat Completions", "tool_choice", "auto", None),
    ("Chat Completions", "tool_choice", {"type": "function", "function": {"name": "h"}}, INVALID),
    ("Chat Completions", "tools", [{"type": "web_search"}], INVALID),
    ("Chat Completions", "response_format", {"type": "grammar"}, INVALID),
    ("Chat Completions", "guided_grammar", "root ::= a", UNSUPPORTED),
    ("Chat Completions", "grammar", "root ::= a", UNSUPPORTED),
    ("Chat Completions", "guided_json", SCHEMA, INVALID),  # two formats
    ("Chat Completions", "n", 1, None),
    ("Chat Completions", "n", 0, INVALID),
    ("Chat Completions", "n", 9, INVALID),
    ("Chat Completions", "thinking_token_budget", -2, INVALID),
    ("Chat Completions", "max_completion_tokens", 0, INVALID),
    ("Chat Completions", "logit_bias", {"201088": 1}, INVALID),
    ("Chat Completions", "logit_bias", {"1": 101}, INVALID),
    ("Chat Completions", "stop", ["a"] * 65, INVALID),
    ("Chat Completions", "stop", "a" * 513, INVALID),
    ("Responses", "include", ["web_search_call.action.sources", "file_search_call.results"], None),
    ("Responses", "top_logprobs", 21, INVALID),
    ("Chat Completions", "top_logprobs", 21, INVALID),
    ("Responses", "tool_choice", {"type": "web_search"}, UNSUPPORTED),
    ("Responses", "thinking_token_budget", -2, INVALID),
    ("Responses", "max_output_tokens", 0, INVALID),
    ("Responses", "max_tool_calls", 0, INVALID),
    ("Responses", "metadata", {str(key): "" for key in range(17)}, INVALID),
    ("Responses", "metadata", {"k" * 65: ""}, INVALID),
    ("Responses", "metadata", {"k": "v" * 513}, INVALID),
    ("Responses", "truncation", "middle", INVALID),
    ("Responses", "text.verbosity", "loud", INVALID),
    ("Responses", "user", 1, "invalid_type"),
    ("Messages", "max_tokens", None, "missing_required_parameter"),
    ("Messages", "max_tokens", -1, INVALID),
    ("Messages", "stop_sequences", ["a"] * 65, INVALID),
    ("Messages", "thinking.budget_tokens", 0, INVALID),
    *(
        (name, path, value, INVALID)
        for name in ("Chat Completions", "Responses")
        for path, value in (
            ("temperature", 2.1),
            ("top_p", 1.1),
            ("top_k", -2),
            ("min_p", 1.1),
            ("presence_penalty", 2.1),
            ("frequency_penalty", -2.1),
            ("repetition_penalty", 0),
            ("seed", 2**63),
            ("timeout", 0),
            ("min_tokens", -1),
        )
    ),
    ("Ollama", "format", "yaml", INVALID),
    ("Ollama", "format", "", None),
    ("Ollama", "stream", True, None),
    ("Ollama", "options.num_predict", -1, None),
    ("Ollama", "options.num_predict", -2, None),
    ("Ollama", "options.num_predict", 0, INVALID),
    ("Ollama", "options.seed", -1, None),
    ("Ollama", "options.stop", ["a"] * 65, INVALID),
    ("Ollama", "options.temperature", 2.1, INVALID),
    ("Ollama", "top_logprobs", 21, INVALID),
    ("Ollama", "top_logprobs", 2, INVALID),  # without logprobs
    *(("Messages", path, value, INVALID) for path, value in (("temperature", 2.1), ("top_k", -2))),
)
"""Claims of the rows: a field, a value, and the code with which it is refused, or none."""


@pytest.mark.parametrize(("name", "path", "value", "code"), CLAIMS)
def test_claims_about_values_hold(name: str, path: str, value: object, code: str | None) -> None:
    api = APIS[name]
    body = deepcopy(api.body)
    put(body, path, value)
    if code is None:
        assert api.read(body).turn == api.read(api.body).turn
        return
    with pytest.raises(RequestError) as caught:
        api.read(body)
    assert (caught.value.status, caught.value.code) == (400, code)
    assert str(caught.value.param).startswith(path)


def test_every_query_parameter_of_official_client_has_row() -> None:
    pytest.importorskip("openai")
    listed = parameters("Other endpoints of Responses")
    for path, module, params in (
        ("GET {response_id}", "response_retrieve_params", "ResponseRetrieveParamsStreaming"),
        ("GET input_items", "input_item_list_params", "InputItemListParams"),
    ):
        model = getattr(import_module(f"openai.types.responses.{module}"), params)
        assert {parameter for parameter in listed if parameter.startswith(path)} == {
            f"{path}?{name}" for name in get_type_hints(model)
        }


def test_every_code_has_row() -> None:
    package = REPOSITORY / "vllm_mlx_harmony"
    sources = [
        *(package / "protocols").rglob("*.py"),
        *(package / "server").rglob("*.py"),
        *(package / "engine").rglob("*.py"),
        *(package / "gateway").rglob("*.py"),
        package / "core" / "errors.py",
    ]
    code = "".join(path.read_text("utf-8") for path in sources)
    listed = [row[0].strip("`") for row in table("Errors") if len(row) == 3 and row[1].isdigit()]
    assert len(listed) == len(set(listed))
    assert [name for name in listed if f'"{name}"' not in code] == []
    raised = set(re.findall(r'\bcode\s*=\s*(?:\([^"]*)?"(\w+)"', code))
    assert raised - {*listed} == IN_A_RESPONSE


IN_A_RESPONSE = {"invalid_prompt"}
"""Codes of ``response.error``, which have a list of their own."""


def test_every_variable_is_a_documented_setting() -> None:
    settings = (REPOSITORY / "docs" / "configuration.md").read_text("utf-8")
    variables = set(re.findall(r"VLLM_MLX_HARMONY_[A-Z_]+", PAGE))
    assert {variable for variable in variables if f"| `{variable}` |" not in settings} == set()


def test_links_have_targets() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", PAGE):
        path, _, anchor = link.partition("#")
        text = (REPOSITORY / "docs" / (path or "api.md")).read_text("utf-8")
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert not anchor or anchor in {
            heading.lower().replace(" ", "-") for heading in headings
        }, link


def test_lines_are_short() -> None:
    lines = enumerate(PAGE.splitlines(), start=1)
    assert [number for number, line in lines if len(line) >= 160] == []
